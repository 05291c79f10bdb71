"""What LAMB's moments lose in few bits: the forms of `kernels/codec.py` beside others that were tried.

    python benchmarks/state_codecs.py [--steps N]

A model is trained in float32, on `digits` and on `text`. Beside it the moments of each matrix of 4,096 elements or more
are kept in every form too, advanced by the same gradients and rounded at each step. Every 25 steps: the error of
r = m / (sqrt(v) + eps) relative to its norm, and that of the trust ratio.
Writes benchmarks/results/state-codecs.json.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bighorn.cli import files
from bighorn.cli.config import RunConfig
from bighorn.cli.environment import provenance
from bighorn.cli.tasks import TASKS
from bighorn.cli.training import Run
from bighorn.kernels import codec
from bighorn.kernels.codec import Form

HERE = Path(__file__).parent
BETA1, BETA2, EPS, WEIGHT_DECAY, EVERY = 0.9, 0.999, 1e-6, 0.01, 25
BATCH_SIZES = {"digits": 64, "text": 16}

Round = Callable[[Tensor], Tensor]


def power(exponent: float) -> Form:
    """Codes for a second moment's root, spaced as a power; to the nearest code."""
    return Form(
        torch.uint8,
        lambda share, _: torch.where(share == 0, share, ((share ** (1 / exponent)) * 255).round().clamp(min=1)),
        lambda code: (code / 255) ** exponent,
        root=True,
    )


def logarithm(octaves: float) -> Form:
    """Codes for a second moment's root, spaced evenly in its logarithm; to the nearest code."""
    return Form(
        torch.uint8,
        lambda share, _: torch.where(
            share == 0, share, (255 + share.log2() * 254 / octaves).round().clamp(min=1, max=255)
        ),
        lambda code: torch.where(code == 0, code, ((code - 255) * octaves / 254).exp2()),
        root=True,
    )


def in_blocks(form: Form, by_chance: bool = False) -> Round:
    """There and back."""
    return lambda x: codec.decode(*codec.encode(x, form, torch.rand_like(x) if by_chance else 0.5), form)


def cast(dtype: torch.dtype, root: bool = False) -> Round:
    """There and back without scales."""
    if root:
        return lambda v: v.sqrt().to(dtype).float().square()
    return lambda x: x.to(dtype).float()


def exactly(x: Tensor) -> Tensor:
    """Not rounded."""
    return x


FORMS: dict[str, tuple[Round, Round]] = {
    "float32": (exactly, exactly),
    "bfloat16": (cast(torch.bfloat16), cast(torch.bfloat16)),
    "float16, unscaled": (cast(torch.float16), cast(torch.float16)),
    "float16, unscaled, v by its root": (cast(torch.float16), cast(torch.float16, root=True)),
    "float16 (chosen): in blocks, v by its root": (in_blocks(codec.HALF), in_blocks(codec.HALF_ROOT)),
    "m: linear": (in_blocks(codec.LINEAR), exactly),
    "m (chosen): square": (in_blocks(codec.SIGNED), exactly),
    "v: root, linear": (exactly, in_blocks(power(1))),
    "v: root, power 1.5": (exactly, in_blocks(power(1.5))),
    "v: root, square": (exactly, in_blocks(power(2))),
    "v: root, power 3": (exactly, in_blocks(power(3))),
    "v: root, logarithm over 8 octaves": (exactly, in_blocks(logarithm(8))),
    "v: root, logarithm over 16 octaves": (exactly, in_blocks(logarithm(16))),
    "v (chosen): root, square, by chance": (exactly, in_blocks(codec.UNSIGNED, by_chance=True)),
    "int8 (chosen): m square, v by chance": (in_blocks(codec.SIGNED), in_blocks(codec.UNSIGNED, by_chance=True)),
}


def measured(task: str, steps: int) -> dict[str, dict[str, float]]:
    """The errors of each form on one task."""
    config = RunConfig(task, optimizer="lamb", steps=steps, batch_size=BATCH_SIZES[task], threads=1)
    run = Run(config.resolved(), TASKS[task].load(None))
    matrices = [p for p in run.model.parameters() if p.ndim > 1 and p.numel() >= 4096]
    moments = {name: [(torch.zeros_like(x), torch.zeros_like(x)) for x in matrices] for name in FORMS}
    errors: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    t = 0

    @torch.no_grad()
    def follow(*_: object) -> None:
        nonlocal t
        t += 1
        for i, x in enumerate(matrices):
            assert x.grad is not None
            exact: tuple[Tensor, Tensor] | None = None
            for name, (round_m, round_v) in FORMS.items():
                m, v = moments[name][i]
                m = round_m(BETA1 * m + (1 - BETA1) * x.grad)
                v = round_v(BETA2 * v + (1 - BETA2) * x.grad.square())
                moments[name][i] = m, v
                if t % EVERY:
                    continue
                r = m / (1 - BETA1**t) / ((v / (1 - BETA2**t)).sqrt() + EPS)
                norm = (r + WEIGHT_DECAY * x).norm()
                exact = exact or (r, norm)
                errors[name].append(float((r - exact[0]).norm() / exact[0].norm()))
                ratios[name].append(abs(float(exact[1] / norm) - 1))

    run.optimizer.register_step_pre_hook(follow)
    while not run.done:
        run.train_step()
    return {
        name: {
            "update_error_median": statistics.median(errors[name]),
            "update_error_max": max(errors[name]),
            "trust_ratio_error_median": statistics.median(ratios[name]),
            "trust_ratio_error_max": max(ratios[name]),
        }
        for name in FORMS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tasks", default="digits,text")
    arguments = parser.parse_args()
    about = provenance(f"python benchmarks/state_codecs.py --steps {arguments.steps} --tasks {arguments.tasks}")
    torch.manual_seed(0)
    results: dict[str, Any] = {task: measured(task, arguments.steps) for task in arguments.tasks.split(",")}
    files.write_json(HERE / "results" / "state-codecs.json", {**about, "tasks": results})
    for task, forms in results.items():
        for name, figures in forms.items():
            print(f"{task:7} {name:44}", *(f"{value:9.5f}" for value in figures.values()))


if __name__ == "__main__":
    main()
