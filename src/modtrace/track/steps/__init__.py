"""Training steps, told by the optimizers that step, in compiled code too."""
