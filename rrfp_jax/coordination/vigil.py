"""What a process does while it waits for others: it says so, once, and what for."""

import time
from collections.abc import Callable

from absl import logging


class Vigil:
    """One wait, or a loop in which something happens now and then.

    Args:
      progress: is told that something has happened (False), or that nothing runs here.
      watchdog_s: after so long without anything, the log says what is waited for.
      explain: says it, as the rest of a sentence.
    """

    def __init__(
        self,
        progress: Callable[[bool], None],
        watchdog_s: float,
        explain: Callable[[], str],
    ) -> None:
        self._progress = progress
        self._watchdog_s = watchdog_s
        self._explain = explain
        self._is_resting = self._has_barked = False
        self._fed_s = time.monotonic()  # when something happened last

    def has_news(self) -> None:
        """Learns that something has happened."""
        self._progress(False)
        self._is_resting = self._has_barked = False
        self._fed_s = time.monotonic()

    def waits(self, is_idle: bool) -> None:
        """Learns that nothing has happened.

        Args:
          is_idle: whether nothing runs or moves here either.
        """
        if is_idle and not self._is_resting:
            self._is_resting = True
            self._progress(True)  # once: it is no progress that nothing happens
        if not self._has_barked and time.monotonic() - self._fed_s > self._watchdog_s:
            self._has_barked = True
            logging.warning(
                "nothing has happened here for %.0f s: %s",
                self._watchdog_s,
                self._explain(),
            )
