"""Visualization: image grids, overlays, confusion matrices and curves. All drawing is here."""
