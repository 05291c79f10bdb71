"""Ctrl-C at a place where it does no harm."""

import signal
import time
from types import FrameType, TracebackType

ECHO = 5.0
"""Seconds after a Ctrl-C in which torchrun passes it on to processes that have it from the terminal already."""


class Interrupt:
    """Within its ``with`` block, a first Ctrl-C only sets :attr:`requested`; a second one aborts.

    SIGTERM counts as a first one, however often it comes: torchrun sends it after passing a Ctrl-C on.

    An interrupt inside an optimizer's step would leave half of the parameters updated.

    Args:
        echoes: Whether torchrun has started the process.
    """

    def __init__(self, echoes: bool = False) -> None:
        self.requested = False
        self._echo = ECHO if echoes else 0.0
        self._since = 0.0

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.requested and self._echo:
            return  # the echo may still come, while what is left is to save and to say how to go on
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's signature
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif number == signal.SIGINT and now - self._since >= self._echo:
            raise KeyboardInterrupt
