"""Carries out what the dispatchers say, on JAX.

One thread owns the dispatchers of all ranks of the process. It launches executables,
which return at once (XLA runs them when their inputs exist), posts the sends of a task
together with its launch, and polls for what has finished and arrived. Nothing here
decides anything. Where a rank spans several processes, their dispatchers agree on the
launches by letters, which come between two polls and cut a pause short. Several
pipelines of one process (data-parallel replicas) are driven in turn.

Ownership: a payload is held from its arrival to the launch that uses it; residuals from
the launch that makes them to the launch that uses them; accumulators are donated from
one launch to the next. So what a step holds at most is in-flight microbatches times
their residuals, beside parameters and one accumulator per trained parameter.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from rrfp_jax.core.dispatcher import Dispatcher, explain_stall
from rrfp_jax.core.events import Launch, Propose, Started
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.core.trace import Told
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.devices import Devices, Flag
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.runtime.programs import StagePrograms
from rrfp_jax.runtime.wire import Wire
from rrfp_jax.transport.base import Message, Transport

Arrays = list[Any]


@dataclasses.dataclass
class Step:
    """What one step runs on, and what it leaves behind.

    Attributes:
      graph: its tasks.
      programs: by microbatch, then stage; None where the stage is not visited.
      params: leaves by stage, on the devices of its rank.
      feeds: leaves by microbatch, then stage, on the host.
      scale: the cotangent of each microbatch's loss, on the devices of the loss stage.
      accumulators: leaves by stage; all used up at launch and replaced.
      outputs: microbatch -> leaves of (loss, auxiliary outputs).
      flags: whether the results of each task were finite.
    """

    graph: PipelineGraph
    programs: Sequence[Sequence[StagePrograms | None]]
    params: Sequence[Arrays]
    feeds: Sequence[Sequence[Arrays]]
    scale: jax.Array | None
    accumulators: list[Arrays]
    outputs: dict[int, Arrays] = dataclasses.field(default_factory=dict)
    flags: dict[Task, Flag] = dataclasses.field(default_factory=dict)


class Executor:
    """Runs one step.

    Args:
      step: its inputs; the results are put into it.
      ranks: the devices of each pipeline rank.
      dispatchers: fresh, one for each rank that this process has a part in.
      transport: between the ranks.
      devices: says when launches finish and payloads arrive.
      wire: to the other processes of the pipeline; None if there are none.
    """

    def __init__(
        self,
        step: Step,
        ranks: Sequence[RankMesh],
        dispatchers: Sequence[Dispatcher],
        transport: Transport,
        devices: Devices,
        wire: Wire | None = None,
    ) -> None:
        self._step = step
        self._graph = step.graph
        self._ranks = ranks
        self._dispatchers = {each.rank: each for each in dispatchers}
        self._transport = transport
        self._devices = devices
        self._wire = wire
        # Task -> payloads of its inputs that are here, by the stage they come from.
        self._inbox: dict[Task, dict[int, Arrays]] = {}
        # (stage, microbatch) -> what its B needs of its F, then its W of its B.
        self._saved: dict[tuple[int, int], Arrays] = {}
        # Outputs of the task launched last, by receiving stage.
        self._outgoing: dict[int, Arrays] = {}

    @property
    def wire(self) -> Wire | None:
        """To the other processes of the pipeline."""
        return self._wire

    @property
    def is_done(self) -> bool:
        """Whether every task of this process has finished, and its payloads are out."""
        return (
            all(dispatcher.is_done for dispatcher in self._dispatchers.values())
            and not self._num_waiting()
        )

    def is_idle(self) -> bool:
        """Whether nothing runs here, or is seen on its way."""
        return self._devices.is_idle()

    def start(self) -> None:
        """Begins the step."""
        for rank in self._dispatchers:
            self._tell(Told(0.0, rank, Started()))

    def advance(self) -> bool:
        """Passes on what has happened since the last call; returns whether any has."""
        told = self._devices.poll()
        if self._wire is not None:
            now_s = self._devices.now_s()
            heard = self._wire.groups.heard()
            told += [Told(now_s, rank, proposed) for rank, proposed in heard]
        for each in told:
            self._tell(each)
        return bool(told)

    def pause_s(self) -> float:
        """Returns how long to wait after an `advance` that found nothing."""
        return self._devices.pause_s()

    def explain(self) -> str:
        """Returns who waits for what, rank by rank."""
        return explain_stall(self._dispatchers.values())

    def _num_waiting(self) -> int:
        return 0 if self._wire is None else self._wire.transport.num_to_post()

    def _tell(self, told: Told) -> None:
        """Passes an event on and carries out the answer."""
        self._devices.trace.log.append(told)
        for instruction in self._dispatchers[told.rank].handle(told.event):
            match instruction:
                case Launch(task):
                    self._launch(task)
                case Propose(proposal):
                    assert self._wire is not None
                    self._wire.groups.propose(told.rank, proposal)
                case _:
                    self._send(Message(*instruction))

    def _launch(self, task: Task) -> None:
        try:
            flag = self._run(task)
        except Exception as error:
            error.add_note(
                f"while launching {task} on rank {self._graph.rank_of(task)}"
            )
            raise
        self._step.flags[task] = flag
        self._devices.launched(task, flag)
        # What stays on the rank needs no transport and is there at launch.
        placement, rank = self._graph.placement, self._graph.rank_of(task)
        for target, payload in self._outgoing.items():
            if placement[target] == rank:
                successor = task._replace(stage=target)
                self._inbox.setdefault(successor, {})[task.stage] = payload

    def _run(self, task: Task) -> Flag:
        match task.kind:
            case Kind.F:
                return self._forward(task)
            case Kind.B:
                return self._backward(task)
            case Kind.W:
                return self._weight(task)

    def _send(self, message: Message) -> None:
        rank = self._ranks[self._graph.placement[message.to]]
        payload = self._outgoing[message.to]
        shardings = [rank.of_value(array.shape) for array in payload]
        self._transport.send(message, payload, shardings, self._devices.sent(message))

    def _payloads(self, task: Task, sources: Sequence[int]) -> list[Arrays]:
        """Takes the payloads that `task` needs, in the order of `sources`."""
        here = self._inbox.pop(task, {})
        return [
            here[source]
            if source in here
            else self._transport.take(Message(task._replace(stage=source), task.stage))
            for source in sources
        ]

    def _forward(self, task: Task) -> Flag:
        _, stage, j = task
        step, route = self._step, self._graph.route(j)
        programs = step.programs[j][stage]
        assert programs is not None
        rest = [x for each in self._payloads(task, route.sources[stage]) for x in each]
        feed = step.feeds[j][stage]
        if feed:
            rank = self._ranks[self._graph.placement[stage]]
            rest += placing.put(feed, [rank.of_value(x.shape) for x in feed])
        outputs, kept, flag = programs.forward(step.params[stage], rest)
        if programs.backward is not None:
            pool = [*rest, *outputs, *kept]
            self._saved[stage, j] = programs.saved.of(pool)
        if stage == self._graph.loss_stage:
            step.outputs[j] = outputs
        self._outgoing = dict.fromkeys(route.targets[stage], outputs)
        return flag

    def _backward(self, task: Task) -> Flag:
        _, stage, j = task
        step, route = self._step, self._graph.route(j)
        programs = step.programs[j][stage]
        assert programs is not None
        assert programs.backward is not None
        cotangents: Any = self._payloads(task, route.targets[stage])
        if stage == self._graph.loss_stage:
            cotangents = [[step.scale]]
        params, saved = step.params[stage], self._saved.pop((stage, j))
        if programs.weight is None:
            step.accumulators[stage], onward, flag = programs.backward(
                step.accumulators[stage], params, saved, cotangents
            )
        else:
            onward, crossing, flag = programs.backward(params, saved, cotangents)
            pool = [*saved, *(x for each in cotangents for x in each), *crossing]
            self._saved[stage, j] = programs.kept.of(pool)
        sources = [u for u in route.sources[stage] if route.has_backward[u]]
        self._outgoing = dict(zip(sources, onward, strict=True))
        return flag

    def _weight(self, task: Task) -> Flag:
        _, stage, j = task
        step = self._step
        programs = step.programs[j][stage]
        assert programs is not None
        assert programs.weight is not None
        step.accumulators[stage], flag = programs.weight(
            step.accumulators[stage],
            step.params[stage],
            self._saved.pop((stage, j)),
        )
        self._outgoing = {}
        return flag
