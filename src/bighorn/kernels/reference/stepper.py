"""What the algorithms share: a pure rule is applied to one tensor after another, and its results are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from torch import Tensor

from bighorn.kernels.arithmetic import compute_dtype, square_sums, wide, write
from bighorn.kernels.bucket import Bucket, Options

Rule = Callable[[Tensor, Tensor, dict[str, Tensor], Tensor, Options], tuple[Tensor, dict[str, Tensor], Tensor]]
"""(x, g, state, t, options) to (new x, new state, three figures for telemetry); g is in the dtype of the arithmetic."""


class Stepper(Generic[Options]):
    """A rule for some buckets on one device. The other backends have classes with the same methods."""

    def __init__(self, buckets: list[Bucket[Options]], rule: Rule[Options]) -> None:
        self.buckets: list[Bucket[Options]] = buckets
        self.rule: Rule[Options] = rule

    def prepare(self) -> None:
        """Do whatever can fail, before any kernel of a step writes: nothing can."""

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, a 0-dim float64 tensor."""
        grads = [grad for bucket in self.buckets for grad in bucket.grads]
        return square_sums(grads, self.buckets[0].norms).sum()

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One step of every bucket: parameters, state, step counts and norms are written in place.

        Args:
            grad_scale: What gradients are multiplied with: the scaler's and the global clip's factors. Default: 1.0.
            commit: A 0-dim bool tensor; where it is False, nothing is written. Default: None, which is True.
        """
        for bucket in self.buckets:
            for i, (x, g, step) in enumerate(zip(bucket.params, bucket.grads, bucket.steps, strict=True)):
                state = {name: tensors[i] for name, tensors in bucket.state.items()}
                t, g = step.to(wide(x)) + 1, g.to(compute_dtype(x)) * grad_scale
                new_x, new_state, figures = self.rule(x, g, state, t, bucket.options)
                write(x, new_x, commit)
                write(bucket.norms[i], figures, commit)
                for name, tensor in state.items():
                    write(tensor, new_state[name], commit)
            for step in bucket.counts:
                step += 1 if commit is None else commit
