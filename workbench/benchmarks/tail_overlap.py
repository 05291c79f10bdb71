"""How much of the optimizer's time TailOverlap hides: two ranks over a link of 0.5, 1 and 3 Gb/s, and an unshaped one.

    python workbench/benchmarks/tail_overlap.py [--rounds 15] [--rates 0.5,1,3,inf] [--optimizers 'Lamb;torch AdamW']

Each rank runs in a network namespace of its own; a veth pair between the two is shaped with tc's token bucket filter.
That takes Linux, iproute2 and util-linux, and root or user namespaces. Namespaces end with their processes.
Writes results/tail-overlap.json.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import ranks
from bighorn import Lamb, TailOverlap
from bighorn_workbench.environment import provenance
from bighorn_workbench.files import write_json
from bighorn_workbench.measure import spread
from bighorn_workbench.ranks import end_process_group

RESULT = Path(__file__).parent / "results" / "tail-overlap.json"
LATENCY, BURST = "400ms", "256kb"
WARM_UP = 3  # steps: buckets are rebuilt, state and plans are made

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Lamb": lambda model: Lamb(model.parameters(), lr=1e-3),
    "Lamb, max_grad_norm": lambda model: Lamb(model.parameters(), lr=1e-3, max_grad_norm=1.0),
    "Lamb, GradScaler": lambda model: Lamb(model.parameters(), lr=1e-3),
    "torch AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
}


def large() -> nn.Module:
    """21 million parameters in 20 layers."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(20)])


def tiny() -> nn.Module:
    """53 thousand parameters."""
    return nn.Sequential(nn.Linear(1024, 48), nn.ReLU(), nn.Linear(48, 64))


MODELS = {"large": large, "tiny": tiny}


# ---- a rank --------------------------------------------------------------------------------------------------------


class Training:
    """A model of its own, in data-parallel training, with or without overlap."""

    def __init__(self, model: Callable[[], nn.Module], name: str, overlapped: bool) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(model(), gradient_as_bucket_view=True)
        self.optimizer = OPTIMIZERS[name](self.model)
        self.scaler = torch.amp.GradScaler("cpu", enabled=name.endswith("GradScaler"))
        self.overlap = TailOverlap(self.model, self.optimizer, scaler=self.scaler) if overlapped else None
        self.batch = torch.randn(8, 1024)
        self.buckets: list[int] = []

    def backward(self) -> None:
        self.scaler.scale(self.model(self.batch).square().mean()).backward()

    def step(self) -> None:
        if self.overlap is not None:
            self.buckets = [flight.buffer.nbytes for flight in self.overlap._in_flight]
            self.overlap.step()
        else:
            self.scaler.step(self.optimizer)
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad()

    def seconds(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self.backward()
        self.step()
        return time.perf_counter() - start

    def seconds_alone(self) -> tuple[float, float]:
        """Forward and backward, and the optimizer, with nothing in flight."""
        dist.barrier()
        start = time.perf_counter()
        with self.model.no_sync():
            self.backward()
        middle = time.perf_counter()
        self.step()
        return middle - start, time.perf_counter() - middle


def seconds_of_communication(buckets: list[int]) -> float:
    buffers = [torch.ones(size // 4) for size in buckets]
    dist.barrier()
    start = time.perf_counter()
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        work.wait()
    return time.perf_counter() - start


def run_rank(rank: int, folder: Path, model: str, rounds: int, optimizers: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    results = []
    for name in optimizers:
        plain, overlapped = (Training(MODELS[model], name, overlapped) for overlapped in (False, True))
        for training in (plain, overlapped):
            for _ in range(WARM_UP):
                training.seconds()
        for a, b in zip(plain.model.parameters(), overlapped.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        alone = [plain.seconds_alone() for _ in range(rounds)]
        wire = [seconds_of_communication(overlapped.buckets) for _ in range(max(3, rounds // 3))]
        turns = [[training.seconds() for training in (plain, overlapped)] for _ in range(rounds)]
        results.append({"name": name, **figures(alone, wire, turns, overlapped.buckets)})
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))


def figures(
    alone: list[tuple[float, float]], wire: list[float], turns: list[list[float]], buckets: list[int]
) -> dict[str, Any]:
    """The update of all buckets except the last can be hidden, as far as communication takes so long.

    A share above 1 is noise of the link. With a global norm much less can be hidden: the sums of squares.
    """
    optimizer = statistics.median(step for _, step in alone)
    gain = statistics.median(then - overlap for then, overlap in turns)
    hideable = min(optimizer * (1 - buckets[-1] / sum(buckets)), statistics.median(wire))
    return {
        "bucket_megabytes": [round(size / 1e6, 2) for size in buckets],
        "backward_ms": spread([backward for backward, _ in alone], 1e3),
        "optimizer_ms": spread([step for _, step in alone], 1e3),
        "communication_ms": spread(wire, 1e3),
        "then_ms": spread([then for then, _ in turns], 1e3),
        "overlap_ms": spread([overlap for _, overlap in turns], 1e3),
        "gain_ms": spread([then - overlap for then, overlap in turns], 1e3),
        "ratio": spread([overlap / then for then, overlap in turns]),
        "hideable_ms": 1e3 * hideable,
        "hidden_of_hideable": gain / hideable if hideable else None,
        "hidden_of_optimizer": gain / optimizer,
    }


# ---- the link ------------------------------------------------------------------------------------------------------


def isolated(*command: str) -> list[str]:
    """A command that ends with this process."""
    return ["setpriv", "--pdeathsig", "KILL", *command]


@contextlib.contextmanager
def link(gigabits: float) -> Iterator[list[list[str]]]:
    """Two network namespaces with a veth pair between them: for each, the prefix of a command that is to run inside."""
    own = Path("/proc/self/ns/net").readlink()
    holders = [subprocess.Popen(isolated("unshare", "--net", "sleep", "infinity")) for _ in range(2)]
    try:
        while any(Path(f"/proc/{holder.pid}/ns/net").readlink() == own for holder in holders):
            if any(holder.poll() is not None for holder in holders):
                sys.exit("tail_overlap: this user may not make network namespaces: run it as root")
            time.sleep(0.01)
        inside = [isolated("nsenter", "--net", "--target", str(holder.pid)) for holder in holders]
        peer = ["peer", "name", "wire", "netns", str(holders[1].pid)]
        subprocess.run([*inside[0], "ip", "link", "add", "wire", "type", "veth", *peer], check=True)
        for rank, prefix in enumerate(inside):
            subprocess.run([*prefix, "ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", "wire"], check=True)
            for device in ("lo", "wire"):
                subprocess.run([*prefix, "ip", "link", "set", device, "up"], check=True)
            if math.isfinite(gigabits):
                shape = ["tbf", "rate", f"{gigabits * 1e3:.0f}mbit", "burst", BURST, "latency", LATENCY]
                subprocess.run([*prefix, "tc", "qdisc", "add", "dev", "wire", "root", *shape], check=True)
        yield inside
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def measure(gigabits: float, model: str, rounds: int, optimizers: str) -> dict[str, Any]:
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    variables = {"GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": threads, "BIGHORN_NUM_THREADS": threads}
    with link(gigabits) as inside, tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, __file__, "--folder", folder, "--model", model, "--rounds", str(rounds)]
        again += ["--optimizers", optimizers]
        ranks.run([[*prefix, *again, "--rank", str(rank)] for rank, prefix in enumerate(inside)], variables)
        results = json.loads(Path(folder, "results.json").read_text())
    for row in results:
        print(
            f"{gigabits:>5} Gb/s {model:6} {row['name']:20} then {row['then_ms']['median']:7.1f} ms  overlapped "
            f"{row['overlap_ms']['median']:7.1f}  ratio {row['ratio']['median']:.3f} ({row['ratio']['p10']:.3f}-"
            f"{row['ratio']['p90']:.3f})  optimizer {row['optimizer_ms']['median']:6.1f}  communication "
            f"{row['communication_ms']['median']:7.1f}  gain {row['gain_ms']['median']:5.1f} of the "
            f"hideable {row['hideable_ms']:.1f} ms",
            flush=True,
        )
    return {
        "gigabits_per_second": gigabits if math.isfinite(gigabits) else None,
        "model": model,
        "parameters": sum(p.numel() for p in MODELS[model]().parameters()),
        "threads_per_rank": int(threads),
        "optimizers": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rates", default="0.5,1,3,inf", help="in Gb/s; inf is the link as it is")
    parser.add_argument("--optimizers", default=";".join(OPTIMIZERS), help="some of these")
    parser.add_argument("--json", type=Path, default=RESULT)
    for name, kind in (("--rank", int), ("--folder", Path), ("--model", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        names = arguments.optimizers.split(";")
        run_rank(arguments.rank, arguments.folder, arguments.model, arguments.rounds, names)
        end_process_group()
        return
    missing = [name for name in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing:
        sys.exit(f"tail_overlap: {', '.join(missing)} not found: install iproute2 and util-linux (Linux only)")
    if os.geteuid() != 0:  # root in a user namespace is enough
        command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, check=False).returncode)
    about = provenance(
        f"python workbench/benchmarks/tail_overlap.py --rounds {arguments.rounds} --rates {arguments.rates}"
    )
    rates = [float(rate) for rate in arguments.rates.split(",")]
    links = [measure(rate, "large", arguments.rounds, arguments.optimizers) for rate in rates]
    links += [measure(math.inf, "tiny", arguments.rounds * 5, arguments.optimizers)] if math.inf in rates else []
    result = {
        **about,
        "link": {"kind": "veth between two network namespaces", "qdisc": "tbf", "burst": BURST, "latency": LATENCY},
        "links": links,
    }
    write_json(arguments.json, result)
    print(arguments.json)


if __name__ == "__main__":
    main()
