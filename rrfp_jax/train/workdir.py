"""The work directory: whose it is, and the config that it was made with."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rrfp_jax.errors import ConfigError

# What may differ between a run and its continuation: these change neither the model,
# nor the data, nor the mathematics of a step.
_FREE = (
    "cluster.coordinator",
    "cluster.host_limit_kib",
    "cluster.num_processes",
    "cluster.payloads",
    "cluster.peer_timeout_s",
    "cluster.process_id",
    "cluster.stall_timeout_s",
    "data.num_workers",
    "data.prefetch",
    "data.progress",
    "data.validate",
    "mesh.num_cpu_devices",
    "optimizer.shard_state",
    "pipeline.agreement",
    "pipeline.back_pressure",
    "pipeline.hint",
    "pipeline.in_flight_limit",
    "pipeline.in_flight_taper",
    "pipeline.launch_ahead",
    "pipeline.memory_limit_gb",
    "pipeline.microbatch_group",
    "pipeline.order",
    "pipeline.warmup_factor",
    "pipeline.weight_limit",
    "train.checkpoint_every",
    "train.eval_batches",
    "train.eval_every",
    "train.keep_checkpoints",
    "train.log_every",
    "train.num_traced",
    "train.trace_step",
)


def claim(workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Makes the directory, and writes the config into it.

    Args:
      workdir: new, empty, or of an earlier part of this run.
      config: all settings, nested.

    Raises:
      ConfigError: the directory belongs to another run, or cannot be written.
    """
    path = workdir / "config.json"
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _check_same(path, json.loads(path.read_text()), json.loads(text))
        scratch = path.with_suffix(".tmp")
        scratch.write_text(text)
        scratch.replace(path)
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"the work directory {workdir} cannot be used: {error}.\n"
            "  Pass another --workdir."
        ) from error


def _check_same(path: pathlib.Path, old: Any, new: Any) -> None:
    before, after = dict(_flat(old)), dict(_flat(new))
    differing = [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} now"
        for key in sorted(before.keys() | after.keys())
        if key not in _FREE and before.get(key) != after.get(key)
    ]
    if differing:
        shown = "\n  ".join(differing[:6])
        raise ConfigError(
            f"{path} is of another run; {len(differing)} settings differ:\n  {shown}\n"
            "  Pass another --workdir, or the settings of that run."
        )


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree
