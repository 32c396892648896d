"""The library entry: stage functions, their parameters and a DAG; loss and gradients.

The trainer uses this very object.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.core import placement as placement_lib
from rrfp_jax.core import policies
from rrfp_jax.core.graph import Edge, PipelineGraph, chain_edges
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import accumulators, compiler, parameters, placing, ties
from rrfp_jax.runtime.devices import Devices, EmulatedDevices, RealDevices
from rrfp_jax.runtime.executor import Executor, Step
from rrfp_jax.runtime.stage import Layout, Stage, StageFunction, Tree, flatten
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim.machine import Blocking, Overlapped
from rrfp_jax.transport.in_process import InProcess


@dataclasses.dataclass(frozen=True)
class Emulation:
    """Stretches a step to a cost model, in real time.

    Attributes:
      costs: returns the durations of the tasks of a graph.
      blocking: whether a transfer occupies both ranks.
    """

    costs: Callable[[PipelineGraph], CostTable]
    blocking: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """What a step computed.

    Attributes:
      loss: scale times the exact sum of the microbatches' losses; NaN if one of them is
        not finite.
      losses: the loss of each microbatch, unscaled.
      aux: the auxiliary outputs of each microbatch.
      grads: by stage, in the structure of its parameters, float32, on the devices of
        its rank; None for what is not trained. Empty for a step without backward.
      trace: what ran when.
      flags: whether the results of each task are finite.
    """

    loss: float
    losses: tuple[float, ...]
    aux: tuple[Tree, ...]
    grads: tuple[Tree, ...]
    trace: Trace
    flags: Mapping[Task, jax.Array]

    def culprit(self) -> Task | None:
        """Returns the first task whose results are not finite; None if all are.

        First by microbatch, then by precedence: the one that the others have it from.
        """
        tasks = self.trace.graph.tasks()
        return next((task for task in tasks if not self.flags[task]), None)


class Pipeline:
    """Runs training steps of stages on pipeline ranks.

    Args:
      stages: in topological order, the loss last: functions, or `Stage`s.
      params: a tree for each stage; only shapes and dtypes matter here.
      edges: (source, target) pairs; a chain by default.
      placement: the rank of each stage; one stage a rank by default.
      policy: how ranks choose among ready tasks.
      ranks: the devices of each rank; by default one local device each.
      partition: a tree of `PartitionSpec` for each stage, or None for a replicated one.
      tied: groups of parameters that are one, each named by (stage, *path).
      skips: returns the stages that a microbatch does not visit; none by default.
      emulation: stretches steps to a cost model.

    Raises:
      ConfigError: these do not fit together.
    """

    def __init__(
        self,
        stages: Sequence[Stage | StageFunction],
        params: Sequence[Tree],
        *,
        edges: Sequence[Edge] | None = None,
        placement: Sequence[int] | None = None,
        policy: policies.Policy | None = None,
        ranks: Sequence[placing.RankMesh] | None = None,
        partition: Sequence[Tree] | None = None,
        tied: Sequence[ties.Group] = (),
        skips: Callable[[Tree], Collection[int]] = lambda microbatch: (),
        emulation: Emulation | None = None,
    ) -> None:
        self._stages = [s if isinstance(s, Stage) else Stage(s) for s in stages]
        self._edges = tuple(chain_edges(len(stages)) if edges is None else edges)
        self._placement = tuple(
            placement_lib.one_each(len(stages)) if placement is None else placement
        )
        self.policy = policy or policies.Policy()
        # Checks edges and placement.
        probe = PipelineGraph(len(stages), 1, self._edges, self._placement)
        self.ranks = list(ranks or placing.make_ranks(probe.num_ranks))
        if len(self.ranks) < probe.num_ranks:
            raise ConfigError(
                f"placement {self._placement} needs {probe.num_ranks} ranks; "
                f"{len(self.ranks)} are given.\n  Give a RankMesh for each."
            )
        self.parameters = parameters.Parameters(
            self._stages, params, [self.ranks[r] for r in self._placement], partition
        )
        self._accumulators = accumulators.Accumulators(self.parameters)
        self._tied = ties.Ties(tied, params, self.parameters)
        self._skips = skips
        self.emulation = emulation
        self.compiler = compiler.Compiler(self._stages, self.parameters, self.ranks)

    def graph(
        self, skipped: Sequence[Collection[int]], backward: bool = True
    ) -> PipelineGraph:
        """Returns the graph of a step.

        Args:
          skipped: for each microbatch, the stages it does not visit.
          backward: whether there is a backward.
        """
        trained = self.parameters.trained
        frozen = [s for s, each in enumerate(trained) if not any(each)]
        return PipelineGraph(
            num_stages=len(self._stages),
            num_microbatches=len(skipped),
            edges=self._edges,
            placement=self._placement,
            skipped=frozenset((s, j) for j, each in enumerate(skipped) for s in each),
            frozen=frozenset(frozen if backward else range(len(self._stages))),
            is_split=self.policy.is_split,
            in_order=self.policy.deterministic,
        )

    def place(self, params: Sequence[Tree]) -> list[Tree]:
        """Returns the parameters on the devices of their ranks."""
        return self.parameters.place(params)

    def compile(
        self,
        microbatches: Sequence[Tree],
        backward: bool = True,
        report: compiler.Report | None = None,
    ) -> None:
        """Compiles all programs for microbatches of these shapes.

        Args:
          microbatches: arrays, or `jax.ShapeDtypeStruct`s in their stead.
          backward: whether to train or to evaluate on them.
          report: is called for each program that was compiled.
        """
        graph, feeds = self._prepare(microbatches, backward)
        self._check_memory(graph, feeds)
        self.compiler.plans(graph, _layouts(feeds), report)
        if backward:
            self._compile_rest()

    def num_uncompiled(
        self,
        microbatches: Sequence[Tree],
        backward: bool = True,
        is_split: bool | None = None,
    ) -> int:
        """Returns how many programs `compile`, or `programs`, would compile; traces
        them.
        """
        graph, feeds = self._prepare(microbatches, backward, is_split)
        return len(self.compiler.missing(graph, _layouts(feeds)))

    def programs(
        self,
        microbatches: Sequence[Tree],
        is_split: bool,
        report: compiler.Report | None = None,
    ) -> tuple[PipelineGraph, list[compiler.Plan]]:
        """Returns the graph of a training step and its compiled programs.

        Args:
          microbatches: arrays, or `jax.ShapeDtypeStruct`s in their stead.
          is_split: whether the backward is split, whatever the policy says.
          report: is called for each program that was compiled.
        """
        graph, feeds = self._prepare(microbatches, True, is_split)
        return graph, self.compiler.plans(graph, _layouts(feeds), report)

    def check(self, num_microbatches: int) -> None:
        """Checks that the policy fits steps of so many microbatches.

        Raises:
          ConfigError: it does not.
        """
        policies.check(self.graph([()] * num_microbatches), self.policy)

    def check_memory(self, microbatches: Sequence[Tree]) -> None:
        """Checks that a step of these microbatches can keep to the limit in bytes.

        Traces the stages, but compiles nothing. On ranks of several devices the bytes
        of each are known only when the programs are compiled; until then, this checks
        the least that they can be.

        Raises:
          ConfigError: it cannot.
        """
        self._check_memory(*self._prepare(microbatches, backward=True))

    def loss_and_grad(
        self, params: Sequence[Tree], microbatches: Sequence[Tree], scale: float = 1.0
    ) -> tuple[float, tuple[Tree, ...]]:
        """Returns the loss of a step and its gradients, by stage.

        Args:
          params: a tree for each stage.
          microbatches: a tree each; `rrfp_jax.split` makes them from a batch.
          scale: what the sum of losses is multiplied by, such as 1 / number of tokens.
        """
        result = self.run(params, microbatches, scale)
        return result.loss, result.grads

    def run(
        self,
        params: Sequence[Tree],
        microbatches: Sequence[Tree],
        scale: float = 1.0,
        backward: bool = True,
    ) -> Result:
        """Runs one step; compiles first what was not compiled before.

        Raises:
          ConfigError: the policy does not fit this step's graph, a microbatch is of a
            shape that was not declared before the compiler was sealed, or the limit in
            bytes does not hold it.
        """
        graph, feeds = self._prepare(microbatches, backward)
        policies.check(graph, self.policy)
        if self.compiler.missing(graph, _layouts(feeds)):
            self._check_memory(graph, feeds)  # before anything compiles
        leaves = self.parameters.leaves(params)
        plans = self.compiler.plans(graph, _layouts(feeds))
        residuals = compiler.residuals(graph, plans)
        dispatchers = policies.dispatchers(graph, self.policy, residuals)
        if backward:
            self._compile_rest()
        loss_rank = self.ranks[graph.placement[graph.loss_stage]]
        step = Step(
            graph=graph,
            programs=plans,
            params=leaves,
            feeds=[[f[0] for f in each] for each in feeds],
            scale=jax.device_put(np.float32(scale), loss_rank.replicated),
            accumulators=self._accumulators.zeros() if backward else [],
        )
        transport = InProcess()
        devices = self._devices(graph, transport)
        devices.trace.residuals = residuals
        trace = Executor(step, self.ranks, dispatchers, transport, devices).run()
        return self._result(step, plans, scale, trace)

    def _prepare(
        self,
        microbatches: Sequence[Tree],
        backward: bool,
        is_split: bool | None = None,
    ) -> tuple[PipelineGraph, list[list[tuple[list[Any], Layout]]]]:
        graph = self.graph([self._skips(m) for m in microbatches], backward)
        if is_split is not None:
            graph = dataclasses.replace(graph, is_split=is_split, in_order=False)
        feeds = [
            [
                flatten(stage.select(m)) if graph.route(j).is_visited[s] else _NO_FEED
                for s, stage in enumerate(self._stages)
            ]
            for j, m in enumerate(microbatches)
        ]
        return graph, feeds

    def _check_memory(
        self, graph: PipelineGraph, feeds: Sequence[Sequence[tuple[list[Any], Layout]]]
    ) -> None:
        if self.policy.memory_limit_bytes:
            least = self.compiler.least_residuals(graph, _layouts(feeds))
            policies.dispatchers(graph, self.policy, least)

    def _devices(self, graph: PipelineGraph, transport: InProcess) -> Devices:
        if self.emulation is None:
            return RealDevices(graph, transport)
        costs = self.emulation.costs(graph)
        machine = Blocking if self.emulation.blocking else Overlapped
        return EmulatedDevices(machine(graph, costs))

    def _result(
        self,
        step: Step,
        plans: Sequence[compiler.Plan],
        scale: float,
        trace: Trace,
    ) -> Result:
        losses, aux = [], []
        for j, plan in enumerate(plans):
            programs = plan[-1]
            assert programs is not None
            loss, extra = programs.output.unflatten(step.outputs[j])
            losses.append(float(loss))
            aux.append(extra)
        loss = (
            math.fsum(losses) * scale if all(map(math.isfinite, losses)) else math.nan
        )
        grads = self._accumulators.as_trees(step.accumulators)
        if grads:
            self._tied.add_up(grads)
        return Result(loss, tuple(losses), tuple(aux), tuple(grads), trace, step.flags)

    def _compile_rest(self) -> None:
        """Compiles, once, what a step needs beside the stages' programs."""
        self._accumulators.compile()
        self._tied.compile()


def _layouts(feeds: Sequence[Sequence[tuple[list[Any], Layout]]]) -> list[list[Layout]]:
    return [[layout for _, layout in each] for each in feeds]


_NO_FEED: tuple[list[Any], Layout] = ([], flatten(None)[1])
