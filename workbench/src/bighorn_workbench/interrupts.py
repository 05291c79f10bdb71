"""A Ctrl-C during imports, of which torch's takes seconds: it ends the process at once, without a traceback."""

import os
import signal
from types import FrameType


def begin_imports() -> None:
    """Let a Ctrl-C end the process from now on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and shells may have disabled it
        signal.signal(signal.SIGINT, stop)


def end_imports() -> None:
    """Let a Ctrl-C raise KeyboardInterrupt from now on, since a command has been imported."""
    if signal.getsignal(signal.SIGINT) is stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:  # noqa: ARG001 - signal's signature
    """End the process: an exception could be lost in the imports of C extensions, and there is nothing to save yet."""
    os.write(2, b"Interrupted.\n")
    os._exit(128 + signal.SIGINT)
