"""The ledger of counts: the code has its counts, and one more call, launch, collective or pass fails a test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ledger
import ledger_counts
import published
from bighorn import Lamb
from bighorn import _kernels as kernels
from bighorn._kernels.cpu import library
from ledger_steps import ROWS

FAST_KERNELS = ["lamb kernel float32", "came kernel int8"]
SLOWER = ("efficientnet_b0", "foreach large", "foreach tiny clip", "thousand", "first")
FAST = [row for row in ROWS if not row.endswith(SLOWER)]
OURS = ledger.made_with()


@pytest.fixture
def committed() -> ledger.Ledger:
    """The ledger's file; a test is skipped if another torch wrote it."""
    content: ledger.Ledger = json.loads(ledger.FILE.read_text())
    if content["made_with"]["torch"] != OURS["torch"]:
        pytest.skip(f"the ledger is of torch {content['made_with']['torch']}, and this is {OURS['torch']}")
    return content


@pytest.fixture
def needs_c(committed: ledger.Ledger) -> None:
    """Skip a test of the C library without tools, or with the library of another compiler."""
    if reason := ledger_counts.kernels_unavailable():
        pytest.skip(reason)
    if committed["made_with"]["compiler"] != OURS["compiler"]:
        pytest.skip(f"the ledger is of {committed['made_with']['compiler']}, and the library of {OURS['compiler']}")


def test_counts_are_no_worse_than_those_of_the_ledger(committed: ledger.Ledger) -> None:
    """To look at a row, run `python benchmarks/ledger.py --names ROW`; to write the file, `make ledger`."""
    found, _ = ledger.count_all(FAST)
    assert ledger.errors(committed, found, OURS) == []


@pytest.mark.usefixtures("needs_c")
def test_kernels_are_no_worse_than_those_of_the_ledger(committed: ledger.Ledger) -> None:
    found, _ = ledger.count_all(FAST_KERNELS)
    assert ledger.errors(committed, found, OURS) == []


@pytest.mark.slow
def test_all_counts_are_no_worse_than_those_of_the_ledger(committed: ledger.Ledger) -> None:
    found, _ = ledger.count_all([*ROWS, *ledger_counts.KERNELS])
    assert ledger.errors(committed, found, OURS) == []


def test_the_ledger_has_all_rows(committed: ledger.Ledger) -> None:
    assert [*committed["rows"]] == [*ROWS, *ledger_counts.KERNELS]


# ---- planted slowdowns ----------------------------------------------------------------------------------------


def before_each_step(patch: pytest.MonkeyPatch, planted: Callable[[Lamb], object]) -> None:
    """Call a function at the start of each step."""
    step = Lamb.step

    def slower(self: Lamb) -> None:
        planted(self)
        step(self)

    patch.setattr(Lamb, "step", slower)


def data_ptr_per_tensor(patch: pytest.MonkeyPatch) -> None:
    before_each_step(patch, lambda lamb: list(map(Tensor.data_ptr, lamb.param_groups[0]["params"])))


def wait(patch: pytest.MonkeyPatch) -> None:
    before_each_step(patch, lambda lamb: lamb.param_groups[0]["params"][0].sum().item())


def all_reduce(patch: pytest.MonkeyPatch) -> None:
    before_each_step(patch, lambda _: dist.all_reduce(torch.zeros(2)))


def launch(patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from bighorn._kernels.triton.stepper import Stepper

    finish = Stepper.finish

    def slower(self: Stepper[Any], apply_mask: Tensor) -> None:
        self.square_sum()
        finish(self, apply_mask)

    patch.setattr(Stepper, "finish", slower)


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], str, list[str]]] = [
    (data_ptr_per_tensor, "lamb cpu tiny", ["torch_calls"]),
    (wait, "lamb cpu tiny", ["ops", "allocations", "allocated_bytes", "waits"]),
    (all_reduce, "lamb sharded few", ["ops", "allocations", "collectives", "collective_bytes"]),
    (launch, "lamb triton tiny", ["calls", "launches", "programs", "ops", "allocations", "allocated_bytes"]),
]


@pytest.mark.parametrize(("plant", "row", "counts"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_slowdown_is_an_error(
    plant: Callable[[pytest.MonkeyPatch], None],
    row: str,
    counts: list[str],
    committed: ledger.Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)  # without it, test_counts_are_no_worse_than_those_of_the_ledger finds no error in the rows
    found = ledger.errors(committed, {row: ledger.count(row)}, OURS)
    assert all(line.startswith(f"{row}: ") for line in found)
    assert {*counts} <= {line.split()[len(row.split())] for line in found}


@pytest.mark.usefixtures("needs_c")
def test_one_more_pass_over_the_gradient_is_an_error(committed: ledger.Ledger) -> None:
    row = "lamb kernel float32"
    with ledger_counts.kernel_program() as program:
        found = ledger.errors(committed, {row: ledger_counts.count_kernel(program, row, passes=1)}, OURS)
    assert [line.split()[3] for line in found] == ["instructions", "d1_misses", "ll_misses"]


def test_without_valgrind_the_kernels_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.status()["cpu"].available:
        pytest.skip("backend cpu is not available")
    monkeypatch.setattr(library, "isa", lambda: 3)
    monkeypatch.setenv("PATH", os.devnull)
    assert ledger.count_all(FAST_KERNELS) == ({}, "valgrind is not installed")


# ---- the file -------------------------------------------------------------------------------------------------

ROW = ROWS[0]
MADE_WITH = {"python": "3.11", "torch": "2.13.0", "compiler": "GCC"}


def content(because: dict[str, Any] | None = None, **counts: float) -> ledger.Ledger:
    return {"made_with": MADE_WITH, "because": because or {}, "rows": {ROW: counts}}


@pytest.mark.parametrize(
    ("before", "after", "is_worse"),
    [(99, 100, True), (1000, 1010, False), (1000, 1011, True), (4.0, 4.04, False), (4.0, 4.05, True), (9, 8, False)],
)
def test_what_is_worse(before: float, after: float, is_worse: bool) -> None:
    assert bool(ledger.errors(content(calls=before), {ROW: {"calls": after}}, MADE_WITH)) == is_worse


def test_misses_of_the_code_itself_are_not_worse() -> None:
    """CAME's in bfloat16 rose from 0.0948 to 0.0960 with equal instructions, since other code had changed."""
    before = content(ll_misses=0.0948, instructions=0.0948)
    assert ledger.errors(before, {ROW: {"ll_misses": 0.0967, "instructions": 0.0948}}, MADE_WITH) == []
    assert len(ledger.errors(before, {ROW: {"ll_misses": 0.0969, "instructions": 0.0967}}, MADE_WITH)) == 2


def test_a_count_that_was_0_is_worse_and_opcodes_are_of_one_python() -> None:
    found: dict[str, ledger.Counts] = {ROW: {"calls": 5, "waits": 1, "opcodes": 900}}
    assert len(ledger.errors(content(calls=5, opcodes=800), found, MADE_WITH)) == 2
    assert len(ledger.errors(content(calls=5, opcodes=800), found, MADE_WITH | {"python": "3.13"})) == 1
    assert ledger.errors(content(calls=5, opcodes=800), found, MADE_WITH | {"torch": "2.7.1"}) == []


def test_a_row_that_got_worse_needs_a_reason_until_it_is_as_good_again() -> None:
    old = content(calls=50)
    new = ledger.updated(old, {ROW: {"calls": 60}}, MADE_WITH, "")
    assert new["because"] == {ROW: {"reason": "", "before": {"calls": 50}}}
    assert ledger.errors(new, {}, MADE_WITH) == [f"{ROW}: worse than before; give the reason in ledger.json"]
    new = ledger.updated(new, {ROW: {"calls": 70}}, MADE_WITH, "it checks more")
    assert new["because"] == {ROW: {"reason": "it checks more", "before": {"calls": 50}}}
    assert ledger.errors(new, {ROW: {"calls": 70}}, MADE_WITH) == []
    assert ledger.updated(new, {ROW: {"calls": 70}}, MADE_WITH, "")["because"] == new["because"]
    worse = ledger.updated(new, {ROW: {"calls": 80}}, MADE_WITH, "")
    assert worse["because"] == {ROW: {"reason": "", "before": {"calls": 70}}}
    assert ledger.updated(new, {ROW: {"calls": 50}}, MADE_WITH, "")["because"] == {}


# ---- the tables that depend on it -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", published.TABLES)
def test_a_published_table_is_of_the_present_code(name: str) -> None:
    """To measure one again, run `python benchmarks/published.py NAME`, then `workbench/benchmarks/front.py`."""
    try:
        found = published.changed_since(name)
    except LookupError as error:
        pytest.skip(str(error))  # the table is older than the ledger, or the clone lacks its commit
    assert found == []


@pytest.mark.parametrize(
    ("then", "now", "count"),
    [
        ({"calls": 40}, {"calls": 41}, 0),
        ({"calls": 40}, {"calls": 42}, 1),
        ({"instructions": 4.1}, {"instructions": 4.2}, 1),
        ({"opcodes": 1000}, {"opcodes": 985}, 1),
        ({"opcodes": 1000}, {"opcodes": 991}, 0),
    ],
)
def test_a_change_of_a_count_outdates_a_table(then: ledger.Counts, now: ledger.Counts, count: int) -> None:
    assert len(published.changes({ROW: then}, {ROW: now}, [ROW])) == count
