"""What each contestant does on cores that others use too, in a process of its own."""
