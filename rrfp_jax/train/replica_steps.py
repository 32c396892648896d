"""One step over the data-parallel replicas that this process has a part in.

Each replica is a pipeline of its own, with its own microbatches; those of one process
are driven together. What belongs to the step as a whole, such as its number of tokens,
is summed over all replicas, each of which one process speaks for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.coordination.cluster import Cluster
from rrfp_jax.data.microbatch import Microbatch
from rrfp_jax.runtime import ties
from rrfp_jax.runtime.driving import drive
from rrfp_jax.runtime.outcome import Result
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.runtime.replicas import Replicas
from rrfp_jax.train import feeds
from rrfp_jax.train.optimizer import Trees
from rrfp_jax.train.stages import Cut

Results = dict[int, Result]  # by replica


class ReplicaSteps:
    """Runs steps.

    Args:
      pipelines: by replica, those that this process has a part in.
      stages: by stage, its devices in all replicas.
      cut: which parameters are tied.
      num_microbatches: of each replica.
      cluster: the processes of the run.
    """

    def __init__(
        self,
        pipelines: Mapping[int, Pipeline],
        stages: Sequence[Replicas],
        cut: Cut,
        num_microbatches: int,
        cluster: Cluster,
    ) -> None:
        self._pipelines = pipelines
        self._stages = stages
        self._tied = cut.tied
        self._num_microbatches = num_microbatches
        self._cluster = cluster
        self.num_replicas = len(stages[0].ranks)

    def run(
        self,
        params: Trees,
        batch: Sequence[Microbatch],
        scale: float = 1.0,
        seed: int | None = None,
        step: int = 0,
        backward: bool = True,
    ) -> Results:
        """Runs one step of each replica.

        Args:
          params: by stage, on all replicas.
          batch: the microbatches of the replicas here, one replica after another.
          scale: of the sum of losses.
          seed: of dropout; None for none.
          step: which one this is.
          backward: whether there is one.
        """
        begun = {
            q: self._pipelines[q].begin(
                self._view(params, q),
                feeds.feeds(mine, seed, step, q * self._num_microbatches),
                scale,
                backward,
                [microbatch.sample_ids for microbatch in mine],
            )
            for q, mine in self._by_replica(batch).items()
        }
        drive([each.executor for each in begun.values()])
        return {q: self._pipelines[q].end(each) for q, each in begun.items()}

    def to_report(self, results: Results) -> list[Result]:
        """Returns the results of the replicas that this process speaks for."""
        return [result for q, result in results.items() if self._speaks_for(q)]

    def num_tokens(self, batch: Sequence[Microbatch]) -> float:
        """Returns the unmasked tokens of the step, of all replicas."""
        by_replica = self._by_replica(batch).items()
        return self._summed({q: sum(m.num_tokens for m in ms) for q, ms in by_replica})

    def loss(self, results: Results, scale: float) -> float:
        """Returns `scale` times all losses of the step; NaN if one is not finite."""
        if self.num_replicas == 1:
            return results[0].loss
        losses = {
            q: math.fsum(r.losses) if math.isfinite(r.loss) else math.nan
            for q, r in results.items()
        }
        return self._summed(losses) * scale

    def culprit(self, results: Results) -> str:
        """Names the first task whose results are not finite; all processes ask."""
        found = [(q, r.culprit()) for q, r in results.items()]
        mine = [(q, str(task)) for q, task in found if task is not None]
        told = [entry for each in self._cluster.all_gather(mine) for entry in each]
        if not told:
            return "none"
        replica, task = min(told)
        return f"{task} of replica {replica}" if self.num_replicas > 1 else str(task)

    def copy_tied(self, params: Trees) -> None:
        """Gives every copy of a tied parameter its owner's value, in place."""
        if not self._tied:
            return
        views = {q: self._view(params, q) for q in self._pipelines}
        for q, view in views.items():
            self._pipelines[q].copy_tied(view)
        for place in (place for group in self._tied for place in group[1:]):
            stage = self._stages[place[0]]
            copies = [
                ties.find(view, place)
                for q, view in views.items()
                if stage.ranks[q].is_here
            ]
            if copies:
                joined = stage.joined(copies, copies[0].sharding)
                ties.replace(params, place, joined)

    def _by_replica(
        self, batch: Sequence[Microbatch]
    ) -> dict[int, Sequence[Microbatch]]:
        count = self._num_microbatches
        return {
            q: batch[i * count : (i + 1) * count] for i, q in enumerate(self._pipelines)
        }

    def _speaks_for(self, replica: int) -> bool:
        wire = self._pipelines[replica].wire
        return wire is None or wire.processes[0] == self._cluster.process

    def _summed(self, mine: Mapping[int, float]) -> float:
        """Returns the exact sum over all replicas of what each of them has."""
        if self.num_replicas == 1:
            return mine[0]
        told = [value for q, value in mine.items() if self._speaks_for(q)]
        return math.fsum(x for each in self._cluster.all_gather(told) for x in each)

    def _view(self, params: Trees, replica: int) -> list[Any]:
        """Returns the parameters as one replica has them."""
        shardings = self._pipelines[replica].parameters.sharding_trees
        return [
            jax.tree.map(stage.view, tree, like) if stage.ranks[replica].is_here else {}
            for stage, tree, like in zip(self._stages, params, shardings, strict=True)
        ]
