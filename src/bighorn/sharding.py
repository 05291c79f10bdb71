"""What Bighorn knows of sharded parameters: how to tell them, so that no wrong norm is taken, and their local part."""

from __future__ import annotations

from torch import Tensor


def why_refused(param: Tensor) -> str | None:
    """Why a parameter's layer-wise norm cannot be taken from what lies on this rank, or None."""
    if getattr(param, "_fsdp_flattened", False):
        return (
            "it belongs to FullyShardedDataParallel, which flattens layers into one tensor, so layer-wise norms have "
            "no meaning there; use DistributedDataParallel"
        )
    if _is_distributed(param):
        return "it is a DTensor, and sharded parameters are not supported yet; use DistributedDataParallel"
    return None


def is_sharded(param: Tensor) -> bool:
    """Whether ranks hold different pieces of it, so that one rank does not see all of its gradient."""
    return getattr(param, "_fsdp_flattened", False) or _is_distributed(param)


def local(tensor: Tensor) -> Tensor:
    """What lies on this rank, in the same memory; a tensor that is not distributed as it is."""
    return tensor.to_local() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")
