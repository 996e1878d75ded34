"""Indexes of samples: lists, folders, labels, splits."""
