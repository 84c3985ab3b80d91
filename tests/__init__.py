"""A package with a file of its own: a library may bring another one of this name."""
