"""Damage to a file or to a dict of state after it was written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Keys = tuple[Any, ...]
MISSING = object()
WRONG: list[Any] = [None, -1, 0, 1, "text", [1], {"a": 1}, (), float("nan"), 10**400, True, torch.ones(2), MISSING]

TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "half": lambda t: t[: len(t) // 2] if t.dim() else t.expand(2),
    "longer": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "transposed": lambda t: t.mT if t.dim() > 1 else t.reshape(1, -1),
    "float64": lambda t: t.to(torch.float64),
    "integers": lambda t: t.to(torch.int64),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.to(torch.bool),
    "nan": lambda t: torch.full_like(t, float("nan"), dtype=torch.float32),
    "negative": lambda t: torch.full_like(t, -1, dtype=torch.float32),
    "huge": lambda t: torch.full_like(t, 1e38, dtype=torch.float32),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "list": lambda t: t.tolist(),
    "expanded": lambda t: t.flatten()[:1].expand(t.shape) if t.dim() and t.numel() else t,
}


def damaged_bytes() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Return a strategy of up to three changes: flip bits, truncate, zero a range, or repeat bytes."""
    place = st.floats(0, 1, exclude_max=True)
    one = st.one_of(
        st.builds(_flipped, place, st.integers(0, 7)),
        st.builds(_cut, place),
        st.builds(_zeroed, place, st.integers(1, 4096)),
        st.builds(_doubled, place, st.integers(1, 4096)),
    )
    return st.lists(one, min_size=1, max_size=3).map(_all_of)


def _all_of(parts: list[Callable[[bytes], bytes]]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        for part in parts:
            content = part(content)
        return content

    return damage


def _flipped(place: float, bit: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        if not content:
            return content
        at = int(place * len(content))
        return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]

    return damage


def _cut(place: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(place * len(content))]


def _zeroed(place: float, length: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        at = int(place * len(content))
        end = min(len(content), at + length)
        return content[:at] + bytes(end - at) + content[end:]

    return damage


def _doubled(place: float, length: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        at = int(place * len(content))
        return content[: at + length] + content[at:]

    return damage


def keys_of(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the paths of keys to every value, and of a missing key in each dict."""
    for key in [*value, "newer"] if isinstance(value, dict) else range(len(value)):
        yield (*keys, key)
        if key != "newer" and isinstance(value[key], (dict, list)):
            yield from keys_of(value[key], (*keys, key))


@st.composite
def edits(draw: st.DrawFn, whole: Any) -> Any:
    """Draw a copy with 1 to 3 values that are missing, of another kind, or tensors of another shape or dtype."""
    edited = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        keys = draw(st.sampled_from(list(keys_of(edited)) or [("newer",)]))
        inner = edited
        for key in keys[:-1]:
            inner = inner[key]
        old = inner.get(keys[-1]) if isinstance(inner, dict) else inner[keys[-1]]
        if isinstance(old, Tensor) and _plain(old) and draw(st.booleans()):
            new = TENSORS[draw(st.sampled_from(sorted(TENSORS)))](old)
        else:
            new = draw(st.sampled_from(WRONG))
        if new is not MISSING:
            inner[keys[-1]] = copy.deepcopy(new)  # a later edit may change it
        elif old is not None:
            del inner[keys[-1]]
    return edited


def _plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_complex()
