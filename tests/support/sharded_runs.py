"""Models whose parameters are sharded in several ways, and the options with which their optimizers run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from tests.support.cases import ExactCame, ExactLamb, ExactLars, Kind, Optimizer

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
    """Parameters, and a loss with given gradients."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
            self.register_parameter(name, Parameter(values.to(dtype)))

    def place(self, names: Sequence[str], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        """Distribute some parameters; they are replicated in place of shards along missing dims."""
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


@functools.cache
def mesh(*sizes: int) -> DeviceMesh:
    """Return the mesh of these sizes in this process, whose groups have three threads each and are never destroyed."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("one", "two", "three")[: len(sizes)])


def distributed(*placements: Placement, sizes: tuple[int, ...]) -> Layout:
    return lambda bag: bag.place(list(dict(bag.named_parameters())), mesh(*sizes), placements)


def hybrid(bag: Bag) -> None:
    fully_shard(bag, mesh=mesh(2, 2))


def half_plain(bag: Bag) -> None:
    bag.place(["prime", "conv", "bias"], mesh(dist.get_world_size()), [Shard(0)])


def tensor_parallel_and_sharded(bag: Bag) -> None:
    """Use strided shards, both dims, replication along one mesh dim, and parameters on the other dim's mesh alone."""
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
    """Group options of parameters of 2 dims or more."""
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
CPU: Mapping[str, Any] = {"dtype": torch.float32, "backend": "cpu", "tolerance": 1e-5}
FOREACH: Mapping[str, Any] = {**CPU, "backend": "foreach"}
AUTO: Mapping[str, Any] = {**CPU, "backend": "auto"}
IN_BLOCKS: Mapping[str, Any] = {"not_on": ("columns", "both-dims", "fsdp-and-tp")}
"""Layouts that would cut the rows of blocks."""

CLIPPED: Mapping[str, Any] = {
    "max_grad_norm": 0.5,
    "skip_nonfinite": True,
    "second_moment": "amsgrad",
    "exclude_from_weight_decay": ["bias", "few$"],
    "exclude_from_layer_adaptation": not_matrices,
}
CENTRED: Mapping[str, Any] = {"grad_centralization": True}
STACKED: Mapping[str, Any] = {"stacked": True}
EPS: Mapping[str, Any] = {"eps": (1e-3, 1e-3)}
CORRECTED: Mapping[str, Any] = {"scale_parameter": True, "bias_correction": True}
STOCHASTIC: Mapping[str, Any] = {"weight_rounding": "stochastic"}
SMALL_TRUST: Mapping[str, Any] = {"trust_coefficient": 0.3}
CLIPPED_LARS: Mapping[str, Any] = {**SMALL_TRUST, "denominator": "joint", "max_grad_norm": 0.5, "skip_nonfinite": True}

BALL: Mapping[str, Any] = {"hyperball": True, "exclude_from_weight_decay": lambda _name, p: p.dim() >= 2}

RUNS: Mapping[str, Run] = {
    "lamb": Run(Lamb, steps=10, compares_state=True),
    "lamb-clip": Run(Lamb, CLIPPED),
    "lamb-means": Run(Lamb, {"cautious": True, "decay_mode": "l2"}, CENTRED),
    "lamb-stacked": Run(Lamb, {"decay_mode": "decoupled"}, STACKED),
    "lamb-ball": Run(Lamb, {**BALL, "max_grad_norm": 1.0}, steps=10, compares_state=True),
    "lamb-ball-int8": Run(ExactLamb, {**BALL, "state_dtype": "int8"}, **IN_BLOCKS),
    "lamb-ball-cpu": Run(Lamb, BALL, STACKED, compares_state=True, **CPU),
    "lamb-ball-cpu-whole": Run(Lamb, BALL, steps=10, **{**CPU, "tolerance": 1e-6}),
    "lamb-ball-foreach": Run(Lamb, BALL, CENTRED, **FOREACH),
    "came": Run(Came, steps=10, compares_state=True),
    "came-everything": Run(Came, {**CORRECTED, "decay_rate": 0.8, "factor": "last_two", "max_grad_norm": 1.0}, CENTRED),
    "came-stacked": Run(Came, EPS, {**STACKED, "factor": "last_two"}),
    "came-cautious": Run(Came, {"cautious": True, **EPS}, CENTRED),
    "came-int8": Run(ExactCame, {"state_dtype": "int8", **EPS}, compares_state=True, **IN_BLOCKS),
    "came-int4": Run(ExactCame, {"state_dtype": "int4", **EPS}, compares_state=True, **IN_BLOCKS),
    # The random bits of the second moment depend on an element's position in the whole tensor.
    "lamb-int8": Run(ExactLamb, {"state_dtype": "int8"}, **IN_BLOCKS),
    "lamb-cpu": Run(Lamb, {"max_grad_norm": 0.5}, STACKED, **CPU),
    # Without trust ratios no sums are exchanged: every bit equals the unsharded run's.
    "lamb-cpu-stochastic": Run(Lamb, {**STOCHASTIC, **ALONE}, **BITWISE),
    "lamb-cpu-stochastic-stacked": Run(Lamb, {**STOCHASTIC, **ALONE}, STACKED, **BITWISE),
    "lamb-cpu-int8": Run(
        Lamb, {**STOCHASTIC, "state_dtype": "int8", **ALONE}, compares_state=True, **IN_BLOCKS, **BITWISE
    ),
    "lamb-cpu-means": Run(Lamb, {"decay_mode": "l2"}, CENTRED, **CPU),
    "lamb-foreach-float64": Run(Lamb, {"decay_mode": "l2"}, CENTRED, backend="foreach", compares_state=True),
    "lamb-foreach": Run(Lamb, **FOREACH),
    "came-cpu": Run(Came, {**EPS, **CORRECTED, "max_grad_norm": 1.0}, compares_state=True, **CPU),
    "came-foreach-float64": Run(Came, EPS, CENTRED, backend="foreach", compares_state=True),
    "came-foreach-cautious": Run(Came, {"cautious": True, **EPS, **CORRECTED}, STACKED, backend="foreach"),
    "came-cpu-last-two": Run(Came, {**EPS, "factor": "last_two"}, STACKED, **CPU),
    # With seed 0 one code of the embedding is the neighbour, since sums over ranks are rounded otherwise.
    "came-cpu-int8": Run(Came, {**EPS, "state_dtype": "int8", "rounding_seed": 1}, **IN_BLOCKS, **CPU),
    # Without a clip, few sums cross ranks, since rows of dim 0 are whole.
    "came-cpu-stochastic": Run(Came, {**EPS, "clip_threshold": 1e3, **STOCHASTIC}, STACKED, **BITWISE),
    "came-foreach": Run(Came, EPS, **FOREACH),
    "lars": Run(
        Lars,
        {**CLIPPED_LARS, "exclude_from_layer_adaptation": not_matrices},
        CENTRED,
        steps=10,
        compares_state=True,
    ),
    "lars-int8": Run(ExactLars, {**SMALL_TRUST, "state_dtype": "int8"}, **IN_BLOCKS),
    "lars-cpu": Run(Lars, {**SMALL_TRUST, "nesterov": True, "trust_clip": True}, STACKED, compares_state=True, **CPU),
    # Without trust ratios no sums are exchanged.
    "lars-cpu-stochastic": Run(Lars, {**STOCHASTIC, "exclude_from_layer_adaptation": lambda *_: True}, **BITWISE),
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


COMPARED = 16
"""The bytes of the collective by which ranks on CPUs compare which parameters have gradients, for each mesh."""


def cost(optimizer: Optimizer) -> tuple[int, int]:
    """Return the number of collectives of a step, and the bytes that a rank sends in them, without comparisons."""
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
    meshes = optimizer._steps.presence._labels  # type: ignore[union-attr]
    assert given[: len(meshes)] == [COMPARED] * len(meshes)
    return len(given) - len(meshes), sum(given[len(meshes) :])
