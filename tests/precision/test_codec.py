"""Blocks of codes with one scale each: round trips, edge cases and errors, for every form of code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bighorn._kernels import codec, rounding
from bighorn._kernels.codec import INT4, LINEAR, SIGNED, UNSIGNED, Form
from tests.support.case_tensors import arranged
from tests.support.tables import for_every

FORMS: dict[str, Form] = {"linear": LINEAR, "signed": SIGNED, "unsigned": UNSIGNED, "int4": INT4}
CODES: dict[Form, Tensor] = {
    LINEAR: torch.arange(-127, 128, dtype=torch.int8),
    SIGNED: torch.arange(-127, 128, dtype=torch.int8),
    UNSIGNED: torch.arange(256, dtype=torch.uint8),
    INT4: torch.arange(-7, 8, dtype=torch.int8),
}


@for_every(
    ("form", "scale"),
    [
        *itertools.product(FORMS.values(), (1.0, 3e-7, 1.7e15)),
        *((LINEAR, 2.0**exponent * (1.5 if exponent > -149 else 1.0)) for exponent in (*range(-149, -120), 127)),
    ],
)
def test_every_code_survives_a_round_trip(form: Form, scale: float) -> None:
    """Each code is tested beside the largest one, which keeps the block's scale. -0 may become 0.

    Subnormal scales have fewer than 127 values below them, so codes change, but decoded values never do.
    """
    codes = CODES[form].view(-1, 1)
    rows = torch.cat([codes, codes[-1:].expand_as(codes)], dim=1)
    rows = codec.pack_int4(rows) if form.int4 else rows
    scales = torch.full((len(rows), 1), scale)
    values = codec.decode(rows, scales, form)
    assert values[-1, 0] == torch.tensor(scale)
    again, same = codec.encode(values, form)
    torch.testing.assert_close(same, scales, rtol=2e-7, atol=0)
    if scale >= 2.0**-133:
        assert again.equal(rows)
    else:
        assert codec.decode(again, same, form).equal(values)


BOUNDS = {LINEAR: 1 / 254, SIGNED: 1 / 126, UNSIGNED: 1 / 126, INT4: 1 / 14}
"""The largest error of a value, relative to the block's largest: about half the distance of the two upper codes."""


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_error_of_a_round_trip(form: Form) -> None:
    torch.manual_seed(2)
    values = torch.randn(256, 1000) * torch.logspace(-12, 12, 256).unsqueeze(1)
    values = values.square() if form is UNSIGNED else values
    scales = torch.cat(
        [block.abs().amax(dim=1, keepdim=True).expand_as(block) for block in torch.split(values, 256, 1)], 1
    )
    error = ((codec.decode(*codec.encode(values, form), form) - values) / scales).abs()
    assert error.max() <= BOUNDS[form] * 1.001
    assert error.max() >= BOUNDS[form] * 0.5, "the bound says little"


@pytest.mark.parametrize(
    ("form", "decades", "bound"), [(LINEAR, 2, 2e-3), (INT4, 1, 2e-3), (SIGNED, 3, 2e-3), (UNSIGNED, 7, 1e-3)]
)
def test_a_moment_in_codes_is_its_mean(form: Form, decades: int, bound: float) -> None:
    """With dither, the mean over steps is the value, even if rounding to the nearest code would never change it."""
    values = torch.logspace(-decades, 0, 256).unsqueeze(0)
    steps = 1 << 12
    dither = rounding.dither(rounding.rng_key(5, 0), torch.arange(steps).unsqueeze(1), torch.arange(256))
    decoded = codec.decode(*codec.encode(values.expand(steps, 256), form, dither), form).double()
    error = (decoded.mean(dim=0) / values[0] - 1).abs()
    assert error.max() < bound
    nearest = codec.decode(*codec.encode(values, form), form)[0]
    assert ((nearest / values[0] - 1).abs() > 2 * error).float().mean() > 0.9, "the test could not fail"


def test_dither_is_spread_evenly() -> None:
    """Over any 256 steps of an element, and any 256 elements of a step, it fills 64 bins evenly, with a mean of 0.5."""
    for key, t, first in ((0, 1, 0), (rounding.rng_key(7, 3), 10**6, 2**32 - 100)):
        index, steps = first + torch.arange(256), t + torch.arange(256)
        for drawn in (rounding.dither(key, steps, index[0]), rounding.dither(key, steps[0], index)):
            assert abs(drawn.double().mean() / codec.NEAREST - 1) < 0.02
            counts = torch.bincount(drawn >> 10, minlength=64)
            assert len(counts) == 64
            assert counts.min() >= 2
            assert counts.max() <= 6


@pytest.mark.parametrize("leading", [1, 2])
@pytest.mark.parametrize("form", [LINEAR, INT4], ids=lambda f: str(f.dtype))
def test_blocks_run_inside_rows(form: Form, leading: int) -> None:
    """They equal the blocks of the same values as one matrix, also for a shard of any leading dim, in any layout."""
    values = torch.randn(5, 3, 300) * torch.logspace(-6, 6, 15).view(5, 3, 1)
    rows = values.flatten(0, leading - 1).flatten(1)
    codes, scales = codec.encode(values, form, leading=leading)
    expected = torch.stack([block.abs().amax(dim=1) for block in torch.split(rows, 256, dim=1)], dim=1)
    assert scales.shape == codec.scales_shape(values.shape, leading)
    assert scales.view_as(expected).equal(expected)
    assert codes.shape == ((*values.shape[:leading], rows.shape[1] // 2) if form.int4 else values.shape)
    as_rows = codec.encode(rows, form)
    assert codes.view_as(as_rows[0]).equal(as_rows[0])
    assert codec.decode(codes, scales, form).view_as(rows).equal(codec.decode(*as_rows, form))
    parts = [
        codec.encode(part, form, leading=leading)
        for part in torch.split(values, [1, 0, values.shape[leading - 1] - 1], dim=leading - 1)
    ]
    moved = codec.encode(arranged(values.unsqueeze(-1), "channels_last").squeeze(-1), form, leading=leading)
    for whole, same, *shards in zip((codes, scales), moved, *parts, strict=True):
        assert same.equal(whole)
        assert torch.cat(shards, dim=leading - 1).equal(whole)


@for_every("shape", [(), (1,), (7,), (0,), (0, 4), (4, 0), (3, 1), (2, 255), (2, 256), (2, 257)], ids=str)
def test_the_codec_takes_any_shape(shape: tuple[int, ...]) -> None:
    for values in (torch.randn(shape), torch.zeros(shape)):
        codes, scales = codec.encode(values)
        assert (codes.dtype, codes.shape) == (torch.int8, values.shape)
        assert (scales.dtype, tuple(scales.shape)) == (torch.float32, codec.scales_shape(shape))
        bound = scales.amax() / 254 * (1 + 1e-5) if scales.numel() else 0.0
        assert bool(((codec.decode(codes, scales) - values).abs() <= bound).all())


@pytest.mark.parametrize("rows_at_once", [1 << 20, 3000])
@pytest.mark.parametrize("form", [LINEAR, INT4, SIGNED, UNSIGNED], ids=lambda f: str(f.dtype))
def test_the_expected_error_is_that_of_a_round_trip(
    form: Form, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "CODES_AT_ONCE", rows_at_once)
    values = torch.randn(64, 1000) * torch.logspace(-3, 3, 64).unsqueeze(1)
    values = values.abs() if form is UNSIGNED else values
    dither = torch.randint(1 << 16, values.shape)
    codes, scales = codec.encode(values, form, dither)
    error = (codec.decode(codes, scales, form) - values).norm() / values.norm()
    assert float(codec.expected_error(codes, scales, form)) == pytest.approx(float(error), rel=0.1)


@pytest.mark.parametrize("form", [LINEAR, INT4], ids=lambda f: str(f.dtype))
def test_the_expected_error_of_stacked_layers_is_that_of_their_rows(form: Form) -> None:
    """It once raised, or multiplied the codes of one layer by the scales of another."""
    values = torch.randn(64, 1000) * torch.logspace(-3, 3, 64).unsqueeze(1)
    codes, scales = codec.encode(values, form)
    stacked = codes.view(4, 16, -1), scales.view(4, 16, -1)
    assert codec.expected_error(*stacked, form) == codec.expected_error(codes, scales, form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_moment_in_16_bits_is_converted_in_float32(dtype: torch.dtype) -> None:
    """A second moment in bfloat16 once lost .6%, since its root was computed in bfloat16."""
    values = torch.rand(4, 300).to(dtype)
    ours, theirs = (codec.encode(each, UNSIGNED) for each in (values, values.float()))
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e39])
def test_what_is_not_finite_shows_in_its_block_alone(value: float) -> None:
    values = torch.ones(2, 300, dtype=torch.float64)
    values[1, 270] = value
    decoded = codec.decode(*codec.encode(values))
    assert decoded[1, 256:].isnan().all()
    assert torch.equal(decoded[1, :256], torch.ones(256))
    assert torch.equal(decoded[0], torch.ones(300))
