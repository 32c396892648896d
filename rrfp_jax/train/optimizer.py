"""AdamW on every stage, with one norm and one verdict for all of them.

Each stage has up to three programs, compiled ahead: the sum of its gradients over the
data-parallel replicas, the sum of squares of that, and the update. The host adds up the
squares of all stages, so clipping and the non-finite check see the whole gradient; a
tied parameter counts once. A step whose norm is not finite runs no update program at
all: parameters, moments and counters stay bitwise the same.

All processes that have a part in a stage run its programs, stage after stage, so that
their collectives match.

Optimizer states are kept by layer, as parameters are: nothing stored knows the stages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.coordination.desk import Share, with_nobody
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.replicas import Replicas
from rrfp_jax.train.config import OptimizerConfig
from rrfp_jax.train.stages import Cut

Trees = list[dict[str, Any]]  # by stage, then layer name; empty for one elsewhere


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
      stages: the devices of each stage, in all replicas.
      process: this one.
      share: the exchange with all other processes.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        num_steps: int,
        cut: Cut,
        stages: Sequence[Replicas],
        process: int = 0,
        share: Share = with_nobody,
    ) -> None:
        self._rule = adamw(config, num_steps)
        self._clip_norm = config.clip_norm
        self._cut = cut
        self._stages = stages
        self._process = process
        self._share = share
        self._is_cut = config.shard_state and len(stages[0].ranks) > 1
        # Tied copies that a norm must not count again, by stage.
        self._copies = {place for group in cut.tied for place in group[1:]}
        # By stage; nothing for a stage elsewhere.
        self._reduce: dict[int, Any] = {}
        self._squares: dict[int, Any] = {}
        self._updates: dict[int, Any] = {}

    def init(self, params: Trees) -> Trees:
        """Returns the states of the trained layers, laid out as their parameters.

        With `shard_state` the moments are cut over the replicas.
        """
        return [
            {name: self._init_layer(tree[name], s) for name in self._trained(s) if tree}
            for s, tree in enumerate(params)
        ]

    def _init_layer(self, params: Any, stage: int) -> Any:
        shardings = optax.tree_map_params(
            self._rule,
            lambda _, param: self._of_moment(stage, param),
            jax.eval_shape(self._rule.init, params),
            params,
            transform_non_params=lambda _: self._stages[stage].replicated,
        )
        return jax.jit(self._rule.init, out_shardings=shardings)(params)

    def _of_moment(self, stage: int, param: Any) -> Any:
        """Returns where the moments of a parameter lie, and its reduced gradient."""
        if not self._is_cut:
            return param.sharding
        return self._stages[stage].cut(param.sharding, param.shape)

    def compile(self, params: Trees, state: Trees) -> None:
        """Compiles the programs of every stage with something to train."""
        for s, tree in enumerate(params):
            if not self._stages[s].is_here:
                continue
            trained = {name: tree[name] for name in self._trained(s)}
            where = jax.tree.map(lambda x, stage=s: self._of_moment(stage, x), trained)
            grads = jax.tree.map(
                lambda x, at: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=at),
                trained,
                where,
            )
            if len(self._stages[s].ranks) > 1:
                leaves = jax.tree.leaves(trained)
                self._reduce[s] = self._stages[s].reducer(
                    [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in leaves],
                    [x.sharding for x in leaves],
                    self._is_cut,
                )
            (factor,) = placing.put([np.float32(1)], [self._stages[s].replicated])

            def squares(grads: Any, stage: int = s) -> jax.Array:
                return self._sum_of_squares(stage, grads)

            norm = jax.jit(squares, out_shardings=self._stages[s].replicated)
            self._squares[s] = norm.lower(grads).compile()
            update = jax.jit(
                self._update,
                donate_argnums=(0, 1),
                out_shardings=jax.tree.map(lambda x: x.sharding, (trained, state[s])),
            )
            lowered = update.lower(trained, state[s], grads, factor)
            self._updates[s] = lowered.compile()

    def reduce(self, by_replica: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Returns the gradients of all replicas together, of the trained layers.

        Args:
          by_replica: of the replicas that this process has a part in: by stage, in the
            structure of its parameters. Used up.
        """
        found: list[Any] = []
        for s, stage in enumerate(self._stages):
            here = [
                {name: grads[s][name] for name in self._trained(s)}
                for q, grads in sorted(by_replica.items())
                if stage.ranks[q].is_here
            ]
            if not here:
                found.append({})
            elif s not in self._reduce:
                found.append(here[0])
            else:
                found.append(self._reduced(s, here))
        return found

    def _reduced(self, stage: int, trees: Sequence[Any]) -> Any:
        leaves = [jax.tree.leaves(tree) for tree in trees]
        terms = [
            self._stages[stage].joined(each, each[0].sharding)
            for each in zip(*leaves, strict=True)
        ]
        structure = jax.tree.structure(trees[0])
        return jax.tree.unflatten(structure, self._reduce[stage](terms))

    def norm(self, grads: Sequence[Any]) -> float:
        """Returns the norm of the whole gradient, the same everywhere; waits for it.

        Args:
          grads: reduced.
        """
        parts = [(s, program(grads[s])) for s, program in self._squares.items()]
        mine = [
            (s, float(part))
            for s, part in parts
            if self._stages[s].processes[0] == self._process
        ]
        told = sorted(entry for each in self._share(mine) for entry in each)
        total = sum(part for _, part in told)  # squares: not finite stays so
        return math.sqrt(total) if math.isfinite(total) else math.nan

    def update(
        self, params: Trees, state: Trees, grads: Sequence[Any], norm: float
    ) -> tuple[Trees, Trees]:
        """Returns new parameters and states; those given are used up.

        Copies of tied parameters are yet to be made equal, see `Pipeline.copy_tied`.

        Args:
          params: by stage and layer.
          state: of the trained layers.
          grads: reduced.
          norm: finite, of the whole gradient.
        """
        factor = np.float32(min(1.0, self._clip_norm / max(norm, 1e-30)))
        new_params: Trees = [{} for _ in params]
        new_state: Trees = [{} for _ in params]
        for s, program in self._updates.items():
            names = self._trained(s)
            updated, new_state[s] = program(
                {name: params[s][name] for name in names},
                state[s],
                grads[s],
                *placing.put([factor], [self._stages[s].replicated]),
            )
            new_params[s] = {**params[s], **updated}
        return new_params, new_state

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
