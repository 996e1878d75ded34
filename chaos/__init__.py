"""Faults and hostile input in their long form; a short form of each is among the tests."""
