"""The command line: ``bighorn train``, ``bighorn compare`` and the other commands of :mod:`bighorn.cli.commands`.

The extra ``bighorn[cli]`` has the packages that it needs beyond torch; the library itself imports none of them.
"""

import sys
from importlib.util import find_spec

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
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        sys.exit(f"bighorn: the command line needs {', '.join(missing)}. Install it with: pip install 'bighorn[cli]'")
    from bighorn.cli.commands import bighorn

    bighorn(prog_name="bighorn")
