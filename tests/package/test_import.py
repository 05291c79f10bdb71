"""The modules that ``import bighorn`` loads: no compiler, and nothing of torch that ``import torch`` does not load."""

from __future__ import annotations

import subprocess
import sys
import warnings

import torch
from torch.nn import Parameter

from bighorn import Lamb
from tests.support.processes import LIMIT

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import bighorn
print(*sorted(set(sys.modules) - before))
from dataclasses import replace
from bighorn import Lamb, _kernels as kernels
from bighorn._kernels.triton.trial import OPTIONS
param = torch.ones(3, dtype=torch.float64)
names = [kernels.pick("auto", param, replace(OPTIONS, cautious=cautious))[0] for cautious in (False, True)]
print(names[1], "triton" in sys.modules)
param.requires_grad_().grad = torch.ones_like(param)
Lamb([param]).step()
assert "bighorn._kernels.triton.lamb_kernels" not in sys.modules
"""


def test_the_import_adds_bighorn_alone_and_a_backend_for_the_cpu_no_triton() -> None:
    """This holds for every CPU backend. (Any optimizer's constructor loads dynamo.)"""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=LIMIT)
    imported, picked = ended.stdout.splitlines()
    names = imported.split()
    assert "bighorn._optim.lamb" in names
    packages = {name.partition(".")[0] for name in names}
    assert packages & {"torch", "triton", "sympy", "numpy"} == set(), names
    assert picked.split() == ["foreach", "False"]


def test_a_function_with_a_step_compiles_around_it() -> None:
    """There is no warning, since dynamo does not trace the step; it would catch warnings that are errors."""
    param = Parameter(torch.ones(3))
    optimizer = Lamb([param], lr=0.1)

    @torch.compile(backend="eager")
    def train() -> None:
        optimizer.step()

    param.grad = torch.ones(3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train()
    assert [str(warning.message) for warning in seen] == []
    assert optimizer.state[param]["step"] == 1
