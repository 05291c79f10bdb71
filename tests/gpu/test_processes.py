"""Separate processes for Triton's cache, its C compiler, and settings that torch reads when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.gpu_steps import GPU, needs_cuda
from tests.support.processes import LIMIT

pytestmark = [*GPU, needs_cuda]

STEPS = """
import sys
import torch
from tests.gpu import smoke

device = torch.device("cuda")
sys.exit(not all([smoke.check(kind, torch.float32, {}, device) for kind in smoke.KINDS]))
"""

AUTO = """
import torch
from bighorn import Lamb
p = torch.nn.Parameter(torch.ones(1000, device="cuda"))
p.grad = torch.ones_like(p)
optimizer = Lamb([p], lr=0.1)
optimizer.step()
print(optimizer.explain())
assert bool((p < 1).all())
"""


def start(program: str, **variables: str) -> subprocess.Popen[str]:
    """Start a program with further environment variables; empty variables are removed."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Return the output of a process, which must succeed."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, output
    return output


def test_expandable_segments() -> None:
    # torch reads the old name before 2.9, and the new one since.
    setting = "expandable_segments:True"
    finish(start(STEPS, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting))


def test_two_processes_fill_an_empty_cache(tmp_path: Path) -> None:
    """Both processes start at once, like ranks at the first step on a new machine."""
    processes = [start(STEPS, TRITON_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in processes:
        finish(process)


def test_no_c_compiler(tmp_path: Path) -> None:
    """Triton builds launchers with a C compiler if its cache has none; `auto` must explain its choice of a backend."""
    output = finish(start(AUTO, TRITON_CACHE_DIR=str(tmp_path), PATH=str(tmp_path), CC=""))
    assert "foreach" not in output or "compiler" in output, output
