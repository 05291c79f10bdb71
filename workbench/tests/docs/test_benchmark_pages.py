"""The tables of the docs and of the README equal the measurements, and the plan equals the counted collectives."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import ModuleType

import pytest
import torch

import adapters
import diloco
import eight_bit
import equal_tuning
import four_bits
import front
import lora
import loss_curves
import offload
import offload_peers
import precision_table
import scale
from bighorn_workbench.shapes import SHAPES
from result_files import RESULTS
from studies import STUDIES, cells_of
from tests.support.tables import for_every

ROOT = Path(__file__).parents[3]


SOURCES = [scale, eight_bit, precision_table, four_bits, lora, adapters, diloco, offload, offload_peers]


@for_every("source", SOURCES, ids=lambda source: source.__name__)
def test_the_tables_are_those_of_the_script(source: ModuleType) -> None:
    """To update a table, run the script, with `--page` if it has that option."""
    assert source.PAGE.read_text() == source.written()


def cells(name: str, shapes: str) -> dict[str, str]:
    """Return the cell of each optimizer in a table, by label."""
    measured = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    (found,) = [result["optimizers"] for result in measured if result["shapes"] == shapes]
    ratios = {optimizer["label"]: optimizer["ratio"] for optimizer in found}
    return {label: front.speed(each) for label, each in ratios.items()}


def test_the_study_of_lora_shows_what_its_page_says() -> None:
    saved = json.loads(lora.RESULT.read_text())
    assert saved["clean"] is True
    assert {run["seed"] for run in saved["runs"]} == {0, 1, 2}
    warmed = [run for run in saved["runs"] if run["optimizer"] == "`Lamb`" and run["warm_up"]]
    slow, fast = ([run for run in warmed if (run["lr"] > 0.02) is over] for over in (False, True))
    assert all(run["losses"]["40"] > 3 and run["lora_B_trust_ratio"]["40"] < 0.002 for run in slow)
    assert {f"{run['losses']['40']:.2f}" for run in fast} == {"2.61", "2.64", "2.65"}
    assert all(run["losses"]["100"] > run["losses"]["0"] for run in fast)


def test_the_study_of_few_steps_shows_what_its_page_says() -> None:
    saved = json.loads(diloco.RESULT.read_text())
    assert saved["clean"] is True
    assert all(2.3 < run["losses"][0] < 2.45 for run in saved["runs"])

    def losses(optimizer: str, rates: tuple[float, ...], step: int) -> list[float]:
        return [run["losses"][step] for run in saved["runs"] if run["optimizer"] == optimizer and run["lr"] in rates]

    published, corrected, _ = diloco.OUTER
    assert max(losses(published, (1e-4, 1e-3, 3e-3), 20)) <= 0.1
    assert max(losses(corrected, (3e-3, 1e-2, 3e-2, 1e-1), 20)) < 0.16
    assert min(losses(published, (3e-2, 1e-1), 5)) > 2.5


def test_the_study_of_adapters_shows_what_its_page_says() -> None:
    saved = json.loads(adapters.RESULT.read_text())
    assert saved["clean"] is True
    assert {run["seed"] for run in saved["runs"]} == {0, 1, 2}

    def loss(adapter: str, warm_up: int, optimizer: str) -> float:
        return float(adapters.cell(saved["runs"], adapter=adapter, warm_up=warm_up, optimizer=optimizer).split()[0])

    for warm_up in (0, 20):
        behind = {
            name: {each: loss(each, warm_up, name) - loss(each, warm_up, "AdamW") for each in adapters.ADAPTERS}
            for name in ("`Lamb`", "`Lamb` with the rule", "`Came`")
        }
        plain, rule, came = behind.values()
        assert min(plain.values()) > (0.04 if warm_up else 0.005)
        assert max(came.values()) < 0.025
        assert 0.065 < rule.pop("AdaLoRA") < 0.075
        assert max(rule.values()) < 0.045


def test_the_page_of_adapters_has_the_differences_of_the_study() -> None:
    """It once described LoRA, 0.03 behind, as good, and LoKr, 0.02 behind, as slightly behind."""
    page, runs = (ROOT / "docs" / "with-transformers.md").read_text(), json.loads(adapters.RESULT.read_text())["runs"]
    for adapter in adapters.ADAPTERS:
        behind = set()
        for warm_up in adapters.WARM_UPS:
            names = "`Lamb` with the rule", "AdamW"
            cells = [adapters.cell(runs, adapter=adapter, warm_up=warm_up, optimizer=name) for name in names]
            ours, theirs = (float(cell.split()[0]) for cell in cells)
            behind.add(round(ours - theirs, 2))
        (row,) = re.findall(rf"^\| {adapter} \| `\w+` \| ([^|:]*\d)", page, re.MULTILINE)
        assert row == " to ".join(f"{each:.2f}" for each in sorted(behind)), adapter


@pytest.mark.parametrize("name", front.TABLES)
def test_a_table_behind_the_readme_is_that_of_the_file(name: str) -> None:
    """To update tables and pictures, run `python workbench/benchmarks/front.py`."""
    assert front.TABLES[name][0].read_text() == front.written(name)


@pytest.mark.parametrize("name", front.PICTURES)
def test_a_picture_of_the_readme_shows_the_files(name: str) -> None:
    """The texts of the SVG contain its numbers; versions of matplotlib differ in the rest."""
    words = re.compile(r"<text[^>]*>([^<]*)</text>")
    shown = (ROOT / "docs" / f"{name}.svg").read_text()
    assert words.findall(shown) == words.findall(front.PICTURES[name]())
    assert "prefers-color-scheme:dark" in shown


@for_every("picture", [*ROOT.glob("docs/*.svg"), *RESULTS.glob("*.svg")], ids=lambda path: path.name)
def test_a_picture_has_its_colours_where_css_variables_are_unknown(picture: Path) -> None:
    """Such viewers ignore a style with a variable, and once drew black."""
    tags = re.findall(r"<[^>]*var\(--[^>]*>", picture.read_text().partition("</style>")[2])
    assert tags
    for tag in tags:
        for name in re.findall(r"(fill|stroke): var", tag):
            assert re.search(rf' {name}="#[0-9a-f]{{6}}"', tag), tag


def test_the_readme_says_what_the_files_say() -> None:
    pages = {page: " ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/benchmarks.md")}
    text = pages["README.md"]
    rows = {name: row for name, row in front.memory_rows().items() if row["state"] is not None}
    totals = {name: row["weights"] + row["gradients"] + row["state"] for name, row in rows.items()}
    kept, int8, int4 = (
        totals[f"Came, {form}"]
        for form in ("int8, stochastic", "int8, stochastic, released", "int4, stochastic, released")
    )
    fp32, bf16 = totals["torch AdamW, fp32 weights"], totals["torch AdamW"]
    said = f"takes {int4:.1f}-{int8:.1f} bytes per parameter; AdamW takes {bf16:.0f} (pure bf16) or {fp32:.0f} (fp32)"
    assert said in text
    kept_int4 = totals["Came, int4, stochastic"]
    assert {
        "AdamW, fp32": f"{fp32:.0f}",
        "Came int8, bf16": f"{kept:.1f}, released {int8:.1f}",
        "Came int4, bf16": f"{kept_int4:.1f}, released {int4:.1f}",
    } == front.BYTES
    found = front.speedups()
    words = ", ".join(f"{peer} {speedup:.1f}x" for peer, speedup in found.items())
    assert words in pages["docs/benchmarks.md"]
    lamb, came = found["timm Lamb"], found["came-pytorch"]
    assert f"`Lamb` is {lamb:.1f}x faster than timm's, and one of `Came` {came:.1f}x faster than came-pytorch's" in text
    ours = {label: ratio["median"] for label, ratio in front.ratios("step-fp32", "bert_base").items()}
    assert f"`Lamb` takes {ours['Lamb']:.1f} times as long as fused AdamW, and `Came` about as long" in text
    assert 0.95 < ours["Came"] < 1.05


MACHINES = re.compile(r"Intel\s+Xeon|AMD\s+EPYC|AVX-?512|AVX2|(?<=with )\d+ [KM]B(?= of L2)")
"""The words of pages for a machine: its processor, its instruction set and its cache."""


def of_machine(path: Path) -> str:
    """Return the environment and the machine of a result file, in the words of pages."""
    saved = json.loads(path.read_text())
    if "environment" not in saved:
        return ""
    caches = re.sub(r"\b2048K", "2 MB", saved["machine"]["caches"]) if "machine" in saved else ""
    caches = re.sub(r"(\d)K", r"\1 KB", caches)
    return f"{saved['environment']['processor']} {saved['environment']['instruction set']} {caches}".replace("(R)", "")


WITH_FILES = [
    path for pattern in ("*.md", "*/*.md", "*/results/*.md", "*/*/results/*.md") for path in ROOT.glob(pattern)
]


@for_every("page", WITH_FILES, ids=str)
def test_a_paragraph_names_the_machine_of_its_file(page: Path) -> None:
    """Tables were measured again on another machine, and the words above them stayed."""
    for paragraph in re.split(r"\n\n|\n(?=[*|-] )", page.read_text()):
        named = {" ".join(words.split()).replace("AVX-512", "AVX512") for words in MACHINES.findall(paragraph)}
        for link in re.findall(r"\]\((\S*\.json)\)", paragraph) if named else ():
            found = of_machine(page.parent / link)
            assert not found or {words for words in named if words not in found} == set(), (link, paragraph)


def test_the_losses_of_the_readme_are_those_of_the_curves() -> None:
    saved = json.loads(loss_curves.RESULT.read_text())
    assert saved["clean"] is True
    assert {tuple(seeds) for seeds in saved["curves"].values()} == {("1", "2", "3", "4", "5")}
    text = " ".join((ROOT / "README.md").read_text().split())
    ends = [statistics.fmean(seed[-1][1] for seed in seeds.values()) for seeds in saved["curves"].values()]
    assert "loss after 294 steps: {:.2f}, {:.2f} and {:.2f}".format(*ends) in text
    means = [
        [statistics.fmean(loss for _, loss in points) for points in zip(*seeds.values(), strict=True)]
        for seeds in saved["curves"].values()
    ]
    ahead = [adamw < min(others) for adamw, *others in zip(*means, strict=True)]
    last = saved["curves"]["AdamW, fp32"]["1"][ahead.index(False, 1) - 1][0]
    assert f"AdamW's is lower up to step {last}" in text


def test_the_words_for_the_picture_of_accuracies_are_those_of_the_files() -> None:
    page = (ROOT / "docs" / "comparisons.md").read_text()
    for model, name in (("LeNet, five seeds", "equal-lenet"), ("ResNet-8, fifteen seeds", "equal-resnet")):
        *_, largest = equal_tuning.cells_of(name).values()
        accuracies = ", ".join(f"{cell.name} {statistics.fmean(cell.finals.values()):.1%}" for cell in largest)
        assert f"{model}: {accuracies}" in page


def test_the_page_of_precisions_says_what_was_measured() -> None:
    page = (ROOT / "docs" / "precision.md").read_text()
    columns = [cells("step-precision", shapes) for shapes in ("vit_small", "bert_base")]
    labels = list(columns[0])[1:]  # without the baseline
    assert len(labels) == 15
    for label in labels:
        assert f"| {label} | {' | '.join(column[label] for column in columns)} |" in page
    medians = [
        {label: ratio["median"] for label, ratio in front.ratios("step-precision", shapes).items()}
        for shapes in ("vit_small", "bert_base")
    ]
    bf16 = sorted(each["Lamb, fp32 states"] / each["Lamb"] for each in medians)
    int8 = sorted(each["Lamb, int8 states"] / each["Lamb, fp32 states"] for each in medians)
    text = " ".join(page.split())
    assert f"is {spread(bf16)}x faster with bfloat16 moments than with float32 ones" in text
    assert f"takes {spread(int8)} times as long with int8" in text


def spread(ratios: list[float]) -> str:
    """Return the least and the largest ratio, or one number if they are the same."""
    return " to ".join(dict.fromkeys(f"{each:.1f}" for each in (min(ratios), max(ratios))))


OPTIONS = {
    "float32": "",
    "`max_grad_norm`": ", clip",
    "`skip_nonfinite`": ", skip",
    "`cautious`": ", cautious",
    '`second_moment="amsgrad"`': ", amsgrad",
    "parameters in float64": ", float64",
    '`state_dtype="bfloat16"`': ", bfloat16 state",
    '`state_dtype="int8"`': ", int8",
    '`state_dtype="int4"`': ", int4",
    '`weight_rounding="stochastic"`': ", stochastic",
    '`weight_rounding="kahan"`': ", kahan",
    '`weight_rounding="master"`': ", master",
}
"""The rows of the table in docs/devices.md, and what the rows of the file add to an optimizer's name."""


COSTS: dict[str, dict[tuple[str, tuple[str, ...]], str]] = {
    "lars.md": {("Lars, momentum in float32", ("int8", "int4")): "Plain torch takes {:.0f} to {:.0f} times as long"},
    "groups.md": {
        ("Lamb", ("grad_centralization",)): "takes {:.1f} to 1.8 times as long on ViT-S and ResNet-50",
        ("Came", ("grad_centralization",)): "to {1:.1f} times as long on ViT-S and ResNet-50",
    },
    "benchmarks.md": {
        ("fused AdamW, float64", ("Lamb",)): "`Lamb` takes {:.1f} to {:.1f} times as long",
        ("fused AdamW, float64", ("Came",)): "`Came` {:.1f} to {:.1f}",
        ("fused AdamW, float64", ("Lars",)): "`Lars` {:.1f} to {:.1f}",
        ("fused AdamW, float64", ("foreach AdamW",)): "and foreach AdamW {:.1f}",
    },
    "precision.md": {
        ("Lamb, moments in float32", ("bfloat16",)): "`Lamb` takes {:.1f} times as long with bfloat16 moments",
        ("Lamb, moments in float32", ("int8",)): "and {:.1f} to {:.1f} with int8",
        ("Came, momentum in float32", ("bfloat16",)): "`Came` {1:.1f} with bfloat16",
    },
}
"""What pages say of results/option-cost.json on the shapes of models: the least and the largest ratio of some rows."""


def test_the_costs_of_options_are_those_of_the_file() -> None:
    saved = json.loads((RESULTS / "option-cost.json").read_text())
    assert saved["clean"] is True
    for page, claims in COSTS.items():
        text = " ".join((ROOT / "docs" / page).read_text().split())
        for (baseline, others), words in claims.items():
            ratios = [
                row["ratio"]["median"]
                for row in saved["rows"]
                if (row["baseline"], row["shapes"] != "tiny") == (baseline, True) and row["other"] in others
            ]
            assert len(ratios) == 2 * len(others)
            assert words.format(min(ratios), max(ratios)) in text, (page, baseline, others)


def test_the_first_steps_of_many_tensors_are_those_of_the_file() -> None:
    found = json.loads((RESULTS / "step-cliffs.json").read_text())["results"]
    [rows] = [each["optimizers"] for each in found if each["shapes"] == "missing"]
    lamb, came, adamw = (
        next(1e3 * row["first_step_s"] for row in rows if row["label"] == label)
        for label in ("Lamb", "Came", "torch AdamW, fused")
    )
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"it takes {lamb:.0f} us per tensor (Lamb), {came:.0f} us (Came) and {adamw:.0f} us (AdamW)" in text
    again = [optimizer["ratio"]["median"] for each in found for optimizer in each["optimizers"][:1]]
    assert f"relative to the first are {min(again):.2f} to {max(again):.2f}" in text


def test_the_calls_of_plain_torch_are_those_of_the_file() -> None:
    """The table once had a smaller model's counts beside the link to this file."""
    found = json.loads((RESULTS / "plain-torch.json").read_text())["shapes"]["bert_base"]
    page = (ROOT / "docs" / "devices.md").read_text()
    for label, suffix in OPTIONS.items():
        (row,) = re.findall(rf"^\| {re.escape(label)} \| (.*) \|$", page, re.MULTILINE)
        *calls, temporaries = (cell.strip() for cell in row.split("|"))
        rows = [found.get(f"{name}{suffix}") for name in ("Lamb", "Lars", "Came")]
        assert calls == ["" if each is None else str(each["calls"]) for each in rows], label
        rounded = {f"{each['temporary bytes per parameter']:.0f}" for each in rows if each is not None}
        assert set(re.findall(r"\d+", temporaries)) == rounded, label
    assert f"makes {found['AdamW of torch, foreach']['calls']} calls" in page


def test_every_tensor_is_in_a_group() -> None:
    for model in scale.MODELS:
        assert sum(model.groups()) == sum(tensor.numel() for tensor in model.tensors)
        assert len(set(model.groups()[:-1])) == 1  # all blocks have the same size


@pytest.mark.parametrize(("label", "optimizer"), [("Lamb", "lamb"), ("Came", "came")])
def test_the_plan_sends_what_was_counted(label: str, optimizer: str) -> None:
    path = RESULTS / "sharded-step.json"
    if not path.is_file():
        pytest.skip("workbench/benchmarks/sharded_step.py has not been run on this checkout")
    found = json.loads(path.read_text())
    counted = found["collectives_on_4_ranks"][label]["FSDP2"]
    tensors = [torch.empty(shape, device="meta") for shape in SHAPES[found["shapes"]]()]
    planned = scale.sums(optimizer, tensors)
    assert counted["collectives"] == len(planned)
    assert counted["bytes"] == sum(size for _, size in planned)


def test_the_losses_beside_the_least_memory_are_those_of_the_files() -> None:
    text = " ".join((RESULTS / "memory.md").read_text().split())
    losses = {cell.optimizer: cell.loss[1] for cell in cells_of(STUDIES["came-text"])}
    said = f"the corrected rule ends at {losses['came']:.4f} and AdamW at {losses['adamw']:.4f}"
    assert said in text
    [least] = cells_of(STUDIES["came-small-text"])
    assert least.loss[0] < losses["came"] < least.loss[2] < losses["adamw"]
