"""Every preset is compared with the LAMB of its package, and with the page that lists it.

`python -m tests.math.test_presets` measures all of them and writes `docs/presets.md` and LAMB's tables of
`benchmarks/results/presets.md`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import PRESETS, Lamb, Preset
from tests.support import peer_formulas, preset_pages
from tests.support.case_tensors import Leaf
from tests.support.cases import LRS, Case, set_gradients, set_lr
from tests.support.preset_pages import PAGE, backends, check_figures, listed, tables, without_figures, write, written
from tests.support.tables import for_every

STEPS = 10
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6}

LEAVES = (
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
)
CASE = Case("presets", {}, LEAVES, dtype=torch.float32)
"""The values are those of float32, so that one run of a witness serves both dtypes."""


# ---- the witnesses ------------------------------------------------------------------------------------------------

Witness = Callable[[bool], list[Tensor]]
"""A function that trains the leaves in float64 and returns them; its argument gives biases a group without decay."""


def lrs() -> Iterator[tuple[int, float]]:
    yield from ((step, LRS[step % len(LRS)]) for step in range(STEPS))


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    return [gradient.to(dtype) for gradient in CASE.gradients(step) if gradient is not None]


def starts(dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(parameter.detach().to(dtype)) for parameter in CASE.parameters()]


def in_groups(params: Sequence[Parameter], **undecayed: Any) -> list[dict[str, Any]]:
    """Return the parameters with biases in a separate group."""
    pairs = [(leaf.name, parameter) for leaf, parameter in zip(LEAVES, params, strict=True)]
    biases = [pair for pair in pairs if "bias" in pair[0]]
    return [{"params": [pair for pair in pairs if "bias" not in pair[0]]}, {"params": biases, **undecayed}]


def train(optimizer: torch.optim.Optimizer, params: Sequence[Parameter]) -> None:
    for step, lr in lrs():
        set_lr(optimizer, lr)
        set_gradients(params, gradients(step, params[0].dtype))
        optimizer.step()


def formula(step: peer_formulas.Step) -> Witness:
    """Return a witness that runs a peer's formula of `peer_formulas.py`."""

    def run(grouped: bool) -> list[Tensor]:
        leaves = [
            peer_formulas.Leaf(leaf.name, parameter.flatten().tolist(), decays=not (grouped and "bias" in leaf.name))
            for leaf, parameter in zip(LEAVES, starts(torch.float64), strict=True)
        ]
        for count, lr in lrs():
            for leaf, gradient in zip(leaves, gradients(count, torch.float64), strict=True):
                leaf.g = gradient.flatten().tolist()
            step(leaves, lr)
        return [torch.tensor(a.x, dtype=torch.float64).view(leaf.shape) for a, leaf in zip(leaves, LEAVES, strict=True)]

    return run


@contextlib.contextmanager
def jax_in_double() -> Iterator[None]:
    jax: Any = importlib.import_module("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def optax_lamb(_: bool) -> list[Tensor]:
    return optax_run("lamb", weight_decay=0.1)


def optax_run(name: str, **options: Any) -> list[Tensor]:
    """Train with an optimizer of optax, in float64."""
    jnp: Any = importlib.import_module("jax.numpy")
    optax: Any = importlib.import_module("optax")
    with jax_in_double():
        schedule = jnp.asarray([lr for _, lr in lrs()])
        optimizer = getattr(optax, name)(lambda count: schedule[count], **options)
        params = [jnp.asarray(p.detach().numpy()) for p in starts(torch.float64)]
        state = optimizer.init(params)
        for step in range(STEPS):
            grads = [jnp.asarray(g.numpy()) for g in gradients(step, torch.float64)]
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return [torch.tensor(values.tolist(), dtype=torch.float64) for values in params]


def keras_lamb(_: bool) -> list[Tensor]:
    """Train with Keras on jax. On import, Keras reads its backend from the environment and writes settings to disk."""
    with jax_in_double(), tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("KERAS_HOME", folder)
        keras = importlib.import_module("keras")
        keras.config.set_floatx("float64")
        variables = [keras.Variable(p.detach().numpy()) for p in starts(torch.float64)]
        optimizer = keras.optimizers.Lamb(weight_decay=0.1)
        for step, lr in lrs():
            optimizer.learning_rate = lr
            optimizer.apply([g.numpy() for g in gradients(step, torch.float64)], variables)
        return [torch.tensor(variable.value.tolist(), dtype=torch.float64) for variable in variables]


def timm_lamb(**options: Any) -> Witness:
    def run(grouped: bool) -> list[Tensor]:
        params = starts(torch.float64)
        groups = in_groups(params, weight_decay=0.0) if grouped else [{"params": params}]
        train(peer_formulas.installed_timm("lamb").Lamb(groups, **options), params)
        return [parameter.detach() for parameter in params]

    return run


@dataclass(frozen=True, eq=False)
class Proof:
    """A preset, further options, and the witness with which it is compared."""

    preset: Any
    witness: str
    run: Witness
    options: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = False
    undecayed: Mapping[str, Any] = field(default_factory=dict)
    """Options of the second group, which has the biases."""
    kind: Any = Lamb
    without: str = "^$"
    """A pattern for the leaves in which the preset says that it differs."""

    @property
    def id(self) -> str:
        return "-".join([self.preset, self.witness, *self.options, *["grouped"] * self.grouped])


DECAY = {"weight_decay": 0.1}
LESS = {
    "weight_decay": 0.05
}  # if only weight decay moves a tensor, its ratio is 1 / weight_decay: 20, above a bound of 10
BARE = {"weight_decay": 0.0}
FORMULA = "its formula"
INSTALL = {
    "optax": "pip install 'bighorn[peers]'",
    "keras": "pip install 'bighorn[peers]'",
    "timm": "pip install --no-deps timm",
    "pytorch_optimizer": "pip install 'bighorn[peers]'",
}
"""Witnesses that are packages, and how to get them; timm's dependencies do not have a CPU build everywhere."""

PROOFS = (
    Proof("paper-v5", FORMULA, formula(peer_formulas.paper_v5), DECAY),
    Proof("optax", "optax", optax_lamb, DECAY),
    Proof("paper-v3", FORMULA, formula(peer_formulas.paper_v3), DECAY),
    Proof("apex", FORMULA, formula(peer_formulas.apex)),
    Proof("apex", FORMULA, formula(peer_formulas.apex), grouped=True, undecayed=BARE),
    Proof("timm", FORMULA, formula(peer_formulas.timm), grouped=True, undecayed=BARE),
    Proof("timm", "timm", timm_lamb(), grouped=True, undecayed=BARE),
    Proof("nvlamb", FORMULA, formula(peer_formulas.nvlamb), grouped=True, undecayed=BARE),
    Proof("nvlamb", "timm", timm_lamb(always_adapt=True), grouped=True, undecayed=BARE),
    Proof("lambc", FORMULA, formula(peer_formulas.lambc), grouped=True, undecayed=BARE),
    Proof("lambc", "timm", timm_lamb(trust_clip=True), grouped=True, undecayed=BARE),
    Proof("lambw", FORMULA, formula(peer_formulas.lambw), grouped=True, undecayed=BARE),
    Proof("lambw", "timm", timm_lamb(decoupled_decay=True), grouped=True, undecayed=BARE),
    Proof("keras", "keras", keras_lamb, DECAY),
    Proof("torch_npu", FORMULA, formula(peer_formulas.torch_npu), DECAY),
    Proof("torch_npu", FORMULA, formula(peer_formulas.torch_npu_adam), {**DECAY, "adam": True}),
    Proof("torch_npu", FORMULA, formula(peer_formulas.torch_npu_clipped), {**DECAY, "max_grad_norm": 1.0}),
    Proof("cybertronai", FORMULA, formula(peer_formulas.cybertronai), DECAY),
    Proof("deepspeed", FORMULA, formula(peer_formulas.deepspeed), LESS),
    Proof("deepspeed", FORMULA, formula(peer_formulas.deepspeed_corrected), {**LESS, "bias_correction": True}),
    Proof("colossalai", FORMULA, formula(peer_formulas.colossalai), DECAY),
    Proof("tfa", FORMULA, formula(peer_formulas.tfa), {**DECAY, "exclude_from_weight_decay": ["bias", "norm"]}),
    Proof(
        "tfa",
        FORMULA,
        formula(peer_formulas.tfa_apart),
        {**DECAY, "exclude_from_weight_decay": ["bias", "norm"], "exclude_from_layer_adaptation": ["big"]},
    ),
    Proof("mindspore", FORMULA, formula(peer_formulas.mindspore), DECAY),
    Proof("mindspore", FORMULA, formula(peer_formulas.mindspore_grouped), DECAY, grouped=True),
)


# ---- the comparison -----------------------------------------------------------------------------------------------


@functools.cache
def expected(proof: Proof) -> list[Tensor]:
    return proof.run(bool(proof.undecayed))


def difference(proof: Proof, backend: str, dtype: torch.dtype, **changed: Any) -> float:
    """Return the largest ||ours - theirs|| / ||theirs|| of a tensor after all steps."""
    params = starts(dtype)
    pairs = [(leaf.name, parameter) for leaf, parameter in zip(LEAVES, params, strict=True)]
    groups = in_groups(params, **proof.undecayed) if proof.grouped else pairs
    train(proof.kind.like(proof.preset, groups, backend=backend, **{**proof.options, **changed}), params)
    largest = 0.0
    for leaf, ours, theirs in zip(LEAVES, params, expected(proof), strict=True):
        if re.search(proof.without, leaf.name):
            continue
        error, norm = float((ours.detach().double() - theirs).norm()), float(theirs.norm())
        largest = max(largest, error / norm if norm else error)
    return largest


def need(proof: Proof) -> None:
    if proof.witness != FORMULA and find_spec(proof.witness) is None:
        pytest.skip(f"{proof.witness} is not installed: {INSTALL[proof.witness]}")


EACH_WITNESS = pytest.mark.parametrize(
    "witness",
    [
        pytest.param(name, marks=[pytest.mark.process] * (name in INSTALL))
        for name in sorted({p.witness for p in PROOFS})
    ],
)


def need_all(witness: str) -> list[Proof]:
    proofs = [proof for proof in PROOFS if proof.witness == witness]
    need(proofs[0])
    return proofs


@EACH_WITNESS
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_float64(witness: str, name: str) -> None:
    for proof in need_all(witness):
        assert difference(proof, name, torch.float64) <= BOUNDS[torch.float64], proof.id


@EACH_WITNESS
def test_float32(witness: str, backend: str) -> None:
    for proof in need_all(witness):
        assert difference(proof, backend, torch.float32) <= BOUNDS[torch.float32], proof.id


def test_every_name_is_proven() -> None:
    names = {name for preset in PRESETS for name in (preset.name, *preset.aliases)}
    assert {proof.preset for proof in PROOFS} == names


OPTIONS = [(preset, option) for preset in PRESETS for option in preset.options]


@pytest.mark.process
@for_every(("preset", "option"), OPTIONS, ids=[f"{preset.name}-{option}" for preset, option in OPTIONS])
def test_the_proofs_would_see_a_missing_option(preset: Preset, option: str) -> None:
    default = inspect.signature(Lamb).parameters[option].default
    proofs = [proof for proof in PROOFS if proof.preset == preset.name and option not in proof.options]
    seen = [difference(p, "reference", torch.float64, **{option: default}) for p in proofs if p.witness not in INSTALL]
    if not seen:
        need(proofs[0])
        seen = [difference(proofs[0], "reference", torch.float64, **{option: default})]
    assert max(seen) > 1e-9


# ---- the method ---------------------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))


def test_overrides_win() -> None:
    optimizer = Lamb.like("apex", model().parameters(), lr=0.25, weight_decay=0.5)
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.defaults["weight_decay"] == 0.5
    assert optimizer.defaults["always_adapt"] is False


def test_a_subclass_gives_itself() -> None:
    class Mine(Lamb):
        pass

    assert type(Mine.like("apex", model().parameters())) is Mine


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"name='tim' is not known: use 'paper-v5', .*did you mean 'timm'\?"):
        Lamb.like("tim", model().parameters())  # type: ignore[arg-type]


def test_an_unknown_override_is_refused_as_lamb_does() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'epsilon' \(did you mean 'eps'"):
        Lamb.like("keras", model().parameters(), epsilon=1e-3)


def test_mindspore_needs_names_unless_grouped_or_told_otherwise() -> None:
    with pytest.raises(ValueError, match=r"exclude_from_weight_decay needs names: pass model.named_parameters\(\)"):
        Lamb.like("mindspore", model().parameters())
    Lamb.like("mindspore", iter([{"params": model().parameters()}]))
    Lamb.like("mindspore", model().parameters(), exclude_from_weight_decay=None)


# ---- the page -----------------------------------------------------------------------------------------------------


def results() -> str:
    """Return LAMB's tables of `benchmarks/results/presets.md`, measured now on every backend of this machine."""
    rows = []
    for proof in PROOFS:
        given = [f"`{name}={value!r}`" for name, value in proof.options.items() if name != "weight_decay"]
        given += ["two groups, one without decay" if proof.undecayed else "two groups"] * proof.grouped
        double, single = (max(difference(proof, name, dtype) for name in backends(dtype)) for dtype in BOUNDS)
        rows.append(f"| `{proof.preset}` | {', '.join(given)} | {proof.witness} | {double:.0e} | {single:.0e} |")
    return tables(PRESETS, ("optax", "keras", "timm"), rows)


def test_the_page_is_what_the_table_says() -> None:
    assert written("lamb", PAGE) == listed(PRESETS), "write it anew: python -m tests.math.test_presets"


def test_the_results_are_of_these_presets_and_within_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written("lamb")
    check_figures(text, len(PROOFS), BOUNDS)
    monkeypatch.setattr(sys.modules[__name__], "difference", lambda *_: 0.0)
    monkeypatch.setattr(preset_pages, "version", lambda _: "any")
    assert without_figures(text) == without_figures(results()), "write it anew: python -m tests.math.test_presets"


if __name__ == "__main__":
    write("lamb", listed(PRESETS), PAGE)
    write("lamb", results())
