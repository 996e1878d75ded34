"""Images for people: grids, overlays, confusion matrices and curves. Nothing outside of this room draws."""
