"""State on disk: written atomically, verified when read, never pickled."""
