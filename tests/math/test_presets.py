"""Compares every preset with the optimizer of its package, and with the page that lists it.

`python -m tests.math.test_presets` measures all of them, and writes the tables of `docs/presets.md` and
`benchmarks/results/presets.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import CAME_PRESETS, LARS_PRESETS, PRESETS, Came, Lamb, Lars, Preset
from tests.support import peer_came_formulas as came
from tests.support import peer_formulas as lamb
from tests.support import peer_lars_formulas as lars
from tests.support.case_tensors import Leaf
from tests.support.cases import Case, Kind
from tests.support.peer_runs import (
    BARE,
    FORMULA,
    KERAS_LAMB,
    Witness,
    formula,
    in_groups,
    largest_difference,
    optax,
    package,
    starts,
    train,
    witnessed,
)
from tests.support.preset_pages import (
    FIGURE,
    PAGE,
    backends,
    check_figures,
    listed,
    tables,
    versions,
    without_figures,
    write,
    written,
)
from tests.support.tables import for_every

BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6}

# The values are float32 numbers, so one run of a witness serves both dtypes.
VECTORS = Case(
    "presets",
    {},
    (
        Leaf("plain.weight", (7, 5)),
        Leaf("plain.bias", (17,)),
        Leaf("one.bias", (1,)),
        Leaf("long.weight", (259,)),
        Leaf("zero.weight", (6, 4), fill="zero"),
        Leaf("still.weight", (9,), grad="zero"),
        Leaf("still.bias", (9,), grad="zero"),
        Leaf("nothing.weight", (5, 2), fill="zero", grad="zero"),
        Leaf("big.weight", (8, 8, 3), fill="big"),
        Leaf("small.weight", (8, 3), fill="small"),
        Leaf("tiny.weight", (12, 3), grad="tiny"),
        Leaf("norm.gamma", (13,)),
        Leaf("norm.beta", (13,)),
        Leaf("scale.Gamma", (11,)),
    ),
)
MATRICES = Case(
    "came-presets",
    {},
    (
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
    ),
)

GROUPS = "two groups"
BARE_GROUPS = "two groups, one without decay"


@dataclass(frozen=True, eq=False)
class Proof:
    """A preset, its witness, and further options."""

    preset: Any
    witness: Witness
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: str = ""
    without: str = "^$"
    """A pattern for the leaves in which the preset is documented to differ."""


@dataclass(frozen=True, eq=False)
class Table:
    """The presets of an optimizer, and their proofs."""

    kind: Kind
    presets: tuple[Preset, ...]
    case: Case
    packages: tuple[str, ...]
    proofs: tuple[Proof, ...]

    @property
    def name(self) -> str:
        return self.kind.algorithm.name

    def by_witness(self) -> dict[str, list[Proof]]:
        names = dict.fromkeys(proof.witness.name for proof in self.proofs)
        return {name: [proof for proof in self.proofs if proof.witness.name == name] for name in names}


DECAY = {"weight_decay": 0.1}
# If only weight decay moves a tensor, its ratio is 1 / weight_decay: 20, above a bound of 10.
LESS = {"weight_decay": 0.05}
MOMENTUM = {**DECAY, "momentum": 0.9}
NORMS = {**DECAY, "exclude_from_weight_decay": ["bias", "norm"]}
APART = {**NORMS, "exclude_from_layer_adaptation": ["big"]}
ZEROS = "zero|nothing|still"

LAMB = Table(
    Lamb,
    PRESETS,
    VECTORS,
    ("optax", "keras", "timm"),
    (
        Proof("paper-v5", formula(lamb.paper), DECAY),
        Proof("optax", optax("lamb", **DECAY), DECAY),
        Proof("paper-v3", formula(lamb.paper, corrected=False), DECAY),
        Proof("apex", formula(lamb.apex)),
        Proof("apex", formula(lamb.apex), groups=BARE_GROUPS),
        Proof("timm", formula(lamb.timm), groups=BARE_GROUPS),
        Proof("timm", package("timm", "Lamb"), groups=BARE_GROUPS),
        Proof("nvlamb", formula(lamb.apex, use_nvlamb=True), groups=BARE_GROUPS),
        Proof("nvlamb", package("timm", "Lamb", always_adapt=True), groups=BARE_GROUPS),
        Proof("lambc", formula(lamb.timm, trust_clip=True), groups=BARE_GROUPS),
        Proof("lambc", package("timm", "Lamb", trust_clip=True), groups=BARE_GROUPS),
        Proof("lambw", formula(lamb.timm, decoupled_decay=True), groups=BARE_GROUPS),
        Proof("lambw", package("timm", "Lamb", decoupled_decay=True), groups=BARE_GROUPS),
        Proof(
            "lambw", formula(lamb.timm, decoupled_decay=True, max_lr=0.3), {"corrected_weight_decay": 0.3}, BARE_GROUPS
        ),
        Proof(
            "lambw",
            package("timm", "Lamb", decoupled_decay=True, corrected_weight_decay=True),
            {"corrected_weight_decay": 0.1},
            groups=BARE_GROUPS,
        ),
        Proof("adamh", formula(lamb.adamh), {"exclude_from_layer_adaptation": ["zero", "nothing"]}),
        Proof("keras", KERAS_LAMB, DECAY),
        Proof("torch_npu", formula(lamb.torch_npu), DECAY),
        Proof("torch_npu", formula(lamb.torch_npu, adam=True), {**DECAY, "adam": True}),
        Proof("torch_npu", formula(lamb.torch_npu, use_global_grad_norm=True), {**DECAY, "max_grad_norm": 1.0}),
        Proof("cybertronai", formula(lamb.torch_npu), DECAY),
        Proof("deepspeed", formula(lamb.deepspeed), LESS),
        Proof("deepspeed", formula(lamb.deepspeed, correct_moments=True), {**LESS, "bias_correction": True}),
        Proof("colossalai", formula(lamb.colossalai), DECAY),
        Proof("tfa", formula(lamb.tfa), NORMS),
        Proof("tfa", formula(lamb.tfa, exclude_from_layer_adaptation=["big"]), APART),
        Proof("mindspore", formula(lamb.mindspore), DECAY),
        Proof("mindspore", formula(lamb.mindspore, grouped=True), DECAY, GROUPS),
    ),
)

CAME_PYTORCH, SANA = formula(came.came_pytorch), formula(came.sana)
CAME = Table(
    Came,
    CAME_PRESETS,
    MATRICES,
    ("came_pytorch", "pytorch_optimizer"),
    (
        Proof("came-pytorch", CAME_PYTORCH, DECAY),
        Proof("came-pytorch", package("came_pytorch", "CAME", **DECAY), DECAY),
        Proof("onetrainer", CAME_PYTORCH, DECAY),
        Proof("pytorch_optimizer", package("pytorch_optimizer", "CAME", foreach=False, **DECAY), DECAY),
        Proof("sana", SANA, DECAY),
        # No tensor here is large enough for 8 bits, which have another format in the package.
        Proof("came8bit", SANA, DECAY),
        Proof("sana-8bit", SANA, DECAY),
        Proof("onetrainer-8bit", SANA, DECAY),
        Proof("mindformers", formula(came.mindformers), DECAY),
    ),
)

PO_LARS = package("pytorch_optimizer", "LARS", foreach=False, **DECAY)
LARS = Table(
    Lars,
    LARS_PRESETS,
    VECTORS,
    ("timm", "optax", "pytorch_optimizer"),
    (
        Proof("paper", formula(lars.paper), DECAY),
        Proof("timm", formula(lars.timm), DECAY, BARE_GROUPS),
        Proof("timm", formula(lars.timm, momentum=0.9), MOMENTUM),
        Proof("timm", package("timm", "Lars", **MOMENTUM), MOMENTUM, BARE_GROUPS),
        Proof("larc", formula(lars.timm, trust_clip=True), DECAY, BARE_GROUPS),
        Proof("larc", formula(lars.timm, trust_clip=True, momentum=0.9), MOMENTUM),
        Proof("larc", package("timm", "Lars", trust_clip=True, **DECAY), DECAY, BARE_GROUPS),
        Proof("apex", formula(lars.apex), DECAY, without="still"),
        Proof("apex", formula(lars.apex, momentum=0.9), MOMENTUM, without="still"),
        Proof("flash", formula(lars.flash), DECAY, BARE_GROUPS, without="still"),
        Proof("bolts", formula(lars.flash, momentum=0.9), MOMENTUM, without="still"),
        Proof("pytorch_optimizer", PO_LARS, DECAY, without="still"),
        Proof("optax", optax("lars", **DECAY), DECAY),
        Proof("simclr", formula(lars.simclr), NORMS),
        Proof("tf-models", formula(lars.simclr), NORMS),
        Proof("barlowtwins", formula(lars.barlowtwins), DECAY),
        Proof("vicreg", formula(lars.barlowtwins), DECAY),
        Proof("byol", formula(lars.barlowtwins), DECAY),
        Proof("mindspore", formula(lars.mindspore), DECAY, without=ZEROS),
    ),
)

TABLES = (LAMB, CAME, LARS)


# ---- the comparison -----------------------------------------------------------------------------------------------


def difference(table: Table, proof: Proof, backend: str, dtype: torch.dtype, **changed: Any) -> float:
    """Return the largest ||ours - theirs|| / ||theirs|| of a tensor after all steps."""
    params, bare = starts(table.case, dtype), proof.groups == BARE_GROUPS
    pairs = [(leaf.name, parameter) for leaf, parameter in zip(table.case.leaves, params, strict=True)]
    groups = in_groups(table.case, params, **(BARE if bare else {})) if proof.groups else pairs
    exact = {"state_dtype": None} if dtype is torch.float64 else {}  # float64 has no 8 bits
    options = {"lr": 0.1, "backend": backend, **exact, **proof.options, **changed}
    train(table.case, table.kind.like(proof.preset, groups, **options), params)
    return largest_difference(table.case, params, witnessed(proof.witness, table.case, bare), proof.without)


def marks(table: Table, witness: str) -> list[pytest.MarkDecorator]:
    package = [pytest.mark.process] * (witness != FORMULA)
    return package + [pytest.mark.long] * (table is CAME)


EACH_WITNESS = pytest.mark.parametrize(
    ("table", "proofs"),
    [
        pytest.param(table, proofs, id=f"{table.name}-{witness}", marks=marks(table, witness))
        for table in TABLES
        for witness, proofs in table.by_witness().items()
    ],
)
EACH_TABLE = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


@EACH_WITNESS
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_float64(table: Table, proofs: list[Proof], name: str) -> None:
    proofs[0].witness.need()
    for proof in proofs:
        assert difference(table, proof, name, torch.float64) <= BOUNDS[torch.float64], proof


@EACH_WITNESS
def test_float32(table: Table, proofs: list[Proof], backend: str) -> None:
    proofs[0].witness.need()
    for proof in proofs:
        assert difference(table, proof, backend, torch.float32) <= BOUNDS[torch.float32], proof


@EACH_TABLE
def test_every_name_is_proven(table: Table) -> None:
    names = {name for preset in table.presets for name in (preset.name, *preset.aliases)}
    assert {proof.preset for proof in table.proofs} == names


# ---- 8 bits of CAME -----------------------------------------------------------------------------------------------

ROWS, COLUMNS = 150, 128
"""A matrix of 19,200 elements, above the 16,384 from which momentum has 8 bits."""
USED = torch.arange(ROWS) % 10 == 0
"""The rows that have gradients, as in an embedding."""


@pytest.mark.long
def test_rows_without_gradients_stay_with_8_bits() -> None:
    """The packages' codes of a minimum and a scale have no zero: rows of zeros get a momentum, which they magnify."""
    exact = lamb.Leaf("rows", [1.0] * (ROWS * COLUMNS), (ROWS, COLUMNS))
    param = Parameter(torch.ones(ROWS, COLUMNS))
    optimizer = Came.like("sana-8bit", [param], lr=0.01, weight_decay=0.1)
    for _ in range(10):
        gradient = USED.double().unsqueeze(1) * torch.randn(ROWS, COLUMNS, dtype=torch.float64)
        exact.g = gradient.flatten().tolist()
        came.sana([exact], 0.01)
        param.grad = gradient.float()
        optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.int8
    right = torch.tensor(exact.x, dtype=torch.float64).view(ROWS, COLUMNS)
    error = param.detach().double() - right
    assert float(error[USED].norm() / (right - 1)[USED].norm()) < 0.02
    assert float(error[~USED].abs().max()) < 1e-6


# ---- the method ---------------------------------------------------------------------------------------------------

KEPT: list[tuple[Kind, Any, dict[str, Any]]] = [
    (Lamb, "apex", {"always_adapt": False}),
    (Came, "mindformers", {"betas": (0.9, 0.999, 0.99)}),
    (Lars, "barlowtwins", {"denominator": "joint"}),
]


@for_every(("kind", "name", "kept"), KEPT)
def test_overrides_win_and_a_subclass_gives_itself(kind: Any, name: str, kept: dict[str, Any]) -> None:
    given = {"lr": 0.25, "weight_decay": 0.5}
    mine: Any = type("Mine", (kind,), {})
    optimizer = mine.like(name, iter([Parameter(torch.ones(2, 3))]), **given)
    assert type(optimizer) is mine
    assert {**optimizer.defaults, **given, **kept} == optimizer.defaults


REFUSED: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
    (Lamb, "tim", {}, ValueError, r"name='tim' is not known: use 'paper-v5', .*did you mean 'timm'\?"),
    (Came, "sanna", {}, ValueError, r"name='sanna' is not known: use 'came-pytorch', .*did you mean 'sana'\?"),
    (Came, "timm", {}, ValueError, r"name='timm' is a preset of Lamb: use Lamb.like\('timm', ...\)"),
    (Lamb, "keras", {"epsilon": 1e-3}, TypeError, r"unknown option 'epsilon' \(did you mean 'eps'"),
    (Lamb, "mindspore", {}, ValueError, r"exclude_from_weight_decay needs names: pass model.named_parameters\(\)"),
]


@for_every(("kind", "name", "options", "error", "message"), REFUSED)
def test_what_is_refused(kind: Any, name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind.like(name, [Parameter(torch.ones(2))], lr=0.1, **options)


def test_mindspore_needs_no_names_if_grouped_or_told_otherwise() -> None:
    Lamb.like("mindspore", iter([{"params": [Parameter(torch.ones(2))]}]))
    Lamb.like("mindspore", [Parameter(torch.ones(2))], exclude_from_weight_decay=None)


# ---- the page -----------------------------------------------------------------------------------------------------


def results(table: Table, measure: Callable[..., float] = difference, measured: str | None = None) -> str:
    """Return an optimizer's tables of `benchmarks/results/presets.md`, measured on every backend of this machine."""
    rows = []
    for proof in table.proofs:
        given = [f"`{name}={value!r}`" for name, value in proof.options.items() if name != "weight_decay"]
        given += [proof.groups] * bool(proof.groups)
        double, single = (max(measure(table, proof, name, dtype) for name in backends(dtype)) for dtype in BOUNDS)
        rows.append(f"| `{proof.preset}` | {', '.join(given)} | {proof.witness.name} | {double:.0e} | {single:.0e} |")
    return tables(table.presets, versions(table.packages) if measured is None else measured, rows)


@EACH_TABLE
def test_the_pages_are_what_the_table_says(table: Table) -> None:
    anew = "write it anew: python -m tests.math.test_presets"
    assert written(table.name, PAGE) == listed(table.presets), anew
    text = written(table.name)
    check_figures(text, len(table.proofs), BOUNDS)
    assert without_figures(text) == without_figures(results(table, lambda *_: 0.0, "")), anew


def test_the_page_states_the_largest_figures() -> None:
    figures = [row for table in TABLES for row in FIGURE.findall(written(table.name))]
    double, single = (f"{max(map(float, column)):.0e}".replace("e-0", "e-") for column in zip(*figures, strict=True))
    assert f"{double} in float64 and {single} in float32" in " ".join(PAGE.read_text().split())


if __name__ == "__main__":
    for each in TABLES:
        write(each.name, listed(each.presets), PAGE)
        write(each.name, results(each))
