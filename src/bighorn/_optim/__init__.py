"""The optimizers: thin classes over `bighorn._kernels`."""
