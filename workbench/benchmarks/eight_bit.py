"""States of 8 and 16 bits beside each other, on the CPU: Bighorn's, bitsandbytes' and torchao's.

    pip install --no-deps bitsandbytes torchao
    python workbench/benchmarks/eight_bit.py [--steps 100] [--seeds 3] [--shapes vit_small] [--seconds 2] [--threads 1]

Deviation: an optimizer with states in float32, the leader, trains the GPT of the task `text` at batch 16. Its gradients
are also given to followers with states in fewer bits and weights of their own: how far these end from the leader's,
relative to how far those have moved. Bytes and times are of a known model's shapes; a step takes turns with torch's
fused AdamW's, as in `bighorn bench`. A contestant that does not run has its error in the table.
Writes results/eight-bit.json, and from it the table in docs/precision.md; with --page that alone.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from bighorn import Came, Lamb
from bighorn_workbench import files, measure
from bighorn_workbench.builtin_tasks.text import Text
from bighorn_workbench.environment import package_version, provenance
from bighorn_workbench.shapes import SHAPES
from bighorn_workbench.tasks import batch_indices, epoch_seed
from result_files import DOCS, RESULTS

RESULT = RESULTS / "eight-bit.json"
PAGE = DOCS / "precision.md"
TABLE = re.compile(r"(<!-- table of eight-bit\.json[^\n]*-->\n).*?(<!-- end of table -->)", re.DOTALL)
NOT_YET = "\nNot measured yet: `python workbench/benchmarks/eight_bit.py`.\n\n"
BATCH_SIZE, WEIGHT_DECAY = 16, 0.01

Build = Callable[[Sequence[Tensor], float], Optimizer]


def own(kind: type[Lamb | Came], state_dtype: Any) -> Build:
    return lambda params, lr: kind(params, lr=lr, weight_decay=WEIGHT_DECAY, state_dtype=state_dtype)


def peer(module: str, name: str) -> Build:
    """Import a peer on demand, since it may not be installed."""
    return lambda params, lr: getattr(import_module(module), name)(params, lr=lr, weight_decay=WEIGHT_DECAY)


def adamw(params: Sequence[Tensor], lr: float) -> Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)


@dataclass(frozen=True)
class Contestant:
    """An optimizer; its weights are compared with its leaders'."""

    build: Build
    lr: float
    leaders: tuple[str, ...] = ()


def forms(name: str, kind: type[Lamb | Came], lr: float, fewer: Sequence[str]) -> dict[str, Contestant]:
    """The dtypes and forms of Bighorn's states."""
    leader = f"{name}, float32"
    followers = {f"{name}, {dtype}": Contestant(own(kind, dtype), lr, (leader,)) for dtype in fewer}
    return {leader: Contestant(own(kind, "float32"), lr), **followers}


def bitsandbytes(name: str, *leaders: str) -> Contestant:
    return Contestant(peer("bitsandbytes.optim", name), 1e-3, leaders)


CONTESTANTS = {
    **forms("Lamb", Lamb, 0.01, ("bfloat16", "int8")),
    **forms("Came", Came, 2e-4, ("float16", "bfloat16", "int8")),
    "torch AdamW": Contestant(adamw, 1e-3),
    "torchao AdamW8bit": Contestant(peer("torchao.optim", "AdamW8bit"), 1e-3, ("torch AdamW",)),
    "bitsandbytes AdamW": bitsandbytes("AdamW"),
    "bitsandbytes AdamW8bit": bitsandbytes("AdamW8bit", "bitsandbytes AdamW"),
    "bitsandbytes LAMB": bitsandbytes("LAMB"),
    "bitsandbytes LAMB8bit": bitsandbytes("LAMB8bit", "bitsandbytes LAMB", "bitsandbytes AdamW8bit"),
}


def training(task: Text, leader: Contestant, seed: int, steps: int) -> Iterator[list[Tensor]]:
    """The leader's weights, with gradients, before each of its steps."""
    torch.manual_seed(seed)
    model = task.model()
    weights: list[Tensor] = list(model.parameters())
    optimizer = leader.build(weights, leader.lr)
    for step in range(steps):
        chosen = batch_indices(epoch_seed(seed, 0), step, BATCH_SIZE, task.samples)
        inputs, targets = (tensor[chosen] for tensor in task.data["train"])
        logits = model(inputs)
        cross_entropy(logits.flatten(0, -2), targets.flatten().long()).backward()  # type: ignore[no-untyped-call]
        yield weights
        optimizer.step()
        optimizer.zero_grad()


def deviations(
    task: Text, leader: Contestant, followers: dict[str, Contestant], seed: int, steps: int
) -> dict[str, float]:
    """How far each follower's weights end from the leader's, relative to how far those have moved."""
    start: list[Tensor] = []
    following: dict[str, tuple[list[Tensor], Optimizer]] = {}
    for weights in training(task, leader, seed, steps):
        if not start:
            start = [weight.detach().clone() for weight in weights]
            for name, follower in followers.items():
                mine = [weight.clone().requires_grad_() for weight in start]
                following[name] = mine, follower.build(mine, follower.lr)
        for mine, optimizer in following.values():
            for own_weight, weight in zip(mine, weights, strict=True):
                own_weight.grad = None if weight.grad is None else weight.grad.clone()
            optimizer.step()
    moved = distance(weights, start)
    return {name: distance(mine, weights) / moved for name, (mine, _) in following.items()}


@torch.no_grad()
def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return float(sum((a - b).double().square().sum() for a, b in zip(some, others, strict=True)) ** 0.5)


def state_bytes(optimizer: Optimizer) -> int:
    """The bytes of all tensors in its state, inner ones included; shared memory counts once."""
    found: dict[int, int] = {}

    def count(value: object) -> None:
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                count(getattr(value, name))
        elif isinstance(value, Tensor):
            found[value.data_ptr()] = value.nbytes

    for state in optimizer.state.values():
        for value in state.values():
            count(value)
    return sum(found.values())


def costs(build: Build, shapes: str, seconds: float) -> dict[str, Any]:
    """Bytes of state, and the time of a step beside AdamW's."""
    kind = torch.float32, torch.device("cpu")
    weights, grads = (
        measure.draw(list(SHAPES[shapes]()), scale, *kind, seed) for scale, seed in ((0.02, 0), (1e-3, 1))
    )

    def prepared(make: Build) -> Optimizer:
        return measure.prepared(lambda params, lr, _: make(params, lr), weights, grads, None)[0]

    baseline, optimizer = prepared(adamw), prepared(build)
    held = state_bytes(optimizer) / sum(weight.numel() for weight in weights)
    theirs, mine = measure.rounds(baseline, optimizer, seconds)
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    return {
        "bytes_per_parameter": held,
        "ms": 1e3 * statistics.median(mine),
        "ratio": measure.spread(ratios),
        "rounds": len(ratios),
    }


def measured(task: Text, steps: int, seeds: int, shapes: str, seconds: float) -> dict[str, dict[str, Any]]:
    """By contestant."""
    rows: dict[str, dict[str, Any]] = {}
    for name, contestant in CONTESTANTS.items():
        try:
            rows[name] = costs(contestant.build, shapes, seconds) | {"deviation_from": {}}
        except Exception as error:  # a peer may raise any error, which the table shows
            rows[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"}
        print(name, rows[name], flush=True)
    able = {name: contestant for name, contestant in CONTESTANTS.items() if "error" not in rows[name]}
    for name, leader in able.items():
        followers = {follower: one for follower, one in able.items() if name in one.leaders}
        each = [deviations(task, leader, followers, seed, steps) for seed in range(seeds)] if followers else []
        for follower in followers:
            rows[follower]["deviation_from"][name] = [found[follower] for found in each]
            print(follower, "from", name, rows[follower]["deviation_from"][name], flush=True)
    return rows


def written() -> str:
    """docs/precision.md with its table rewritten."""
    found = table(json.loads(RESULT.read_text())) if RESULT.is_file() else NOT_YET
    text, count = TABLE.subn(lambda match: match[1] + found + match[2], PAGE.read_text())
    assert count == 1
    return text


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| optimizer | bytes of state per parameter | step, of fused AdamW's | deviation |", "|---|---|---|---|"]
    for name, row in result["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | |")
            continue
        ratio = row["ratio"]
        off = "; ".join(f"{in_words(found)} from {leader}" for leader, found in row["deviation_from"].items())
        step = f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})"
        lines.append(f"| {name} | {row['bytes_per_parameter']:.2f} | {step} | {off} |")
    return "\n".join(["", *lines, "", ""])


def in_words(shares: list[float]) -> str:
    """Some that hardly differ, in percent."""
    low, middle, high = min(shares), statistics.median(shares), max(shares)
    return f"{middle:.2%} ({low:.2%} to {high:.2%})" if high else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shapes", default="vit_small", choices=tuple(SHAPES))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="write the table alone, from the figures there are")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.page:
        about = provenance(
            f"python workbench/benchmarks/eight_bit.py --steps {arguments.steps} --seeds {arguments.seeds} "
            f"--shapes {arguments.shapes} --seconds {arguments.seconds:g} --threads {arguments.threads}"
        )
        task = Text()
        result = {
            **about,
            "packages": {name: package_version(name) for name in ("bitsandbytes", "torchao")},
            "data": {"description": task.description, "sha256": task.fingerprint()},
            "rows": measured(task, arguments.steps, arguments.seeds, arguments.shapes, arguments.seconds),
        }
        files.write_json(RESULT, result)
    files.write_text(PAGE, written())


if __name__ == "__main__":
    main()
