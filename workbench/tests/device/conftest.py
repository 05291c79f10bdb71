"""Tests with a `mode` are called in a process that has the stand-in device of tests/device."""

from tests.device.conftest import mode, pytest_pyfunc_call

__all__ = ["mode", "pytest_pyfunc_call"]
