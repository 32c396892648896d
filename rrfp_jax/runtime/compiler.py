"""Compiles every stage for every kind of microbatch before anything runs.

A *plan* is the programs that one kind of microbatch needs: one entry a stage. Two
microbatches are of one kind if they skip the same stages and their feeds have the same
layout (the same shape bucket). Stages are traced one after another, since a stage's
input is its source's output, and compiled in parallel.

Where ranks lie in several processes, all of them trace all stages, and each compiles
those that it has a part in. Of the others it learns what their tasks keep; that
exchange is also what makes every process wait until all have compiled.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from rrfp_jax.coordination.desk import Share, with_nobody
from rrfp_jax.core import memory
from rrfp_jax.core.graph import PipelineGraph, Route
from rrfp_jax.core.memory import Residuals
from rrfp_jax.errors import ConfigError, InvariantError
from rrfp_jax.runtime.parameters import Parameters
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.runtime.programs import Kept, StagePrograms, compile_stage
from rrfp_jax.runtime.stage import Layout, Stage
from rrfp_jax.runtime.tracing import Signature, Traced, trace_stage

Plan = tuple[StagePrograms | None, ...]
Report = Callable[[], None]  # called for each program that was compiled


@dataclasses.dataclass(frozen=True)
class Look:
    """What a microbatch looks like to the programs."""

    skipped: frozenset[int]
    feeds: tuple[Layout, ...]
    has_backward: tuple[bool, ...]
    has_weight: tuple[bool, ...]


class Compiler:
    """Holds the compiled programs of a pipeline.

    Args:
      stages: in topological order.
      parameters: of the stages.
      ranks: the devices of each pipeline rank.
      share: the exchange between the processes of the pipeline.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        parameters: Parameters,
        ranks: Sequence[RankMesh],
        share: Share = with_nobody,
    ) -> None:
        self._share = share
        self._stages = stages
        self._parameters = parameters
        self._ranks = ranks
        self._traced: dict[tuple[int, Signature], Traced] = {}
        self._programs: dict[tuple[int, Signature], StagePrograms] = {}
        self._plans: dict[Look, Plan] = {}
        self.is_sealed = False  # whether a new kind is an error

    @property
    def num_programs(self) -> int:
        """How many stage programs there are; bounded by buckets x stages."""
        return len(self._programs)

    def num_missing(
        self, graph: PipelineGraph, feeds: Sequence[Sequence[Layout]]
    ) -> int:
        """Returns how many programs `plans` would compile in this process."""
        missing = self.missing(graph, feeds)
        return sum(self._parameters.is_here[stage] for stage, _ in missing)

    def plans(
        self,
        graph: PipelineGraph,
        feeds: Sequence[Sequence[Layout]],
        report: Report | None = None,
    ) -> list[Plan]:
        """Returns the plan of each microbatch, compiling what is new.

        Args:
          graph: the step.
          feeds: layouts by microbatch, then stage.
          report: is called for each program that was compiled.

        Raises:
          ConfigError: the compiler is sealed and a kind is new.
        """
        kinds = _kinds(graph, feeds)
        new = self._new(graph, kinds)
        if new:
            self._compile(graph, new, report or (lambda: None))
        return [self._plans[kind] for kind in kinds]

    def missing(
        self, graph: PipelineGraph, feeds: Sequence[Sequence[Layout]]
    ) -> list[tuple[int, Signature]]:
        """Returns stage and signature of each program that there is none of yet."""
        keys = []
        for kind, route in self._new(graph, _kinds(graph, feeds)).items():
            keys += [key for key in self._trace(graph, kind, route) if key]
        return [key for key in dict.fromkeys(keys) if key not in self._programs]

    def least_residuals(
        self, graph: PipelineGraph, feeds: Sequence[Sequence[Layout]]
    ) -> Residuals:
        """Returns, without compiling, the least that each task can keep on a device.

        Exact for F on ranks of one device; what B keeps for W is counted as nothing.
        """
        kinds = _kinds(graph, feeds)
        keys = {k: self._trace(graph, k, graph.route(j)) for j, k in enumerate(kinds)}

        def of(microbatch: int, stage: int) -> tuple[int, int]:
            key = keys[kinds[microbatch]][stage]
            if key is None:
                return 0, 0
            num_devices = self._ranks[graph.placement[stage]].mesh.size
            return self._traced[key].num_saved_bytes // num_devices, 0

        return memory.tabulate(graph, of)

    def _new(self, graph: PipelineGraph, kinds: Sequence[Look]) -> dict[Look, Route]:
        return {
            kind: graph.route(j)
            for j, kind in enumerate(kinds)
            if kind not in self._plans
        }

    def _compile(
        self, graph: PipelineGraph, new: dict[Look, Route], report: Report
    ) -> None:
        if self.is_sealed:
            feeds = [f.unflatten(f.avals) for f in next(iter(new)).feeds]
            raise ConfigError(
                f"a microbatch with the feeds {feeds} was not declared before "
                "training began.\n  Declare its bucket, so that it is compiled ahead."
            )
        signatures = {
            kind: self._trace(graph, kind, route) for kind, route in new.items()
        }
        wanted = dict.fromkeys(
            key for keys in signatures.values() for key in keys if key
        )
        missing = [key for key in wanted if key not in self._programs]
        here = [key for key in missing if self._parameters.is_here[key[0]]]
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        try:
            futures = {pool.submit(self._compile_one, graph, *k): k for k in here}
            for future in concurrent.futures.as_completed(futures):
                self._programs[futures[future]] = future.result()
                report()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self._learn(missing)
        for kind, keys in signatures.items():
            self._plans[kind] = tuple(key and self._programs[key] for key in keys)

    def _learn(self, missing: Sequence[tuple[int, Signature]]) -> None:
        """Learns from the other processes what the tasks of their stages keep."""
        mine = []
        for number, key in enumerate(missing):
            if programs := self._programs.get(key):
                sizes = programs.saved.num_bytes, programs.kept.num_bytes
                mine.append((number, *sizes))
        for told in self._share(mine):
            for number, saved, kept in told:
                key = missing[number]
                if key not in self._programs:
                    self._programs[key] = StagePrograms(
                        self._traced[key].output,
                        _elsewhere,
                        saved=Kept(num_bytes=saved),
                        kept=Kept(num_bytes=kept),
                    )

    def _trace(
        self, graph: PipelineGraph, kind: Look, route: Route
    ) -> list[tuple[int, Signature] | None]:
        """Returns the signature of each stage, tracing what is new."""
        outputs: dict[int, Layout] = {}
        keys: list[tuple[int, Signature] | None] = []
        for s in range(graph.num_stages):
            if not route.is_visited[s]:
                keys.append(None)
                continue
            sources = graph.sources_of[s]
            backward = route.has_backward[s]
            signature = Signature(
                params=self._parameters.layouts[s],
                sources=tuple(outputs.get(u) for u in sources),
                wants_cotangent=tuple(
                    backward and u in outputs and route.has_backward[u] for u in sources
                ),
                num_targets=len(route.targets[s]) if backward else 0,
                feed=kind.feeds[s],
                has_backward=backward,
                is_split=route.has_weight[s],
                is_loss=s == graph.loss_stage,
            )
            key = (s, signature)
            if key not in self._traced:
                self._traced[key] = _trace(
                    self._stages[s], key, self._parameters.trained[s]
                )
            outputs[s] = self._traced[key].output
            keys.append(key)
        return keys

    def _compile_one(
        self, graph: PipelineGraph, stage: int, signature: Signature
    ) -> StagePrograms:
        return compile_stage(
            self._traced[stage, signature],
            signature,
            self._ranks[graph.placement[stage]],
            self._parameters.shardings[stage],
        )


def _elsewhere(*_: Any) -> Any:
    raise InvariantError("a task was launched in a process that has no part in it.")


def residuals(graph: PipelineGraph, plans: Sequence[Plan]) -> Residuals:
    """Returns what each task of a step keeps on each device of its rank."""

    def of(microbatch: int, stage: int) -> tuple[int, int]:
        programs = plans[microbatch][stage]
        if programs is None:
            return 0, 0
        return programs.saved.num_bytes, programs.kept.num_bytes

    return memory.tabulate(graph, of)


def _kinds(graph: PipelineGraph, feeds: Sequence[Sequence[Layout]]) -> list[Look]:
    kinds = []
    for j, layouts in enumerate(feeds):
        route = graph.route(j)
        skipped = frozenset(range(graph.num_stages)) - set(route.stages)
        kinds.append(
            Look(skipped, tuple(layouts), route.has_backward, route.has_weight)
        )
    return kinds


def _trace(stage: Stage, key: tuple[int, Signature], trained: Sequence[bool]) -> Traced:
    try:
        return trace_stage(stage, key[1], trained)
    except Exception as error:
        error.add_note(f"while tracing stage {key[0]}")
        raise
