"""Data sets in one file, ready to be mapped into memory."""
