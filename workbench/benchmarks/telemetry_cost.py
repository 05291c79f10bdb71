"""The cost of telemetry: one report every 50 steps, beside the optimizer's own steps on the shapes of real models.

    python workbench/benchmarks/telemetry_cost.py [--every 50] [--rounds 30] [--shapes tiny,vit_small,...]

A round times a run of steps and then one report, `bighorn.telemetry.scalars`; the share is the report's of all that the
optimizer takes. A training has forward and backward passes too, so its share of a training is smaller still.
Writes workbench/benchmarks/results/telemetry-cost.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from bighorn import Came, Lamb, telemetry
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.shapes import SHAPES

RESULT = Path(__file__).parent / "results" / "telemetry-cost.json"
STEPS = 5  # a round's steps; their mean is compared, so that a report finds the caches as steps leave them
OPTIMIZERS = {"Lamb": Lamb, "Came": Came}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, shapes: str, rounds: int, every: int) -> dict[str, Any]:
    torch.manual_seed(0)
    params = [(f"layer{i}", Parameter(0.02 * torch.randn(shape))) for i, shape in enumerate(SHAPES[shapes]())]
    for _, param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    optimizer = OPTIMIZERS[name](params, lr=1e-4, weight_decay=0.01)
    optimizer.step()
    telemetry.scalars(optimizer)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.step()

    step, report, share = [], [], []
    for _ in range(rounds):
        step.append(seconds(steps) / STEPS)
        report.append(seconds(lambda: telemetry.scalars(optimizer)))
        share.append(report[-1] / (every * step[-1] + report[-1]))

    def spread(values: list[float]) -> list[float]:
        cuts = statistics.quantiles(values, n=10)
        return [cuts[0], statistics.median(values), cuts[-1]]

    return {
        "optimizer": name,
        "shapes": shapes,
        "tensors": len(params),
        "scalars": len(telemetry.scalars(optimizer)),
        "step_ms": [1e3 * value for value in spread(step)],
        "report_ms": [1e3 * value for value in spread(report)],
        "share": spread(share),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", default="tiny,efficientnet_b0,vit_small,resnet50,bert_base")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    about = provenance(
        f"python workbench/benchmarks/telemetry_cost.py --every {arguments.every} --rounds {arguments.rounds}"
    )
    print(f"{'':22}{'tensors':>8}{'step ms':>10}{'report ms':>11}{'share of the time':>20}   10th to 90th percentile")
    rows = []
    for shapes in arguments.shapes.split(","):
        for name in OPTIMIZERS:
            row = measure(name, shapes, arguments.rounds, arguments.every)
            rows.append(row)
            low, share, high = row["share"]
            print(
                f"{name + ' ' + shapes:22}{row['tensors']:8}{row['step_ms'][1]:10.3f}{row['report_ms'][1]:11.3f}"
                f"{share:20.2%}   {low:.2%} to {high:.2%}"
            )
    result = {
        "what": f"a report every {arguments.every} steps; 10th percentile, median, 90th percentile",
        **about,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    write_json(arguments.json, result)
    print(arguments.json)


if __name__ == "__main__":
    main()
