"""Parameters by name: exclusions, and names without the prefixes of wrappers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from torch import Tensor, nn

from bighorn._arguments import letters, nearest

VECTORS: Final = "ndim<2"
"""The word that excludes biases and the scales of norms by their shape, in place of a regular expression."""

Exclusion = Literal["ndim<2"] | Sequence[str] | Callable[[str, Tensor], bool]
"""Regular expressions that are searched for in a parameter's name, that word, or a function of name and parameter."""

Names = nn.Module | Mapping[str, Tensor]
"""The source of names if a trainer passes bare parameters."""


WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""Parts of names that torch.compile, FullyShardedDataParallel, checkpoint_wrapper and Lightning add, at any depth."""

DATA_PARALLEL = "module."
"""The prefix that DistributedDataParallel adds to every name. A model's own submodule may have this name too."""

REMEDIES = {
    Tensor: "pass [tensor]",
    nn.Module: "pass model.named_parameters()",
    Mapping: "pass its items(), if it holds parameters by name, or [group], if it is a group",
}
"""The remedies for types that are often passed in place of a list of parameters."""


def check_exclusion(name: str, value: object) -> Exclusion | None:
    """Return a valid exclusion as it was given.

    Raises:
        TypeError: The value is neither a list of regular expressions nor callable.
        ValueError: A regular expression does not compile.
    """
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    if value == VECTORS:
        return [VECTORS]
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise TypeError(
            f"{name} must be regular expressions in a list, {VECTORS!r} or a callable (name, param) -> bool, "
            f"not {value!r}"
        )
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}") from None
    return list(value) or None


def excludes(exclusion: Exclusion | None, name: str | None, param: Tensor, stacked: bool = False) -> bool:
    """Whether an exclusion matches a parameter. The slices of a stacked one have a dim less."""
    if exclusion is None:
        return False
    if callable(exclusion):
        return name is not None and bool(exclusion(name, param))
    if VECTORS in exclusion and param.dim() - stacked < 2:
        return True
    return name is not None and any(re.search(pattern, name) for pattern in exclusion)


def needs_names(exclusion: Exclusion | None) -> bool:
    """Whether an exclusion depends on names."""
    return exclusion is not None and (callable(exclusion) or any(pattern != VECTORS for pattern in exclusion))


def unwrapped(name: str, prefix: str = "") -> str:
    """Return a parameter's name in the model without its wrappers.

    Args:
        name: The name with wrappers.
        prefix: The result of `common_prefix` for all names. Default: none.

    Example:
        >>> unwrapped("module._orig_mod.1.weight", "module.")
        '1.weight'
    """
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), last]).removeprefix(prefix)


def common_prefix(names: Iterable[str]) -> str:
    """Return `module.` as often as every name begins with it, so that only wrappers of the whole model are included.

    Example:
        >>> common_prefix(["module.0.bias", "module._orig_mod.module.bias"]), common_prefix(["module.bias", "bias"])
        ('module.', '')
    """
    bare = [unwrapped(name) for name in names]
    prefix = ""
    while bare and all(name.startswith(prefix + DATA_PARALLEL) for name in bare):
        prefix += DATA_PARALLEL
    return prefix


def check_matches(option: str, exclusion: Exclusion | None, names: Sequence[str]) -> None:
    """Warn about patterns that match none of the names.

    Raises:
        ValueError: None of the patterns matches any.
    """
    if exclusion is None or callable(exclusion) or not names:
        return
    used = [pattern for pattern in exclusion if pattern == VECTORS or any(re.search(pattern, name) for name in names)]
    # Lists for BERT spell one name in several ways: LayerNorm, layer_norm.
    idle = [pattern for pattern in exclusion if letters(pattern) not in map(letters, used)]
    if not idle:
        return
    patterns = f"{', '.join(map(repr, idle))} {'matches' if len(idle) == 1 else 'match'}"
    text = (
        f"{option}: {patterns} none of {len(names)} parameter names, the nearest of which are {nearest(idle, names)}. "
        "Names do not include wrappers (no 'module.' of DistributedDataParallel, no '_orig_mod.' of "
        "torch.compile); 'ndim<2' finds biases and norms under any name"
    )
    if not used:
        raise ValueError(f"{text}: correct the patterns, or leave {option} out")
    warnings.warn(text, stacklevel=7)  # at the call of Lamb or Came, above two constructors and torch's two wrappers


def named(params: object, names: Names | None) -> list[Any]:
    """Return parameters in a list, as (name, parameter) pairs if `names` is given and they are not pairs already.

    Raises:
        TypeError: As for `listed`.
        ValueError: `names` does not contain a parameter.
    """
    params = [params] if isinstance(params, Tensor) else listed(params)
    if names is None or any(isinstance(param, tuple) for param in params):
        return params
    name_of = names_of(names)
    missing = [i for i, param in enumerate(params) if id(param) not in name_of]
    if missing:
        raise ValueError(f"names has no name for params[{missing[0]}]; pass the module that owns all of them")
    return [(name_of[id(param)], param) for param in params]


def listed(params: object, name: str = "params") -> list[Any]:
    """Return the value of `params`, or of another argument of that kind, as a list.

    Raises:
        TypeError: The value has no order, or is not a kind of list.
    """
    for kind, remedy in REMEDIES.items():
        if isinstance(params, kind):
            raise TypeError(f"{name} must be a list, not a {type(params).__name__}: {remedy}")
    if isinstance(params, (set, frozenset)):
        raise TypeError(f"{name} must be ordered, but a set is not: pass a list")
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise TypeError(f"{name} must be parameters, pairs of name and parameter, or groups in a list, not {params!r}")
    return list(params)


def names_of(names: object) -> dict[int, str]:
    """Return the name of each parameter, by its `id`.

    Raises:
        TypeError: `names` is neither a module nor a mapping of names to tensors.
        ValueError: `names` has two names for one parameter, of which an exclusion would see one.
    """
    if isinstance(names, nn.Module):
        names = dict(names.named_parameters())
    if not isinstance(names, Mapping) or not all(
        isinstance(name, str) and isinstance(param, Tensor) for name, param in names.items()
    ):
        raise TypeError(f"names must be a module or a mapping of names to parameters, not {type(names).__name__}")
    name_of: dict[int, str] = {}
    for name, param in names.items():
        if name_of.setdefault(id(param), name) != name:
            raise ValueError(
                f"names calls one parameter {name_of[id(param)]!r} and {name!r}: keep one of them, as names=model does"
            )
    return name_of
