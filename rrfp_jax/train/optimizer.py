"""AdamW on every stage, with one norm and one verdict for all of them.

Each stage has two programs, compiled ahead: the sum of squares of its gradient, and the
update. The host adds up the squares of all stages, so clipping and the non-finite check
see the whole gradient; a tied parameter counts once. A step whose norm is not finite
runs no update program at all: parameters, moments and counters stay bitwise the same.

Optimizer states are kept by layer, as parameters are: nothing stored knows the stages.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.runtime import ties
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.train.config import OptimizerConfig
from rrfp_jax.train.stages import Cut

Trees = list[dict[str, Any]]  # by stage, then layer name


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate by step: linear warm-up, then cosine decay."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.learning_rate * config.final_fraction,
    )


def adamw(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Returns the update rule of one layer, without clipping."""
    return optax.adamw(
        schedule(config, num_steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )


class Optimizer:
    """Updates all stages.

    Args:
      config: hyperparameters.
      num_steps: of the schedule.
      cut: which layers are where, trained, tied.
      ranks: the devices of each stage.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        num_steps: int,
        cut: Cut,
        ranks: Sequence[RankMesh],
    ) -> None:
        self._rule = adamw(config, num_steps)
        self._clip_norm = config.clip_norm
        self._cut = cut
        self._ranks = ranks
        # Tied copies that a norm must not count again, by stage.
        self._copies = {place for group in cut.tied for place in group[1:]}
        self._squares: list[Any] = []
        self._updates: list[Any] = []

    def init(self, params: Trees) -> Trees:
        """Returns the states of the trained layers, laid out as their parameters."""
        return [
            {name: self._init_layer(tree[name], s) for name in self._trained(s)}
            for s, tree in enumerate(params)
        ]

    def _init_layer(self, params: Any, stage: int) -> Any:
        shardings = optax.tree_map_params(
            self._rule,
            lambda _, param: param.sharding,
            jax.eval_shape(self._rule.init, params),
            params,
            transform_non_params=lambda _: self._ranks[stage].replicated,
        )
        return jax.jit(self._rule.init, out_shardings=shardings)(params)

    def compile(self, params: Trees, state: Trees) -> None:
        """Compiles the programs of every stage with something to train."""
        for s, tree in enumerate(params):
            trained = {name: tree[name] for name in self._trained(s)}
            factor = jax.device_put(np.float32(1), self._ranks[s].replicated)

            def squares(grads: Any, stage: int = s) -> jax.Array:
                return self._sum_of_squares(stage, grads)

            self._squares.append(jax.jit(squares).lower(trained).compile())
            update = jax.jit(
                self._update,
                donate_argnums=(0, 1),
                out_shardings=jax.tree.map(lambda x: x.sharding, (trained, state[s])),
            )
            # Gradients look as parameters do: float32, and where these lie.
            lowered = update.lower(trained, state[s], trained, factor)
            self._updates.append(lowered.compile())

    def norm(self, grads: Sequence[Any]) -> float:
        """Returns the norm of the whole gradient; waits for it."""
        parts = [
            program({name: tree[name] for name in self._trained(s)})
            for s, (program, tree) in enumerate(zip(self._squares, grads, strict=True))
        ]
        total = sum(map(float, parts))  # squares: one that is not finite stays so
        return math.sqrt(total) if math.isfinite(total) else math.nan

    def update(
        self, params: Trees, state: Trees, grads: Sequence[Any], norm: float
    ) -> tuple[Trees, Trees]:
        """Returns new parameters and states; those given are used up.

        Args:
          params: by stage and layer.
          state: of the trained layers.
          grads: by stage, in the structure of `params`.
          norm: finite, of the whole gradient.
        """
        factor = np.float32(min(1.0, self._clip_norm / max(norm, 1e-30)))
        new_params, new_state = [], []
        for s, program in enumerate(self._updates):
            names = self._trained(s)
            updated, states = program(
                {name: params[s][name] for name in names},
                state[s],
                {name: grads[s][name] for name in names},
                jax.device_put(factor, self._ranks[s].replicated),
            )
            new_params.append({**params[s], **updated})
            new_state.append(states)
        self._copy_tied(new_params)
        return new_params, new_state

    def _copy_tied(self, params: Trees) -> None:
        """Gives every copy of a tied parameter its owner's value, in place.

        Each stage's update is another program, which XLA may round differently.
        """
        for owner, *copies in self._cut.tied:
            value = ties.find(params, owner)
            for place in copies:
                parent = ties.find(params, place[:-1])
                where = parent[place[-1]].sharding
                parent[place[-1]] = jax.device_put(value, where)

    def _trained(self, stage: int) -> tuple[str, ...]:
        return self._cut.trained(stage)

    def _sum_of_squares(self, stage: int, grads: Any) -> jax.Array:
        counted = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
            if (stage, *(key.key for key in path)) not in self._copies
        ]
        return sum((jnp.sum(jnp.square(x)) for x in counted), jnp.zeros(()))

    def _update(
        self, params: Any, state: Any, grads: Any, factor: jax.Array
    ) -> tuple[Any, Any]:
        new_params, new_state = {}, {}
        for name, tree in params.items():
            scaled = jax.tree.map(lambda g: g * factor, grads[name])
            updates, new_state[name] = self._rule.update(scaled, state[name], tree)
            new_params[name] = optax.apply_updates(tree, updates)
        return new_params, new_state
