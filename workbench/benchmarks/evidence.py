"""Repeats every cell of the published comparisons, and compares the results with the published intervals.

    make evidence MNIST=DIR TEXT=FILE

The best options of each optimizer at each batch train again, with seeds that no published run had. Their mean must be
within the interval in which the mean of as many further seeds is expected, by Student's t over the published seeds and
corrected for the number of cells. The trials by which the options were chosen are not repeated: the command on the page
does that.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from bighorn_workbench.builtin_tasks import fingerprint, load
from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.metrics import is_share, metric_text
from bighorn_workbench.trials import make
from bighorn_workbench.verdict import interval
from equal_tuning import Cell, cells_of
from result_files import load as load_file

STUDIES = {
    **dict.fromkeys(("equal-masked", "equal-gpt", "equal-gpt-little", "equal-characters", "equal-gpt-steps-6"), "text"),
    **dict.fromkeys(("equal-resnet", "equal-lenet", "equal-lenet-steps-300"), "mnist"),
    **dict.fromkeys(("equal-resnet-steps-60", "equal-lenet-steps-60"), "mnist"),
    "equal-digits": None,
}
"""The published comparisons, each with the option that names its data. Long runs come first, so that no process is idle
at the end. LAMB's appendix is left out: a run takes two minutes."""

NEEDED = {
    "mnist": "--mnist DIR (make evidence MNIST=DIR), a folder with MNIST's four idx files",
    "text": "--text FILE (make evidence TEXT=FILE), tinyshakespeare's input.txt of 1,115,394 bytes",
}
SHARE, LONG = 2, 0.5
"""One run for so many published ones of a cell; only one where a run takes more than so many seconds.

Each cell trains again at least once, which takes nearly all of the time: short runs make it a tenth of all.
"""

loaded = functools.cache(load)  # a process reads the data once


@dataclass(frozen=True)
class Repeat:
    """A cell of a comparison and the seeds with which it trains again."""

    study: str
    cell: Cell
    config: RunConfig
    seeds: tuple[int, ...]


def repeats(study: str, data: str | None) -> list[Repeat]:
    """Return the cells of a comparison to repeat: of all a tenth, which takes ten minutes of two cores."""
    found = []
    for cell in (each for row in cells_of(study).values() for each in row):
        published = len(cell.trials) + len(cell.finals)
        count = 1 if cell.saved["seconds"] > LONG else max(1, published // SHARE)
        found.append(Repeat(study, cell, cell.config(data), cell.new_seeds(count)))
    return found


def results(work: Sequence[Repeat], run: Callable[[RunConfig], Any], processes: int) -> Iterator[list[Any]]:
    """Yield for each cell the results of a function of a run's options for its seeds, in processes of their own."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [[pool.submit(run, replace(each.config, seed=seed)) for seed in each.seeds] for each in work]
        for cell in futures:
            yield [future.result() for future in cell]


def value(config: RunConfig) -> float:
    """Return the metric of a run on test data."""
    return make(config, loaded(config.task, config.data), "test", evaluations=1).value


def agreement(published: Sequence[float], repeated: Sequence[float], cells: int) -> tuple[float, float]:
    """Return how far the mean of the repeated runs is from the published one, and how far it may be.

    Example:
        >>> distance, most = agreement([0.97, 0.98, 0.99], [0.97], cells=1)
        >>> f"{distance:.2f}, at most {most:.3f}"
        '-0.01, at most 0.050'
    """
    mean, half = interval(published, cells)
    return statistics.fmean(repeated) - mean, half * math.sqrt(1 + len(published) / len(repeated))


def judged(found: Iterable[tuple[Repeat, Sequence[float]]]) -> tuple[list[str], list[str]]:
    """Return a line for each cell, and the lines of cells that do not agree with the published results."""
    found = list(found)
    lines, differing = [], []
    for repeat, values in found:
        cell, published = repeat.cell, list(repeat.cell.finals.values())
        distance, most = agreement(published, values, len(found))
        agrees, (scale, unit) = abs(distance) <= most, (100, "points") if is_share(cell.metric) else (1, "nats")
        now, then = (metric_text(cell.metric, statistics.fmean(each)) for each in (values, published))
        line = (
            f"{'agrees ' if agrees else 'DIFFERS'} {repeat.study}, {cell.name} at batch {cell.batch:,}: {now} of "
            f"{len(values)} new seeds, {then} published; {scale * distance:+.2g} {unit}, at most {scale * most:.2g}"
        )
        lines.append(line)
        differing += [] if agrees else [line]
    return lines, differing


def wrong_data(study: str, repeat: Repeat) -> str | None:
    """Return a message if the data differ from the published comparison's."""
    task = load(repeat.config.task, repeat.config.data)
    if fingerprint(task, repeat.cell.batch) == load_file(study)["data"]["sha256"]:
        return None
    option = STUDIES[study]
    if option is None:
        return f"{study}: these are not the data of the published runs. Take scikit-learn 1.9."
    return f"--{option} {repeat.config.data}: {study} was not run on these data. Give {NEEDED[option]}."


def main(arguments: list[str]) -> int:
    """Run, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", metavar="DIR")
    parser.add_argument("--text", metavar="FILE")
    parser.add_argument("--processes", type=int, default=2, metavar="NUMBER", help="runs at a time (default: 2)")
    options: Any = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"argument --processes: {options.processes} is not possible: give 1 or more, at most one a core")
    work: list[Repeat] = []
    for study, option in STUDIES.items():
        data = None if option is None else getattr(options, option)
        if option is not None and data is None:
            print(f"{study} is left out: give {NEEDED[option]}.")
            continue
        mine = repeats(study, data)
        try:
            message = wrong_data(study, mine[0])
        except InputError as error:
            message = str(error)
            if option is not None:
                message = f"--{option} {data!r} is not read by {mine[0].config.task}: {error} Give {NEEDED[option]}."
        if message is not None:
            print(message)
            return 2
        work += mine
    started, runs = time.monotonic(), sum(len(repeat.seeds) for repeat in work)
    print(f"{runs} runs, {options.processes} at a time", flush=True)
    lines, differing = judged(zip(work, results(work, value, options.processes), strict=True))
    print(*lines, sep="\n")
    minutes = (time.monotonic() - started) / 60
    if differing:
        print(f"{len(differing)} of {len(lines)} cells are elsewhere ({minutes:.1f} minutes).")
        return 1
    print(f"All {len(lines)} cells are where the published runs let expect them ({minutes:.1f} minutes).")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
