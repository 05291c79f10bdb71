"""`bighorn.status`, and `python -m bighorn`, which prints it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

import bighorn
from bighorn import _backend_status as backend_status
from bighorn import _kernels as kernels
from bighorn._kernels.cpu import library
from tests.support.processes import LIMIT


def test_it_has_a_row_for_each_backend_and_what_results_depend_on() -> None:
    found = bighorn.status()
    rows = [row for row in found.backends if not row.has]
    assert [row.name for row in rows] == list(kernels.BACKENDS)
    for row in rows:
        assert (row.works, row.detail) == (kernels.status()[row.name].available, kernels.status()[row.name].detail)
    assert (found.version, found.torch) == (version("bighorn"), torch.__version__)
    assert (found.threads, found.cores) == (library.threads(), library.cores())
    assert found.c_library == (library.LIBRARY_DETAIL if library.LIBRARY else None)


def test_a_device_has_a_row_of_its_own() -> None:
    row = bighorn.status(["foreach"], "cpu").backends[-1]
    assert (row.name, row.device, row.works, row.title) == ("foreach", torch.device("cpu"), True, "foreach, cpu")
    assert row.has == {"float64": True, "float64_norms": True, "bfloat16": True, "addresses": True}
    assert row.detail == "float64: yes, float64 norms: yes, bfloat16: yes, addresses: yes"
    assert all(row.name == "cpu" for row in bighorn.status(["cpu"], "cpu").backends)


@pytest.mark.parametrize("trial", [True, False])
def test_only_a_trial_finds_wrong_results(monkeypatch: pytest.MonkeyPatch, trial: bool) -> None:
    step = backend_status._step

    def wrong(backend: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return step(backend, dtype, device) * (1.001 if backend == "foreach" else 1)

    monkeypatch.setattr(backend_status, "_step", wrong)
    (row,) = (row for row in bighorn.status(["foreach"], trial=trial).backends if not row.has)
    assert row.works is not trial
    assert ("a step gives wrong results" in row.detail) is trial


def test_a_backend_that_is_missing_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", None)
    monkeypatch.setattr(library, "LIBRARY_DETAIL", "it was not built")
    found = bighorn.status(["cpu"])
    assert (found.c_library, found.backends[0].works, found.backends[0].detail) == (None, False, "it was not built")
    assert "cpu        does not work  it was not built" in str(found)
    assert "C library  none" in str(found)


def test_wrong_arguments_and_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backends='gpu' is not known: use 'cpu', 'triton', 'foreach', 'reference'"):
        bighorn.status(["cpu", "gpu"])
    with pytest.raises(TypeError, match="trial must be True or False"):
        bighorn.status(trial=1)  # type: ignore[arg-type]
    monkeypatch.setenv("BIGHORN_ISA", "v9")
    with pytest.raises(ValueError, match="BIGHORN_ISA='v9' in the environment must be one of v2, v3, v4"):
        bighorn.status()


def test_the_module_prints_it_with_torch_alone() -> None:
    program = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('bighorn_workbench', 'click', 'rich', 'matplotlib', 'jinja2')))\n"
        "runpy.run_module('bighorn', run_name='__main__', alter_sys=True)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert lines["bighorn"] == version("bighorn")
    assert lines["reference"] == "works  the specification, any device"
    assert set(lines) >= {*kernels.BACKENDS, "bighorn", "torch", "threads"}


def test_the_module_ends_in_one_message_at_a_wrong_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BIGHORN_NUM_THREADS", "many")
    monkeypatch.setattr(sys, "argv", ["bighorn"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bighorn", run_name="__main__")
    assert capsys.readouterr().out == ""
    assert str(ended.value).startswith(
        "Error: BIGHORN_NUM_THREADS='many' in the environment must be a number of threads"
    )
