"""Lists of tensors in few calls, as in torch's own foreach optimizers.

A call costs the host as much for a thousand tensors as for one, so slots are stepped together, in groups whose
temporaries are bounded. The optimizer adds the arithmetic of a group, which is the same for shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Generic

import torch
from torch import Tensor

from bighorn._capabilities import wide
from bighorn._kernels.arithmetic import compute_dtype
from bighorn._kernels.bucket import Bucket, Shard, slots_with_grad
from bighorn._kernels.codec import (
    BLOCK,
    Form,
    dequantize,
    form_of,
    from_codes,
    quantize,
    scales_shape,
    to_codes,
)
from bighorn._kernels.options import Options
from bighorn._kernels.reference.stepper import Stepper
from bighorn._kernels.rounding import (
    AUX_STATE,
    dither_along,
    dither_of_runs,
    load_weight,
    positions,
    random_bits,
    random_bits_of_runs,
    rng_key,
    store_weight,
)
from bighorn._square_sums import square_sums

GROUP_BYTES = 1 << 30
"""The bytes of a group's temporaries, its largest tensor's apart: a larger model is stepped in several groups."""

CACHED_BYTES = 1 << 24
"""The same limit on a CPU, so that temporaries stay in its cache; more groups cost little there."""


def temporary_bytes(bucket: Bucket[Options]) -> int:
    """Return the bytes of temporaries per element, as `tests/device/test_counts.py` measures them."""
    o, x = bucket.options, bucket.params[0]
    if o.int4:
        return 26
    if x.itemsize >= 4 and all(tensors[0].itemsize >= 4 for tensors in bucket.state.values()):
        return x.itemsize * (2 if getattr(o, "cautious", False) or getattr(o, "hyperball", False) else 1)
    if o.weight_rounding == "kahan8":
        return 26
    if o.blocks:
        return 16
    if x.itemsize >= 4 and getattr(o, "second_moment", None) != "amsgrad":
        return 8
    return 12


def group_slots(bucket: Bucket[Options], among: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of slots with bounded temporaries. Shards count as whole tensors, so ranks form equal groups."""
    slots: list[int] = []
    limit = CACHED_BYTES if bucket.metrics.device.type == "cpu" else GROUP_BYTES
    total = largest = 0
    for i in among:
        shape = bucket.shards[i].shape if bucket.shards else bucket.params[i].shape
        size = math.prod(shape)
        if bucket.options.blocks:
            size = math.prod(scales_shape(shape, scales_of(bucket.state)[i].dim() - 1)) * BLOCK
        if slots and (total + size - max(largest, size)) * temporary_bytes(bucket) > limit:
            yield slots
            slots, total, largest = [], 0, 0
        slots.append(i)
        total, largest = total + size, max(largest, size)
    if slots:
        yield slots


def scales_of(state: Mapping[str, list[Tensor]]) -> list[Tensor]:
    """Return the scales of a moment that is kept in blocks, as all of them have the same blocks."""
    return next(tensors for name, tensors in state.items() if name.endswith("_scale"))


class Group(Generic[Options]):
    """Slots of a bucket that are stepped together.

    A step that is not applied computes with gradients of zeros and moments that do not decay, and moves no weight:
    copies for a choice between old and new values would be larger than all other temporaries.
    """

    def __init__(self, bucket: Bucket[Options], slots: list[int]) -> None:
        self.bucket, self.slots = bucket, slots
        first = slots[0] if slots else 0
        span = range(first, first + len(slots))
        self.span = slice(span.start, span.stop) if slots == list(span) else None
        """The slots, if they follow one another."""
        self.x: list[Tensor] = []
        self.state: dict[str, list[Tensor]] = {}
        self.steps = [bucket.steps[i] for i in slots]
        self.metrics = [bucket.metrics[i] for i in slots]
        self.dtype, self.device = compute_dtype(bucket.params[0]), bucket.metrics.device
        self.wide = wide(self.device)
        self.shards = [bucket.shards[i] if bucket.shards else Shard.whole(tuple(bucket.params[i].shape)) for i in slots]
        self.forms = bucket.options.forms

    def step(self, scale: Tensor | float, apply_mask: Tensor | None) -> Iterator[Tensor]:
        """Make one step; it yields sums over shards, as `reference.Stepper.sharded_step`."""
        raise NotImplementedError

    def counts(self) -> Tensor:
        """Return the number of this step for each slot."""
        return torch.stack(self.steps).to(self.wide) + 1

    def write_metrics(self, columns: Sequence[Tensor], apply_mask: Tensor | None) -> None:
        """Write the metrics of a step, each with one value for each slot."""
        table = torch.stack(list(columns), dim=1)
        if apply_mask is not None:
            table = torch.where(apply_mask, table, torch.stack(self.metrics))
        torch._foreach_copy_(self.metrics, list(table.unbind()))

    @property
    def grads(self) -> list[Tensor]:
        """This step's gradients."""
        return [self.bucket.grads[i] for i in self.slots]

    # ---- gradients and scalars ---------------------------------------------------------------------------------------

    def gradients(self, scale: Tensor | float, copy: bool) -> list[Tensor]:
        """Return the scaled gradients in the dtype of the arithmetic; without `copy` they may be the gradients."""
        grads = self.grads
        if self.bucket.options.maximize:
            scale = -scale
        scaled = isinstance(scale, Tensor) or scale != 1
        if all(grad.dtype == self.dtype for grad in grads):
            return list(torch._foreach_mul(grads, scale)) if scaled or copy else grads
        grads = widened(grads, self.dtype)
        if scaled:
            torch._foreach_mul_(grads, scale)
        return grads

    def blank(self, values: list[Tensor], apply_mask: Tensor | None) -> None:
        """Write zeros into values if the step is not applied: times 0 a NaN is a NaN, but its bits are 0."""
        if apply_mask is None:
            return
        if self.device.type == "xla":  # it has no views of bits, and calls cost nothing in its graph
            torch._foreach_copy_(values, [torch.where(apply_mask, each, 0.0) for each in values])
            return
        bits = torch.int64 if self.dtype == torch.float64 else torch.int32
        torch._foreach_mul_([each.view(bits) for each in values], apply_mask.to(bits))

    def unless(self, apply_mask: Tensor | None, value: Tensor | float, otherwise: float) -> Tensor | float:
        """Return a factor, or the other one in a step that is not applied."""
        if apply_mask is None:
            return value
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=self.dtype, device=self.device)
        return torch.where(apply_mask, value, otherwise)

    def subtract(self, x: list[Tensor], u: list[Tensor], lr: Tensor | float, apply_mask: Tensor | None) -> None:
        """Subtract `lr`, one number or one for each slot, times u from the weights."""
        lr = self.unless(apply_mask, lr, 0.0)
        if isinstance(lr, Tensor):
            torch._foreach_addcmul_(x, u, self.each(lr.expand(len(x))), value=-1)
        else:
            torch._foreach_add_(x, u, alpha=-lr)

    def each(self, values: Tensor) -> list[Tensor]:
        """Return the values of the slots, in the dtype of the arithmetic."""
        return list(values.to(self.dtype).unbind())

    # ---- cautious steps ----------------------------------------------------------------------------------------------

    def agreement(self, g: list[Tensor], m: list[Tensor]) -> list[Tensor]:
        """Return 1 where the momentum has the gradient's sign and 0 elsewhere; nothing if steps are not cautious."""
        if not getattr(self.bucket.options, "cautious", False):
            return []
        agree = list(torch._foreach_sign(g))
        torch._foreach_mul_(agree, m)
        torch._foreach_sign_(agree)
        torch._foreach_clamp_min_(agree, 0.0)
        return agree

    def keep(self, agree: list[Tensor], u: list[Tensor]) -> Iterator[Tensor]:
        """Zero the elements of u that do not agree, and divide the others by their share. `agree` is consumed."""
        torch._foreach_mul_(u, agree)
        kept = torch.stack(torch._foreach_norm(agree, 1, dtype=self.wide))
        agree.clear()
        yield kept
        shares = torch._foreach_div(list(kept.unbind()), [float(shard.numel) for shard in self.shards])
        torch._foreach_clamp_min_(shares, 1e-3)
        torch._foreach_div_(u, self.each(torch.stack(shares)))

    # ---- moments -----------------------------------------------------------------------------------------------------

    def load(self, name: str) -> list[Tensor]:
        """Return a moment to compute in: itself, or copies in the dtype of the arithmetic."""
        if f"{name}_scale" not in self.state:
            return widened(self.state[name], self.dtype)
        if self.bucket.options.int4:
            stored = self._of_blocks(self._form(name).relative, name)
            return self.blocks.parts(dequantize(self.forms, name, stored), self.x)
        codes = self.blocks.whole(self.state[name], dtype=torch.float32)
        scales = self._of_blocks(f"{name}_scale")[f"{name}_scale"]
        return self.blocks.parts(from_codes(codes.unsqueeze(1), scales, self._form(name)).squeeze(1), self.x)

    def store(self, name: str, values: list[Tensor], t: Tensor, apply_mask: Tensor | None) -> list[Tensor]:
        """Store a moment, and return the values as they are stored. The given values are consumed."""
        if not isinstance(values, Parts):
            if values is not self.state[name]:
                torch._foreach_copy_(self.state[name], values)
                torch._foreach_copy_(values, self.state[name])
            return values
        form = self._form(name)
        if self.bucket.options.int4:
            state = self._of_blocks(form.relative)
            new = quantize(self.forms, name, values.take(), state, self._dither(t))
            self._write(new, apply_mask)
            return self.blocks.parts(dequantize(self.forms, name, state | new), self.x)
        codes, scales = to_codes(values.take(), form, self._dither(t))
        self._write({name: codes.squeeze(1), f"{name}_scale": scales}, apply_mask)
        return self.blocks.parts(from_codes(codes, scales, form).squeeze(1), self.x)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the slots' moments."""
        return Blocks(scales_of(self.state), self.x)

    def _form(self, name: str) -> Form:
        form = form_of(self.forms, name, self._of_blocks())
        assert form is not None
        return form

    def _of_blocks(self, *names: str) -> dict[str, Tensor]:
        """Return a state for the codec: these moments or scales with a row for each block, others of any tensor."""
        state = {key: each[0].flatten(0, -2) if "scale" in key else each[0] for key, each in self.state.items()}
        for key in [each for name in names for each in (name, f"{name}_scale") if each in state]:
            width = 1 if key.endswith("_scale") else BLOCK // 2 if self._form(key).int4 else BLOCK
            state[key] = self.blocks.whole(self.state[key], width)
        return state

    def _write(self, wholes: dict[str, Tensor], apply_mask: Tensor | None) -> None:
        """Write codes and scales, a row for each block."""
        for key, whole in wholes.items():
            if apply_mask is not None:
                whole = torch.where(apply_mask, whole, self._of_blocks(key)[key].to(whole.dtype))
            torch._foreach_copy_(self.state[key], self.blocks.parts(whole, self.state[key]))

    # ---- weights -----------------------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """Return the values that the parameters stand for: themselves, or copies in the dtype of the arithmetic."""
        rounding = self.bucket.options.weight_rounding
        if rounding == "nearest" or self.x[0].dtype == self.dtype:
            return widened(self.x, self.dtype)
        kept = {name: flat(self.state[name]) for name in AUX_STATE[rounding]}
        return parted(load_weight(flat(self.x), kept), self.x)

    def store_weights(self, values: list[Tensor], t: Tensor, apply_mask: Tensor | None) -> None:
        """Round weights, and store them with the aux state of their rounding mode."""
        if values is self.x:
            return
        if not isinstance(values, Parts):
            torch._foreach_copy_(self.x, values)
            return
        rounding, stored = self.bucket.options.weight_rounding, {"x": self.x, **self.state}
        bits = self._random_bits(t) if rounding == "stochastic" else None
        for name, new in store_weight(values.take(), self.x[0].dtype, rounding, bits).items():
            if apply_mask is not None:
                new = torch.where(apply_mask, new, flat(stored[name]))
            torch._foreach_copy_(stored[name], parted(new, self.x))

    # ---- random bits -------------------------------------------------------------------------------------------------

    def _keys(self) -> Tensor:
        """Return the keys of the slots' random bits, which are sent to the device when they change."""
        seed = self.bucket.options.rounding_seed
        if self._sent is None or self._sent[0] != seed:
            self._sent = seed, sent([rng_key(seed, self.bucket.param_ids[i]) for i in self.slots], self.device)
        return self._sent[1]

    _sent: tuple[int, Tensor] | None = None

    def _dither(self, t: Tensor) -> Tensor:
        """Return the dither of the elements of all blocks."""
        return dither_of_runs(self._keys(), t.to(torch.int64), self.blocks.counts, self._along_blocks)

    @cached_property
    def _along_blocks(self) -> tuple[Tensor, Tensor]:
        rows = []
        for i, shard, scale in zip(self.slots, self.shards, scales_of(self.state), strict=True):
            leading = scale.dim() - 1
            firsts = (*shard.size[:leading], *[1] * (len(shard.size) - leading))
            at = positions(firsts, shard.offset, shard.shape, self.device).flatten()
            rows.append(self.bucket.slot_offsets[i] + at)
        return dither_along(self.blocks.starts(rows)), dither_along(torch.arange(BLOCK, device=self.device))

    def _random_bits(self, t: Tensor) -> Tensor:
        """Return random bits for the elements of all slots."""
        keys, t = self._keys(), t.to(torch.int64)
        if self._runs is not None:
            return random_bits_of_runs(keys, t, *self._runs, [x.numel() for x in self.x])
        found = []
        for i, shard, key, at in zip(self.slots, self.shards, keys.unbind(), t.unbind(), strict=True):
            index = self.bucket.slot_offsets[i] + shard.positions(self.device)
            found.append(random_bits(key, at, index).expand(shard.size).flatten())
        return torch.cat(found)

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor] | None:
        """The positions of the slots' first elements in their parameters, and in all slots; None for other boxes."""
        firsts = []
        for i, shard in zip(self.slots, self.shards, strict=True):
            (count, _), *others = shard.runs
            first = self.bucket.first_position(i)
            if others or first >> 32 != (first + count) >> 32:
                return None
            firsts.append(first)
        starts = [0, *itertools.accumulate(x.numel() for x in self.x[:-1])]
        return sent(firsts, self.device), sent(starts, self.device)


class ListStepper(Stepper[Options]):
    """An algorithm for some buckets on one device, in groups."""

    group: type[Group[Options]]

    def refresh(self) -> None:
        """Make the groups of all slots."""
        self.groups = [self._groups(bucket, range(len(bucket.params))) for bucket in self.buckets]

    def _groups(self, bucket: Bucket[Options], among: Sequence[int]) -> list[Group[Options]]:
        return [self.group(bucket, slots) for slots in group_slots(bucket, among)]

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares."""
        grads = [grad for bucket in self.buckets for grad in bucket.grads if grad is not None]
        return square_sums(grads, self.buckets[0].metrics.device).sum(dim=0)

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of every bucket, as `reference.Stepper.step`."""
        for _ in self.sharded_step(grad_scale, apply_mask):
            pass  # of whole tensors, sums are complete

    def sharded_step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Make one step of shards, as `reference.Stepper.sharded_step`."""
        for bucket, groups in zip(self.buckets, self.groups, strict=True):
            slots = slots_with_grad(bucket.grads)
            for group in groups if len(slots) == len(bucket.params) else self._groups(bucket, slots):
                scale = grad_scale.to(group.dtype) if isinstance(grad_scale, Tensor) else grad_scale
                if (span := group.span) is not None:
                    group.x = bucket.params[span]
                    group.state = {name: tensors[span] for name, tensors in bucket.state.items()}
                else:
                    group.x = [bucket.params[i] for i in group.slots]
                    group.state = {name: [each[i] for i in group.slots] for name, each in bucket.state.items()}
                yield from group.step(scale, apply_mask)
                group.x, group.state = [], {}  # the bucket holds them no longer than the step
        self._count(apply_mask)  # after all buckets: parameters of several may share the count of a flat tensor


class Parts(list[Tensor]):
    """Views of one tensor."""

    def __init__(self, whole: Tensor, parts: Iterable[Tensor]) -> None:
        super().__init__(parts)
        self.whole: Tensor | None = whole

    def take(self) -> Tensor:
        """Return the tensor, whose memory is freed when the caller drops it."""
        whole, self.whole = self.whole, None
        self.clear()
        assert whole is not None
        return whole


class Blocks:
    """The blocks of several tensors as rows of one, so that codes of all are computed at once.

    The last block of a row is filled up with zeros.
    """

    def __init__(self, scales: list[Tensor], tensors: list[Tensor]) -> None:
        self.device = tensors[0].device
        rows = [math.prod(scale.shape[:-1]) for scale in scales]
        self.sizes = [
            (count, scale.shape[-1], each.numel() // max(count, 1))
            for count, scale, each in zip(rows, scales, tensors, strict=True)
        ]
        self.counts = [rows * blocks for rows, blocks, _ in self.sizes]
        self.full = all(size % BLOCK == 0 for _, _, size in self.sizes)

    def whole(self, tensors: list[Tensor], width: int = BLOCK, dtype: torch.dtype | None = None) -> Tensor:
        """Return `[blocks, width]`; packed codes are half as wide as others, and scales have a width of 1."""
        dtype = dtype or tensors[0].dtype
        make = torch.empty if self.full or width == 1 else torch.zeros
        whole = make((sum(self.counts), width), dtype=dtype, device=self.device)
        torch._foreach_copy_(self.parts(whole, tensors), tensors)
        return whole

    def parts(self, whole: Tensor, like: list[Tensor]) -> Parts:
        """Return the parts of `[blocks, width]` in the shapes of the tensors that they belong to."""
        found = []
        for part, (rows, blocks, _), each in zip(whole.split_with_sizes(self.counts), self.sizes, like, strict=True):
            row = part.view(rows, blocks * whole.shape[1])
            found.append(row[:, : each.numel() // max(rows, 1)].view(each.shape))
        return Parts(whole, found)

    def starts(self, rows: list[Tensor]) -> Tensor:
        """Return the position of each block's first element, from the positions of the tensors' rows."""
        found = [
            (row.unsqueeze(1) + torch.arange(blocks, device=self.device) * BLOCK).flatten()
            for row, (_, blocks, _) in zip(rows, self.sizes, strict=True)
        ]
        return torch.cat(found)


def widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors in the dtype of the arithmetic: themselves, or copies."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def flat(tensors: list[Tensor]) -> Tensor:
    """Return the elements of all tensors as one vector."""
    return torch.cat([each.reshape(-1) for each in tensors])


def parted(whole: Tensor, like: Sequence[Tensor]) -> Parts:
    """Return the inverse of `flat`, as views."""
    parts = whole.split_with_sizes([each.numel() for each in like])
    return Parts(whole, [part.view(each.shape) for part, each in zip(parts, like, strict=True)])


def chosen(apply_mask: Tensor | None, new: Tensor, old: Tensor | float) -> Tensor:
    """Return new values, or the old ones in a step that is not applied."""
    return new if apply_mask is None else torch.where(apply_mask, new, old)


def sent(numbers: Iterable[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers on a device, as arguments of calls: a copy from the host would wait."""
    return torch.stack([torch.full((), n, dtype=dtype, device=device) for n in numbers])
