"""What a step leaves behind, put together from all processes of its pipeline."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.core import trace_parts
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ProtocolError
from rrfp_jax.runtime.executor import Step
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.runtime.stage import Layout, Tree
from rrfp_jax.runtime.wire import Wire
from rrfp_jax.transport import codec


@dataclasses.dataclass(frozen=True)
class Result:
    """What a step computed.

    Attributes:
      loss: scale times the exact sum of the microbatches' losses; NaN if one of them is
        not finite.
      losses: the loss of each microbatch, unscaled.
      aux: the auxiliary outputs of each microbatch.
      grads: by stage, in the structure of its parameters, float32, on the devices of
        its rank; None for what is not trained, and for the stages of other processes.
        Empty for a step without backward.
      trace: what ran when: of the whole pipeline in the first of its processes, of the
        ranks that it has a part in in the others.
      flags: whether the results of each task of this process are finite.
      wire: to the other processes of the pipeline.
    """

    loss: float
    losses: tuple[float, ...]
    aux: tuple[Tree, ...]
    grads: tuple[Tree, ...]
    trace: Trace
    flags: Mapping[Task, jax.Array]
    wire: Wire | None = None

    def culprit(self) -> Task | None:
        """Returns the first task whose results are not finite; None if all are.

        First by microbatch, then by precedence: the one that the others have it from.
        To be called by all processes of the pipeline, or by none.
        """
        tasks = self.trace.graph.tasks()
        mine = (i for i, task in enumerate(tasks) if not self.flags.get(task, np.True_))
        first = next(mine, None)
        all_first = [first] if self.wire is None else self.wire.all_gather(first)
        found = [i for i in all_first if i is not None]
        return tasks[min(found)] if found else None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Losses and auxiliary outputs of each microbatch, and the trace."""

    losses: tuple[float, ...]
    aux: tuple[Tree, ...]
    trace: Trace

    def loss(self, scale: float) -> float:
        """Returns `scale` times the sum of the losses; NaN if one is not finite."""
        if not all(map(math.isfinite, self.losses)):
            return math.nan
        return math.fsum(self.losses) * scale


def gather(
    step: Step,
    outputs: Sequence[Layout],
    dispatchers: Sequence[Dispatcher],
    ranks: Sequence[RankMesh],
    trace: Trace,
    wire: Wire | None,
) -> Outcome:
    """Puts the outcome of a step together; all processes of the pipeline call this.

    Args:
      step: run to its end.
      outputs: of the loss stage, by microbatch.
      dispatchers: those of this process.
      ranks: the devices of each pipeline rank.
      trace: of this process.
      wire: to the others; None if there are none.

    Raises:
      ProtocolError: the processes of a rank have launched different sequences.
    """
    mine = {j: [np.asarray(x) for x in leaves] for j, leaves in step.outputs.items()}
    if wire is not None:
        mine = _exchanged(mine, dispatchers, ranks, trace, wire)
    losses, aux = [], []
    for j, layout in enumerate(outputs):
        loss, extra = layout.unflatten(mine[j])
        losses.append(float(loss))
        aux.append(extra)
    return Outcome(tuple(losses), tuple(aux), trace)


def _exchanged(
    mine: dict[int, list[Any]],
    dispatchers: Sequence[Dispatcher],
    ranks: Sequence[RankMesh],
    trace: Trace,
    wire: Wire,
) -> dict[int, list[Any]]:
    """Returns the outputs, from whoever has them; completes the trace of the first."""
    process = wire.desk.process
    leads = [d.rank for d in dispatchers if ranks[d.rank].processes[0] == process]
    holder = ranks[trace.graph.placement[trace.graph.loss_stage]].processes[0]
    packed = [
        (j, [(*codec.pack_header(x.dtype, x.shape), x.tobytes()) for x in leaves])
        for j, leaves in mine.items()
    ]
    sequences = [(d.rank, d.num_launched, d.sequence_hash) for d in dispatchers]
    found = wire.all_gather((packed if process == holder else (), sequences))
    _check_sequences({p: s for p, (_, s) in zip(wire.processes, found, strict=True)})
    parts = wire.desk.gather(trace_parts.pack(trace, leads), wire.processes)
    if parts is not None:
        trace_parts.complete(trace, parts)
    (outputs,) = (packed for packed, _ in found if packed)
    return {
        j: [
            codec.read_array(codec.read_header((name, shape)), memoryview(data))
            for name, shape, data in leaves
        ]
        for j, leaves in outputs
    }


def _check_sequences(
    by_process: Mapping[int, Sequence[tuple[int, int, bytes]]],
) -> None:
    first: dict[int, tuple[int, int, bytes]] = {}  # rank -> process, launches, hash
    for process, sequences in by_process.items():
        for rank, count, digest in sequences:
            known, same, as_there = first.setdefault(rank, (process, count, digest))
            if (count, digest) != (same, as_there):
                raise ProtocolError(
                    f"processes {known} and {process} of rank {rank} have launched "
                    f"different sequences: {same} tasks with hash {as_there.hex()}, "
                    f"{count} with {digest.hex()}.\n"
                    "  Their collectives did not match; the step is worthless. Set "
                    "--config.pipeline.agreement to intersection."
                )
