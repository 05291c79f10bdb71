"""The command line: ``bighorn train``, ``bighorn compare`` and what else :mod:`bighorn.cli.commands` lists.

Everything it needs beyond torch is in the extra ``bighorn[cli]``; the library itself imports none of it.
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
    """Run the command line, or say what to install for it."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        sys.exit(f"bighorn: the command line needs {', '.join(missing)}. Install it with: pip install 'bighorn[cli]'")
    from bighorn.cli.commands import bighorn

    bighorn(prog_name="bighorn")
