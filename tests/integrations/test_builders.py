"""Trainers that build the optimizers themselves, by a registry, parser or config loader, and trainers with a loop.

The table of docs/trainers.md lists the files of each that run here, with their versions.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bighorn import Came, Lamb
from tests.support.other_packages import bare_packages, timm_optim
from tests.support.trainer_model import INPUTS, INSTALL, LABELS, Logits, Net, batches

pytestmark = pytest.mark.filterwarnings("ignore")

BARE = "pip install --no-deps, as make integrations does"
EPOCHS, HALF = 3, 18
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}

with_both_kinds = pytest.mark.parametrize("kind", [Lamb, Came])


def losses(net: nn.Module, optimizer: Any, start: int = 0, stop: int = 12) -> list[float]:
    """Take steps `start` to `stop`, of 12 in an epoch, and return their losses."""
    found = []
    for inputs, labels in (batches() * EPOCHS)[start:stop]:
        loss = net(inputs, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def by_hand(kind: Any, steps: int = 12, **options: Any) -> list[float]:
    net = Net()
    return losses(net, kind(net.parameters(), **{**OPTIONS, **options}), stop=steps)


# ---- the same 36 steps ----------------------------------------------------------------------------------------------


@contextmanager
def timm(kind: Any) -> Iterator[Callable[[Net], Any]]:
    with timm_optim() as registry:
        name = f"bighorn{kind.__name__.lower()}"
        # The name in timm's registry excludes biases and norms from the trust ratio.
        every = {"exclude_from_layer_adaptation": ()} if kind is Lamb else {}
        yield partial(registry.create_optimizer_v2, opt=name, filter_bias_and_bn=False, **OPTIONS, **every)


def titan(groups: list[dict[str, Any]], net: nn.Module) -> Any:
    pytest.importorskip("torchtitan.components.optimizer", reason=BARE, exc_type=ImportError)
    from torchtitan.components.optimizer import ParamGroupConfig

    from bighorn.integrations.torchtitan import OptimizersContainer

    config = OptimizersContainer.Config(param_groups=[ParamGroupConfig(**group) for group in groups])
    return config.build(model_parts=[net])


@contextmanager
def torchtitan(kind: Any) -> Iterator[Callable[[Net], Any]]:
    group = {"pattern": ".*", "optimizer_name": f"bighorn.{kind.__name__}", "optimizer_kwargs": OPTIONS}
    yield partial(titan, [group])


@contextmanager
def torchtune(kind: Any) -> Iterator[Callable[[Net], Any]]:
    omegaconf = pytest.importorskip("omegaconf", reason=INSTALL)
    node = omegaconf.OmegaConf.create({"_component_": f"bighorn.{kind.__name__}", **OPTIONS})
    with bare_packages(BARE, "torchtune", "torchtune.training") as load:
        instantiate = load("torchtune.config._instantiate").instantiate
        yield lambda net: instantiate(node, net.parameters())


@contextmanager
def hydra(kind: Any) -> Iterator[Callable[[Net], Any]]:
    instantiate = pytest.importorskip("hydra.utils", reason=INSTALL).instantiate
    make = instantiate({"_target_": f"bighorn.{kind.__name__}", **OPTIONS}, _partial_=True)
    yield lambda net: make(net.parameters())


@contextmanager
def nemo(kind: Any) -> Iterator[Callable[[Net], Any]]:
    module = pytest.importorskip("nemo_automodel.components.optim.optimizer", reason=BARE, exc_type=ImportError)
    yield lambda net: module.build_optimizer(net, (f"bighorn.{kind.__name__}", OPTIONS))[0]


@contextmanager
def verl(kind: Any) -> Iterator[Callable[[Net], Any]]:
    with bare_packages(BARE, "verl", "verl.workers", "verl.workers.config") as load:
        optimizers = load("verl.workers.config.optimizer")
        config = optimizers.FSDPOptimizerConfig(optimizer=kind.__name__, optimizer_impl="bighorn", **OPTIONS)
        yield lambda net: optimizers.build_optimizer(net.parameters(), config)


BUILDERS = (timm, torchtitan, torchtune, hydra, nemo, verl)


@with_both_kinds
@pytest.mark.parametrize("client", BUILDERS, ids=lambda client: client.__name__)
def test_a_client_builds_what_trains_and_resumes_bitwise(client: Any, kind: Any, tmp_path: Path) -> None:
    with client(kind) as build:
        net, again = Net(), Net()
        optimizer = build(net)
        found = losses(net, optimizer, stop=HALF)
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
        found += losses(net, optimizer, start=HALF, stop=36)
        saved = torch.load(tmp_path / "half.pt")
        again.load_state_dict(saved["net"])
        resumed = build(again)
        resumed.load_state_dict(saved["optimizer"])
        assert losses(again, resumed, start=HALF, stop=36) == found[HALF:]
    assert found == pytest.approx(by_hand(kind, steps=36), rel=1e-5)
    assert all(a.equal(b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@with_both_kinds
def test_hydra_gives_lists_of_omegaconf(kind: Any) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason=INSTALL)
    instantiate = pytest.importorskip("hydra.utils", reason=INSTALL).instantiate
    options = {"betas": [0.9, 0.95, 0.99][: 2 + (kind is Came)], "exclude_from_weight_decay": ["bias", "norm"]}
    node = omegaconf.OmegaConf.create({"_target_": f"bighorn.{kind.__name__}", **OPTIONS, **options})
    nets = Net(), Net()
    ours, plain = instantiate(node, _partial_=True), partial(kind, **OPTIONS, **options)
    assert losses(nets[0], ours(nets[0].named_parameters())) == losses(nets[1], plain(nets[1].named_parameters()))


# ---- fastai ---------------------------------------------------------------------------------------------------------


def learner(kind: Any, folder: Path, found: list[float]) -> Any:
    module = pytest.importorskip("fastai.learner", reason=BARE, exc_type=ImportError)
    core = pytest.importorskip("fastai.data.core", reason=BARE, exc_type=ImportError)
    load = pytest.importorskip("fastai.data.load", reason=BARE, exc_type=ImportError)
    wrapper = pytest.importorskip("fastai.optimizer", reason=BARE, exc_type=ImportError).OptimWrapper

    def loss_func(logits: Any, labels: Any) -> Any:
        loss = nn.functional.cross_entropy(logits, labels)
        found.append(float(loss.detach()))
        return loss

    pairs = list(zip(INPUTS, LABELS, strict=True))
    loaders = core.DataLoaders(load.DataLoader(pairs, bs=2), load.DataLoader(pairs[:2], bs=2))
    return module.Learner(
        loaders, Logits(), loss_func, partial(wrapper, opt=kind), lr=OPTIONS["lr"], wd=0.1, path=folder
    )


def without_validation() -> Any:
    callback = pytest.importorskip("fastai.callback.core", reason=BARE, exc_type=ImportError)

    class WithoutValidation(callback.Callback):  # type: ignore[misc, name-defined]
        def before_validate(self) -> None:
            raise callback.CancelValidException

    return WithoutValidation()


@with_both_kinds
def test_fastai_trains_and_resumes_bitwise(kind: Any, tmp_path: Path) -> None:
    seen: list[list[float]] = [[], []]
    whole, resumed = learner(kind, tmp_path, seen[0]), learner(kind, tmp_path, seen[1])
    for made, epochs in ((whole, 1), (whole, 2), (resumed, 2)):
        if made is resumed:
            made.load("first")
        with made.no_logging():
            made.fit(epochs, cbs=[without_validation()])
        if epochs == 1:
            made.save("first", with_opt=True)
    assert seen[0] == pytest.approx(by_hand(kind, steps=36), rel=1e-3, abs=1e-4)
    assert seen[0][12:] == seen[1]


@with_both_kinds
def test_fastais_one_cycle(kind: Any, tmp_path: Path) -> None:
    """It changes the rate and the first beta, by fastai's names."""
    pytest.importorskip("fastai.callback.schedule", reason=BARE, exc_type=ImportError)  # adds fit_one_cycle
    seen: list[float] = []
    made = learner(kind, tmp_path, seen)
    made.fit_one_cycle(2, 0.02)
    optimizer = made.opt.opt
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1] * len(optimizer.param_groups)
    assert 0.85 <= optimizer.param_groups[0]["betas"][0] <= 0.95 != 0.9
    assert optimizer.param_groups[0]["schedule_step"] == 24
    assert seen[-1] < seen[0]


# ---- torchtitan -----------------------------------------------------------------------------------------------------


def in_two(net: nn.Module) -> list[dict[str, Any]]:
    """Return two groups; biases and norms have no decay and no trust ratio."""
    named = dict(net.named_parameters())
    few = [named[name] for name in named if "bias" in name or "norm" in name]
    many = [named[name] for name in named if not ("bias" in name or "norm" in name)]
    return [
        {"params": few, "lr": 0.01, "weight_decay": 0.0, "adapt": False},
        {"params": many, "lr": 0.01, "weight_decay": 0.1},
    ]


def test_torchtitan_builds_from_its_config() -> None:
    options = {"lr": 0.01, "adapt": False, "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [
        {"pattern": "bias|norm", "optimizer_name": "bighorn.Lamb", "optimizer_kwargs": options},
        {"pattern": ".*", "optimizer_name": "bighorn.Lamb", "optimizer_kwargs": {"lr": 0.01, "weight_decay": 0.1}},
    ]
    net, hand = Net(), Net()
    container = titan(groups, net)
    (optimizer,) = container
    assert type(optimizer) is Lamb
    assert optimizer.param_groups[0]["param_names"] == ["body.bias", "norm.weight", "norm.bias", "head.bias"]
    assert losses(net, container) == pytest.approx(losses(hand, Lamb(in_two(hand))))


def test_torchtitan_mixes_them_with_its_own() -> None:
    net = Net()
    container = titan(
        [
            {"pattern": "bias|norm", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.01}},
            {"pattern": ".*", "optimizer_name": "bighorn.Came", "optimizer_kwargs": {"lr": 0.01}},
        ],
        net,
    )
    assert [type(each) for each in container] == [torch.optim.AdamW, Came]
    assert losses(net, container)[-1] < 1.0
    container.load_state_dict(container.state_dict())


# ---- torchtune ------------------------------------------------------------------------------------------------------


@with_both_kinds
def test_torchtune_instantiates_from_its_yaml(kind: Any) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason=INSTALL)
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "exclude_from_weight_decay": "ndim<2"}
    node = omegaconf.OmegaConf.create({"_component_": f"bighorn.{kind.__name__}", **options, "fused": False})
    with bare_packages(BARE, "torchtune", "torchtune.training") as load:
        instantiate = load("torchtune.config._instantiate").instantiate
        net = Net()
        assert losses(net, instantiate(node, net.parameters())) == by_hand(kind, **options)
        node.fused = True  # as in torchtune's files
        with pytest.raises(TypeError, match=rf"'fused', an option of torch\.optim but not of {kind.__name__}: every"):
            instantiate(node, net.parameters())


def test_torchtunes_optimizer_in_bwd() -> None:
    with bare_packages(BARE, "torchtune", "torchtune.training") as load:
        memory = load("torchtune.training.memory")
        net = Net()
        made: dict[Any, Any] = {p: Lamb([p], lr=0.01, weight_decay=0.1) for p in net.parameters()}
        memory.register_optim_in_bwd_hooks(model=net, optim_dict=made)
        wrapper = memory.create_optim_in_bwd_wrapper(net, made)
        got = []
        for inputs, labels in batches():
            loss = net(inputs, labels)["loss"]
            loss.backward()
            got.append(float(loss.detach()))
        assert got == pytest.approx(by_hand(Lamb))
        wrapper.load_state_dict(wrapper.state_dict())
        clipped = Net()
        memory.register_optim_in_bwd_hooks(
            model=clipped, optim_dict={p: Lamb([p], max_grad_norm=1.0) for p in clipped.parameters()}
        )
        with pytest.raises(RuntimeError, match=r"max_grad_norm=1.0 looks at all gradients.*optimizer_in_bwd=False"):
            clipped(*batches()[0])["loss"].backward()


# ---- NeMo AutoModel and verl ----------------------------------------------------------------------------------------


@with_both_kinds
def test_nemo_builds_from_a_dotted_path(kind: Any) -> None:
    nemo = pytest.importorskip("nemo_automodel.components.optim.optimizer", reason=BARE, exc_type=ImportError)
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    net = Net()
    (plain,) = nemo.build_optimizer(net, (f"bighorn.{kind.__name__}", options))
    assert losses(net, plain) == by_hand(kind, **options)
    overrides = [{"pattern": "bias|norm", "lr_mult": 0.5, "wd_mult": 0.0}]
    (grouped,) = nemo.build_optimizer(
        Net(), (f"bighorn.{kind.__name__}", {**options, "param_group_overrides": overrides})
    )
    assert [group.get("wd_mult") for group in grouped.param_groups] == [None, 0.0]
    grouped.load_state_dict(grouped.state_dict())
    # NeMo's arguments under tensor parallelism; our constructor takes any keyword, to suggest the nearest option.
    assert nemo._factory_accepts_foreach(kind)
    kind(Net().parameters(), **options, foreach=False)


@with_both_kinds
def test_verl_builds_by_module_and_name(kind: Any) -> None:
    with bare_packages(BARE, "verl", "verl.workers", "verl.workers.config") as load:
        optimizers = load("verl.workers.config.optimizer")
        config = optimizers.FSDPOptimizerConfig(
            lr=0.01,
            weight_decay=0.1,
            optimizer=kind.__name__,
            optimizer_impl="bighorn",
            override_optimizer_config={"state_dtype": "bfloat16"},
        )
        net = Net()
        optimizer = optimizers.build_optimizer(net.parameters(), config)
    assert type(optimizer) is kind
    assert losses(net, optimizer) == by_hand(kind, state_dtype="bfloat16")


# ---- MMEngine -------------------------------------------------------------------------------------------------------


def mmengine(kind: Any, folder: Path, resume: Path | None = None) -> list[float]:
    runner = pytest.importorskip("mmengine.runner", reason=INSTALL)
    model = pytest.importorskip("mmengine.model", reason=INSTALL)
    found: list[float] = []

    class Model(model.BaseModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Any, labels: Any, mode: str) -> Any:
            assert mode == "loss"
            loss = self.net(inputs, labels)["loss"]
            found.append(float(loss.detach()))
            return {"loss": loss}

    data = torch.utils.data.TensorDataset(INPUTS, LABELS)
    made = runner.Runner(
        Model(),
        str(folder),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2),
        train_cfg={"by_epoch": True, "max_epochs": EPOCHS},
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": f"bighorn.{kind.__name__}", **OPTIONS}},
        load_from=None if resume is None else str(resume),
        resume=resume is not None,
        experiment_name=f"{folder.name}-{kind.__name__}-{resume is None}",
        log_level="ERROR",
    )
    made.train()
    return found


@with_both_kinds
def test_mmengine_trains_and_resumes_bitwise(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MMEngine 0.10 does not load its own checkpoints with the default of torch 2.6."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    whole = mmengine(kind, tmp_path / "whole")
    assert whole == pytest.approx(by_hand(kind, steps=36), rel=1e-3, abs=1e-4)
    assert mmengine(kind, tmp_path / "more", resume=tmp_path / "whole" / "epoch_1.pth") == whole[12:]


@with_both_kinds
def test_mmengine_builds_groups_and_schedules_the_rate(kind: Any) -> None:
    optim = pytest.importorskip("mmengine.optim", reason=INSTALL)
    net = Net()
    config = {"type": f"bighorn.{kind.__name__}", "lr": 0.01, "weight_decay": 0.1}
    options = {"norm_decay_mult": 0.0, "bias_decay_mult": 0.0}
    wrapper = optim.build_optim_wrapper(
        net, {"type": "OptimWrapper", "optimizer": config, "paramwise_cfg": options, "clip_grad": {"max_norm": 1.0}}
    )
    decays = {id(param): group["weight_decay"] for group in wrapper.optimizer.param_groups for param in group["params"]}
    assert [decays[id(param)] for param in net.parameters()] == [0.1, 0, 0, 0, 0.1, 0]
    scheduler = optim.CosineAnnealingLR(wrapper, T_max=12, by_epoch=False)
    seen = []
    for inputs, labels in batches():
        loss = net(inputs, labels)["loss"]
        wrapper.update_params(loss)
        scheduler.step()
        seen.append(float(loss.detach()))
    assert seen[-1] < seen[0]
    assert wrapper.get_lr()["lr"][0] == pytest.approx(0.0)


@with_both_kinds
def test_mmengine_schedules_the_momentum_of_lamb(kind: Any) -> None:
    """MMEngine writes SGD's key into the groups, and the first of two betas; CAME has three."""
    optim = pytest.importorskip("mmengine.optim", reason=INSTALL)
    net = Net()
    wrapper = optim.build_optim_wrapper(
        net, {"type": "OptimWrapper", "optimizer": {"type": f"bighorn.{kind.__name__}", "lr": 0.01}}
    )
    if kind is Came:
        with pytest.raises(ValueError, match="too many values to unpack"):
            optim.CosineAnnealingMomentum(wrapper, T_max=12, by_epoch=False)
        return
    scheduler = optim.CosineAnnealingMomentum(wrapper, T_max=12, by_epoch=False)
    for inputs, labels in batches():
        wrapper.update_params(net(inputs, labels)["loss"])
        scheduler.step()
    assert wrapper.optimizer.param_groups[0]["betas"][0] == pytest.approx(0.0)


# ---- Stable-Baselines3 ----------------------------------------------------------------------------------------------


@with_both_kinds
def test_stable_baselines_learns_and_resumes(kind: Any, tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason=INSTALL)
    gymnasium = pytest.importorskip("gymnasium", reason=INSTALL)

    class Sign(gymnasium.Env):  # type: ignore[misc, name-defined]
        """The right action is the sign of the first number."""

        observation_space = gymnasium.spaces.Box(-1, 1, (3,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed, options=options)
            self.left = 16
            return self.seen(), {}

        def seen(self) -> Any:
            self.numbers = self.np_random.uniform(-1, 1, 3).astype("float32")
            return self.numbers

        def step(self, action: Any) -> Any:
            right = float(action == (self.numbers[0] > 0))
            self.left -= 1
            return self.seen(), right, self.left == 0, False, {}

    options: dict[str, Any] = {"weight_decay": 0.01, "exclude_from_weight_decay": "ndim<2"}
    made = sb3.PPO(
        "MlpPolicy",
        Sign(),
        learning_rate=lambda left: 0.01 * left,
        n_steps=64,
        batch_size=32,
        n_epochs=2,
        seed=0,
        device="cpu",
        policy_kwargs={"optimizer_class": kind, "optimizer_kwargs": options},
    )
    made.learn(256)
    assert type(made.policy.optimizer) is kind
    assert made.policy.optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    made.save(tmp_path / "made.zip")
    again = sb3.PPO.load(tmp_path / "made.zip", env=Sign(), device="cpu")
    assert made.policy.optimizer.param_groups[0]["schedule_step"] == 16
    for a, b in zip(made.policy.optimizer.state.values(), again.policy.optimizer.state.values(), strict=True):
        assert all(value.equal(b[name]) for name, value in a.items())
    again.learn(64)


# ---- axolotl --------------------------------------------------------------------------------------------------------


@with_both_kinds
def test_axolotls_plugin_manager_asks_ours(kind: Any) -> None:
    base = pytest.importorskip("axolotl.integrations.base", reason=BARE, exc_type=ImportError)
    manager = base.PluginManager()
    manager.plugins.clear()
    manager.register(f"bighorn.integrations.axolotl.{kind.__name__}Plugin")
    manager.cfg = SimpleNamespace(learning_rate="1e-2", weight_decay=0.1, optim_args={"state_dtype": "bfloat16"})
    net = Net()
    names = ["body.weight", "head.weight"]
    optimizer = manager.create_optimizer(SimpleNamespace(model=net, get_decay_parameter_names=lambda _: names))
    manager.plugins.clear()
    assert type(optimizer) is kind
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decays == {name: 0.1 * (name in names) for name, _ in net.named_parameters()}
    assert {group["state_dtype"] for group in optimizer.param_groups} == {"bfloat16"}
    assert losses(net, optimizer)[-1] < 1.0


# ---- LightningCLI ---------------------------------------------------------------------------------------------------


@with_both_kinds
def test_lightnings_command_line(kind: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason=INSTALL)
    pytest.importorskip("jsonargparse", reason=INSTALL)
    from lightning.pytorch.cli import LightningCLI

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(*batch)["loss"]

        def train_dataloader(self) -> Any:
            inputs = torch.cat([each for each, _ in batches()])
            labels = torch.cat([each for _, each in batches()])
            data = torch.utils.data.TensorDataset(inputs, labels)
            return torch.utils.data.DataLoader(data, batch_size=2)

    arguments = ["fit", f"--optimizer=bighorn.{kind.__name__}", "--optimizer.lr=0.01", "--optimizer.weight_decay=0.1"]
    arguments += ["--optimizer.state_dtype=bfloat16", "--optimizer.exclude_from_weight_decay=ndim<2"]
    arguments += ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    arguments += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    arguments += [f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_model_summary=false"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = LightningCLI(Model, args=arguments, save_config_callback=None)
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["state_dtype"] == "bfloat16"
    net = Net()
    losses(
        net,
        kind(net.parameters(), lr=0.01, weight_decay=0.1, state_dtype="bfloat16", exclude_from_weight_decay="ndim<2"),
    )
    for a, b in zip(cli.model.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# ---- TRL and sentence-transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("trl", "SFTTrainer"),
        ("trl", "DPOTrainer"),
        ("trl", "GRPOTrainer"),
        ("sentence_transformers", "SentenceTransformerTrainer"),
    ],
)
def test_trainers_that_are_transformers_trainer(module: str, name: str) -> None:
    """They pass `optimizers=` to transformers' Trainer, so its tests cover them."""
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    kind = getattr(pytest.importorskip(module, reason=BARE, exc_type=ImportError), name)
    assert issubclass(kind, transformers.Trainer)
    assert "optimizers" in inspect.signature(kind).parameters
    assert kind.create_optimizer is transformers.Trainer.create_optimizer or module == "trl"


# ---- not installable: the parsers of lines in docs/trainers.md ------------------------------------------------------
