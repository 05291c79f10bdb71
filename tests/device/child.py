"""A process that has the stand-in device and calls functions of the tests, since a device is there for a whole process.

With another accelerator, `torch.accelerator`, pinned memory and seeds would mean other things to all other tests.
"""

from __future__ import annotations

import faulthandler
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from bighorn.capabilities import capabilities
from tests.device import stand_in
from tests.support.processes import FORKS, LIMIT


class Child:
    """A process with the stand-in in one mode; after a crash it is started again for the next call."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.folder = TemporaryDirectory()
        self.process: Any = None
        self.connection: Any = None

    def call(self, function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        """Call a function of a module there, and raise here what it raises."""
        crash = Path(self.folder.name) / "crash"
        if self.process is None or not self.process.is_alive():
            self.connection, theirs = FORKS.Pipe()
            self.process = FORKS.Process(target=serve, args=(self.mode, theirs, crash), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.connection.send((function, dict(arguments)))
            if not self.connection.poll(LIMIT):
                self.process.kill()
                pytest.fail(f"not done after {LIMIT} seconds", pytrace=False)
            outcome, text = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(LIMIT)
            pytest.fail(f"the process ended with {self.process.exitcode}\n{crash.read_text()}", pytrace=False)
        if outcome == "skipped":
            pytest.skip(text)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)


@cache
def child(mode: str) -> Child:
    """Return the one process of a mode, which ends with this process."""
    return Child(mode)


def serve(mode: str, connection: Connection, crash: Path) -> None:
    """Call functions until the other process ends."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Device do not support double dtype now")
    faulthandler.enable(crash.open("w"))
    torch.set_num_threads(1)
    stand_in.begin(mode)
    capabilities(torch.empty(0, device="npu").device)  # it waits, once in a process, whichever test is the first
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            function(**arguments)
        except pytest.skip.Exception as reason:
            connection.send(("skipped", str(reason)))
        except (Exception, pytest.fail.Exception):
            connection.send(("failed", traceback.format_exc()))
        else:
            connection.send(("passed", ""))
