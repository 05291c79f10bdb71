"""CAME's kernels in plain torch: the reference against the scalar witness and came-pytorch, foreach against both.

Each test takes its inputs from the same tables; a new option is one line in `OPTIONS`, a new trap one in `LEAVES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import scalar
from bighorn.kernels import Bucket, CameOptions, Kernel, codec, foreach, reference
from bighorn.kernels.foreach import came as in_pieces
from cases import Layout, arranged

Make = Callable[[list[Bucket[CameOptions]]], Kernel]
Factor = Literal["matrix", "last_two"]
Grad = Literal["normal", "zero", "zero-rows", "zero-columns", "tiny", "huge", "ladder", "constant"]

LOW = (torch.bfloat16, torch.float16)
STEPS = 10
DEFAULTS = CameOptions(
    lr=0.1,
    betas=(0.9, 0.999, 0.9999),
    eps=(1e-30, 1e-16),
    clip_threshold=1.0,
    weight_decay=0.1,
    decay_rate=None,
    bias_correction=False,
    scale_parameter=False,
    scale_eps=1e-3,
    maximize=False,
    centre=False,
    factor="matrix",
)


@dataclass(frozen=True)
class Leaf:
    """A parameter, and what its gradients look like."""

    name: str
    shape: tuple[int, ...]
    grad: Grad = "normal"
    zero: bool = False
    layout: Layout = "plain"
    grad_layout: Layout = "plain"

    def values(self, dtype: torch.dtype) -> Tensor:
        values = torch.randn(self.shape, dtype=torch.float64) * (0.0 if self.zero else 0.5)
        return arranged(values.to(dtype), self.layout)

    def gradient(self, dtype: torch.dtype) -> Tensor:
        g = torch.randn(self.shape, dtype=torch.float64)
        if self.grad == "zero-rows":
            g[::2] = 0
        elif self.grad == "zero-columns":
            g[..., ::2] = 0
        elif self.grad == "ladder":
            g = g.sign() * torch.logspace(-12, 6, g.numel(), dtype=torch.float64).view(g.shape)
        elif self.grad == "constant":
            g.fill_(0.3)
        g = g * {"zero": 0.0, "tiny": 1e-12, "huge": 1e6}.get(self.grad, 1.0)
        # torch has no lazy views of 16-bit floats.
        return arranged(g.to(dtype), "plain" if self.grad_layout == "lazy" and dtype in LOW else self.grad_layout)


MAIN = (
    Leaf("plain", (7, 5)),
    Leaf("plain.too", (7, 5)),
    Leaf("conv", (4, 3, 3, 5), layout="channels_last"),
    Leaf("conv.grad", (3, 2, 3, 3), grad_layout="channels_last"),
    Leaf("pointwise", (6, 5, 1, 1)),
    Leaf("cube", (4, 3, 6)),
    Leaf("transposed", (5, 9), layout="transposed"),
    Leaf("strided", (6, 7), grad_layout="strided"),
    Leaf("negated", (7, 3), grad_layout="lazy"),
    Leaf("long", (3, 600)),
)
EDGES = (
    Leaf("zero", (6, 4), zero=True),
    Leaf("zero.grad", (5, 4), grad="zero"),
    Leaf("zero.both", (5, 2), grad="zero", zero=True),
    Leaf("zero.rows", (8, 4), grad="zero-rows"),
    Leaf("zero.columns", (4, 8), grad="zero-columns"),
    Leaf("tiny", (6, 5), grad="tiny"),
    Leaf("huge", (6, 5), grad="huge"),
    Leaf("ladder", (9, 6), grad="ladder"),
    Leaf("constant", (5, 6), grad="constant"),
    Leaf("row", (1, 9)),
    Leaf("column", (19, 1)),
    Leaf("one", (1, 1)),
    Leaf("ones", (1, 1, 1, 1)),
)
EMPTY = (Leaf("empty.rows", (0, 3)), Leaf("empty.columns", (3, 0)))
VECTORS = (
    Leaf("vector", (17,)),
    Leaf("vector.too", (17,)),
    Leaf("number", ()),
    Leaf("single", (1,)),
    Leaf("nothing", (0,)),
    Leaf("vector.zero", (9,), grad="zero"),
    Leaf("vector.zero.both", (9,), grad="zero", zero=True),
    Leaf("vector.ladder", (31,), grad="ladder"),
    Leaf("matrix", (4, 3)),
)
LEAVES: dict[Factor | None, tuple[Leaf, ...]] = {
    "matrix": (*MAIN, *EDGES, *EMPTY),
    "last_two": (*MAIN, *EDGES, *EMPTY),
    None: VECTORS,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "published": {},
    "no-decay": {"weight_decay": 0.0},
    "betas": {"betas": (0.5, 0.9, 0.99)},
    "no-second-memory": {"betas": (0.9, 0.0, 0.0)},
    "eps": {"eps": (1e-3, 1e-2)},
    "no-clip": {"clip_threshold": 1e9},
    "hard-clip": {"clip_threshold": 0.2},
    "decay-rate": {"decay_rate": 0.8},
    "scale-parameter": {"scale_parameter": True, "lr": 0.02},
    "scale-eps": {"scale_parameter": True, "scale_eps": 0.7},
    "bias-correction": {"bias_correction": True},
    "maximize": {"maximize": True},
    "tensor-lr": {"lr": torch.tensor(0.1, dtype=torch.float64)},
    "everything": {
        "decay_rate": 0.8,
        "scale_parameter": True,
        "bias_correction": True,
        "maximize": True,
        "clip_threshold": 0.5,
        "betas": (0.8, 0.5, 0.99),
    },
}
CENTRED: dict[str, dict[str, Any]] = {
    "centred": {"centre": True},
    "centred-everything": {**OPTIONS["everything"], "centre": True},
}


@dataclass(frozen=True)
class Case:
    """Tensors that share options, on which the kernels are run."""

    id: str
    options: CameOptions
    leaves: tuple[Leaf, ...]

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        return [leaf.values(dtype) for leaf in self.leaves]

    def gradients(self, dtype: torch.dtype) -> list[Tensor]:
        return [leaf.gradient(dtype) for leaf in self.leaves]


def cases() -> list[Case]:
    plain = [
        Case(f"{factor}-{name}", replace(DEFAULTS, factor=factor, **options), leaves)
        for factor, leaves in LEAVES.items()
        for name, options in OPTIONS.items()
    ]
    centred = [
        # A constant gradient, or that of a single column, centres to rounding noise.
        Case(
            f"{factor}-{name}",
            replace(DEFAULTS, factor=factor, **options),
            tuple(leaf for leaf in (*MAIN, *EMPTY) if leaf.name != "pointwise"),
        )
        for factor in LEAVES
        for name, options in CENTRED.items()
    ]
    return plain + centred


CASES = cases()


# ---- buckets ----------------------------------------------------------------------------------------------------


def state_of(x: Tensor, factor: Factor | None, average: torch.dtype | None) -> dict[str, Tensor]:
    """Zeros, as an optimizer allocates them."""
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    state = {"exp_avg": torch.zeros_like(x, dtype=average or statistics)}
    if average == torch.int8:
        state["exp_avg_scale"] = torch.zeros(codec.scales_shape(x.shape))
    if factor is None:
        return state | {"exp_avg_sq": torch.zeros_like(x, dtype=statistics)}
    split = 1 if factor == "matrix" else x.dim() - 1
    for name in ("exp_avg_sq", "exp_avg_res"):
        state[f"{name}_row"] = torch.zeros(x.shape[:split], dtype=statistics)
        state[f"{name}_col"] = torch.zeros((*x.shape[: split - 1], *x.shape[split:]), dtype=statistics)
    return state


def bucket_of(tensors: list[Tensor], options: CameOptions, average: torch.dtype | None = None) -> Bucket[CameOptions]:
    states = [state_of(x, options.factor, average) for x in tensors]
    steps = [torch.zeros(()) for _ in tensors]
    return Bucket(
        options=options,
        params=tensors,
        state={name: [state[name] for state in states] for name in states[0]},
        steps=steps,
        counts=steps,
        norms=torch.zeros(len(tensors), 3),
    )


def flat(a: Tensor) -> list[float]:
    values: list[float] = a.double().flatten().tolist()
    return values


def largest(a: Tensor) -> float:
    return float(a.double().abs().max()) if a.numel() else 0.0


def assert_moved_alike(ours: Tensor, theirs: Tensor, start: Tensor, bound: float, what: str) -> None:
    """Relative to the largest movement; a parameter that hardly moves is stored to half an ulp at each step."""
    assert ours.isfinite().all(), what
    error, movement = largest(ours.double() - theirs.double()), largest(theirs.double() - start.double())
    stored = STEPS * torch.finfo(ours.dtype).eps / 2 * largest(start) if movement < 0.05 * largest(start) else 0.0
    assert error <= bound * movement + stored, f"{what}: {error:.2e}, {error / max(movement, 1e-300):.2e} of {movement}"


# ---- the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_reference_equals_the_scalar_witness(case: Case) -> None:
    tensors = case.tensors(torch.float64)
    starts = [x.clone() for x in tensors]
    bucket, o = bucket_of(tensors, case.options), case.options
    kernel = reference.Came([bucket])
    witnesses = [scalar.CameTensor(flat(x), tuple(x.shape), o.factor) for x in tensors]
    known = {field.name for field in fields(scalar.CameOptions)}
    options = scalar.CameOptions(
        **{name: value for name, value in vars(o).items() if name in known} | {"lr": float(o.lr)}
    )
    for step in range(STEPS):
        bucket.grads = case.gradients(torch.float64)
        kernel.step()
        for i, (leaf, witness, g) in enumerate(zip(case.leaves, witnesses, bucket.grads, strict=True)):
            what = f"{leaf.name}, step {step}"
            figures = scalar.came_step(witness, flat(g), options)
            expected = torch.tensor(witness.x, dtype=torch.float64).view(leaf.shape)
            assert_moved_alike(tensors[i], expected, starts[i], 1e-14, what)
            told = (figures.update_rms, figures.clip, figures.confidence)
            assert bucket.norms[i].tolist() == pytest.approx(told, rel=1e-6), what
            state = {name: column[i] for name, column in bucket.state.items()}
            for name, values in witness_state(witness).items():
                exact = torch.tensor(values, dtype=torch.float64).view_as(state[name])
                # Statistics are sums of what is positive; the average's terms, and a centred gradient's, may cancel.
                atol = 1e-14 * largest(exact) if name == "exp_avg" or o.centre else 0.0
                torch.testing.assert_close(state[name], exact, rtol=1e-13, atol=atol, msg=f"{what}: {name}")
            assert bucket.steps[i] == step + 1


def witness_state(witness: scalar.CameTensor) -> dict[str, list[float]]:
    state = {"exp_avg": witness.m}
    if witness.factor is None:
        return {**state, "exp_avg_sq": witness.v}
    if witness.sq:  # nothing is averaged where there is nothing
        for name, matrices in (("exp_avg_sq", witness.sq), ("exp_avg_res", witness.res)):
            state[f"{name}_row"] = [a for matrix in matrices for a in matrix.row]
            state[f"{name}_col"] = [a for matrix in matrices for a in matrix.col]
    return state


PUBLISHED = [
    Case("main", replace(DEFAULTS, factor="last_two"), MAIN),
    Case("edges", replace(DEFAULTS, factor="last_two"), EDGES),
    Case("vectors", replace(DEFAULTS, factor=None), tuple(leaf for leaf in VECTORS if len(leaf.shape) == 1)),
    Case(
        "betas",
        replace(
            DEFAULTS, factor="last_two", betas=(0.8, 0.9, 0.99), eps=(1e-8, 1e-6), clip_threshold=0.5, weight_decay=0.01
        ),
        MAIN,
    ),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.id)
@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_published_rule_is_came_pytorchs(case: Case, make: Make, dtype: torch.dtype) -> None:
    peer = pytest.importorskip("came_pytorch")
    tensors, o = case.tensors(dtype), case.options
    starts = [x.clone() for x in tensors]
    theirs = [Parameter(x.clone()) for x in tensors]
    optimizer = peer.CAME(
        [p for p in theirs if p.numel()],
        lr=o.lr,
        eps=o.eps,
        clip_threshold=o.clip_threshold,
        betas=o.betas,
        weight_decay=o.weight_decay,
    )
    bucket = bucket_of(tensors, o)
    kernel = make([bucket])
    for _ in range(STEPS):
        bucket.grads = case.gradients(dtype)
        for parameter, g in zip(theirs, bucket.grads, strict=True):
            parameter.grad = g.clone()
        optimizer.step()
        kernel.step()
    bound = {torch.float64: 2e-15, torch.float32: 7e-5 if case.id == "edges" else 6e-6}[dtype]
    for leaf, ours, parameter, start in zip(case.leaves, tensors, theirs, starts, strict=True):
        assert_moved_alike(ours, parameter.detach(), start, bound, leaf.name)


def test_the_published_rule_is_not_ours_on_convolutions() -> None:
    """The comparison above would see it."""
    leaf = Leaf("conv", (4, 3, 3, 5))
    moved = []
    for factor in ("matrix", "last_two"):
        torch.manual_seed(0)
        case = Case("conv", replace(DEFAULTS, factor=factor), (leaf,))
        bucket = bucket_of(case.tensors(torch.float64), case.options)
        bucket.grads = case.gradients(torch.float64)
        reference.Came([bucket]).step()
        moved.append(bucket.params[0])
    with pytest.raises(AssertionError, match="conv"):
        assert_moved_alike(moved[0], moved[1], torch.zeros(leaf.shape), 1e-3, "conv")


# ---- foreach ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["whole", "cut"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tensors whole and stacked, as small ones are, or cut into pieces, as large ones are, even inside a row."""
    if request.param == "cut":
        monkeypatch.setattr(in_pieces, "CHUNK", 8)
        monkeypatch.setattr(in_pieces, "SMALL", 0)
    return str(request.param)


def copy_into(twin: Bucket[CameOptions], bucket: Bucket[CameOptions]) -> None:
    for targets, sources in (
        (twin.params, bucket.params),
        *((twin.state[name], bucket.state[name]) for name in bucket.state),
    ):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def assert_stored_alike(ours: Tensor, theirs: Tensor, scale: float, slack: float, what: str) -> None:
    """Equal to rounding and slack; what is stored in few bits may fall to the other side of a tie."""
    assert ours.dtype == theirs.dtype, what
    if ours.dtype == torch.int8:
        apart = (ours.int() - theirs.int()).abs()
        assert largest(apart) <= 1, what
        assert apart.sum() <= max(1, 0.02 * apart.numel()), what
        return
    error = (ours.double() - theirs.double()).abs()
    bound = {torch.float64: 2e-14, torch.float32: 6e-6}.get(ours.dtype, torch.finfo(ours.dtype).eps) + slack
    assert (error <= bound * (theirs.double().abs() + scale)).all(), f"{what}: {largest(error):.1e} of {scale:.1e}"


DTYPES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype | None]] = {
    "float64": (torch.float64, torch.float64, None),
    "float32": (torch.float32, torch.float32, None),
    "float32-average-bfloat16": (torch.float32, torch.float32, torch.bfloat16),
    "float32-average-float16": (torch.float32, torch.bfloat16, torch.float16),
    "float32-average-int8": (torch.float32, torch.float32, torch.int8),
    "float64-average-int8": (torch.float64, torch.float64, torch.int8),
    "bfloat16": (torch.bfloat16, torch.bfloat16, None),
    "float16-average-float16": (torch.float16, torch.float32, torch.float16),
    "bfloat16-average-int8": (torch.bfloat16, torch.bfloat16, torch.int8),
}
SLACK = {None: 0.0, torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.int8: 0.05}
"""How far one value of the average on the other side of a tie takes what depends on it."""


def runs() -> list[Any]:
    exact = [(case, dtype) for case in CASES for dtype in ("float64", "float32")]
    stored = [
        (case, dtype)
        for case in CASES
        for dtype in DTYPES
        if dtype not in ("float64", "float32") and case.id.endswith(("published", "-everything"))
    ]
    return [pytest.param(case, dtype, id=f"{dtype}-{case.id}") for case, dtype in exact + stored]


@pytest.mark.parametrize(("case", "dtype"), runs())
@pytest.mark.usefixtures("pieces")
def test_foreach_equals_the_reference(case: Case, dtype: str) -> None:
    of_param, of_grad, average = DTYPES[dtype]
    slack = SLACK[average]
    twin = bucket_of(case.tensors(of_param), case.options, average)
    bucket = bucket_of([x.clone() for x in twin.params], case.options, average)
    kernels = foreach.Came([bucket]), reference.Came([twin])
    for step in range(3):
        before = [x.clone() for x in twin.params]
        bucket.grads = case.gradients(of_grad)
        twin.grads = [g.clone() for g in bucket.grads]
        scale: float | Tensor = (1.0, 0.25, torch.tensor(0.5, dtype=torch.float64))[step]
        commit = torch.tensor(True) if step == 2 else None
        for kernel in kernels:
            kernel.step(scale, commit)
        assert torch.equal(torch.stack(bucket.steps), torch.stack(twin.steps))
        assert_stored_alike(bucket.norms, twin.norms, 1e-30, slack, "figures")
        for i, leaf in enumerate(case.leaves):
            what = f"{leaf.name}, step {step}"
            for name in twin.state:
                ours, theirs = bucket.state[name][i], twin.state[name][i]
                follows = slack if name.startswith("exp_avg_res") else 0.0
                assert_stored_alike(ours, theirs, 0.1 * largest(theirs), follows, f"{what}: {name}")
            movement = largest(twin.params[i] - before[i])
            error = largest(bucket.params[i] - twin.params[i])
            bound = {torch.float64: 2e-14, torch.float32: 6e-6}.get(of_param, 0.0) + slack
            stored = torch.finfo(of_param).eps * largest(before[i])
            assert error <= bound * movement + stored, f"{what}: {error:.1e} of {movement:.1e}"
        copy_into(bucket, twin)


@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
@pytest.mark.parametrize("average", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if "everything" in case.id], ids=lambda case: case.id)
@pytest.mark.usefixtures("pieces")
def test_nothing_is_written_without_commit(case: Case, average: torch.dtype | None, make: Make) -> None:
    bucket = bucket_of(case.tensors(torch.float32), case.options, average)
    kernel = make([bucket])
    bucket.grads = case.gradients(torch.float32)
    kernel.step()
    everything = [*bucket.params, *(t for column in bucket.state.values() for t in column), *bucket.steps, bucket.norms]
    before = [tensor.clone() for tensor in everything]
    bucket.grads = [g * torch.inf for g in case.gradients(torch.float32)]
    kernel.step(1.0, torch.tensor(False))
    for tensor, old in zip(everything, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
def test_gradients_are_only_read_and_their_squares_summed(make: Make) -> None:
    case = CASES[0]
    bucket = bucket_of(case.tensors(torch.float32), case.options)
    bucket.grads = case.gradients(torch.float32)
    before = [g.clone() for g in bucket.grads]
    kernel = make([bucket])
    kernel.prepare()
    expected = sum(float(g.double().square().sum()) for g in bucket.grads)
    assert float(kernel.square_sum()) == pytest.approx(expected, rel=1e-12)
    kernel.step()
    assert all(torch.equal(g, old) for g, old in zip(bucket.grads, before, strict=True))


# ---- few bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [reference.Came, foreach.Came], ids=["reference", "foreach"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("average", [None, *LOW, torch.int8], ids=str)
@pytest.mark.parametrize("factor", ["matrix", "last_two", None])
def test_tiny_gradients_neither_stall_nor_spoil(
    make: Make, dtype: torch.dtype, average: torch.dtype | None, factor: Factor | None
) -> None:
    """In the parameter's own dtype, eps of 1e-30 would be 0, and 1 - 0.999 of a change would round to nothing."""
    options = replace(DEFAULTS, factor=factor, lr=1e-3)
    bucket = bucket_of([torch.randn(8, 12).to(dtype), torch.randn(8, 12).to(dtype)], options, average)
    start = bucket.params[0].clone()
    kernel = make([bucket])
    steps, mean = 300, 0.0
    for _ in range(steps):
        bucket.grads = [(torch.randn(8, 12) * 1e-5).to(dtype), torch.zeros(8, 12, dtype=dtype)]
        mean = 0.999 * mean + 0.001 * float(bucket.grads[0].double().square().mean())
        kernel.step()
    tensors = [*bucket.params, *(tensor for column in bucket.state.values() for tensor in column)]
    assert all(tensor.isfinite().all() for tensor in tensors)
    square = "exp_avg_sq" if factor is None else "exp_avg_sq_row"
    assert float(bucket.state[square][0].double().mean()) == pytest.approx(mean, rel=1e-5)
    assert largest(bucket.params[0] - start) > 0


def test_the_residual_is_that_of_the_average_as_stored() -> None:
    """So a backend may read m back; the state of one step tells which m its residual was taken with."""
    bucket = bucket_of([torch.randn(6, 5)], replace(DEFAULTS, clip_threshold=1e9), torch.int8)
    g = torch.randn(6, 5)
    bucket.grads = [g]
    reference.Came([bucket]).step()
    state = {name: column[0] for name, column in bucket.state.items()}
    row, col = state["exp_avg_sq_row"].double(), state["exp_avg_sq_col"].double()
    u = g.double() * (row / row.mean()).rsqrt().unsqueeze(1) * col.rsqrt()
    m = codec.decode(state["exp_avg"], state["exp_avg_scale"]).double()
    as_stored = ((u - m) ** 2).mean(dim=1) * 1e-4
    unrounded = ((u - 0.1 * u) ** 2).mean(dim=1) * 1e-4
    torch.testing.assert_close(state["exp_avg_res_row"].double(), as_stored, rtol=1e-5, atol=0)
    assert largest(unrounded / as_stored - 1) > 1e-4


# ---- the codec --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [*range(-149, -120), -20, 0, 20, 127])
def test_every_code_survives_a_round_trip(exponent: int) -> None:
    """Above the subnormals; among them a scale has fewer than 127 values beside it, but none is ever off by one."""
    scale = torch.full((1, 1), 2.0**exponent * (1.5 if exponent > -149 else 1.0))
    codes = torch.arange(-127, 128, dtype=torch.int8).unsqueeze(0)
    values = codec.decode(codes, scale)
    assert values[0, -1] == scale
    assert values[0, 0] == -scale
    again, same = codec.encode(values)
    assert torch.equal(same, scale)
    assert torch.equal(codec.decode(again, same), values)
    if exponent >= -126 - 7:
        assert torch.equal(again, codes)


def test_blocks_run_inside_rows_of_dim_0() -> None:
    values = torch.randn(5, 3, 200) * torch.logspace(-6, 6, 5).view(5, 1, 1)
    codes, scales = codec.encode(values)
    assert codes.shape == values.shape
    assert scales.shape == codec.scales_shape(values.shape) == (5, 3)
    expected = torch.stack([block.abs().amax(dim=1) for block in torch.split(values.flatten(1), 256, dim=1)], dim=1)
    assert torch.equal(scales, expected)
    shards = [codec.encode(shard) for shard in torch.split(values, [1, 3, 1])]
    assert torch.equal(torch.cat([codes for codes, _ in shards]), codes)
    assert torch.equal(torch.cat([scales for _, scales in shards]), scales)
    moved = arranged(values.unsqueeze(-1), "channels_last").squeeze(-1)
    assert all(torch.equal(a, b) for a, b in zip(codec.encode(moved), (codes, scales), strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 4), (4, 0), (3, 1), (2, 255), (2, 256), (2, 257)], ids=str)
def test_the_codec_takes_any_shape(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    codes, scales = codec.encode(values)
    assert (codes.dtype, codes.shape) == (torch.int8, values.shape)
    assert (scales.dtype, tuple(scales.shape)) == (torch.float32, codec.scales_shape(shape))
    bound = scales.amax() / 254 * (1 + 1e-5) if scales.numel() else 0.0
    assert bool(((codec.decode(codes, scales) - values).abs() <= bound).all())


def test_the_error_of_a_round_trip() -> None:
    """Half a percent to one of a normal value's size, in every row whatever the size of the others."""
    values = torch.randn(64, 1000) * torch.logspace(-6, 6, 64).unsqueeze(1)
    error = codec.decode(*codec.encode(values)) - values
    relative = error.norm(dim=1) / values.norm(dim=1)
    assert 0.005 < relative.median() < 0.008
    assert relative.max() < 0.01


def test_a_block_of_zeros_stays_zero() -> None:
    codes, scales = codec.encode(torch.zeros(2, 300))
    assert not codes.any()
    assert not scales.any()
    assert not codec.decode(codes, scales).any()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e39])
def test_what_is_not_finite_shows_in_its_block_alone(value: float) -> None:
    values = torch.ones(2, 300, dtype=torch.float64)
    values[1, 270] = value
    decoded = codec.decode(*codec.encode(values))
    assert decoded[1, 256:].isnan().all()
    assert torch.equal(decoded[1, :256], torch.ones(256))
    assert torch.equal(decoded[0], torch.ones(300))
