"""The time of a step on flat tensors, which DeepSpeed's ZeRO and Megatron-LM have, beside a step of whole parameters.

    python workbench/benchmarks/flat_step.py [--shapes vit_small] [--rounds 15]

On 1 and 2 gloo ranks of one machine, each with its share of the cores and an equal part of a buffer of all parameters.
The optimizers take turns, all ranks starting together; a time is the slowest rank's, and a ratio is to torch's
fused AdamW on the same flat tensor in the same turn. On 1 rank, `Lamb` and `Came` of whole parameters take turns, too.
DeepSpeed's CPUAdam takes part if it is installed and its C++ compiles; its FusedLamb has a CUDA kernel alone.
Writes results/flat-step.json.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

import ranks
from bighorn import Came, FlatLayout, Fragment, Lamb
from bighorn_workbench import files, measure
from bighorn_workbench.environment import package_version, provenance
from bighorn_workbench.ranks import end_process_group
from bighorn_workbench.shapes import SHAPES

RESULT = Path(__file__).parent / "results" / "flat-step.json"
OPTIONS: Mapping[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
ADAMW = "torch AdamW, fused, flat"

Build = Callable[[Sequence[torch.Size]], Optimizer]


def values(count: int) -> Parameter:
    """Return a tensor with a gradient."""
    generator = torch.Generator().manual_seed(0)
    param = Parameter(torch.randn(count, generator=generator) * 0.02)
    param.grad = torch.randn(count, generator=generator) * 0.001
    return param


def flat(shapes: Sequence[torch.Size]) -> tuple[Parameter, FlatLayout]:
    """Return this rank's part of a buffer of all parameters, and its layout."""
    each = -(-sum(shape.numel() for shape in shapes) // dist.get_world_size())
    here = range(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    fragments, start = [], 0
    for i, shape in enumerate(shapes):
        first, last = max(start, here.start), min(start + shape.numel(), here.stop)
        if first < last:
            fragments.append(Fragment(str(i), tuple(shape), last - first, first - here.start, first - start))
        start += shape.numel()
    return values(each), FlatLayout([fragments])


def ours(kind: type[Lamb] | type[Came]) -> Build:
    def build(shapes: Sequence[torch.Size]) -> Optimizer:
        tensor, layout = flat(shapes)
        return kind([{"params": [tensor], "flat_layout": layout}], **OPTIONS)

    return build


def whole(kind: type[Lamb] | type[Came]) -> Build:
    def build(shapes: Sequence[torch.Size]) -> Optimizer:
        params = []
        for i, shape in enumerate(shapes):
            drawn = values(math.prod(shape))
            param = Parameter(drawn.detach().view(shape))
            param.grad = drawn.grad.view(shape) if drawn.grad is not None else None
            params.append((str(i), param))
        return kind(params, **OPTIONS)

    return build


def cpu_adam(shapes: Sequence[torch.Size]) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: Optimizer = DeepSpeedCPUAdam([flat(shapes)[0]], **OPTIONS)
    return made


BUILDS: Mapping[str, Build] = {
    ADAMW: lambda shapes: AdamW([flat(shapes)[0]], fused=True, **OPTIONS),
    "Lamb, flat": ours(Lamb),
    "Came, flat": ours(Came),
    "Lamb, whole parameters": whole(Lamb),
    "Came, whole parameters": whole(Came),
    "DeepSpeed CPUAdam, flat": cpu_adam,
}


def timed(shapes: Sequence[torch.Size], rounds: int) -> dict[str, Any]:
    """By optimizer: milliseconds of a step of the slowest rank, and the ratio to AdamW's in the same turn."""
    contestants: dict[str, Optimizer] = {}
    found: dict[str, Any] = {}
    for name, build in BUILDS.items():
        if "whole" in name and dist.get_world_size() > 1:
            continue
        try:
            contestants[name] = build(shapes)
            contestants[name].step()
        except Exception as error:  # a peer may raise any error
            contestants.pop(name, None)
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"}
    turns = torch.zeros(rounds, len(contestants), dtype=torch.float64)
    for turn in range(rounds):
        for place, optimizer in enumerate(contestants.values()):
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            turns[turn, place] = time.perf_counter() - start
    dist.all_reduce(turns, dist.ReduceOp.MAX)
    columns = dict(zip(contestants, turns.T.tolist(), strict=True))
    for name, seconds in columns.items():
        ratios = [mine / adamw for mine, adamw in zip(seconds, columns[ADAMW], strict=True)]
        found[name] = {"ms": measure.spread(seconds, 1e3), "ratio": measure.spread(ratios)}
    return found


def launch(count: int, shapes: str, rounds: int) -> Any:
    """Run this file on some ranks, and return the first one's result."""
    arguments = ["--shapes", shapes, "--rounds", str(rounds)]
    return ranks.found(__file__, count, arguments, {"DS_ACCELERATOR": "cpu"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="vit_small", choices=tuple(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULT)
    for name, kind in (("--rank", int), ("--world", int), ("--folder", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = [torch.Size(shape) for shape in SHAPES[arguments.shapes]()]
    if arguments.rank is not None:
        store = f"file://{arguments.folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=arguments.rank, world_size=arguments.world)
        found = timed(shapes, arguments.rounds)
        if arguments.rank == 0:
            (arguments.folder / "found.json").write_text(json.dumps(found))
        dist.barrier()
        end_process_group()
        return
    about = provenance(
        f"python workbench/benchmarks/flat_step.py --shapes {arguments.shapes} --rounds {arguments.rounds}"
    )
    result = {
        **about,
        "packages": {"deepspeed": package_version("deepspeed")},
        "shapes": arguments.shapes,
        "tensors": len(shapes),
        "parameters": sum(shape.numel() for shape in shapes),
        "times_by_ranks": {str(count): launch(count, arguments.shapes, arguments.rounds) for count in (1, 2)},
    }
    files.write_json(arguments.json, result)
    print(json.dumps(result["times_by_ranks"], indent=1))


if __name__ == "__main__":
    main()
