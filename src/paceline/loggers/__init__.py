"""Loggers: console, JSONL, TensorBoard, log files and the results table."""
