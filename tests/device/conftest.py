"""Tests with a `mode`, all of this folder, are called in a process that has the stand-in device in that mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.device import broken, stand_in
from tests.device.child import child


@pytest.fixture(params=stand_in.MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Each mode of the stand-in in turn."""
    found: str = request.param
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test where the device is."""
    if "mode" not in pyfuncitem.funcargs:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        child(pyfuncitem.funcargs["mode"]).call(pyfuncitem.obj, arguments)
    except pytest.fail.Exception as failure:
        row = broken.row_of(pyfuncitem.nodeid)
        if row is not None and re.search(row.says, str(failure)):
            raise broken.KnownError(str(failure)) from None
        raise
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what fails today."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            row = broken.row_of(item.nodeid)
            if row is not None:
                reason = f"{row.place}: {row.wrong}"
                item.add_marker(pytest.mark.xfail(reason=reason, raises=broken.KnownError, strict=True))
