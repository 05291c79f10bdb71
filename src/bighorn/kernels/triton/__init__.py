"""Triton: fused kernels on GPUs. It is imported when a tensor asks for it, and bighorn works without it."""

from bighorn.kernels.triton.lamb import Lamb, why_not, why_not_shard

__all__ = ["Lamb", "why_not", "why_not_shard"]
