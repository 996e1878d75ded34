"""Readers of image, mask and video files."""
