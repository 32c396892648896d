"""Ctrl-C and SIGTERM, held back where the state is between two steps, and never lost.

SIGTERM asks a run to end well: after the step at hand, with a checkpoint and status 0.
So does Ctrl-C where there are several processes, which must stop at the same step; a
second one ends the process at once. In one process, Ctrl-C does not wait for the step.
"""

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

    Args:
      is_alone: whether this is the run's only process.

    Attributes:
      was_asked: whether the run is to stop after the step at hand.
      was_interrupted: whether Ctrl-C was what asked.
    """

    def __init__(self, is_alone: bool = True) -> None:
        self._is_alone = is_alone
        self._is_held = False
        self._is_pending = False
        self.was_asked = False
        self.was_interrupted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def hold(self) -> None:
        """Holds interrupts back from now on."""
        self._is_held = True

    def release(self) -> None:
        """Lets interrupts through again.

        Raises:
          KeyboardInterrupt: one came meanwhile, or was dropped earlier.
        """
        self._is_held = False
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.was_asked = True
        elif self._is_alone or self.was_interrupted:
            self._is_pending = True
            if not self._is_held:
                raise KeyboardInterrupt
        else:
            self.was_asked = self.was_interrupted = True
