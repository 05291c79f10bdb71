"""A Ctrl-C while the console script still imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import LIMIT

PROGRAM = """
import signal, sys
from importlib.abc import MetaPathFinder
from importlib.metadata import entry_points

module = sys.argv.pop()

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
(script,) = entry_points(group="console_scripts", name="bighorn")
script.load()()
"""


@pytest.mark.parametrize("module", ["torch", "torch.nn", "bighorn.cli", "bighorn.cli.commands", "bighorn.cli.memory"])
def test_ctrl_c_during_imports_is_130_without_a_traceback(module: str) -> None:
    command = [sys.executable, "-c", PROGRAM, "memory", module]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.stderr == "Interrupted.\n"
    assert ended.returncode == 130
