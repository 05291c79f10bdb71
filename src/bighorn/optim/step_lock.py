"""The lock of an optimizer's step: one thread is in a step at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_forks = 0
"""How often this process and its parents were forked."""


def _after_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class StepLock:
    """A lock that no interrupt, error or fork leaves held.

    A `with` of a lock of threading's own has no place for a KeyboardInterrupt between the lock and its release; a call
    of `acquire`, or a method `__enter__` in Python, has.
    """

    _owner: int | None
    """The thread in the step; without meaning while the lock is free."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._lock, self._owner, self._of = threading.Lock(), None, _forks

    @property
    def held(self) -> bool:
        """Whether a step is running, in any thread of this process."""
        return self._of == _forks and self._lock.locked()

    def run(self, step: Callable[[], T], on_fork: Callable[[], None], *, waits: bool) -> T:
        """Return what a step returns; a step inside a step of the same thread is a part of it.

        Args:
            step: The step.
            on_fork: A function that is called first in a forked process, whose parent may have been in a step.
            waits: Whether to wait for a step of another thread.

        Raises:
            RuntimeError: Another thread is in a step, and `waits` is False.
        """
        if self._of != _forks:
            self._renew()
            on_fork()
        me = threading.get_ident()
        if self._lock.locked():
            if self._owner == me:
                return step()
            if not waits:
                raise RuntimeError(
                    "two threads step one optimizer at once: call step() in one thread, or give each its own optimizer"
                )
        with self._lock:  # and no `try`, before whose first line an interrupt would leave the lock held
            self._owner = me
            return step()
