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
from rrfp_jax.transport.base import Message, Name, Transport

Flag = Any  # a jax.Array; its type stub lacks `is_ready`

# The pauses of a poll that found nothing: short enough not to be seen next to a task of
# a millisecond, long enough to leave the core to XLA.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10e-6, 500e-6
# The same where nothing runs or moves here, so that only a letter can bring news.
_IDLE_PAUSE_S = 0.1
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

    def sent(self, message: Message) -> float | None:
        """Learns that an output of the task launched last is to be sent.

        Returns:
          When it is due at its receiver, on `time.perf_counter`; None for when it gets
          there.
        """
        ...

    def poll(self) -> list[Told]:
        """Returns what has arrived and finished, arrivals first. Does not block."""
        ...

    def pause_s(self) -> float:
        """Returns how long to wait after a poll that found nothing."""
        ...

    def is_idle(self) -> bool:
        """Whether nothing is running or in transit."""
        ...

    def now_s(self) -> float:
        """Returns the time since the step began."""
        ...


class RealDevices:
    """The devices that JAX sees. Span times are those at which the host noticed.

    Args:
      graph: of the step.
      transport: says what has arrived.
      start_s: on `time.perf_counter`, from when the trace counts.
    """

    def __init__(
        self, graph: PipelineGraph, transport: Transport, start_s: float
    ) -> None:
        self.trace = Trace(graph)
        self._graph = graph
        self._transport = transport
        self._start_s = start_s
        # By rank: launched, unfinished tasks in launch order, and when.
        self._running: list[list[tuple[Task, Flag, float]]] = [
            [] for _ in range(graph.num_ranks)
        ]
        self._ended_s: dict[Task, float] = {}
        self._rank_free_s = [0.0] * graph.num_ranks
        self._pause_s = _FIRST_PAUSE_S

    def launched(self, task: Task, flag: Flag) -> None:
        """Watches `flag`."""
        self._running[self._graph.rank_of(task)].append((task, flag, self.now_s()))

    def sent(self, message: Message) -> float | None:
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
        told = [*(self._arrived(a.message) for a in arrived), *finished]
        if told:
            self._pause_s = _FIRST_PAUSE_S
        return told

    def pause_s(self) -> float:
        """Returns a pause that grows until something happens."""
        if self.is_idle():
            return _IDLE_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        return pause_s

    def is_idle(self) -> bool:
        """Whether nothing is running or in transit."""
        return not any(self._running) and not self._transport.num_in_transit()

    def now_s(self) -> float:
        """Returns the time since the step began."""
        return time.perf_counter() - self._start_s

    def _arrived(self, message: Name) -> Told:
        assert isinstance(message, Message), message
        now_s = self.now_s()
        began_s = self._ended_s.get(message.source, now_s)
        self.trace.transfers.append(Transfer(*message, began_s, now_s))
        return Told(now_s, self._graph.placement[message.to], Arrived(*message))

    def _finished(self, rank: int, task: Task, flag: Flag, launched_s: float) -> Told:
        try:
            flag.block_until_ready()  # it is; this raises what the program has raised
        except Exception as error:
            error.add_note(f"{task} on rank {rank}")
            raise
        now_s = self.now_s()
        began_s = max(launched_s, self._rank_free_s[rank])
        self._rank_free_s[rank] = self._ended_s[task] = now_s
        self.trace.spans.append(Span(task, rank, began_s, now_s))
        return Told(now_s, rank, Finished(task))


class EmulatedDevices:
    """Devices as fast as a virtual machine says, around programs that really run.

    A task is finished when the machine says so and its results exist. Span and transfer
    times are the machine's.

    Args:
      machine: of the ranks of this process.
      transport: brings what is sent from other processes.
      start_s: on `time.perf_counter`, from when the machine counts.
    """

    def __init__(self, machine: Machine, transport: Transport, start_s: float) -> None:
        self.trace = machine.trace
        self._machine = machine
        self._transport = transport
        self._start_s = start_s
        self._flags: dict[Task, Flag] = {}

    def launched(self, task: Task, flag: Flag) -> None:
        """Queues the task on its virtual rank."""
        self._flags[task] = flag
        self._machine.launch(task, self.now_s())

    def sent(self, message: Message) -> float | None:
        """Queues the payload on its virtual link."""
        due_s = self._machine.send(*message, self.now_s())
        return None if due_s is None else due_s + self._start_s

    def poll(self) -> list[Told]:
        """Returns what is due."""
        told = []
        for message, due_s in self._transport.arrived():
            if due_s is not None:  # else it is the machine that says when
                assert isinstance(message, Message), message
                self._machine.expect(*message, due_s - self._start_s)
        while (due := self._machine.pop(self.now_s())) is not None:
            if isinstance(due.event, Finished):
                self._flags.pop(due.event.task).block_until_ready()
            told.append(due._replace(time_s=self.now_s()))
        return told

    def pause_s(self) -> float:
        """Returns the time until shortly before something is due; then, none."""
        due_s = self._machine.next_due_s()
        pause_s = _IDLE_PAUSE_S
        if due_s is not None:
            pause_s = max(0.0, due_s - self.now_s() - _TIMER_S)
        if self._transport.num_in_transit():
            pause_s = min(pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def is_idle(self) -> bool:
        """Whether nothing is running or in transit."""
        return (
            self._machine.next_due_s() is None and not self._transport.num_in_transit()
        )

    def now_s(self) -> float:
        """Returns the time since the step began."""
        return time.perf_counter() - self._start_s
