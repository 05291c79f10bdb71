"""The errors of LAMB's moments in few bits: the forms of `_kernels/codec.py` beside others that were tried.

    python workbench/benchmarks/state_codecs.py [--steps N]

A model is trained in float32, on `digits` and on `text`. Beside it the moments of each matrix of 4,096 elements or more
are kept in every form too, advanced by the same gradients and rounded at each step. Every 25 steps: the error of r = m
/ (sqrt(v) + eps) relative to its norm, and the error of the trust ratio. Writes
workbench/benchmarks/results/state-codecs.json.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bighorn._kernels import codec, rounding
from bighorn._kernels.codec import Form
from bighorn_workbench import files
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.config import RunConfig
from bighorn_workbench.environment import provenance
from bighorn_workbench.run import Run
from result_files import RESULTS

BETA1, BETA2, EPS, WEIGHT_DECAY, EVERY = 0.9, 0.999, 1e-6, 0.01, 25
BATCH_SIZES = {"digits": 64, "text": 16}

Round = Callable[[Tensor, Tensor], Tensor]
"""There and back, from values and the dither that an optimizer would add."""


def power(exponent: float) -> Form:
    """Codes for a second moment's root, spaced as a power; to the nearest code."""
    return Form(
        torch.uint8,
        lambda share, _: torch.where(share == 0, share, ((share ** (1 / exponent)) * 255).round().clamp(min=1)),
        lambda code: (code / 255) ** exponent,
    )


def logarithm(octaves: float) -> Form:
    """Codes for a second moment's root, spaced evenly in its logarithm; to the nearest code."""
    return Form(
        torch.uint8,
        lambda share, _: torch.where(
            share == 0, share, (255 + share.log2() * 254 / octaves).round().clamp(min=1, max=255)
        ),
        lambda code: torch.where(code == 0, code, ((code - 255) * octaves / 254).exp2()),
    )


def square_root(share: Tensor, _: codec.Dither) -> Tensor:
    """The code of a first moment's square root, to the nearest."""
    return (share.abs().sqrt() * 127).round().copysign(share)


def fourth_root(share: Tensor, dither: codec.Dither) -> Tensor:
    """The code of a second moment's fourth root (its root is what is shared), rounded so that the mean is the value."""
    code = share.sqrt() * 255
    below = code.floor()
    low, high = below**4, (below + 1) ** 4
    below += (code**4 - low > (1 - dither / 2**16) * (high - low)).to(code.dtype)
    return torch.where(share == 0, share, below.clamp(min=1))


SQUARE_ROOT = Form(torch.int8, square_root, lambda code: code * code.abs() / 127**2)
FOURTH_ROOT = Form(torch.uint8, fourth_root, lambda code: (code / 255).square())


def in_blocks(form: Form) -> Round:
    """To the nearest code."""
    return lambda x, _: codec.decode(*codec.encode(x, form), form)


def by_chance(form: Form) -> Round:
    """To one of two codes, by random numbers."""
    return lambda x, _: codec.decode(*codec.encode(x, form, torch.randint(2**16, x.shape)), form)


def dithered(form: Form) -> Round:
    """To one of two codes, by dither."""
    return lambda x, dither: codec.decode(*codec.encode(x, form, dither), form)


def cast(dtype: torch.dtype) -> Round:
    """Without scales."""
    return lambda x, _: x.to(dtype).float()


def of_root(to_nearest: Round) -> Round:
    """The root of a second moment."""
    return lambda v, dither: to_nearest(v.sqrt(), dither).square()


def exactly(x: Tensor, _: Tensor) -> Tensor:
    """Not rounded."""
    return x


FORMS: dict[str, tuple[Round, Round]] = {
    "float32": (exactly, exactly),
    "bfloat16": (cast(torch.bfloat16), cast(torch.bfloat16)),
    "float16, unscaled": (cast(torch.float16), cast(torch.float16)),
    "float16, unscaled, v by its root": (cast(torch.float16), of_root(cast(torch.float16))),
    "m: linear": (in_blocks(codec.LINEAR), exactly),
    "m: square": (in_blocks(SQUARE_ROOT), exactly),
    "m (chosen): square, by bits": (in_blocks(codec.SIGNED), exactly),
    "v: root, linear": (exactly, of_root(in_blocks(power(1)))),
    "v: root, power 1.5": (exactly, of_root(in_blocks(power(1.5)))),
    "v: root, square": (exactly, of_root(in_blocks(power(2)))),
    "v: root, power 3": (exactly, of_root(in_blocks(power(3)))),
    "v: root, logarithm over 8 octaves": (exactly, of_root(in_blocks(logarithm(8)))),
    "v: root, logarithm over 16 octaves": (exactly, of_root(in_blocks(logarithm(16)))),
    "v: root, square, by chance": (exactly, of_root(by_chance(FOURTH_ROOT))),
    "v: root, square, dithered": (exactly, of_root(dithered(FOURTH_ROOT))),
    "v: fourth power, by bits, by chance": (exactly, by_chance(codec.UNSIGNED)),
    "v (chosen): fourth power, by bits, dithered": (exactly, dithered(codec.UNSIGNED)),
    "int8: m square, v root, square, by chance": (in_blocks(SQUARE_ROOT), of_root(by_chance(FOURTH_ROOT))),
    "int8 (chosen): both by bits, v dithered": (in_blocks(codec.SIGNED), dithered(codec.UNSIGNED)),
}


def measured(task: str, steps: int) -> dict[str, dict[str, float]]:
    """The errors of each form on one task."""
    config = RunConfig(task, optimizer="lamb", steps=steps, batch_size=BATCH_SIZES[task], threads=1)
    made = TASKS[task](None)
    run = Run(config.resolved(made), made)
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
            places = torch.arange(x.numel()).view_as(x)
            dither = rounding.dither(rounding.rng_key(0, i), torch.tensor(t), places)
            for name, (round_m, round_v) in FORMS.items():
                m, v = moments[name][i]
                m = round_m(BETA1 * m + (1 - BETA1) * x.grad, dither)
                v = round_v(BETA2 * v + (1 - BETA2) * x.grad.square(), dither)
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
    about = provenance(
        f"python workbench/benchmarks/state_codecs.py --steps {arguments.steps} --tasks {arguments.tasks}"
    )
    torch.manual_seed(0)
    results: dict[str, Any] = {task: measured(task, arguments.steps) for task in arguments.tasks.split(",")}
    files.write_json(RESULTS / "state-codecs.json", {**about, "tasks": results})
    for task, forms in results.items():
        for name, figures in forms.items():
            print(f"{task:7} {name:44}", *(f"{value:9.5f}" for value in figures.values()))


if __name__ == "__main__":
    main()
