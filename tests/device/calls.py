"""A counter of the calls of torch that give the stand-in work."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {
    *("view", "as_strided", "select", "slice", "split", "split_with_sizes", "permute", "t", "transpose", "expand"),
    *("squeeze", "unsqueeze", "detach", "alias", "unbind", "_unsafe_view", "_reshape_alias", "unfold"),
    *("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"),
}
"""Operations that give the device no work."""


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch that give the device work; a call for a list of tensors counts once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = tree_leaves((args, kwargs or {}, result))
        if name not in VIEWS and any(isinstance(each, Tensor) and each.device.type == "npu" for each in tensors):
            self.found[name] += 1
        return result
