"""The memory that released gradients save, and their cost in messages, beside an ordinary step.

    python workbench/benchmarks/release_gradients.py [--blocks N]

A stack of transformer-sized matrices without biases (4 x width^2 and a pair of width x 4 width a block, as a GPT's),
8 samples a step, so that activations are small beside weights. Each measurement is a process of its own: after two
steps, which create the state, the kernel's peak of resident memory is reset; it is read after two more, less the memory
of the process before it built the model. One thread; memory does not depend on other programs. Then two ranks shard the
same stack, a block at a time, with fully_shard, and count the collectives of a third step. Writes
results/release-gradients.json.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import ranks
from bighorn import Came, Lamb, release_gradients
from bighorn_workbench import files
from bighorn_workbench.environment import provenance
from bighorn_workbench.ranks import end_process_group

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


def peak_of_steps(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> int:
    """The peak of resident memory in the third and fourth step, after the state was created."""

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    return resident("VmHWM")


def stack(blocks: int) -> nn.Sequential:
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)) for _ in range(blocks)))


def peak(name: str, released: bool, blocks: int) -> int:
    """Bytes, in this process."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: freed memory goes back to the kernel at once
    nn.Linear(8, 8)(torch.ones(8, 8)).sum().backward()  # what torch itself allocates
    before = resident("VmRSS")
    model = stack(blocks)
    optimizer = OPTIMIZERS[name](model.named_parameters())
    if released:
        release_gradients(model, optimizer)
    inputs = torch.randn(8, WIDTH)
    return peak_of_steps(model, optimizer, inputs) - before


def collectives(name: str, released: bool, blocks: int) -> dict[str, int]:
    """By kind, of a third step under FSDP2, forward and backward among it."""
    model = stack(blocks)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = OPTIMIZERS[name](model.named_parameters())
    if released:
        release_gradients(model, optimizer)
    for _ in range(3):
        with CommDebugMode() as seen:  # type: ignore[no-untyped-call]
            model(torch.ones(8, WIDTH)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    return {str(kind).rpartition(".")[2].strip("_"): count for kind, count in seen.get_comm_counts().items()}


def on_two_ranks(blocks: int) -> dict[str, dict[str, dict[str, int]]]:
    """By optimizer, ordinary and released: the counts of one of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, __file__, "--blocks", str(blocks), "--folder", folder, "--rank"]
        ranks.run([[*again, str(rank)] for rank in range(2)], limit=600)
        found: dict[str, dict[str, dict[str, int]]] = json.loads(Path(folder, "found.json").read_text())
        return found


def rank_of_two(rank: int, folder: Path, blocks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {
        name: {kind: collectives(name, kind == "released", blocks) for kind in ("ordinary", "released")}
        for name in OPTIMIZERS
    }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_of_two(arguments.rank, arguments.folder, arguments.blocks)
        end_process_group()
        return
    if arguments.child is not None:
        name, released = arguments.child
        print(peak(name, released == "released", arguments.blocks))
        return
    about = provenance(f"python workbench/benchmarks/release_gradients.py --blocks {arguments.blocks}")
    size = arguments.blocks * 12 * WIDTH**2 * 4
    rows = []
    counts = on_two_ranks(arguments.blocks)
    for name in OPTIMIZERS:
        row: dict[str, Any] = {"optimizer": name, "collectives_on_two_ranks": counts[name]}
        for kind in ("ordinary", "released"):
            command = [sys.executable, __file__, "--blocks", str(arguments.blocks), "--child", name, kind]
            bytes_ = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            row[kind] = {"peak_bytes": bytes_, "in_weights": round(bytes_ / size, 3)}
        rows.append(row)
        print(name, row, flush=True)
    result = {
        **about,
        "weights_bytes": size,
        "largest_gradient_bytes": 4 * WIDTH * WIDTH * 4,
        "results": rows,
    }
    files.write_json(RESULT, result)
    print(RESULT)


if __name__ == "__main__":
    main()
