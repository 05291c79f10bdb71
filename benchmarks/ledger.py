"""A ledger of the cost of steps, in counts that are the same on every run: calls, opcodes, launches, cache misses.

    python benchmarks/ledger.py [--because TEXT]   # write results/ledger.json, with the reason why rows are worse
    python benchmarks/ledger.py --check [ROW ...]  # compare with it
    python benchmarks/ledger.py --names ROW ...    # print the counted names

A check fails if a count is more than 1% above the file's, or above it at all if it is a whole number below 100.
Misses of a cache may be 0.002 an element above it as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import ledger_counts
from ledger_counts import KERNELS
from ledger_steps import ROWS

FILE = Path(__file__).parent / "results" / "ledger.json"

Counts = dict[str, float]
Ledger = dict[str, Any]
"""The content of the file: "made_with"; "rows" by name; and "because", rows that got worse, with the reason."""

PYTHON_ALONE = ("opcodes", "c_calls")
"""The counts that are only compared under the same minor version of Python."""


def made_with() -> dict[str, str]:
    """The versions that counts depend on."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "compiler": ledger_counts.library_compiler(),
    }


def count(row: str) -> Counts:
    """Count a step of a row in this process."""
    return {name: found.total() for name, found in ledger_counts.names_in(row).items()}


def count_all(rows: Sequence[str]) -> tuple[dict[str, Counts], str]:
    """Count the rows in two new processes. Return also why the counts of C are left out."""
    found: dict[str, Counts] = {}
    of_python = [row for row in rows if row in ROWS]
    with ThreadPoolExecutor(2) as pool:
        for counts in pool.map(_in_a_process, (of_python[::2], of_python[1::2])):
            found |= counts
    of_c = [row for row in rows if row in KERNELS]
    missing = ledger_counts.kernels_unavailable() if of_c else ""
    if of_c and not missing:
        with ledger_counts.kernel_program() as program:
            found |= {row: ledger_counts.count_kernel(program, row) for row in of_c}
    return found, missing


def _in_a_process(rows: list[str]) -> dict[str, Counts]:
    if not rows:
        return {}
    # Twice in four hundred runs, beside much other work, a process was aborted ("terminate called without an active
    # exception"), and no output named the thread.
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, __file__, "--count", *rows]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=280, env=environment)
    counts: dict[str, Counts] = json.loads(done.stdout.splitlines()[-1])
    return counts


MISSES = 0.002
"""Cache misses of an element that may come and go: the lines of the code itself, which move when other code changes."""


def worse(before: Counts, after: Counts) -> list[str]:
    """Return the names of counts that are worse than before; those that are not in it were 0."""
    limits = {name: n if isinstance(n, int) and n < 100 else 1.01 * n for name, n in before.items()}
    limits |= {name: max(limits[name], n + MISSES) for name, n in before.items() if name.endswith("_misses")}
    return [name for name, value in after.items() if value > limits.get(name, 0)]


def comparable(row: str, counts: Counts, theirs: Mapping[str, str], ours: Mapping[str, str]) -> Counts:
    """Return the counts of a row that do not depend on what two ledgers were made with."""
    if theirs["compiler" if row in KERNELS else "torch"] != ours["compiler" if row in KERNELS else "torch"]:
        return {}
    same = theirs["python"] == ours["python"]
    return {name: n for name, n in counts.items() if same or name not in PYTHON_ALONE}


def errors(ledger: Ledger, found: Mapping[str, Counts], ours: Mapping[str, str]) -> list[str]:
    """Compare counts with the file's, and return one line for each fault."""
    lines = [f"{row}: not in {FILE.name}; run `make ledger`" for row in found if row not in ledger["rows"]]
    for row, before in ledger["rows"].items():
        after = comparable(row, found.get(row, {}), ledger["made_with"], ours)
        lines += [
            f"{row}: {name} {before.get(name, 0):,} before, {after[name]:,} now: lower it, or run "
            "`make ledger BECAUSE='the reason'`"
            for name in worse(before, after)
        ]
    unexplained = [row for row, entry in ledger["because"].items() if not entry["reason"].strip()]
    return lines + [f"{row}: worse than before; give the reason in {FILE.name}" for row in unexplained]


def updated(old: Ledger, found: Mapping[str, Counts], ours: Mapping[str, str], reason: str) -> Ledger:
    """Return the ledger of new counts. A row that is worse has a reason, until it is as good as it was before."""
    rows = {row: found.get(row) or old["rows"].get(row) for row in (*ROWS, *KERNELS)}
    rows = {row: counts for row, counts in rows.items() if counts}
    because = {}
    for row, after in rows.items():
        before, entry = old["rows"].get(row, after), old["because"].get(row, {"reason": reason, "before": {}})
        names = worse(before, comparable(row, after, old["made_with"], ours))
        if names or not entry["reason"]:
            open_since = {} if entry["reason"] and row in old["because"] else entry["before"]
            entry = {"reason": reason, "before": {name: before.get(name, 0) for name in names} | open_since}
        if worse(entry["before"], {name: after.get(name, 0) for name in entry["before"]}):
            because[row] = entry
    return {"made_with": dict(ours), "because": because, "rows": rows}


def written(ledger: Ledger) -> str:
    """Return the content of the file, a row on each line."""
    parts = []
    for key, value in ledger.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
        parts.append(f' "{key}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Run one of the commands above; the exit status is 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("check", "names", "count"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--because", default="", metavar="TEXT")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of {', '.join([*ROWS, *KERNELS])}; default: all")
    arguments = parser.parse_args()
    rows = arguments.rows or [*ROWS, *KERNELS]
    if unknown := set(rows) - {*ROWS, *KERNELS}:
        parser.error(f"{sorted(unknown)}: there are no such rows")
    if arguments.count:
        print(json.dumps({row: count(row) for row in rows}))
        return 0
    if arguments.names:
        for row in rows:
            for name, counted in ledger_counts.names_in(row).items():
                print(f"{row}: {name} {counted.total():,}")
                print(*[f"{number:10,} {each}" for each, number in counted.most_common()], sep="\n")
        return 0
    ours = made_with()
    old = json.loads(FILE.read_text()) if FILE.is_file() else {"made_with": ours, "because": {}, "rows": {}}
    found, missing = count_all(rows)
    if missing:
        print(f"skipped: the counts of C: {missing}")
    for key in ours:
        if old["made_with"][key] != ours[key]:
            print(f"skipped: the counts that depend on {key}, {old['made_with'][key]} in the file and {ours[key]} here")
    if not arguments.check:
        old = updated(old, found, ours, arguments.because)
        FILE.write_text(written(old))
        print(FILE)
    lines = errors(old, found, ours)
    print(f"{len(found)} rows, {len(lines)} errors", *lines, sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
