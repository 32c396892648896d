"""From a batch to microbatches, for those who have arrays and no data pipeline."""

import jax
import numpy as np

from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime.stage import Tree


def split(batch: Tree, num_microbatches: int) -> list[Tree]:
    """Cuts the arrays of a batch along their first axis into microbatches.

    The first ones are larger by a row where the number does not divide the rows.

    Raises:
      ConfigError: there are fewer rows than microbatches.
    """
    leaves, treedef = jax.tree.flatten(batch)
    rows = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves}
    if len(rows) != 1 or min(rows) < max(num_microbatches, 1):
        raise ConfigError(
            f"arrays of {sorted(rows)} rows cannot be cut into {num_microbatches} "
            "microbatches.\n  Give arrays of one length, at least that."
        )
    parts = [np.array_split(np.asarray(leaf), num_microbatches) for leaf in leaves]
    return [jax.tree.unflatten(treedef, each) for each in zip(*parts, strict=True)]
