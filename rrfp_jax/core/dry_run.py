"""Runs fixed orders dry: no devices, no dispatchers, only durations.

A task begins when its rank has done what comes before it in the order and its inputs
are there; links have no queue. So a dry run says in an instant how long an order takes
at best, how much it holds, and whether it finishes at all.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Sequence

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.core.trace import Span, Trace
from rrfp_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
      trace: the spans of all tasks that could run.
      stuck: by rank, the task it waits for in vain; None where it finishes.
    """

    trace: Trace
    stuck: tuple[Task | None, ...]

    @property
    def is_finished(self) -> bool:
        """Whether every task ran."""
        return not any(self.stuck)

    def __str__(self) -> str:
        """Returns the grid, each rank's fault marked `!`, and what it misses."""
        done = {span.task for span in self.trace.spans}
        lines = []
        by_rank = self.trace.by_rank()
        ends = [max((s.end_s for s in each), default=0.0) for each in by_rank]
        last = max(*ends, 1e-9)
        for line, task, end_s in zip(
            self.trace.grid(_COLUMNS).splitlines(), self.stuck, ends, strict=True
        ):
            if task is None:
                lines.append(line)
                continue
            head, cells, _ = line.split("|")
            at = min(round(end_s / last * _COLUMNS), _COLUMNS)
            marked = f"{cells[:at]}!{task}".ljust(_COLUMNS + _MARGIN)
            missing = [str(t) for t in self.trace.graph.inputs(task) if t not in done]
            lines.append(f"{head}|{marked}  misses {' '.join(missing)}")
        return "\n".join(lines)


_COLUMNS = 80
_MARGIN = 8  # for a mark at the end of a line


def unit_s(graph: PipelineGraph) -> Callable[[Task], float]:
    """Returns the usual proportions: a rank's F is 1, its B and W 1 each."""
    chunks = [len(graph.stages_of[rank]) for rank in graph.placement]

    def seconds(task: Task) -> float:
        is_whole = task.kind is Kind.B and not graph.is_split
        return (2 if is_whole else 1) / chunks[task.stage]

    return seconds


def dry_run(
    orders: Sequence[Sequence[Task]],
    graph: PipelineGraph,
    seconds: Callable[[Task], float] | None = None,
    transfer_s: float = 0.0,
    residuals: Residuals | None = None,
) -> DryRun:
    """Runs the orders of all ranks, as far as they go.

    Args:
      orders: by rank.
      graph: whose tasks they order.
      seconds: the duration of a task; by default `unit_s`.
      transfer_s: of every payload between ranks.
      residuals: what tasks keep, if bytes are of interest.
    """
    seconds = seconds or unit_s(graph)
    trace = Trace(graph, residuals)
    position = [0] * len(orders)
    free_s = [0.0] * len(orders)
    ends: dict[Task, float] = {}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                task = order[position[rank]]
                inputs = graph.inputs(task)
                if any(needed not in ends for needed in inputs):
                    break
                there = [
                    ends[u] + (transfer_s if graph.rank_of(u) != rank else 0.0)
                    for u in inputs
                ]
                start_s = max([free_s[rank], *there])
                free_s[rank] = ends[task] = start_s + seconds(task)
                trace.spans.append(Span(task, rank, start_s, free_s[rank]))
                position[rank] += 1
                is_moving = True
    stuck = [
        order[at] if at < len(order) else None
        for order, at in zip(orders, position, strict=True)
    ]
    return DryRun(trace, tuple(stuck))


def check_finishes(orders: Sequence[Sequence[Task]], graph: PipelineGraph) -> DryRun:
    """Returns the dry run of orders in the usual proportions.

    Raises:
      ConfigError: they cannot finish; shows where each rank is stuck, and on what.
    """
    ran = dry_run(orders, graph)
    if not ran.is_finished:
        grid = textwrap.indent(str(ran), "  ")
        raise ConfigError(
            "the fixed order cannot finish: its ranks wait for each other, at the "
            f"tasks marked with an exclamation mark.\n{grid}\n"
            "  Reorder these tasks, or use the order as a hint: "
            "--config.pipeline.order=readiness --config.pipeline.hint=FILE."
        )
    return ran
