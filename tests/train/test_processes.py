"""The real command in several processes trains what it trains in one."""

import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping

import jax
import numpy as np
import pytest

from scripts import launch_local
from tests.train import tiny

pytestmark = pytest.mark.multiprocess

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 20
# 4 ranks of 2 devices each; and the same devices as 2 replicas of 2 ranks. The batch is
# cut into 4 microbatches in both, so that both are one process's.
DEEP = {"pipeline.num_ranks": 4, "mesh.model": 2}
WIDE = {
    "pipeline.num_ranks": 2,
    "pipeline.num_microbatches": 2,
    "mesh.replicas": 2,
    "mesh.model": 2,
}
Alone = Callable[[str], dict[int, float]]
BASE = {"train.num_steps": NUM_STEPS, "train.checkpoint_every": 1000}
BASE |= {"data.num_workers": 1, "data.progress": False, "train.eval_batches": 1}


def command(
    config: str, folder: pathlib.Path, settings: Mapping[str, object]
) -> list[str]:
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    file = f"--config={ROOT / 'configs' / config}.py:small"
    start = [sys.executable, "-m", "rrfp_jax.main", file, f"--workdir={folder}"]
    return [*start, *flags]


def train(
    config: str,
    folder: pathlib.Path,
    num_processes: int,
    settings: Mapping[str, object],
) -> dict[int, float]:
    """Returns the loss of each step."""
    wanted = command(config, folder, BASE | dict(settings))
    if num_processes == 1:
        subprocess.run(wanted, check=True, cwd=ROOT, capture_output=True)
        return tiny.losses(folder)
    commands, envs = launch_local.cluster_commands(wanted, num_processes)
    log = folder.with_suffix(".log")
    with log.open("wb") as out:
        status = launch_local.launch(commands, envs, out=out)
    assert status == 0, log.read_text()[-4000:]
    return tiny.losses(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns the losses of a run of one process, by config."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda config: train(config, folder / config, 1, {}))


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param("lm", DEEP, id="lm-4x2", marks=pytest.mark.slow),
        pytest.param("mm", WIDE, id="mm-2x2x2"),
    ],
)
def test_eight_processes_train_what_one_trains(
    alone: Alone,
    tmp_path: pathlib.Path,
    config: str,
    layout: Mapping[str, object],
):
    found = train(config, tmp_path / "run", 8, layout)
    assert list(found) == list(range(1, NUM_STEPS + 1))
    expected_of = alone(config)
    expected = [expected_of[step] for step in found]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        # Two ranks a process; what crosses goes by the transfer library.
        pytest.param(
            {**DEEP, "cluster.host_limit_kib": 0}, id="pulled", marks=pytest.mark.slow
        ),
        # A replica a process.
        pytest.param({**WIDE, "optimizer.shard_state": True}, id="zero"),
    ],
)
def test_two_processes_of_four_devices_train_what_one_trains(
    alone: Alone, tmp_path: pathlib.Path, settings: Mapping[str, object]
):
    found = train("lm", tmp_path / "run", 2, settings)
    expected_of = alone("lm")
    expected = [expected_of[step] for step in found]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)


def test_deterministic_runs_are_bitwise_equal(tmp_path: pathlib.Path):
    settings = {**DEEP, "pipeline.deterministic": True, "train.num_steps": 8}
    runs = []
    for name in ("first", "second"):
        train("lm", tmp_path / name, 8, settings)
        runs.append(tiny.checkpoint(tmp_path / name))
    (arrays, _), (again, _) = runs
    jax.tree.map(np.testing.assert_array_equal, arrays, again)
    lines = [
        (tmp_path / name / "metrics.jsonl").read_text() for name in ("first", "second")
    ]
    kept = [
        [
            (x["step"], x["loss"], x["grad_norm"])
            for x in map(json.loads, text.splitlines())
            if "loss" in x
        ]
        for text in lines
    ]
    assert kept[0] == kept[1]
