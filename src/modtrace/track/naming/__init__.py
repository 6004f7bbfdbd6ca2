"""The names of modules: the path by which a call reaches each, below its caller, without wrappers."""
