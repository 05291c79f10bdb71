"""``bighorn memory``: the size of the optimizer state, before anything is allocated."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from bighorn_workbench import files, footprint, models
from bighorn_workbench.builtin_tasks import TaskName
from bighorn_workbench.config import PRECISIONS
from bighorn_workbench.display import quantity, table_of, terminal
from bighorn_workbench.environment import provenance
from bighorn_workbench.errors import InputError
from bighorn_workbench.footprint import FOOTPRINTS, OURS, Kind, Total, Weights, predicted, total_of
from bighorn_workbench.optimizers import ROUNDINGS
from bighorn_workbench.options import FILE, Command, Options, command_line, config_options, flag_of, option
from bighorn_workbench.shapes import SHAPES
from bighorn_workbench.values import bytes_in, check_name, names, read_options, suggestion

SOURCES = ("task", "shapes", "model", "hf_config")
SHOWN = "came", "came-bf16", "came-int8", "came-int4", "lamb", "lamb-bf16", "lamb-int8", "adamw", "sgd", "adafactor"
"""The optimizers that fit in 80 columns; fp16 has the size of bf16, and ``lars`` of ``sgd``."""
LISTED, MOST_PARTS, MOST_WIDTH = 10, 5, 65
"""The kinds of layers that the terminal lists, those with a colour of their own in the report's bars, and the width of
the optimizers' columns in the terminal."""


@dataclass(frozen=True)
class MemoryConfig(Options):
    """The options of a prediction; one of :data:`SOURCES` names the model."""

    task: str | None = option(
        None, "A task's model.", shown="digits, unless another option names a model", kind=TaskName()
    )
    shapes: str | None = option(
        None, f"A set of shapes, of {', '.join(SHAPES)}.", check=partial(check_name, allowed=SHAPES)
    )
    model: str | None = option(
        None,
        "Any model, as FILE.py:CALLABLE or PACKAGE.MODULE:CALLABLE. That is imported and called without arguments, on "
        "torch's meta device: it runs the code, and allocates no weights.",
    )
    hf_config: str | None = option(
        None, "The config.json of a Hugging Face model, read offline with the package transformers."
    )
    data: str | None = option(None, "Data for the task, as in bighorn train: they say how many classes there are.")
    optimizers: str | None = option(None, f"Optimizers, of {', '.join(FOOTPRINTS)}.", shown=", ".join(SHOWN))
    precision: str = option("fp32", "Type of weights and gradients.", choices=tuple(PRECISIONS))
    weight_rounding: str = option(
        "nearest", "How Bighorn's own optimizers store weights of 16 bits (--precision bf16).", choices=ROUNDINGS
    )
    optimizer_option: tuple[str, ...] = option(
        (),
        "An option of Bighorn's optimizers that have it, as NAME=VALUE like factor=last_two; may be repeated.",
        shown="none",
    )
    gpu_memory: str | None = option(
        None,
        "The memory of a GPU, like 24GB or 80GiB: shows which optimizers fit, before activations.",
        shown="not asked",
        check=bytes_in,
    )
    offload: bool = option(
        False, "Also show the memory of device and host with bighorn.offload, before activations.", shown="off"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [flag_of(name) for name in SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} each say what to predict for: give one of them.")
        if self.data is not None and given not in ([], ["--task"]):
            raise InputError(f"--data {self.data} is for a task, but {given[0]} is given: leave one of them out.")
        if self.weight_rounding != "nearest" and self.precision == "fp32":
            raise InputError(
                f"--weight-rounding {self.weight_rounding} is for weights of 16 bits: give --precision bf16 too."
            )

    def options(self, wanted: Sequence[str]) -> Mapping[str, Any]:
        """Return the options of Bighorn's own optimizers; raise an error for one that none of ``wanted`` has."""
        options = dict(read_options(self.optimizer_option))
        allowed = frozenset().union(*(OURS.get(name, ()) for name in wanted))
        for name in options:
            if name == "weight_rounding":
                raise InputError(f"--optimizer-option {name}={options[name]}: give --weight-rounding {options[name]}.")
            if name not in allowed:
                near = suggestion(name, sorted(allowed)) if allowed else "only Bighorn's optimizers take any."
                raise InputError(f"--optimizer-option {name}: no optimizer here has it: {near}")
        return {"weight_rounding": self.weight_rounding, **options}

    def weights(self) -> tuple[str, Weights]:
        """Return the description of the prediction, and the weights on the meta device."""
        dtype = PRECISIONS[self.precision]
        if self.shapes is not None:
            return self.shapes, models.of_shapes(self.shapes, dtype)
        if self.model is not None:
            return self.model, models.of_code("--model", self.model, dtype)
        if self.hf_config is not None:
            return self.hf_config, models.of_hf_config("--hf-config", self.hf_config, dtype)
        task = self.task or "digits"
        return task, models.of_task(task, self.data, dtype)


@click.command(cls=Command, epilog="Example: bighorn memory --shapes llama_7b --report memory.html")
@config_options(MemoryConfig)
@click.option("--report", type=FILE, help="Write an HTML report with a bar chart.")
@click.option("--json", "json_file", type=FILE, help="Write the bytes of every parameter as JSON.")
@click.pass_context
def memory(ctx: click.Context, /, report: Path | None, json_file: Path | None, **options: Any) -> None:
    """Predict to the byte what a model and its optimizer need.

    From shapes alone: neither weights nor state are allocated, so that a small machine can ask about a large model.
    "all" is the state with all weights and gradients; "released" has only the largest gradient, as with
    bighorn.release_gradients. Activations are not counted.
    """
    config = MemoryConfig(**options)
    wanted = SHOWN if config.optimizers is None else names("--optimizers", config.optimizers, FOOTPRINTS)
    inputs = {"--data": config.data, "--hf-config": config.hf_config}
    files.check_outputs({"--report": report, "--json": json_file}, inputs)
    source, weights = config.weights()
    params = weights.trainable
    optimizer_options = config.options(wanted)
    try:
        sizes = {name: predicted(name, params, optimizer_options) for name in wanted}
        nearest = {**optimizer_options, "weight_rounding": "nearest"}
        of_masters = {name: sum(predicted(name, footprint.as_masters(params), nearest).values()) for name in wanted}
    except (TypeError, ValueError) as error:
        raise InputError(f"--optimizer-option: {error}") from error
    layers = footprint.kinds(params, sizes)
    elements = weights.elements
    totals = {name: total_of(name, weights, sum(by_param.values())) for name, by_param in sizes.items()}
    limit = None if config.gpu_memory is None else bytes_in("--gpu-memory", config.gpu_memory)

    console, counted = terminal(), quantity(elements).replace("G", "B")
    about = f"{source}: {counted} trainable parameters in {len(params)} tensors, {config.precision}"
    console.print(about)
    answers = summary(weights, totals)
    for line in answers:
        console.print(line)
    offloaded = {name: footprint.offload_bytes(name, weights, totals[name].state, of_masters[name]) for name in wanted}
    if limit is not None:
        console.print(verdict(totals, limit, f"{config.gpu_memory}", config.precision))
    console.print(_narrow(TOTAL_HEAD, total_rows(totals, elements)))
    if config.offload:
        sizes_of = (
            (name, *("-" if size is None else f"{quantity(size)}B" for size in of.values()))
            for name, of in offloaded.items()
        )
        console.print(_narrow(OFFLOAD_HEAD, [*sizes_of]))
    rows = layer_rows(layers, LISTED)
    for first, last in _pages(rows, wanted):
        console.print(_narrow(LAYER_HEAD + wanted[first:last], [(row[0], *row[1 + first : 1 + last]) for row in rows]))

    def page() -> str:
        from bighorn_workbench.reports import Section, plots, render

        parts = [
            (label.replace("\n", ": "), [each / elements for each in amounts])
            for label, amounts in parts_of(layers, MOST_PARTS)
        ]
        shown = {name: f"{quantity(totals[name].all)}B" for name in compared(totals) or totals}
        title = f"{source} needs " + ", ".join(f"{size} with {name}" for name, size in shown.items())
        lead = (
            f"{about}; {'; '.join(answers)}. Released: with only the largest gradient, as with "
            "bighorn.release_gradients. Activations are not counted."
        )
        tiles = {f"weights, gradients and state with {name}": size for name, size in shown.items()}
        text = "Bytes for each parameter of the model, by the layers that they belong to."
        sections = [
            Section("Totals", head=TOTAL_HEAD, rows=total_rows(totals, elements)),
            Section("State by optimizer", text, partial(plots.bars, wanted, parts, "bytes per parameter")),
            Section("Layers", "Bytes.", head=LAYER_HEAD + wanted, rows=layer_rows(layers, len(layers))),
        ]
        settings = asdict(config) | {"optimizers": ", ".join(wanted)}
        return render(title, lead, tiles, sections, [command_line(ctx)], settings)

    def content() -> dict[str, Any]:
        return {
            **provenance(command_line(ctx)),
            "config": asdict(config),
            "parameters": elements,
            "total": {name: total.state for name, total in totals.items()},
            "all": {name: total.all for name, total in totals.items()},
            "released": {name: total.released for name, total in totals.items()},
            "offload": offloaded,
            "layers": [
                {"name": name, "shape": list(param.shape), "bytes": {key: sizes[key][name] for key in sizes}}
                for name, param in params
            ],
        }

    files.finish(console.print, report, page, json_file, content)


LAYER_HEAD = ("bytes of",)
OFFLOAD_HEAD = ("with bighorn.offload", "device", "host", "with masters")
TOTAL_HEAD = ("optimizer", "state", "per parameter", "in all", "of adamw's", "released")


def parts_of(layers: Sequence[Kind], most: int) -> list[tuple[str, list[int]]]:
    """Return the bytes of the largest kinds of layers, by optimizer, with the rest as one more part."""
    parts = [(kind.label, list(kind.bytes.values())) for kind in layers[:most]]
    rest = layers[most:]
    if rest:
        label = f"{sum(kind.count for kind in rest)} others"
        parts.append((label, [sum(kind.bytes[name] for kind in rest) for name in rest[0].bytes]))
    return parts


def layer_rows(layers: Sequence[Kind], most: int) -> list[tuple[str, ...]]:
    """Return the largest kinds of layers as text, and the rest as one row."""
    return [(label, *map(quantity, sizes)) for label, sizes in parts_of(layers, most)]


def total_rows(totals: Mapping[str, Total], elements: int) -> list[tuple[str, ...]]:
    """Return the totals of each optimizer as text."""
    adamw = totals.get("adamw")
    return [
        (
            name,
            f"{quantity(total.state)}B",
            f"{total.state / elements:.3f}",
            f"{quantity(total.all)}B",
            "-" if adamw is None else f"{total.all / adamw.all:.0%}",
            "-" if total.released is None else f"{quantity(total.released)}B",
        )
        for name, total in totals.items()
    ]


def compared(totals: Mapping[str, Total]) -> list[str]:
    """Return adamw, and Bighorn's optimizer that needs the least, each if it is in ``totals``."""
    ours = [name for name in totals if name in OURS]
    least = [min(ours, key=lambda name: totals[name].all)] if ours else []
    return [*(name for name in totals if name == "adamw"), *least]


def summary(weights: Weights, totals: Mapping[str, Total]) -> list[str]:
    """Return the sums in words, of AdamW and of Bighorn's optimizer that needs the least."""
    frozen = f" ({quantity(weights.frozen_bytes)}B of them frozen)" if weights.frozen_bytes else ""
    said = [f"{quantity(weights.held)}B of weights{frozen}, {quantity(weights.gradients)}B of gradients"]
    for name in compared(totals):
        total = totals[name]
        released = "" if total.released is None else f", {quantity(total.released)}B with released gradients"
        said.append(f"with {name}: {quantity(total.state)}B of state, {quantity(total.all)}B in all{released}")
        if name == "adamw" and all(param.element_size() == 2 for _, param in weights.trainable):
            in_fp32 = weights.frozen_bytes + 16 * weights.elements
            said.append(f"with adamw in fp32, as under autocast: {quantity(in_fp32)}B in all")
    return said


def verdict(totals: Mapping[str, Total], limit: float, memory: str, precision: str) -> str:
    """Return which optimizers fit in a memory of ``limit`` bytes, before activations, or what would make one fit."""
    answers: dict[str, list[str]] = {"yes": [], "with released gradients": [], "no": []}
    for name, total in totals.items():
        released = total.all if total.released is None else total.released
        answer = "yes" if total.all <= limit else "with released gradients" if released <= limit else "no"
        answers[answer].append(name)
    said = "; ".join(f"{answer}: {', '.join(optimizers)}" for answer, optimizers in answers.items() if optimizers)
    if len(answers["no"]) == len(totals):
        name, least = min(totals.items(), key=lambda pair: pair[1].all)
        gpus = math.ceil(least.all / limit)
        said += f". The least is {name}, {quantity(least.all)}B: sharded (FSDP2), {gpus} such GPUs hold it"
        freed = {name: total.released for name, total in totals.items() if total.released is not None}
        if freed:
            name = min(freed, key=freed.__getitem__)
            said += f"; with released gradients it is {name}, {quantity(freed[name])}B"
        if precision == "fp32":
            said += "; or halve weights and gradients by --precision bf16 --weight-rounding stochastic"
    return f"Fits in {memory}, before activations? {said}"


def _pages(rows: Sequence[Sequence[str]], names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Split the columns of ``names``, so that each table fits in 80 columns."""
    first, width = 0, 0
    for index, name in enumerate(names):
        column_width = 1 + max(map(len, (*name.split("-"), *(row[1 + index] for row in rows))))
        if width + column_width > MOST_WIDTH and index > first:
            yield first, index
            first, width = index, 0
        width += column_width
    yield first, len(names)


def _narrow(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose heads break at their hyphen, so that all columns fit in 80 characters."""
    return table_of([name.replace("-", "-\n") for name in head], rows, padding=0)
