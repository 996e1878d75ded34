"""Losses as numerators and denominators."""
