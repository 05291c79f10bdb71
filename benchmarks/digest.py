"""Digests of every case of the tests' table, to see that a change of code changes no result.

    PYTHONPATH=. python benchmarks/digest.py cpu > before
    PYTHONPATH=. python benchmarks/digest.py cpu > after
    diff before after

Each line is a case and the hash of its parameters and of all tensors in its optimizer's state, after three steps on one
thread. Equal lines are equal bits. Other backends are foreach, reference, and with TRITON_INTERPRET=1, triton. With
`--only`, cases whose name contains a word; `--small` leaves out large tensors, for which the interpreter takes minutes.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels.triton import device
from tests.support.cases import CASES, Case, set_gradients

STEPS = 3


def tensors(case: Case, backend: str) -> Iterator[Tensor]:
    """Yield the parameters and the state after some steps."""
    params = case.parameters()
    optimizer = case.optimizer(params, backend)
    for step in range(STEPS):
        case.set_lr(optimizer, step)
        set_gradients(params, case.gradients(step))
        optimizer.step()
    yield from params
    for param in params:
        state = optimizer.state[param]
        yield from (value for _, value in sorted(state.items()) if isinstance(value, Tensor))


def digest(found: Iterator[Tensor]) -> str:
    """Return a hash of dtypes, shapes and bytes."""
    hashed = hashlib.sha256()
    for each in found:
        hashed.update(f"{each.dtype} {tuple(each.shape)}".encode())
        hashed.update(each.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Digests of every case of the tests' table.")
    parser.add_argument("backend")
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    parser.add_argument("--small", action="store_true")
    args: Any = parser.parse_args()
    torch.set_num_threads(1)
    if args.backend == "triton":
        from tests.support import triton_interpreter

        triton_interpreter.mend()
        device.DEVICES = ("cpu",)  # type: ignore[assignment]
    for case in CASES:
        chosen = any(word in case.id for word in args.only) and not (args.small and case.size > 100_000)
        if chosen and case.runs_on(args.backend):
            print(f"{case.kind.__name__} {case.id} {digest(tensors(case, args.backend))}", flush=True)


if __name__ == "__main__":
    main()
