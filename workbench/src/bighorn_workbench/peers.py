"""The optimizers that ``bighorn bench`` times, and its tables. A new one needs one entry."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bighorn import Came, Lamb, Lars
from bighorn_workbench.optimizers import state_bytes

WEIGHT_DECAY = 0.01

Build = Callable[[Sequence[Tensor], float, float | None], Optimizer]
"""A function from parameters, learning rate and the norm to clip gradients to (None: no clipping) to an optimizer."""


@dataclass(frozen=True)
class Peer:
    """An optimizer that can be timed.

    Attributes:
        label: Its name in the table.
        load: A function that imports its package and returns the function that builds it; raises ImportError with the
            reason why it is absent.
        package: The distribution that contains it.
        devices: The devices that it supports.
        float64: Whether it supports float64 tensors, to which the error is relative.
        state_bytes: A function that returns the size of its state.
    """

    label: str
    load: Callable[[], Build]
    package: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    float64: bool = True
    state_bytes: Callable[[Optimizer], int] = state_bytes

    def load_for(self, device: str) -> Build:
        """Return the function that builds it for a device; raise ImportError with the reason if it is absent."""
        build = self.load()
        if device not in self.devices:
            raise ImportError(f"it takes {' or '.join(self.devices)} tensors alone, and this times --device {device}")
        return build


@dataclass(frozen=True)
class BenchTable:
    """A table that ``bighorn bench`` prints.

    Attributes:
        baseline: The peer of the first row, to which all ratios are relative.
        peers: The other rows, unless ``--optimizers`` names others.
        shapes: The parameter sets, unless ``--shapes`` names others.
        columns: Names of :data:`bighorn_workbench.bench_table.COLUMNS`.
        devices: The devices for which these columns are measured.
    """

    baseline: str
    peers: tuple[str, ...]
    shapes: tuple[str, ...]
    columns: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")


def ours(algorithm: type[Lamb | Came | Lars], backend: str = "auto", **options: Any) -> Callable[[], Build]:
    """Return the loader of an optimizer of Bighorn."""

    def build(params: Sequence[Tensor], lr: float, clip: float | None) -> Optimizer:
        dtype = params[0].dtype
        chosen = {"backend": backend, "state_dtype": torch.bfloat16 if dtype == torch.bfloat16 else None, **options}
        if algorithm is Came:
            chosen.setdefault("bias_correction", True)  # the rule of the name `came` in all commands
        if dtype == torch.float64:  # to which errors are relative
            chosen |= {"state_dtype": None, "weight_rounding": "nearest"}
        return algorithm(params, lr=lr, weight_decay=WEIGHT_DECAY, max_grad_norm=clip, **chosen)

    return lambda: build


def unclipped(load: Callable[[], Any], **options: Any) -> Callable[[], Build]:
    """Return the loader of an optimizer that does not clip gradients, for a function that returns its class."""

    def load_build() -> Build:
        kind = load()
        return lambda params, lr, clip: clipped(kind(params, lr=lr, weight_decay=WEIGHT_DECAY, **options), params, clip)

    return load_build


def clipped(optimizer: Optimizer, params: Sequence[Tensor], clip: float | None) -> Optimizer:
    """Clip gradients by torch's function before each step of an optimizer that does not clip."""
    if clip is not None:
        optimizer.register_step_pre_hook(lambda *_: _discard(torch.nn.utils.clip_grad_norm_(params, clip)))
    return optimizer


def _discard(_: object) -> None:
    """Discard the result of a hook, which would replace the arguments of the step."""


def imported(module: str, name: str, remedy: str) -> Any:
    """Return a class of another package.

    Raises:
        ImportError: The package is absent, or its import fails: packages with compiled code can raise any error.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise ImportError(f"not installed{remedy}")
    try:
        return getattr(import_module(module), name)
    except Exception as reason:
        raise ImportError(f"installed, but its import fails: {reason}") from reason


def _apex() -> Build:
    lamb = imported("apex.optimizers", "FusedLAMB", "; it is built from https://github.com/NVIDIA/apex, for CUDA alone")
    # It always clips: a norm that is never reached disables clipping.
    return lambda params, lr, clip: lamb(params, lr=lr, weight_decay=WEIGHT_DECAY, max_grad_norm=clip or 1e9)


def _timm(module: str, name: str) -> Any:
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("not installed; for its optimizers alone: pip install --no-deps timm")
    # `import timm` imports all its models, and with them torchvision. Its optimizers need neither, so they are
    # imported from their folder under a name that does not have timm as its parent.
    package = sys.modules.setdefault("timm_optim", ModuleType("timm_optim"))
    package.__path__ = [f"{folder}/optim" for folder in spec.submodule_search_locations]
    return getattr(import_module(f"timm_optim.{module}"), name)


def _timm_lamb() -> Build:
    lamb = _timm("lamb", "Lamb")
    return lambda params, lr, clip: lamb(params, lr=lr, weight_decay=WEIGHT_DECAY, max_grad_norm=clip)


def _pytorch_optimizer() -> Build:
    lamb = imported("pytorch_optimizer", "Lamb", ": pip install pytorch_optimizer")
    return lambda params, lr, clip: lamb(
        params,
        lr=lr,
        weight_decay=WEIGHT_DECAY,
        weight_decouple=False,
        pre_norm=clip is not None,
        max_grad_norm=clip or 0.0,
    )


PEERS = {
    "adamw": Peer("torch AdamW, fused", unclipped(lambda: torch.optim.AdamW, fused=True), "torch"),
    "adamw-foreach": Peer("torch AdamW, foreach", unclipped(lambda: torch.optim.AdamW, foreach=True), "torch"),
    "lamb": Peer("Lamb", ours(Lamb), "bighorn"),
    "lamb-adam": Peer("Lamb, adam=True", ours(Lamb, adam=True, decay_mode="decoupled"), "bighorn"),
    "lamb-foreach": Peer("Lamb, foreach", ours(Lamb, "foreach"), "bighorn"),
    "lamb-int8": Peer("Lamb, int8 states", ours(Lamb, state_dtype="int8"), "bighorn"),
    "came": Peer("Came", ours(Came), "bighorn"),
    "came-last-two": Peer("Came, last_two", ours(Came, factor="last_two"), "bighorn"),
    "came-int8": Peer("Came, int8", ours(Came, state_dtype="int8"), "bighorn"),
    "came-pytorch": Peer(
        "came-pytorch",
        unclipped(partial(imported, "came_pytorch", "CAME", ": pip install --no-deps came-pytorch")),
        "came-pytorch",
    ),
    "pytorch_optimizer-came": Peer(
        "pytorch_optimizer CAME",
        unclipped(partial(imported, "pytorch_optimizer", "CAME", ": pip install pytorch_optimizer")),
        "pytorch_optimizer",
    ),
    "lars": Peer("Lars", ours(Lars), "bighorn"),
    "timm-lars": Peer("timm Lars", unclipped(partial(_timm, "lars", "Lars"), momentum=0.9), "timm"),
    "sgd": Peer("torch SGD, fused", unclipped(lambda: torch.optim.SGD, momentum=0.9, fused=True), "torch"),
    "adafactor": Peer("torch Adafactor", unclipped(lambda: torch.optim.Adafactor), "torch"),
    "timm": Peer("timm Lamb", _timm_lamb, "timm"),
    "pytorch_optimizer": Peer("pytorch_optimizer Lamb", _pytorch_optimizer, "pytorch_optimizer"),
    "apex": Peer("apex FusedLAMB", _apex, "apex", devices=("cuda",), float64=False),
}

TABLES = {
    "steps": BenchTable(
        baseline="adamw",
        peers=("lamb", "lamb-adam", "lamb-foreach", "timm", "pytorch_optimizer"),
        shapes=("tiny", "vit_small"),
        columns=("ms", "ratio", "p10-p90", "temporaries", "error"),
    ),
    "came": BenchTable(
        baseline="adamw",
        peers=("came", "came-last-two", "came-int8", "came-pytorch", "pytorch_optimizer-came", "adafactor"),
        shapes=("vit_small", "resnet50"),
        columns=("ms", "ratio", "p10-p90", "temporaries", "state", "error"),
    ),
    "lars": BenchTable(
        baseline="sgd",
        peers=("lars", "timm-lars"),
        shapes=("vit_small", "resnet50"),
        columns=("ms", "ratio", "p10-p90", "temporaries", "state", "error"),
    ),
    "gpu": BenchTable(
        baseline="adamw",
        peers=("lamb", "lamb-adam", "came", "adamw-foreach", "timm", "apex"),
        shapes=("bert_large", "bert_base", "vit_small", "resnet50", "llama_1b", "tiny"),
        columns=("ms", "ratio", "p10-p90", "wall ms", "wall ratio", "host", "temporaries", "error"),
        devices=("cuda",),
    ),
}
