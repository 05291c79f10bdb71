"""Wrong environment variables and numbers out of range end in one message, never in a traceback."""

from __future__ import annotations

import pytest

from workbench.tests.command_line import Invoke


@pytest.mark.parametrize(
    ("name", "value"),
    [("BIGHORN_NUM_THREADS", "abc"), ("BIGHORN_NUM_THREADS", "-1"), ("BIGHORN_ISA", "x")],
)
@pytest.mark.parametrize("command", ["train", "doctor", "memory"])
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
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "the processes cannot meet: "),
        (
            {
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "abc",
            },
            "the processes cannot meet: ",
        ),
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


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--lr", "1e308"],
        ["train", "--lr", "1e39"],
        ["train", "--lr", "3e38", "--lr-scaling", "linear", "--batch-size", "512"],
        ["train", "--weight-decay", "1e308"],
        ["lr-find", "--lr-max", "1e308"],
        ["lr-find", "--lr-max", "1e30", "--lr-min", "1e-300"],
    ],
)
def test_numbers_that_no_float32_holds(words: list[str], invoke: Invoke) -> None:
    output = invoke(*words, code=1).output
    assert output.startswith(f"Error: {words[1]}")
    assert "3.4e+38" in output


@pytest.mark.parametrize("width", ["", "0", "00"])
def test_a_terminal_of_unknown_width(width: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shells without a terminal set COLUMNS to 0, at which rich printed nothing."""
    monkeypatch.setenv("COLUMNS", width)
    assert "foreach" in invoke("doctor").output
