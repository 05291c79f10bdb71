"""The optimizers: thin classes over `bighorn.kernels`."""
