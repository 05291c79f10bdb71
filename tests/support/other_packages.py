"""Imports of modules whose package has an `__init__` with dependencies that cannot be installed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def bare_packages(install: str, *names: str) -> Iterator[Any]:
    """Yield a function that imports modules of packages without their `__init__`.

    All modules of the packages leave `sys.modules` afterwards. Skip the test if a package is not installed.
    """
    root = names[0].partition(".")[0]
    spec = find_spec(root)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{root} is not installed: {install}")
    folders = list(spec.submodule_search_locations)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == root}
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")[1:])) for folder in folders]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    try:
        yield import_module
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == root]:
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def timm_optim() -> Iterator[Any]:
    """Yield timm.optim with our names in its registry, without the rest of timm."""
    with bare_packages("pip install --no-deps timm", "timm") as load:
        models: Any = ModuleType("timm.models")
        models.group_parameters = models.group_with_matcher = None
        sys.modules["timm.models"] = models
        sys.modules.pop("bighorn.integrations.timm", None)
        load("bighorn.integrations.timm")
        yield load("timm.optim")
        sys.modules.pop("bighorn.integrations.timm")
