"""mypy and pyright refuse misspelt options and values before a program runs, and accept correct ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from bighorn import CAME_PRESETS, LARS_PRESETS, PRESETS
from bighorn._optim.presets import CamePreset, LambPreset, LarsPreset
from bighorn._optim.state import MOMENT_DTYPES, StateDtype
from tests.support.processes import LIMIT

ROOT = Path(__file__).parents[2]
HEAD = "import torch\nfrom bighorn import Came, Lamb, Lars\nparams = torch.nn.Linear(4, 2).parameters()\n"
REFUSED = (
    "Lamb(params, weight_deacy=1)",
    "Came(params, lr=0.1, weight_deacy=1)",
    'Lamb.like("timn", params)',
    'Came.like("sanna", params, lr=0.1)',
    'Lamb(params, state_dtype="float16")',
    'Came(params, lr=0.1, state_dtype="int2")',
    'Lamb(params, decay_mode="coupled")',
    'Lamb(params, weight_rounding="up")',
    'Came(params, lr=0.1, factor="last")',
    'Lamb(params, lr="0.1")',
    'Lars.like("timn", params)',
    'Lars(params, denominator="both")',
)
ACCEPTED = (
    "Lamb(params, 0.1, weight_decay=1)",
    'Lamb.like("timm", params, lr=0.1)',
    'Came.like("sana", params, lr=0.1)',
    'Lars.like("byol", params, lr=0.1, nesterov=True)',
    'Lamb(params, state_dtype="int8", weight_rounding="kahan")',
    "Came(params, lr=0.1, state_dtype=torch.bfloat16)",
    'Came(params, lr=0.1, state_dtype="float16")',
    "options: dict[str, object] = {}",
)


CHECKERS = {
    "mypy": ["--strict", "--config-file", "pyproject.toml"],
    "basedpyright": ["--project", "{folder}", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_refuses_what_the_constructors_refuse(checker: str, tmp_path: Path) -> None:
    """Basedpyright is pyright with its Node.js in a wheel."""
    pytest.importorskip(checker)
    path = tmp_path / "program.py"
    path.write_text(HEAD + "\n".join((*REFUSED, *ACCEPTED)) + "\n")
    # torch has partial annotations, which only the strict mode of pyright reports.
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    options = [option.format(folder=tmp_path) for option in CHECKERS[checker]]
    files = [str(path)] if checker == "mypy" else []
    command = [sys.executable, "-m", checker, *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    lines = {int(number) for number in re.findall(r"program\.py:(\d+)(?::\d+ -)?:? error", done.stdout)}
    first = HEAD.count("\n") + 1
    assert lines == set(range(first, first + len(REFUSED))), done.stdout + done.stderr


def test_the_types_have_the_names_of_the_tables() -> None:
    for presets, names in ((PRESETS, LambPreset), (CAME_PRESETS, CamePreset), (LARS_PRESETS, LarsPreset)):
        assert list(get_args(names)) == [word for preset in presets for word in (preset.name, *preset.aliases)]
    assert {*get_args(StateDtype), "float16"} == MOMENT_DTYPES.keys()
