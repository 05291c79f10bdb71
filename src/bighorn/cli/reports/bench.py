"""The report of ``bighorn bench``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bighorn.cli.reports import Section, plots, render


def bench_report(
    content: Mapping[str, Any], columns: Mapping[str, Callable[[dict[str, Any]], str]], absent: Sequence[str]
) -> str:
    """Return the report of ``bighorn bench``, from its JSON: a figure and a table for each set of shapes."""
    config, sets = content["config"], content["results"]
    baseline = sets[0]["optimizers"][0]["label"]
    rows = [row for found in sets for row in found["optimizers"]]
    columns = {name: show for name, show in columns.items() if any(show(row) != "-" for row in rows)}
    sections = []
    for found in sets:
        peers = [(row["label"], row["ratio"]) for row in found["optimizers"] if row["ratio"] is not None]
        sections.append(
            Section(
                found["shapes"],
                "\n".join([f"{found['parameters']:,} parameters in {found['tensors']} tensors.", *found["notes"]]),
                plots.spreads(peers, f"step time on {found['shapes']}, relative to {baseline}") if peers else "",
                ("optimizer", *columns),
                [(row["label"], *(show(row) for show in columns.values())) for row in found["optimizers"]],
            )
        )
    if absent:
        sections.append(Section("Not installed here", ", ".join(absent)))
    return render(
        "What a step costs",
        f"Each optimizer takes turns with {baseline}. Ratios are of each round: median and 10th to 90th percentile. "
        "The first row is the baseline against itself, which shows the noise.",
        {
            f"{row['label']} on {sets[-1]['shapes']}, relative": f"{row['ratio']['median']:.2f}"
            for row in sets[-1]["optimizers"][1:4]
            if row["ratio"] is not None
        },
        sections,
        [content["command"]],
        config | content["machine"],
        config["device"],
    )
