"""LAMB and CAME inside of DeepSpeed, with its ZeRO and without, on several ranks: docs/sharding.md."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bighorn import Came, Lamb
from tests.support.cases import Optimizer
from tests.support.processes import LIMIT
from tests.support.ranks import ranks
from tests.support.sharded_runs import assert_close
from tests.support.trainer_model import EXCLUDED, Net, assert_same, by_hand

if find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed: pip install deepspeed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own

SAMPLES = 8
"""The samples of a step, of all ranks together."""


class Block(nn.Module):
    """A layer of a small vision transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 22), nn.GELU(), nn.Linear(22, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        z: Tensor = x + self.attn(y, y, y, need_weights=False)[0]
        return z + torch.as_tensor(self.mlp(self.norm2(z)))


class Vit(nn.Module):
    """A vision transformer of two layers, with sizes that no number of ranks divides. Its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch_embed = nn.Linear(9, 10)
        self.blocks = nn.Sequential(Block(10), Block(10))
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.frozen(self.blocks(self.patch_embed(x))).mean(dim=1))
        loss: Tensor = (y.float() - x.float().mean(dim=(1, 2))[:, None]).square().mean()
        return loss


def layerwise(net: nn.Module) -> list[dict[str, Any]]:
    """Return groups with a learning rate for each depth, and no weight decay for vectors, as EVA-CLIP has them."""
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, p in net.named_parameters():
        depth = 0 if name.startswith("patch_embed") else 1 + int(name.split(".")[1]) if "blocks" in name else 3
        decays = p.dim() > 1
        options = {"lr": 0.05 * 0.7 ** (3 - depth), "weight_decay": 0.1 if decays else 0.0}
        if p.requires_grad:
            groups.setdefault((depth, decays), {"params": [], **options})["params"].append((name, p))
    return list(groups.values())


def lamb(net: nn.Module, **options: Any) -> Lamb:
    return Lamb(layerwise(net), exclude_from_layer_adaptation=["bias", "norm"], **options)


def came(net: nn.Module) -> Came:
    """Return an optimizer with learning rates at which CAME does not diverge."""
    return Came([{**group, "lr": group["lr"] / 50} for group in layerwise(net)], bias_correction=True)


def inputs(step: int) -> Tensor:
    return torch.randn(SAMPLES, 4, 9, generator=torch.Generator().manual_seed(step))


Make = Callable[[nn.Module], Optimizer]


@cache
def deepspeed() -> Any:
    """Import DeepSpeed in ranks only, since it changes the process group, environment variables and a logger."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
    module = importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: True  # on any CPU
    module.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # shared memory between ranks: would be compiled
    module.init_distributed("gloo", auto_mpi_discovery=False)
    return module


def engine(net: nn.Module, stage: int, optimizer: Any = None, accumulate: int = 1, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size() // accumulate,
        "gradient_accumulation_steps": accumulate,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **more,
    }
    return deepspeed().initialize(model=net, optimizer=optimizer or lamb(net), config=config)[0]


FP16: Mapping[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
GROWING: Mapping[str, Any] = {"fp16": {**FP16["fp16"], "loss_scale_window": 3}}
"""A scale that grows in the run. In that step DeepSpeed (0.19) divides gradients by the new scale."""
BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}


def backward(trained: Any, step: int, spoil: float = 1.0) -> None:
    x = inputs(step).chunk(dist.get_world_size())[dist.get_rank()]
    trained.backward(trained(x.to(next(trained.module.parameters()).dtype)) * spoil)


def go(trained: Any, steps: Sequence[int]) -> None:
    for step in steps:
        backward(trained, step)
        trained.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("make", [lamb, came])
@ranks(2, 4)
def test_equals_one_process(stage: int, make: Make) -> None:
    """Twenty steps equal one process with the joined batch, with accumulation and DeepSpeed's clip."""
    ours, theirs = Vit(), Vit()
    trained, alone = engine(ours, stage, make(ours), accumulate=2, gradient_clipping=0.5), make(theirs)
    for step in range(20):
        for part in inputs(step).chunk(2):
            trained.backward(trained(part.chunk(dist.get_world_size())[dist.get_rank()]))
            trained.step()
        losses = [theirs(x) for part in inputs(step).chunk(2) for x in part.chunk(dist.get_world_size())]
        joined: Any = torch.stack(losses).mean()
        joined.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        alone.step()
        alone.zero_grad()
    for (name, p), q, start in zip(ours.named_parameters(), theirs.parameters(), Vit().parameters(), strict=True):
        assert_close(p, q, 1e-6, name)
        assert p.equal(start) == name.startswith("frozen"), name
    inner = trained.optimizer.optimizer if stage else trained.optimizer
    told, expected = vars(inner.telemetry()), vars(alone.telemetry())
    assert told.pop("names") == expected.pop("names")
    for name, values in expected.items():
        assert_close(told[name], values, 1e-4, name)
    assert "group 5" in inner.explain()


def masters(net: nn.Module) -> dict[str, Tensor]:
    """Return DeepSpeed's float32 weights."""
    named = [pair for pair in net.named_parameters() if pair[1].requires_grad]
    return {name: deepspeed().utils.safe_get_full_fp32_param(p).clone() for name, p in named}


@pytest.mark.parametrize(
    ("stage", "precision"),
    [*itertools.product((1, 2), (FP16, BF16)), (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}})],
)
@ranks(2, 4)
def test_equals_lamb_of_the_masters(stage: int, precision: Mapping[str, Any]) -> None:
    """In half precision, DeepSpeed's float32 weights equal one process with the same gradients."""
    ours, theirs = Vit(), Vit()
    trained = engine(ours, stage, **precision)
    alone = lamb(theirs)
    with torch.no_grad():
        for name, value in masters(ours).items():
            theirs.get_parameter(name).copy_(value)
    for step in range(5):
        backward(trained, step)
        scale = getattr(trained.optimizer, "loss_scale", 1.0)
        for name, p in ours.named_parameters():
            if p.requires_grad:
                grad = deepspeed().utils.safe_get_full_grad(p)
                assert grad is not None
                theirs.get_parameter(name).grad = grad.float() / scale
        trained.step()
        alone.step()
    for name, value in masters(ours).items():
        assert_close(value, theirs.get_parameter(name), 1e-6, name)
    assert next(ours.parameters()).dtype == torch.float16 if "fp16" in precision else torch.bfloat16


@ranks(2, 4)
def test_whole_parameters_without_zero() -> None:
    """Without ZeRO, DeepSpeed replaces each parameter by a float32 copy of its shape, which needs no map."""
    net = Vit()
    trained = engine(net, 0, **FP16)
    go(trained, range(2))
    shapes = [tuple(p.shape) for group in layerwise(net) for _, p in group["params"]]
    optimizer = trained.optimizer.optimizer
    assert [tuple(state["exp_avg"].shape) for state in optimizer.state.values()] == shapes
    assert optimizer.telemetry().names[0] == "patch_embed.weight"


@ranks(2, 4)
def test_an_overflow_on_one_rank() -> None:
    """An overflow on one rank skips the step on all of them, and lowers the scale."""
    net = Vit()
    trained = engine(net, 1, **FP16)
    go(trained, range(2))
    before, scale, world = masters(net), trained.optimizer.loss_scale, dist.get_world_size()
    backward(trained, 2, spoil=1e6 if dist.get_rank() == world - 1 else 1.0)
    trained.step()
    assert all(value.equal(before[name]) for name, value in masters(net).items())
    assert trained.optimizer.loss_scale == scale / 2
    assert trained.skipped_steps == 1
    go(trained, [3])
    assert not any(value.equal(before[name]) for name, value in masters(net).items())
    state = trained.optimizer.optimizer.state
    assert all(each["step"] == 3 for each in state.values())


def large_groups(net: nn.Module) -> Lamb:
    """Return an optimizer whose groups have elements for every rank, which DeepSpeed (0.19) needs to load them."""
    named = [pair for pair in net.named_parameters() if pair[1].requires_grad]
    matrices = [pair for pair in named if pair[1].dim() > 1]
    return Lamb([{"params": matrices}, {"params": [pair for pair in named if pair[1].dim() < 2]}], lr=0.05)


@ranks(2)
def resumes(stage: int, precision: Mapping[str, Any], make: Make, folder: Path) -> None:
    """A loaded run ends like the run that saved, bit for bit."""
    nets = Vit(), Vit()
    trained, other = (engine(net, stage, make(net), **precision) for net in nets)
    go(trained, range(3))
    trained.save_checkpoint(str(folder), tag="third")
    go(trained, range(3, 7))
    other.load_checkpoint(str(folder), tag="third")
    go(other, range(3, 7))
    for (name, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert p.equal(q), name
    if dist.get_rank() == 0:
        torch.save({name: p.detach().clone() for name, p in nets[0].named_parameters()}, folder / "seventh.pt")


@pytest.mark.parametrize(
    ("stage", "precision", "make"),
    [(0, {}, lamb), (2, {}, lamb), (1, GROWING, lamb), (1, {}, came), (2, GROWING, came)],
)
def test_resumes(stage: int, precision: Mapping[str, Any], make: Make, tmp_path: Path) -> None:
    resumes(stage, precision, make, tmp_path)


@ranks(4)
def continues_from_a_universal_checkpoint(folder: Path) -> None:
    net = Vit()
    trained = engine(net, 1, large_groups(net), checkpoint={"load_universal": True})
    trained.load_checkpoint(str(folder), tag="universal")
    go(trained, range(3, 7))
    for name, value in torch.load(folder / "seventh.pt").items():
        assert_close(net.get_parameter(name), value, 1e-6, name)


def test_a_universal_checkpoint_of_other_ranks(tmp_path: Path) -> None:
    """DeepSpeed's own script converts a checkpoint of two ranks, and four continue it."""
    resumes(1, {}, large_groups, tmp_path)
    folders = ["--input_folder", str(tmp_path / "third"), "--output_folder", str(tmp_path / "universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    script = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([*script, *folders, *workers], check=True, capture_output=True, timeout=LIMIT, env=environment)
    continues_from_a_universal_checkpoint(tmp_path)


class Two(nn.Sequential):
    """Two layers whose output is the loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        two = 2 * dist.get_world_size()
        super().__init__(nn.Linear(9, two), nn.Linear(two, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x.square().mean()


def in_8_bits(net: nn.Module) -> Came:
    return Came(net.named_parameters(), lr=0.1, state_dtype="int8")


def clipping(net: nn.Module) -> Lamb:
    pairs = list(net.named_parameters())
    return Lamb([{"params": pairs[:2]}, {"params": pairs[2:]}], lr=0.1, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (in_8_bits, r"(?s)state_dtype=\"int8\" keeps blocks of rows"),
        (clipping, r"(?s)max_grad_norm=1\.0 uses all gradients.*1 of 2 groups.*gradient_clipping"),
    ],
)
@ranks(2)
def test_an_option_that_needs_whole_tensors_is_refused(make: Make, text: str) -> None:
    """The first step refuses it on every rank, before anything changes."""
    model = Two()
    before = [p.detach().clone() for p in model.parameters()]
    trained = engine(model, 1, make(model))
    backward(trained, 0)
    with pytest.raises(ValueError, match=text):
        trained.step()
    assert all(p.equal(q) for p, q in zip(model.parameters(), before, strict=True))


@ranks(2)
def test_parameters_without_names() -> None:
    net = Two()
    trained = engine(net, 2, Lamb(net.parameters(), lr=0.1))
    go(trained, range(2))
    assert trained.optimizer.optimizer.telemetry().names == tuple(f"param_groups[0].params[{i}]" for i in range(4))


@ranks(2)
def test_zero_3_is_refused() -> None:
    net = Two()
    with pytest.raises(ValueError, match=r"(?s)ZeRO-3.*use ZeRO 1 or 2"):
        go(engine(net, 3, Lamb(net.named_parameters(), lr=0.1)), [0])


@ranks(1)
def test_the_trainer_of_transformers(folder: Path) -> None:
    """docs/with-transformers.md: it takes an optimizer's class, and drops an optimizer."""
    deepspeed()
    os.environ.update(RANK="0", WORLD_SIZE="1")
    from tests.integrations.test_transformers import trainer

    config = {
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    given = {"deepspeed": config, "lr_scheduler_type": "constant", "max_grad_norm": 0.5, "weight_decay": 0.1}

    def trained(net: Net, **optimizer: Any) -> Any:
        made = trainer(folder, net, given, **optimizer)
        made.train()
        return made

    for kind, own in ((Lamb, {"exclude_from_layer_adaptation": EXCLUDED}), (Came, {})):
        net = Net()
        made = trained(net, optimizer_cls_and_kwargs=(kind, {"lr": 0.05, "names": net, **own}))
        assert type(made.optimizer.optimizer.optimizer) is kind
        options: Any = {"lr": 0.05, "weight_decay": 0.1, "exclude_from_weight_decay": EXCLUDED, **own}
        assert_same(made.model, by_hand(lambda net: kind(net.named_parameters(), **options), clip=0.5))  # noqa: B023
    net = Net()
    dropped = trained(net, optimizers=(Lamb(net.named_parameters(), lr=0.05), None))
    assert type(dropped.optimizer.optimizer.optimizer) is torch.optim.AdamW
