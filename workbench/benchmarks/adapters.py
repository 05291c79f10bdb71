"""Adapters of peft whose tensors start at zero, by LAMB with and without `bighorn.groups.zero_initialized`.

    python workbench/benchmarks/adapters.py [--seeds N]

The model, its texts and the choice of rates are as in `lora.py`, but the adapters are peft's. AdaLoRA allocates
its ranks from step 10 to step 80, and has no orthogonal regularization, which peft adds to models that return a loss.
Writes workbench/benchmarks/results/adapters.json and the second table in results/lora.md.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bighorn import Came, Lamb
from bighorn.groups import zero_initialized
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks.text import Text, standard_library
from bighorn_workbench.environment import provenance
from lora import BATCH_SIZE, in_upper_case, loss_of, pretrained
from result_files import RESULTS

RESULT, PAGE = RESULTS / "adapters.json", RESULTS / "lora.md"
FIGURES = re.compile(r"(<!-- adapters -->\n).*?(<!-- end of adapters -->)", re.DOTALL)
STEPS, WARM_UPS = 100, (0, 20)
LAMB_RATES, ADAM_RATES = (0.005, 0.02, 0.08), (0.002, 0.008, 0.032)

Named = list[tuple[str, Tensor]]
OPTIMIZERS: dict[str, tuple[Callable[[Named, float], Any], tuple[float, ...]]] = {
    "AdamW": (lambda named, lr: torch.optim.AdamW(named, lr, weight_decay=0.0), ADAM_RATES),
    "`Lamb`": (lambda named, lr: Lamb(named, lr), LAMB_RATES),
    "`Lamb` with the rule": (
        lambda named, lr: Lamb(named, lr, exclude_from_layer_adaptation=zero_initialized(named)),
        LAMB_RATES,
    ),
    "`Came`": (lambda named, lr: Came(named, lr, bias_correction=True), ADAM_RATES),
}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "lora_alpha": 8}),
    "LoHa": ("LoHaConfig", {"r": 4, "alpha": 8}),
    "LoKr": ("LoKrConfig", {"r": 4, "alpha": 8}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 8}),
    "AdaLoRA": (
        "AdaLoraConfig",
        {"init_r": 6, "target_r": 4, "lora_alpha": 8, "tinit": 10, "tfinal": 20, "deltaT": 5, "total_step": STEPS + 1},
    ),
}


def adapted(base: nn.Module, adapter: str, seed: int) -> Any:
    """A copy of a model with an adapter of peft on each of its linear layers."""
    import peft

    kind, options = ADAPTERS[adapter]
    linear = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    torch.manual_seed(seed)
    return peft.get_peft_model(copy.deepcopy(base), getattr(peft, kind)(target_modules=linear, **options))


def trained(task: Text, seed: int) -> list[dict[str, Any]]:
    """The losses of every adapter, optimizer, warm-up and rate with one seed."""
    torch.set_num_threads(1)
    base, text = pretrained(task, seed), standard_library()
    inputs, targets, test, expected = (
        in_upper_case(codes, text, task.classes)
        for codes in (*task.data["train"], *(codes[::8] for codes in task.data["test"]))
    )
    out = []
    for adapter in ADAPTERS:
        for warm_up in WARM_UPS:
            for name, (make, rates) in OPTIMIZERS.items():
                for rate in rates:
                    model = adapted(base, adapter, seed)
                    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
                    zeros = {
                        re.split(r"\.default|\.weight", each)[0].rpartition(".")[2] for each, p in named if not p.any()
                    }
                    optimizer, generator = make(named, rate), torch.Generator().manual_seed(seed)
                    for step in range(STEPS):
                        for group in optimizer.param_groups:
                            group["lr"] = rate * min(1.0, (step + 1) / (warm_up or 1))
                        batch = torch.randint(len(inputs), (BATCH_SIZE,), generator=generator)
                        loss_of(model, inputs[batch], targets[batch]).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        if adapter == "AdaLoRA":
                            model.base_model.update_and_allocate(step)
                        optimizer.zero_grad()
                    model.eval()
                    with torch.no_grad():
                        loss = float(loss_of(model, test, expected))
                    row = {"adapter": adapter, "zeros": sorted(zeros), "warm_up": warm_up, "optimizer": name}
                    out.append({**row, "lr": rate, "seed": seed, "loss": loss})
    return out


def cell(runs: list[dict[str, Any]], **of: Any) -> str:
    """The median loss at the best rate of an optimizer, and that rate."""
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if all(run[key] == value for key, value in of.items()):
            by_rate.setdefault(run["lr"], []).append(run["loss"])
    loss, rate = min((statistics.median(losses), rate) for rate, losses in by_rate.items())
    return f"{loss:.2f} ({rate:g})"


def table(saved: dict[str, Any]) -> str:
    """The best rate of each optimizer for each adapter, as Markdown."""
    runs = saved["runs"]
    lines = [
        f"| adapter | starts at zero | warm-up | {' | '.join(OPTIMIZERS)} |",
        "|---|---|---|" + "---|" * len(OPTIMIZERS),
    ]
    for adapter in ADAPTERS:
        (zeros,) = {tuple(run["zeros"]) for run in runs if run["adapter"] == adapter}
        for warm_up in WARM_UPS:
            cells = [cell(runs, adapter=adapter, warm_up=warm_up, optimizer=name) for name in OPTIMIZERS]
            starts = ", ".join(f"`{name}`" for name in zeros)
            lines.append(f"| {adapter} | {starts} | {warm_up or 'none'} | {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n\n"


def written() -> str:
    """The page with its table rewritten."""
    saved = json.loads(RESULT.read_text())
    return FIGURES.sub(lambda match: match[1] + table(saved) + match[2], PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    about = provenance(f"python workbench/benchmarks/adapters.py --seeds {arguments.seeds}")
    task = Text()
    runs = [run for seed in range(arguments.seeds) for run in trained(task, seed)]
    data = {
        "description": task.description,
        "sha256": task.fingerprint(),
        "peft": importlib.metadata.version("peft"),
    }
    files.write_json(RESULT, {**about, "data": data, "batch_size": BATCH_SIZE, "runs": runs})
    PAGE.write_text(written())


if __name__ == "__main__":
    main()
