"""How the executor learns that launches have finished and payloads have arrived.

`RealDevices` asks JAX: it polls `is_ready` on one small array per unfinished launch,
and the transport for arrivals. `EmulatedDevices` stretches both to what a virtual
machine says: the very arithmetic of the simulator, in real time. All else is the same
runtime.
"""

import time
from typing import Any, Protocol

from rrfp_jax.core.events import Arrived, Finished
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Span, Told, Trace, Transfer
from rrfp_jax.sim.machine import Machine
from rrfp_jax.transport.base import Message, Transport

Flag = Any  # a jax.Array; its type stub lacks `is_ready`

# The pauses of a poll that found nothing: short enough not to be seen next to a task of
# a millisecond, long enough to leave the core to XLA.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10e-6, 500e-6
# How much earlier than due to wake: the timer's own lateness.
_TIMER_S = 150e-6


class Devices(Protocol):
    """The devices of all ranks of this process, for one step.

    Attributes:
      trace: the record of the step; the executor adds what it tells the dispatchers.
    """

    trace: Trace

    def launched(self, task: Task, flag: Flag) -> None:
        """Learns that `task` was launched; `flag` is one of its results."""
        ...

    def sent(self, message: Message) -> None:
        """Learns that an output of the task launched last was sent."""
        ...

    def poll(self) -> list[Told]:
        """Returns what has arrived and finished, arrivals first. Does not block."""
        ...

    def pause(self) -> None:
        """Lets some time pass after a poll that found nothing."""
        ...

    def is_idle(self) -> bool:
        """Whether nothing is running or in transit."""
        ...


class RealDevices:
    """The devices that JAX sees. Span times are those at which the host noticed."""

    def __init__(self, graph: PipelineGraph, transport: Transport) -> None:
        self.trace = Trace(graph)
        self._graph = graph
        self._transport = transport
        self._start_s = time.perf_counter()
        # By rank: launched, unfinished tasks in launch order, and when.
        self._running: list[list[tuple[Task, Flag, float]]] = [
            [] for _ in range(graph.num_ranks)
        ]
        self._ended_s: dict[Task, float] = {}
        self._rank_free_s = [0.0] * graph.num_ranks
        self._pause_s = _FIRST_PAUSE_S

    def launched(self, task: Task, flag: Flag) -> None:
        """Watches `flag`."""
        self._running[self._graph.rank_of(task)].append((task, flag, self._now_s()))

    def sent(self, message: Message) -> None:
        """The transport watches it."""

    def poll(self) -> list[Told]:
        """Asks for the oldest launch of each rank, then the transport."""
        finished = []
        arrived = self._transport.arrived()
        for rank, running in enumerate(self._running):
            # A device runs its launches in order: only the oldest can be next. What
            # has arrived was computed before, so its source is found here.
            while running and running[0][1].is_ready():
                finished.append(self._finished(rank, *running.pop(0)))
        told = [*map(self._arrived, arrived), *finished]
        if told:
            self._pause_s = _FIRST_PAUSE_S
        return told

    def pause(self) -> None:
        """Sleeps, each time longer, until something happens."""
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)

    def is_idle(self) -> bool:
        """Whether nothing is running or in transit."""
        return not any(self._running) and not self._transport.num_in_transit()

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def _arrived(self, message: Message) -> Told:
        now_s = self._now_s()
        began_s = self._ended_s.get(message.source, now_s)
        self.trace.transfers.append(Transfer(*message, began_s, now_s))
        return Told(now_s, self._graph.placement[message.to], Arrived(*message))

    def _finished(self, rank: int, task: Task, flag: Flag, launched_s: float) -> Told:
        del flag
        now_s = self._now_s()
        began_s = max(launched_s, self._rank_free_s[rank])
        self._rank_free_s[rank] = self._ended_s[task] = now_s
        self.trace.spans.append(Span(task, rank, began_s, now_s))
        return Told(now_s, rank, Finished(task))


class EmulatedDevices:
    """Devices as fast as a virtual machine says, around programs that really run.

    A task is finished when the machine says so and its results exist. Span and transfer
    times are the machine's.
    """

    def __init__(self, machine: Machine) -> None:
        self.trace = machine.trace
        self._machine = machine
        self._start_s = time.perf_counter()
        self._flags: dict[Task, Flag] = {}

    def launched(self, task: Task, flag: Flag) -> None:
        """Queues the task on its virtual rank."""
        self._flags[task] = flag
        self._machine.launch(task, self._now_s())

    def sent(self, message: Message) -> None:
        """Queues the payload on its virtual link."""
        self._machine.send(*message, self._now_s())

    def poll(self) -> list[Told]:
        """Returns what is due."""
        told = []
        while (due := self._machine.pop(self._now_s())) is not None:
            if isinstance(due.event, Finished):
                self._flags.pop(due.event.task).block_until_ready()
            told.append(due._replace(time_s=self._now_s()))
        return told

    def pause(self) -> None:
        """Sleeps until shortly before something is due, then spins."""
        due_s = self._machine.next_due_s()
        if due_s is not None:
            time.sleep(max(0.0, due_s - self._now_s() - _TIMER_S))

    def is_idle(self) -> bool:
        """Whether nothing is running or in transit."""
        return self._machine.next_due_s() is None

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s
