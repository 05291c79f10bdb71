"""The console script ``bighorn``: a package of its own, since a Ctrl-C may come while ``bighorn`` imports torch."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line; a Ctrl-C before it runs, which takes a second or more, ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and shells may have it ignored
        signal.signal(signal.SIGINT, _stop)
    from bighorn.cli import main as command_line

    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command_line()
    except KeyboardInterrupt:
        _stop(signal.SIGINT, None)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
    """End the process: an exception could be lost in the imports of C extensions, and there is nothing to save yet."""
    os.write(2, b"Interrupted.\n")
    os._exit(128 + signal.SIGINT)
