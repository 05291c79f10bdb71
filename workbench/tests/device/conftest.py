"""Calls tests of the stand-in device in a process that has registered it."""

from tests.device.conftest import device, pytest_pyfunc_call

__all__ = ["device", "pytest_pyfunc_call"]
