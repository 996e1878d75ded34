"""What a run will need before it starts: its real training step on fake tensors."""
