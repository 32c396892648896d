"""Linear maps, norms and tables with the house's initial values and partitions."""

import math

import jax
from flax import nnx

from rrfp_jax.models import blueprint, partition

TABLE_STDDEV = 0.02  # of embeddings, whose fan-in is one row


def _stddev(num_in: int) -> float:
    """Keeps the scale of what goes in: 0.02 at a width of 2,500, more below."""
    return 1 / math.sqrt(num_in)


def column(num_in: int, num_out: int, use_bias: bool, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a column-parallel map; a bias starts at zero."""
    return nnx.Linear(
        num_in,
        num_out,
        use_bias=use_bias,
        kernel_init=jax.nn.initializers.normal(_stddev(num_in)),
        kernel_metadata={blueprint.PARTITION: partition.COLUMNS},
        bias_metadata={blueprint.PARTITION: partition.FEATURES},
        rngs=rngs,
    )


def row(
    num_in: int, num_out: int, use_bias: bool, num_residuals: int, rngs: nnx.Rngs
) -> nnx.Linear:
    """Returns a row-parallel map, the last one of a residual branch.

    It is drawn smaller by sqrt(num_residuals), so that the sum over the `num_residuals`
    branches of a tower does not grow with its depth (GPT-2 §2.3).
    """
    stddev = _stddev(num_in) / math.sqrt(num_residuals)
    return nnx.Linear(
        num_in,
        num_out,
        use_bias=use_bias,
        kernel_init=jax.nn.initializers.normal(stddev),
        kernel_metadata={blueprint.PARTITION: partition.ROWS},
        rngs=rngs,
    )


def replicated(num_in: int, num_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a map with bias that every device holds whole."""
    return nnx.Linear(
        num_in,
        num_out,
        kernel_init=jax.nn.initializers.normal(_stddev(num_in)),
        rngs=rngs,
    )


def rms_norm(width: int, eps: float, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Returns a root-mean-square norm (arXiv:1910.07467); float32 out."""
    return nnx.RMSNorm(
        width,
        epsilon=eps,
        dtype="float32",
        scale_metadata={blueprint.KEEP_FLOAT32: True},
        rngs=rngs,
    )


def layer_norm(width: int, eps: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a layer norm with scale and bias (arXiv:1607.06450); float32 out."""
    return nnx.LayerNorm(
        width,
        epsilon=eps,
        dtype="float32",
        use_fast_variance=False,  # E[x^2] - E[x]^2 cancels where the mean is large
        scale_metadata={blueprint.KEEP_FLOAT32: True},
        bias_metadata={blueprint.KEEP_FLOAT32: True},
        rngs=rngs,
    )


def table(
    num_rows: int, width: int, split: jax.sharding.PartitionSpec, rngs: nnx.Rngs
) -> nnx.Param:
    """Returns a bare parameter (num_rows, width), drawn normal(0.02)."""
    draw = jax.nn.initializers.normal(TABLE_STDDEV)
    value = draw(rngs.params(), (num_rows, width))
    return nnx.Param(value, **{blueprint.PARTITION: split})
