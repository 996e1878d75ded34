"""From a recipe file to live objects; packages below know nothing about recipes."""
