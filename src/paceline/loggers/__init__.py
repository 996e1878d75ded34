"""Loggers: what a run shows and records."""
