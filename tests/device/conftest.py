"""Calls tests of the stand-in device in a process that has registered it."""

from __future__ import annotations

import pytest

from tests.device.devices import DEVICES, Device, begin
from tests.support.ranks import call_on_ranks


@pytest.fixture(params=DEVICES.values())
def device(request: pytest.FixtureRequest) -> Device:
    """Each device in turn; one that is absent is skipped with the reason."""
    found: Device = request.param
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test in the process of its device."""
    device = pyfuncitem.funcargs.get("device")
    if not isinstance(device, Device) or not device.is_stand_in:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    call_on_ranks(pyfuncitem.obj, arguments, 1, (begin, device.name))
    return True
