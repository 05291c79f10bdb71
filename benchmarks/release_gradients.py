"""Peak memory of training with gradients released inside backward, beside an ordinary step.

    python benchmarks/release_gradients.py [--blocks N]

A stack of transformer-sized matrices without biases (4 x width^2 and a pair of width x 4 width a block, as a GPT's),
8 samples a step, so that activations are small beside weights. Each measurement is a process of its own: after two
steps, in which state comes to be, the kernel's peak of resident memory is reset; it is read after two more, and what
the process had before it built the model is taken off. One thread; memory does not depend on what else is running.
Writes benchmarks/results/release-gradients.json.
"""

import argparse
import ctypes
import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bighorn import Came, Lamb, release_gradients
from bighorn.cli import files
from bighorn.cli.environment import commit, environment, machine

WIDTH = 512
RESULT = Path(__file__).parent / "results" / "release-gradients.json"
OPTIMIZERS: dict[str, Any] = {
    "Lamb": lambda params: Lamb(params, lr=1e-4, weight_decay=0.01),
    "Came": lambda params: Came(params, lr=1e-4, weight_decay=0.01),
    "Came, int8": lambda params: Came(params, lr=1e-4, weight_decay=0.01, state_dtype="int8"),
}


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return 1024 * int(kilobytes)


def peak(name: str, released: bool, blocks: int) -> int:
    """Bytes, in this process."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: what is freed goes back to the kernel at once
    nn.Linear(8, 8)(torch.ones(8, 8)).sum().backward()  # what torch itself allocates
    before = resident("VmRSS")
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    layers = [nn.Linear(*shape, bias=False) for _ in range(blocks) for shape in shapes]
    model = nn.Sequential(*layers)
    optimizer = OPTIMIZERS[name](model.named_parameters())
    if released:
        release_gradients(model, optimizer)
    inputs = torch.randn(8, WIDTH)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        name, released = arguments.child
        print(peak(name, released == "released", arguments.blocks))
        return
    found, load = commit(), machine()  # before the runs: what is committed meanwhile is not what ran
    size = arguments.blocks * 12 * WIDTH**2 * 4
    rows = []
    for name in OPTIMIZERS:
        row: dict[str, Any] = {"optimizer": name}
        for kind in ("ordinary", "released"):
            command = [sys.executable, __file__, "--blocks", str(arguments.blocks), "--child", name, kind]
            bytes_ = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            row[kind] = {"peak_bytes": bytes_, "in_weights": round(bytes_ / size, 3)}
        rows.append(row)
        print(name, row, flush=True)
    result = {
        "command": f"python benchmarks/release_gradients.py --blocks {arguments.blocks}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **found,
        "environment": environment(),
        "machine": load,
        "weights_bytes": size,
        "largest_gradient_bytes": 4 * WIDTH * WIDTH * 4,
        "results": rows,
    }
    files.write_json(RESULT, result)
    print(RESULT)


if __name__ == "__main__":
    main()
