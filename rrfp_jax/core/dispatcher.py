"""The dispatcher of one pipeline rank: told what happened, it answers what to do.

Theory. A step is a DAG of tasks; each rank runs one at a time. The dispatcher keeps,
for each of its tasks, which inputs are still missing; a task that misses none is
*ready* and goes to the arbiter. Whenever the rank is free, the arbiter is asked. There
is no line here that could wait for a particular task: whether that can happen depends
on the arbiter alone, and of ours only the baselines do it.

Rules.

1. `handle` is the only method that changes state. It is a function of the state and the
   event: no clock, no randomness. So a log of events replays to the same launches.
2. A rank is free while fewer than `launch_ahead` launched tasks are unfinished. A
   device runs its launches in order, so a dependency inside the rank is satisfied when
   its source is *launched*; one across ranks when its payload has *arrived*.
3. A task's sends are ordered together with its launch: the transfer begins when the
   value exists, without asking the host again.
4. Where the rank spans several processes, an `Agreement` stands in for the arbiter. It
   says when to propose what to the other members, and chooses what all of them launch.

Invariants (tests check them after every event): each task is launched once, never
before its inputs; the in-flight limit holds; a free rank and a ready task that is not
held back never coexist, except under a fixed order, or for as long as the members of a
group take to agree.
"""

import hashlib
from collections.abc import Iterable

from rrfp_jax.core.agreement import Agreement
from rrfp_jax.core.arbiters import Arbiter
from rrfp_jax.core.events import (
    Arrived,
    Event,
    Finished,
    Instruction,
    Launch,
    Propose,
    Proposed,
    Send,
    Started,
)
from rrfp_jax.core.graph import Node, PipelineGraph
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError, InvariantError, ProtocolError

LAUNCH_AHEAD = 2
"""How many launched tasks of a rank may be unfinished, by default."""


class Dispatcher:
    """Decides what one pipeline rank launches and sends in one step.

    Args:
      graph: the tasks of the step.
      rank: whose tasks to run.
      arbiter: chooses among ready tasks; used by this dispatcher only.
      launch_ahead: how many launched tasks may be unfinished, at least 1.
      agreement: of the processes of the rank, which wraps `arbiter`; None where there
        is one process, or where the members go apart.

    Attributes:
      rank: whose tasks these are.
      num_launched: tasks launched so far.

    Raises:
      ConfigError: `launch_ahead` is below 1.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        rank: int,
        arbiter: Arbiter,
        launch_ahead: int = LAUNCH_AHEAD,
        agreement: Agreement | None = None,
    ) -> None:
        check_launch_ahead(launch_ahead)
        self.rank = rank
        self.num_launched = 0
        self._graph = graph
        self._arbiter = agreement or arbiter
        self._agreement = agreement
        self._launch_ahead = launch_ahead
        # task -> inputs that are not here. No entry: no input is here yet. Empty: the
        # task is ready or launched.
        self._missing: dict[Task, tuple[Node, ...]] = {}
        self._running: list[Task] = []  # launched and unfinished, in launch order
        self._num_tasks = graph.num_tasks(rank)
        self._sequence: list[Task] = []  # all launches
        self._stages = frozenset(graph.stages_of[rank])
        self._is_started = False
        self._story: list[Event | Instruction] = []  # all that was heard and said

    @property
    def is_done(self) -> bool:
        """Whether every task of the rank was launched and has finished."""
        return self.num_launched == self._num_tasks and not self._running

    @property
    def sequence_hash(self) -> bytes:
        """The hash of all launches so far, in order: equal where sequences are."""
        text = "".join(f"{task} " for task in self._sequence)  # `2F0 2B0 `
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def handle(self, event: Event) -> list[Instruction]:
        """Applies one event; the only method that changes the state.

        Raises:
          InvariantError: the event cannot follow those before it.
          ProtocolError: another member may not have proposed this.
        """
        match event:
            case Finished(task):
                self._finish(task)
            case Arrived(source, to):
                kind, stage, j = source
                if (
                    to not in self._stages
                    or stage in self._stages
                    or not 0 <= j < self._graph.num_microbatches
                ):
                    raise self._bug(
                        f"{source} is no arrival of rank {self.rank}", source
                    )
                self._supply(Task(kind, to, j), (kind, stage))
            case Started():
                self._start()
            case Proposed(member, proposal):
                if self._agreement is None:
                    raise ProtocolError(
                        f"member {member} proposed to rank {self.rank} ({proposal}), "
                        "which agrees with nobody.\n"
                        "  Give all processes of a rank the same group."
                    )
                self._agreement.heard(member, proposal)
        self._story.append(event)
        instructions: list[Instruction] = []
        self._launch_chosen(instructions)
        if self._agreement is not None:
            while own := self._agreement.propose(len(self._running)):
                instructions.append(Propose(own))
                self._launch_chosen(instructions)  # ours may have been the last word
        self._story += instructions
        return instructions

    def explain(self) -> list[str]:
        """Returns, for each task not launched, what it misses or what holds it."""
        is_free = len(self._running) < self._launch_ahead
        lines = [f"{task} was launched and has not finished" for task in self._running]
        lines += [
            self._arbiter.why_held(task) if is_free else f"{task} waits for its rank"
            for task in self._arbiter.ready()
        ]
        for task in self._graph.tasks(self.rank):
            inputs = self._graph.route(task.microbatch).inputs[task.kind, task.stage]
            missing = self._missing.get(task, inputs)
            if missing:
                named = [
                    str(needed)
                    for needed in sorted(self._graph.inputs(task))
                    if needed[:2] in missing
                ]
                lines.append(f"{task} misses {' '.join(named)}")
        return lines

    def _start(self) -> None:
        if self._is_started:
            raise self._bug(f"rank {self.rank} was started twice")
        self._is_started = True
        for task in self._graph.initial_tasks(self.rank):
            self._missing[task] = ()
            self._arbiter.add(task)
        if self._graph.in_order:
            for stage in sorted(self._stages):
                self._pass_turn(stage, None)

    def _finish(self, task: Task) -> None:
        if task not in self._running:
            raise InvariantError(
                f"{task} finished on rank {self.rank} but is not running."
            )
        self._running.remove(task)

    def _supply(self, task: Task, source: Node) -> None:
        """Records that the input `source` of `task` is here."""
        kind, stage, j = task
        missing = self._missing.get(task)
        if missing is None:
            missing = self._graph.route(j).inputs.get((kind, stage), ())
        rest = tuple([node for node in missing if node != source])
        if len(rest) == len(missing):
            found = Task(*source, j)
            what = f"{found} came to {task} twice, or is no input of it"
            raise self._bug(what, task)
        self._missing[task] = rest
        if not rest:
            self._arbiter.add(task)

    def _launch_chosen(self, instructions: list[Instruction]) -> None:
        while len(self._running) < self._launch_ahead:
            chosen = self._arbiter.choose()
            if chosen is None:
                break
            self._launch(chosen, instructions)

    def _launch(self, task: Task, instructions: list[Instruction]) -> None:
        self._arbiter.launched(task)
        self._running.append(task)
        self._sequence.append(task)
        self.num_launched += 1
        instructions.append(Launch(task))
        kind, stage, j = task
        placement = self._graph.placement
        for target_kind, target in self._graph.route(j).successors[kind, stage]:
            if placement[target] == self.rank:
                self._supply(Task(target_kind, target, j), (kind, stage))
            else:
                instructions.append(Send(task, target))
        if kind is Kind.W and self._graph.in_order:
            self._pass_turn(stage, j)

    def _pass_turn(self, stage: int, microbatch: int | None) -> None:
        """Lets the W of `stage` go that comes after the one of `microbatch`."""
        after = self._graph.next_turn(stage, microbatch)
        if after is not None:
            self._supply(Task(Kind.W, stage, after), (Kind.W, stage))

    def _bug(self, what: str, about: Task | None = None) -> InvariantError:
        """Returns the error for what cannot happen, with the microbatch's story."""
        told = [
            f"#{number} {_print(entry)}"
            for number, entry in enumerate(self._story)
            if about is None or about.microbatch in _microbatches(entry)
        ]
        return InvariantError(
            f"{what}. This is a bug in rrfp_jax; please report this story of rank "
            f"{self.rank}:\n  {'  '.join(told) or 'nothing before it'}"
        )


def _microbatches(entry: Event | Instruction) -> list[int]:
    match entry:
        case Started():
            return []
        case Proposed(_, proposal) | Propose(proposal):
            return [task.microbatch for task in proposal.ready]
        case _:
            return [entry[0].microbatch]


def _print(entry: Event | Instruction) -> str:
    return f"{type(entry).__name__}({', '.join(map(str, entry))})"


def explain_stall(dispatchers: Iterable[Dispatcher]) -> str:
    """Returns the message of a `StallError`: who waits for what, rank by rank."""
    lines = []
    for dispatcher in dispatchers:
        reasons = dispatcher.explain()
        if reasons:
            lines.append(
                f"rank {dispatcher.rank} has {len(reasons)} tasks left; "
                "none running or in transit."
            )
            lines += [f"  {reason}" for reason in reasons[:12]]
            if len(reasons) > 12:
                lines.append(f"  and {len(reasons) - 12} more")
    return "\n".join(lines)


def check_launch_ahead(launch_ahead: int) -> None:
    """Refuses a launch-ahead under which nothing is launched.

    Raises:
      ConfigError: it is below 1.
    """
    if launch_ahead < 1:
        raise ConfigError(
            f"pipeline.launch_ahead={launch_ahead} launches nothing.\n"
            "  Set --config.pipeline.launch_ahead to 1 or more."
        )
