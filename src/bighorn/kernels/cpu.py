"""The ctypes face of the C library: tables of addresses in, one call for the whole model.

The library knows nothing of torch or Python. What it is told about the process comes from here: how many threads,
which OpenMP runtime to borrow them from, which instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import math
import os
import threading
from array import array
from pathlib import Path

import torch
from torch import Tensor

from .bucket import Bucket, LambOptions

LIBRARY_NAME = "libbighorn.so"
BLOCK = 8192  # of csrc/lamb.h
SCRATCH_BYTES = 8 << 20  # u is kept for the last blocks of a tensor up to this much, for all threads together
LONGEST_FAN = 1 << 16  # a mean is taken again for each block that it covers, so rows beyond are left to foreach

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GRAD_TYPES = {**TYPES, torch.float64: 3}
SECOND_MOMENTS = {"adam": 0, "amsgrad": 1, "adagrad": 2}
BIAS_CORRECTIONS = {False: 0, True: 1, "lr": 2}
ISAS = {"v2": 2, "v3": 3, "v4": 4}
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


class Run(ctypes.Structure):
    """`Run` of csrc/lamb.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parallel", "thread_num", "num_threads")),
        *((name, ctypes.c_int32) for name in ("threads", "isa")),
    ]


# ---- the library and the machine ------------------------------------------------------------------------------


def load_library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why there is none."""
    # In an editable install the library lies in site-packages, the sources elsewhere: resources know both places.
    path = Path(str(importlib.resources.files(__package__).joinpath(LIBRARY_NAME)))
    if not path.is_file():
        return None, f"{LIBRARY_NAME} was not built: install a C compiler, then reinstall bighorn from source"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{LIBRARY_NAME} does not load: {error}"
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    run = ctypes.POINTER(Run)
    library.bighorn_isa.argtypes = []
    library.bighorn_advance.argtypes = [address, count]
    library.bighorn_square_sum.argtypes = [run, address, address, count, address]
    library.bighorn_square_sum.restype = number
    library.bighorn_lamb_step.argtypes = [run, *[address] * 4, count, number, address, address, count]
    return library, str(path)


def openmp() -> tuple[int, int, int] | None:
    """The addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads in the process, torch's own."""
    if os.name != "posix":
        return None
    process = ctypes.CDLL(None)
    try:
        functions = process.GOMP_parallel, process.omp_get_thread_num, process.omp_get_num_threads
    except AttributeError:
        return None
    parallel, thread_num, num_threads = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return parallel, thread_num, num_threads


def cores() -> int:
    """How many this process may use: by affinity, and by its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, math.ceil(int(quota) / int(period))))


def threads() -> int:
    """The team size for the next call: `BIGHORN_NUM_THREADS`, else torch's, but no more than there are cores."""
    if OPENMP is None or _forked:
        return 1
    asked = os.environ.get("BIGHORN_NUM_THREADS")
    if not asked:
        return min(torch.get_num_threads(), CORES)
    if not asked.isdecimal() or not 1 <= int(asked) <= 1024:
        raise ValueError(f"BIGHORN_NUM_THREADS={asked!r} in the environment must be a number of threads, 1 to 1024")
    return int(asked)


def isa() -> int:
    """The x86-64 level to run (2 to 4; 0 elsewhere): the machine's, or a lower one from `BIGHORN_ISA` (v2, v3)."""
    level = int(LIBRARY.bighorn_isa()) if LIBRARY else 0
    asked = os.environ.get("BIGHORN_ISA")
    if not asked:
        return level
    if asked not in ISAS:
        raise ValueError(f"BIGHORN_ISA={asked!r} in the environment must be one of {', '.join(ISAS)}")
    return min(level, ISAS[asked])


def describe() -> str:
    """One line for `bighorn doctor`."""
    if LIBRARY is None:
        return LIBRARY_DETAIL
    count = threads()
    team = (
        f"{count} thread{'s' * (count > 1)} of torch's OpenMP"
        if OPENMP
        else "1 thread (no OpenMP runtime in the process)"
    )
    return f"{team}, instruction set {f'x86-64-v{isa()}' if isa() else 'of the build'}"


def _after_fork() -> None:
    # The runtime's workers do not exist in a forked child, and waiting for them would take forever.
    global _forked
    _forked = True


LIBRARY, LIBRARY_DETAIL = load_library()
OPENMP = openmp()
CORES = cores()
_forked = False
_scratch = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def scratch() -> Tensor:
    """The calling thread's scratch, made once."""
    if not hasattr(_scratch, "tensor"):
        _scratch.tensor = torch.empty(SCRATCH_BYTES // 4, dtype=torch.float32, device="cpu")
    tensor: Tensor = _scratch.tensor
    return tensor


# ---- the backend ----------------------------------------------------------------------------------------------


def why_not(param: Tensor, options: LambOptions) -> str | None:
    """Why the library cannot serve such a tensor, or None."""
    if LIBRARY is None:
        return LIBRARY_DETAIL
    if param.device.type != "cpu":
        return f"it lies on {param.device}"
    if param.dtype not in TYPES:
        return f"its dtype is {param.dtype}"
    if options.cautious:
        return "cautious updates are not in the C library"
    if options.centre and param.numel() > LONGEST_FAN * param.shape[0]:
        return f"gradient centralisation over more than {LONGEST_FAN} elements is not in the C library"
    return None


class Lamb:
    """LAMB on the library. The table of addresses is made once; gradients and options are read at each step."""

    def __init__(self, buckets: list[Bucket]) -> None:
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
        _run()
        scratch()

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, a 0-dim float64 tensor."""
        grads = self._grads()
        total = _library().bighorn_square_sum(_run(), self.rows, _address(grads), len(grads), self.partial.data_ptr())
        return torch.tensor(total, dtype=torch.float64, device="cpu")

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One LAMB step of all buckets, as `reference.Lamb.step`."""
        if commit is not None and not commit:
            return
        library, grads, buffer = _library(), self._grads(), scratch()
        library.bighorn_lamb_step(
            _run(),
            (Options * len(self.buckets))(*[_options(bucket.options) for bucket in self.buckets]),
            self.rows,
            _address(grads),
            _address(self.order),
            len(grads),
            float(grad_scale),
            self.partial.data_ptr(),
            buffer.data_ptr(),
            buffer.numel(),
        )
        library.bighorn_advance(_address(self.counts), len(self.counts))

    def _grads(self) -> array[int]:
        return array("Q", [grad.data_ptr() for bucket in self.buckets for grad in bucket.grads])


def make_row(bucket: Bucket, i: int, index: int) -> Row:
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


def grad_layout(x: Tensor, g: Tensor) -> array[int] | None:
    """Where a gradient's elements lie, in the order of the parameter's; None where they lie in that order."""
    order, strides = x.stride(), g.stride()
    dims = sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -order[d])
    if all(order[d] == strides[d] for d in dims):
        return None
    return array("q", [len(dims), *(x.shape[d] for d in dims), *(strides[d] for d in dims)])


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


def _library() -> ctypes.CDLL:
    assert LIBRARY is not None, LIBRARY_DETAIL
    return LIBRARY


def _run() -> ctypes._CArgObject:
    return ctypes.byref(_run_on(threads(), isa()))


@functools.cache
def _run_on(threads: int, isa: int) -> Run:
    return Run(*(OPENMP or (None, None, None)), threads, isa)


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
