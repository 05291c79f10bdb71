"""LAMB on the C library: its structures, and one call for the whole model."""

from __future__ import annotations

import ctypes
import math
from array import array

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket, CameOptions, LambOptions
from bighorn.kernels.cpu.library import address, loaded, run, scratch
from bighorn.kernels.cpu.tensors import BLOCK, GRAD_TYPES, TYPES, grad_layout, unsupported

SECOND_MOMENTS = {"adam": 0, "amsgrad": 1, "adagrad": 2}
BIAS_CORRECTIONS = {False: 0, True: 1, "lr": 2}
DECAY_MODES = {"ratio": 0, "decoupled": 1, "l2": 2}


class Options(ctypes.Structure):
    """`Options` of csrc/lamb.h."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        ("weight_norm_bounds", ctypes.c_double * 2),
        ("trust_ratio_bounds", ctypes.c_double * 2),
        *((name, ctypes.c_int32) for name in ("adapt", "bias_correction", "grad_averaging")),
        *((name, ctypes.c_int32) for name in ("decay_mode", "second_moment", "maximize")),
    ]


class Row(ctypes.Structure):
    """`Row` of csrc/lamb.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in ("step", "norms", "grad_layout")),
        *((name, ctypes.c_int64) for name in ("size", "fan")),
        *((name, ctypes.c_int32) for name in ("param_type", "grad_type", "state_type", "options")),
    ]


def why_not(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """Why the library cannot serve such a tensor, or None."""
    if isinstance(options, CameOptions):
        return "CAME is not in the C library"
    if options.cautious:
        return unsupported(param, options.centre) or "cautious updates are not in the C library"
    return unsupported(param, options.centre)


class Lamb:
    """LAMB on the library. The table of addresses is made once; gradients and options are read at each step."""

    def __init__(self, buckets: list[Bucket[LambOptions]]) -> None:
        rows = [make_row(bucket, i, index) for index, bucket in enumerate(buckets) for i in range(len(bucket.params))]
        self.buckets = buckets
        self.rows = (Row * len(rows))(*rows)
        self.layouts = [
            grad_layout(x, g) for bucket in buckets for x, g in zip(bucket.params, bucket.grads, strict=True)
        ]
        for row, layout in zip(self.rows, self.layouts, strict=True):
            row.grad_layout = layout.buffer_info()[0] if layout else None
        self.order = array("q", sorted(range(len(rows)), key=lambda i: -rows[i].size))
        self.counts = array("Q", [step.data_ptr() for bucket in buckets for step in bucket.counts])
        blocks = [-(-row.size // BLOCK) for row in rows]
        # Sums of squares of x and u for each block of a large row, twice; or of g for each block of every row.
        self.partial = torch.empty(max(4 * max(blocks, default=0), sum(blocks)), dtype=torch.float64, device="cpu")

    def prepare(self) -> None:
        """Whatever can fail, as `reference.Lamb.prepare`."""
        run()
        scratch()

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, a 0-dim float64 tensor."""
        grads = self._grads()
        total = loaded().bighorn_square_sum(run(), self.rows, address(grads), len(grads), self.partial.data_ptr())
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One LAMB step of all buckets, as `reference.Lamb.step`."""
        if commit is not None and not commit:
            return
        grads, buffer = self._grads(), scratch()
        loaded().bighorn_lamb_step(
            run(),
            (Options * len(self.buckets))(*[_options(bucket.options) for bucket in self.buckets]),
            self.rows,
            address(grads),
            address(self.order),
            len(grads),
            float(grad_scale),
            self.partial.data_ptr(),
            buffer.data_ptr(),
            buffer.numel(),
        )
        loaded().bighorn_advance(address(self.counts), len(self.counts))

    def _grads(self) -> array[int]:
        return array("Q", [grad.data_ptr() for bucket in self.buckets for grad in bucket.grads])


def make_row(bucket: Bucket[LambOptions], i: int, index: int) -> Row:
    """Row `i` of a bucket, which is the `index`-th."""
    x, state = bucket.params[i], {name: tensors[i] for name, tensors in bucket.state.items()}
    return Row(
        param=x.data_ptr(),
        exp_avg=state["exp_avg"].data_ptr(),
        exp_avg_sq=state["exp_avg_sq"].data_ptr(),
        max_exp_avg_sq=state["max_exp_avg_sq"].data_ptr() if "max_exp_avg_sq" in state else None,
        step=bucket.steps[i].data_ptr(),
        norms=bucket.norms[i].data_ptr(),
        size=x.numel(),
        fan=x.numel() // x.shape[0] if bucket.options.centre and x.numel() else 0,
        param_type=TYPES[x.dtype],
        grad_type=GRAD_TYPES[bucket.grads[i].dtype],
        state_type=TYPES[state["exp_avg"].dtype],
        options=index,
    )


def _options(o: LambOptions) -> Options:
    unbounded = (0.0, math.inf)
    return Options(
        lr=float(o.lr),
        beta1=o.betas[0],
        beta2=o.betas[1],
        eps=o.eps,
        weight_decay=o.weight_decay,
        weight_norm_bounds=o.weight_norm_bounds or unbounded,
        trust_ratio_bounds=o.trust_ratio_bounds or unbounded,
        adapt=o.adapt,
        bias_correction=BIAS_CORRECTIONS[o.bias_correction],
        grad_averaging=o.grad_averaging,
        decay_mode=DECAY_MODES[o.decay_mode],
        second_moment=SECOND_MOMENTS[o.second_moment],
        maximize=o.maximize,
    )
