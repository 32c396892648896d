"""The batch script, on a real SLURM that runs on this machine.

    pytest -m slurm

needs root. It installs SLURM where it is missing and apt-get has it, and skips where
not.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CLUSTER = ROOT / "scripts" / "slurm" / "local_cluster.sh"
PATIENCE_S = 300.0
NUM_STEPS = 12

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

# In place of Python, for what is not about training. Ends well when told; else fails.
STAND_IN = """#!/usr/bin/env bash
trap 'exit 0' TERM
echo ready
[ "$3" = --fail ] && exit 7
while true; do sleep 0.1; done
"""


class Slurm:
    """A SLURM of two nodes.

    Attributes:
      folder: where all of it lies.
      env: in which its commands find it.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "LOCAL_CLUSTER_DIR": str(folder),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "JAX_PLATFORMS": "cpu",
            # The batch script takes the Python that it finds.
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def run(self, *command: str | pathlib.Path) -> str:
        """Runs one of its commands; returns what it prints."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, log: pathlib.Path, *arguments: str) -> str:
        """Submits the batch script with two processes on each node."""
        options = ("--parsable", "--ntasks-per-node=2", f"--output={log}")
        return self.run("sbatch", *options, "scripts/slurm/train.sbatch", *arguments)

    def told(self, job: str, name: str) -> str:
        """Returns what SLURM says of a job."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)[name]

    def leftovers(self) -> list[int]:
        """Returns the processes that descend from this SLURM."""
        mark = f"SLURM_CONF={self.folder}".encode()
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            if mark in environment:
                found.append(int(path.parent.name))
        return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if os.geteuid() == 0 and not shutil.which("slurmctld", path="/usr/sbin:/usr/bin"):
        install = subprocess.run([CLUSTER, "install"], capture_output=True, text=True)
        if install.returncode:
            pytest.skip(f"SLURM cannot be installed: {install.stderr.strip()}")
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        up = subprocess.run(
            [CLUSTER, "up", "2"], env=made.env, capture_output=True, text=True
        )
        if up.returncode == 3:
            pytest.skip(up.stderr.strip())
        assert up.returncode == 0, up.stderr
        yield made
    finally:
        made.run(CLUSTER, "down")
        wait_until(lambda: not made.leftovers(), lambda: f"left: {made.leftovers()}")


def wait_until(condition: Callable[[], bool], story: Callable[[], str]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, story()
        time.sleep(0.1)


def losses(folder: pathlib.Path) -> list[tuple[int, float]]:
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_a_stopped_job_is_requeued_and_its_losses_are_those_of_one_process(
    slurm: Slurm, tmp_path: pathlib.Path
):
    arguments = [
        "--config=configs/lm.py:small",
        f"--config.train.num_steps={NUM_STEPS}",
        "--config.train.checkpoint_every=4",
    ]
    whole, parts, log = tmp_path / "whole", tmp_path / "parts", tmp_path / "log"
    alone = subprocess.run(
        [sys.executable, "-m", "rrfp_jax.main", *arguments, f"--workdir={whole}"],
        cwd=ROOT,
        env=slurm.env,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr
    # An evaluation after each step, so that the signal comes before the last.
    slow = ("--config.train.eval_every=1", "--config.train.eval_batches=100")
    job = slurm.submit(log, *arguments, *slow, f"--workdir={parts}")

    def wait_for(condition: Callable[[], bool]) -> None:
        def is_met() -> bool:
            assert slurm.told(job, "JobState") != "FAILED", log.read_text()
            return condition()

        wait_until(is_met, log.read_text)

    wait_for(lambda: len(losses(parts)) >= 3)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: "back into the queue" in log.read_text())
    saved = losses(parts)
    assert 3 <= len(saved) < NUM_STEPS
    wait_for(lambda: slurm.told(job, "JobState") == "COMPLETED")
    text = log.read_text()
    assert slurm.told(job, "Restarts") == "1"
    assert slurm.told(job, "NumNodes") == "2"
    assert f"continuing from step {len(saved)}" in text
    for process in range(4):
        assert f"\n{process}: " in text
    assert losses(parts)[: len(saved)] == saved
    assert [step for step, _ in losses(parts)] == [*range(1, NUM_STEPS + 1)]
    expected = pytest.approx([loss for _, loss in losses(whole)], rel=1e-5)
    assert [loss for _, loss in losses(parts)] == expected


@pytest.mark.parametrize(
    ("arguments", "signal", "state", "exit_code"),
    [
        (["--fail"], None, "FAILED", "7:0"),
        ([], ["--signal=TERM"], "COMPLETED", "0:0"),
        ([], [], "CANCELLED", "0:0"),
    ],
    ids=["failed", "stopped for good", "cancelled"],
)
def test_a_job_that_is_to_end_is_not_requeued(
    arguments: list[str],
    signal: list[str] | None,
    state: str,
    exit_code: str,
    slurm: Slurm,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    stand_in, log = tmp_path / "bin" / "python", tmp_path / "log"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    monkeypatch.setitem(slurm.env, "PATH", path)
    job = slurm.submit(log, *arguments)

    def count() -> int:
        return log.read_text().count("ready") if log.exists() else 0

    wait_until(lambda: count() == 4, log.read_text)
    if signal is not None:
        slurm.run("scancel", *signal, job)
    wait_until(lambda: slurm.told(job, "JobState") == state, log.read_text)
    wait_until(lambda: not slurm.run("squeue", "--noheader"), log.read_text)
    assert "the run has ended with status" in log.read_text()
    assert slurm.told(job, "JobState") == state
    assert slurm.told(job, "ExitCode") == exit_code
    assert slurm.told(job, "Restarts") == "0"
