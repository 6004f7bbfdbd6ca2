"""The Python engine: Python only, hooks on few autograd nodes."""
