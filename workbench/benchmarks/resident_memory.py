"""Resident memory of a training step by optimizer, with gradients kept or released, beside other packages' optimizers.

    pip install --no-deps torchao
    python workbench/benchmarks/resident_memory.py [--blocks 8]

The model is a stack of transformer-sized matrices of width 1,024, 100.7 million parameters with 8 blocks, and 8 samples
a step, so that activations are small beside weights. Each measurement is a process of its own: after two steps, which
create the state, the kernel's peak of resident memory is reset. It is read after two more steps, less the memory of the
process before it built the model. One thread; memory does not depend on other programs. Writes
results/resident-memory.json.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bighorn import Came, Lamb, release_gradients
from bighorn_workbench import files
from bighorn_workbench.environment import package_version, provenance
from release_gradients import peak_of_steps, resident

WIDTH = 1024
RESULT = Path(__file__).parent / "results" / "resident-memory.json"
Build = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Contestant:
    """An optimizer, the dtype of its weights, and whether gradients are released inside backward.

    Attributes:
        footprint: Its name and options for `bighorn memory`; None if it is unknown there.
    """

    build: Build
    dtype: torch.dtype = torch.bfloat16
    released: bool = False
    footprint: tuple[str, dict[str, Any]] | None = None


def adamw(dtype: torch.dtype) -> Contestant:
    return Contestant(lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True), dtype, footprint=("adamw", {}))


def torchao(name: str, known: str | None = None) -> Contestant:
    """Import torchao on demand, since it may not be installed."""

    def build(params: Iterable[nn.Parameter]) -> Optimizer:
        made: Optimizer = getattr(import_module("torchao.optim"), name)(params, lr=1e-4, bf16_stochastic_round=True)
        return made

    return Contestant(build, footprint=None if known is None else (known, {}))


def own(
    kind: type[Lamb | Came], dtype: torch.dtype = torch.bfloat16, released: bool = False, **options: Any
) -> Contestant:
    known = kind.__name__.lower(), options
    return Contestant(
        lambda params: kind(params, lr=1e-4, weight_decay=0.01, **options), dtype, released, footprint=known
    )


def few(bits: str, rounding: str = "stochastic") -> dict[str, Any]:
    return {"state_dtype": bits, "weight_rounding": rounding}


CONTESTANTS = {
    "torch AdamW, fp32 weights": adamw(torch.float32),
    "Lamb, fp32 weights": own(Lamb, torch.float32),
    "Came, fp32 weights": own(Came, torch.float32),
    "torch AdamW": adamw(torch.bfloat16),
    "torchao AdamW8bit": torchao("AdamW8bit"),
    "torchao AdamW4bit": torchao("AdamW4bit", "torchao-int4"),
    "Lamb, int8, stochastic": own(Lamb, **few("int8")),
    "Lamb, int8, stochastic, released": own(Lamb, released=True, **few("int8")),
    "Lamb, int4, stochastic, released": own(Lamb, released=True, **few("int4")),
    "Came, int8, stochastic": own(Came, **few("int8")),
    "Came, int8, stochastic, released": own(Came, released=True, **few("int8")),
    "Came, int4, stochastic": own(Came, **few("int4")),
    "Came, int4, stochastic, released": own(Came, released=True, **few("int4")),
    "Came, int4, kahan8, released": own(Came, released=True, **few("int4", "kahan8")),
}


def stack(blocks: int, dtype: torch.dtype) -> nn.Sequential:
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    layers = [nn.Linear(*shape, bias=False, dtype=dtype) for _ in range(blocks) for shape in shapes]
    return nn.Sequential(*layers)


def peak(name: str, blocks: int) -> int:
    """Bytes, in this process."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: freed memory goes back to the kernel at once
    one = CONTESTANTS[name]
    warm = nn.Linear(
        128, 128, dtype=one.dtype
    )  # torch, its kernels and the optimizer's module allocate this by themselves
    warm(torch.ones(8, 128, dtype=one.dtype)).sum().backward()
    first = one.build(warm.parameters())
    first.step()
    del warm, first
    before = resident("VmRSS")
    model = stack(blocks, one.dtype)
    optimizer = one.build(model.parameters())
    if one.released:
        release_gradients(model, optimizer)
    inputs = torch.randn(8, WIDTH, dtype=one.dtype)
    return peak_of_steps(model, optimizer, inputs) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--child", choices=tuple(CONTESTANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print("bytes", peak(arguments.child, arguments.blocks))
        return
    about = provenance(f"python workbench/benchmarks/resident_memory.py --blocks {arguments.blocks}")
    parameters = arguments.blocks * 12 * WIDTH**2
    rows: dict[str, dict[str, Any]] = {}
    for name in CONTESTANTS:
        command = [sys.executable, __file__, "--blocks", str(arguments.blocks), "--child", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            rows[name] = {"error": done.stderr.strip().splitlines()[-1][:160]}
        else:
            bytes_ = int(done.stdout.split()[-1])
            rows[name] = {"peak_bytes": bytes_, "bytes_per_parameter": round(bytes_ / parameters, 3)}
        print(name, json.dumps(rows[name]), flush=True)
    versions = {"packages": {"torchao": package_version("torchao")}}
    files.write_json(RESULT, {**about, **versions, "parameters": parameters, "rows": rows})
    print(RESULT)


if __name__ == "__main__":
    main()
