"""Steps of sharded parameters equal one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bighorn import Came, Lamb, Lars
from bighorn import _kernels as kernels
from bighorn._optim import plan_builder
from tests.support import optimizer_runs, training_digests
from tests.support.cases import KINDS, ExactCame, Kind, Optimizer
from tests.support.optimizer_runs import BY_ID, assert_bitwise
from tests.support.processes import LIMIT
from tests.support.ranks import ranks
from tests.support.sharded_runs import (
    LAYOUTS,
    RUNS,
    SHAPES,
    Bag,
    Run,
    advance,
    assert_close,
    cost,
    distributed,
    full,
    gradients,
    mesh,
)
from tests.support.tables import for_every

BACKENDS = ("reference", "foreach", "cpu")


def rows() -> Iterator[Any]:
    """Return each layout with each run. Each run on FSDP2 with 2 ranks, and every `world`-th of others, is not slow."""
    for world in (2, 4):
        for (place, layout), (turn, name) in itertools.product(enumerate(LAYOUTS[world]), enumerate(RUNS)):
            yield pytest.param(
                layout, name, marks=[pytest.mark.slow] * bool(layout != "fsdp" and (place + turn) % world)
            )


def world_of(layout: str, **_: object) -> int:
    return next(world for world, layouts in LAYOUTS.items() if layout in layouts)


def placed(layout: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> Bag:
    bag = Bag(shapes, dtype, seed)
    LAYOUTS[dist.get_world_size()][layout](bag)
    return bag


@pytest.mark.parametrize(("layout", "name"), list(rows()))
@ranks(world_of)
def test_layouts(layout: str, name: str) -> None:
    (refuses_to_cut_blocks if layout in RUNS[name].not_on else equals_the_unsharded_run)(layout, RUNS[name])


def equals_the_unsharded_run(layout: str, run: Run) -> None:
    """Parameters, state and telemetry equal the unsharded run."""
    alone, sharded = Bag(SHAPES, run.dtype), placed(layout, SHAPES, run.dtype)
    clips = layout == "fsdp-and-tp" and run.options.keys() & {"max_grad_norm", "skip_nonfinite"}
    ours = run.optimizer(sharded, **({"grad_norm_group": mesh(2, 2)["one"].get_group()} if clips else {}))
    theirs = run.optimizer(alone)
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


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((2, 2), {"rows": [Shard(0), Replicate()], "columns": [Replicate(), Shard(0)]}),
        ((2, 2, 2), {"both": [Shard(0), Shard(1), Replicate()]}),
    ],
    ids=["two dims", "three dims"],
)
@ranks(lambda sizes, **_: math.prod(sizes))
def test_tensors_sharded_along_different_dims(
    kind: Kind, sizes: tuple[int, ...], placements: Mapping[str, list[Placement]]
) -> None:
    """Sums go over the mesh dims of all tensors, each among the ranks with equal indices in the other dims."""
    alone, sharded = (Bag(dict.fromkeys(placements, (6, 4)), torch.float64) for _ in "12")
    for name, each in placements.items():
        sharded.place([name], mesh(*sizes), each)
    for bag in (alone, sharded):
        advance(bag, Run(kind).optimizer(bag), range(2), torch.float64)
    for (name, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert_close(p, q, 1e-12, name)


@ranks(2)
def test_a_step_at_lr_0_is_one_if_one_rank_has_gradients(kind: Kind) -> None:
    """With zero gradients on all ranks it is not counted: torch.distributed.checkpoint creates state by such a step."""
    for with_gradients, steps in (([1], 1), ([], 0)):
        bag = Bag({"w": (6, 4)}, torch.float64)
        bag.place(["w"], mesh(2), [Shard(0)])
        (weight,) = bag.parameters()
        weight.grad = torch.full_like(weight, float(dist.get_rank() in with_gradients))
        optimizer = kind([weight], lr=0.0)
        optimizer.step()
        assert optimizer.state[weight]["step"] == steps


def refuses_to_cut_blocks(layout: str, run: Run) -> None:
    bag = placed(layout, SHAPES, run.dtype)
    before = {name: full(p).detach().clone() for name, p in bag.named_parameters()}
    with pytest.raises(ValueError, match=r"(?s)embedding.*int8.*dim 0"):
        advance(bag, run.optimizer(bag), range(1), run.dtype)
    for name, p in bag.named_parameters():
        assert full(p).equal(before[name])


@for_every(
    ("layout", "came", "numbers"),
    [
        # By rows: twice each column, the sum of the averages of rows, ||x||; then each column, and two sums over rows.
        ("fsdp", 2, 2 * 6 + 2 + 6 + 2),
        # Each row and column, then ||u|| and ||x||, then each row and column.
        ("both-dims", 3, 15 + 2 + 15),
    ],
)
@ranks(world_of)
def test_collectives(layout: str, came: int, numbers: int) -> None:
    """Six tensors take as many collectives as two, with the bytes of their sums."""
    for copies in (1, 3):
        shapes = {f"{name}{i}": shape for i in range(copies) for name, shape in (("w", (9, 6)), ("b", (9,)))}
        for kind, options, count, sums in (
            (Lamb, {}, 1, 4),
            (Lamb, {"max_grad_norm": 1.0}, 2, 4),
            (Lamb, {"hyperball": True, "weight_decay": 0.0}, 1, 6),
            (Lars, {}, 1, 4),
            (Came, {}, came, 2 + numbers),
            (Came, {"max_grad_norm": 1.0}, came + 1, 2 + numbers),
            (Came, {"cautious": True}, came + 1, 4 + numbers),
        ):
            bag = placed(layout, shapes, torch.float64)
            optimizer = Run(kind, options).optimizer(bag)
            advance(bag, optimizer, range(1), torch.float64)
            clip = 8 if "max_grad_norm" in options else 0
            assert cost(optimizer) == (count, 8 * sums * copies + clip), (kind, options, copies, cost(optimizer))


@pytest.mark.fsdp
@for_every("layout", ["columns", "both-dims", "fsdp-and-tp"])
@ranks(world_of)
def test_collectives_of_backends(layout: str) -> None:
    for kind in KINDS:
        costs = []
        for backend in ("reference", "cpu"):
            run, bag = Run(kind, dtype=torch.float32, backend=backend), placed(layout, SHAPES, torch.float32)
            optimizer = run.optimizer(bag)
            advance(bag, optimizer, range(1), run.dtype)
            costs.append(cost(optimizer))
        assert costs[0] == costs[1], (kind, costs)


@ranks(2)
def test_process_group() -> None:
    """A group of the mesh's ranks counts each parameter once; one of one rank, as in a pipeline stage, too."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for group in (dist.group.WORLD, own):
        alone, sharded = Bag(SHAPES, torch.float64), Bag(SHAPES, torch.float64)
        fully_shard(sharded)
        run = Run(Lamb, {"max_grad_norm": 0.5})
        advance(alone, run.optimizer(alone), range(1), run.dtype)
        advance(sharded, run.optimizer(sharded, grad_norm_group=group), range(1), run.dtype)
        for (name, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
            assert_close(p, q, run.tolerance, name)


@pytest.mark.fsdp
@for_every(("kind", "backend"), itertools.product(KINDS, BACKENDS))
@ranks(2)
def test_changing_storage(kind: Kind, backend: str) -> None:
    """One plan steps shards although their storage and gradients' strides change; replaced state takes another."""
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
                    if step == 2:
                        old = optimizer.state[p]["exp_avg"]
                        optimizer.state[p]["exp_avg"] = old.clone()
                        old.zero_()
                    if isinstance(p.grad, DTensor) and step % 2:
                        local = p.grad.to_local()
                        order = tuple(reversed(range(local.dim())))
                        local = local.permute(order).contiguous().permute(order)
                        p.grad = DTensor.from_local(
                            local, p.grad.device_mesh, p.grad.placements, shape=p.shape, stride=p.stride()
                        )
                optimizer.step()
    assert build.call_count == 3
    for (name, p), q in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert_close(p, q, 1e-5, name)


@for_every(("state_dtype", "dim", "backend"), itertools.product(("int8", "int4"), (0, 1), BACKENDS))
@ranks(2)
def test_experts(state_dtype: str, dim: int, backend: str) -> None:
    """Blocks are within rows of the factored matrices, so shards of whole rows have the same blocks."""
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
    assert_close(p, q, 1e-2, "experts")
    away = (full(p) - q).abs() > 1e-4 * q.abs().max()
    assert away.float().mean() < 0.01, "where a code is another, one step moves the parameter by a 127th of its block"


@for_every(("kind", "options"), [(Lamb, {"max_grad_norm": 0.1}), (Came, {})])
@ranks(2)
def test_tensor_parallel(kind: Kind, options: Mapping[str, Any]) -> None:
    """Seven hidden units on two ranks train with torch's plan for tensor parallelism."""
    inputs, alone = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), mlp()
    sharded = mlp()
    # Without use_local_output=False, torch 2.13 loses the number of units on the other rank.
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


@pytest.mark.fsdp
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    """Two ranks save, also in the background, and any number of ranks loads with the same result."""
    saves(name, tmp_path, in_background=name == "lamb")
    for layout in ("plain", "fsdp", "fsdp-4", "hybrid"):
        loads(layout, name, tmp_path)


def checkpoint(layout: str, run: Run, seed: int) -> tuple[Bag, Optimizer, dict[str, Any]]:
    """Return a model, its optimizer, and the states of both for torch.distributed.checkpoint."""
    bag = placed(layout, SHAPES, run.dtype, seed)
    optimizer = run.optimizer(bag)
    if seed == 0:
        advance(bag, optimizer, range(run.steps), run.dtype)
    model, state = get_state_dict(bag, optimizer)
    return bag, optimizer, {"model": model, "optimizer": state}


@ranks(2)
def saves(name: str, folder: Path, in_background: bool) -> None:
    """Save, and record the result of later steps; a save in the background must not contain them."""
    run = CHECKPOINTED[name]
    bag, optimizer, state = checkpoint("fsdp", run, seed=0)
    if in_background:
        own = dist.new_group()  # in the group of all ranks, its thread would interfere with sums of steps
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


@ranks(world_of)
def loads(layout: str, name: str, folder: Path) -> None:
    run = CHECKPOINTED[name]
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


# ---- one process: a step in reduction rounds, whose sums are already complete -------------------------------------


def in_rounds(kernel: Any, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
    for _ in kernel.sharded_step(grad_scale, apply_mask):
        pass


ROUNDS = [
    *itertools.product(
        ("cpu", "triton"),
        (
            *("both-bounds", "clip-skip", "stacked", "mixed-paper-v5", "bfloat16-states-int8-everything"),
            *("hyperball", "stacked-hyperball", "bfloat16-states-int8-hyperball"),
            *("lars-everything", "lars-stacked-joint-clipped", "lars-mixed-paper"),
        ),
    ),
    *(("cpu", f"came-{case}") for case in ("published", "everything", "bfloat16-states-int8-everything")),
    ("cpu", "came-bfloat16-states-int4-all-published"),
    *(("cpu", case) for case in ("l2", "bfloat16-states-int8-adamw")),
]


@pytest.mark.parametrize(("backend", "case"), ROUNDS, indirect=["backend"])
def test_rounds_are_a_step(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are equal bit for bit on compiled backends, where both run the same arithmetic."""
    whole, shards = BY_ID[case].parameters(), BY_ID[case].parameters()
    optimizer_runs.advance(BY_ID[case], whole, BY_ID[case].optimizer(whole, backend=backend), range(3))
    monkeypatch.setattr(kernels.kernel(backend, BY_ID[case].kind.algorithm.name), "step", in_rounds)
    optimizer_runs.advance(BY_ID[case], shards, BY_ID[case].optimizer(shards, backend=backend), range(3))
    assert_bitwise(shards, whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_rounds_are_a_step_for_large_tensors(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads share the tensors, and a step keeps a part of their u."""
    if not kernels.status()["cpu"].available:
        pytest.skip(kernels.status()["cpu"].detail)
    monkeypatch.setenv("BIGHORN_NUM_THREADS", str(threads))  # digests sets it; monkeypatch restores it
    whole = training_digests.digests(threads)
    monkeypatch.setattr(kernels.kernel("cpu", "lamb"), "step", in_rounds)
    assert training_digests.digests(threads) == whole
