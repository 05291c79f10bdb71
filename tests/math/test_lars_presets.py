"""Every preset of LARS is compared with the LARS of its package, and with the page that lists it.

`python -m tests.math.test_lars_presets` measures all of them and writes `docs/presets.md` and LARS's tables of
`benchmarks/results/presets.md`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bighorn import LARS_PRESETS, Lars, Preset
from tests.math import test_presets
from tests.math.test_presets import BARE, BOUNDS, DECAY, FORMULA, INSTALL, Witness, difference, formula, need
from tests.support import peer_lars_formulas as peers
from tests.support import preset_pages
from tests.support.peer_formulas import installed_timm
from tests.support.preset_pages import PAGE, backends, check_figures, listed, tables, without_figures, write, written
from tests.support.tables import for_every

PACKAGES = ("timm", "optax", "pytorch_optimizer")
MOMENTUM = {**DECAY, "momentum": 0.9}
NORMS = ["bias", "norm"]

Proof = partial(test_presets.Proof, kind=Lars)


def package(load: Any, **options: Any) -> Witness:
    """Return a witness that runs a package's optimizer of torch tensors, in float64."""

    def run(grouped: bool) -> list[Tensor]:
        params = test_presets.starts(torch.float64)
        groups = test_presets.in_groups(params, weight_decay=0.0) if grouped else [{"params": params}]
        test_presets.train(load()(groups, lr=0.1, weight_decay=0.1, **options), params)
        return [parameter.detach() for parameter in params]

    return run


def timm() -> Any:
    return installed_timm("lars").Lars


def pytorch_optimizer() -> Any:
    return partial(importlib.import_module("pytorch_optimizer").LARS, foreach=False)


def optax(_: bool) -> list[Tensor]:
    return test_presets.optax_run("lars", weight_decay=0.1)


PROOFS = (
    Proof("paper", FORMULA, formula(peers.paper), DECAY),
    Proof("timm", FORMULA, formula(peers.timm), DECAY, grouped=True, undecayed=BARE),
    Proof("timm", FORMULA, formula(partial(peers.timm, momentum=0.9)), MOMENTUM),
    Proof("timm", "timm", package(timm, momentum=0.9), MOMENTUM, grouped=True, undecayed=BARE),
    Proof("larc", FORMULA, formula(partial(peers.timm, trust_clip=True)), DECAY, grouped=True, undecayed=BARE),
    Proof("larc", FORMULA, formula(partial(peers.timm, trust_clip=True, momentum=0.9)), MOMENTUM),
    Proof("larc", "timm", package(timm, trust_clip=True), DECAY, grouped=True, undecayed=BARE),
    Proof("apex", FORMULA, formula(peers.apex), DECAY, without="still"),
    Proof("apex", FORMULA, formula(partial(peers.apex, momentum=0.9)), MOMENTUM, without="still"),
    Proof("flash", FORMULA, formula(peers.flash), DECAY, grouped=True, undecayed=BARE, without="still"),
    Proof("bolts", FORMULA, formula(partial(peers.flash, momentum=0.9)), MOMENTUM, without="still"),
    Proof("pytorch_optimizer", "pytorch_optimizer", package(pytorch_optimizer), DECAY, without="still"),
    Proof("optax", "optax", optax, DECAY),
    Proof("simclr", FORMULA, formula(peers.simclr), {**DECAY, "exclude_from_weight_decay": NORMS}),
    Proof("tf-models", FORMULA, formula(peers.simclr), {**DECAY, "exclude_from_weight_decay": NORMS}),
    Proof("barlowtwins", FORMULA, formula(peers.barlowtwins), DECAY),
    Proof("vicreg", FORMULA, formula(peers.barlowtwins), DECAY),
    Proof("byol", FORMULA, formula(peers.barlowtwins), DECAY),
    Proof("mindspore", FORMULA, formula(peers.mindspore), DECAY, without="zero|nothing|still"),
)


@for_every("proof", PROOFS, ids=lambda proof: proof.id)
@pytest.mark.parametrize("name", ["reference", "foreach"])
@pytest.mark.process
def test_float64(proof: Any, name: str) -> None:
    need(proof)
    assert difference(proof, name, torch.float64) <= BOUNDS[torch.float64]


@for_every("proof", PROOFS, ids=lambda proof: proof.id)
@pytest.mark.process
def test_float32(proof: Any, backend: str) -> None:
    need(proof)
    assert difference(proof, backend, torch.float32) <= BOUNDS[torch.float32]


def test_every_name_is_proven() -> None:
    names = {name for preset in LARS_PRESETS for name in (preset.name, *preset.aliases)}
    assert {proof.preset for proof in PROOFS} == names


OPTIONS = [(preset, option) for preset in LARS_PRESETS for option in preset.options if option != "eps"]


@pytest.mark.process
@for_every(("preset", "option"), OPTIONS, ids=[f"{preset.name}-{option}" for preset, option in OPTIONS])
def test_the_proofs_would_see_a_missing_option(preset: Preset, option: str) -> None:
    default = inspect.signature(Lars).parameters[option].default
    names = (preset.name, *preset.aliases)
    proofs = [proof for proof in PROOFS if proof.preset in names and option not in proof.options]
    seen = [proof for proof in proofs if proof.witness not in INSTALL] or proofs[:1]
    need(seen[0])
    assert max(difference(p, "reference", torch.float64, **{option: default}) for p in seen) > 1e-9


# ---- the page -----------------------------------------------------------------------------------------------------


def results() -> str:
    """Return LARS's tables of `benchmarks/results/presets.md`, measured now on every backend of this machine."""
    rows = []
    for proof in PROOFS:
        given = [f"`{name}={value!r}`" for name, value in proof.options.items() if name != "weight_decay"]
        given += ["two groups, one without decay"] * proof.grouped
        double, single = (max(difference(proof, name, dtype) for name in backends(dtype)) for dtype in BOUNDS)
        rows.append(f"| `{proof.preset}` | {', '.join(given)} | {proof.witness} | {double:.0e} | {single:.0e} |")
    return tables(LARS_PRESETS, PACKAGES, rows)


def test_the_page_is_what_the_table_says() -> None:
    assert written("lars", PAGE) == listed(LARS_PRESETS), "write it anew: python -m tests.math.test_lars_presets"


def test_the_results_are_of_these_presets_and_within_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written("lars")
    check_figures(text, len(PROOFS), BOUNDS)
    monkeypatch.setattr(sys.modules[__name__], "difference", lambda *_: 0.0)
    monkeypatch.setattr(preset_pages, "version", lambda _: "any")
    assert without_figures(text) == without_figures(results()), "write it anew: python -m tests.math.test_lars_presets"


if __name__ == "__main__":
    write("lars", listed(LARS_PRESETS), PAGE)
    write("lars", results())
