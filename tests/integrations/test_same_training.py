"""The same 36 steps by each client, with AdamW, Lamb and Came: losses, and resuming from the client's checkpoint.

`python -m tests.integrations.page` writes these losses into benchmarks/results/trainers.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bighorn import Came, Lamb
from tests.support.other_packages import bare_packages, timm_optim
from tests.support.trainer_model import INPUTS, INSTALL, LABELS, Logits, Net, batches

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS, HALF = 3, 18
KINDS = (torch.optim.AdamW, Lamb, Came)
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
BARE = "pip install --no-deps, as make integrations does"
DATA = [{"inputs": inputs, "labels": label} for inputs, label in zip(INPUTS, LABELS, strict=True)]


def path_of(kind: Any) -> tuple[str, str]:
    return ("torch.optim" if kind is torch.optim.AdamW else "bighorn"), kind.__name__


def train(net: nn.Module, optimizer: Any, start: int = 0, stop: int = EPOCHS * 12) -> list[float]:
    """Take steps `start` to `stop`, and return their losses."""
    losses = []
    for inputs, labels in (batches() * EPOCHS)[start:stop]:
        loss = net(inputs, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_hand(kind: Any) -> list[float]:
    net = Net()
    return train(net, kind(net.parameters(), **OPTIONS))


# ---- clients that build the optimizer, and leave the loop to recipes ------------------------------------------------


@contextmanager
def timm(kind: Any) -> Iterator[Callable[[Net], Any]]:
    with timm_optim() as registry:
        name = {"Lamb": "bighornlamb", "Came": "bighorncame"}.get(kind.__name__, "adamw")
        # The name in timm's registry excludes biases and norms from the trust ratio.
        every = {"exclude_from_layer_adaptation": ()} if kind is Lamb else {}
        yield partial(registry.create_optimizer_v2, opt=name, filter_bias_and_bn=False, **OPTIONS, **every)


@contextmanager
def torchtitan(kind: Any) -> Iterator[Callable[[Net], Any]]:
    pytest.importorskip("torchtitan.components.optimizer", reason=BARE, exc_type=ImportError)
    from torchtitan.components.optimizer import ParamGroupConfig

    from bighorn.integrations.torchtitan import OptimizersContainer

    module, name = path_of(kind)
    group = ParamGroupConfig(
        pattern=".*", optimizer_name=name if module == "torch.optim" else f"bighorn.{name}", optimizer_kwargs=OPTIONS
    )
    yield lambda net: OptimizersContainer.Config(param_groups=[group]).build(model_parts=[net])


@contextmanager
def torchtune(kind: Any) -> Iterator[Callable[[Net], Any]]:
    omegaconf = pytest.importorskip("omegaconf", reason=INSTALL)
    node = omegaconf.OmegaConf.create({"_component_": ".".join(path_of(kind)), **OPTIONS})
    with bare_packages(BARE, "torchtune", "torchtune.training") as load:
        instantiate = load("torchtune.config._instantiate").instantiate
        yield lambda net: instantiate(node, net.parameters())


@contextmanager
def hydra(kind: Any) -> Iterator[Callable[[Net], Any]]:
    instantiate = pytest.importorskip("hydra.utils", reason=INSTALL).instantiate
    make = instantiate({"_target_": ".".join(path_of(kind)), **OPTIONS}, _partial_=True)
    yield lambda net: make(net.parameters())


@contextmanager
def nemo(kind: Any) -> Iterator[Callable[[Net], Any]]:
    module = pytest.importorskip("nemo_automodel.components.optim.optimizer", reason=BARE, exc_type=ImportError)
    yield lambda net: module.build_optimizer(net, (".".join(path_of(kind)), OPTIONS))[0]


@contextmanager
def verl(kind: Any) -> Iterator[Callable[[Net], Any]]:
    with bare_packages(BARE, "verl", "verl.workers", "verl.workers.config") as load:
        optimizers = load("verl.workers.config.optimizer")
        module, name = path_of(kind)
        config = optimizers.FSDPOptimizerConfig(optimizer=name, optimizer_impl=module, **OPTIONS)
        yield lambda net: optimizers.build_optimizer(net.parameters(), config)


BUILDERS = (timm, torchtitan, torchtune, hydra, nemo, verl)


@pytest.mark.parametrize("kind", [Lamb, Came])
@pytest.mark.parametrize("client", BUILDERS, ids=lambda client: client.__name__)
def test_a_client_builds_what_trains_and_resumes_bitwise(client: Any, kind: Any, tmp_path: Path) -> None:
    with client(kind) as build:
        net, again = Net(), Net()
        optimizer = build(net)
        losses = train(net, optimizer, stop=HALF)
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
        losses += train(net, optimizer, start=HALF)
        saved = torch.load(tmp_path / "half.pt")
        again.load_state_dict(saved["net"])
        resumed = build(again)
        resumed.load_state_dict(saved["optimizer"])
        assert train(again, resumed, start=HALF) == losses[HALF:]
    assert losses == pytest.approx(by_hand(kind), rel=1e-5)
    assert all(a.equal(b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


# ---- clients that have the loop -------------------------------------------------------------------------------------


def transformers(kind: Any, folder: Path) -> list[float]:
    package = pytest.importorskip("transformers", reason=INSTALL)

    class InOrder(package.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(DATA)

    arguments = package.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        num_train_epochs=EPOCHS,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    net = Net()
    made = InOrder(
        model=net, args=arguments, train_dataset=DATA, optimizers=(kind(net.named_parameters(), **OPTIONS), None)
    )
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def accelerate(kind: Any, _: Path) -> list[float]:
    accelerator = pytest.importorskip("accelerate", reason=INSTALL).Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, kind(net.named_parameters(), **OPTIONS))
    losses = []
    for inputs, labels in batches() * EPOCHS:
        loss = model(inputs, labels)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def lightning(kind: Any, folder: Path) -> list[float]:
    package = pytest.importorskip("lightning", reason=INSTALL)
    losses: list[float] = []

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(*batch)["loss"]
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return kind(self.net.named_parameters(), **OPTIONS)

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = package.Trainer(accelerator="cpu", default_root_dir=folder, logger=False, max_epochs=EPOCHS, **quiet)
    data = torch.utils.data.TensorDataset(INPUTS, LABELS)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
    return losses


def learner(kind: Any, folder: Path, losses: list[float]) -> Any:
    module = pytest.importorskip("fastai.learner", reason=BARE, exc_type=ImportError)
    core = pytest.importorskip("fastai.data.core", reason=BARE, exc_type=ImportError)
    load = pytest.importorskip("fastai.data.load", reason=BARE, exc_type=ImportError)
    wrapper = pytest.importorskip("fastai.optimizer", reason=BARE, exc_type=ImportError).OptimWrapper

    def loss_func(logits: Any, labels: Any) -> Any:
        loss = nn.functional.cross_entropy(logits, labels)
        losses.append(float(loss.detach()))
        return loss

    pairs = list(zip(INPUTS, LABELS, strict=True))
    loaders = core.DataLoaders(load.DataLoader(pairs, bs=2), load.DataLoader(pairs[:2], bs=2))
    return module.Learner(
        loaders, Logits(), loss_func, partial(wrapper, opt=kind), lr=OPTIONS["lr"], wd=0.1, path=folder
    )


def fastai(kind: Any, folder: Path) -> list[float]:
    losses: list[float] = []
    made = learner(kind, folder, losses)
    with made.no_logging():
        made.fit(EPOCHS, cbs=[without_validation()])
    return losses


def without_validation() -> Any:
    callback = pytest.importorskip("fastai.callback.core", reason=BARE, exc_type=ImportError)

    class WithoutValidation(callback.Callback):  # type: ignore[misc, name-defined]
        def before_validate(self) -> None:
            raise callback.CancelValidException

    return WithoutValidation()


def mmengine(kind: Any, folder: Path, epochs: int = EPOCHS, resume: Path | None = None) -> list[float]:
    runner = pytest.importorskip("mmengine.runner", reason=INSTALL)
    model = pytest.importorskip("mmengine.model", reason=INSTALL)
    losses: list[float] = []

    class Model(model.BaseModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Any, labels: Any, mode: str) -> Any:
            assert mode == "loss"
            loss = self.net(inputs, labels)["loss"]
            losses.append(float(loss.detach()))
            return {"loss": loss}

    data = torch.utils.data.TensorDataset(INPUTS, LABELS)
    made = runner.Runner(
        Model(),
        str(folder),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2),
        train_cfg={"by_epoch": True, "max_epochs": epochs},
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": ".".join(path_of(kind)), **OPTIONS}},
        load_from=None if resume is None else str(resume),
        resume=resume is not None,
        experiment_name=f"{folder.name}-{kind.__name__}-{epochs}-{resume is None}",
        log_level="ERROR",
    )
    made.train()
    return losses


LOOPS = (transformers, accelerate, lightning, fastai, mmengine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", LOOPS, ids=lambda client: client.__name__)
def test_a_clients_loop_has_the_losses_of_a_loop_by_hand(client: Any, kind: Any, tmp_path: Path) -> None:
    assert client(kind, tmp_path) == pytest.approx(by_hand(kind), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", [Lamb, Came])
def test_fastai_resumes_bitwise(kind: Any, tmp_path: Path) -> None:
    seen: list[list[float]] = [[], []]
    whole, resumed = learner(kind, tmp_path, seen[0]), learner(kind, tmp_path, seen[1])
    for made, epochs in ((whole, 1), (whole, 2), (resumed, 2)):
        if made is resumed:
            made.load("first")
        with made.no_logging():
            made.fit(epochs, cbs=[without_validation()])
        if epochs == 1:
            made.save("first", with_opt=True)
    assert seen[0][12:] == seen[1]


@pytest.mark.parametrize("kind", [Lamb, Came])
def test_mmengine_resumes_bitwise(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MMEngine 0.10 does not load its own checkpoints with the default of torch 2.6."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    whole = mmengine(kind, tmp_path / "whole")
    assert mmengine(kind, tmp_path / "more", resume=tmp_path / "whole" / "epoch_1.pth") == whole[12:]


def last_epochs() -> dict[str, list[float]]:
    """Return the mean losses of the last epoch by client, in the order of KINDS."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {"a loop by hand": [by_hand(kind) for kind in KINDS]}
        rows |= {client.__name__: [client(kind, Path(folder)) for kind in KINDS] for client in LOOPS}
    return {name: [sum(losses[-12:]) / 12 for losses in each] for name, each in rows.items()}
