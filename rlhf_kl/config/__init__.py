"""Configuration: the keys and their meaning (`schema`), and from a file to a checked object (`load`)."""
