"""Every preset of CAME is compared with the CAME of its package, and with the page that lists it.

`python -m tests.math.test_came_presets` measures all of them and writes `docs/presets.md` and CAME's tables
of `benchmarks/results/presets.md`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import CAME_PRESETS, Came, Preset, kernels
from tests.math.test_presets import BOUNDS, lrs
from tests.support import peer_came_formulas, preset_pages
from tests.support.case_tensors import Leaf
from tests.support.cases import LEFT_OUT, Case
from tests.support.preset_pages import PAGE, check_figures, listed, tables, without_figures, write, written
from tests.support.tables import for_every

pytestmark = pytest.mark.long

INSTALL = {"came_pytorch": "pip install 'bighorn[peers]'", "pytorch_optimizer": "pip install 'bighorn[peers]'"}
FORMULA = "its formula"

LEAVES = (
    Leaf("linear", (7, 5)),
    Leaf("large", (40, 50)),
    Leaf("row", (1, 6)),
    Leaf("column", (6, 1)),
    Leaf("bias", (17,)),
    Leaf("one", (1,)),
    Leaf("stack", (3, 4, 5)),
    Leaf("conv", (6, 4, 3, 3)),
    Leaf("conv1x1", (8, 6, 1, 1)),
    Leaf("conv1x1-thin", (8, 1, 1, 1)),
    Leaf("conv1d", (6, 4, 1)),
    Leaf("zero", (6, 4), fill="zero"),
    Leaf("big", (8, 3), fill="big"),
    Leaf("tiny", (12, 3), grad="tiny"),
)
CASE = Case("came-presets", {}, LEAVES, dtype=torch.float32)
"""The values are those of float32, so that one run of a witness serves both dtypes."""


def starts(dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(parameter.detach().to(dtype)) for parameter in CASE.parameters()]


def gradients(step: int) -> list[Tensor]:
    return [gradient.double() for gradient in CASE.gradients(step) if gradient is not None]


def formula(step: peer_came_formulas.Step) -> Callable[[], list[Tensor]]:
    """Return a witness that runs a peer's formula of `peer_came_formulas.py`."""

    def run() -> list[Tensor]:
        leaves = [peer_came_formulas.Leaf(p.flatten().tolist(), tuple(p.shape)) for p in starts(torch.float64)]
        for count, lr in lrs():
            for leaf, gradient in zip(leaves, gradients(count), strict=True):
                leaf.g = gradient.flatten().tolist()
            step(leaves, lr)
        return [torch.tensor(leaf.x, dtype=torch.float64).view(leaf.shape) for leaf in leaves]

    return run


def package(name: str, kind: str, **options: Any) -> Callable[[], list[Tensor]]:
    """Return a witness that runs the package itself, in float64."""

    def run() -> list[Tensor]:
        params = starts(torch.float64)
        optimizer = getattr(importlib.import_module(name), kind)(params, lr=0.1, weight_decay=0.1, **options)
        stepped(optimizer, params)
        return [parameter.detach() for parameter in params]

    return run


def stepped(optimizer: torch.optim.Optimizer, params: list[Parameter]) -> None:
    for step, lr in lrs():
        for group in optimizer.param_groups:
            group["lr"] = lr
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = gradient.to(param.dtype)
        optimizer.step()


@dataclass(frozen=True, eq=False)
class Proof:
    """A preset, further options, and the witness with which it is compared."""

    preset: Any
    witness: str
    run: Callable[[], list[Tensor]]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return "-".join([self.preset, self.witness, *self.options])


PROOFS = (
    Proof("came-pytorch", FORMULA, formula(peer_came_formulas.came_pytorch)),
    Proof("came-pytorch", "came_pytorch", package("came_pytorch", "CAME")),
    Proof("onetrainer", FORMULA, formula(peer_came_formulas.came_pytorch)),
    Proof("pytorch_optimizer", "pytorch_optimizer", package("pytorch_optimizer", "CAME", foreach=False)),
    Proof("sana", FORMULA, formula(peer_came_formulas.sana)),
    # No tensor here is large enough for 8 bits, which have another form there; tests below compare it.
    Proof("came8bit", FORMULA, formula(peer_came_formulas.came8bit)),
    Proof("sana-8bit", FORMULA, formula(peer_came_formulas.came8bit)),
    Proof("onetrainer-8bit", FORMULA, formula(peer_came_formulas.came8bit)),
    Proof("mindformers", FORMULA, formula(peer_came_formulas.mindformers)),
)


@functools.cache
def expected(proof: Proof) -> list[Tensor]:
    return proof.run()


def difference(proof: Proof, backend: str, dtype: torch.dtype, **changed: Any) -> float:
    """Return the largest ||ours - theirs|| / ||theirs|| of a tensor after all steps."""
    params = starts(dtype)
    options = {"lr": 0.1, "weight_decay": 0.1, "backend": backend, **proof.options, **changed}
    if dtype == torch.float64:
        options.setdefault("state_dtype", None)  # float64 has no 8 bits, and no tensor here is large enough for them
    stepped(Came.like(proof.preset, params, **options), params)
    largest = 0.0
    for ours, theirs in zip(params, expected(proof), strict=True):
        largest = max(largest, float((ours.detach().double() - theirs).norm() / theirs.norm()))
    return largest


def need(proof: Proof) -> None:
    if proof.witness != FORMULA and find_spec(proof.witness) is None:
        pytest.skip(f"{proof.witness} is not installed: {INSTALL[proof.witness]}")


@for_every("proof", PROOFS, ids=lambda proof: proof.id)
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_float64(proof: Proof, name: str) -> None:
    need(proof)
    assert difference(proof, name, torch.float64) <= BOUNDS[torch.float64]


@for_every("proof", PROOFS, ids=lambda proof: proof.id)
def test_float32(proof: Proof, backend: str) -> None:
    need(proof)
    assert difference(proof, backend, torch.float32) <= BOUNDS[torch.float32]


def test_every_name_is_proven() -> None:
    names = {name for preset in CAME_PRESETS for name in (preset.name, *preset.aliases)}
    assert {proof.preset for proof in PROOFS} == names


EIGHT_BITS = ("state_dtype", "min_8bit_size")
"""Options that a test below proves, since they round."""
OPTIONS = [(preset, option) for preset in CAME_PRESETS for option in preset.options if option not in EIGHT_BITS]


@pytest.mark.parametrize(("preset", "option"), OPTIONS, ids=[f"{preset.name}-{option}" for preset, option in OPTIONS])
def test_the_proofs_would_see_a_missing_option(preset: Preset, option: str) -> None:
    default = inspect.signature(Came).parameters[option].default
    proof = next(proof for proof in PROOFS if proof.preset == preset.name and proof.witness == FORMULA)
    assert difference(proof, "reference", torch.float64, **{option: default}) > 1e-9


# ---- 8 bits -------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 150, 128
"""A matrix of 19,200 elements, above the 16,384 from which momentum has 8 bits."""
USED = torch.arange(ROWS) % 10 == 0
"""The rows that have gradients, as in an embedding."""


def sparse(steps: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    used = USED.double().unsqueeze(1)
    return [used * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64) for _ in range(steps)]


def eight_bits(step: peer_came_formulas.Step) -> Tensor:
    leaf = peer_came_formulas.Leaf([1.0] * (ROWS * COLUMNS), (ROWS, COLUMNS))
    for gradient in sparse():
        leaf.g = gradient.flatten().tolist()
        step([leaf], 0.01)
    return torch.tensor(leaf.x, dtype=torch.float64).view(ROWS, COLUMNS)


def test_rows_without_gradients_stay_with_our_8_bits_and_not_with_theirs() -> None:
    """A code of their minimum and scale has no zero: rows of zeros get a momentum, and the confidence magnifies it."""
    exact, theirs = eight_bits(peer_came_formulas.sana), eight_bits(peer_came_formulas.came8bit)
    param = Parameter(torch.ones(ROWS, COLUMNS))
    optimizer = Came.like("sana-8bit", [param], lr=0.01, weight_decay=0.1)
    for gradient in sparse():
        param.grad = gradient.float()
        optimizer.step()
    ours = param.detach().double()
    assert optimizer.state[param]["exp_avg"].dtype == torch.int8
    assert float((ours - exact)[USED].norm() / (exact - 1)[USED].norm()) < 0.02
    assert float((ours - exact)[~USED].abs().max()) < 1e-6
    assert float((theirs - exact)[~USED].abs().min()) > 4


def test_onetrainers_8_bits_step_without_the_gradients_sign_in_a_1x1_convolution() -> None:
    """With one sign of the gradient, and with the other, the parameter goes down."""
    for sign in (1.0, -1.0):
        leaf = peer_came_formulas.Leaf([0.0] * 12, (4, 3, 1, 1))
        leaf.g = [sign] * 12
        peer_came_formulas.onetrainer8bit([leaf], 0.1)
        assert all(x < 0 for x in leaf.x)
        meant = peer_came_formulas.Leaf([0.0] * 12, (4, 3, 1, 1))
        meant.g = leaf.g
        peer_came_formulas.sana([meant], 0.1)
        assert all(x * sign < 0 for x in meant.x)


# ---- the method ---------------------------------------------------------------------------------------------------


def test_overrides_win_and_a_subclass_gives_itself() -> None:
    class Mine(Came):
        pass

    optimizer = Mine.like("mindformers", iter([Parameter(torch.ones(2, 3))]), lr=0.25, decay_rate=0.5)
    assert type(optimizer) is Mine
    assert (optimizer.defaults["lr"], optimizer.defaults["decay_rate"]) == (0.25, 0.5)
    assert optimizer.defaults["betas"] == (0.9, 0.999, 0.99)


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"name='sanna' is not known: use 'came-pytorch', .*did you mean 'sana'\?"):
        Came.like("sanna", [Parameter(torch.ones(2))], lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"name='timm' is a preset of Lamb: use Lamb.like\('timm', ...\)"):
        Came.like("timm", [Parameter(torch.ones(2))], lr=0.1)  # type: ignore[arg-type]


# ---- the page -----------------------------------------------------------------------------------------------------


def results() -> str:
    """Return CAME's tables of `benchmarks/results/presets.md`, measured now on every backend of this machine."""
    rows = []
    backends = [name for name, found in kernels.status().items() if found.available and found.device == "cpu"]
    for proof in PROOFS:
        given = [f"`{name}={value!r}`" for name, value in proof.options.items()]
        double = max(difference(proof, name, torch.float64) for name in backends if name not in LEFT_OUT)
        single = max(difference(proof, name, torch.float32) for name in backends)
        rows.append(f"| `{proof.preset}` | {', '.join(given)} | {proof.witness} | {double:.0e} | {single:.0e} |")
    return tables(CAME_PRESETS, INSTALL, rows)


def test_the_page_is_what_the_table_says() -> None:
    assert written("came", PAGE) == listed(CAME_PRESETS), "write it anew: python -m tests.math.test_came_presets"


def test_the_results_are_of_these_presets_and_within_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written("came")
    check_figures(text, len(PROOFS), BOUNDS)
    monkeypatch.setattr(sys.modules[__name__], "difference", lambda *_: 0.0)
    monkeypatch.setattr(preset_pages, "version", lambda _: "any")
    assert without_figures(text) == without_figures(results()), "write it anew: python -m tests.math.test_came_presets"


if __name__ == "__main__":
    write("came", listed(CAME_PRESETS), PAGE)
    write("came", results())
