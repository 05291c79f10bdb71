"""The messages and the time of a sharded optimizer's step: BERT-base's shapes on gloo ranks of one machine.

    python workbench/benchmarks/sharded_step.py [--shapes bert_base] [--rounds 15]

Collectives and their bytes are counted in a third step on 4 ranks, as torch dispatches them: a coalesced call over
fifty tensors counts as one, and its bytes as all of theirs. Times are of the first layout, which is `fully_shard`'s, on
2 and 4 ranks that share the machine's cores; the optimizer and torch's fused AdamW take turns, all ranks starting
together, and a ratio is of one turn. timm's optimizer is loaded as `bighorn bench` loads it. Writes
results/sharded-step.json. `python workbench/benchmarks/scale.py` makes results/scale.md from it.
"""

import argparse
import datetime
import json
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ranks
from bighorn import Came, Lamb
from bighorn_workbench import files, measure
from bighorn_workbench.environment import package_version, provenance
from bighorn_workbench.peers import PEERS, WEIGHT_DECAY
from bighorn_workbench.ranks import end_process_group
from bighorn_workbench.shapes import SHAPES

RESULT = Path(__file__).parent / "results" / "sharded-step.json"
RANKS = 4
LR = 1e-4
PATIENCE = datetime.timedelta(seconds=120)

Place = tuple[DeviceMesh, list[Placement]]
Layout = Callable[[torch.Size], Place]
Build = Callable[[list[Parameter]], Optimizer]


def peer(name: str, **options: Any) -> Build:
    """An optimizer of `bighorn bench`."""

    def build(params: list[Parameter]) -> Optimizer:
        optimizer = PEERS[name].load()(params, LR, None)
        for group in optimizer.param_groups:
            group.update(options)
        return optimizer

    return build


def clipped(params: list[Parameter]) -> Optimizer:
    """Lamb with a clip; parameters that are on a mesh of two ranks alone have copies on the other two."""
    smallest = min((param.device_mesh for param in params), key=lambda mesh: mesh.size())  # type: ignore[attr-defined]
    group = smallest.get_group() if smallest.size() < RANKS else None
    return Lamb(params, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=1.0, grad_norm_group=group)


OPTIMIZERS: Mapping[str, Build] = {
    "Lamb": lambda params: Lamb(params, lr=LR, weight_decay=WEIGHT_DECAY),
    "Lamb, max_grad_norm": clipped,
    "Came": lambda params: Came(params, lr=LR, weight_decay=WEIGHT_DECAY),
    "torch AdamW, fused": peer("adamw"),
    "timm Lamb": peer("timm"),
    "timm Lamb, foreach=True": peer("timm", foreach=True),
    "pytorch_optimizer Lamb": peer("pytorch_optimizer"),
    "pytorch_optimizer CAME": peer("pytorch_optimizer-came"),
    "came-pytorch": peer("came-pytorch"),
}
TIMED = ("Lamb", "Lamb, max_grad_norm", "Came", "timm Lamb")


def layouts() -> Mapping[str, Layout]:
    """The placement of a tensor of some shape, on 4 ranks; small tensors are sharded too, as `fully_shard` does."""
    four = init_device_mesh("cpu", (RANKS,))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def mixed(shape: torch.Size) -> Place:
        return (both, [Shard(0), Shard(1)]) if len(shape) == 2 else (both["data"], [Shard(0)])

    return {
        "FSDP2": lambda _: (four, [Shard(0)]),
        "HSDP, 2 x 2": lambda _: (both, [Replicate(), Shard(0)]),
        "columns": lambda shape: (four, [Shard(1 if len(shape) == 2 else 0)]),
        "FSDP2 x columns, 1-D on another mesh": mixed,
    }


def parameters(shapes: str, layout: Layout) -> list[Parameter]:
    """Weights of BERT's size with gradients, the same for every layout."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in map(torch.Size, SHAPES[shapes]()):
        mesh, placements = layout(shape)

        def draw(scale: float, shape: torch.Size = shape) -> Tensor:
            whole = torch.randn(shape, generator=generator).mul_(scale)
            return distribute_tensor(whole, mesh, placements, src_data_rank=None)  # noqa: B023 - called in this turn

        param = Parameter(draw(0.02))
        param.grad = draw(0.001)
        params.append(param)
    return params


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives and the bytes that a rank puts into them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # it is dispatched again for local tensors
        namespace, _, name = func.name().partition("::")
        if namespace in {"c10d", "_c10d_functional"} and not name.startswith(("wait", "_wrap")):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls.append((name.partition(".")[0].rstrip("_"), sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def counted(optimizer: Optimizer) -> dict[str, Any]:
    """The collectives of a third step."""
    for _ in range(2):
        optimizer.step()
    with Collectives() as seen:
        optimizer.step()
    kinds = sorted({name for name, _ in seen.calls})
    return {
        "collectives": len(seen.calls),
        "bytes": sum(size for _, size in seen.calls),
        "kinds": {kind: sum(name == kind for name, _ in seen.calls) for kind in kinds},
    }


def count_all(shapes: str) -> dict[str, Any]:
    """By optimizer and layout: the messages of a step, or its error."""
    table: dict[str, Any] = {}
    for name, build in OPTIMIZERS.items():
        table[name] = {}
        for place, layout in layouts().items():
            try:
                table[name][place] = counted(build(parameters(shapes, layout)))
            except Exception as error:  # a peer may raise any error, which the table shows
                last = traceback.extract_tb(error.__traceback__)[-1]
                text = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
                table[name][place] = {"error": f"{type(error).__name__}: {text}", "where": Path(last.filename).name}
            if dist.get_rank() == 0:
                print(name, place, table[name][place], flush=True)
    return table


def timed(shapes: str, rounds: int) -> dict[str, Any]:
    """By optimizer: milliseconds of a step of the slowest rank, beside AdamW's in the same turn."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    layout: Layout = lambda _: (mesh, [Shard(0)])  # noqa: E731
    found: dict[str, Any] = {}
    for name in TIMED:
        contestants = [OPTIMIZERS[which](parameters(shapes, layout)) for which in ("torch AdamW, fused", name)]
        for optimizer in contestants:
            optimizer.step()
        turns = torch.zeros(rounds, 2, dtype=torch.float64)
        for turn in range(rounds):
            for place, optimizer in enumerate(contestants):
                dist.barrier()
                start = time.perf_counter()
                optimizer.step()
                turns[turn, place] = time.perf_counter() - start
        dist.all_reduce(turns, dist.ReduceOp.MAX)
        adamw, ours = turns.T.tolist()
        ratios = [mine / theirs for mine, theirs in zip(ours, adamw, strict=True)]
        found[name] = {
            "adamw_ms": measure.spread(adamw, 1e3),
            "ms": measure.spread(ours, 1e3),
            "ratio": measure.spread(ratios),
        }
        if dist.get_rank() == 0:
            print(world, "ranks", name, found[name], flush=True)
    return found


def launch(count: int, task: str, shapes: str, rounds: int) -> Any:
    """Run this file on some ranks, and return the first one's result."""
    return ranks.found(__file__, count, ["--shapes", shapes, "--rounds", str(rounds), "--task", task])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bert_base", choices=tuple(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULT)
    for name, kind in (("--rank", int), ("--world", int), ("--folder", Path), ("--task", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{arguments.folder}/store",
            rank=arguments.rank,
            world_size=arguments.world,
            timeout=PATIENCE,
        )
        tasks: dict[str, Callable[[str], dict[str, Any]]] = {
            "count": count_all,
            "time": partial(timed, rounds=arguments.rounds),
        }
        found = tasks[arguments.task](arguments.shapes)
        if arguments.rank == 0:
            (arguments.folder / "found.json").write_text(json.dumps(found))
        dist.barrier()
        end_process_group()
        return
    about = provenance(
        f"python workbench/benchmarks/sharded_step.py --shapes {arguments.shapes} --rounds {arguments.rounds}"
    )
    shapes = list(SHAPES[arguments.shapes]())
    counts = launch(RANKS, "count", arguments.shapes, 1)
    times = {str(count): launch(count, "time", arguments.shapes, arguments.rounds) for count in (2, 4)}
    result = {
        **about,
        "packages": {name: package_version(name) for name in ("timm", "pytorch_optimizer", "came-pytorch")},
        "shapes": arguments.shapes,
        "tensors": len(shapes),
        "parameters": sum(torch.Size(shape).numel() for shape in shapes),
        "collectives_on_4_ranks": counts,
        "times_by_ranks": times,
    }
    files.write_json(arguments.json, result)
    print(arguments.json)


if __name__ == "__main__":
    main()
