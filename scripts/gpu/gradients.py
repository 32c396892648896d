"""Gradients of pipelined models against one process on the whole batch.

float32, with matrix products in full precision, is compared array by array. bfloat16
is compared with the float32 gradient as one long vector. Its bound: rounding nothing
but the parameters to bfloat16, each by up to 2^-8 of itself, moves the float32 gradient
by some d, which is measured. A block rounds further values on the way forward, and
twice as many on the way back; if each does as much, independently, the error is d times
the root of their number. What the pipeline adds is seen beside the bfloat16 gradient of
one process.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax import Policy
from rrfp_jax.models.layer import Model
from rrfp_jax.models.model import build
from rrfp_jax.train.config import ModelConfig
from scripts.bench import split_backward
from scripts.gpu import shared_device
from scripts.gpu.figures import Figure
from scripts.gpu.shared_device import Arrays
from scripts.gpu.sizes import Size

FLOAT32_LIMIT = 1e-5
# Of a block's forward, to its compute dtype, along its longest path: norm, query,
# rotated query, softmax, mix, output, sum; norm, gate, silu, product, down, sum.
ROUNDINGS = 13
WORSE_LIMIT = 1.25  # pipelined over whole, in bfloat16
POLICIES = {
    "bf": Policy("bf"),
    "bfw": Policy("bfw"),
    "deterministic": Policy("bf", deterministic=True),
}
OTHER_ORDER = Policy("f_priority", deterministic=True)
# What makes XLA's GPU backend leave out scatters that add in any order.
_DETERMINISTIC_FLAGS = "deterministic_ops"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its step.

    Attributes:
      name: of the model.
      config: of it, in float32.
      microbatches: of the step.
    """

    name: str
    config: ModelConfig
    microbatches: Sequence[Arrays]

    def model(self, dtype: str) -> tuple[ModelConfig, Model]:
        """Returns the model, computing in a dtype."""
        language = dataclasses.replace(self.config.language, compute_dtype=dtype)
        vision = self.config.vision
        if vision is not None:
            vision = dataclasses.replace(vision, compute_dtype=dtype)
        config = dataclasses.replace(self.config, language=language, vision=vision)
        return config, build(language, vision)


def cases(size: Size) -> list[Case]:
    """Returns a language model, and one with images in every other microbatch."""
    text, vision = size.gradients, size.vision
    draw = np.random.default_rng(0)
    count = text.num_microbatches
    plain = [shared_device.text_microbatch(draw, text) for _ in range(count)]
    mixed = [
        with_images(draw, shared_device.text_microbatch(draw, text), size)
        if j % 2 == 0
        else shared_device.text_microbatch(draw, text)
        for j in range(count)
    ]
    num_blocks = text.language.num_layers - vision.num_layers
    language = dataclasses.replace(text.language, num_layers=num_blocks)
    return [
        Case("text", ModelConfig(text.language), plain),
        Case("images", ModelConfig(language, vision), mixed),
    ]


def with_images(draw: np.random.Generator, arrays: Arrays, size: Size) -> Arrays:
    """Returns a microbatch with an image at the beginning of each row."""
    rows, length = arrays["tokens_BL"].shape
    num_tokens = size.vision.tokens_per_image
    index_BL = np.full((rows, length), -1, np.int32)
    index_BL[:, :num_tokens] = np.arange(rows * num_tokens).reshape(rows, num_tokens)
    pixels = (rows, *size.vision.image_size, size.vision.channels)
    return arrays | {
        "mask_BL": np.where(index_BL < 0, arrays["mask_BL"], np.float32(0)),
        "images_NHWC": draw.normal(size=pixels).astype(np.float32),
        "image_index_BL": index_BL,
    }


def joined(microbatches: Sequence[Arrays], tokens_per_image: int) -> Arrays:
    """Returns the step as one microbatch; images are counted through."""
    names = dict.fromkeys(name for each in microbatches for name in each)
    parts: dict[str, list[Any]] = {name: [] for name in names}
    num_before = 0
    for each in microbatches:
        for name in names:
            if name == "image_index_BL":
                index_BL = each.get(name, np.full_like(each["tokens_BL"], -1))
                parts[name].append(np.where(index_BL < 0, -1, index_BL + num_before))
            elif name in each:
                parts[name].append(each[name])
        num_before += len(each.get("images_NHWC", ())) * tokens_per_image
    return {name: np.concatenate(values) for name, values in parts.items()}


def whole(model: Model) -> Callable[..., tuple[Any, Any]]:
    """Returns (params by layer, batch, scale) -> (loss, gradients), in one program."""

    def loss(params: Mapping[str, Any], batch: Arrays, scale: float) -> Any:
        carry = None
        for layer in model.layers:
            carry = layer.apply(params[layer.name], carry, batch)
        return carry["loss"] * scale

    return jax.jit(jax.value_and_grad(loss))


def rounded(params: Any) -> Any:
    """Returns the parameters as bfloat16 has them, in float32."""
    return jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)


def distance(found: Any, exact: Any) -> float:
    """Returns the norm of the error of all arrays together, over that of `exact`."""

    def norm(tree: Any) -> float:
        leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
        return float(np.linalg.norm(np.concatenate(leaves)))

    return norm(jax.tree.map(np.subtract, _host(found), _host(exact))) / norm(exact)


def check(size: Size) -> Iterator[Figure | str]:
    """Yields the figures, and what is done before each."""
    for case in cases(size):
        yield f"{case.name}, float32"
        exact = _Runs(case, "float32", size)
        yield from exact.float32_figures()
        yield f"{case.name}, bfloat16"
        limit = exact.rounding_error() * math.sqrt(1 + 3 * ROUNDINGS)
        yield from _Runs(case, "bfloat16", size).bfloat16_figures(
            exact.whole()[1], limit
        )


class _Runs:
    """A model in a dtype: in one process, and as a pipeline."""

    def __init__(self, case: Case, dtype: str, size: Size) -> None:
        # Without this, a GPU rounds the factors of a float32 product to TF32.
        precision = "highest" if dtype == "float32" else None
        jax.config.update("jax_default_matmul_precision", precision)
        config, model = case.model(dtype)
        self._name = f"{case.name} {dtype}"
        self._params = shared_device.initialise(model)
        self._microbatches = case.microbatches
        self._batch = joined(case.microbatches, size.vision.tokens_per_image)
        self._scale = shared_device.scale_of(case.microbatches)
        self._whole = whole(model)
        self._piped = shared_device.piped(model, config, self._params, size.gradients)

    def whole(self) -> tuple[Any, Any]:
        """Returns loss and gradients of one process."""
        return self._whole(self._params, self._batch, self._scale)

    def rounding_error(self) -> float:
        """Returns how far rounding the parameters moves the gradient."""
        _, moved = self._whole(rounded(self._params), self._batch, self._scale)
        return distance(moved, self.whole()[1])

    def float32_figures(self) -> Iterator[Figure]:
        """Yields what is about loss and gradients."""
        exact = self.whole()
        for name, policy in POLICIES.items():
            error = split_backward.relative_error(self._run(policy), exact)
            name = f"{self._name} {name}: worst array's error"
            yield Figure(name, error, limit=FLOAT32_LIMIT)
        first, second = self._run(POLICIES["deterministic"]), self._run(OTHER_ORDER)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
        unlike = sum(np.count_nonzero(a != b) for a, b in map(_host, pairs))
        is_exact = jax.default_backend() == "cpu" or _DETERMINISTIC_FLAGS in (
            os.environ.get("XLA_FLAGS", "")
        )
        name = f"{self._name} deterministic: entries unlike f_priority"
        yield Figure(name, float(unlike), limit=0 if is_exact else None)

    def bfloat16_figures(self, exact: Any, limit: float) -> Iterator[Figure]:
        """Yields what is about gradients, given the exact ones."""
        alone = distance(self.whole()[1], exact)
        yield Figure(f"{self._name} one process: error", alone, limit=limit)
        for name, policy in POLICIES.items():
            error = distance(self._run(policy)[1], exact)
            yield Figure(f"{self._name} {name}: error", error, limit=limit)
            name = f"{self._name} {name}: over one process"
            yield Figure(name, error / alone, limit=WORSE_LIMIT)

    def _run(self, policy: Policy) -> tuple[Any, Any]:
        """Returns loss and gradients by layer."""
        self._piped.pipeline.policy = policy
        loss, grads = self._piped.pipeline.loss_and_grad(
            self._piped.params, self._microbatches, self._scale
        )
        return np.float32(loss), {k: v for tree in grads for k, v in tree.items()}


def _host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
