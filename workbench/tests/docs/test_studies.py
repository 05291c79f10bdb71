"""The comparisons in the docs equal the result files; `python workbench/benchmarks/studies.py` updates them."""

from __future__ import annotations

import re
import shlex
import statistics
from pathlib import Path

import pytest
import torch

import budget_splits
import equal_tuning
import unseen_verdicts
from bighorn import Came
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.compare import CompareConfig, compare
from bighorn_workbench.tasks import defaults
from bighorn_workbench.verdict import Pair, interval
from result_files import DOCS, RESULTS, load
from studies import FIGURES, PAGES, STUDIES, cells_of, command, written
from tests.support.tables import for_every
from unseen_tasks import UNSEEN


@for_every("page", PAGES, ids=lambda page: page.stem)
def test_the_figures_are_those_of_the_files(page: Path) -> None:
    assert page.read_text() == written(page)


def test_the_tables_at_equal_tuning_are_those_of_the_files() -> None:
    """To update tables and pictures, run `python workbench/benchmarks/equal_tuning.py`."""
    for page in equal_tuning.PAGES:
        assert page.read_text() == equal_tuning.written(page)
    for name in equal_tuning.names():
        saved = load(name)
        assert saved["clean"] is True
        assert {len(cell["tuning"]) for cell in saved["cells"]} == {saved["config"]["trials"]}
        assert {len(cell["final"]) for cell in saved["cells"]} == {saved["config"]["seeds"]}
        added = saved.get("more_seeds", [])
        seeds = {optimizer: more["seeds"] for more in added for optimizer in more["optimizers"]}
        for row in equal_tuning.cells_of(name).values():
            assert {len(cell.finals) for cell in row} == {
                seeds.get(cell.name, saved["config"]["seeds"]) for cell in row
            }
        assert all(more["clean"] for more in [*added, *saved.get("tuned_again", [])])


def test_the_verdicts_at_equal_tuning_are_those_of_the_pages() -> None:
    """docs/lamb.md, came.md, lars.md and start.md count the batches ahead of AdamW, behind, and neither."""
    lines = equal_tuning.summary(",".join(equal_tuning.names("equal tuning"))).splitlines()[2:]
    rows = {name: figures for name, *figures in (line.strip("| ").split(" | ") for line in lines)}
    assert rows["lamb"][:3] == ["0", "17", "1"]
    assert rows["came"][:3] == ["4", "15", "0"]
    assert rows["adafactor"][:3] == ["3", "14", "2"]
    assert rows["lars"][:3] == ["0", "2", "14"]
    page = " ".join((DOCS / "lamb.md").read_text().split())
    assert f"{rows['lamb'][-1]} learned nothing, of AdamW's {rows['adamw'][-1].strip()}" in page


def test_the_pages_count_the_batches_at_which_the_mean_of_came_is_worse() -> None:
    """A page once wrote "never behind" for "never clearly behind"."""
    worse, batches = 0, 0
    for name in equal_tuning.names("equal tuning"):
        for row in equal_tuning.cells_of(name).values():
            means = {cell.name: statistics.fmean(cell.finals.values()) for cell in row}
            sign = 1 if row[0].metric == "accuracy" else -1
            worse += sign * means["came"] < sign * means["adamw"]
            batches += 1
    assert (worse, batches) == (7, 19)
    for page, words in (
        ("comparisons", "its mean is worse at 7 of 19 batch sizes"),
        ("came", "its mean is worse at seven"),
        ("start", "its mean is worse at seven"),
    ):
        assert words in " ".join((DOCS / f"{page}.md").read_text().split()), page


def test_intervals_at_equal_tuning_have_the_correction_of_the_command() -> None:
    """`compare` corrects for all comparisons of a study; the tables once corrected for one batch's."""
    [name, *_] = equal_tuning.names("equal tuning")
    cells = equal_tuning.cells_of(name)
    assert equal_tuning.comparisons_of(cells) == sum(len(row) - 1 for row in cells.values()) == 15
    row = cells[64]
    lamb, adamw = (next(cell for cell in row if cell.name == each) for each in ("lamb", "adamw"))
    points = [100 * (lamb.finals[seed] - adamw.finals[seed]) for seed in lamb.finals]
    mean, half = interval(points, 15)
    assert equal_tuning.difference(lamb, row, 15) == f"{mean:+.1f} ± {half:.1f}"


@for_every("name", equal_tuning.names("equal tuning"))
def test_the_pictures_at_equal_tuning_show_the_files(name: str) -> None:
    """Only texts are compared, since versions of matplotlib differ in the rest."""
    words = re.compile(r"<text[^>]*>([^<]*)</text>")
    for file, picture in equal_tuning.pictures(name).items():
        assert words.findall((RESULTS / f"{file}.svg").read_text()) == words.findall(picture), file


def test_the_table_of_budgets_is_that_of_the_file() -> None:
    """To update it, run `python workbench/benchmarks/budget_splits.py` with the name of the file."""
    page, found = budget_splits.PAGE.read_text(), load("budget-splits")
    assert found["clean"] is True
    assert page == budget_splits.written(page, found)


def test_every_study_has_its_place() -> None:
    shown = [match[2] for page in PAGES for match in FIGURES.finditer(page.read_text())]
    assert sorted(shown) == sorted(STUDIES)
    assert all((RESULTS / f"{name}.svg").is_file() for name in shown)


@for_every("name", STUDIES)
def test_a_result_can_be_judged(name: str) -> None:
    saved = STUDIES[name]
    assert saved["clean"] is True
    assert len(saved["commit"]) == 40
    assert saved["config"]["seeds"] >= 3
    for each, cell in zip(saved["cells"], cells_of(saved), strict=True):
        assert len(each["final"]) == saved["config"]["seeds"]
        assert each["on_edge"] is (cell.on_edge or len(each["tuned"]) == 1)  # a single rate was an edge then
        best = max(each["tuned"], key=lambda tried: tried["accuracy"])
        assert best["accuracy"] == pytest.approx(next(t["accuracy"] for t in each["tuned"] if t["lr"] == cell.lr))


@for_every("name", STUDIES)
def test_the_command_of_a_page_is_one_that_there_is(name: str) -> None:
    _, _, *arguments = shlex.split(command(STUDIES[name]))
    params = compare.make_context("compare", arguments).params
    config = CompareConfig(**{option: params[option] for option in CompareConfig.__dataclass_fields__})
    saved = STUDIES[name]["config"]
    assert config.optimizers == saved["optimizers"].replace(", ", ",")
    sizes = config.batch_sizes or ",".join(map(str, defaults(TASKS[config.task]).batch_sizes))
    assert sizes == saved["batch_sizes"].replace(", ", ",")


def test_the_leads_of_lamb_are_those_of_the_files() -> None:
    """Each study and docs/comparisons.md state LAMB's lead over AdamW, which docs/lamb.md counts; none is clear.

    The intervals have the correction of the list above them in the notebook.
    """
    overview = " ".join((DOCS / "comparisons.md").read_text().split())
    leads = []
    for name, batches in (("large-batch", (1024, 16384)), ("batch-and-state", (16, 128))):
        page, cells = " ".join((RESULTS / f"{name}.md").read_text().split()), cells_of(STUDIES[name])
        comparisons = sum(cell.optimizer != "adamw" for cell in cells)
        for batch in dict.fromkeys(cell.batch_size for cell in cells):
            row = {cell.optimizer: cell for cell in cells if cell.batch_size == batch}
            leads.append(Pair(row["lamb"], row["adamw"], comparisons))
            mean, half = leads[-1].points
            words = rf"{mean:.1f} ± {half:.1f}( points)? at {batch:,}"
            assert re.search(words, overview)
            assert batch not in batches or re.search(words, page)
    assert [lead.is_clear for lead in leads] == [False] * 5
    lamb = " ".join((DOCS / "lamb.md").read_text().split())
    assert "no difference is clear at any of five" in lamb


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start.md", "docs/grow-the-batch.md"])
def test_a_claim_for_lamb_is_beside_what_was_found_against_it(page: str) -> None:
    """A tuned Adam matches LAMB at large batches (arXiv:2102.06356), which a page once cited for small ones."""
    text = (DOCS.parent / page).read_text()
    assert "lamb.md#claims-and-evidence" in text
    assert not re.search(r"small batches[^.]*2102\.06356", text)


def test_the_published_came_needs_a_lower_rate_in_few_steps() -> None:
    """docs/rates.md describes it: at this rate the corrected rule trains."""
    losses: dict[bool, list[float]] = {}
    for corrected in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 16, bias=False)
        inputs, targets = torch.randn(64, 16), torch.randn(64, 16)
        optimizer = Came(layer.parameters(), lr=0.1, bias_correction=corrected)
        losses[corrected] = []
        for _ in range(6):
            loss = (layer(inputs) - targets).square().mean()
            losses[corrected].append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[True] == sorted(losses[True], reverse=True)
    assert min(losses[False][1:]) > 3 * losses[False][0]


def test_the_verdicts_on_unseen_tasks_are_those_of_the_files() -> None:
    """To measure again and update the page, run `tuned_reference.py`, `rate_search.py` and `unseen_verdicts.py`."""
    found, rates, reference = load("unseen-verdicts"), load("rate-search"), load("tuned-reference")
    assert all(saved["clean"] for saved in (found, rates, reference))
    assert set(reference["tasks"]) == {each.__name__ for each in UNSEEN}
    for of in found["budgets"].values():
        assert list(of["tasks"]) == list(reference["tasks"])
        for name, task in of["tasks"].items():
            assert unseen_verdicts.judged(name, task["words"]) == task["verdicts"]
    page, comparisons = unseen_verdicts.PAGE.read_text(), unseen_verdicts.COMPARISONS.read_text()
    assert unseen_verdicts.written(page, found, rates) == page
    assert unseen_verdicts.counted(comparisons, found) == comparisons
