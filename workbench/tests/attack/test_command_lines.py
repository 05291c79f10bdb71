"""Random command lines exit with status 0, 1 or 2 and print a message. All paths are in one folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bighorn_workbench.commands import COMMANDS, bighorn
from bighorn_workbench.options import FilePath
from tests.support.attack_settings import tries
from workbench.tests.command_line import call
from workbench.tests.test_commands import QUICK

NUMBERS = ("0", "1", "-1", "1.5", "nan", "inf", "-inf", "1e999", "", " ", "x", "0x10", "٣", "1_0", "--lr")
PLACES = (
    "out.json",
    "out.html",
    "new/out.svg",
    "folder",
    "file/under",
    "link",
    "loop",
    "missing.pt",
    "a b\n.png",
    "\udcff.json",
    "",
)
WORDS = ("", "x", ",", "lamb,lamb", "lamb=", "=", "\udcff", "ü" * 300, "-1", "%", "None")
VALUES: Mapping[str, Sequence[str]] = {
    # Valid values that lead to long runs are omitted.
    "--batch-size": ("64", "100", "0", "-1", "9999999999999999999999", "x"),
    "--batch-sizes": ("256", "256,512", "0", "x", "256,256", "1e3", ""),
    "--data": ("file", "folder", "missing", "link", "loop", ""),
    "--epochs": ("0.1", "0", "-1", "nan", "inf", "1e-300", "x"),
    "--model": ("x", "x:y", "torch.nn:Linear", "torch.nn.Linear(3, 4)", "os:getcwd", ""),
    "--optimizer-option": (
        "bias_correction=False",
        "betas=(0.9, 0.99)",
        "betas=1",
        "lr=1",
        "x",
        "x=1",
        "eps=",
        "eps=nan",
    ),
    "--optimizers": ("lamb", "lamb,adamw", "adamw", "lamb,lamb", "x", ","),
    "--processes": ("1", "0", "-1", "x"),
    "--seconds": ("1e-9", "0", "-1", "nan", "inf", "x"),
    "--seed": ("0", "7", "-1", "18446744073709551616", "x"),
    "--seeds": ("1", "0", "-1", "x"),
    "--shapes": ("tiny", "x", "tiny,tiny", "", "resnet"),
    "--space": (
        "adamw.lr=0.1",
        "adamw.lr=0.1,0.2",
        "lamb.lr=1",
        "adamw.lr=nan",
        "adamw.lr=",
        "=1",
        "adamw.x=1",
        "x",
        "",
    ),
    "--steps": ("1", "2", "0", "-1", "nan", "x"),
    "--table": ("x", ""),
    "--task": ("digits", "mnist", "x", ""),
    "--threads": ("1", "2", "0", "-1", "1025", "x"),
    "--trials": ("1", "2", "0", "-1", "x"),
}

PARAMETERS = {
    name: command.params for name in COMMANDS if (command := bighorn.get_command(click.Context(bighorn), name))
}


def values_of(parameter: click.Parameter) -> Sequence[str]:
    """Return valid and invalid values of an option by its name, or else by its type."""
    name = parameter.opts[0]
    if name in VALUES:
        return VALUES[name]
    if isinstance(parameter.type, FilePath):
        return PLACES
    if isinstance(parameter.type, click.Choice):
        return (*parameter.type.choices, "x", "", "LAMB")
    return NUMBERS if parameter.type in (click.INT, click.FLOAT) else (*WORDS, *NUMBERS, "10%", "dynamic")


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(list(COMMANDS)))
    line = [name, *QUICK[name]]
    for parameter in draw(st.lists(st.sampled_from(PARAMETERS[name]), max_size=5)):
        line.append(parameter.opts[0])
        if not (isinstance(parameter, click.Option) and parameter.is_flag):
            line[-1] += "=" + draw(st.sampled_from(values_of(parameter)))
    return line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text\n" * 100)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@tries(100)
@given(line=command_lines())
def test_a_random_command_line(folder: Path, line: list[str]) -> None:
    del folder
    result = call(*line)
    assert result.exit_code in {0, 1, 2}, result.output
    assert "Traceback" not in result.output
    assert result.exit_code == 0 or "Error" in result.output or line[0] == "doctor", result.output
