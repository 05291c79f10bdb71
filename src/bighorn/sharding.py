"""What Bighorn knows of sharded parameters: so far, how to tell them, so that no wrong norm is ever taken."""

from __future__ import annotations

from torch import Tensor


def why_refused(param: Tensor) -> str | None:
    """Why a parameter's layer-wise norm cannot be taken from what lies on this rank, or None."""
    if getattr(param, "_fsdp_flattened", False):
        return (
            "it belongs to FullyShardedDataParallel, which flattens layers into one tensor, so layer-wise norms have "
            "no meaning there; use DistributedDataParallel"
        )
    if hasattr(param, "placements") and hasattr(param, "to_local"):
        return "it is a DTensor, and sharded parameters are not supported yet; use DistributedDataParallel"
    return None
