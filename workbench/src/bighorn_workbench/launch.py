"""The entry point of ``bighorn``: a module without torch, whose import takes seconds.

A Ctrl-C may come meanwhile, and the help needs none of it.
"""

import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

PACKAGES = {
    "click": "click",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "rich": "rich",
    "sklearn": "scikit-learn",
}


def main() -> None:
    """Run the command line, or report the packages that are missing for it.

    A Ctrl-C while a command is imported, which takes a second or more, ends it without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and shells may have it ignored
        signal.signal(signal.SIGINT, _stop)
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        sys.exit(f"bighorn: the command line needs {', '.join(missing)}: pip install {' '.join(missing)}")
    from bighorn_workbench.commands import bighorn

    try:
        bighorn(prog_name="bighorn")
    except KeyboardInterrupt:
        _stop(signal.SIGINT, None)


def end_imports() -> None:
    """Let a Ctrl-C raise KeyboardInterrupt from now on, since a command has been imported."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
    """End the process: an exception could be lost in the imports of C extensions, and there is nothing to save yet."""
    os.write(2, b"Interrupted.\n")
    os._exit(128 + signal.SIGINT)
