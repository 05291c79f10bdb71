"""The C library: fused kernels on the CPU."""
