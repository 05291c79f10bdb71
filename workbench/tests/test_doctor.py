import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from bighorn import CAME_PRESETS, LARS_PRESETS, PRESETS
from bighorn import _backend_status as backend_status
from bighorn import _kernels as kernels
from bighorn._kernels import Status
from bighorn._kernels.cpu import library
from workbench.tests.command_line import Invoke

MISSING = "libbighorn.so was not built: install a C compiler, then reinstall bighorn from source"


def words(text: str) -> str:
    """Return the text without the table's line breaks."""
    return " ".join(text.split())


def test_every_backend_and_what_results_depend_on_is_shown(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    output = invoke("doctor", "--json", "doctor.json").output
    content = json.loads(Path("doctor.json").read_text())
    assert list(content["backends"]) == list(kernels.BACKENDS)
    for name, found in content["backends"].items():
        assert found["works"] is kernels.status()[name].available
        assert words(f"{name} {'works' if found['works'] else 'does not work'} {found['detail']}") in words(output)
    assert content["environment"]["torch"] == torch.__version__
    assert content["environment"]["threads"] == torch.get_num_threads()
    assert content["machine"]["cores allowed"] == library.cores()
    assert content["variables"]["OMP_DYNAMIC"] == "false"
    assert words("OMP_DYNAMIC false") in words(output)
    if library.LIBRARY:  # the path has no line breaks, so it can be copied
        assert re.search(rf"^C library +{re.escape(library.LIBRARY_DETAIL)}$", output, re.MULTILINE)


def test_require_fails_where_the_backend_does_not_work(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is missing in an install of bighorn without a compiler."""
    invoke("doctor", "--require", "foreach", "--require", "reference")
    assert "'gpu' is not one of" in invoke("doctor", "--require", "gpu", code=2).output
    assert "leave out --require" in invoke("doctor", "--presets", "--require", "cpu", code=2).output
    monkeypatch.setattr(library, "LIBRARY", None)
    monkeypatch.setattr(library, "LIBRARY_DETAIL", MISSING)
    output = invoke("doctor", "--require", "foreach", "--require", "cpu", "--json", "doctor.json", code=1).output
    assert f"cpu does not work {MISSING}" in words(output)
    assert f"Error: --require cpu: this backend does not work here ({MISSING})." in output
    assert json.loads(Path("doctor.json").read_text())["backends"]["cpu"] == {"works": False, "detail": MISSING}


def test_a_backend_that_computes_nonsense_does_not_work(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    step = backend_status._step

    def broken(backend: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return step(backend, dtype, device) * (1.001 if backend == "foreach" else 1)

    monkeypatch.setattr(backend_status, "_step", broken)
    assert "foreach does not work a step gives wrong results" in words(invoke("doctor").output)
    assert "a step gives wrong results" in invoke("doctor", "--require", "foreach", code=1).output


def test_a_device_by_name_has_a_row_of_its_own_and_must_be_there(invoke: Invoke) -> None:
    printed = words(invoke("doctor", "--device", "cpu", "--json", "found.json").output)
    assert "foreach, cpu works float64: yes, float64 norms: yes, bfloat16: yes, addresses: yes" in printed
    found = json.loads(Path("found.json").read_text())["devices"]["cpu"]
    assert (found["works"], found["float64"]) == (True, True)
    for device, says in (("npv", "no such device"), ("cuda:99", "no CUDA device"), ("meta", "no such device")):
        printed = words(invoke("doctor", "--device", device, code=1).output)
        assert f"--device {device}: torch" in printed
        assert says in printed


def test_a_backend_whose_step_raises_does_not_work(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(_: Iterable[str]) -> dict[str, Any]:
        return {"foreach": Status(True, "plain torch, any device"), "imaginary": Status(True, "just imagine")}

    monkeypatch.setattr(kernels, "status", status)
    output = words(invoke("doctor").output)
    assert "foreach works plain torch, any device" in output
    assert "imaginary does not work a step fails:" in output


def test_presets_are_listed_within_80_columns(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = invoke("doctor", "--presets", "--json", "presets.json").output
    assert max(map(len, output.splitlines())) <= 80
    rows = json.loads(Path("presets.json").read_text())["presets"]
    assert [row["name"] for row in rows] == [preset.name for preset in (*PRESETS, *CAME_PRESETS, *LARS_PRESETS)]
    column = 2 + max(len(name) for row in rows for name in (row["name"], *row["aliases"]))
    for row in rows:
        assert all(re.search(rf"^{name} ", output, re.MULTILINE) for name in (row["name"], *row["aliases"]))
        assert all(option in output for option in row["options"])
        assert row["differs"] in " ".join(line[column:].strip() for line in output.splitlines())


def test_a_library_of_other_sources_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `git pull` in an editable install, an old library would read the tables wrongly."""
    (tmp_path / "run.h").write_text("/* newer */\n")
    monkeypatch.setattr(library, "CSRC", tmp_path)
    assert library.load_library() == (
        None,
        "libbighorn.so was built from other sources than these; reinstall bighorn from source",
    )
    monkeypatch.setattr(library, "CSRC", tmp_path / "as in a wheel")
    assert library.load_library()[0] is not None
