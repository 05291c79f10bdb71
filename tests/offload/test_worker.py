"""The stepping thread: its share of the cores, its NUMA node, and its errors."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bighorn import Lamb
from bighorn._kernels import cores
from bighorn.offloading._worker import Worker, near, team
from tests.support.offloading import network, offloaded
from tests.support.processes import LIMIT

CPU = torch.device("cpu")


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun gives each process one torch thread, and sets the number of processes on the machine."""
    monkeypatch.delenv("BIGHORN_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert team() == (cores(), f"all {cores()} cores")
    monkeypatch.setattr("bighorn.offloading._worker.cores", lambda: 48)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert team() == (6, "a share of 48 cores for each of 8 processes")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert team()[0] == 1


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGHORN_NUM_THREADS", "3")
    before = torch.get_num_threads()
    net = network()
    optimizer = offloaded(net, Lamb(net.parameters(), lr=0.1))
    assert "stepped by 3 threads of the host (BIGHORN_NUM_THREADS)" in optimizer.explain()
    assert optimizer._worker.run(torch.get_num_threads) == 3
    assert torch.get_num_threads() == before
    assert Worker(CPU).run(lambda: 7) == 7


@pytest.mark.parametrize("name", ["BIGHORN_NUM_THREADS", "LOCAL_WORLD_SIZE"])
def test_an_environment_that_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIGHORN_NUM_THREADS", raising=False)
    monkeypatch.setenv(name, "many")
    net = network()
    optimizer = Lamb(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"{name}='many' in the environment must be a number"):
        offloaded(net, optimizer)
    assert optimizer.param_groups[0]["params"] == list(net.parameters())


def test_the_numa_node_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in enumerate(("0,2-3", "1,4")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    gpu = tmp_path / "0000:41:00.0"
    gpu.mkdir()
    where = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: where)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    device = torch.device("cuda", 0)
    for own, expected in {"0": {0, 2}, "1": {1}, "-1": set()}.items():
        (gpu / "numa_node").write_text(own)
        assert near(device, tmp_path, tmp_path) == expected
    assert near(CPU, tmp_path, tmp_path) == set()
    (tmp_path / "node1" / "cpulist").unlink()
    (tmp_path / "node1").rmdir()
    assert near(device, tmp_path, tmp_path) == set()  # one node


def test_an_error_reaches_who_asks() -> None:
    worker = Worker(CPU)
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda: 1 // 0)
    assert worker.run(lambda: 1) == 1


def test_the_thread_ends_with_the_worker() -> None:
    worker = Worker(CPU)
    thread = worker.run(threading.current_thread)
    del worker
    thread.join(LIMIT)
    assert not thread.is_alive()
