"""One rank of rrfp_jax, for the comparison with other systems.

    python scripts/peers/ours.py JOB.json REPORT.json RANK HOST:PORT

The real runtime with emulated devices: one process a rank, its programs and transfers
real, its tasks as long as the job says, its links as fast as they are.
"""

import dataclasses
import importlib.metadata
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts/bench")]

import jax

jax.config.update("jax_num_cpu_devices", 1)  # before the first use

import emulated_ranks
import jax.numpy as jnp

from rrfp_jax import Emulation, Pipeline, Policy, Stage, split
from rrfp_jax.coordination.cluster import Cluster, Whereabouts, joined
from rrfp_jax.core.events import Finished
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Trace
from rrfp_jax.runtime.driving import drive
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.runtime.wire import Wire
from rrfp_jax.sim import costs
from rrfp_jax.sim.costs import CostTable
from third_party import peer_job

LIMIT = 32  # microbatches in flight on a rank (RRFP §8)
# A peer's task sleeps in the thread that would launch the next one, so a peer's host
# time is not hidden; nor is ours, as long as nothing is launched ahead.
LAUNCH_AHEAD = 1
BF = Policy("bf", in_flight_limit=LIMIT, launch_ahead=LAUNCH_AHEAD)
BFW = dataclasses.replace(BF, hint="bfw")
SCHEDULES = {  # name -> policy, ranks of the stages if there are two a rank
    "bf": (BF, None),
    "bfw": (BFW, None),
    "bf_v": (BF, peer_job.v_shape),
    "bfw_v": (BFW, peer_job.v_shape),
    "1f1b": (dataclasses.replace(BF, hint="1f1b", order="fixed"), None),
}


def layers(weights: Any, h_BD: jax.Array) -> jax.Array:
    """Returns what a stage's layers make of its input."""
    for w_DD in weights:
        h_BD = jnp.tanh(h_BD @ w_DD)
    return h_BD


def first(weights: Any, _: Any, feed: Any) -> jax.Array:
    """The stage that reads the microbatch."""
    return layers(weights, feed)


def middle(weights: Any, h_BD: jax.Array, _: Any) -> jax.Array:
    """A stage."""
    return layers(weights, h_BD)


def last(weights: Any, h_BD: jax.Array, feed: Any) -> jax.Array:
    """The loss of a microbatch: a sum."""
    return jnp.sum((layers(weights, h_BD) - feed) ** 2)


class Rank:
    """This process's part of the pipeline under one schedule.

    Args:
      job: what to run.
      name: of the schedule.
      cluster: all processes.
      connected: the ranks, and the wire between them.
    """

    def __init__(
        self,
        job: peer_job.Job,
        name: str,
        cluster: Cluster,
        connected: tuple[Sequence[RankMesh], Wire | None],
    ) -> None:
        policy, place = SCHEDULES[name]
        self._cluster = cluster
        self._ranks = place(job.num_ranks) if place else [*range(job.num_ranks)]
        self._held = 2 * job.num_ranks // len(self._ranks)  # layers of a stage
        between = len(self._ranks) - 2
        stages = [Stage(first, select=lambda microbatch: microbatch["x"])]
        stages += [Stage(middle, select=lambda _: None)] * between
        stages += [Stage(last, select=lambda microbatch: microbatch["target"])]
        weights, held = peer_job.weights(job), self._held
        params = [weights[i : i + held] for i in range(0, len(weights), held)]
        ranks, wire = connected
        self._pipeline = Pipeline(
            stages,
            params,
            placement=self._ranks,
            policy=policy,
            ranks=ranks,
            wire=wire,
        )
        self._params = self._pipeline.place(params)
        x, target = peer_job.batch(job)
        self._scale = 1 / target.size
        self._microbatches = split({"x": x, "target": target}, job.num_microbatches)

    def step(
        self, seconds: peer_job.Seconds
    ) -> tuple[float, peer_job.Meter, dict[int, Any]]:
        """Runs a step; returns when it began, what it did, its gradients by layer."""
        placed = peer_job.placed(seconds, self._ranks)
        self._pipeline.emulation = Emulation(lambda graph: table(graph, placed))
        self._cluster.all_gather(None)
        begin_s = time.perf_counter()
        begun = self._pipeline.begin(self._params, self._microbatches, self._scale)
        drive([begun.executor])
        meter = self._seen(placed, begun.trace, begun.start_s)
        result = self._pipeline.end(begun)
        grads = {
            stage * self._held + i: grad
            for stage, here in enumerate(result.grads)
            for i, grad in enumerate(here or ())
            if grad is not None  # else it is another process's
        }
        return begin_s, meter, grads

    def _seen(
        self, seconds: peer_job.Seconds, trace: Trace, start_s: float
    ) -> peer_job.Meter:
        """Returns what ran here; a task ends when the host knows of it."""
        meter = peer_job.Meter(seconds, self._ranks, trace.graph.is_split)
        ends = {
            told.event.task: told.time_s
            for told in trace.log
            if isinstance(told.event, Finished)
        }
        for task, _, from_s, _ in trace.spans:
            name = (str(task.kind), task.stage, task.microbatch)
            meter.tasks.append((*name, start_s + from_s, start_s + ends[task]))
        return meter


def table(graph: PipelineGraph, seconds: peer_job.Seconds) -> CostTable:
    """Returns the durations of a step's tasks; its transfers take what they take."""
    compute = {
        (Kind(kind), s): tuple(each)
        for kind, stages in seconds.items()
        for s, each in enumerate(stages)
    }
    transfer = costs.constant(graph, 0.0, 0.0).transfer
    return CostTable(compute, transfer)


def main(job_path: str, report_path: str, rank: str, address: str) -> None:
    """Runs the job's schedules."""
    job = peer_job.read(job_path)
    expected = peer_job.reference(job)
    with joined(Whereabouts(address, job.num_ranks, int(rank))) as cluster:
        connected = emulated_ranks.connected(cluster, job.num_ranks, 1)
        version = importlib.metadata.version("rrfp_jax")
        report = peer_job.Report(report_path, "rrfp_jax", version, job.limit_s)
        for name in job.schedules:
            with report.schedule(name) as iterations:
                here = Rank(job, name, cluster, connected)
                for is_dropped, iteration in job.steps():
                    begin_s, meter, grads = here.step(iteration.seconds)
                    error = peer_job.error(grads, expected)
                    if not is_dropped:
                        iterations.append(meter.seen(iteration, begin_s, error))


if __name__ == "__main__":
    main(*sys.argv[1:])
