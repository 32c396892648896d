"""What training is measured against: one process, the whole batch at once, plain optax.

Nothing of `runtime/` or `train/` is used: the layers run one after another, a tied
parameter exists once, and the loss is the sum of the token losses over their number.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rrfp_jax.data import dataset
from rrfp_jax.models.layer import Model
from rrfp_jax.models.model import build
from rrfp_jax.train.config import OptimizerConfig, TrainConfig

_EMBED, _HEAD = "language/embed", "language/head"


@dataclasses.dataclass
class Reference:
    """What the reference did.

    Attributes:
      losses: of each step.
      norms: of each step's gradient, before clipping.
      params: at the end, by layer; a tied head has no table.
      model: what was trained.
    """

    losses: list[float]
    norms: list[float]
    params: dict[str, Any]
    model: Model


def train(config: TrainConfig, num_steps: int) -> Reference:
    """Trains as the config says, without any pipeline."""
    model = build(config.model.language, config.model.vision)
    params = model.init(jax.random.key(config.train.seed))
    if config.model.language.tied:
        del params[_HEAD]["embedding"]
    frozen = {n: p for n, p in params.items() if n.startswith(config.model.frozen)}
    params = {n: p for n, p in params.items() if n not in frozen}
    rule = _rule(config.optimizer, config.train.num_steps)
    state = rule.init(params)

    @jax.jit
    def step(params: Any, state: Any, arrays: Any) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            scores = _run(model, {**params, **frozen}, arrays)
            return scores["loss"] / jnp.sum(arrays["mask_BL"])

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, state = rule.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, loss, optax.global_norm(grads)

    losses, norms = [], []
    for arrays in _whole_batches(config, num_steps):
        params, state, loss, norm = step(params, state, arrays)
        losses.append(float(loss))
        norms.append(float(norm))
    return Reference(losses, norms, {**params, **frozen}, model)


def _run(model: Model, params: Any, arrays: Any) -> Any:
    carry = None
    for tower in model.towers:
        if tower.name == "vision" and "images_NHWC" not in arrays:
            continue
        for layer in tower.layers:
            own = params[layer.name]
            if layer.name == _HEAD and "kernel" not in own:
                own = {**own, "embedding": params[_EMBED]["embedding"]}
            carry = layer.apply(own, carry, arrays)
    return carry


def _whole_batches(config: TrainConfig, num_steps: int) -> list[Any]:
    """Returns each step's samples as one microbatch: the order knows no M."""
    data = config.data
    if data.image_buckets[-1]:
        most = data.batch_size * data.max_images_per_sample
        data = dataclasses.replace(data, image_buckets=(0, most))
    with dataset.open_data(data, 1).train as batches:
        return [next(batches)[0].arrays for _ in range(num_steps)]


def _rule(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    def rate(count: jax.Array) -> jax.Array:
        peak, low = config.learning_rate, config.learning_rate * config.final_fraction
        warmup = config.warmup_steps
        rising = peak * count / max(warmup, 1)
        share = jnp.clip((count - warmup) / (num_steps - warmup), 0, 1)
        falling = low + (peak - low) * (1 + jnp.cos(math.pi * share)) / 2
        return jnp.where(count < warmup, rising, falling)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay, lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
        ),
        optax.scale_by_learning_rate(rate),
    )
