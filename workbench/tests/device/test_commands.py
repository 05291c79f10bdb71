"""Commands on the stand-in for an accelerator."""

from __future__ import annotations

import tempfile
from pathlib import Path

from click.testing import CliRunner

from bighorn_workbench.commands import bighorn
from tests.device.devices import on
from tests.device.stand_in import MODES


@on(*MODES)
def test_doctor_says_what_there_is() -> None:
    """The row of the accelerator reports its steps, not the CPU's."""
    ran = CliRunner().invoke(bighorn, ["doctor"])
    assert ran.exit_code == 0, ran.output
    assert "npu" in ran.output, f"no row of npu: {ran.output}"


@on("no float64")
def test_the_command_line_trains_and_resumes() -> None:
    """`--device` takes any device of torch; a resumed run restores the device's generator."""
    with tempfile.TemporaryDirectory() as folder:
        save, steps = str(Path(folder) / "run.pt"), ["--steps", "6"]
        for arguments in (
            ["train", "--device", "npu", "--optimizer", "came", "--save", save, *steps],
            ["train", "--resume", save],
            ["lr-find", "--device", "npu", "--report", str(Path(folder) / "found.html"), "--steps", "20"],
        ):
            ran = CliRunner().invoke(bighorn, arguments, catch_exceptions=False)
            assert ran.exit_code == 0, ran.output
