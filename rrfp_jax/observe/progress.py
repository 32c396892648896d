"""Progress of long work: a bar on a terminal, a log line now and then elsewhere.

    with progress(total=1000, description="train", unit="step") as steps:
        for ...:
            steps.advance({"loss": 2.31, "tokens/s": 51_200, "bubble": 0.12})

A log file, a SLURM job or a pipe gets whole lines and no control characters.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import tqdm
from absl import logging


class Progress(Protocol):
    """Is told what was done."""

    def advance(
        self, figures: Mapping[str, float | str] | None = None, count: int = 1
    ) -> None:
        """Adds `count` units; shows `figures`, or the former ones if None."""
        ...


@contextlib.contextmanager
def progress(
    total: int,
    description: str,
    unit: str,
    *,
    initial: int = 0,
    every_s: float = 10.0,
    is_terminal: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Shows the progress of a block of work.

    Args:
      total: units in all.
      description: of the work, such as "compile".
      unit: what one is called, such as "program".
      initial: units done before, by a run that is resumed.
      every_s: least seconds between log lines; the last line always comes.
      is_terminal: whether to draw a bar; by default, whether stderr is a terminal.
      clock: tells seconds, for the log lines.
    """
    if sys.stderr.isatty() if is_terminal is None else is_terminal:
        with tqdm.tqdm(
            total=total,
            desc=description,
            unit=unit,
            initial=initial,
            dynamic_ncols=True,
        ) as bar:
            yield _Bar(bar)
        return
    lines = _Lines(total, description, unit, initial, every_s, clock)
    try:
        yield lines
    finally:
        lines.finish()


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(
        self, figures: Mapping[str, float | str] | None = None, count: int = 1
    ) -> None:
        """Redraws the bar, as often as tqdm thinks fit."""
        if figures is not None:
            self._bar.set_postfix_str(_words(figures), refresh=False)
        self._bar.update(count)


class _Lines:
    def __init__(
        self,
        total: int,
        description: str,
        unit: str,
        initial: int,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._total, self._description, self._unit = total, description, unit
        self._initial = self._done = initial
        self._every_s, self._clock = every_s, clock
        self._began_s = self._logged_s = clock()
        self._logged = initial  # what the last line said
        self._figures: Mapping[str, float | str] = {}

    def advance(
        self, figures: Mapping[str, float | str] | None = None, count: int = 1
    ) -> None:
        """Logs a line if the last one is old enough."""
        self._done += count
        if figures is not None:
            self._figures = figures
        if self._clock() - self._logged_s >= self._every_s:
            self._log()

    def finish(self) -> None:
        """Logs the last line, unless it is there already."""
        if self._logged != self._done:
            self._log()

    def _log(self) -> None:
        self._logged, self._logged_s = self._done, self._clock()
        seconds = self._logged_s - self._began_s
        made = self._done - self._initial
        pace = f", {seconds / made:.3g} s/{self._unit}" if made else ""
        figures = f"; {_words(self._figures)}" if self._figures else ""
        logging.info(
            "%s: %d/%d %s%s%s",
            self._description,
            self._done,
            self._total,
            self._unit,
            pace,
            figures,
        )


def _words(figures: Mapping[str, float | str]) -> str:
    """Returns `loss=2.312, tokens/s=51200`: four digits, integers whole."""
    return ", ".join(f"{name}={_word(value)}" for name, value in figures.items())


def _word(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
