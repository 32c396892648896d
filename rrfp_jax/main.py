"""Trains a model: python -m rrfp_jax.main --config=configs/mm.py --workdir=DIR.

Any setting is changed by --config.GROUP.NAME=VALUE. A run that was stopped goes on
where its newest checkpoint is when the same command is given again.
"""

import logging as std_logging
import pathlib
import sys

import jax
from absl import flags, logging
from ml_collections import config_flags

from rrfp_jax import config_border
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train, and how.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/train", "Where the run's files go.")


def main() -> None:
    """Reads the config, prepares JAX, trains."""
    config = config_border.from_config_dict(TrainConfig, _CONFIG.value)
    folder = pathlib.Path(_WORKDIR.value)
    prepare(config)
    cache = (folder / "compilation_cache").absolute()
    try:
        scores = Trainer(config).run(folder, cache)
    except KeyboardInterrupt:
        sys.exit(130)
    for name, value in scores.items():
        print(f"{name} {value:.4f}")


def prepare(config: TrainConfig) -> None:
    """Sets what must be set before JAX is first used, and what is logged."""
    needed = config.pipeline.num_ranks * config.mesh.data * config.mesh.model
    jax.config.update("jax_num_cpu_devices", config.mesh.num_cpu_devices or needed)
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_ours_or_serious)


def _is_ours_or_serious(record: std_logging.LogRecord) -> bool:
    """Orbax logs dozens of lines a checkpoint through the same logger."""
    ours = pathlib.Path(__file__).parent
    return (
        record.levelno >= std_logging.WARNING
        or ours in pathlib.Path(record.pathname).parents
    )


if __name__ == "__main__":
    config_border.run(main)
