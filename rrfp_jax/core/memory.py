"""Residual bytes: how many each task keeps, and the rule that bounds them on a rank.

F keeps what its B will need; B keeps what its W will need of that, and of its own. Both
are counted in launch order: a task's residuals are live from its launch to the launch
of the task that uses them, as the host holds them.

The rule. Let a microbatch's *rest* be what it may still add to its own bytes here, at
the worst. A launch is admitted only if afterwards the rank is *safe*: all unfinished
microbatches up to the last that has begun can be completed in ascending order within
the limit. That is, the rest of the first fits into what is free; the rest of the second
into that and what the first gives back; and so on. (This is Dijkstra's banker, EWD 623,
with the order of completion known.) It is what lets a rank with several stages lend the
bytes that a microbatch will need for its later chunks to others meanwhile.

Why it never stalls: before the lowest microbatch with a forward or backward left, all
have only weight gradients left, which free bytes. Once they are run, its rest fits, and
its next task leads from a safe state to a safe one. Why it is never exceeded: a safe
state is within the limit. The limit must hold each microbatch alone; the smallest that
does is `smallest_limit`.

Among tasks that do not fit, the rule looks at the first of each stage in the hint's
order and at the lowest microbatch: a small microbatch does not slip past a large one,
which would otherwise starve.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from rrfp_jax.core.back_pressure import RankProgress
from rrfp_jax.core.graph import Node, PipelineGraph
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The bytes that each forward and each backward of a step keeps.

    Attributes:
      num_bytes: (F, stage) -> what F keeps for B, (B, stage) -> what B keeps for W; by
        microbatch. Zero where there is no B, or no W.
    """

    num_bytes: Mapping[Node, tuple[int, ...]]

    @functools.cached_property
    def _added(self) -> Mapping[Node, tuple[int, ...]]:
        added: dict[Node, tuple[int, ...]] = {}
        for (kind, stage), forward in self.num_bytes.items():
            if kind is Kind.F:
                backward = self.num_bytes[Kind.B, stage]
                pairs = zip(forward, backward, strict=True)
                added[Kind.F, stage] = forward
                added[Kind.B, stage] = tuple(kept - used for used, kept in pairs)
                added[Kind.W, stage] = tuple(-kept for kept in backward)
        return added

    def added(self, task: Task) -> int:
        """Returns by how much the launch of `task` changes the bytes of its rank."""
        kind, stage, j = task
        return self._added[kind, stage][j]

    def live(self, order: Iterable[Task]) -> list[int]:
        """Returns the bytes of a rank after each launch of an order."""
        return list(itertools.accumulate(map(self.added, order)))

    def peak(self, order: Iterable[Task]) -> int:
        """Returns the most bytes that a rank holds at once under an order."""
        return max(self.live(order), default=0)

    def most(self, stage: int, microbatch: int) -> int:
        """Returns the most bytes that a microbatch holds for a stage."""
        forward = self.num_bytes[Kind.F, stage][microbatch]
        return max(forward, self.num_bytes[Kind.B, stage][microbatch])

    def most_of(self, stages: Iterable[int], microbatch: int) -> int:
        """Returns the most bytes that a microbatch holds for several stages."""
        return sum(self.most(stage, microbatch) for stage in stages)


def tabulate(
    graph: PipelineGraph, of: Callable[[int, int], tuple[int, int]]
) -> Residuals:
    """Returns the residuals of a step.

    Args:
      graph: the step.
      of: (microbatch, stage) -> what F keeps, and what B keeps.
    """
    num_bytes: dict[Node, tuple[int, ...]] = {}
    for s in range(graph.num_stages):
        pairs = [of(j, s) for j in range(graph.num_microbatches)]
        num_bytes[Kind.F, s] = tuple(forward for forward, _ in pairs)
        num_bytes[Kind.B, s] = tuple(backward for _, backward in pairs)
    return Residuals(num_bytes)


def constant(
    graph: PipelineGraph, forward: int, weight_fraction: float = 1.0
) -> Residuals:
    """Returns residuals that are the same for all microbatches and stages.

    Args:
      graph: whose tasks they belong to.
      forward: bytes that a forward keeps.
      weight_fraction: how much of it a W needs; what B keeps is that part.
    """
    backward = round(forward * weight_fraction)

    def of(microbatch: int, stage: int) -> tuple[int, int]:
        route = graph.route(microbatch)
        return forward * route.has_backward[stage], backward * route.has_weight[stage]

    return tabulate(graph, of)


def smallest_limit(graph: PipelineGraph, residuals: Residuals) -> tuple[int, int]:
    """Returns the smallest limit under which every rank finishes, and a rank for which
    nothing less will do.
    """
    return max(
        (residuals.most_of(stages, j), rank)
        for rank, stages in enumerate(graph.stages_of)
        for j in range(graph.num_microbatches)
    )


def check_limit(graph: PipelineGraph, residuals: Residuals, limit: int) -> None:
    """Checks that a limit in bytes lets every microbatch through.

    Raises:
      ConfigError: it does not; names the smallest that does.
    """
    smallest, rank = smallest_limit(graph, residuals)
    if limit < smallest:
        raise ConfigError(
            f"pipeline.memory_limit_gb={limit / GIB:.4g} cannot hold the residuals of "
            f"one microbatch on rank {rank}, {smallest / GIB:.6g} GiB.\n"
            f"  Set --config.pipeline.memory_limit_gb to {_round_up(smallest / GIB)} "
            "or more, or make microbatches smaller."
        )


def check_orders(
    what: str, orders: Sequence[Sequence[Task]], residuals: Residuals, limit: int
) -> None:
    """Checks that fixed orders stay within a limit in bytes.

    Raises:
      ConfigError: they do not; names the smallest limit that holds them.
    """
    peaks = [residuals.peak(order) for order in orders]
    peak = max(peaks)
    if peak > limit:
        raise ConfigError(
            f"{what} keeps {peak / GIB:.6g} GiB of residuals on rank "
            f"{peaks.index(peak)}, more than pipeline.memory_limit_gb="
            f"{limit / GIB:.4g}.\n"
            f"  Set --config.pipeline.memory_limit_gb to {_round_up(peak / GIB)} or "
            "more, or use --config.pipeline.order=readiness."
        )


def _round_up(number: float) -> str:
    """Returns six digits that are not below `number`."""
    text = f"{number:.6g}"
    return text if float(text) >= number else f"{float(text) * (1 + 1e-5):.6g}"


class ResidualBytes:
    """Bounds the residual bytes of a rank, exactly.

    Args:
      progress: of the rank.
      limit: in bytes; `check_limit` has passed it.
      graph: the step.
      rank: which one.
      residuals: of the step's tasks.
    """

    def __init__(
        self,
        progress: RankProgress,
        limit: int,
        graph: PipelineGraph,
        rank: int,
        residuals: Residuals,
    ) -> None:
        self._progress = progress
        self._limit = limit
        self._residuals = residuals
        self._num_bytes = 0
        # Of each unfinished microbatch: bytes held, and the most it may yet add.
        self._held = dict.fromkeys(progress.left, 0)
        stages = graph.stages_of[rank]
        self._rest = {j: residuals.most_of(stages, j) for j in progress.left}
        self._last_begun = -1
        # What is free beyond the largest rest of all needs no further look.
        self._enough = max(self._rest.values(), default=0)

    def __str__(self) -> str:
        return f"memory_limit_gb={self._limit / GIB:.6g}"

    def admits(self, task: Task) -> bool:
        """Whether the rank is safe after the launch of `task`."""
        added = self._residuals.added(task)
        if added <= 0:
            return True
        free = self._limit - self._num_bytes - added
        j = task.microbatch
        if free < 0 or j == self._progress.lowest:
            return free >= 0
        last = max(j, self._last_begun)
        for k, rest in self._rest.items():  # ascending, finished ones are gone
            if k > last or free >= self._enough:
                break
            held = self._held[k]
            if k == j:
                rest -= self._spent(task)
                held += added
            if rest > free:
                return False
            free += held
        return True

    def launched(self, task: Task) -> None:
        """Moves the bytes of `task`."""
        j = task.microbatch
        added = self._residuals.added(task)
        self._num_bytes += added
        self._held[j] += added
        self._rest[j] -= self._spent(task)
        self._last_begun = max(j, self._last_begun)
        if j not in self._progress.left:
            del self._held[j], self._rest[j]

    def _spent(self, task: Task) -> int:
        """How much of the rest of its microbatch `task` uses up, or gives up."""
        kind, stage, j = task
        forward = self._residuals.num_bytes[Kind.F, stage][j]
        match kind:
            case Kind.F:
                return forward
            case Kind.B:
                return self._residuals.most(stage, j) - forward
            case Kind.W:
                return 0
