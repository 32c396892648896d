"""Trains a model: python -m rrfp_jax.main --config=configs/mm.py --workdir=DIR.

Any setting is changed by --config.GROUP.NAME=VALUE. A run that was stopped goes on
where its newest checkpoint is when the same command is given again.
"""

import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from rrfp_jax import config_border
from rrfp_jax.coordination import cluster as cluster_lib
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.setup import prepare
from rrfp_jax.train.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train, and how.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/train", "Where the run's files go.")


def main() -> None:
    """Reads the config, prepares JAX, trains."""
    config = config_border.from_config_dict(TrainConfig, _CONFIG.value)
    folder = pathlib.Path(_WORKDIR.value)
    prepare(config)
    cache = (folder / "compilation_cache").absolute()
    with cluster_lib.joined(config.cluster.whereabouts) as cluster:
        try:
            scores = Trainer(config, cluster).run(folder, cache)
        except KeyboardInterrupt:
            sys.exit(130)
        if cluster.is_first:
            for name, value in scores.items():
                print(f"{name} {value:.4f}")


if __name__ == "__main__":
    config_border.run(main)
