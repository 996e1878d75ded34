"""How a model is replicated or sharded over processes."""
