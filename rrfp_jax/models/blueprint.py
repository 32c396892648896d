"""From a flax module to layers: the one place that splits and merges nnx modules.

A blueprint is drawn once, abstractly (nothing is allocated), and gives as many
layers as a model has of that kind. Two facts about a parameter are stored where it
is made, as metadata of its `nnx.Param`, and read here:

  PARTITION      its `PartitionSpec` over the axis "model"; replicated if absent.
  KEEP_FLOAT32   True for what is used in float32 (norms); else it is cast to the
                 compute dtype.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax.models import layer, partition

PARTITION = "partition"
KEEP_FLOAT32 = "keep_float32"


class Body(Protocol):
    """What the module of a layer must be, besides an `nnx.Module` of float32."""

    def __call__(
        self, carry: Any, feed: layer.Feed, dropout_key: jax.Array | None, /
    ) -> Any:
        """Computes the layer; a dropout key of None drops nothing."""


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Everything about a layer except its name and its index.

    Attributes:
      factory: makes the module, drawing its parameters from the given `nnx.Rngs`.
      graphdef: the static half of the module.
      dtypes: tree like the parameters: the dtype each is cast to.
      specs: tree like the parameters: `PartitionSpec`s.
      feed_keys: see `layer.Layer`.
      flops: see `layer.Layer`.
    """

    factory: Callable[[nnx.Rngs], Body]
    graphdef: Any
    dtypes: layer.Params
    specs: layer.Params
    feed_keys: frozenset[str]
    flops: Callable[[layer.Shape], float]

    def to_layer(self, name: str, index: int) -> layer.Layer:
        """Returns the layer of that global name and index."""

        def apply(params: layer.Params, carry: Any, feed: layer.Feed) -> Any:
            cast = jax.tree.map(jnp.astype, params, self.dtypes)
            key = self._dropout_key(feed, index)
            return nnx.merge(self.graphdef, cast)(carry, feed, key)

        return layer.Layer(
            name=name,
            init=self._init,
            apply=apply,
            feed_keys=self.feed_keys,
            flops=self.flops,
            partition=self._partition,
        )

    def _init(self, key: jax.Array) -> layer.Params:
        params: layer.Params = nnx.to_pure_dict(nnx.state(self.factory(nnx.Rngs(key))))
        return params

    def _partition(self, params: layer.Params) -> Any:
        return jax.tree.map(lambda _, spec: spec, params, self.specs)

    def _dropout_key(self, feed: layer.Feed, index: int) -> jax.Array | None:
        """Folds the layer's own index in, so masks do not depend on any cut."""
        if "dropout_key" not in self.feed_keys or "dropout_key" not in feed:
            return None
        key = jax.random.wrap_key_data(feed["dropout_key"], impl="threefry2x32")
        return jax.random.fold_in(key, index)


def draw(
    factory: Callable[[nnx.Rngs], Body],
    *,
    compute_dtype: str,
    feed_keys: frozenset[str],
    flops: Callable[[layer.Shape], float],
) -> Blueprint:
    """Draws the blueprint of the module that `factory` makes; allocates nothing."""
    module = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))
    graphdef, state = nnx.split(module)

    def dtype_of(param: Any) -> Any:
        kept = param.get_metadata().get(KEEP_FLOAT32, False)
        return jnp.dtype(jnp.float32 if kept else compute_dtype)

    def spec_of(param: Any) -> Any:
        return param.get_metadata().get(PARTITION, partition.REPLICATED)

    return Blueprint(
        factory=factory,
        graphdef=graphdef,
        dtypes=nnx.to_pure_dict(state, dtype_of),
        specs=nnx.to_pure_dict(state, spec_of),
        feed_keys=feed_keys,
        flops=flops,
    )
