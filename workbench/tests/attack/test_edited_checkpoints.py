"""Checkpoints that were edited or come from another version resume or end in one message."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bighorn_workbench.checkpoint import digest
from bighorn_workbench.commands import bighorn
from tests.support.attack_settings import SEED, SHARE
from workbench.tests.command_line import Invoke

Keys = tuple[Any, ...]
MISSING = object()
NAMES = ["fifo", "os:abort", "trap.py:Task", "trap:0", "\x1b[2J\udc80"]
WRONG: list[Any] = [None, -1, "text", [1], {"a": 1}, float("nan"), torch.ones(2), 10**400, MISSING]
EVERY = 16 * SHARE
"""A seed tries one of this many places and wrong values."""


def places(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the paths of keys to all values of a checkpoint, a missing key of dicts and the first item of lists."""
    here = [*value, "newer"] if isinstance(value, dict) else range(min(1, len(value)))
    for key in here:
        yield (*keys, key)
        if key != "newer" and isinstance(value[key], dict | list):
            yield from places(value[key], (*keys, key))


def edited(whole: dict[str, Any], keys: Keys, wrongs: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield checkpoints in which the value is missing or wrong, each with a description of the change."""
    for wrong in wrongs:
        checkpoint = copy.deepcopy(whole)
        inner: Any = checkpoint
        for key in keys[:-1]:
            inner = inner[key]
        if wrong is MISSING:
            inner.pop(keys[-1], None) if isinstance(inner, dict) else inner.pop(keys[-1])
        else:
            inner[keys[-1]] = wrong
        yield f"{keys} = {'missing' if wrong is MISSING else repr(wrong)[:20]}", checkpoint


def resume() -> tuple[int, str]:
    """Return the exit code and the output of a run that resumes from run.pt."""
    result = CliRunner().invoke(bighorn, ["train", "--resume", "run.pt", "--save", "out.pt"], prog_name="bighorn")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return -1, repr(result.exception)
    return result.exit_code, result.output


@pytest.mark.filterwarnings("ignore:state_dict has other parameter names")  # state is loaded by position
def test_an_edit_resumes_or_ends_in_one_message(invoke: Invoke) -> None:
    invoke("train", "--steps", 2, "--threads", 1, "--precision", "fp16", "--save", "run.pt")
    whole = torch.load("run.pt", weights_only=True)
    before, wrong, refused = Path("run.pt").read_bytes(), {}, 0
    for turn, keys in enumerate(places(whole)):
        for name, checkpoint in edited(whole, keys, WRONG[(turn + SEED) % EVERY :: EVERY]):
            torch.save(checkpoint, "run.pt")
            code, output = resume()
            refused += code == 1
            one_message = output.startswith("Error: ") and output.count("\n") == 1
            if code not in {0, 1} or (code == 1 and not one_message):
                wrong[name] = output
    assert wrong == {}
    assert refused > 900 / EVERY
    Path("run.pt").write_bytes(before)
    assert resume()[0] == 0


@pytest.mark.filterwarnings("ignore:state_dict has other parameter names")  # state is loaded by position
def test_an_edit_that_is_signed_resumes_or_ends_in_one_message(invoke: Invoke) -> None:
    """The digest has no key. A text also becomes some of the names."""
    invoke("train", "--steps", 2, "--threads", 1, "--precision", "fp16", "--save", "run.pt")
    whole = torch.load("run.pt", weights_only=True)
    os.mkfifo("fifo")
    Path("trap.py").write_text("open('was-here', 'w')")
    wrong, tried = {}, 0
    for turn, keys in enumerate(places(whole)):
        names = NAMES[(turn + SEED) % SHARE :: SHARE] if isinstance(functools.reduce(_item, keys, whole), str) else []
        for name, checkpoint in edited(whole, keys, [*WRONG[(turn + SEED) % EVERY :: EVERY], *names]):
            torch.save({**checkpoint, "digest": digest(checkpoint)}, "run.pt")
            code, output = resume()
            tried += 1
            one_message = output.startswith("Error: ") and output.count("\n") == 1
            if code not in {0, 1} or (code == 1 and not one_message) or "\x1b" in output:
                wrong[name] = output
    assert wrong == {}
    assert tried > 900 / EVERY
    assert not Path("was-here").exists()


def _item(value: Any, key: Any) -> Any:
    return MISSING if key == "newer" else value[key]
