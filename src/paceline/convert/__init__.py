"""Configurations of other programs to recipes; only the command `convert` imports this."""
