"""The table of benchmarks/results/trainers.md, which `make integrations` writes after its tests have passed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "trainers.md"
BEGIN, END = "<!-- tables of the tests: written by `make integrations` -->\n", "<!-- end of tables -->\n"

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "Hugging Face Trainer, TRL, peft": ("transformers", "peft", "accelerate"),
    "Accelerate": ("accelerate",),
    "Lightning": ("lightning", "jsonargparse"),
    "DeepSpeed": ("deepspeed",),
    "Megatron-LM": ("megatron-core",),
    "timm": ("timm",),
    "open_clip": (),
    "MMEngine": ("mmengine",),
    "Stable-Baselines3": ("stable-baselines3",),
    "Composer": (),
    "Ultralytics": (),
    "torchtitan": ("torchtitan",),
    "torchtune": ("torchtune",),
    "Hydra": ("hydra-core",),
    "NeMo AutoModel": ("nemo-automodel",),
    "verl": ("verl",),
    "axolotl": ("axolotl",),
    "ms-swift, LLaMA-Factory, PyG's GraphGym, OLMo-core": (),
    "sd-scripts, musubi-tuner, OneTrainer, SimpleTuner, ai-toolkit, diffusion-pipe": (),
    "diffusers, SANA, PixArt": ("diffusers",),
    "sentence-transformers": ("sentence-transformers",),
    "fastai": ("fastai",),
}
"""The packages whose versions are noted, for each trainer in the table of `docs/trainers.md`."""

TESTED = """
| trainer | version |
|---|---|
"""


def versions(packages: tuple[str, ...]) -> str:
    """Return the installed versions of packages."""
    found = []
    for package in packages:
        try:
            found.append(version(package) if len(packages) == 1 else f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed here" if len(packages) > 1 else "not installed here")
    return ", ".join(found) or "none"


def table() -> str:
    """Return the table of installed versions."""
    return TESTED + "".join(f"| {name} | {versions(packages)} |\n" for name, packages in PACKAGES.items())


def results(text: str) -> str:
    """Return the page of results with a new table and today's date."""
    when = datetime.now(timezone.utc).date().isoformat()
    tables = f"{table()}\nRun on {when} with torch {version('torch')}.\n\n"
    return f"{text.partition(BEGIN)[0]}{BEGIN}{tables}{END}{text.partition(END)[2]}"


if __name__ == "__main__":
    RESULTS.write_text(results(RESULTS.read_text()))
