"""The report of ``bighorn memory``."""

from collections.abc import Mapping, Sequence

from bighorn.cli.footprint import Kind
from bighorn.cli.reports import Section, figures, render

MAX_PARTS = 5
"""The number of kinds of layers with a separate color in the bars."""


def memory_report(
    source: str,
    about: str,
    layers: Sequence[Kind],
    elements: int,
    layer_table: Section,
    total_table: Section,
    command: str,
    settings: Mapping[str, object],
) -> str:
    """Return the report of ``bighorn memory``."""
    names = list(layers[0].bytes)
    parts = [
        (kind.label.replace("\n", ": "), [kind.bytes[name] / elements for name in names]) for kind in layers[:MAX_PARTS]
    ]
    rest = layers[MAX_PARTS:]
    if rest:
        label = f"{sum(kind.count for kind in rest)} others"
        parts.append((label, [sum(kind.bytes[name] for kind in rest) / elements for name in names]))
    return render(
        f"Optimizer state of {source}",
        f"{about}.",
        {f"state of {row[0]}": row[total_table.head.index("state")] for row in total_table.rows},
        [
            Section(
                "State by optimizer",
                "Bytes for each parameter of the model, by the layers that they belong to.",
                figures.bars(names, parts, "bytes per parameter"),
            ),
            total_table,
            layer_table,
        ],
        [command],
        settings,
    )
