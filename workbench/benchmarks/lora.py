"""The cases in which LAMB trains LoRA too slowly, and the remedies.

    python workbench/benchmarks/lora.py [--seeds N]

A GPT of two blocks and 32 channels learns the text of the task `text` for a few hundred steps, and is frozen. Every
linear layer gets an adapter, A and B, of which B starts at zero as in peft, and the adapters learn the same text in
upper case, whose letters the model has hardly seen. Every optimizer has a constant learning rate, with or without
warm-up; the best of its rates after the last step is shown, over the seeds.
Writes workbench/benchmarks/results/lora.json and the table in workbench/benchmarks/results/lora.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bighorn import Came, Lamb
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks.text import ALPHABET, GPT, Text, standard_library
from bighorn_workbench.environment import provenance
from result_files import RESULTS

RESULT, PAGE = RESULTS / "lora.json", RESULTS / "lora.md"
FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)
PRETRAINED, BATCH_SIZE, SHOWN = 300, 4, (40, 100)
SETTINGS = ((4, 0), (4, 20))
"""Ranks of adapters, and steps of linear warm-up, of which the first has the rate over their number."""
LAMB_RATES, ADAM_RATES = (0.005, 0.02, 0.08), (0.0005, 0.002, 0.008)

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], tuple[float, ...]]] = {
    "`Lamb`": (Lamb, {}, LAMB_RATES),
    '`Lamb`, `exclude_from_layer_adaptation=["lora_B"]`': (
        Lamb,
        {"exclude_from_layer_adaptation": ["lora_B"]},
        LAMB_RATES,
    ),
    "`Lamb`, `weight_norm_bounds=(1.0, math.inf)`": (Lamb, {"weight_norm_bounds": (1.0, math.inf)}, LAMB_RATES),
    "`Lamb`, `always_adapt=False`": (Lamb, {"always_adapt": False}, ADAM_RATES),
    "`Came`": (Came, {}, ADAM_RATES),
    "torch's AdamW": (torch.optim.AdamW, {"weight_decay": 0.0}, ADAM_RATES),
}


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, as peft makes it with `lora_alpha=2 * r`."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * (x @ self.lora_A.T @ self.lora_B.T)
        return out


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model and put an adapter on each of its linear layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, Adapted):
                setattr(module, name, Adapted(child, rank))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.long().flatten())


def pretrained(task: Text, seed: int) -> GPT:
    """A small GPT after its first steps."""
    torch.manual_seed(seed)
    inputs, targets = task.data["train"]
    model = GPT(task.classes, width=32, heads=2, blocks=2, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(PRETRAINED):
        batch = torch.randint(len(inputs), (BATCH_SIZE,))
        loss_of(model, inputs[batch], targets[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


def in_upper_case(codes: Tensor, text: str, classes: int) -> Tensor:
    """The codes of the same text in upper case."""
    common = [character for character, _ in sorted(Counter(text).most_common(ALPHABET))]
    number = {character: index for index, character in enumerate(common, start=1)}
    upper = torch.arange(classes)
    for character, index in number.items():
        upper[index] = number.get(character.upper(), index)
    return upper[codes.long()].to(codes.dtype)


def upper_case(task: Text) -> list[Tensor]:
    """The texts that adapters learn: inputs and targets, to train and to test."""
    text = standard_library()
    codes = (*task.data["train"], *(each[::8] for each in task.data["test"]))
    return [in_upper_case(each, text, task.classes) for each in codes]


def trained(task: Text, seed: int) -> list[dict[str, Any]]:
    """The losses of every optimizer, rank and rate with one seed."""
    torch.set_num_threads(1)
    base, texts = pretrained(task, seed), upper_case(task)
    out = []
    for rank, warm_up in SETTINGS:
        for name, (kind, options, rates) in OPTIMIZERS.items():
            for rate in rates:
                found = adapters_of(base, texts, lambda named: kind(named, lr=rate, **options), rank, warm_up, seed)  # noqa: B023
                row = {"optimizer": name, "rank": rank, "warm_up": warm_up, "lr": rate, "seed": seed}
                out.append({**row, **found})
    return out


def adapters_of(
    base: GPT,
    texts: list[Tensor],
    make: Callable[[list[tuple[str, Tensor]]], Optimizer],
    rank: int,
    warm_up: int,
    seed: int,
) -> dict[str, Any]:
    """Train adapters; return their losses, and for LAMB the trust ratios of `lora_B`, both by step."""
    inputs, targets, test, expected = texts
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    adapt(model, rank)
    optimizer = make([(name, param) for name, param in model.named_parameters() if param.requires_grad])
    rate = optimizer.param_groups[0]["lr"]
    generator, losses, ratios = torch.Generator().manual_seed(seed), {}, {}
    for step in range(SHOWN[-1] + 1):
        if step in (0, *SHOWN):
            model.eval()
            with torch.no_grad():
                losses[step] = float(loss_of(model, test, expected))
            model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / (warm_up or 1))
        batch = torch.randint(len(inputs), (BATCH_SIZE,), generator=generator)
        loss_of(model, inputs[batch], targets[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, Lamb) and step + 1 in SHOWN:
            last = optimizer.telemetry()
            found = [r for n, r in zip(last.names, last.trust_ratio.tolist(), strict=True) if "lora_B" in n]
            ratios[step + 1] = statistics.median(found)
    return {"losses": losses, "lora_B_trust_ratio": ratios or None}


def table(saved: dict[str, Any]) -> str:
    """The best rate of each optimizer after the last step, as Markdown."""
    runs = saved["runs"]
    head = [f"loss after {step} steps" for step in SHOWN]
    lines = [f"| rank | warm-up | optimizer | lr | {' | '.join(head)} |", "|---|---|---|---|" + "---|" * len(SHOWN)]
    for rank, warm_up in SETTINGS:
        for name in OPTIMIZERS:
            mine = [run for run in runs if (run["optimizer"], run["rank"], run["warm_up"]) == (name, rank, warm_up)]
            by_rate = {
                rate: [run["losses"] for run in mine if run["lr"] == rate] for rate in {run["lr"] for run in mine}
            }
            rate = min(by_rate, key=lambda rate: statistics.median([each[str(SHOWN[-1])] for each in by_rate[rate]]))
            cells = []
            for step in SHOWN:
                values = sorted(each[str(step)] for each in by_rate[rate])
                cells.append(f"{statistics.median(values):.3f} ({values[0]:.3f}-{values[-1]:.3f})")
            lines.append(f"| {rank} | {warm_up or 'none'} | {name} | {rate:g} | {' | '.join(cells)} |")
    start = statistics.median([run["losses"]["0"] for run in runs])
    return f"\nBefore the first step the loss is {start:.3f}.\n\n" + "\n".join(lines) + "\n\n"


def written() -> str:
    """The page with its table rewritten."""
    saved = json.loads(RESULT.read_text())
    return FIGURES.sub(lambda match: match[1] + table(saved) + match[2], PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    about = provenance(f"python workbench/benchmarks/lora.py --seeds {arguments.seeds}")
    task = Text()
    runs = [run for seed in range(arguments.seeds) for run in trained(task, seed)]
    data = {"description": task.description, "sha256": task.fingerprint()}
    files.write_json(RESULT, {**about, "data": data, "pretrained": PRETRAINED, "batch_size": BATCH_SIZE, "runs": runs})
    PAGE.write_text(written())


if __name__ == "__main__":
    main()
