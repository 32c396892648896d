"""Cuts a model into the stages of a pipeline.

Parameters keep the names of their layers: a stage's tree is {layer name: parameters},
so nothing that is stored knows how the model was cut.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.core.placement import Placement
from rrfp_jax.errors import ConfigError
from rrfp_jax.models import cut
from rrfp_jax.models.layer import Layer, Model, Params, Shape
from rrfp_jax.runtime.stage import Stage
from rrfp_jax.train.config import ModelConfig, PipelineConfig

Edge = tuple[int, int]
LayerCosts = Mapping[str, float]  # by the name of the layer


@dataclasses.dataclass(frozen=True)
class Cut:
    """A model as stages.

    Attributes:
      layers: of each stage.
      tower_of: the tower of each stage.
      edges: between stages.
      placement: the rank of each stage.
      frozen: names of the layers that are not trained.
      tied: groups of tied parameters as (stage, layer name, *path), owner first.
    """

    layers: tuple[tuple[Layer, ...], ...]
    tower_of: tuple[str, ...]
    edges: tuple[Edge, ...]
    placement: Placement
    frozen: frozenset[str]
    tied: tuple[tuple[tuple[Any, ...], ...], ...]

    def trained(self, stage: int) -> tuple[str, ...]:
        """Returns the names of the trained layers of a stage."""
        return tuple(
            layer.name for layer in self.layers[stage] if layer.name not in self.frozen
        )

    def without_images(self) -> tuple[int, ...]:
        """Returns the stages that a microbatch without images skips."""
        return tuple(s for s, tower in enumerate(self.tower_of) if tower == "vision")

    def towers_by_rank(self) -> list[set[str]]:
        """Returns, for each pipeline rank, the towers that it has a stage of."""
        found: list[set[str]] = [set() for _ in range(max(self.placement) + 1)]
        for tower, rank in zip(self.tower_of, self.placement, strict=True):
            found[rank].add(tower)
        return found

    def by_stage(self, params: Mapping[str, Params]) -> list[dict[str, Params]]:
        """Groups parameters (or anything else) by stage."""
        return [{x.name: params[x.name] for x in layers} for layers in self.layers]

    def partition(self, params: Sequence[Mapping[str, Params]]) -> list[Any]:
        """Returns the partition specs of each stage's parameters."""
        return [
            {layer.name: layer.partition(tree[layer.name]) for layer in layers}
            for layers, tree in zip(self.layers, params, strict=True)
        ]

    def stages(self, recompute: str) -> list[Stage]:
        """Returns the stage functions."""
        return [
            Stage(
                fn=_function(layers, recompute, is_loss=s == len(self.layers) - 1),
                frozen=self.frozen & {layer.name for layer in layers},
                select=_select(layers),
            )
            for s, layers in enumerate(self.layers)
        ]


def flops(model: Model, frozen: Sequence[str], shape: Shape) -> LayerCosts:
    """Returns the FLOPs of each layer on a microbatch.

    A frozen layer costs its forward, a trained one about three times as much.

    Args:
      model: whose layers.
      frozen: names of layers, or their beginnings, that are not trained.
      shape: of the microbatch.
    """
    fixed = _frozen([layer.name for layer in model.layers], frozen)
    return {
        layer.name: layer.flops(shape) * (1 if layer.name in fixed else 3)
        for layer in model.layers
    }


def cut_model(
    model: Model,
    model_config: ModelConfig,
    pipeline: PipelineConfig,
    costs: LayerCosts,
) -> Cut:
    """Cuts a model, by the given counts or so that costs are balanced.

    Args:
      model: what to cut.
      model_config: which layers are frozen.
      pipeline: how many stages, and layers in each.
      costs: of each layer, by name: `flops`, or measured times.

    Raises:
      ConfigError: the counts, the stages or the frozen names do not fit the model.
    """
    counts = list(pipeline.layer_counts)
    if not counts:
        try:
            counts = _balanced(model, pipeline, costs)
        except ConfigError as error:
            raise ConfigError(
                f"{error}\n  Set --config.pipeline.num_ranks={pipeline.num_ranks} (x "
                f"num_chunks={pipeline.num_chunks}) accordingly."
            ) from error
    parts: list[tuple[Layer, ...]] = []
    towers: list[str] = []
    last_of: dict[str, int] = {}
    edges: list[Edge] = []
    for tower in model.towers:
        mine = _take(counts, len(tower.layers), tower.name)
        first = len(parts)
        parts += cut.by_counts(tower.layers, mine)
        towers += [tower.name] * len(mine)
        edges += itertools.pairwise(range(first, len(parts)))
        feeders = [t for t in model.towers if t.feeds_into == tower.name]
        edges += [(last_of[feeder.name], first) for feeder in feeders]
        last_of[tower.name] = len(parts) - 1
    if counts:
        raise ConfigError(
            f"pipeline.layer_counts={pipeline.layer_counts} goes beyond the last "
            "layer.\n  Give counts that end with the model."
        )
    stage_of = {layer.name: s for s, layers in enumerate(parts) for layer in layers}
    frozen = _frozen(list(stage_of), model_config.frozen)
    tied = tuple(
        tuple((stage_of[place[0]], *place) for place in group) for group in model.ties
    )
    for group in tied:
        if len({place[1] in frozen for place in group}) > 1:
            raise ConfigError(
                f"model.frozen={model_config.frozen} freezes only one of the tied "
                f"{[place[1] for place in group]}.\n  Freeze both or neither."
            )
    lengths = [towers.count(tower.name) for tower in model.towers]
    if max(lengths) > pipeline.num_ranks and pipeline.placement == "colocated":
        raise ConfigError(
            f"pipeline.layer_counts={pipeline.layer_counts} cuts a tower into "
            f"{max(lengths)} stages for {pipeline.num_ranks} ranks.\n"
            "  Give --config.pipeline.layer_counts at most one stage a rank for each "
            "tower, or none to balance them."
        )
    return Cut(
        tuple(parts),
        tuple(towers),
        tuple(sorted(edges)),
        pipeline.stage_ranks(lengths),
        frozen,
        tied,
    )


def _balanced(model: Model, pipeline: PipelineConfig, costs: LayerCosts) -> list[int]:
    """Layers of each stage such that the most expensive stage is cheapest."""
    by_tower = [[costs[layer.name] for layer in t.layers] for t in model.towers]
    if pipeline.num_stages is None:
        shares = [min(pipeline.num_ranks, len(tower)) for tower in by_tower]
    else:
        shares = cut.apportion(by_tower, pipeline.num_stages)
    balanced = map(cut.balanced, by_tower, shares)
    return list(itertools.chain.from_iterable(balanced))


def _take(counts: list[int], num_layers: int, tower: str) -> list[int]:
    """Removes from the front of `counts` those that make up one tower."""
    mine: list[int] = []
    while sum(mine) < num_layers and counts:
        mine.append(counts.pop(0))
    if sum(mine) != num_layers:
        raise ConfigError(
            f"pipeline.layer_counts cut the {num_layers} layers of tower {tower!r} "
            f"into {mine}, which sum to {sum(mine)}; a stage cannot span two towers.\n"
            f"  Set --config.pipeline.layer_counts so that some sum to {num_layers}."
        )
    return mine


def _frozen(names: Sequence[str], beginnings: Sequence[str]) -> frozenset[str]:
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names):
            raise ConfigError(
                f"model.frozen names {beginning!r}, but no layer begins so.\n"
                f"  Set --config.model.frozen to beginnings of {', '.join(names)}."
            )
    frozen = frozenset(name for name in names if name.startswith(tuple(beginnings)))
    if len(frozen) == len(names):
        raise ConfigError(
            f"model.frozen={tuple(beginnings)} leaves no layer to train.\n"
            "  Take something out of --config.model.frozen."
        )
    return frozen


def _function(
    layers: Sequence[Layer], recompute: str, is_loss: bool
) -> Callable[[Any, Any, Any], Any]:
    composed = cut.run(layers)

    def fn(params: Any, inputs: Any, feed: Any) -> Any:
        out = composed(params, inputs, feed)
        if not is_loss:
            return out
        scores = dict(out)
        return scores.pop("loss"), scores

    policies = jax.checkpoint_policies
    match recompute:
        case "dots":
            return jax.checkpoint(fn, policy=policies.dots_saveable)
        case "stage":
            return jax.checkpoint(fn, policy=policies.nothing_saveable)
        case _:
            return fn


def _select(layers: Sequence[Layer]) -> Callable[[Any], Any]:
    keys = sorted(frozenset().union(*(layer.feed_keys for layer in layers)))

    def select(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {key: arrays[key] for key in keys if key in arrays}

    return select
