"""The cost of a step on an accelerator without compiled kernels: calls of torch, copies, waits and temporaries.

    PYTHONPATH=. python workbench/benchmarks/plain_torch.py [--rows Lamb,Came] [--shapes bert_base] [--json FILE]
    PYTHONPATH=. python workbench/benchmarks/plain_torch.py --times [--json FILE]

The device is the stand-in of `tests/device`, and each optimizer runs in a process of its own. `--times` times the same
lists on one thread of a CPU, beside other packages' lists: optimizers take turns, step by step, with AdamW's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn._kernels.foreach import lists
from bighorn_workbench.peers import PEERS
from bighorn_workbench.shapes import SHAPES
from tests.device import stand_in
from tests.device.calls import Calls

Make = Callable[[list[Parameter]], Any]
Found = dict[str, float]

LOW = torch.bfloat16


def thousand() -> Iterator[tuple[int, ...]]:
    """Yield the shapes of 500 small layers."""
    for _ in range(500):
        yield from ((32, 48), (32,))


TENSORS = {name: SHAPES[name] for name in ("bert_base", "resnet50", "efficientnet_b0")} | {"thousand": thousand}


def of(kind: Any, **options: Any) -> Make:
    """Return a function that makes one of our optimizers."""
    return lambda params: kind(params, lr=0.01, weight_decay=0.01, backend="foreach", **options)


def pytorch_optimizer_lamb(params: list[Parameter]) -> Any:
    """Return the LAMB of pytorch_optimizer."""
    from pytorch_optimizer import Lamb as Theirs

    return Theirs(params, lr=0.01, weight_decay=0.01, foreach=True)


def came_pytorch(params: list[Parameter]) -> Any:
    """Return the CAME of came-pytorch."""
    from came_pytorch import CAME

    return CAME(params, lr=0.01, weight_decay=0.01, betas=(0.9, 0.999, 0.9999))


ROWS: dict[str, tuple[Make, torch.dtype]] = {
    "AdamW of torch, foreach": (lambda params: torch.optim.AdamW(params, foreach=True), torch.float32),
    "Adafactor of torch, foreach": (lambda params: torch.optim.Adafactor(params, foreach=True), torch.float32),
    "Lamb of pytorch_optimizer": (pytorch_optimizer_lamb, torch.float32),
    "CAME of came-pytorch": (came_pytorch, torch.float32),
    "Lamb": (of(Lamb), torch.float32),
    "Lamb, clip": (of(Lamb, max_grad_norm=1.0), torch.float32),
    "Lamb, skip": (of(Lamb, skip_nonfinite=True), torch.float32),
    "Lamb, cautious": (of(Lamb, cautious=True), torch.float32),
    "Lamb, amsgrad": (of(Lamb, second_moment="amsgrad"), torch.float32),
    "Lamb, float64": (of(Lamb), torch.float64),
    "Lamb, bfloat16 state": (of(Lamb, state_dtype="bfloat16"), torch.float32),
    "Lamb, int8": (of(Lamb, state_dtype="int8"), torch.float32),
    "Lamb, int4": (of(Lamb, state_dtype="int4"), torch.float32),
    "Lamb, stochastic": (of(Lamb, weight_rounding="stochastic"), LOW),
    "Lamb, kahan": (of(Lamb, weight_rounding="kahan"), LOW),
    "Lamb, master": (of(Lamb, weight_rounding="master"), LOW),
    "Lars": (of(Lars), torch.float32),
    "Lars, clip": (of(Lars, max_grad_norm=1.0), torch.float32),
    "Lars, int8": (of(Lars, state_dtype="int8"), torch.float32),
    "Lars, master": (of(Lars, weight_rounding="master"), LOW),
    "Came": (of(Came), torch.float32),
    "Came, clip": (of(Came, max_grad_norm=1.0), torch.float32),
    "Came, float64": (of(Came), torch.float64),
    "Came, int8": (of(Came, state_dtype="int8"), torch.float32),
    "Came, int4": (of(Came, state_dtype="int4"), torch.float32),
    "Came, stochastic": (of(Came, weight_rounding="stochastic"), LOW),
    "Came, kahan": (of(Came, weight_rounding="kahan"), LOW),
    "Came, master": (of(Came, weight_rounding="master"), LOW),
}


def measure(row: str, shapes: str, mode: str) -> Found:
    """Count a step in the steady state."""
    torch.set_num_threads(1)
    stand_in.begin(mode)
    make, dtype = ROWS[row]
    params = [Parameter(torch.full(shape, 0.02, dtype=dtype).to("npu")) for shape in TENSORS[shapes]()]
    for param in params:
        param.grad = torch.full(param.shape, 1e-3, dtype=dtype).to("npu")
    optimizer = make(params)
    optimizer.step()
    optimizer.step()
    with stand_in.counted() as found:
        optimizer.step()
    temporaries = stand_in.peak_bytes()
    calls = Calls()
    for _ in range(2):  # the first step in the mode makes a new plan
        calls.found.clear()
        with calls:
            optimizer.step()
    return {
        "calls": calls.found.total(),
        "copies on the device": found["copy on device"],
        "copies to and from it": sum(n for name, n in found.items() if name.startswith(("copy to", "wait for a copy"))),
        "waits": sum(stand_in.waits(found).values()),
        "temporary bytes per parameter": round(temporaries / sum(param.numel() for param in params), 3),
        "temporary MiB": round(temporaries / 2**20, 1),
    }


TIMED = ("Lamb", "Lamb, cautious", "Lars", "Came", "Lamb of pytorch_optimizer", "Lamb of timm", "CAME of came-pytorch")


def timm_lamb(params: list[Parameter]) -> Any:
    """Return the LAMB of timm."""
    return PEERS["timm"].load_for("cpu")(params, 0.01, None)


def times(shapes: str, rounds: int) -> dict[str, Found | str]:
    """Time steps on one thread of the CPU, relative to AdamW's lists in the same round."""
    torch.set_num_threads(1)
    lists.CACHED_BYTES = lists.GROUP_BYTES

    def made(make: Make) -> Any:
        params = [Parameter(torch.full(shape, 0.02)) for shape in TENSORS[shapes]()]
        for param in params:
            param.grad = torch.full(param.shape, 1e-3)
        optimizer = make(params)
        optimizer.step()
        return optimizer

    def seconds(optimizer: Any) -> float:
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    found: dict[str, Found | str] = {}
    baseline = made(ROWS["AdamW of torch, foreach"][0])
    for row in TIMED:
        try:
            optimizer = made(timm_lamb if row == "Lamb of timm" else ROWS[row][0])
        except ImportError as error:
            found[row] = str(error)
            continue
        pairs = [(seconds(baseline), seconds(optimizer)) for _ in range(rounds)]
        ratios = sorted(ours / theirs for theirs, ours in pairs)
        parts = (("p10", 0.1), ("median", 0.5), ("p90", 0.9))
        figures = {name: round(ratios[int(part * (rounds - 1))], 2) for name, part in parts}
        figures["ms"] = round(1000 * sorted(ours for _, ours in pairs)[rounds // 2], 1)
        found[row] = figures
        print(f"{shapes:16} {row:28} {figures}", flush=True)
    return found


def main() -> None:
    """Measure the rows, print them, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="parts of names of rows, with commas; default: all")
    parser.add_argument("--shapes", default=",".join(TENSORS))
    parser.add_argument("--mode", choices=stand_in.MODES, default=stand_in.MODES[0])
    parser.add_argument("--times", action="store_true", help="time lists on one thread of the CPU")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.times:
        timed = {shapes: times(shapes, chosen.rounds) for shapes in chosen.shapes.split(",")}
        write(chosen.json, {"rounds": chosen.rounds, "shapes": timed})
        return
    rows = [row for row in ROWS if any(part in row for part in chosen.rows.split(","))]
    if chosen.mode != stand_in.MODES[0]:
        rows = [row for row in rows if ROWS[row][1] != torch.float64]
    stand_in.library()
    found: dict[str, dict[str, Found | str]] = {}
    for shapes in chosen.shapes.split(","):
        for row in rows:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                try:
                    figures: Found | str = pool.apply(measure, (row, shapes, chosen.mode))
                except Exception as error:  # of another package: a row of its own
                    figures = f"{type(error).__name__}: {error}"
            found.setdefault(shapes, {})[row] = figures
            values = figures if isinstance(figures, str) else "  ".join(f"{n:>8,}" for n in figures.values())
            print(f"{shapes:16} {row:28} {values}", flush=True)
    write(chosen.json, {"mode": chosen.mode, "shapes": found})


def write(file: Path | None, content: dict[str, Any]) -> None:
    """Write results with the versions that they depend on."""
    if file:
        names = ("torch", "bighorn", "pytorch_optimizer", "came-pytorch", "timm")
        versions = {name: version(name) for name in names if find_spec(name.replace("-", "_"))}
        file.write_text(json.dumps({"versions": versions, **content}, indent=1) + "\n")


if __name__ == "__main__":
    main()
