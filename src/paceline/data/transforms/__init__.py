"""What is done to samples and batches between reading and the model."""
