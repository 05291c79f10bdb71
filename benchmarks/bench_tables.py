"""`bighorn bench` with the tables of this project's pages: `python benchmarks/bench_tables.py --table lambrrr`.

`precision` is the table of docs/precision-results.md. `lambrrr` is the benchmark of LAMBrrr, on the CPU, for
docs/lambrrr-todo.md: its baseline is a loop over the tensors, and another row is the same loop compiled. `cliffs` is
the table of docs/speed.md with other layouts, dtypes and uses of a step; `--shapes` takes its sets too. `gpu` has the
columns "of copy" of docs/gpu-results.md too. All options of `bighorn bench` are known.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, float64
from torch.optim import Optimizer

import traffic
from baseline_lamb import BaselineLamb, Step, compiled_loop, loop
from bighorn.cli.bench_table import COLUMNS
from bighorn.cli.errors import InputError
from bighorn.cli.measure import MORE_SETS
from bighorn.cli.peers import PEERS, TABLES, WEIGHT_DECAY, BenchTable, Build, Peer, clipped
from cliffs import CLIFFS


def _loop() -> Build:
    return lambda params, lr, clip: clipped(BaselineLamb(params, lr, WEIGHT_DECAY), params, clip)


def _compiled() -> Build:
    compiled = compiled_loop()

    def build(params: Sequence[Tensor], lr: float, clip: float | None) -> Optimizer:
        # float64 serves to measure errors, a tensor at a time: hundreds of compilations, and no need of one.
        step: Step = loop if params[0].dtype == float64 else compiled
        return clipped(BaselineLamb(params, lr, WEIGHT_DECAY, step), params, clip)

    return build


def compile_seconds(row: dict[str, Any]) -> str:
    """The time by which the first step of the compiled loop takes longer than its median step."""
    if row["name"] != "compiled" or row["ms"] is None:
        return "-"
    return f"{row['first_step_s'] - 1e-3 * row['ms']['median']:.1f} s"


OWN_PEERS = {
    "loop": Peer("reference loop", _loop, "torch"),
    "compiled": Peer("compiled loop", _compiled, "torch"),
}

OWN_TABLES = {
    # What fewer bits cost in time; ways of rounding are for --precision bf16.
    "precision": BenchTable(
        baseline="adamw",
        peers=(
            *("lamb", "lamb-fp32", "lamb-fp16", "lamb-int8", "lamb-stochastic", "lamb-kahan", "lamb-master"),
            *("came", "came-int8", "came-stochastic", "came-kahan", "came-master"),
        ),
        shapes=("vit_small", "bert_base"),
        columns=("ms", "ratio", "p10-p90", "temporaries", "state", "error"),
    ),
    "cliffs": BenchTable(
        baseline="adamw",
        peers=("adamw-foreach", "lamb", "lamb-cautious", "came"),
        shapes=("vit_small", *CLIFFS),
        columns=("ms", "ratio", "p10-p90", "first step", "temporaries"),
        devices=("cpu",),
    ),
    "gpu": replace(TABLES["gpu"], columns=(*TABLES["gpu"].columns, *traffic.COLUMNS)),
    # The benchmark of LAMBrrr (https://github.com/nopperl/pytorch-fused-lamb), on the CPU. Its reference is a copy of
    # timm's Lamb, which takes part as itself where it is installed.
    "lambrrr": BenchTable(
        baseline="loop",
        peers=("timm", "apex", "compiled", "lamb"),
        shapes=("linears",),
        columns=("ms", "ms p10-p90", "ratio", "p10-p90", "compile", "error"),
    ),
}


def main() -> None:
    PEERS.update(OWN_PEERS)
    TABLES.update(OWN_TABLES)
    MORE_SETS.update(CLIFFS)
    COLUMNS.update(traffic.COLUMNS, compile=compile_seconds)
    from bighorn.cli.bench import INSTRUMENTS, bench  # the choices of its options are the tables that are known by now

    INSTRUMENTS["cuda"] = replace(INSTRUMENTS["cuda"], step_times=traffic.step_times)
    try:
        bench(prog_name="python benchmarks/bench_tables.py")
    except InputError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
