"""What a person wants to know of a data set before training on it."""
