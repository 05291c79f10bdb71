"""The scenarios of test_sharding.py, run on each rank: `python sharding_worker.py RANK WORLD FOLDER SCENARIO...`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn.optim import plan_builder
from tests.support.cases import KINDS, ExactCame, ExactLamb, ExactLars, Kind, Optimizer
from tests.support.processes import LIMIT, run_as_rank

SHAPES: Mapping[str, tuple[int, ...]] = {
    "prime": (13, 11),
    "even": (8, 12),
    "few_rows": (1, 3),
    "embedding": (71, 64),
    "conv": (11, 3, 3, 2),
    "bias": (7,),
    "few": (1,),
    "experts": (3, 5, 6),
}


class Bag(nn.Module):
    """Parameters, and a loss that has the given gradients."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
            self.register_parameter(name, Parameter(values.to(dtype)))

    def place(self, names: Sequence[str], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        """Distribute some parameters; placements along missing dims become replicated."""
        for name in names:
            p = self.get_parameter(name)
            fitting = [Replicate() if isinstance(on, Shard) and on.dim >= p.dim() else on for on in placements]
            self.register_parameter(name, Parameter(distribute_tensor(p.detach(), mesh, fitting, src_data_rank=None)))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(())
        for p, grad in zip(self.parameters(), gradients, strict=True):
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            product = (p * grad).sum()
            total = total + (product.full_tensor() if isinstance(product, DTensor) else product)
        return total


def void(_: object) -> None:
    """Ignore the result of a call."""


Layout = Callable[[Bag], None]


def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("one", "two")[: len(sizes)])


def distributed(*placements: Placement, sizes: tuple[int, ...]) -> Layout:
    return lambda bag: bag.place(list(dict(bag.named_parameters())), mesh(*sizes), placements)


def hybrid(bag: Bag) -> None:
    fully_shard(bag, mesh=mesh(2, 2))


def half_plain(bag: Bag) -> None:
    bag.place(["prime", "conv", "bias"], mesh(dist.get_world_size()), [Shard(0)])


def tensor_parallel_and_sharded(bag: Bag) -> None:
    """Use strided shards, both dims, replication along one mesh dim, and parameters only on the other dim's mesh."""
    both = mesh(2, 2)
    bag.place(["prime", "even", "bias"], both["two"], [Shard(0)])
    bag.place(["embedding"], both["two"], [Shard(1)])
    bag.place(["few"], both["two"], [Replicate()])
    fully_shard(bag, mesh=both["one"])


LAYOUTS: Mapping[int, Mapping[str, Layout]] = {
    1: {"plain": void},
    2: {
        "fsdp": lambda bag: void(fully_shard(bag)),
        "columns": distributed(Shard(1), sizes=(2,)),
        "half-plain": half_plain,
        "replicated": distributed(Replicate(), sizes=(2,)),
    },
    4: {
        "fsdp-4": lambda bag: void(fully_shard(bag)),
        "hybrid": hybrid,
        "both-dims": distributed(Shard(1), Shard(0), sizes=(2, 2)),
        "fsdp-and-tp": tensor_parallel_and_sharded,
    },
}


@dataclass(frozen=True)
class Run:
    """An optimizer's options, its number of steps, and the comparison of its results."""

    kind: Kind
    options: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)
    """Options of parameters of 2 dims or more."""
    steps: int = 2
    dtype: torch.dtype = torch.float64
    backend: str = "reference"
    tolerance: float = 1e-12
    compares_state: bool = False
    """Whether state is compared, which takes a collective for each tensor."""
    not_on: Sequence[str] = ()
    """Layouts that the optimizer refuses."""

    def optimizer(self, bag: Bag, **more: Any) -> Optimizer:
        named = list(bag.named_parameters())
        groups = [
            {"params": [pair for pair in named if pair[1].dim() >= 2], **self.group},
            {"params": [pair for pair in named if pair[1].dim() < 2]},
        ]
        options = {"lr": 0.1, "weight_decay": 0.1, "backend": self.backend, **self.options, **more}
        return self.kind(groups, **options)


def not_matrices(name: str, param: Tensor) -> bool:
    return param.dim() < 2 or name == "even"


ALONE: Mapping[str, Any] = {"adam": True, "decay_mode": "decoupled"}
BITWISE: Mapping[str, Any] = {"dtype": torch.bfloat16, "backend": "cpu", "tolerance": 0}

RUNS: Mapping[str, Run] = {
    "lamb": Run(Lamb, steps=10, compares_state=True),
    "lamb-clip": Run(
        Lamb,
        {
            "max_grad_norm": 0.5,
            "skip_nonfinite": True,
            "second_moment": "amsgrad",
            "exclude_from_weight_decay": ["bias", "few$"],
            "exclude_from_layer_adaptation": not_matrices,
        },
    ),
    "lamb-means": Run(Lamb, {"cautious": True, "decay_mode": "l2"}, {"grad_centralization": True}),
    "lamb-stacked": Run(Lamb, {"decay_mode": "decoupled"}, {"stacked": True}),
    "came": Run(Came, steps=10, compares_state=True),
    "came-everything": Run(
        Came,
        {
            "scale_parameter": True,
            "bias_correction": True,
            "decay_rate": 0.8,
            "factor": "last_two",
            "max_grad_norm": 1.0,
        },
        {"grad_centralization": True},
    ),
    "came-stacked": Run(Came, {"eps": (1e-3, 1e-3)}, {"stacked": True, "factor": "last_two"}),
    "came-int8": Run(
        ExactCame,
        {"state_dtype": "int8", "eps": (1e-3, 1e-3)},
        compares_state=True,
        not_on=("columns", "both-dims", "fsdp-and-tp"),
    ),
    "came-int4": Run(
        ExactCame,
        {"state_dtype": "int4", "eps": (1e-3, 1e-3)},
        compares_state=True,
        not_on=("columns", "both-dims", "fsdp-and-tp"),
    ),
    # The second moment takes random bits, which must be those of the element in the whole tensor.
    "lamb-int8": Run(ExactLamb, {"state_dtype": "int8"}, not_on=("columns", "both-dims", "fsdp-and-tp")),
    "lamb-cpu": Run(
        Lamb, {"max_grad_norm": 0.5}, {"stacked": True}, dtype=torch.float32, backend="cpu", tolerance=1e-5
    ),
    # Without trust ratios no sums are exchanged, so every bit is that of the unsharded run.
    "lamb-cpu-stochastic": Run(Lamb, {"weight_rounding": "stochastic", **ALONE}, **BITWISE),
    "lamb-cpu-stochastic-stacked": Run(Lamb, {"weight_rounding": "stochastic", **ALONE}, {"stacked": True}, **BITWISE),
    "lamb-cpu-int8": Run(
        Lamb,
        {"weight_rounding": "stochastic", "state_dtype": "int8", **ALONE},
        not_on=("columns", "both-dims", "fsdp-and-tp"),
        compares_state=True,
        **BITWISE,
    ),
    "lamb-cpu-means": Run(
        Lamb, {"decay_mode": "l2"}, {"grad_centralization": True}, dtype=torch.float32, backend="cpu", tolerance=1e-5
    ),
    "lamb-foreach-float64": Run(
        Lamb, {"decay_mode": "l2"}, {"grad_centralization": True}, backend="foreach", compares_state=True
    ),
    "lamb-foreach": Run(Lamb, dtype=torch.float32, backend="foreach", tolerance=1e-5),
    "came-cpu": Run(
        Came,
        {"eps": (1e-3, 1e-3), "scale_parameter": True, "bias_correction": True, "max_grad_norm": 1.0},
        dtype=torch.float32,
        backend="cpu",
        tolerance=1e-5,
        compares_state=True,
    ),
    "came-foreach-float64": Run(
        Came, {"eps": (1e-3, 1e-3)}, {"grad_centralization": True}, backend="foreach", compares_state=True
    ),
    "came-cpu-last-two": Run(
        Came,
        {"eps": (1e-3, 1e-3), "factor": "last_two"},
        {"stacked": True},
        dtype=torch.float32,
        backend="cpu",
        tolerance=1e-5,
    ),
    "came-cpu-int8": Run(
        Came,
        {"eps": (1e-3, 1e-3), "state_dtype": "int8"},
        dtype=torch.float32,
        backend="cpu",
        tolerance=1e-5,
        not_on=("columns", "both-dims", "fsdp-and-tp"),
    ),
    # Without a clip hardly any sum matters: rows of dim 0 are whole.
    "came-cpu-stochastic": Run(
        Came,
        {"eps": (1e-3, 1e-3), "clip_threshold": 1e3, "weight_rounding": "stochastic"},
        {"stacked": True},
        dtype=torch.bfloat16,
        backend="cpu",
        tolerance=0,
    ),
    "came-foreach": Run(Came, {"eps": (1e-3, 1e-3)}, dtype=torch.float32, backend="foreach", tolerance=1e-5),
    "lars": Run(
        Lars,
        {
            "trust_coefficient": 0.3,
            "denominator": "joint",
            "max_grad_norm": 0.5,
            "skip_nonfinite": True,
            "exclude_from_layer_adaptation": not_matrices,
        },
        {"grad_centralization": True},
        steps=10,
        compares_state=True,
    ),
    "lars-int8": Run(
        ExactLars,
        {"trust_coefficient": 0.3, "state_dtype": "int8"},
        not_on=("columns", "both-dims", "fsdp-and-tp"),
    ),
    "lars-cpu": Run(
        Lars,
        {"trust_coefficient": 0.3, "nesterov": True, "trust_clip": True},
        {"stacked": True},
        dtype=torch.float32,
        backend="cpu",
        tolerance=1e-5,
        compares_state=True,
    ),
    # Without trust ratios no sums are exchanged.
    "lars-cpu-stochastic": Run(
        Lars, {"weight_rounding": "stochastic", "exclude_from_layer_adaptation": lambda *_: True}, **BITWISE
    ),
}


def gradients(bag: Bag, step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) for p in bag.parameters()]


def advance(bag: Bag, optimizer: Optimizer, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        optimizer.zero_grad()
        bag(gradients(bag, step, dtype)).backward()
        optimizer.step()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    ours, theirs = full(ours).detach().double(), theirs.detach().double()
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30) if theirs.numel() else torch.zeros(())
    assert ours.shape == theirs.shape, what
    assert error <= tolerance, f"{what}: {error:.1e}"


def equals_the_unsharded_run(layout: Layout, run: Run) -> None:
    """Parameters, state and telemetry equal those of the unsharded run."""
    alone, sharded = Bag(SHAPES, run.dtype), Bag(SHAPES, run.dtype)
    layout(sharded)
    ours, theirs = run.optimizer(sharded), run.optimizer(alone)
    advance(alone, theirs, range(run.steps), run.dtype)
    advance(sharded, ours, range(run.steps), run.dtype)
    for (name, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert_close(p, q, run.tolerance, name)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for key, value in theirs.state[q].items() if run.compares_state else ():
            assert ours.state[p][key].dtype == value.dtype
            assert isinstance(ours.state[p][key], DTensor) == (isinstance(p, DTensor) and key != "step")
            assert_close(ours.state[p][key], value, 10 * run.tolerance, f"{key} of {name}")
    assert ours.telemetry().names == theirs.telemetry().names
    for key, value in vars(theirs.telemetry()).items():
        if key != "names":
            assert_close(getattr(ours.telemetry(), key), value, max(run.tolerance, 1e-6), key)


def refuses_to_cut_blocks(layout: Layout, run: Run) -> None:
    bag = Bag(SHAPES, run.dtype)
    layout(bag)
    before = {name: full(p).detach().clone() for name, p in bag.named_parameters()}
    with pytest.raises(ValueError, match=r"(?s)embedding.*int8.*dim 0"):
        advance(bag, run.optimizer(bag), range(1), run.dtype)
    for name, p in bag.named_parameters():
        assert full(p).equal(before[name])


def cost(optimizer: Optimizer) -> tuple[int, int]:
    """Return the number of collectives of a step, and the bytes that a rank sends in them."""
    given = []
    all_reduce = dist.all_reduce

    def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = watched
    try:
        with CommDebugMode() as mode:  # type: ignore[no-untyped-call]
            optimizer.step()
    finally:
        dist.all_reduce = all_reduce
    assert mode.get_total_counts() == len(given), "only packed sums are exchanged"
    return len(given), sum(given)


def collectives(rows: int, columns: int, layout: Layout, cut: Mapping[str, int]) -> None:
    """Thirty tensors need as many collectives as one, with the bytes of the sums that are needed."""
    for copies in (1, 15):
        shapes = {
            f"{name}{i}": shape for i in range(copies) for name, shape in (("w", (rows, columns)), ("b", (rows,)))
        }
        for kind, options, count, numbers in (
            (Lamb, {}, 1, 4),
            (Lamb, {"max_grad_norm": 1.0}, 2, 4),
            (Lars, {}, 1, 4),
            (Came, {}, cut["came"], 2 + cut["numbers"]),
            (Came, {"max_grad_norm": 1.0}, cut["came"] + 1, 2 + cut["numbers"]),
        ):
            bag = Bag(shapes, torch.float64)
            layout(bag)
            optimizer = Run(kind, options).optimizer(bag)
            advance(bag, optimizer, range(1), torch.float64)
            clip = 8 if options else 0
            assert cost(optimizer) == (count, 8 * numbers * copies + clip), (kind, options, copies, cost(optimizer))


def same_collectives(layout: Layout) -> None:
    """All backends have the same cost."""
    for kind in KINDS:
        costs = []
        for backend in ("reference", "cpu"):
            run, bag = Run(kind, dtype=torch.float32, backend=backend), Bag(SHAPES, torch.float32)
            layout(bag)
            optimizer = run.optimizer(bag)
            advance(bag, optimizer, range(1), run.dtype)
            costs.append(cost(optimizer))
        assert costs[0] == costs[1], (kind, costs)


COLLECTIVES: Mapping[int, Mapping[str, Callable[[], None]]] = {
    # By rows: twice each column, the sum of the averages of rows, ||x||; then each column, and two sums over rows.
    2: {"fsdp": lambda: collectives(9, 6, LAYOUTS[2]["fsdp"], {"came": 2, "numbers": 2 * 6 + 2 + 6 + 2})},
    # Each row and column, then ||u|| and ||x||, then each row and column.
    4: {"both-dims": lambda: collectives(9, 6, LAYOUTS[4]["both-dims"], {"came": 3, "numbers": 15 + 2 + 15})},
}


ALIKE = {2: ("fsdp", "columns", "half-plain"), 4: ("hybrid", "both-dims", "fsdp-and-tp")}
"""Layouts in which the costs of backends are compared."""


def process_group() -> None:
    """A group of the mesh's ranks is refused; a group of this rank only, as in a pipeline stage, changes nothing."""
    alone, sharded = Bag(SHAPES, torch.float64), Bag(SHAPES, torch.float64)
    fully_shard(sharded)
    run = Run(Lamb, {"max_grad_norm": 0.5})
    with pytest.raises(ValueError, match=r"(?s)grad_norm_group.*leave"):
        run.optimizer(sharded, grad_norm_group=dist.group.WORLD)
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    advance(alone, run.optimizer(alone), range(1), run.dtype)
    advance(sharded, run.optimizer(sharded, grad_norm_group=own), range(1), run.dtype)
    for (name, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert_close(p, q, run.tolerance, name)


def replaced_state() -> None:
    """Steps continue with state that was replaced, as by a program that moves it to other memory and back."""
    run, bags = Run(Lamb, {}), (Bag(SHAPES, torch.float64), Bag(SHAPES, torch.float64))
    for bag, replaces in zip(bags, (False, True), strict=True):
        fully_shard(bag)
        optimizer = run.optimizer(bag)
        advance(bag, optimizer, range(1), run.dtype)
        for state in optimizer.state.values() if replaces else ():
            for name in ("exp_avg", "exp_avg_sq"):
                old = state[name]
                state[name] = old.clone()
                old.zero_()
        advance(bag, optimizer, range(1, 2), run.dtype)
    for (name, p), q in zip(bags[0].named_parameters(), bags[1].parameters(), strict=True):
        assert full(p).equal(full(q)), name


def changing(kind: Kind, backend: str) -> None:
    """One plan serves shards whose storage is replaced, and whose gradients have other strides, at every step."""
    alone, sharded = Bag(SHAPES, torch.float32), Bag(SHAPES, torch.float32)
    fully_shard(sharded)
    optimizers = [kind(bag.named_parameters(), lr=0.01, weight_decay=0.1, backend=backend) for bag in (alone, sharded)]
    with patch.object(plan_builder, "build", wraps=plan_builder.build) as build:
        for step in range(4):
            values = gradients(alone, step, torch.float32)
            for bag, optimizer in zip((alone, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                bag(values).backward()
                for p in bag.parameters() if bag is sharded else ():
                    p.data = p.data.clone()
                    if isinstance(p.grad, DTensor) and step % 2:
                        local = p.grad.to_local()
                        order = tuple(reversed(range(local.dim())))
                        local = local.permute(order).contiguous().permute(order)
                        p.grad = DTensor.from_local(
                            local, p.grad.device_mesh, p.grad.placements, shape=p.shape, stride=p.stride()
                        )
                optimizer.step()
    assert build.call_count == 2
    for (name, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert_close(p, q, 1e-5, name)


def experts(state_dtype: str, dim: int, backend: str) -> None:
    """Blocks are within rows of the matrices that are factored, so that shards of whole rows have the same ones."""
    shapes = {"experts": (5, 41, 30)}
    alone, sharded = Bag(shapes, torch.float32), Bag(shapes, torch.float32)
    distributed(Shard(dim), sizes=(dist.get_world_size(),))(sharded)
    run = Run(Came, {"state_dtype": state_dtype, "factor": "last_two", "eps": (1e-3, 1e-3)}, backend=backend)
    optimizers = [run.optimizer(bag) for bag in (alone, sharded)]
    if state_dtype == "int4" and dim:
        with pytest.raises(ValueError, match=r'(?s)experts.*"int8" or "int4".*dim 0'):
            advance(sharded, optimizers[1], range(1), torch.float32)
        return
    for bag, optimizer in zip((alone, sharded), optimizers, strict=True):
        advance(bag, optimizer, range(3), torch.float32)
    (p,), (q,) = sharded.parameters(), alone.parameters()
    ours, theirs = optimizers[1].state[p], optimizers[0].state[q]
    assert ours["exp_avg_scale"].shape == theirs["exp_avg_scale"].shape == (5, 41, 1)
    assert_close(ours["exp_avg_scale"], theirs["exp_avg_scale"], 1e-5, "scales")
    codes = [full(each["exp_avg"]) for each in (ours, theirs)]
    assert (codes[0] != codes[1]).float().mean() < 0.01, "a sum may be rounded to the neighbour of a code"
    assert_close(p, q, 1e-3, "experts")


def tensor_parallel(kind: Kind, options: Mapping[str, Any]) -> None:
    """Seven hidden units on two ranks train forward and backward with torch's own plan."""
    inputs, alone = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), mlp()
    sharded = mlp()
    # Without use_local_output=False a rank does not know how many units the other has (torch 2.13).
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    parallelize_module(sharded, mesh(dist.get_world_size()), plan)
    assert all(isinstance(p, DTensor) and p.to_local().shape != p.shape for p in sharded[0].parameters())
    optimizers = [kind(net.named_parameters(), lr=0.1, weight_decay=0.1, **options) for net in (alone, sharded)]
    for _ in range(5):
        for net, optimizer in zip((alone, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert_close(p, q, 1e-12, name)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


CHECKPOINTED = {
    "lamb": Run(Lamb, {"second_moment": "amsgrad", "max_grad_norm": 1.0}),
    "came": Run(ExactCame, {"state_dtype": "int8", "eps": (1e-3, 1e-3)}),
}


def checkpoint(layout: Layout, run: Run, seed: int) -> tuple[Bag, Optimizer, dict[str, Any]]:
    """Return a model, its optimizer, and the states of both for torch.distributed.checkpoint."""
    bag = Bag(SHAPES, run.dtype, seed)
    layout(bag)
    optimizer = run.optimizer(bag)
    if seed == 0:
        advance(bag, optimizer, range(run.steps), run.dtype)
    model, state = get_state_dict(bag, optimizer)
    return bag, optimizer, {"model": model, "optimizer": state}


def saves(layout: Layout, run: Run, folder: Path, in_background: bool = False) -> None:
    """Save, and record the result of later steps, which a save in the background does not contain."""
    bag, optimizer, state = checkpoint(layout, run, seed=0)
    if in_background:
        own = dist.new_group()  # in the group of all ranks, its thread would interfere with the steps' sums
        written = async_save(state, checkpoint_id=folder / "checkpoint", process_group=own)
    else:
        save(state, checkpoint_id=folder / "checkpoint")
    advance(bag, optimizer, range(run.steps, 2 * run.steps), run.dtype)
    if in_background:
        assert isinstance(written, Future)
        written.result(timeout=LIMIT)
    later = [full(p).detach() for p in bag.parameters()]
    if dist.get_rank() == 0:
        torch.save(later, folder / "later.pt")
    dist.barrier()


def loads(layout: Layout, run: Run, folder: Path) -> None:
    """Load on any number of ranks, with the same result."""
    bag, optimizer, state = checkpoint(layout, run, seed=1)
    load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(bag, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for p in bag.parameters():
        assert optimizer.state[p]["step"] == run.steps
        small = torch.float32 if "state_dtype" in run.options else run.dtype
        dtype = torch.int8 if "exp_avg_scale" in optimizer.state[p] else small
        assert optimizer.state[p]["exp_avg"].dtype == dtype
    advance(bag, optimizer, range(run.steps, 2 * run.steps), run.dtype)
    for (name, p), later in zip(bag.named_parameters(), torch.load(folder / "later.pt"), strict=True):
        assert_close(p, later, run.tolerance, name)


def scenarios(world: int, folder: Path, *, all_of_them: bool = False) -> Mapping[str, Callable[[], None]]:
    """Return the scenarios of `world` ranks in order; two ranks must run first, since others load their checkpoints.

    Unless all are wanted, the layouts beside FSDP2's have every second run of two ranks, every fourth of four, in turn.
    """
    todo: dict[str, Callable[[], None]] = {}
    for place, (on, layout) in enumerate(LAYOUTS[world].items()):
        for turn, (name, run) in enumerate(RUNS.items() if world > 1 else ()):
            if not all_of_them and place and (place + turn) % world:
                continue
            check = refuses_to_cut_blocks if on in run.not_on else equals_the_unsharded_run
            todo[f"{on}-{name}"] = partial(check, layout, run)
    for on in ALIKE.get(world, ()):
        todo[f"{on}-same-collectives"] = partial(same_collectives, LAYOUTS[world][on])
    for on, check_cost in COLLECTIVES.get(world, {}).items():
        todo[f"{on}-collectives"] = check_cost
    if world == 2:
        todo["process-group"] = process_group
        todo["replaced-state"] = replaced_state
        for kind, backend in itertools.product(KINDS, ("reference", "foreach", "cpu")):
            todo[f"{kind.__name__}-{backend}-fsdp-changing"] = partial(changing, kind, backend)
        for state_dtype, dim, backend in itertools.product(("int8", "int4"), (0, 1), ("reference", "foreach", "cpu")):
            todo[f"experts-{state_dtype}-{dim}-{backend}"] = partial(experts, state_dtype, dim, backend)
        todo["lamb-tensor-parallel"] = partial(tensor_parallel, Lamb, {"max_grad_norm": 0.1})
        todo["came-tensor-parallel"] = partial(tensor_parallel, Came, {})
        todo["async-saves"] = partial(
            saves, LAYOUTS[2]["fsdp"], CHECKPOINTED["lamb"], folder / "async", in_background=True
        )
        todo["async-loads"] = partial(loads, LAYOUTS[2]["fsdp"], CHECKPOINTED["lamb"], folder / "async")
    for name, run in CHECKPOINTED.items():
        if world == 2:
            todo[f"{name}-saves"] = partial(saves, LAYOUTS[2]["fsdp"], run, folder / name)
        for on in LOADING[world]:
            todo[f"{on}-{name}-loads"] = partial(loads, LAYOUTS[world][on], run, folder / name)
    return todo


LOADING = {1: ["plain"], 2: ["fsdp"], 4: ["fsdp-4", "hybrid"]}
"""The layouts in which checkpoints are loaded."""


if __name__ == "__main__":
    run_as_rank(partial(scenarios, all_of_them=bool(sys.argv[4:])))
