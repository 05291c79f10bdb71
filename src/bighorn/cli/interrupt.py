"""Ctrl-C at a place where it does no harm."""

import signal
from types import FrameType, TracebackType


class Interrupt:
    """Within its ``with`` block, a first Ctrl-C only sets :attr:`requested`; a second one aborts.

    SIGTERM counts as a first one, however often it comes: torchrun sends it after passing a Ctrl-C on.

    An interrupt inside an optimizer's step would leave half of the parameters updated.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's signature
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
