"""Ctrl-C while the command line is still importing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import LIMIT

PROGRAM = """
import runpy, signal, sys
from importlib.abc import MetaPathFinder
from importlib.metadata import entry_points

module = sys.argv.pop()

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
"""
STARTS = {
    "script": "[script] = entry_points(group='console_scripts', name='bighorn'); script.load()()",
    "module": "runpy.run_module('bighorn_workbench', run_name='__main__', alter_sys=True)",
}


@pytest.mark.parametrize(
    ("start", "module"),
    [
        *(("script", module) for module in ("click", "torch.nn", "bighorn_workbench.memory")),
        *(("module", module) for module in ("bighorn_workbench.commands", "bighorn_workbench.memory")),
    ],
)
def test_ctrl_c_during_imports_is_130_without_a_traceback(start: str, module: str) -> None:
    command = [sys.executable, "-c", PROGRAM + STARTS[start], "memory", module]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.stderr == "Interrupted.\n"
    assert ended.returncode == 130


def test_training_imports_no_compiler() -> None:
    """Its import takes as long as torch's, which `torch.optim.Optimizer` makes in its constructor."""
    program = """
import sys
from bighorn_workbench import launch
try:
    launch.main()
finally:
    print({"torch._dynamo", "matplotlib", "optuna", "scipy", "sklearn"} & sys.modules.keys())
"""
    command = [sys.executable, "-c", program, "train", "--steps", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "set()"


def test_the_help_imports_no_torch() -> None:
    program = "import sys; from bighorn_workbench import launch; sys.modules['torch'] = None; launch.main()"
    ended = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Find a learning rate" in ended.stdout
