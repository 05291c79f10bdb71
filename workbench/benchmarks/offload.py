"""How much of an offloaded step is hidden: a stand-in for a GPU behind a link of 12 and 25 GB/s (PCIe 3 and 4).

    python workbench/benchmarks/offload.py [--rounds 7] [--rates 12,25] [--optimizers Lamb;Came] [--passes 80,160]

The model has 50 million parameters in 48 layers. The stand-in has a queue of work and a link with both directions, all
of which take their time while the host continues, as with a GPU; all arithmetic of the optimizer is real. The ways take
turns in rounds of a few steps each. "In turn" is the same code without any overlap: all gradients stay on the device,
are copied, are stepped, and all new weights are copied back. Adds to results/offload.json, and writes the table
in results/offload.md.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bighorn import Came, Lamb, offload
from bighorn.offloading import OffloadedOptimizer
from bighorn.offloading import _step as step
from bighorn.offloading._copies import Pairs
from bighorn_workbench import files
from bighorn_workbench.environment import provenance
from bighorn_workbench.measure import spread

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "offload.json", HERE / "results" / "offload.md"
FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)
LAYERS, WIDTH = 48, 1024
BUCKET_MB = 10.0
STEPS = 3
"""The steps of a way in a round."""

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Lamb": lambda model: Lamb(model.parameters(), lr=1e-3, weight_decay=0.01),
    "Lamb, max_grad_norm": lambda model: Lamb(model.parameters(), lr=1e-3, weight_decay=0.01, max_grad_norm=1.0),
    "Came": lambda model: Came(model.parameters(), lr=1e-4, weight_decay=0.01),
    "Came, max_grad_norm": lambda model: Came(model.parameters(), lr=1e-4, weight_decay=0.01, max_grad_norm=1.0),
    "torch AdamW": lambda model: AdamW(model.parameters(), lr=1e-3, fused=True),
}


class Device:
    """A device with a queue: work takes its time there, in order, while the host continues; and a link to the host.

    Copies take their time and no core of the host. The values are copied in the first steps alone, since none changes.
    """

    def __init__(self, rate: float) -> None:
        self.rate, self.copies = rate, True
        self.idle_at = self.outward_idle_at = self.inward_idle_at = 0.0

    def work(self, seconds: float) -> None:
        self.idle_at = max(self.idle_at, time.perf_counter()) + seconds

    def synchronize(self) -> None:
        wait_until(self.idle_at)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def to_host(self, pairs: Pairs) -> "Arrival":
        began = max(self.outward_idle_at, self.idle_at, time.perf_counter())
        self.outward_idle_at = began + self.copy(list(pairs))
        return Arrival(self, self.outward_idle_at)

    def to_device(self, pairs: Pairs) -> "Arrival":
        began = max(self.inward_idle_at, time.perf_counter())
        self.inward_idle_at = began + self.copy([(device, host) for host, device in pairs])
        return Arrival(self, self.inward_idle_at)

    @torch.no_grad()
    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        for target, source in pairs if self.copies else ():
            target.copy_(source)
        return sum(source.nbytes for _, source in pairs) / self.rate


class Arrival:
    def __init__(self, device: Device, at: float) -> None:
        self.device, self.at = device, at

    def synchronize(self) -> None:
        wait_until(self.at)

    def wait(self) -> None:
        self.device.idle_at = max(self.device.idle_at, self.at)


def wait_until(moment: float) -> None:
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class Layer(nn.Module):
    """A layer that computes nothing, in the time that a GPU would take."""

    def __init__(self, device: Device, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.device = device
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.grads = torch.randn(WIDTH, WIDTH) * 1e-3, torch.randn(WIDTH) * 1e-3
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Any:
        return Pass.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, __: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        layer.device.work(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer = ctx.layer
        layer.device.work(layer.backward_s)
        return grad, layer.grads[0].detach(), layer.grads[1].detach(), None


class Training:
    """A model with its offloaded optimizer, whose copies overlap with passes and arithmetic, or with nothing."""

    def __init__(self, name: str, rate: float, passes: tuple[float, float], overlaps: bool) -> None:
        torch.manual_seed(0)
        self.device, self.overlaps = Device(rate), overlaps
        self.model = nn.Sequential(*(Layer(self.device, *(part / LAYERS for part in passes)) for _ in range(LAYERS)))
        self.optimizer: OffloadedOptimizer = offload(
            self.model,
            OPTIMIZERS[name](self.model),
            bucket_mb=BUCKET_MB if overlaps else 1e6,
            copies=self.device,
        )
        self.input = torch.zeros(1)
        for _ in range(2):
            self.step()
        self.optimizer.synchronize()
        self.device.copies = False

    def step(self) -> None:
        loss = self.model(self.input.requires_grad_()).sum()
        if self.overlaps:
            loss.backward()
        else:
            with self.optimizer.accumulate():
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> float:
        """Seconds of a step, the mean of a few after one that is not timed, since a step may reach into the next."""
        self.step()
        began = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        took = (time.perf_counter() - began) / STEPS
        self.optimizer.synchronize()
        self.device.synchronize()
        return took


def least(passes: tuple[float, float], copy_s: float, step_s: float) -> float:
    """The least seconds of a step, if everything waits for its inputs only, and all work is infinitely divisible."""
    forward, backward = passes
    return forward + max(backward, copy_s) + max(step_s, copy_s)


def measure(name: str, rate: float, passes: tuple[float, float], rounds: int) -> dict[str, Any]:
    trainings = [Training(name, rate * 1e9, passes, overlaps) for overlaps in (False, True)]
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        turn, overlapped = (each.timed() for each in trainings)
        times.append((turn, overlapped))
    size = sum(param.nbytes for param in trainings[0].model.parameters())
    copy_s = size / (rate * 1e9)
    in_turn, took = (statistics.median(column) for column in zip(*times, strict=True))
    step_s = in_turn - sum(passes) - 2 * copy_s
    can = in_turn - least(passes, copy_s, step_s)
    return {
        "optimizer": name,
        "link_gb_per_s": rate,
        "parameters": size // 4,
        "forward_ms": 1e3 * passes[0],
        "backward_ms": 1e3 * passes[1],
        "copy_each_way_ms": round(1e3 * copy_s, 1),
        "step_alone_ms": round(1e3 * step_s, 1),
        "in_turn_ms": round(1e3 * in_turn, 1),
        "rounds": rounds,
        "ms": round(1e3 * took, 1),
        "ratio": spread([mine / turn for turn, mine in times]),
        "can_be_hidden_ms": round(1e3 * can, 1),
        "hidden": round(statistics.median(turn - mine for turn, mine in times) / can, 3),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; the longest passes, and the slowest link, first."""
    lines = [
        "| optimizer | link | passes | in turn | overlapped | ratio | hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(
        rows, key=lambda row: (-row["backward_ms"], list(OPTIMIZERS).index(row["optimizer"]), row["link_gb_per_s"])
    ):
        passes = f"{row['forward_ms']:.0f} + {row['backward_ms']:.0f} ms"
        ratio = "{median:.2f} ({p10:.2f}-{p90:.2f})".format(**row["ratio"])
        lines.append(
            f"| {row['optimizer']} | {row['link_gb_per_s']:g} GB/s | {passes} | {row['in_turn_ms']:.0f} ms "
            f"| {row['ms']:.0f} ms | {ratio} | {row['hidden']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def written() -> str:
    """The page with its table rewritten."""
    rows = json.loads(RESULT.read_text())["results"]
    return FIGURES.sub(lambda match: match[1] + table(rows) + match[2], PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rates", default="12,25", help="in GB/s")
    parser.add_argument("--optimizers", default=";".join(OPTIMIZERS), help="some of these")
    parser.add_argument("--passes", default="80,160", help="milliseconds of the forward and the backward pass")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    forward, backward = (float(part) / 1e3 for part in arguments.passes.split(","))
    # A GPU computes the norms of gradients in passing; on the CPU this takes longer than the step.
    vars(step)["square_sums"] = lambda grads, device: torch.ones(len(grads), dtype=torch.float64, device=device)
    rows = []
    for name in arguments.optimizers.split(";"):
        for rate in map(float, arguments.rates.split(",")):
            command = (
                f"python workbench/benchmarks/offload.py --rounds {arguments.rounds} --rates {rate:g} "
                f"--optimizers '{name}' --passes {arguments.passes}"
            )
            about = provenance(command)
            rows.append({**measure(name, rate, (forward, backward), arguments.rounds), "provenance": about})
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "provenance"}), flush=True)
    old = json.loads(arguments.json.read_text())["results"] if arguments.json.exists() else []
    kinds = [kind(row) for row in rows]
    files.write_json(arguments.json, {"results": [row for row in old if kind(row) not in kinds] + rows})
    print(arguments.json)
    if arguments.json == RESULT:
        PAGE.write_text(written())


def kind(row: dict[str, Any]) -> tuple[object, ...]:
    """The kind of a row; the passes as requested."""
    command = row["provenance"]["command"]
    return row["optimizer"], row["link_gb_per_s"], command.partition("--passes")[2]


if __name__ == "__main__":
    main()
