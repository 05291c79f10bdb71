"""`bighorn bench --device cuda` without a GPU: the tests simulate the device's queue and two clocks."""

import gc
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it: its annotations are unions with `torch.device`, which a fixture replaces
from torch import Tensor

import bench_tables
import traffic
from bighorn import Came, Lamb
from bighorn_workbench import bench, cuda, measure, peers
from bighorn_workbench.measure import Change
from workbench.tests.command_line import Invoke, assert_self_contained

CPU = torch.device("cpu")
CYCLES_PER_SECOND = 1e9
SWEEP_SECONDS = 0.4e-3
COPY_SECONDS = 1e-3


class Device:
    """A device's queue: `host` is the time on the host, `free` the time at which all enqueued work is complete."""

    def __init__(self) -> None:
        self.host = self.free = 0.0
        self.sleeps: list[float] = []

    def enqueue(self, host: float, device: float) -> None:
        """Launch an operation that takes these seconds on the host, and then on the device."""
        self.host += host
        self.free = max(self.free, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / CYCLES_PER_SECOND)
        self.enqueue(0, self.sleeps[-1])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    pretended = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = max(pretended.free, pretended.host)

        def query(self) -> bool:
            return pretended.host >= self.time

        def elapsed_time(self, other: "Event") -> float:
            assert pretended.host >= other.time
            return 1e3 * (other.time - self.time)

    class Memory:
        def zero_(self) -> None:
            pretended.enqueue(0, SWEEP_SECONDS)

        def copy_(self, _: "Memory") -> None:
            pretended.enqueue(5e-6, COPY_SECONDS)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", pretended.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", pretended.sleep)
    monkeypatch.setattr(cuda, "scratch", Memory)
    for module in (cuda, measure):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: pretended.host))
    return pretended


class Launches(torch.optim.SGD):
    """An operation that takes known times on host and device, and can wait for the device."""

    def __init__(self, device: Device, host: float, seconds: float, waits: bool = False) -> None:
        super().__init__([torch.ones(1)])
        self.device, self.costs, self.waits = device, (host, seconds), waits

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.device.enqueue(*self.costs)
        if self.waits:
            self.device.synchronize()


def test_what_the_host_lacks_is_not_device_time(device: Device) -> None:
    """Issue 19: 1.15 ms on the host and 0.5 on the device, after a sweep of 0.4, were counted as more than 0.5."""
    baseline, optimizer = Launches(device, 1.15e-3, 0.5e-3), Launches(device, 0.2e-3, 0.75e-3)
    found = cuda.step_times(baseline, optimizer, 0)
    assert found["baseline_ms"]["median"] == pytest.approx(0.5)
    assert found["ms"]["median"] == pytest.approx(0.75)
    assert found["ratio"]["median"] == pytest.approx(1.5)
    assert found["host_ms"] == pytest.approx(0.2)
    assert (found["host_ahead"], found["refused_samples"], found["baseline_refused_samples"]) == (True, 0, 0)
    assert found["rounds"] == measure.LEAST_ROUNDS
    # Wall time is the slower of host and device.
    assert found["baseline_wall_ms"]["median"] == pytest.approx(1.15 + 0.5 / 50)
    assert found["wall_ms"]["median"] == pytest.approx(0.75 + 0.2 / 50)
    assert found["wall_ratio"]["median"] == pytest.approx(0.754 / 1.16)


def test_host_time_starts_on_an_idle_device(device: Device) -> None:
    """A full queue makes the host wait for the device, which is not a cost of the step."""

    def step() -> None:
        assert device.free <= device.host
        device.enqueue(0.2e-3, 5e-3)

    assert cuda.host_seconds(step) == pytest.approx(0.2e-3)


def test_a_late_host_has_its_sample_refused_and_sleeps_longer(device: Device) -> None:
    timer = cuda.DeviceTimer(lambda: device.enqueue(10e-3, 1e-3), 1e-3, cuda.scratch())
    assert timer() == pytest.approx(1e-3)
    assert timer.refused == 2
    assert device.sleeps[-3:] == pytest.approx([3e-3, 6e-3, 12e-3])
    assert timer() == pytest.approx(1e-3)
    assert timer.refused == 2  # the longer sleep stays


def test_a_step_that_waits_for_the_device_has_no_device_time(device: Device) -> None:
    baseline, optimizer = Launches(device, 1e-3, 1e-3), Launches(device, 1e-3, 2e-3, waits=True)
    found = cuda.step_times(baseline, optimizer, 0)
    assert (found["ms"], found["baseline_ms"], found["ratio"]) == (None, None, None)
    assert (found["host_ahead"], found["rounds"]) == (False, 0)
    assert found["refused_samples"] == cuda.TRIES
    assert found["wall_ms"]["median"] == pytest.approx(3.0)
    assert found["baseline_wall_ms"]["median"] == pytest.approx(1.0 + 1 / 50)


@pytest.mark.parametrize(("seconds", "rounds", "repeats"), [(0, 5, 3), (1e9, 40, 7)])
def test_rounds_are_bounded(
    device: Device, seconds: float, rounds: int, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, walls = Launches(device, 1e-4, 1e-4), itertools.count()
    monkeypatch.setattr(cuda, "wall_seconds", lambda *_: 1.0 + next(walls))
    assert cuda.step_times(optimizer, optimizer, seconds)["rounds"] == rounds
    assert next(walls) == 2 * repeats


def test_changes_come_before_each_step_and_take_no_time(device: Device) -> None:
    """A change takes a second of host and device; no figure includes it."""
    seen: tuple[list[int], list[int]] = [], []

    def change_of(mine: list[int]) -> Change:
        def change(step: int) -> None:
            mine.append(step)
            device.enqueue(1.0, 1.0)

        return change

    optimizers = Launches(device, 0.2e-3, 1e-3), Launches(device, 0.2e-3, 2e-3)
    found = cuda.step_times(*optimizers, 0, [change_of(mine) for mine in seen])
    assert found["ms"]["median"] == pytest.approx(2)
    assert found["baseline_ms"]["median"] == pytest.approx(1)
    assert found["wall_ms"]["median"] == pytest.approx(2.2)
    assert found["host_ms"] == pytest.approx(0.2)
    for mine in seen:
        assert len(mine) >= cuda.WARM_UP + cuda.HOST_STEPS + cuda.LEAST_REPEATS * cuda.STEPS_IN_A_ROW
        assert {0, 1} <= set(mine)


def test_the_speed_of_a_copy(device: Device) -> None:
    assert traffic.copy_speed() == pytest.approx(2 * cuda.SWEEP_BYTES / COPY_SECONDS)
    assert device.sleeps[1:] == pytest.approx([cuda.LEAST_SLEEP] * traffic.COPIES, rel=1e-3)


# --- The table ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The whole command runs with tensors on the CPU. Each step takes 2 ms of the device, and Lamb's takes 3 ms."""
    del device.sleeps[:]
    seconds = {"Lamb": 3e-3}
    facts = {"device": "H900"}

    def step_times(
        first: torch.optim.Optimizer, second: torch.optim.Optimizer, _: float, changes: Sequence[Change]
    ) -> dict[str, Any]:
        baseline, optimizer = (
            Launches(device, 0.25e-3, seconds.get(type(each).__name__, 2e-3), type(each).__name__ == "Waits")
            for each in (first, second)
        )
        return cuda.step_times(baseline, optimizer, 0, changes)

    known = bench.Instrument(lambda: facts, step_times, lambda _: 1_500_000, 0)
    monkeypatch.setitem(bench.INSTRUMENTS, "cuda", known)
    monkeypatch.setattr(torch, "device", lambda _: CPU)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # it asks for `torch.device` in CUDA builds
    monkeypatch.setattr(bench, "device_of", lambda _: CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H900")
    small = measure.ParamSet(lambda: [(16, 8), (8,), (1, 3, 2)])
    monkeypatch.setitem(measure.PARAM_SETS, "small", small)
    return device


def bench_json(invoke: Invoke, *arguments: object) -> tuple[dict[str, Any], str]:
    gc.freeze()  # the command collects garbage after each optimizer, in 0.2 s with all imports
    result = invoke("bench", "--device", "cuda", "--shapes", "small", "--json", "bench.json", *arguments)
    return json.loads(Path("bench.json").read_text()), result.output


@pytest.mark.usefixtures("pretended")
def test_the_table_of_a_gpu(invoke: Invoke) -> None:
    content, output = bench_json(invoke, "--optimizers", "lamb")
    assert content["device"] == {"device": "H900"}
    assert content["environment"]["device"] == "H900"
    [result] = content["results"]
    adamw, lamb = result["optimizers"]
    assert (adamw["ratio"]["median"], lamb["ratio"]["median"]) == pytest.approx((1.0, 1.5))
    [heading] = [line for line in output.splitlines() if "wall ratio" in line]
    words = "optimizer ms ratio p10-p90 wall ms wall ratio host temporaries error"
    assert heading.split() == words.split()
    [row] = [line for line in output.splitlines() if line.startswith(" Lamb")]
    assert row.split()[1:8] == ["3.00", "1.50", "1.50-1.50", "3.00", "1.50", "0.25", "ms"]
    assert "1.5 MB" in row


class Waits(torch.optim.SGD):
    pass


class Broken(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise RuntimeError(f"no kernel [/image] {closure}")


def peer(kind: type[torch.optim.SGD]) -> peers.Peer:
    return peers.Peer(kind.__name__.lower(), lambda: lambda params, lr, _: kind(params, lr=lr), "torch")


@pytest.mark.usefixtures("pretended")
def test_a_peer_without_device_time_or_that_fails_does_not_end_the_run(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(peers.PEERS, "waits", peer(Waits))
    monkeypatch.setitem(peers.PEERS, "broken", peer(Broken))
    table = peers.BenchTable("adamw", ("waits", "broken", "lamb"), ("small",), peers.TABLES["gpu"].columns, ("cuda",))
    monkeypatch.setitem(peers.TABLES, "gpu", table)
    content, output = bench_json(invoke, "--report", "bench.html")
    [result] = content["results"]
    assert [row["name"] for row in result["optimizers"]] == ["adamw", "waits", "lamb"]
    _, waits, _ = result["optimizers"]
    assert (waits["ms"], waits["host_ahead"]) == (None, False)
    assert waits["wall_ms"]["median"] == pytest.approx(2.25)
    [row] = [line for line in output.splitlines() if line.startswith(" waits ")]
    assert row.split()[1:6] == ["-", "-", "-", "2.25", "1.12"]
    assert "waits: no device time. The host was not ahead of the device in a whole step" in output
    assert "waits: no device time." in assert_self_contained(Path("bench.html")).text
    assert result["failed"] == {"broken": "RuntimeError: no kernel [/image] None"}
    assert "Failed: broken (RuntimeError: no kernel [/image] None)" in output
    with pytest.raises(RuntimeError, match="no kernel"):  # the peer was requested by name
        bench_json(invoke, "--optimizers", "broken")


@pytest.mark.usefixtures("pretended")
def test_the_error_is_left_out_where_it_takes_too_long(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_FOR_ERROR", 141)
    content, output = bench_json(invoke, "--optimizers", "lamb")
    assert [row["error"] for row in content["results"][0]["optimizers"]] == [None, None]
    assert all(line.split()[-1] == "-" for line in output.splitlines() if line.startswith((" Lamb", " torch")))


# --- Bytes -------------------------------------------------------------------------------------------------------

N = 256 * 128


@pytest.mark.parametrize(
    ("build", "dtype", "clip", "bytes_per_element"),
    [  # the tables of workbench/benchmarks/results/gpu.md
        (lambda params: Lamb(params), torch.float32, False, 40),
        (lambda params: Lamb(params), torch.float32, True, 44),
        (lambda params: Lamb(params, state_dtype=torch.bfloat16), torch.bfloat16, False, 20),
        (lambda params: Lamb(params, adam=True), torch.float32, False, 28),
        (lambda params: Lamb([{"params": params, "adapt": False}]), torch.float32, False, 28),
        (lambda params: Lamb(params, state_dtype="int8"), torch.float32, False, 22),
        (lambda params: Came(params, lr=1e-3), torch.float32, False, 32),
        (lambda params: Came(params, lr=1e-3), torch.float32, True, 36),
        (lambda params: Came(params, lr=1e-3, state_dtype="int8"), torch.float32, False, 23),
        (lambda params: Came(params, lr=1e-3, state_dtype=torch.bfloat16), torch.bfloat16, False, 16),
        # Unfactored: the second moment reads and writes 12, and the average and the weights 24.
        (lambda params: Came([params[0].flatten()], lr=1e-3), torch.float32, False, 36),
    ],
)
def test_bytes_are_those_of_the_kernels_passes(
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[list[Tensor]], Lamb | Came],
    dtype: torch.dtype,
    clip: bool,
    bytes_per_element: float,
) -> None:
    optimizer = build([torch.ones(256, 128, dtype=dtype)])
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert traffic.bytes_moved(optimizer, clip) is None  # the C library has other passes
    monkeypatch.setattr(type(optimizer), "explain", lambda _: "group 0: triton    1 tensors (the fastest here)")
    # Scales, rows and columns add less than a tenth of an int8 moment.
    assert traffic.bytes_moved(optimizer, clip) == pytest.approx(bytes_per_element * N, rel=0.02)


@pytest.mark.usefixtures("device")
def test_rates_are_relative_to_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "step_times", lambda *_: {})
    param = torch.ones(N)
    param.grad = torch.ones_like(param)
    baseline, optimizer = (
        measure.prepared(peers.PEERS[name].load(), [param], [param], None)[0] for name in ("adamw", "lamb")
    )
    times = traffic.step_times(baseline, optimizer, 0, (measure.nothing, measure.nothing))
    speed = 2 * cuda.SWEEP_BYTES / COPY_SECONDS
    assert times["copy_bytes_per_s"] == pytest.approx([speed] * 2)
    assert times["bytes_moved"] is None  # the passes are unknown without Triton
    row = {**times, "state_bytes": 2 * param.nbytes, "ms": {"median": 28 * N / (0.5 * speed) * 1e3}}
    assert traffic.bytes_once(row) == 28 * N
    assert [show(row) for show in traffic.COLUMNS.values()] == ["50%", "50%"]
    assert [show({**row, "bytes_moved": 42 * N}) for show in traffic.COLUMNS.values()] == ["75%", "50%"]
    assert [show({**row, "ms": None}) for show in traffic.COLUMNS.values()] == ["-", "-"]


# --- Peers -------------------------------------------------------------------------------------------------------


def test_peers_that_are_not_installed_or_cannot_be_imported_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> None:
        raise RuntimeError("no CUDA library")

    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    for name in ("bitsandbytes-adamw8bit", "bitsandbytes-lamb8bit", "flashoptim"):
        package = bench_tables.OWN_PEERS[name].package
        with pytest.raises(ImportError, match=f"not installed: pip install --no-deps {package}"):
            bench_tables.OWN_PEERS[name].load_for("cuda")
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    monkeypatch.setattr(peers, "import_module", fails)
    with pytest.raises(ImportError, match="installed, but its import fails: no CUDA library"):
        bench_tables.OWN_PEERS["bitsandbytes-adamw8bit"].load_for("cuda")


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, None), (torch.bfloat16, 24)])
def test_flashoptim_gets_parameters_that_it_steps(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int | None
) -> None:
    """FlashAdamW skips parameters without requires_grad, which would make its step the fastest."""
    given: list[int | None] = []

    class FlashAdamW(torch.optim.AdamW):
        def __init__(self, params: Any, lr: float, weight_decay: float, master_weight_bits: int | None) -> None:
            given.append(master_weight_bits)
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    monkeypatch.setattr(bench_tables, "imported", lambda *_: FlashAdamW)
    build = bench_tables.OWN_PEERS["flashoptim"].load()
    param = torch.ones(3, dtype=dtype)
    build([param], 0.1, None)
    assert param.requires_grad
    assert given == [bits]
    assert type(build([param.detach().double()], 0.1, None)) is torch.optim.AdamW
