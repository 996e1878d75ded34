"""Metrics that come out the same however the samples were divided."""
