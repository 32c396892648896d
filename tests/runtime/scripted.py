"""Devices that finish and deliver in an order that the test chooses, without time.

`Scripted` takes the place of the runtime's devices: of all that is under way, `choose`
picks what happens next. `VirtualTime` takes the place of the module `time`, so that
emulated devices run on a clock that only sleeping moves, as exactly as the simulator.
"""

import random

from rrfp_jax.core.events import Arrived, Finished
from rrfp_jax.core.trace import Span, Told, Trace, Transfer


class Scripted:
    """Delivers one event a poll, the one that `choose` picks among those possible.

    A rank finishes its launches in order; payloads arrive in any order, also before
    their source is reported as finished. Times count events.
    """

    def __init__(self, graph, choose):
        self.trace = Trace(graph)
        self._choose = choose
        self._running = [[] for _ in range(graph.num_ranks)]
        self._in_transit = []
        self._now = 0

    def launched(self, task, flag):
        del flag
        rank = self.trace.graph.rank_of(task)
        self._running[rank].append(task)
        self.trace.spans.append(Span(task, rank, self._now, self._now + 1))

    def sent(self, message):
        self._in_transit.append(message)
        self.trace.transfers.append(Transfer(*message, self._now, self._now + 1))

    def poll(self):
        heads = [Finished(running[0]) for running in self._running if running]
        events = heads + [Arrived(*message) for message in self._in_transit]
        if not events:
            return []
        self._now += 1
        event = self._choose(events)
        graph = self.trace.graph
        if isinstance(event, Finished):
            rank = graph.rank_of(event.task)
            self._running[rank].remove(event.task)
        else:
            rank = graph.placement[event.to]
            self._in_transit = [m for m in self._in_transit if tuple(m) != event]
        return [Told(float(self._now), rank, event)]

    def pause_s(self):
        return 0.0

    def now_s(self):
        return float(self._now)

    def is_idle(self):
        return not any(self._running) and not self._in_transit


def at_random(seed):
    """Chooses at random, with a preference drawn for each kind of event.

    The preferences are skewed, so some ranks and edges are starved for long.
    """
    draw = random.Random(seed)
    weights = {}

    def weight(event):
        key = (
            (event.source.kind, event.source.stage, event.to)
            if isinstance(event, Arrived)
            else event.task.stage
        )
        return weights.setdefault(key, draw.choice([0.001, 1.0, 1000.0]))

    def choose(events):
        return draw.choices(events, [weight(event) for event in events])[0]

    return choose


def last(*held):
    """Chooses whatever happens first, but the given arrivals only when nothing else is.

    Args:
      *held: (source, to) pairs, delivered in this order.
    """

    def choose(events):
        free = [e for e in events if tuple(e) not in held]
        return free[0] if free else min(events, key=lambda e: held.index(tuple(e)))

    return choose


class VirtualTime:
    """A clock for `rrfp_jax.runtime.devices.time`."""

    def __init__(self, timer_s=150e-6):
        self.now_s = 0.0
        self._timer_s = timer_s  # how much too early the sleeper asks to be woken

    def perf_counter(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds + self._timer_s
