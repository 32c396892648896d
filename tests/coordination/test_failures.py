"""The real command in several processes, and what happens to it in the field.

Whatever fails first, all processes end within `peer_timeout_s` + 5 s of it, and the
last line of each names it. That time is measured here: it is the promise. Nothing else
is asserted about a clock.
"""

import dataclasses
import pathlib
import re
import shutil
import signal
import time
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from scripts import fleet as fleet_lib
from scripts.fleet import Fleet
from tests.train import tiny

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]
slow = pytest.mark.slow  # continuous integration runs these

PEER_S, SLACK_S = 4.0, 5.0
PATIENCE_S = 240.0  # until a run is where something is due
SABOTEUR = str(pathlib.Path(__file__).parent / "saboteur.py")
CACHE = "compilation_cache"
FIXED = ("pipeline.order=fixed", "pipeline.hint=1f1b")  # the same bits every time
ENDLESS = "train.num_steps=100000"
BASE = (
    f"cluster.peer_timeout_s={PEER_S}",
    "data.source=jsonl",
    "data.num_workers=1",
    "data.progress=False",
    "train.checkpoint_every=2",
    "train.trace_step=0",
)


@dataclasses.dataclass
class Field:
    """Where runs are started: a folder of their own each, and what they share."""

    folder: pathlib.Path
    texts: pathlib.Path
    cache: pathlib.Path  # of compiled programs, which each run begins with

    def run(
        self,
        num_processes: int,
        *changes: str,
        own: dict[int, Sequence[str]] | None = None,
        sabotage: str = "",
        name: str = "run",
    ) -> Fleet:
        """Starts a run, or goes on with it."""
        workdir = self.folder / name
        if self.cache.exists() and not workdir.exists():
            shutil.copytree(self.cache, workdir / CACHE)
        settings = (*BASE, f"data.paths=('{self.texts}',)", *changes)
        return Fleet(
            [SABOTEUR] if sabotage else ["-m", "rrfp_jax.main"],
            [
                "--config=configs/lm.py:small",
                f"--workdir={workdir}",
                *(f"--config.{setting}" for setting in settings),
            ],
            num_processes,
            self.folder / f"{name}_logs",
            {i: [f"--config.{x}" for x in each] for i, each in (own or {}).items()},
            {
                "JAX_PLATFORMS": "cpu",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "SABOTAGE": sabotage,
            },
        )

    def wait_for_steps(self, fleet: Fleet, count: int, name: str = "run") -> None:
        """Waits until a run has made so many steps."""

        def are_made() -> bool:
            return len(fleet_lib.steps(self.folder / name)) >= count

        assert fleet.until(lambda: are_made() or bool(fleet.ends), PATIENCE_S)
        assert are_made(), fleet.tails()


def make_field(folder: pathlib.Path, cache: pathlib.Path) -> Field:
    texts = tiny.write_texts(folder / "texts.jsonl", count=300)
    return Field(folder, texts, cache)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Field:
    """A run of four processes to its end, by which others are measured.

    It saves every step: what orbax says to itself once got mixed up between parts.
    """
    field = make_field(tmp_path_factory.mktemp("undisturbed"), pathlib.Path("/none"))
    settings = (*FIXED, "train.num_steps=30", "train.checkpoint_every=1")
    with field.run(4, *settings) as fleet:
        assert fleet.wait(PATIENCE_S), fleet.tails()
    assert [end.status for end in fleet.ends.values()] == [0] * 4, fleet.tails()
    return field


@pytest.fixture
def field(tmp_path: pathlib.Path, undisturbed: Field) -> Field:
    return make_field(tmp_path, undisturbed.folder / "run" / CACHE)


def assert_all_end(
    fleet: Fleet,
    workdir: pathlib.Path,
    *words: str,
    since_s: float,
    but: Sequence[int] = (),
    limit_s: float = PEER_S + SLACK_S,
    raised: int = -1,
    status: int = 1,
) -> None:
    """Asserts that all end as they must, and leave whole checkpoints.

    Args:
      fleet: the run.
      workdir: of it.
      words: what each process's last line must hold.
      since_s: when it failed, on `time.monotonic`.
      but: who cannot end by itself.
      limit_s: when all must have ended.
      raised: where the first cause was raised.
      status: of that process.
    """
    assert fleet.wait(PATIENCE_S, but), fleet.tails()
    took_s = max(end.time_s for i, end in fleet.ends.items() if i not in but) - since_s
    print(f"\nall ended after {took_s:.2f} s; the limit is {limit_s:g} s")
    for i, end in fleet.ends.items():
        if i in but:
            continue
        last = fleet.last_line(i)
        assert end.status == (status if i == raised else 1), (i, fleet.tails())
        assert [word for word in words if word not in last] == [], (i, last)
    assert took_s < limit_s, fleet.tails()
    assert fleet.num_left() == 0
    fleet_lib.checkpoints(workdir)


def failed_s(fleet: Fleet, process: int, pattern: str) -> float:
    """Waits until a process has logged something; returns when that was seen."""

    def is_logged() -> bool:
        return re.search(pattern, fleet.log(process)) is not None

    assert fleet.until(lambda: is_logged() or not fleet.running(), PATIENCE_S)
    assert is_logged(), fleet.tails()
    return time.monotonic()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=slow), 2])
def test_a_killed_process_ends_all(field: Field, victim: int):
    """With process 0 goes JAX's coordinator, which makes C++ abort the others."""
    with field.run(3, "pipeline.num_ranks=3", ENDLESS) as fleet:
        field.wait_for_steps(fleet, 5)
        killed_s = time.monotonic()
        fleet.signal(signal.SIGKILL, victim)
        assert_all_end(
            fleet,
            field.folder / "run",
            f"process {victim} (",
            f"rank {victim}",
            "was not heard of for 4 s",
            since_s=killed_s,
            but=[victim],
        )
    assert fleet_lib.checkpoints(field.folder / "run")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_process_ends_all(field: Field, victim: int):
    """Of a rank that spans processes: the others hang in a collective with it."""
    with field.run(2, "pipeline.num_ranks=1", "mesh.model=2", ENDLESS) as fleet:
        field.wait_for_steps(fleet, 5)
        stopped_s = time.monotonic()
        fleet.signal(signal.SIGSTOP, victim)
        assert_all_end(
            fleet,
            field.folder / "run",
            f"process {victim} (",
            "was not heard of for 4 s",
            since_s=stopped_s,
            but=[victim],
        )
        fleet.signal(signal.SIGCONT, victim)  # it finds itself alone
        assert fleet.wait(PEER_S + SLACK_S)
        assert fleet.ends[victim].status == 1


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        pytest.param("launch_raises", ["ValueError: boom"], marks=slow),
        pytest.param("stage_raises", ["JaxRuntimeError: ", "ValueError: boom"]),
    ],
)
def test_an_exception_in_a_stage_ends_all_and_is_named(
    field: Field, sabotage: str, words: Sequence[str]
):
    with field.run(4, *FIXED, sabotage=sabotage) as fleet:
        since_s = failed_s(fleet, 2, "boom")
        assert_all_end(
            fleet,
            field.folder / "run",
            "process 2 (",
            "rank 2) failed: ",
            "2F3 on rank 2 (stage 2, microbatch 3): ",
            *words,
            since_s=since_s,
        )


@slow
def test_a_full_disk_ends_all_and_leaves_whole_checkpoints(field: Field):
    """The write fails in a thread of orbax, between two steps."""
    wide = ("model.language.width=256", "model.language.head_dim=64")
    settings = ("pipeline.num_ranks=2", *wide, ENDLESS)
    with field.run(2, *settings, sabotage="disk_is_full") as fleet:
        since_s = failed_s(fleet, 1, "Traceback")
        assert_all_end(
            fleet,
            field.folder / "run",
            "process 1 (",
            # Then what the storage library says, which depends on what it tried first:
            # to write what is too large, or to read back what that cut off.
            "failed: while saving step 4: ValueError: ",
            since_s=since_s,
        )
    assert fleet_lib.checkpoints(field.folder / "run") == [2]


@slow
def test_data_that_end_on_one_replica_end_all(field: Field):
    settings = ("pipeline.num_ranks=1", "mesh.replicas=2")
    with field.run(2, *settings, sabotage="data_end") as fleet:
        since_s = failed_s(fleet, 1, "Traceback")
        assert_all_end(
            fleet,
            field.folder / "run",
            "process 1 (",
            "replica 1) failed: RuntimeError: ",
            "the training data of replicas (1,) have ended",
            since_s=since_s,
        )


@slow
def test_a_config_error_on_one_host_ends_all(field: Field):
    own = {1: ["data.paths=('/nowhere.jsonl',)"]}
    with field.run(2, "pipeline.num_ranks=2", own=own) as fleet:
        since_s = failed_s(fleet, 1, "ConfigError")
        assert_all_end(
            fleet,
            field.folder / "run",
            "process 1 (",
            "failed: ConfigError: ",
            "/nowhere.jsonl",
            since_s=since_s,
            raised=1,
            status=2,
        )
    assert "Traceback" not in fleet.log(1)


@slow
def test_processes_that_wait_for_each_other_are_ended(field: Field):
    """A letter is lost; process 0 says which it misses, the other that it is done."""
    stall_s = 7.0
    settings = ("pipeline.num_ranks=2", f"cluster.stall_timeout_s={stall_s}")
    with field.run(2, *settings, sabotage="letter_lost") as fleet:
        field.wait_for_steps(fleet, 2)
        assert_all_end(
            fleet,
            field.folder / "run",
            "waits, as do all 2 processes, and nothing has happened anywhere for 7 s",
            since_s=time.monotonic(),
            limit_s=stall_s + PEER_S + SLACK_S,
        )
    assert re.search(r"0B\d misses 1B\d", fleet.log(0))
    assert "process 1 waits for a word of [0]" in fleet.log(1)


@slow
def test_c03_nothing_is_launched_before_all_have_compiled(field: Field):
    settings = ("pipeline.num_microbatches=1", "train.num_steps=2")
    settings = (*settings, "optimizer.warmup_steps=1")
    with field.run(4, *settings, sabotage="late_compile") as fleet:
        assert fleet.wait(PATIENCE_S), fleet.tails()
    assert [end.status for end in fleet.ends.values()] == [0] * 4, fleet.tails()
    log = "".join(map(fleet.log, range(4)))
    compiled = [float(s) for s in re.findall(r"compiled \d at ([\d.]+)", log)]
    launched = [float(s) for s in re.findall(r"launched \w+ at ([\d.]+)", log)]
    assert (len(compiled), len(launched)) == (8, 4)  # to train, to evaluate
    assert max(compiled) < min(launched)


@slow
def test_c10_a_step_that_is_not_finite_changes_nothing_anywhere(field: Field):
    settings = ("train.num_steps=4", "train.checkpoint_every=1")
    with field.run(
        4, *settings, "train.keep_checkpoints=9", sabotage="not_finite"
    ) as fleet:
        assert fleet.wait(PATIENCE_S), fleet.tails()
    assert [end.status for end in fleet.ends.values()] == [0] * 4, fleet.tails()
    read = [fleet_lib.read_checkpoint(field.folder / "run", s) for s in (2, 3, 4)]
    (before, arrays), (after, same), (next_, other) = read
    jax.tree.map(np.testing.assert_array_equal, arrays, same)
    assert [x["updates"] for x in (before, after, next_)] == [2, 2, 3]
    assert before["data"] != after["data"]
    changed = jax.tree.map(
        lambda x, y: not np.array_equal(x, y), same["params"], other["params"]
    )
    assert all(any(jax.tree.leaves(layer)) for layer in changed.values())
    for i in range(4):
        assert "step 3 is not finite" in fleet.log(i)
        assert "first at task 3F2" in fleet.log(i)
    assert np.isfinite(tiny.losses(field.folder / "run")[4])


@slow
def test_c18_a_run_that_is_told_to_end_and_continued_is_as_one_without_a_stop(
    field: Field, undisturbed: Field
):
    """SIGTERM to one process; then Ctrl-C to all; then nothing."""
    settings, folder = (*FIXED, "train.num_steps=30"), field.folder / "run"
    with field.run(4, *settings) as fleet:
        field.wait_for_steps(fleet, 5)
        fleet.signal(signal.SIGTERM, 2)
        assert fleet.wait(PATIENCE_S)
    assert [end.status for end in fleet.ends.values()] == [0] * 4, fleet.tails()
    (first,) = saved(fleet)
    assert fleet_lib.checkpoints(folder)[-1] == first == fleet_lib.steps(folder)[-1]
    with field.run(4, *settings) as fleet:
        field.wait_for_steps(fleet, first + 3)
        fleet.signal(signal.SIGINT)
        assert fleet.wait(PATIENCE_S)
    assert [end.status for end in fleet.ends.values()] == [130] * 4, fleet.tails()
    (second,) = saved(fleet)
    assert fleet_lib.checkpoints(folder)[-1] == second > first
    with field.run(4, *settings) as fleet:
        assert fleet.wait(PATIENCE_S)
    assert [end.status for end in fleet.ends.values()] == [0] * 4, fleet.tails()
    assert f"continuing from step {second}" in fleet.log(0)
    assert tiny.losses(folder) == tiny.losses(undisturbed.folder / "run")
    folders = (folder, undisturbed.folder / "run")
    jax.tree.map(np.testing.assert_array_equal, *map(arrays_at_end, folders))


def arrays_at_end(folder: pathlib.Path) -> object:
    return fleet_lib.read_checkpoint(folder, 30)[1]


def saved(fleet: Fleet) -> set[int]:
    """Returns the steps that the processes say they have saved when asked to stop."""
    pattern = r"asked to stop; saving step (\d+)"
    return {int(re.findall(pattern, fleet.log(i))[-1]) for i in range(4)}
