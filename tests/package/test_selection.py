"""The selection of tests, and `for_every`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support import selection, tables
from tests.support.tables import for_every


def test_a_table_lists_every_row_that_fails() -> None:
    seen = []

    @for_every(("number", "word"), [(1, "a"), (2, "b"), (3, "c")])
    def odd(number: int, word: str, fixture: Any) -> None:
        seen.append((number, word, fixture))
        assert number % 2 == 0
        with pytest.raises(ValueError, match="nothing"):
            pass

    with pytest.raises(AssertionError, match=r"(?s)3 of 3 rows fail.*1, a:.*2, b:.*DID NOT RAISE.*3, c:"):
        odd(fixture=7)
    assert seen == [(1, "a", 7), (2, "b", 7), (3, "c", 7)]


def test_a_row_that_skips_does_not_hide_the_others() -> None:
    @for_every("number", [1, 2, 3])
    def some(number: int, failing: int) -> None:
        if number == 1:
            pytest.skip("no 1 here")
        assert number != failing

    with pytest.raises(AssertionError, match="1 of 3 rows fail"):
        some(failing=3)
    with pytest.raises(pytest.skip.Exception, match="2 of 3 rows pass, without 1: no 1 here"):
        some(failing=0)


class Item:
    """The attributes of a collected test that the selection reads."""

    path = "tests/test_module.py"

    def __init__(self, values: dict[str, Any]) -> None:
        self.nodeid = f"{self.path}::test[{'-'.join(map(str, values.values()))}]"
        self.callspec = type("CallSpec", (), {"params": values})
        self.marks: set[str] = set()

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, name: str) -> None:
        self.marks.add(name)


def test_each_two_values_meet_in_a_test_that_is_not_slow() -> None:
    axes = {"kind": "lc", "backend": "rfc", "move": "abcdef", "when": "xy"}
    items: list[Any] = [Item(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    slow = selection.mark_beyond_pairs(items)
    assert slow == {"tests/test_module.py::test": sum(bool(item.marks) for item in items)}
    kept = [item.callspec.params for item in items if not item.marks]
    assert len(kept) < len(items) / 3
    for first, second in itertools.combinations(axes, 2):
        met = {(values[first], values[second]) for values in kept}
        assert met == set(itertools.product(axes[first], axes[second]))


def test_the_product_of_two_parameters_is_whole() -> None:
    items: list[Any] = [Item({"kind": kind, "backend": backend}) for kind in "lc" for backend in "rfc"]
    selection.mark_beyond_pairs(items)
    assert not any(item.marks for item in items)


def test_a_row_of_a_table_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(tables, "ROW", "tw")

    @tables.for_every("number", [1, 2, 12], ids=["one", "two", "twelve"])
    def test(number: int) -> None:
        ran.append(number)

    test()
    assert ran == [2, 12]
    monkeypatch.setattr(tables, "ROW", "three")
    with pytest.raises(pytest.skip.Exception, match="no row has ROW='three'"):
        tables.for_every("number", [1])(lambda number: None)()  # noqa: ARG005
