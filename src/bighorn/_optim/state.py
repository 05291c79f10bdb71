"""State tensors: their dtypes and shapes, and their validation and conversion when an optimizer receives a state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bighorn._distributed import sharding
from bighorn._distributed.sharding import PLAIN
from bighorn._kernels import codec, rounding
from bighorn._kernels.rounding import Rounding
from bighorn._kernels.storage import is_freed

StateDtype = Literal["float32", "bfloat16", "int8", "int4"]
MOMENT_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": torch.uint8,
}
"""The dtypes of moments, under the names that checkpoints use; a byte of "int4" has two codes.

In int8 and int4, LAMB keeps both moments in blocks with scales (`_kernels/codec.py`), the second one in 8 bits beside a
first one in 4. CAME keeps the momentum in blocks; its second moment is averages of many elements, which take next to no
memory. float16 is for CAME's momentum, which is near 1; moments of the others have values below 6e-8, its least one.
"""

BLOCK_DTYPES = ("int8", "int4")
"""The names of the dtypes that are kept in blocks."""

REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of parameters and gradients, besides complex dtypes."""

MIN_8BIT_SIZE = 4096
"""Smaller tensors keep float32: int8 would save nothing there, and could round the gain of a norm."""

MIN_ROW = 8
"""The fewest elements of a row of a tensor of several matrices: a scale takes the bytes of as many codes of 4 bits."""

ZEROS = "zeros"
"""What a state tensor starts as that can start at any step."""

STEP_BYTES = 4
"""The bytes of a step count, a float32 as in torch. Above 2^24 it advances to the next float32 at each step."""


@dataclass(frozen=True)
class StateTensorSpec:
    """The dtype and dims of a state tensor.

    Attributes:
        dtype: The dtype of the tensor.
        dims: The parameter's dims that the tensor has, in order.
        block: The elements of a row that share one element of the tensor: `codec.BLOCK` for scales, 2 for packed codes.
            `dims` then count rows, and a further dim counts the blocks of a row. Default: None: each
            element has its own.
        numel: The number of elements of a vector that holds parts of several parameters' state, or a number for each
            slice on every rank. Default: None.
        starts_as: The name of the state tensor that it equals at first, or `ZEROS`, where a state without it goes on.
            Default: None, where such a state is refused.
    """

    dtype: torch.dtype
    dims: tuple[int, ...]
    block: int | None = None
    numel: int | None = None
    starts_as: str | None = None

    def like(self, param: Tensor) -> Tensor:
        """Return the tensor for a parameter or a shard of one, on the meta device and in its memory order."""
        shape = self._shape(param)
        return torch.empty_strided(shape, self._strides(param, shape), dtype=self.dtype, device="meta")

    def zeros(self, dense: Tensor) -> Tensor:
        """Return the tensor before the first step of a dense parameter: of its kind, with as many inner tensors."""
        shape = self._shape(dense)
        if dense.is_contiguous():
            return dense.new_zeros(shape, dtype=self.dtype)
        return dense.new_empty_strided(shape, self._strides(dense, shape), dtype=self.dtype).zero_()

    def _shape(self, param: Tensor) -> list[int]:
        if self.numel is not None:
            return [self.numel]
        whole = param.shape
        shape = [whole[dim] for dim in self.dims]
        if self.block is None:
            return shape
        rows, inner = (shape, whole[self.dims[-1] + 1 :].numel()) if shape else ([1], 1)
        return [*rows, -(-inner // self.block)]

    def _strides(self, param: Tensor, shape: list[int]) -> list[int]:
        """Return strides without gaps, in the order of the parameter's; blocks are contiguous."""
        order = [0] * len(shape) if self.block or not self.dims else [param.stride(dim) for dim in self.dims]
        strides, size = [1] * len(shape), 1
        for i in sorted(range(len(shape) - 1, -1, -1), key=order.__getitem__):
            strides[i], size = size, size * max(shape[i], 1)
        return strides


StateSpec = Mapping[str, StateTensorSpec]
"""A parameter's state tensors by name, besides `step`."""


def unsupported_reason(param: Tensor, state_dtype: str | None) -> str | None:
    """The reason why a parameter cannot be optimized with these dtypes, with the remedy, or None."""
    if not (param.dtype in REAL_DTYPES or param.is_complex()):
        return (
            f"its dtype is {param.dtype}, and steps are for {', '.join(map(str, REAL_DTYPES))} and complex ones: keep "
            "the parameter in one of these dtypes, and cast it where the model uses it"
        )
    if state_dtype in BLOCK_DTYPES and param.dtype in (torch.float64, torch.complex64, torch.complex128):
        return (
            f'its dtype is {param.dtype}, and state_dtype="{state_dtype}" is for real parameters of 32 bits or less: '
            "give it a group with another state_dtype"
        )
    return None


def moments_dtype(param: Tensor, state_dtype: str | None) -> torch.dtype:
    """The dtype of a parameter's moments: the requested one, or float64 for float64 and float32 for all others."""
    if state_dtype is not None:
        return MOMENT_DTYPES[state_dtype]
    return torch.float64 if param.dtype in (torch.float64, torch.complex128) else torch.float32


def all_dims(param: Tensor) -> tuple[int, ...]:
    """The dims of a state tensor that has all dims of its parameter."""
    return tuple(range(param.dim()))


def moments_spec(
    param: Tensor,
    dtypes: Mapping[str, torch.dtype],
    group: Mapping[str, Any],
    forms: codec.Forms,
    matrices: bool = False,
) -> StateSpec:
    """The specs of a parameter's moments, and of the scales of their blocks.

    Args:
        param: The parameter, as a real tensor.
        dtypes: The dtype of each moment. Instead of codes, small tensors, vectors and matrices of short rows get
            float32; a moment of 4 bits gets int8 if its rows have an odd number of elements.
        group: The options of its group.
        forms: The forms of the algorithm's moments.
        matrices: Whether the last two dims are matrices, within whose rows blocks are. Default: a row is all of an
            index of a layer's first dim.
    """
    dims = all_dims(param)
    if group["state_dtype"] not in BLOCK_DTYPES:
        return {name: StateTensorSpec(dtype, dims) for name, dtype in dtypes.items()}
    first = dims[: group["stacked"] + 1]
    rows = dims[:-1] if matrices else first
    width = param.shape[len(rows) :].numel()
    is_small = param.numel() < group["min_8bit_size"] or (rows != first and width < MIN_ROW)
    if is_small or param.dim() - group["stacked"] < 2:
        return {name: StateTensorSpec(torch.float32, dims) for name in dtypes}
    codes = {name: StateTensorSpec(dtype, dims) for name, dtype in dtypes.items()}
    for name in [name for name, dtype in dtypes.items() if forms[name][dtype].int4]:
        codes[name] = StateTensorSpec(torch.int8, dims) if width % 2 else StateTensorSpec(torch.uint8, rows, 2)
    return {**codes, **{f"{name}_scale": StateTensorSpec(torch.float32, rows, codec.BLOCK) for name in dtypes}}


def weight_spec(param: Tensor, weight_rounding: Rounding) -> StateSpec:
    """The specs of a parameter's aux state, with which storing the parameter loses nothing; none in 32 or 64 bits."""
    dims, aux = all_dims(param), rounding.AUX_STATE[weight_rounding if param.dtype in rounding.LOW else "nearest"]
    return {name: StateTensorSpec(dtype, dims, starts_as=ZEROS) for name, dtype in aux.items()}


def requantized(
    state: Mapping[str, Any], spec: Mapping[str, Tensor], shape: torch.Size, forms: codec.Forms, what: str
) -> dict[str, Any]:
    """Return a state whose moments are in blocks exactly if `spec` requires it, from any saved dtype.

    The moments of a parameter have its shape (on this rank), `shape`; only packed codes do not. Blocks in other rows,
    as earlier versions wrote for tensors of several matrices, are encoded anew.

    Aux state and a radius that `spec` does not have are dropped: they would be old when they are used again.

    Raises:
        ValueError: The scales do not fit their codes.
    """
    out = {name: value for name, value in state.items() if name in spec or name not in (*AUX_STATE_NAMES, "radius")}
    for name in forms:  # codes of one may be relative to an earlier one as it is stored
        values, scales = state.get(name), state.get(f"{name}_scale")
        if name not in spec or not isinstance(values, Tensor) or (f"{name}_scale" not in spec and scales is None):
            continue
        new = codec.form_of(forms, name, spec)
        if isinstance(scales, Tensor):
            old = codec.form_of(forms, name, state)
            whole = shape if old is not None and old.int4 else values.shape
            _check_codes(name, values, scales, whole, old, what)
            if old is new and scales.dim() == spec[f"{name}_scale"].dim():
                continue
            values = out[name] = codec.dequantize(forms, name, state, whole)
            del out[f"{name}_scale"]
        if new is not None and values.is_floating_point() and values.shape == shape:
            moment_spec = {key: spec[key] for key in (name, f"{name}_scale")}
            made = codec.quantize(forms, name, values, {**out, **moment_spec})
            out |= {key: value.view(spec[key].shape) for key, value in made.items()}
    return out


AUX_STATE_NAMES = tuple(name for mode in rounding.ROUNDING_MODES for name in rounding.AUX_STATE[mode])
"""The names of the aux state of all rounding modes."""

COMPENSATIONS = {rounding.AUX_STATE[mode]["compensation"] for mode in ("kahan", "kahan8")}
"""The dtypes of compensations, which are converted into each other."""


def _check_codes(
    name: str, values: Tensor, scales: Tensor, shape: torch.Size, form: codec.Form | None, what: str
) -> None:
    """Raise unless these are the codes of a moment of a shape, and the scales of their blocks."""
    if form is None:
        raise ValueError(
            f"state {name!r} of {what} has scales, but dtype {values.dtype}, which its codes never have: it "
            "is damaged. Load another checkpoint, or drop optimizer.state of this parameter"
        )
    leading = max(scales.dim() - 1, 1)
    expected = codec.scales_shape(shape, leading)
    codes = (*shape[:leading], shape[leading:].numel() // 2) if form.int4 else shape
    if scales.shape != expected or values.shape != codes:
        raise ValueError(
            f"state {name!r} of {what} has codes of shape {tuple(values.shape)}, and scales of shape "
            f"{tuple(scales.shape)}, not {expected}: it is damaged, or its blocks are not of {codec.BLOCK}. Load a "
            "checkpoint in float32, or drop optimizer.state of this parameter"
        )
    # On other devices the host would have to wait for the values.
    if scales.device.type == "cpu" and bool(
        ((scales < 0) | scales.isinf()).any() or codec.never_written(form, values).any()
    ):
        raise ValueError(
            f"state {name!r} of {what} holds codes or scales that are never written (a code -128 of 8 bits or -8 of 4, "
            "a scale below 0 or infinite): it is damaged. Load another checkpoint, or drop optimizer.state of this "
            "parameter"
        )


def real_view(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one with a last dim of 2, and any other unchanged."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def whole_view(param: Tensor) -> Tensor:
    """A real tensor with the shape, strides and dtype of the whole parameter."""
    return real_view(param if type(param) in PLAIN else sharding.whole(param))


def local_view(param: Tensor) -> Tensor:
    """The shard of a parameter on this rank, as a real tensor in the same memory."""
    return real_view(param if type(param) in PLAIN else sharding.local(param))


def refuse_freed(tensor: Tensor, what: str) -> None:
    """Raise a ValueError for a tensor whose memory was freed."""
    if is_freed(tensor):
        raise freed(what)


def freed(what: str) -> ValueError:
    """Return the error about a tensor whose memory was freed."""
    return ValueError(
        f"{what} has no memory: its storage was freed, as untyped_storage().resize_(0) does. Give it its memory back "
        "before the step"
    )


def overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory, as in an expanded tensor, so that writing one writes others."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def is_dense(tensor: Tensor, leading: int) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, with the first `leading` dims in order."""
    if tensor.is_contiguous():
        return True
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return False
    inner = [math.prod(tensor.shape[i + 1 :]) for i in range(leading)]
    return tensor.numel() == 0 or list(tensor.stride()[:leading]) == inner


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same memory order. The strides of dims of size 1 are ignored."""
    if a.stride() == b.stride() or a.numel() == 0:
        return True
    return all(i == j for i, j, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def in_layout_of(like: Tensor, value: Tensor, device: torch.device) -> Tensor:
    """Return `value` on a device, in the memory order and dtype of `like`; without a copy if nothing differs."""
    if value.dtype == like.dtype and value.device == device and same_layout(value, like):
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).copy_(value)


def init_or_validate_state(
    param: Tensor, dense: Tensor, spec: StateSpec, state: Mapping[str, Any], forms: codec.Forms, what: str
) -> dict[str, Any]:
    """Return the whole state of a parameter: the present tensors, checked and converted, or zeros if there are none.

    Args:
        param: The parameter. If it is distributed, its state is distributed in the same way.
        dense: The shard on this rank, or the whole parameter, as kernels use it (real, dense).
        spec: The state tensors of the parameter, besides `step`.
        state: The present state.
        forms: The forms of the algorithm's moments.
        what: The parameter's name in messages.

    Raises:
        ValueError: A tensor of another shape or distributed in another way, a `step` that is not a count, or a state
            that lacks a tensor.
    """
    if not state and type(param) in PLAIN:
        return {"step": _no_steps(dense), **{name: each.zeros(dense) for name, each in spec.items()}}
    _check_blocks(param, spec, what)
    fresh = not any(name in state for name in (*spec, "step"))
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    plain = set(map(type, (param, *tensors.values()))) <= PLAIN
    _refuse_without_values(tensors, param, spec, what, plain=plain)
    likes = {name: each.like(dense) for name, each in spec.items()}
    wholes = {} if plain else {name: each.like(whole_view(param)) for name, each in spec.items()}
    local = dict(state)
    for name, value in tensors.items():
        local[name] = real_view(value) if plain else _local(name, real_view(value), param, spec, wholes, what)
    out = requantized(local, likes, dense.shape, forms, what)
    lost = out.get("compensation")
    if isinstance(lost, Tensor) and "compensation" in likes and lost.dtype in COMPENSATIONS:
        out["compensation"] = rounding.recoded(lost, likes["compensation"].dtype, dense.dtype)
    for name, each in spec.items():
        if not fresh and each.starts_as is not None and each.starts_as in state:
            out.setdefault(name, out[each.starts_as].clone())
    if fresh or "step" in out:
        out["step"] = _no_steps(dense) if fresh else _count(out["step"], dense, what)
    for name, like in likes.items():
        if fresh or (name not in out and spec[name].starts_as == ZEROS):
            out[name] = _zeros(spec[name], dense, what)
        elif name in out:
            out[name] = _placed(name, out[name], like, dense.device, what)
    missing = [name for name in ("step", *spec) if name not in out]
    if missing:
        raise ValueError(
            f"the state of {what} lacks {missing[0]!r} and has {', '.join(map(repr, state))}: it is half a state, or "
            "was made with other options, and going on would take steps of a wrong size. Load the matching "
            "checkpoint, or drop optimizer.state of this parameter"
        )
    if not plain:
        for name, each in spec.items():
            out[name] = sharding.distributed(out[name], param, each.dims, wholes[name], state.get(name))
    return out


def _zeros(spec: StateTensorSpec, dense: Tensor, what: str) -> Tensor:
    """Return a state tensor before the first step; a wrapper tensor may make none of another shape or dtype."""
    try:
        return spec.zeros(dense)
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"{what} is a {type(dense).__name__}, of which no state of {spec.dtype} can be made"
            f"{f': {error}' * bool(str(error))}. Keep the parameter in a floating dtype, or freeze it"
        ) from error


def _check_blocks(param: Tensor, spec: StateSpec, what: str) -> None:
    # Codes of 4 bits are dithered by the positions of elements, which follow one another in a shard of dim 0 alone.
    rows = [set(each.dims[:1] if each.block == 2 else each.dims) for each in spec.values() if each.block]
    layout = sharding.layout_of(param) if rows else None
    if layout is not None and not layout.shard(param.shape).split <= set.intersection(*rows):
        raise ValueError(
            f"{what} is distributed as {layout}, which cuts through the blocks that its rows are kept in: "
            'give it another state_dtype than "int8" or "int4" in its group, or cut it up along dim 0'
        )


def _local(name: str, value: Tensor, param: Tensor, spec: StateSpec, wholes: Mapping[str, Tensor], what: str) -> Tensor:
    """The shard of a state tensor on this rank."""
    if name not in spec:
        return sharding.local(value)
    try:
        return sharding.part_of(value, param, spec[name].dims, wholes[name].shape)
    except ValueError as error:
        raise ValueError(f"state {name!r} of {what} {error}; or drop optimizer.state of this parameter") from None


def _refuse_without_values(
    tensors: Mapping[str, Tensor], param: Tensor, spec: StateSpec, what: str, *, plain: bool
) -> None:
    """Raise a ValueError for a state tensor that is not dense, or has no values although its parameter has."""
    for name, value in tensors.items():
        if not (name in spec or name == "step" or str(name).endswith("_scale")):
            continue
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        if kind == "strided" and value.is_meta and not param.is_meta:
            kind = "on the meta device"
        if kind != "strided":
            raise ValueError(
                f"state {name!r} of {what} is a tensor that is {kind}, expected a dense one with values: it is "
                "damaged. Load another checkpoint, or drop optimizer.state of this parameter"
            )
        if is_freed(value if plain else sharding.local(value)):
            raise freed(f"state {name!r} of {what}")


def _placed(name: str, value: object, like: Tensor, device: torch.device, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"state {name!r} of {what} is a {type(value).__name__}, expected a tensor: it is damaged. Load another "
            "checkpoint, or drop optimizer.state of this parameter"
        )
    if value.shape != like.shape:
        raise ValueError(
            f"state {name!r} of {what} has shape {tuple(value.shape)}, but the parameter needs "
            f"{tuple(like.shape)}: it is another model's, or was made with other options. Load the matching "
            "checkpoint, or drop optimizer.state of this parameter"
        )
    if value.dtype != like.dtype and not (value.is_floating_point() and like.is_floating_point()):
        bare = " (values in 8 bits need their scales)" if value.dtype in (torch.int8, torch.uint8) else ""
        raise ValueError(
            f"state {name!r} of {what} has dtype {value.dtype}, expected {like.dtype}{bare}: load the matching "
            "checkpoint, or drop optimizer.state of this parameter"
        )
    return in_layout_of(like, value, device)


MOST_STEPS = 2.0**63
"""The bound of step counts, since kernels use int64."""


def _no_steps(param: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=param.device)


def _count(step: object, param: Tensor, what: str) -> Tensor:
    value = torch.tensor(step, device="cpu") if isinstance(step, (int, float)) else step
    valid = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if (
        not isinstance(value, Tensor)
        or not valid
        or (value.device.type == "cpu" and not 0 <= float(value) < MOST_STEPS)
    ):
        # On other devices the host would have to wait for the value.
        said = f"{step!r}" if isinstance(step, (Tensor, int, float)) else f"a {type(step).__name__}"
        raise ValueError(
            f"state 'step' of {what} is {said}, expected how many steps it took, 0 or more: it is damaged. Load "
            "another checkpoint, or drop optimizer.state of this parameter"
        )
    return value.reshape(()).to(device=param.device, dtype=torch.float32)
