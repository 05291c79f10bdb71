"""`make evidence`: compares new runs with the published intervals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import evidence
from bighorn_workbench.tasks import digest
from equal_tuning import cells_of
from tests.support.tables import for_every

PUBLISHED = {seed: 0.95 + 0.01 * seed for seed in range(1, 6)}
CELLS = [cell for row in cells_of("equal-digits").values() for cell in row]


@for_every(
    ("repeated", "cells", "agrees"),
    [
        ([0.98], 1, True),
        ([0.90], 1, False),
        ([0.90], 20, True),  # one of 20 cells is expected at this distance
        ([1.10], 20, False),
        ([0.94], 1, True),
        ([0.94, 0.94, 0.94, 0.94], 1, False),  # more seeds, narrower interval
        ([0.0], 20, False),  # diverged
        ([math.nan], 20, False),
    ],
)
def test_new_seeds_agree_if_their_mean_is_as_expected(repeated: list[float], cells: int, agrees: bool) -> None:
    distance, most = evidence.agreement(list(PUBLISHED.values()), repeated, cells)
    assert (abs(distance) <= most) is agrees


def test_what_disagrees_is_named() -> None:
    cell = CELLS[0]
    [repeat, *_] = evidence.repeats("equal-digits", None)
    same = list(cell.finals.values())
    lines, differing = evidence.judged([(repeat, same)])
    assert lines[0].startswith(f"agrees  equal-digits, {cell.name} at batch {cell.batch}")
    assert not differing
    lines, differing = evidence.judged([(repeat, [0.5])])
    assert differing == lines
    assert "DIFFERS" in lines[0]
    assert "50.0% of 1 new seeds" in lines[0]


def test_each_cell_is_repeated_with_seeds_of_its_own() -> None:
    found = evidence.repeats("equal-digits", None)
    assert [(each.cell.name, each.cell.batch) for each in found] == [(cell.name, cell.batch) for cell in CELLS]
    for each in found:
        assert not set(each.seeds) & set(each.cell.finals)
        assert each.config.lr == each.cell.saved["final"][0]["lr"]
        assert each.config.warmup == each.cell.saved["final"][0]["warmup"]


@for_every("processes", ["0", "-1"])
def test_a_number_of_processes_is_refused_below_1(processes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evidence.main(["--processes", processes])
    assert f"--processes: {processes} is not possible: give 1 or more" in capsys.readouterr().err


def test_a_folder_without_the_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--mnist", str(tmp_path)]) == 2
    assert f"--mnist '{tmp_path}' is not read by" in capsys.readouterr().out


def test_a_tenth_of_the_runs_is_repeated() -> None:
    cells = [each for study in evidence.STUDIES for each in evidence.repeats(study, None)]
    published = sum(len(each.cell.trials) + len(each.cell.finals) for each in cells)
    assert 0.1 <= sum(len(each.seeds) for each in cells) / published <= 0.12
    for each in cells:  # a cell of the digits has 34 published runs of 0.2 to 2.8 seconds
        seconds = each.cell.saved["seconds"]
        if each.study == "equal-digits":
            assert len(each.seeds) == (1 if seconds > 0.5 else 17)
        if each.study == "equal-masked":
            assert len(each.seeds) == 1  # a run takes 1.5 minutes


def test_other_data_are_refused_before_any_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "fingerprint", lambda *_: digest([]))
    assert evidence.main([]) == 2
    said = capsys.readouterr().out
    assert "equal-digits: these are not the data of the published runs" in said
