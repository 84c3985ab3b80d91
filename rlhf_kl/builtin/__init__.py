"""The built-in world `builtin:reviews`: a grammar, texts written with it, and a scorer that reads with it."""
