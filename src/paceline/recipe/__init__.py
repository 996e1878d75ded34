"""From a recipe file to live objects; no other room knows recipes."""
