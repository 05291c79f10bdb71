"""Differences between the versions of Triton that the tests support, 3.3 to 3.9."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import triton
from triton.runtime import JITFunction, driver

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
"""ptxas and its companions in the wheel; `triton.knobs` names them from 3.4 on."""


def use_driver(replacement: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the active driver; `active` is a plain attribute before 3.5, and a property of `_active` since."""
    monkeypatch.setattr(driver, "_active" if VERSION >= (3, 5) else "active", replacement)


def on_compilation(hook: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a hook after each compilation; `triton.knobs` exists from 3.4 on."""
    if VERSION >= (3, 4):
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    else:
        monkeypatch.setattr(JITFunction, "compiled_hook", hook)


def loaded_binary() -> tuple[int, ...]:
    """Return the value of a driver's `load_binary`: module, function, registers, spills and, from 3.4 on, threads."""
    return (1, 1, 32, 0, 1024) if VERSION >= (3, 4) else (1, 1, 32, 0)


def missing(backend: str) -> str | None:
    """Return why this Triton cannot compile for a backend, or None."""
    if backend != "hip" or VERSION >= (3, 5):  # from 3.5 on the wheel links code for AMD
        return None
    from triton.backends.amd.compiler import HIPBackend

    try:
        HIPBackend.path_to_rocm_lld()
    except Exception as error:
        return str(error)
    return None
