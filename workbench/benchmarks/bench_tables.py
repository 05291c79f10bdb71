"""`bighorn bench` with the tables of this project's pages.

    python workbench/benchmarks/bench_tables.py --table lambrrr

`precision` is a table of docs/precision.md. `lambrrr` is the benchmark of LAMBrrr, on the CPU: its baseline is a loop
over the tensors, and another row is LAMBrrr's form compiled. `cliffs` is a table of docs/benchmarks.md with other
layouts, dtypes and uses of a step; `--shapes` takes its sets too. `gpu` also has the columns "of copy", and rows of
bitsandbytes and flashoptim. It takes all options of `bighorn bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import traffic
from baseline_lamb import BaselineLamb, Step, compiled_foreach, loop
from bighorn import Came, Lamb, Lars
from bighorn_workbench.bench_table import COLUMNS
from bighorn_workbench.measure import PARAM_SETS
from bighorn_workbench.optimizers import state_bytes
from bighorn_workbench.peers import PEERS, TABLES, WEIGHT_DECAY, BenchTable, Build, Peer, clipped, imported, ours
from cliffs import CLIFFS


def _loop() -> Build:
    return lambda params, lr, clip: clipped(BaselineLamb(params, lr, WEIGHT_DECAY), params, clip)


def _compiled() -> Build:
    compiled = compiled_foreach()

    def build(params: Sequence[Tensor], lr: float, clip: float | None) -> Optimizer:
        # float64 serves to measure errors, a tensor at a time: hundreds of compilations, none of which is needed.
        step: Step = loop if params[0].dtype == torch.float64 else compiled
        return clipped(BaselineLamb(params, lr, WEIGHT_DECAY, step), params, clip)

    return build


def compile_seconds(row: dict[str, Any]) -> str:
    """The time by which the first step of the compiled form takes longer than its median step."""
    if row["name"] != "compiled" or row["ms"] is None:
        return "-"
    return f"{row['first_step_s'] - 1e-3 * row['ms']['median']:.1f} s"


def _bitsandbytes(name: str) -> Callable[[], Build]:
    def load() -> Build:
        kind = imported("bitsandbytes.optim", name, ": pip install --no-deps bitsandbytes")

        def build(params: Sequence[Tensor], lr: float, clip: float | None) -> Optimizer:
            if name == "AdamW8bit" and params[0].dtype == torch.float64:  # it has no float64 kernel, and AdamW is exact
                return torch.optim.AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY)
            return clipped(kind(params, lr=lr, weight_decay=WEIGHT_DECAY), params, clip)

        return build

    return load


def _flashoptim() -> Build:
    kind = imported("flashoptim", "FlashAdamW", ": pip install --no-deps flashoptim")

    def build(params: Sequence[Tensor], lr: float, clip: float | None) -> Optimizer:
        if params[0].dtype == torch.float64:  # it has no float64 kernel; AdamW is exact
            return torch.optim.AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY)
        for param in params:
            param.requires_grad_()  # it omits parameters without requires_grad (flashoptim 0.1.4)
        # It raises an error for bits of master weights if weights are float32.
        bits = None if params[0].dtype == torch.float32 else 24
        return clipped(kind(params, lr=lr, weight_decay=WEIGHT_DECAY, master_weight_bits=bits), params, clip)

    return build


def _flashoptim_state_bytes(optimizer: Optimizer) -> int:
    """Return the size of the state, whose moments are not tensors but objects with codes and scales."""
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors: list[Tensor] = [tensor for moment in moments for tensor in (moment.quantized, moment.scales)]
    return state_bytes(optimizer) + sum(tensor.nbytes for tensor in tensors)


OWN_PEERS = {
    "lamb-cautious": Peer("Lamb, cautious", ours(Lamb, cautious=True), "bighorn"),
    "lamb-fp32": Peer("Lamb, fp32 states", ours(Lamb, state_dtype=None), "bighorn"),
    **{
        f"{name}-{way}": Peer(f"{kind.__name__}, {way}", ours(kind, weight_rounding=way), "bighorn")
        for name, kind in (("lamb", Lamb), ("came", Came))
        for way in ("stochastic", "kahan", "kahan8", "master")
    },
    "lamb-int4": Peer("Lamb, int4 states", ours(Lamb, state_dtype="int4"), "bighorn"),
    "came-int4": Peer("Came, int4", ours(Came, state_dtype="int4"), "bighorn"),
    **{
        f"{name}-foreach": Peer(f"{label}, plain torch", ours(kind, "foreach", **options), "bighorn")
        for name, label, kind, options in (
            ("lamb-cautious", "Lamb, cautious", Lamb, {"cautious": True}),
            ("lamb-int8", "Lamb, int8", Lamb, {"state_dtype": "int8"}),
            ("came", "Came", Came, {}),
            ("came-int8", "Came, int8", Came, {"state_dtype": "int8"}),
            ("lars", "Lars", Lars, {}),
        )
    },
    "loop": Peer("reference loop", _loop, "torch"),
    "compiled": Peer("compiled foreach", _compiled, "torch"),
    "bitsandbytes-adamw8bit": Peer(
        "bitsandbytes AdamW8bit", _bitsandbytes("AdamW8bit"), "bitsandbytes", devices=("cuda",)
    ),
    "bitsandbytes-lamb8bit": Peer(
        "bitsandbytes LAMB8bit", _bitsandbytes("LAMB8bit"), "bitsandbytes", devices=("cuda",), float64=False
    ),
    "flashoptim": Peer(
        "flashoptim FlashAdamW",
        _flashoptim,
        "flashoptim",
        devices=("cuda",),
        state_bytes=_flashoptim_state_bytes,
    ),
}

OWN_TABLES = {
    # The time of fewer bits; ways of rounding are for --precision bf16.
    "precision": BenchTable(
        baseline="adamw",
        peers=(
            *("lamb", "lamb-fp32", "lamb-int8", "lamb-int4"),
            *("lamb-stochastic", "lamb-kahan", "lamb-kahan8", "lamb-master"),
            *("came", "came-int8", "came-int4", "came-stochastic", "came-kahan", "came-kahan8", "came-master"),
        ),
        shapes=("vit_small", "bert_base"),
        columns=("ms", "ratio", "p10-p90", "temporaries", "state", "error"),
    ),
    "cliffs": BenchTable(
        baseline="adamw",
        peers=("adamw-foreach", "lamb", "came"),
        shapes=("vit_small", *CLIFFS),
        columns=("ms", "ratio", "p10-p90", "first step", "temporaries"),
        devices=("cpu",),
    ),
    # The optimizers that a device without our kernels would run.
    "plain": BenchTable(
        baseline="adamw",
        peers=(
            *("adamw-foreach", "lamb-foreach", "lamb-cautious-foreach", "lamb-int8-foreach"),
            *("came-foreach", "came-int8-foreach", "lars-foreach", "pytorch_optimizer", "timm"),
        ),
        shapes=("bert_large", "vit_small", "tiny"),
        columns=("ms", "ratio", "p10-p90", "wall ms", "host", "temporaries"),
        devices=("cuda",),
    ),
    "gpu": replace(
        TABLES["gpu"],
        peers=(*TABLES["gpu"].peers, "bitsandbytes-adamw8bit", "bitsandbytes-lamb8bit", "flashoptim"),
        columns=(*TABLES["gpu"].columns, *traffic.COLUMNS),
    ),
    # The benchmark of LAMBrrr (https://github.com/nopperl/pytorch-fused-lamb), on the CPU. Its reference is a copy of
    # timm's Lamb, which takes part as itself where it is installed. Its package does not import with torch 2.13, so
    # that `foreach` has its form.
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
    PARAM_SETS.update(CLIFFS)
    COLUMNS.update(traffic.COLUMNS, compile=compile_seconds)
    from bighorn_workbench.bench import (  # the options accept the tables registered above
        INSTRUMENTS,
        bench,
    )

    INSTRUMENTS["cuda"] = replace(INSTRUMENTS["cuda"], step_times=traffic.step_times)
    bench(prog_name="python workbench/benchmarks/bench_tables.py")


if __name__ == "__main__":
    main()
