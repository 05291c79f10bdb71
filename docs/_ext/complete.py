"""A public name that the API reference leaves out, or that has no docstring, is a warning, and so fails the build."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from bighorn import compat

logger = logging.getLogger(__name__)


def public() -> Iterator[tuple[str, object]]:
    """Every name in an `__all__` that users import from: the package, its public modules and the faces."""
    faces = [f"bighorn.compat.{found.name}" for found in pkgutil.iter_modules(compat.__path__) if found.name[0] != "_"]
    for module in map(importlib.import_module, ["bighorn", *faces]):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                yield from ((f"{thing.__name__}.{inner}", getattr(thing, inner)) for inner in thing.__all__)
            elif name != "__version__":
                yield f"{module.__name__}.{name}", thing


def check(app: Sphinx, env: BuildEnvironment) -> None:
    del app
    documented = env.domains.python_domain.objects
    for name, thing in public():
        if name not in documented:
            logger.warning("the public name %s is missing in the API reference", name, location="api")
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not (inspect.getdoc(thing) or "").strip():
            logger.warning("the public name %s has no docstring", name, location="api")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
