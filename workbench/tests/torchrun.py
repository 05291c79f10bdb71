"""Commands of ``bighorn`` in several processes, under torchrun or forked, which run `torchrun_worker.py`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import TORCHRUN, Outcome, outcomes

WORKER = Path(__file__).with_name("torchrun_worker.py")
TWO = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]

Job = dict[str, Any]


def job(*command: str, **events: int) -> Job:
    """Return a command with the steps at which an event happens."""
    return {"command": list(command), **events}


def in_processes(count: int, folder: Path, jobs: list[Job]) -> list[Outcome]:
    """Run the jobs in processes without a supervisor."""
    ended = outcomes(WORKER, [[json.dumps(jobs)]] * count, folder=folder)
    for number in range(len(jobs)):
        (folder / f"store-{number}").unlink(missing_ok=True)
    return ended


def history(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["history"]
    return found


def assert_same_run(ours: Path, theirs: Path, coarse: bool) -> None:
    """Check that losses, accuracies, tests and metrics agree at every step, up to rounding."""
    several, one = history(ours), history(theirs)
    samples = 0.011 if coarse else 2e-3  # one sample of a hundred
    assert several["loss"] == pytest.approx(one["loss"], rel=2e-3 if coarse else 1e-4)
    assert several["batch_metrics"] == {
        name: pytest.approx(values, abs=samples) for name, values in one["batch_metrics"].items()
    }
    for name in ("lr", "scale", "skipped", "metric_steps", "layers"):
        assert several[name] == one[name]
    for metric, rows in one["metrics"].items():
        for mine, exact in zip(several["metrics"][metric], rows, strict=True):
            assert mine == pytest.approx(exact, rel=0.05 if coarse else 5e-3)
    for (step, mine), (other, exact) in zip(several["evaluations"], one["evaluations"], strict=True):
        assert step == other
        assert mine == pytest.approx(exact, rel=2e-3 if coarse else 1e-3, abs=0.006 if coarse else 0)
