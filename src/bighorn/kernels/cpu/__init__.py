"""The C library: fused kernels on the CPU."""

from bighorn.kernels.cpu.lamb import Lamb, why_not

__all__ = ["Lamb", "why_not"]
