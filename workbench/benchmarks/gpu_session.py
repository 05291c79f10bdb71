"""Everything that needs a GPU, in one session: `make gpu`, or `python workbench/benchmarks/gpu_session.py [STEP ...]`.

The steps, by default all in this order: smoke (do the kernels run, and are they right), cases (the tests over several
workers), rest (the slow tests, one by one), bench (`bighorn bench` in fp32 and bf16), tuning (the sizes of blocks and
tiles). Each has a time limit; together they take less than 25 minutes. If smoke fails, nothing else runs. The folder of
results has a log of each step, the figures, and summary.json: steps and versions, with status and time. The exit status
is the number of steps that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bighorn_workbench import cuda
from bighorn_workbench.environment import package_version, provenance

ROOT = Path(__file__).resolve().parents[2]
SHAPES = "bert_large,bert_base,vit_small,resnet50,llama_1b,tiny"


@dataclass(frozen=True)
class Step:
    """Commands that run one after the other, with this Python; "RESULTS" in an argument is the folder."""

    commands: tuple[Sequence[str], ...]
    limit: int
    """Seconds, of all commands together."""


def tests(marks: str, *options: str) -> Sequence[str]:
    """Warnings of other versions than the pinned ones are no failures."""
    return [
        "-m",
        "pytest",
        "tests/gpu",
        "tests/device",
        "workbench/tests/gpu",
        "-m",
        marks,
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        *options,
    ]


def bench(precision: str) -> Sequence[str]:
    figures = f"RESULTS/bench-{precision}.json"
    options = ["--shapes", SHAPES, "--precision", precision, "--seconds", "1", "--json", figures]
    return ["workbench/benchmarks/bench_tables.py", "--device", "cuda", *options]


STEPS = {
    "smoke": Step((["-m", "bighorn_workbench", "doctor", "--require", "triton"], ["-m", "tests.gpu.smoke"]), 90),
    "cases": Step((tests("gpu and not slow", "-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"),), 480),
    "rest": Step((tests("gpu and slow"),), 300),
    "bench": Step((bench("fp32"), bench("bf16")), 420),
    "tuning": Step((["workbench/benchmarks/gpu_tuning.py"],), 180),
}


def main() -> int:
    """Run the steps, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)} (default: all)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.steps if name not in STEPS]
    if unknown:
        parser.error(f"no step {unknown[0]!r}: the steps are {', '.join(STEPS)}")
    if not torch.accelerator.is_available():  # all tests would be skipped
        sys.exit(f"torch {torch.__version__} sees no GPU here: run this on a machine with one")
    results: Path = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    about = {**provenance(" ".join(sys.orig_argv)), "gpu": gpu()}
    done: dict[str, Any] = {}
    for name in arguments.steps or STEPS:
        print(f"{name}: {results / name}.log", flush=True)
        done[name] = run(STEPS[name], results, results / f"{name}.log")
        (results / "summary.json").write_text(json.dumps({**about, "steps": done}, indent=1) + "\n")
        if name == "smoke" and done[name]["status"]:
            break
    print(json.dumps(about["gpu"], indent=1))
    for name, step in done.items():
        print(
            f"{name:8} {'passed' if step['status'] == 0 else 'FAILED':8} {step['seconds']:6.1f} s  {step['last_line']}"
        )
    return sum(step["status"] != 0 for step in done.values())


def gpu() -> dict[str, Any]:
    """The device, and the versions that matter to its kernels."""
    smi = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv"]
    try:
        driver = subprocess.run(smi, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:  # as on AMD's GPUs
        driver = [str(error)]
    facts = cuda.facts() if torch.cuda.is_available() else {}
    return {**facts, "driver": driver, "triton": package_version("triton")}


def run(step: Step, results: Path, log: Path) -> dict[str, Any]:
    """Run the commands of a step; return the first status that is not 0, or 124 if time ran out."""
    begin, status = time.monotonic(), 0
    with log.open("w") as output:
        for command in step.commands:
            full = [sys.executable, *(argument.replace("RESULTS", str(results)) for argument in command)]
            output.write(f"$ {' '.join(full)}\n")
            output.flush()
            left = step.limit - (time.monotonic() - begin)
            result = limited(full, left, output)
            status = status or result
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "last_line": lines[-1]}


def limited(command: list[str], seconds: float, output: Any) -> int:
    """The exit status of a command; it and its child processes are killed when time runs out."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(max(1, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.write(f"killed after {seconds:.0f} s\n")
        return 124


if __name__ == "__main__":
    sys.exit(main())
