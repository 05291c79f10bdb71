"""Properties of every command: an example that parses, JSON, exit codes and completion."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from bighorn_workbench import doctor
from bighorn_workbench.commands import COMMANDS
from bighorn_workbench.commands import bighorn as group
from bighorn_workbench.options import SECTIONS
from workbench.tests.command_line import Invoke

QUICK = {
    "train": ["--steps=1", "--threads=1"],
    "compare": [
        *("--epochs=0.5", "--seeds=1", "--batch-sizes=256", "--processes=1"),
        *("--optimizers=adamw", "--trials=1", "--space=adamw.lr=0.01"),
    ],
    "lr-find": ["--steps=20", "--threads=1"],
    "bench": ["--shapes=tiny", "--optimizers=lamb", "--seconds=1e-9", "--threads=1"],
    "memory": [],
    "doctor": [],
}
"""Arguments of a short run; later ones override them."""


def command(name: str) -> click.Command:
    found = group.get_command(click.Context(group), name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example_that_parses(invoke: Invoke, name: str) -> None:
    example = command(name).epilog or ""
    said = " ".join(invoke(name, "--help").output.split())
    assert said.endswith(" ".join(example.split()))
    words = shlex.split(example)
    assert words[:3] == ["Example:", "bighorn", name]
    command(name).make_context(name, words[3:])


def test_a_help_that_cannot_be_written_ends_in_one_message(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(group, "get_help", full)
    assert invoke("--help", code=1).output == "Error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_writes_json_and_exits_with_0(invoke: Invoke, name: str) -> None:
    invoke(name, *QUICK[name], "--json", "out/found.json")
    found = json.loads(Path("out/found.json").read_text())
    assert found
    if name == "memory":
        assert "hidden2.weight" in [layer["name"] for layer in found["layers"]], "it is for digits without a word"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_that_cannot_be_written_is_1_and_a_wrong_option_2(invoke: Invoke, name: str) -> None:
    Path("file").touch()
    output = invoke(name, *QUICK[name], "--json", "file/found.json", code=1).output
    assert (
        "--json file/found.json cannot be written" in output or "File exists" in output or "Not a directory" in output
    )
    assert "No such option" in invoke(name, "--no-such-option", code=2).output


@pytest.mark.parametrize(
    ("name", "flag"), [("compare", "--optimizers"), ("compare", "--batch-sizes"), ("bench", "--shapes")]
)
def test_a_second_list_is_refused(name: str, flag: str, invoke: Invoke) -> None:
    """Click alone would ignore the first."""
    assert (
        f"{flag} is given 2 times. Give it once: {flag} A or A,B."
        in invoke(name, flag, "1", f"{flag}=2", code=2).output
    )


@pytest.mark.parametrize(
    ("name", "words", "flag"),
    [
        ("train", ("--lr", "1", "--lr=2"), "--lr"),
        ("train", ("--report", "a.html", "--report", "b.html"), "--report"),
        ("compare", ("--study", "a", "--study", "b"), "--study"),
        ("memory", ("--shapes", "one", "--precision", "bf16", "--precision", "fp32"), "--precision"),
        ("lr-find", ("--task", "text", "--task", "digits"), "--task"),
    ],
)
def test_a_second_value_is_refused(name: str, words: tuple[str, ...], flag: str, invoke: Invoke) -> None:
    assert f"{flag} is given 2 times. Give it once: {flag} A." in invoke(name, *words, code=2).output


def test_options_with_several_values_and_flags_are_no_second_value(invoke: Invoke) -> None:
    words = [
        "--optimizer-option",
        "trust_clip=True",
        "--optimizer-option",
        "--lr=3",
        "--tail-overlap",
        "--tail-overlap",
    ]
    assert "given 2 times" not in invoke("train", "--steps", 1, *words, code=1).output


def test_an_interrupt_is_130(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "findings", interrupted)
    assert "Interrupted." in invoke("doctor", code=130).output


def completions(*words: str) -> list[str]:
    shell = BashComplete(group, {}, "bighorn", "_BIGHORN_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_the_shell_completes_commands_options_and_values() -> None:
    assert completions("") == list(COMMANDS)
    assert completions("l") == ["lr-find"]
    assert "--optimizer" in completions("train", "--opt")
    assert completions("train", "--task", "t") == ["text"]
    assert completions("no-such-command", "--") == ["--version", "--help"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_headings_and_every_option_below_one(invoke: Invoke, name: str) -> None:
    text = invoke(name, "--help").output
    found = [f"{heading}:" for heading in SECTIONS if f"\n{heading}:\n" in text]
    assert len(found) > (0 if name == "doctor" else 2)
    other = text.partition("\nOther:\n")[2]
    for param in command(name).params:
        flag = param.opts[0]
        assert text.count(f"  {flag}") >= 1
        listed = any(param.name in names.split() for names in SECTIONS.values())
        assert listed or f"  {flag}" in other


def test_every_name_under_a_heading_is_an_option() -> None:
    known = {param.name for name in COMMANDS for param in command(name).params}
    assert {name for names in SECTIONS.values() for name in names.split()} <= known


def test_the_summaries_are_whole_in_80_columns(invoke: Invoke) -> None:
    assert "version" in invoke("--version").output
    output = invoke("--help").output
    width = max(map(len, COMMANDS))
    for name in COMMANDS:
        summary = command(name).get_short_help_str(80 - width - 6)
        assert summary == COMMANDS[name], "the table has the first line of the command's help"
        assert f"  {name:{width}}  {summary}\n" in output
