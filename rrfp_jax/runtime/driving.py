"""Runs the steps of all pipelines of this process to their end, in one thread.

The cyclic garbage collector waits meanwhile. A full collection walks everything that
JAX has traced and compiled, which was seen to take 80 to 130 ms: in the middle of a
step all ranks of the process stand still for that long, and others wait for them.
"""

import time
from collections.abc import Sequence

from rrfp_jax.errors import StallError
from rrfp_jax.runtime.executor import Executor
from rrfp_jax.runtime.wire import Wire
from rrfp_jax.sim.simulator import without_cycle_collection


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
    wires = [each.wire for each in executors if each.wire is not None]
    with without_cycle_collection():
        for executor in executors:
            executor.start()
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
    vigil = wire.desk.vigil(lambda: f"\n{_explain(executors)}")
    while not _are_done(executors):
        wire.desk.poll()
        if _advance(executors):
            vigil.has_news()
            continue
        vigil.waits(all(executor.is_idle() for executor in executors))
        wire.desk.sleep(min(executor.pause_s() for executor in executors))


def _are_done(executors: Sequence[Executor]) -> bool:
    return all(executor.is_done for executor in executors)


def _advance(executors: Sequence[Executor]) -> bool:
    had_news = [executor.advance() for executor in executors]  # each gets its turn
    return any(had_news)


def _explain(executors: Sequence[Executor]) -> str:
    return "\n".join(executor.explain() for executor in executors)
