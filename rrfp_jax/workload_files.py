"""Reads the configs of `configs/bench/` into workloads."""

import dataclasses
import pathlib
import runpy
from typing import Any

from rrfp_jax import config_border
from rrfp_jax.errors import ConfigError
from rrfp_jax.workloads.config import EmulatedConfig, WorkloadConfig
from rrfp_jax.workloads.stage_times import Workload

WORKLOADS = "workloads.py"


def read(path: str | pathlib.Path, variant: str) -> WorkloadConfig:
    """Reads a variant of `configs/bench/workloads.py`.

    Raises:
      ConfigError: there is no such file or variant, or a value is wrong.
    """
    config = _call(path, "get_config", variant)
    return config_border.from_config_dict(WorkloadConfig, config)


def read_all(path: str | pathlib.Path) -> list[WorkloadConfig]:
    """Reads all variants of `configs/bench/workloads.py`.

    Raises:
      ConfigError: as `read`.
    """
    return [read(path, variant) for variant in _run(path)["VARIANTS"]]


def emulated(
    path: str | pathlib.Path, ranks: int = 0
) -> tuple[EmulatedConfig, Workload]:
    """Returns what a config of an emulated run says, and its scaled workload.

    Args:
      path: of the config; the workload that it names is a variant of `workloads.py`
        beside it.
      ranks: instead of the config's; 0 for those. Towers then have as many layers fewer
        or more, so that a rank holds what it holds there.

    Raises:
      ConfigError: as `read`.
    """
    config = config_border.from_config_dict(EmulatedConfig, _call(path, "get_config"))
    if ranks:
        fraction = config.layer_fraction * ranks / config.ranks
        config = dataclasses.replace(config, ranks=ranks, layer_fraction=fraction)
    beside = pathlib.Path(path).with_name(WORKLOADS)
    true = Workload(
        config.applied_to(read(beside, config.workload)),
        config.tensor,
        level=config.level,
    )
    mean_s = true.times(config.ranks).mean_s
    return config, dataclasses.replace(true, scale=config.task_ms / 1e3 / mean_s)


def _call(path: str | pathlib.Path, name: str, *arguments: str) -> Any:
    try:
        return _run(path)[name](*arguments)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} gives no config of a workload: {error}.\n"
            "  Name a file of configs/bench/ and one of its variants."
        ) from error


def _run(path: str | pathlib.Path) -> dict[str, Any]:
    try:
        return runpy.run_path(str(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}.\n  Name a file of configs/bench/."
        ) from error
