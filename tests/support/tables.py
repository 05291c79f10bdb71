"""Tables of quick rows: one test runs all of them, and lists every row that fails.

``ROW=text pytest tests/...`` runs the rows alone whose label has this text.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import pytest
import torch

Test: TypeAlias = Callable[..., None]

ROW = os.environ.get("ROW", "")
"""A part of the labels of the rows that run."""


def for_every(
    names: str | Sequence[str], rows: Iterable[Any], ids: Iterable[str] | Callable[[Any], object] | None = None
) -> Callable[[Test], Test]:
    """Return a decorator like `pytest.mark.parametrize` that runs all rows in one test.

    Rows share the fixtures of the test. If rows skip, the others still run, and the test skips with the reasons.
    """
    named = (names,) if isinstance(names, str) else tuple(names)
    given = iter(ids) if isinstance(ids, Iterable) else None
    table: list[tuple[str, dict[str, Any]]] = []
    for row in rows:
        param = row if hasattr(row, "marks") else pytest.param(*([row] if isinstance(names, str) else row))
        assert not param.marks, "a row has no marks of its own"
        shown = param.id or ", ".join(str(ids(value) if callable(ids) else value) for value in param.values)
        label = next(given) if given else str(shown)
        table.append((label, dict(zip(named, param.values, strict=True))))
    assert table
    chosen = [row for row in table if ROW in row[0]]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def all_rows(**fixtures: Any) -> None:
            failures, skips = [], []
            if not chosen:
                pytest.skip(f"no row has ROW={ROW!r}")
            for label, values in chosen:
                torch.default_generator.manual_seed(0)
                try:
                    test(**values, **fixtures)
                except pytest.skip.Exception as skip:
                    skips.append(f"{label}: {skip.msg}")
                except (Exception, pytest.fail.Exception):
                    failures.append(f"{label}:\n{traceback.format_exc()}")
            assert not failures, f"{len(failures)} of {len(chosen)} rows fail\n" + "\n".join(failures)
            if skips:
                pytest.skip(f"{len(chosen) - len(skips)} of {len(chosen)} rows pass, without {'; '.join(skips)}")

        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in named]
        assert len(rest) + len(named) == len(signature.parameters), named
        assert "monkeypatch" not in signature.parameters, "a row would have what the rows before it have patched"
        all_rows.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return all_rows

    return decorate
