"""All ranks of SpectraX, in one process with a CPU device each.

    python driver.py JOB.json REPORT.json

A stage is a function with a backward of its own, and both call the host, which takes
the task's time. SpectraX computes the forward again in every backward; only the forward
that is a task takes time. It runs the last stage's F and B as one program, and leaves
out the first stage's B where the backward is split: there one call takes the time of
both tasks.
"""

import functools
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import peer_job

JOB = peer_job.read(sys.argv[1])

import jax

jax.config.update("jax_num_cpu_devices", JOB.num_ranks)  # before the first use

import jax.numpy as jnp
import numpy as np
import spectrax
from spectrax.runtime import schedules
from spectrax.runtime.mpmd import sxjit, sxstage_iter, sxvalue_and_grad
from spectrax.runtime.types import MpMdMesh

SCHEDULES = {  # name -> class, whether the backward is split
    "gpipe": (schedules.GPipe, False),
    "1f1b": (schedules.Std1F1B, False),
    "eager_1f1b": (schedules.Eager1F1B, False),
    "zb_h1": (schedules.ZeroBubbleH1, True),
    "interleaved": (schedules.InterleavedH1, False),
}
# What a call stands for: what was really run, and which stage it is.
FUSED = {("B", "last"): "FB", ("W", "first"): "BW"}


def layers(weights: Sequence[jax.Array], h_BD: jax.Array) -> jax.Array:
    """Returns what a stage's layers make of its input."""
    for w_DD in weights:
        h_BD = jnp.tanh(h_BD @ w_DD)
    return h_BD


def placement(schedule: schedules.Schedule) -> list[int]:
    """Returns the rank of each stage; which one holds which, is the schedule's."""
    held = {
        schedule.logical_at(rank, virtual, JOB.num_ranks): rank
        for rank in range(JOB.num_ranks)
        for virtual in range(schedule.virtual_stages_per_rank())
    }
    return [rank for _, rank in sorted(held.items())]


class Pipeline:
    """The stages of all ranks under one schedule."""

    def __init__(self, name: str) -> None:
        kind, self.is_split = SCHEDULES[name]
        self.meter: peer_job.Meter
        # SpectraX launches from several threads, and programs that call the host run in
        # the thread that launches them: side by side, which they cannot on a device.
        self._free = [threading.Lock() for _ in range(JOB.num_ranks)]
        schedule = kind(microbatches=JOB.num_microbatches)
        self.ranks = placement(schedule)
        held = 2 * JOB.num_ranks // len(self.ranks)
        weights = list(map(jnp.asarray, peer_job.weights(JOB)))
        self.params = tuple(
            tuple(weights[s * held : (s + 1) * held]) for s in range(len(self.ranks))
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
        jitted = sxjit(
            self._loss,
            mesh=MpMdMesh(mesh, "ranks"),
            schedule=schedule,
            batch_argnums=(1, 2, 3),
        )
        self._value_and_grad = sxvalue_and_grad(jitted, argnums=(0,))
        self._stages = [self._timed(s) for s in range(len(self.ranks))]

    def step(self, seconds: peer_job.Seconds) -> tuple[float, dict[int, Any]]:
        """Runs a step; returns when it began, and its gradients by layer."""
        table = peer_job.placed(seconds, self.ranks)
        self.meter = peer_job.Meter(table, self.ranks, self.is_split)
        x, target = peer_job.batch(JOB)
        microbatch = np.repeat(
            np.arange(JOB.num_microbatches, dtype=np.int32), JOB.rows
        )
        begin_s = time.perf_counter()
        _, (grads,) = self._value_and_grad(self.params, x, target, microbatch)
        return begin_s, dict(enumerate(jax.block_until_ready(jax.tree.leaves(grads))))

    def _loss(self, params: Any, x: Any, target: Any, microbatch: Any) -> jax.Array:
        h_BD = x
        for stage, (fn, weights) in enumerate(zip(self._stages, params, strict=True)):
            if stage:
                h_BD = sxstage_iter(h_BD)
            h_BD = fn(weights, h_BD, microbatch)
        return jnp.mean((h_BD - target) ** 2)

    def _timed(self, stage: int) -> Callable[..., jax.Array]:
        """Returns the function of a stage, F as it stands and B and W as its own."""

        @jax.custom_vjp
        def apply(weights: Any, h_BD: jax.Array, microbatch: jax.Array) -> jax.Array:
            return self._occupy("F", stage, microbatch, [layers(weights, h_BD)])[0]

        def forward(weights: Any, h_BD: jax.Array, microbatch: jax.Array) -> Any:
            return layers(weights, h_BD), (weights, h_BD, microbatch)

        def backward(kept: Any, grad_BD: jax.Array) -> Any:
            weights, h_BD, microbatch = kept
            grads, grad_h_BD = jax.vjp(layers, weights, h_BD)[1](grad_BD)
            if self.is_split:  # of the two, a program keeps the one it needs
                (grad_h_BD,) = self._occupy("B", stage, microbatch, [grad_h_BD])
                grads = self._occupy("W", stage, microbatch, grads)
            else:
                all_grads = self._occupy("B", stage, microbatch, [*grads, grad_h_BD])
                *grads, grad_h_BD = all_grads
            none = np.zeros(microbatch.shape, jax.dtypes.float0)
            return tuple(grads), grad_h_BD, none

        apply.defvjp(forward, backward)
        return apply

    def _occupy(
        self, kind: str, stage: int, microbatch: jax.Array, values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the values once the task's time is over."""
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        host = functools.partial(self._take_time, kind, stage)
        return jax.pure_callback(host, shapes, microbatch, *values)

    def _take_time(self, kind: str, stage: int, microbatch: Any, *values: Any) -> Any:
        ends = {len(self.ranks) - 1: "last", 0: "first"}
        with self._free[self.ranks[stage]]:
            for each in FUSED.get((kind, ends.get(stage, "")), kind):
                with self.meter.task(each, stage, int(np.asarray(microbatch)[0])):
                    pass
        return list(values)


def main(report_path: str) -> None:
    """Runs the job's schedules."""
    expected = peer_job.reference(JOB)
    version = spectrax.__version__
    report = peer_job.Report(report_path, "SpectraX", version, JOB.limit_s)
    for name in JOB.schedules:
        with report.schedule(name) as iterations:
            pipeline = Pipeline(name)
            for is_dropped, iteration in JOB.steps():
                begin_s, grads = pipeline.step(iteration.seconds)
                error = peer_job.error(grads, expected)
                if not is_dropped:
                    iterations.append(pipeline.meter.seen(iteration, begin_s, error))


if __name__ == "__main__":
    main(sys.argv[2])
