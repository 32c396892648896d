"""The vocabulary of models: a layer, a tower of layers, a model of towers.

A layer is a pure function with its own parameters and a global name. Layers share
nothing, so any contiguous run of a tower can become a pipeline stage. No
mathematics of any particular model lives here.

The feed of one microbatch (B rows, L text tokens incl. image places, N images of
H x W pixels with C channels, T tokens an image), by key:

  tokens_BL       int32    token ids.
  labels_BL       int32    labels_BL[b, l] is the target of position l (shifted).
  mask_BL         float32  loss weight, 0 or 1.
  positions_BL    int32    position inside the own segment.
  segment_ids_BL  int32    0 = padding; attention stays inside equal ids.
  images_NHWC     float32
  image_index_BL  int32    -1 = text, else index into the N*T image tokens.
  dropout_key     uint32[2]  raw threefry key, already folded with (seed, step,
                  microbatch, replica). Absent when nothing is dropped.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
Feed = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of one microbatch: text rows, their length, and its images."""

    rows: int
    length: int
    num_images: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: the smallest thing a model can be cut into.

    Attributes:
      name: unique in the model, e.g. "language/block_03".
      init: PRNG key -> parameters, all float32. Pure; works under jit and
        eval_shape.
      apply: (params, carry, feed) -> carry. Pure. Parameters are cast to the
        compute dtype first, by operations that depend on nothing else.
      feed_keys: what `apply` may read. "dropout_key" and, with a carry of None,
        "image_index_BL" may be absent from the feed all the same.
      flops: forward FLOPs on one microbatch: matrix products and the full
        (uncut by causality) attention square, 2*m*n*k each.
      partition: parameters -> tree of `PartitionSpec` over the axis "model".
    """

    name: str
    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, Any, Feed], Any]
    feed_keys: frozenset[str]
    flops: Callable[[Shape], float]
    partition: Callable[[Params], Any]

    @property
    def num_params(self) -> int:
        """Number of parameters, found without allocating them."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@dataclasses.dataclass(frozen=True)
class Tower:
    """A chain of layers; its output goes into tower `feeds_into`, if any."""

    name: str
    layers: tuple[Layer, ...]
    feeds_into: str | None


@dataclasses.dataclass(frozen=True)
class Model:
    """Towers in topological order; the last one ends in the loss.

    Attributes:
      towers: the last layer of the last tower returns a dict of float32 scalars
        with at least "loss".
      ties: pairs of (layer name, *path in its parameters) that are one parameter,
        owner first. Each layer holds its own copy: keeping the copies equal, by
        adding their gradients, is the trainer's task.
    """

    towers: tuple[Tower, ...]
    ties: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers; a layer's place here is its global index."""
        return tuple(layer for tower in self.towers for layer in tower.layers)

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied one counts once."""
        by_name = {layer.name: layer for layer in self.layers}
        total = sum(layer.num_params for layer in self.layers)
        for _, (name, *path) in self.ties:
            shapes = jax.eval_shape(by_name[name].init, jax.random.key(0))
            total -= _parent(shapes, path)[path[-1]].size
        return total

    def init(
        self, key: jax.Array, names: Collection[str] | None = None
    ) -> dict[str, Params]:
        """Initialises the parameters of all layers, or only of the named ones.

        A layer's numbers depend on `key` and its global index only, so ranks that
        each initialise their own layers agree with one that initialises all; tied
        copies equal their owner bitwise, wherever that lives.

        Args:
          key: PRNG key.
          names: layers to initialise; None for all. Each must be in the model.

        Returns:
          Layer name -> parameters, in the model's order. No two share a buffer.
        """
        index_of = {layer.name: i for i, layer in enumerate(self.layers)}
        names = index_of if names is None else names
        indices = sorted(index_of[name] for name in names)

        def initialise(index: int) -> Params:
            return self.layers[index].init(jax.random.fold_in(key, index))

        params = {self.layers[index].name: initialise(index) for index in indices}
        for (owner, *owner_path), (name, *path) in self.ties:
            if name in params:
                source = params.get(owner) or initialise(index_of[owner])
                table = _parent(source, owner_path)[owner_path[-1]]
                _parent(params[name], path)[path[-1]] = jnp.array(table, copy=True)
        return params


def _parent(params: Params, path: list[str]) -> Params:
    """Returns the innermost dict that holds the parameter at `path`."""
    for part in path[:-1]:
        params = params[part]
    return params
