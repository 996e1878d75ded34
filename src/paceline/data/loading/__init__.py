"""Samples in the order of a run, as batches: read here, by threads, by processes or by DALI."""
