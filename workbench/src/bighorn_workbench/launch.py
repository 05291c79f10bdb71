"""The entry point of ``bighorn``, which imports nothing slow, so that the help appears at once."""

import sys
import time
from importlib.util import find_spec

from bighorn_workbench.interrupts import begin_imports, stop

PACKAGES = {name: name for name in ("click", "jinja2", "matplotlib", "numpy", "rich")} | {"sklearn": "scikit-learn"}
"""The packages that the command line needs, by the names of their modules."""


def main() -> None:
    """Run the command line, or report the packages that are missing for it."""
    started = time.time()
    begin_imports()
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        sys.exit(f"bighorn: the command line needs {', '.join(missing)}: pip install {' '.join(missing)}")
    from bighorn_workbench.commands import bighorn

    try:
        bighorn(prog_name="bighorn", obj=started)
    except KeyboardInterrupt:
        stop()
