"""The library entry: stage functions, their parameters and a DAG; loss and gradients.

The trainer uses this very object.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from rrfp_jax.coordination.desk import with_nobody
from rrfp_jax.core import placement as placement_lib
from rrfp_jax.core import policies
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.graph import Edge, PipelineGraph, chain_edges
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import accumulators, compiler, parameters, placing, ties
from rrfp_jax.runtime.devices import Devices, RealDevices
from rrfp_jax.runtime.driving import drive
from rrfp_jax.runtime.emulation import Emulation
from rrfp_jax.runtime.executor import Executor, Step
from rrfp_jax.runtime.expecting import Expecting
from rrfp_jax.runtime.outcome import Result, gather
from rrfp_jax.runtime.stage import Layout, Stage, StageFunction, Tree, flatten
from rrfp_jax.runtime.wire import Wire
from rrfp_jax.transport.base import Transport
from rrfp_jax.transport.in_process import InProcess


@dataclasses.dataclass(frozen=True, eq=False)
class Begun:
    """A step on its way.

    Attributes:
      step: its inputs and outputs.
      dispatchers: of the ranks of this process.
      executor: to be driven to its end.
      trace: of the ranks of this process.
      scale: of the loss.
      start_s: when it began, on `time.perf_counter`.
    """

    step: Step
    dispatchers: Sequence[Dispatcher]
    executor: Executor
    trace: Trace
    scale: float
    start_s: float


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
      wire: to the other processes that have a part in the pipeline; None if there are
        none. All of them construct the same pipeline, and call `compile`, `run` and
        `copy_tied` in the same order with the same arguments; the parameters of stages
        of other processes may be anything.

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
        wire: Wire | None = None,
    ) -> None:
        self._wire = wire
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
        self.compiler = compiler.Compiler(
            self._stages,
            self.parameters,
            self.ranks,
            with_nobody if wire is None else wire.all_gather,
        )
        self._transport: Transport = InProcess() if wire is None else wire.transport
        if emulation is not None and emulation.blocking and wire is not None:
            raise ConfigError(
                "blocking transfers are emulated in one process only: they need both "
                "ranks.\n  Emulate overlapped ones, or start one process."
            )

    @property
    def wire(self) -> Wire | None:
        """To the other processes of the pipeline; None if there are none."""
        return self._wire

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
        return self.compiler.num_missing(graph, _layouts(feeds))

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
        sample_ids: Sequence[tuple[int, ...]] = (),
    ) -> Result:
        """Runs one step; compiles first what was not compiled before.

        Args:
          params: a tree for each stage.
          microbatches: a tree each.
          scale: what the sum of losses is multiplied by.
          backward: whether there is one.
          sample_ids: of each microbatch: what other processes send is checked to be of
            the same.

        Raises:
          ConfigError: the policy does not fit this step's graph, a microbatch is of a
            shape that was not declared before the compiler was sealed, or the limit in
            bytes does not hold it.
          ProtocolError: another process has sent what does not belong to this step.
        """
        begun = self.begin(params, microbatches, scale, backward, sample_ids)
        drive([begun.executor])
        return self.end(begun)

    def begin(
        self,
        params: Sequence[Tree],
        microbatches: Sequence[Tree],
        scale: float = 1.0,
        backward: bool = True,
        sample_ids: Sequence[tuple[int, ...]] = (),
    ) -> "Begun":
        """Prepares a step, for `driving.drive`. As `run`, which see."""
        graph, feeds = self._prepare(microbatches, backward)
        policies.check(graph, self.policy)
        if self.compiler.missing(graph, _layouts(feeds)):
            self._check_memory(graph, feeds)  # before anything compiles
        leaves = self.parameters.leaves(params)
        plans = self.compiler.plans(graph, _layouts(feeds))
        if backward:
            self._compile_rest()
        residuals = self._pretended(graph) or compiler.residuals(graph, plans)
        step = Step(
            graph=graph,
            programs=plans,
            params=leaves,
            feeds=[[f[0] for f in each] for each in feeds],
            scale=self._scale(graph, scale),
            accumulators=self._accumulators.zeros() if backward else [],
        )
        dispatchers = policies.dispatchers(
            graph,
            self.policy,
            residuals,
            [r for r in range(graph.num_ranks) if self.ranks[r].is_here],
            None if self._wire is None else self._wire.groups.groups,
        )
        expecting = Expecting(graph, plans, self.ranks, self._tied, sample_ids)
        if self._wire is not None:
            self._wire.groups.begin()
            self._wire.all_gather(None)  # all begin together, and so do their clocks
        self._transport.begin(expecting)
        start_s = time.perf_counter()
        devices = self._devices(graph, start_s)
        devices.trace.residuals = residuals
        executor = Executor(
            step, self.ranks, dispatchers, self._transport, devices, self._wire
        )
        return Begun(step, dispatchers, executor, devices.trace, scale, start_s)

    def end(self, begun: "Begun") -> Result:
        """Returns the result of a step that was driven to its end."""
        step, loss_stage = begun.step, begun.step.graph.loss_stage
        last = [plan[loss_stage] for plan in step.programs]
        outcome = gather(
            step,
            [programs.output for programs in last if programs is not None],
            begun.dispatchers,
            self.ranks,
            begun.trace,
            self._wire,
        )
        grads = self._accumulators.as_trees(step.accumulators)
        if grads:
            self._tied.add_up(grads, self._mover())
        loss = outcome.loss(begun.scale)
        losses, aux, trace = outcome.losses, outcome.aux, outcome.trace
        return Result(loss, losses, aux, tuple(grads), trace, step.flags, self._wire)

    def copy_tied(self, params: list[Tree]) -> None:
        """Gives every copy of a tied parameter its owner's value, in place.

        Each stage's update is another program, which XLA may round differently.
        """
        self._tied.copy(params, self._mover())

    def _mover(self) -> ties.Mover:
        until = None if self._wire is None else self._wire.desk.until
        return ties.Mover(self._transport, until)

    def _scale(self, graph: PipelineGraph, scale: float) -> Any:
        rank = self.ranks[graph.placement[graph.loss_stage]]
        if not rank.is_here:
            return None
        return placing.put([np.float32(scale)], [rank.replicated])[0]

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
            least = self._pretended(graph)
            least = least or self.compiler.least_residuals(graph, _layouts(feeds))
            policies.dispatchers(graph, self.policy, least)

    def _devices(self, graph: PipelineGraph, start_s: float) -> Devices:
        if self.emulation is None:
            return RealDevices(graph, self._transport, start_s)
        here = [r for r in range(graph.num_ranks) if self.ranks[r].is_here]
        return self.emulation.devices(graph, here, self._transport, start_s)

    def _pretended(self, graph: PipelineGraph) -> Residuals | None:
        """Returns what an emulation says that tasks keep."""
        emulation = self.emulation
        if emulation is None or emulation.residuals is None:
            return None
        return emulation.residuals(graph)

    def _compile_rest(self) -> None:
        """Compiles, once, what a step needs beside the stages' programs."""
        self._accumulators.compile()
        self._tied.compile()


def _layouts(feeds: Sequence[Sequence[tuple[list[Any], Layout]]]) -> list[list[Layout]]:
    return [[layout for _, layout in each] for each in feeds]


_NO_FEED: tuple[list[Any], Layout] = ([], flatten(None)[1])
