"""The pipeline graph: the only home of precedence.

Stages form a DAG whose numbering is topological: every edge goes from a lower to a
higher index, and the last stage computes the loss. An edge carries an activation
forward and, where something upstream of it can be trained, a cotangent back.

Precedence, for microbatch j:

* F(s) needs F(u) of every in-edge u -> s;
* B(s) needs F(s), and B(v) of every out-edge s -> v;
* W(s), in a graph whose backward is *split*, needs B(s).

They hold only among the stages that j *visits*. A microbatch without an image skips
the vision tower: its tasks do not exist, and neither do the edges that touch them.
A stage has a B only if it, or something upstream of it that j visits, is trainable,
and a W only if it is trainable itself.

One relation crosses microbatches: where weight gradients are committed *in order*, W(s)
of j also needs W(s) of the microbatch before j that has one. Only Ws wait for it.

Microbatches that visit the same stages share a `Route`, so a graph of many microbatches
costs a few small tables. In them, the W of the microbatch before is written as the
node (W, s) among the inputs of (W, s): its *turn*.
"""

import dataclasses
import functools
from collections.abc import Mapping

from rrfp_jax.core.placement import Placement
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError

Edge = tuple[int, int]
Node = tuple[Kind, int]  # a task of any microbatch: its kind and stage


@dataclasses.dataclass(frozen=True)
class Route:
    """The part of the DAG that a microbatch visits. All tables are indexed by stage.

    Attributes:
      stages: the visited stages, ascending (not a table).
      is_visited: whether the stage is one of them.
      sources: visited in-neighbours; empty for a stage that is not visited.
      targets: visited out-neighbours.
      has_backward: whether B exists.
      has_weight: whether W exists.
      inputs: node -> the nodes it needs, for every node that exists.
      successors: node -> the nodes that need it.
      initial: the nodes that need nothing.
      num_tasks: tasks on each rank (indexed by rank).
    """

    stages: tuple[int, ...]
    is_visited: tuple[bool, ...]
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    has_backward: tuple[bool, ...]
    has_weight: tuple[bool, ...]
    inputs: Mapping[Node, tuple[Node, ...]]
    successors: Mapping[Node, tuple[Node, ...]]
    initial: tuple[Node, ...]
    num_tasks: tuple[int, ...]

    def cotangents_to(self, stage: int) -> tuple[int, ...]:
        """Returns the in-neighbours that wait for a cotangent from `stage`."""
        return tuple(s for _, s in self.successors.get((Kind.B, stage), ()))


@dataclasses.dataclass(frozen=True)
class PipelineGraph:
    """The tasks of one step and what each of them needs.

    Attributes:
      num_stages: stages are numbered 0 .. num_stages-1, topologically.
      num_microbatches: of one step.
      edges: (source, target) pairs, source < target.
      placement: stage -> pipeline rank.
      skipped: (stage, microbatch) pairs: all and only the stages not visited.
      frozen: stages without a trainable parameter.
      is_split: whether the backward is split into B and W.
      in_order: whether each stage commits weight gradients in microbatch order.

    Raises:
      ConfigError: an edge, the placement or a pruning is impossible, or gradients are
        to be committed in order by an unsplit backward.
    """

    num_stages: int
    num_microbatches: int
    edges: tuple[Edge, ...]
    placement: Placement
    skipped: frozenset[tuple[int, int]] = frozenset()
    frozen: frozenset[int] = frozenset()
    is_split: bool = False
    in_order: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_edges(self)
        _check_visits(self)

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return max(self.placement) + 1

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss: the last."""
        return self.num_stages - 1

    @functools.cached_property
    def _routes(self) -> tuple[Route, ...]:
        """Entry j is the route of microbatch j; equal routes are one object."""
        skips: list[list[int]] = [[] for _ in range(self.num_microbatches)]
        for stage, microbatch in sorted(self.skipped):
            skips[microbatch].append(stage)
        known: dict[tuple[int, ...], Route] = {}
        return tuple(
            known[skip]
            if (skip := tuple(stages)) in known
            else known.setdefault(skip, _route(self, frozenset(skip)))
            for stages in skips
        )

    @functools.cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.placement):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @functools.cached_property
    def sources_of(self) -> tuple[tuple[int, ...], ...]:
        """The in-neighbours of each stage, visited or not, in edge order."""
        found: list[tuple[int, ...]] = [()] * self.num_stages
        for u, v in self.edges:
            found[v] += (u,)
        return tuple(found)

    def route(self, microbatch: int) -> Route:
        """Returns the part of the DAG that `microbatch` visits."""
        return self._routes[microbatch]

    def rank_of(self, task: Task) -> int:
        """Returns the rank that runs `task`."""
        return self.placement[task.stage]

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """Returns the tasks that must come before `task`, directly."""
        kind, stage, j = task
        found = [Task(*node, j) for node in self._routes[j].inputs[kind, stage]]
        if task in found:  # its turn
            found.remove(task)
            before = self.turns[stage][j]
            if before is not None:
                found.append(task._replace(microbatch=before))
        return tuple(found)

    def successors(self, task: Task) -> tuple[Task, ...]:
        """Returns the tasks that need `task`, directly."""
        kind, stage, j = task
        found = [Task(*node, j) for node in self._routes[j].successors[kind, stage]]
        if kind is Kind.W and (after := self.next_turn(stage, j)) is not None:
            found.append(task._replace(microbatch=after))
        return tuple(found)

    @functools.cached_property
    def turns(self) -> tuple[Mapping[int, int | None], ...]:
        """By stage: microbatch -> the one whose W comes before its own, None for the
        first. Ascending; empty where no order is kept.
        """
        found: list[dict[int, int | None]] = [{} for _ in range(self.num_stages)]
        if self.in_order:
            for j, route in enumerate(self._routes):
                for s in route.stages:
                    if route.has_weight[s]:
                        found[s][j] = next(reversed(found[s]), None)
        return tuple(found)

    @functools.cached_property
    def _next_turns(self) -> tuple[Mapping[int | None, int], ...]:
        return tuple({before: j for j, before in each.items()} for each in self.turns)

    def next_turn(self, stage: int, microbatch: int | None) -> int | None:
        """Returns the microbatch whose W of `stage` comes after that of `microbatch`.

        None stands for the beginning, and for there being none.
        """
        return self._next_turns[stage].get(microbatch)

    def initial_tasks(self, rank: int) -> list[Task]:
        """Returns the tasks of `rank` that need nothing, by microbatch."""
        return [
            Task(kind, stage, j)
            for j, route in enumerate(self._routes)
            for kind, stage in route.initial
            if self.placement[stage] == rank
        ]

    def num_tasks(self, rank: int) -> int:
        """Returns how many tasks `rank` has."""
        return sum(route.num_tasks[rank] for route in self._routes)

    def tasks(self, rank: int | None = None) -> list[Task]:
        """Returns the tasks of `rank`, or all, by microbatch: F up, then B, W down."""
        found = []
        for j in range(self.num_microbatches):
            forward, backward = self.local_order(j, rank)
            found += forward + backward
        return found

    def exists(self, task: Task) -> bool:
        """Whether the step has this task; its stage and microbatch must exist."""
        route = self._routes[task.microbatch]
        return (task.kind, task.stage) in route.inputs

    def local_order(
        self, microbatch: int, rank: int | None = None
    ) -> tuple[list[Task], list[Task]]:
        """Returns Fs, and Bs each with its W, of a microbatch on a rank, in order."""
        route = self._routes[microbatch]
        here = [s for s in route.stages if rank is None or self.placement[s] == rank]
        return (
            [Task(Kind.F, s, microbatch) for s in here],
            [
                Task(kind, s, microbatch)
                for s in reversed(here)
                for kind in (Kind.B, Kind.W)
                if (kind, s) in route.inputs
            ],
        )


def chain_edges(num_stages: int) -> tuple[Edge, ...]:
    """Returns the edges of a plain chain, 0 -> 1 -> 2 ..."""
    return tuple((s, s + 1) for s in range(num_stages - 1))


def chain(
    num_microbatches: int, placement: Placement, is_split: bool = False
) -> PipelineGraph:
    """Returns the graph of a plain chain of trainable stages."""
    num_stages = len(placement)
    return PipelineGraph(
        num_stages,
        num_microbatches,
        chain_edges(num_stages),
        placement,
        is_split=is_split,
    )


def _route(graph: PipelineGraph, skipped: frozenset[int]) -> Route:
    stages = tuple(s for s in range(graph.num_stages) if s not in skipped)
    sources: list[tuple[int, ...]] = [()] * graph.num_stages
    targets: list[tuple[int, ...]] = [()] * graph.num_stages
    for u, v in graph.edges:
        if u not in skipped and v not in skipped:
            sources[v] += (u,)
            targets[u] += (v,)
    has_backward = [False] * graph.num_stages
    for s in stages:  # ascending, so every upstream stage is known
        upstream = any(has_backward[u] for u in sources[s])
        has_backward[s] = upstream or s not in graph.frozen
    inputs: dict[Node, tuple[Node, ...]] = {}
    for s in stages:
        inputs[Kind.F, s] = tuple((Kind.F, u) for u in sources[s])
    for s in reversed(stages):
        if has_backward[s]:
            downstream = ((Kind.B, v) for v in targets[s])
            inputs[Kind.B, s] = ((Kind.F, s), *downstream)
            if graph.is_split and s not in graph.frozen:
                turn = ((Kind.W, s),) if graph.in_order else ()
                inputs[Kind.W, s] = ((Kind.B, s), *turn)
    successors: dict[Node, tuple[Node, ...]] = dict.fromkeys(inputs, ())
    num_tasks = [0] * graph.num_ranks
    for node, needed in inputs.items():
        num_tasks[graph.placement[node[1]]] += 1
        for source in needed:
            if source != node:
                successors[source] += (node,)
    return Route(
        stages,
        tuple(s not in skipped for s in range(graph.num_stages)),
        tuple(sources),
        tuple(targets),
        tuple(has_backward),
        tuple((Kind.W, s) in inputs for s in range(graph.num_stages)),
        inputs,
        successors,
        tuple(node for node, needed in inputs.items() if not needed),
        tuple(num_tasks),
    )


def _check_sizes(graph: PipelineGraph) -> None:
    if graph.num_stages < 1 or graph.num_microbatches < 1:
        raise ConfigError(
            f"a pipeline of {graph.num_stages} stages and {graph.num_microbatches} "
            "microbatches has nothing to run.\n  Both must be at least 1."
        )
    if len(graph.placement) != graph.num_stages:
        raise ConfigError(
            f"the placement names {len(graph.placement)} stages; the pipeline has "
            f"{graph.num_stages}.\n  Give one rank for each stage."
        )
    if graph.in_order and not graph.is_split:
        raise ConfigError(
            "weight gradients can be committed in microbatch order only where W is a "
            "task of its own.\n  Split the backward too: is_split=True."
        )
    if sorted(set(graph.placement)) != list(range(graph.num_ranks)):
        raise ConfigError(
            f"placement {graph.placement} has a rank without a stage, or a negative "
            "one.\n  Number the ranks from 0 without gaps."
        )


def _check_edges(graph: PipelineGraph) -> None:
    for u, v in graph.edges:
        if not 0 <= u < v < graph.num_stages:
            raise ConfigError(
                f"edge {u} -> {v} is not between stages 0 .. {graph.num_stages - 1} in "
                "ascending order.\n  Number the stages topologically, the loss last."
            )
    if len(set(graph.edges)) != len(graph.edges):
        twice = next(e for e in graph.edges if graph.edges.count(e) > 1)
        raise ConfigError(
            f"edge {twice[0]} -> {twice[1]} is given twice.\n"
            "  One edge carries the whole output of a stage; remove the other."
        )
    stray = sorted(graph.frozen - set(range(graph.num_stages)))
    if stray:
        raise ConfigError(f"frozen stages {stray} do not exist.\n  Remove them.")


def _check_visits(graph: PipelineGraph) -> None:
    for stage, j in graph.skipped:
        inside = 0 <= stage < graph.num_stages and 0 <= j < graph.num_microbatches
        if not inside or stage == graph.loss_stage:
            raise ConfigError(
                f"microbatch {j} cannot skip stage {stage}.\n"
                "  Only existing stages before the loss can be skipped."
            )
    for j in range(graph.num_microbatches):
        route = graph.route(j)
        for s in route.stages:
            if s != graph.loss_stage and not route.targets[s]:
                raise ConfigError(
                    f"microbatch {j} visits stage {s}, whose output nobody reads.\n"
                    "  Add an edge towards the loss, or skip the stage too."
                )
