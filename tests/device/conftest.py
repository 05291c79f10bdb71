"""Tests with a `mode`, all of this folder, are called in a process that has the stand-in device in that mode."""

from __future__ import annotations

import pytest

from tests.device import stand_in
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
    child(pyfuncitem.funcargs["mode"]).call(pyfuncitem.obj, arguments)
    return True
