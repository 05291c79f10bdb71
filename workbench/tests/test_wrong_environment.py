"""Wrong environment variables end in one message, never in a traceback."""

from __future__ import annotations

import pytest

from workbench.tests.command_line import Invoke

MEETING = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("name", "value", "command"),
    [("BIGHORN_NUM_THREADS", "abc", "train"), ("BIGHORN_NUM_THREADS", "-1", "doctor"), ("BIGHORN_ISA", "x", "memory")],
)
def test_variables_of_bighorn(
    name: str, value: str, command: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    output = invoke(command, code=1).output
    assert output.startswith(f"Error: {name}={value!r} in the environment must be")
    assert "unset it" in output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc' in the environment must be a number of processes"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9999"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment"),
        ({"WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE='' in the environment"),
        (MEETING, "the processes cannot meet: "),
        (MEETING | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"}, "the processes cannot meet: "),
    ],
)
def test_variables_of_torchrun(
    variables: dict[str, str], message: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    output = invoke("train", "--steps", 1, code=1).output
    assert output.startswith(f"Error: {message}")
    assert output.count("\n") == 1
    assert "torchrun" in output


@pytest.mark.parametrize("width", ["", "00"])
def test_a_terminal_of_unknown_width(width: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shells without a terminal set COLUMNS to 0, at which rich printed nothing."""
    monkeypatch.setenv("COLUMNS", width)
    assert "foreach" in invoke("doctor").output
