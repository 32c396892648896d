"""One process of an emulated pipeline; benchmarks start as many as they need.

    python scripts/bench/emulated_worker.py JSON

The object says how many pipeline ranks of how many devices there are, what to run, and
where to find the other processes; see `Job`. Each step's tasks last as long as the job
says, the payloads are real and go the way they always go. The first process writes what
all of them saw.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Job:
    """What all processes are told.

    Attributes:
      out: where the first one writes a JSON list, an entry a run.
      num_ranks: pipeline ranks, one stage each.
      model: devices of each; its weights are cut over them.
      num_microbatches: of a step.
      payload_bytes: of an activation.
      runs: each a policy's settings, and `forward_ms`, `backward_ms`, `transfer_ms`,
        and `late_ms`: how much later every other microbatch arrives, even ones at the
        even members of a rank, odd ones at the odd members.
      coordinator: HOST:PORT; empty for one process.
      num_processes: all of them.
      process_id: which this is.
    """

    out: str
    num_ranks: int
    model: int
    num_microbatches: int
    payload_bytes: int
    runs: Sequence[dict[str, Any]]
    coordinator: str = ""
    num_processes: int = 1
    process_id: int = 0


JOB = Job(**json.loads(sys.argv[1]))
jax.config.update("jax_num_cpu_devices", JOB.num_ranks * JOB.model // JOB.num_processes)

import emulated_ranks
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rrfp_jax import Emulation, Pipeline, Policy, Stage, split
from rrfp_jax.coordination.cluster import Cluster, Whereabouts, joined
from rrfp_jax.core import policies
from rrfp_jax.core.events import Arrived, Finished, Launch
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Trace
from rrfp_jax.runtime.driving import drive
from rrfp_jax.sim import costs

_ROWS = 8
_TIMES = ("forward_ms", "backward_ms", "transfer_ms", "late_ms")


class Late:
    """A transport whose messages come late, some at one member, the rest at another."""

    def __init__(self, transport: Any, member: int) -> None:
        self._transport = transport
        self._member = member
        self.late_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, message: Any, payload: Any, where: Any, due_s: float) -> None:
        """Sends, to be seen later where it is this member's turn to wait."""
        is_late = (message.source.microbatch + self._member) % 2 == 0
        self._transport.send(message, payload, where, due_s + is_late * self.late_s)


def make_pipeline(cluster: Cluster) -> tuple[Pipeline, Any, Late | None]:
    """Returns the pipeline of the job, its parameters, and what makes it late."""
    ranks, connected = emulated_ranks.connected(cluster, JOB.num_ranks, JOB.model)
    late = None
    if connected is not None:
        late = Late(connected.transport, cluster.process % JOB.model)
        connected = dataclasses.replace(connected, transport=late)  # type: ignore[arg-type]
    width = JOB.payload_bytes // (4 * _ROWS)

    def first(w: Any, _: Any, feed: Any) -> Any:
        return jnp.tanh(feed["x"] * jnp.sum(w))

    def middle(w: Any, h: Any, _: Any) -> Any:
        return jnp.tanh(h * jnp.sum(w))  # a sum over the rank's devices: a collective

    def last(w: Any, h: Any, _: Any) -> Any:
        return jnp.sum(h * jnp.sum(w))

    functions = [first, *[middle] * (JOB.num_ranks - 2), last]
    stages = [Stage(functions[0])]
    stages += [Stage(fn, select=lambda _: None) for fn in functions[1:]]
    params = [np.ones(8, np.float32) for _ in stages]
    pipeline = Pipeline(
        stages,
        params,
        ranks=ranks,
        partition=[PartitionSpec("model")] * len(stages),
        wire=connected,
    )
    batch = {"x": np.ones((JOB.num_microbatches * _ROWS, width), np.float32)}
    microbatches = split(batch, JOB.num_microbatches)
    return pipeline, (pipeline.place(params), microbatches), late


def ready_s(trace: Trace, ranks: Sequence[int]) -> dict[Task, float]:
    """Returns when each task became ready, as this process saw it.

    What comes from the same rank is there when its source begins: until that ends the
    device is busy anyway.
    """
    graph = trace.graph
    begins = {span.task: span.start_s for span in trace.spans}
    came = {
        (told.event.source, told.event.to): told.time_s
        for told in trace.log
        if isinstance(told.event, Arrived)
    }
    return {
        task: max(
            (
                begins[source]
                if graph.rank_of(source) == rank
                else came[source, task.stage]
                for source in graph.inputs(task)
            ),
            default=0.0,
        )
        for rank in ranks
        for task in graph.tasks(rank)
    }


def decided_s(
    pipeline: Pipeline, trace: Trace, ranks: Sequence[int]
) -> dict[Task, float]:
    """Returns when this process learned what led it to launch each task.

    Found by telling fresh dispatchers the same again.
    """
    groups = pipeline.wire.groups.groups if pipeline.wire else None
    fresh = policies.dispatchers(trace.graph, pipeline.policy, None, ranks, groups)
    by_rank = {dispatcher.rank: dispatcher for dispatcher in fresh}
    return {
        instruction.task: told.time_s
        for told in trace.log
        for instruction in by_rank[told.rank].handle(told.event)
        if isinstance(instruction, Launch)
    }


def run(
    cluster: Cluster, pipeline: Pipeline, given: Any, late: Late | None, wanted: Any
) -> Any:
    """Runs one step; returns what this process saw of it."""
    wanted = dict(wanted)
    forward_s, backward_s, transfer_s, late_s = (
        wanted.pop(name, 0.0) / 1e3 for name in _TIMES
    )
    if late is not None:
        late.late_s = late_s
    pipeline.policy = Policy(**wanted)

    def table(graph: PipelineGraph) -> costs.CostTable:
        return costs.constant(graph, forward_s, backward_s, transfer_s)

    pipeline.emulation = Emulation(table)
    begun = pipeline.begin(*given)
    cpu_s = time.process_time()
    drive([begun.executor])
    cpu_s = time.process_time() - cpu_s
    trace, shift_s = begun.trace, begun.start_s
    ranks = sorted({span.rank for span in trace.spans})
    ready = ready_s(trace, ranks)
    decided = decided_s(pipeline, trace, ranks)
    finishes = [t.time_s for t in trace.log if isinstance(t.event, Finished)]
    seen = {
        "process": cluster.process,
        "start_s": shift_s,
        "end_s": shift_s + max(finishes),
        "cpu_s": cpu_s,
        "launches": [
            (
                str(span.task),
                span.rank,
                span.start_s + shift_s,
                span.end_s + shift_s,
                ready[span.task] + shift_s,
                decided[span.task] + shift_s,
            )
            for span in trace.spans
        ],
    }
    pipeline.end(begun)
    return seen


def main() -> None:
    """Runs what the job says."""
    whereabouts = Whereabouts(JOB.coordinator, JOB.num_processes, JOB.process_id)
    with joined(whereabouts) as cluster:
        pipeline, given, late = make_pipeline(cluster)
        found = []
        for wanted in [JOB.runs[0], *JOB.runs]:  # once before, to compile
            try:
                seen = run(cluster, pipeline, given, late, wanted)
            except RuntimeError as error:
                seen = {"process": cluster.process, "error": str(error)}
            found.append(cluster.all_gather(json.dumps(seen)))
        if cluster.is_first:
            runs = [[json.loads(each) for each in gathered] for gathered in found[1:]]
            pathlib.Path(JOB.out).write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
