"""What a person sees of a run: console, metrics file, TensorBoard and pictures."""
