"""The report of ``bighorn bench``."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from bighorn_workbench.bench_table import COLUMNS, answers, as_text
from bighorn_workbench.peers import PEERS
from bighorn_workbench.reports import Section, plots, render


def bench_report(content: Mapping[str, Any]) -> str:
    """Return the report of ``bighorn bench``, from its JSON: a figure and a table for each set of shapes."""
    config, sets = content["config"], content["results"]
    baseline = sets[0]["optimizers"][0]["label"]
    rows = [row for found in sets for row in found["optimizers"]]
    columns = {name: show for name, show in COLUMNS.items() if any(show(row) != "-" for row in rows)}
    sections = []
    for found in sets:
        ratios = [(row["label"], row["ratio"]) for row in found["optimizers"] if row["ratio"] is not None]
        peers = [(label, (ratio["p10"], ratio["median"], ratio["p90"])) for label, ratio in ratios]
        label = f"step time on {found['shapes']},\nrelative to {baseline}"
        figure = partial(plots.dots, peers, label, mark=1.0) if peers else None
        text = "\n".join([f"{found['parameters']:,} parameters in {found['tensors']} tensors.", *found["notes"]])
        cells = as_text(found["optimizers"], list(columns))
        sections.append(Section(found["shapes"], text, figure, ("optimizer", *columns), cells))
    if content["absent"]:
        sections.append(Section("Not installed here", ", ".join(PEERS[name].label for name in content["absent"])))
    *lead, answer = answers(sets) or [f"A step of {baseline}"]
    lead.append(f"Each optimizer takes turns with {baseline}, whose first row is against itself: the noise.")
    tiles = {
        f"{row['label']} on {sets[-1]['shapes']}, x {baseline}": f"{row['ratio']['median']:.2f}"
        for row in sets[-1]["optimizers"][1:4]
        if row["clear"]
    }
    title, settings = answer.rstrip("."), config | content["machine"]
    return render(title, " ".join(lead), tiles, sections, [content["command"]], settings, config["device"])
