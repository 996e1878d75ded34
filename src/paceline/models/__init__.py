"""Networks by name, and fitting weights into them."""
