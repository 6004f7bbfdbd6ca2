"""The portable engine: Python only, hooks on few autograd nodes."""
