"""Runs the steps of all pipelines of this process to their end, in one thread."""

import time
from collections.abc import Sequence

from absl import logging

from rrfp_jax.errors import StallError
from rrfp_jax.runtime.executor import Executor
from rrfp_jax.runtime.wire import Wire


def drive(executors: Sequence[Executor]) -> None:
    """Runs steps until every task of this process has finished.

    Args:
      executors: one for each pipeline that this process has a part in. Their processes
        may differ, the mail they come by is one.

    Raises:
      StallError: tasks remain, nothing is running or in transit, and there is no other
        process that something could come from. (Where there are some, whether all of
        them are stuck is for `coordination.heartbeat` to say.)
      PeerLost, RemoteError: the run has ended elsewhere.
    """
    for executor in executors:
        executor.start()
    wires = [each.wire for each in executors if each.wire is not None]
    if wires:
        _drive_with_others(executors, wires[0])
    else:
        _drive_alone(executors)


def _drive_alone(executors: Sequence[Executor]) -> None:
    while not _are_done(executors):
        if _advance(executors):
            continue
        if all(executor.is_idle() for executor in executors):
            raise StallError(_explain(executors))
        time.sleep(min(executor.pause_s() for executor in executors))


def _drive_with_others(executors: Sequence[Executor], wire: Wire) -> None:
    fed_s = time.monotonic()  # when something happened last
    has_barked = is_resting = False
    while not _are_done(executors):
        wire.desk.poll()
        if _advance(executors):
            wire.progress(False)
            fed_s, has_barked, is_resting = time.monotonic(), False, False
            continue
        if not is_resting and all(executor.is_idle() for executor in executors):
            is_resting = True
            wire.progress(True)  # once: it is no progress that nothing happens
        if not has_barked and time.monotonic() - fed_s > wire.watchdog_s:
            has_barked = True
            logging.warning(
                "nothing has happened here for %.0f s:\n%s",
                wire.watchdog_s,
                _explain(executors),
            )
        wire.desk.sleep(min(executor.pause_s() for executor in executors))


def _are_done(executors: Sequence[Executor]) -> bool:
    return all(executor.is_done for executor in executors)


def _advance(executors: Sequence[Executor]) -> bool:
    had_news = [executor.advance() for executor in executors]  # each gets its turn
    return any(had_news)


def _explain(executors: Sequence[Executor]) -> str:
    return "\n".join(executor.explain() for executor in executors)
