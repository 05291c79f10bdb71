"""The entry point of ``bighorn``, which imports nothing slow, so that the help appears at once."""

import sys
import time
from importlib.util import find_spec

from bighorn_workbench.interrupts import begin_imports, stop

PACKAGES = {
    "click": "click",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "rich": "rich",
    "sklearn": "scikit-learn",
}


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
