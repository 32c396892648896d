"""Timing of work that runs asynchronously."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_LONG_S = 0.02  # so much longer than what starting and waiting take
_MOST_CALLS = 50


def seconds(call: Callable[[], Any]) -> float:
    """Returns how long a call takes until its arrays are there."""
    began_s = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began_s


def rounds(
    calls: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, list[float]]:
    """Times calls in turn, A B A B, so that all see the same machine.

    On a GPU each is called so often in a row that the device is busy for 20 ms, and
    waited for once: what is timed is then the device, not the launch. A CPU would run
    such calls beside each other.

    Args:
      calls: start work and return arrays. Their first call, which warms up, and their
        second, which says how often is enough, do not count.
      repeats: rounds.

    Returns:
      The seconds of one call in each round.
    """
    long_s = 0.0 if jax.default_backend() == "cpu" else _LONG_S
    counts = {}
    for name, call in calls.items():
        seconds(call)
        counts[name] = min(_MOST_CALLS, 1 + int(long_s / seconds(call)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(repeats), calls.items()):
        count = counts[name]
        taken_s = seconds(lambda call=call, count=count: _last(call, count))
        found[name].append(taken_s / count)
    return found


def ratio(over: list[float], of: list[float]) -> float:
    """Returns the median of the ratios within the rounds."""
    return statistics.median(a / b for a, b in zip(over, of, strict=True))


def _last(call: Callable[[], Any], count: int) -> Any:
    for _ in range(count - 1):
        call()
    return call()
