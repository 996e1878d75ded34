"""Starting a run's processes, here or by others, and telling each of them its place."""
