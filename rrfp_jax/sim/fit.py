"""From the traces of a real run to what its microbatches took.

The model is the traced microbatches themselves, taken whole. A step of another policy
is made of microbatches drawn from them (`sim.fit_draws`), each with all it took on all
stages and links, and all it kept. So what is a stage's own cost, what a microbatch
brings to several stages at once (many images are slow in the whole vision tower) and
what is chance on one task keep their proportions, and none of it must be given a shape.
`sim.fit_variation` tells them apart for the reader.

What is lost is what neighbouring microbatches have in common: a rank that was slow for
part of the step was slow, as far as the model knows, for some of its microbatches.

Durations say nothing of how long the host takes to notice an end and to launch what
follows. That is fitted apart, as the lateness with which a waiting rank is told
(`latency_s`), since how much of it shows depends on the policy: a rank that has its
next task already does not wait for the host.

In a trace of real devices, spans and transfers end when the host notices. The notice is
in the durations then, and only the launch in the latency. A transfer counts from the
notice of its source's end, so time that it queued on its link is in it.
"""

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rrfp_jax.core import events, trace_parts
from rrfp_jax.core.graph import Edge, Node, PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError

Link = tuple[Kind, int, int]  # kind of the source, its stage, receiving stage


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """What one traced microbatch took and kept.

    Attributes:
      skipped: the stages that it did not visit.
      compute: (kind, stage) -> seconds, of every task that it had.
      transfer: (kind, source stage, receiving stage) -> seconds, between ranks.
      kept: (F, stage) -> bytes that F kept for B, (B, stage) -> B for W; empty if not
        known.
    """

    skipped: frozenset[int]
    compute: Mapping[Node, float]
    transfer: Mapping[Link, float]
    kept: Mapping[Node, int]


@dataclasses.dataclass(frozen=True)
class Fit:
    """The cost model of a run.

    Attributes:
      graph: of a traced step; only its stages, edges, placement, and how its backward
        was split count.
      pool: all traced microbatches of all steps.
      latency_s: from an end on a device to the launch of what waited for it: until
        the host notices, and from then on; the means.
      step_s: of each traced step, until its last task ended.
    """

    graph: PipelineGraph
    pool: tuple[Microbatch, ...]
    latency_s: float
    step_s: tuple[float, ...]

    @property
    def knows_residuals(self) -> bool:
        """Whether the traces say what tasks kept."""
        return all(each.kept for each in self.pool)

    def mean_transfers(self) -> dict[Link, float]:
        """Returns the mean seconds of each link that was used."""
        taken: dict[Link, list[float]] = {}
        for each in self.pool:
            for link, seconds in each.transfer.items():
                taken.setdefault(link, []).append(seconds)
        return {link: statistics.fmean(all_s) for link, all_s in taken.items()}


def fit(traces: Mapping[str, Trace]) -> Fit:
    """Fits the traces of some steps of one run.

    Args:
      traces: by the name of where they come from; of whole steps, or of the parts that
        single processes saw, one after another.

    Raises:
      ConfigError: there is none, they are of different pipelines, or a step is not
        complete.
    """
    if not traces:
        raise ConfigError(
            "there is no trace to fit.\n"
            "  Train with --config.train.trace_step=STEP to write one."
        )
    _check_alike(traces)
    steps = _whole(traces)
    pool = [microbatch for trace in steps for microbatch in _microbatches(trace)]
    return Fit(
        graph=steps[0].graph,
        pool=tuple(pool),
        latency_s=sum(
            _mean(itertools.chain.from_iterable(map(each, steps)))
            for each in (_noticing, _launching)
        ),
        step_s=tuple(trace.makespan_s for trace in steps),
    )


def _check_alike(traces: Mapping[str, Trace]) -> None:
    """Refuses traces of different pipelines; skipped stages may differ."""
    (first, trace), *others = traces.items()
    for name, other in others:
        for field in (
            "num_stages",
            "num_microbatches",
            "edges",
            "placement",
            "frozen",
            "is_split",
            "in_order",
        ):
            mine, its = getattr(trace.graph, field), getattr(other.graph, field)
            if mine != its:
                raise ConfigError(
                    f"{first} and {name} are of different pipelines: {field} is "
                    f"{_plain(mine)}, and {_plain(its)}.\n"
                    "  Keep traces of one run only in that folder."
                )


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else value


def _whole(traces: Mapping[str, Trace]) -> list[Trace]:
    """Returns whole steps; parts that follow each other are put together."""
    steps: list[Trace] = []
    parts: dict[str, Trace] = {}
    for name, trace in traces.items():
        parts[name] = trace
        ran = [span.task for part in parts.values() for span in part.spans]
        wanted = set(parts[name].graph.tasks())
        if len(set(ran)) < len(ran) or not set(ran) <= wanted:
            break
        if set(ran) == wanted:
            steps.append(_joined(list(parts.values())))
            parts = {}
    if parts:
        some = next(iter(parts.values()))
        missing = set(some.graph.tasks()) - {
            span.task for part in parts.values() for span in part.spans
        }
        raise ConfigError(
            f"{', '.join(parts)}: these are not the parts of one step"
            + (f"; {len(missing)} of its tasks are missing" if missing else "")
            + ".\n  Remove traces of steps that did not finish, or of which the trace "
            "of a process is missing."
        )
    return steps


def _joined(parts: Sequence[Trace]) -> Trace:
    if len(parts) == 1:
        return parts[0]
    whole = Trace(parts[0].graph, parts[0].residuals)
    packed = [
        trace_parts.pack(part, {span.rank for span in part.spans}) for part in parts
    ]
    trace_parts.complete(whole, packed)
    return whole


def _microbatches(trace: Trace) -> list[Microbatch]:
    graph = trace.graph
    count = graph.num_microbatches
    compute: list[dict[Node, float]] = [{} for _ in range(count)]
    transfer: list[dict[Link, float]] = [{} for _ in range(count)]
    for span in trace.spans:
        kind, stage, j = span.task
        compute[j][kind, stage] = span.end_s - span.start_s
    for moved in trace.transfers:
        kind, stage, j = moved.source
        transfer[j][kind, stage, moved.to] = moved.end_s - moved.start_s
    kept = {} if trace.residuals is None else trace.residuals.num_bytes
    return [
        Microbatch(
            skipped=frozenset(s for s, k in graph.skipped if k == j),
            compute=compute[j],
            transfer=transfer[j],
            kept={node: each[j] for node, each in kept.items()},
        )
        for j in range(count)
    ]


def _noticing(trace: Trace) -> list[float]:
    """Returns how long after each task's end its rank was told of it.

    When the host stands still, at most a task or two of each rank end unnoticed, but
    any number of payloads arrive: they would count one pause many times.
    """
    ended_s = {span.task: span.end_s for span in trace.spans}
    return [
        max(0.0, told.time_s - ended_s[told.event.task])
        for told in trace.log
        if isinstance(told.event, events.Finished)
    ]


def _launching(trace: Trace) -> list[float]:
    """Returns how long after the last event each launch began for which a rank waited.

    A launch is always the answer to an event. One that a rank had before it was free
    tells nothing.
    """
    late = []
    for rank, spans in enumerate(trace.by_rank()):
        told_s = sorted(told.time_s for told in trace.log if told.rank == rank)
        free_s = 0.0
        for span in sorted(spans, key=lambda span: span.start_s):
            before = bisect.bisect_right(told_s, span.start_s)
            if span.start_s > free_s and before:
                late.append(span.start_s - told_s[before - 1])
            free_s = span.end_s
    return late


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def observed_edges(links: Mapping[Link, float]) -> list[Edge]:
    """Returns the edges, ascending, of which some transfer was seen."""
    return sorted({(min(u, v), max(u, v)) for _, u, v in links})
