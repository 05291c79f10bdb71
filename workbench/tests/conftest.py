import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from bighorn_workbench.run import Run
from tests.support import processes
from workbench.tests.command_line import Invoke, call, without_dropout, write_idx, write_text

processes.FORKS.set_forkserver_preload([*processes.PRELOADED, "bighorn_workbench.train", "sklearn.datasets"])


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run ``bighorn`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Result:
        result = call(*arguments)
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def lost_runs_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a run without an end as lost after a second."""
    monkeypatch.setattr("bighorn_workbench.storage.GRACE", 1)
    monkeypatch.setattr("bighorn_workbench.storage.BEAT", 1)


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """The four idx files of a tiny set of images that a network can distinguish, half of them gzipped."""
    return write_idx(tmp_path / "idx")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    write_text(path)
    return path


@pytest.fixture
def alone(invoke: Invoke, together: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run ``bighorn`` in this process, without dropout, in the folder of the runs of several processes."""
    monkeypatch.setattr(torch.nn.functional, "dropout", without_dropout)
    monkeypatch.chdir(together)
    return invoke


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the step in which this process receives a SIGINT, as from Ctrl-C."""
    step = Run.train_step
    at = [0]

    def interrupted(run: Run) -> None:
        if run.step + 1 == at[0]:
            os.kill(os.getpid(), signal.SIGINT)
        step(run)

    monkeypatch.setattr(Run, "train_step", interrupted)
    return lambda number: at.__setitem__(0, number)
