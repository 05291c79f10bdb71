"""Tests with a `device` that the stand-in is are called in a process that has it."""

from tests.device.conftest import device, pytest_pyfunc_call

__all__ = ["device", "pytest_pyfunc_call"]
