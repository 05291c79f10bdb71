"""The base of the algorithms: a rule is applied to one tensor after another, and its results are written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from bighorn._capabilities import wide
from bighorn._kernels.arithmetic import compute_dtype, count_step, write
from bighorn._kernels.bucket import Bucket, Shard
from bighorn._kernels.codec import NEAREST, Dither
from bighorn._kernels.options import Options
from bighorn._kernels.rounding import Rounding, dither, load_weight, random_bits, rng_key, store_weight
from bighorn._square_sums import no_square_sums, square_sum

T = TypeVar("T")

Results: TypeAlias = tuple[Tensor, dict[str, Tensor], Tensor]
"""The new x, the new state, and the three metrics."""

Sums: TypeAlias = Generator[list[Tensor], list[Tensor], T]
"""Arithmetic on one tensor. The generator yields sums over this rank's shard, and is sent the sums over all shards: for
a whole tensor, the same sums."""

Rule: TypeAlias = Sums[Results]
"""One step of one tensor."""

MakeRule: TypeAlias = Callable[[Tensor, Tensor, dict[str, Tensor], Tensor, Dither, Options, Shard], Rule]
"""A function of x, g (in the dtype of the arithmetic), state, t, dither, options, and the shard that x is."""


def needs_rng_key(bucket: Bucket[Options]) -> bool:
    """Whether a bucket's step uses random bits, for weights, or dither, for moments in codes."""
    codes = any(f"{name}_scale" in bucket.state for name in bucket.options.forms)
    return codes or bucket.options.weight_rounding == "stochastic"


class Stepper(Generic[Options]):
    """A rule for some buckets on one device. The other backends have classes with the same methods."""

    rule: MakeRule[Options]
    """The rule, a static method."""

    reads_tensors: ClassVar[bool] = True
    """As `kernels.Kernel.reads_tensors`."""

    def __init__(self, buckets: list[Bucket[Options]]) -> None:
        self.buckets: list[Bucket[Options]] = buckets
        self.refresh()

    @staticmethod
    def unsupported_reason(param: Tensor, options: Any, shard: Shard | None) -> str | None:
        """The reason why this backend cannot serve a tensor: there is none."""
        del param, options, shard
        return None

    def refresh(self) -> None:
        """Read the buckets again, after tensors have moved: every step does so."""

    def prepare(self) -> None:
        """Do everything that can fail, before any kernel of a step writes: nothing can fail here."""

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares, as `square_sums.square_sum`."""
        grads = [grad for bucket in self.buckets for grad in bucket.grads if grad is not None]
        sums = [square_sum(grad) for grad in grads]
        return torch.stack(sums or [no_square_sums(device=self.buckets[0].metrics.device)]).sum(dim=0)

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of every bucket of whole tensors; parameters, state, step counts and metrics change in place.

        Args:
            grad_scale: The factor of gradients: the scaler's times the global clip's. Default: 1.0.
            apply_mask: A 0-dim bool tensor; if it is False, nothing is written. Default: None, which is True.
        """
        for slot in self._slots(grad_scale, apply_mask):
            while slot.sums:
                slot.go_on(slot.sums)
        self._count(apply_mask)

    def sharded_step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Make one step, as `step`, of buckets of shards, in several phases.

        Yields:
            This rank's part of the sums that the next phase needs, 1-dim. They must have been added up over all ranks,
            in place, before the generator is resumed.
        """
        slots = list(self._slots(grad_scale, apply_mask))
        while slots := [slot for slot in slots if slot.sums]:
            sums = torch.cat([part.reshape(-1) for slot in slots for part in slot.sums])
            yield sums
            arrived = iter(torch.split(sums, [part.numel() for slot in slots for part in slot.sums]))
            for slot in slots:
                slot.go_on([next(arrived).view_as(part).to(part.dtype) for part in slot.sums])
        self._count(apply_mask)

    def _slots(self, grad_scale: Tensor | float, apply_mask: Tensor | None) -> Iterator[Slot]:
        """Yield every slot, after its rule has run up to the first sums that it needs."""
        for bucket in self.buckets:
            o, with_bits = bucket.options, needs_rng_key(bucket)
            shards = bucket.shards or [Shard.whole(x.shape) for x in bucket.params]
            slots = zip(bucket.params, bucket.grads, bucket.steps, shards, strict=True)
            for i, (x, g, step, shard) in enumerate(slots):
                if g is None:
                    continue
                state = {name: tensors[i] for name, tensors in bucket.state.items()}
                t, g = step.to(wide(x.device)) + 1, g.to(compute_dtype(x)) * grad_scale
                bits: Tensor | None = None
                shifts: Dither = NEAREST
                if with_bits:
                    key = rng_key(o.rounding_seed, bucket.param_ids[i])
                    index = bucket.slot_offsets[i] + shard.positions(x.device)
                    bits, shifts = random_bits(key, t, index), dither(key, t, index)
                rule = self.rule(load_weight(x, state), g, state, t, shifts, o, shard)
                yield Slot(rule, x, state, bucket.metrics[i], apply_mask, o.weight_rounding, bits)

    def _count(self, apply_mask: Tensor | None) -> None:
        for bucket in self.buckets:
            count_step(bucket.unique_steps, apply_mask)


class Slot:
    """The execution of a rule, and the tensors to which its results are written."""

    def __init__(
        self,
        rule: Rule,
        x: Tensor,
        state: dict[str, Tensor],
        metrics: Tensor,
        apply_mask: Tensor | None,
        rounding: Rounding,
        bits: Tensor | None,
    ) -> None:
        self.rule, self.x, self.state, self.metrics, self.apply_mask = rule, x, state, metrics, apply_mask
        self.rounding, self.bits = rounding, bits
        self._take(lambda: next(rule))

    def go_on(self, sums: list[Tensor]) -> None:
        """Resume the rule with the sums over all shards, up to the next sums or to the results."""
        self._take(lambda: self.rule.send(sums))

    def _take(self, advance: Callable[[], list[Tensor]]) -> None:
        self.sums: list[Tensor] = []
        """The sums that the rule needs next; empty when it is done."""
        try:
            self.sums = advance()
        except StopIteration as end:
            new_x, new_state, metrics = end.value
            value = new_x.to(compute_dtype(self.x))
            new = {**new_state, **store_weight(value, self.x.dtype, self.rounding, self.bits)}
            write(self.metrics, metrics, self.apply_mask)
            for name, tensor in {"x": self.x, **self.state}.items():
                if name in new:  # a rule may leave a state tensor as it is
                    write(tensor, new[name], self.apply_mask)
