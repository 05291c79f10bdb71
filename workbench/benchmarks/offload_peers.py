"""Steps on the CPU as an offloaded optimizer takes them, beside DeepSpeed's, torch's and torchao's.

    pip install --no-deps deepspeed einops hjson msgpack ninja psutil py-cpuinfo pydantic pydantic-core tqdm
    python workbench/benchmarks/offload_peers.py [--shapes bert_large] [--rounds 9] [--optimizers 'Lamb;Came']

Weights in float32, or in bfloat16 with float32 masters; gradients in bfloat16 where the optimizer takes them, or else
in float32, as DeepSpeed and torchao copy them to the host. Each optimizer takes turns with DeepSpeedCPUAdam, in one
process. torchao's CPUOffloadOptimizer steps one AdamW(fused=True) for each tensor on the host, and so does this script.
Adds to results/offload-peers.json, and writes the second table in results/offload.md.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb
from bighorn_workbench import files
from bighorn_workbench.environment import package_version, provenance
from bighorn_workbench.measure import spread
from bighorn_workbench.shapes import SHAPES

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "offload-peers.json", HERE / "results" / "offload.md"
FIGURES = re.compile(r"(<!-- peers -->\n).*?(<!-- end of peers -->)", re.DOTALL)
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
BF16, F32 = torch.bfloat16, torch.float32


class PerTensor:
    """One optimizer for each tensor."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.optimizers = [torch.optim.AdamW([param], fused=True, **OPTIONS) for param in params]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Masters:
    """An optimizer of float32 masters, which are rounded to bfloat16 weights after the step, as offload does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.masters = [param for group in optimizer.param_groups for param in group["params"]]
        self.weights = [master.detach().to(BF16) for master in self.masters]

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)


def deepspeed(params: Sequence[Tensor]) -> Any:
    return import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(list(params), adamw_mode=True, **OPTIONS)


@dataclass(frozen=True)
class Contestant:
    """An optimizer, and the dtypes of its weights and gradients."""

    make: Callable[[Sequence[Tensor]], Any]
    weights: torch.dtype = F32
    grads: torch.dtype = F32


BASELINE = Contestant(deepspeed)
CONTESTANTS = {
    "Lamb(adam=True)": Contestant(lambda p: Lamb(p, adam=True, decay_mode="decoupled", **OPTIONS), F32, BF16),
    "Lamb": Contestant(lambda p: Lamb(p, **OPTIONS), F32, BF16),
    "Came": Contestant(lambda p: Came(p, **OPTIONS), F32, BF16),
    "Lamb(adam=True), masters=True": Contestant(
        lambda p: Masters(Lamb(p, adam=True, decay_mode="decoupled", **OPTIONS)), F32, BF16
    ),
    "Lamb, masters=True": Contestant(lambda p: Masters(Lamb(p, **OPTIONS)), F32, BF16),
    "Came, masters=True": Contestant(lambda p: Masters(Came(p, **OPTIONS)), F32, BF16),
    "Lamb, weight_rounding='master'": Contestant(lambda p: Lamb(p, weight_rounding="master", **OPTIONS), BF16, BF16),
    "Came, weight_rounding='master'": Contestant(lambda p: Came(p, weight_rounding="master", **OPTIONS), BF16, BF16),
    "torch AdamW(fused=True)": Contestant(lambda p: torch.optim.AdamW(p, fused=True, **OPTIONS)),
    "torchao's step: AdamW(fused=True) for each tensor": Contestant(PerTensor),
}


def made(contestant: Contestant, shapes: Sequence[tuple[int, ...]]) -> Any:
    params = [Parameter(torch.full(shape, 0.02, dtype=contestant.weights)) for shape in shapes]
    for param in params:
        if contestant.grads != contestant.weights:
            param.grad_dtype = contestant.grads
        param.grad = torch.full_like(param, 1e-3, dtype=contestant.grads)
    optimizer = contestant.make(params)
    for _ in range(2):
        optimizer.step()
    return optimizer


def seconds(optimizer: Any) -> float:
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def written() -> str:
    """The page with its table rewritten."""
    rows = {row["optimizer"]: row for row in json.loads(RESULT.read_text())["results"]}
    lines = ["| on the CPU | weights | gradients | of DeepSpeedCPUAdam's time |", "|---|---|---|---|"]
    for name in CONTESTANTS:
        row = rows[name]
        dtypes = [row[which].removeprefix("torch.") for which in ("weights", "gradients")]
        lines.append(
            f"| {name} | {dtypes[0]} | {dtypes[1]} | {'{median:.2f} ({p10:.2f}-{p90:.2f})'.format(**row['ratio'])} |"
        )
    return FIGURES.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bert_large", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--optimizers", default=";".join(CONTESTANTS), help="some of these")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    shapes = list(SHAPES[arguments.shapes]())
    rows = []
    baseline = made(BASELINE, shapes)
    for name in arguments.optimizers.split(";"):
        about = provenance(
            f"python workbench/benchmarks/offload_peers.py --shapes {arguments.shapes} --rounds {arguments.rounds} "
            f'--optimizers "{name}"'
        )
        contestant, optimizer = CONTESTANTS[name], made(CONTESTANTS[name], shapes)
        pairs = [(seconds(optimizer), seconds(baseline)) for _ in range(arguments.rounds)]
        del optimizer
        rows.append(
            {
                "optimizer": name,
                "shapes": arguments.shapes,
                "weights": str(contestant.weights),
                "gradients": str(contestant.grads),
                "seconds": spread([mine for mine, _ in pairs]),
                "DeepSpeedCPUAdam_seconds": spread([base for _, base in pairs]),
                "ratio": spread([mine / base for mine, base in pairs]),
                "packages": {"deepspeed": package_version("deepspeed")},
                "provenance": about,
            }
        )
        print(name, rows[-1]["ratio"], flush=True)
    old = json.loads(arguments.json.read_text())["results"] if arguments.json.exists() else []
    kinds = [(row["optimizer"], row["shapes"]) for row in rows]
    kept = [row for row in old if (row["optimizer"], row["shapes"]) not in kinds]
    files.write_json(arguments.json, {"results": kept + rows})
    print(arguments.json)
    if arguments.json == RESULT and {row["optimizer"] for row in kept + rows} >= CONTESTANTS.keys():
        PAGE.write_text(written())


if __name__ == "__main__":
    main()
