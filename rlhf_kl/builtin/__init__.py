"""The built-in world `builtin:reviews`: a grammar, what is written with it, and a scorer that knows it."""
