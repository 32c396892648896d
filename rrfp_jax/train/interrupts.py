"""Ctrl-C, held back where the state is between two steps, and never lost."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupts:
    """Turns SIGINT into KeyboardInterrupt, but not in the middle of an update.

    An update uses up the old parameters stage by stage, so an interrupt waits until it
    is done and reported. And Python drops exceptions that are raised inside callbacks
    of its garbage collector (JAX has one): what was dropped is raised by the next
    `release`.

    A context manager; outside the main thread, which gets no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._was_interrupted = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def hold(self) -> None:
        """Holds interrupts back from now on."""
        self._is_held = True

    def release(self) -> None:
        """Lets interrupts through again.

        Raises:
          KeyboardInterrupt: one came meanwhile, or was dropped earlier.
        """
        self._is_held = False
        if self._was_interrupted:
            self._was_interrupted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._was_interrupted = True
        if not self._is_held:
            raise KeyboardInterrupt
