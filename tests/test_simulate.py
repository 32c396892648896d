"""The simulator's command: one table, paired delays, one message for a mistake."""

import collections
import csv
import dataclasses
import importlib.util
import pathlib
import subprocess
import sys

import pytest

from rrfp_jax import config_border, errors, sim_config, simulate
from rrfp_jax.core import order_csv, policies
from rrfp_jax.core.task import Kind

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "sim.py"


@pytest.fixture
def config_dict():
    spec = importlib.util.spec_from_file_location("sim", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@pytest.fixture
def make(config_dict):
    """Returns a function that makes a small SimConfig, changed by flattened keys."""

    def build(**changes):
        config_dict.seeds = (0, 1)
        config_dict.pipeline.num_ranks = 4
        config_dict.pipeline.num_microbatches = 8
        for key, value in changes.items():
            group, name = key.split("__")
            config_dict[group][name] = value
        return config_border.from_config_dict(sim_config.SimConfig, config_dict)

    return build


def command(*flags, workdir):
    return subprocess.run(
        [sys.executable, "-m", "rrfp_jax.simulate", f"--workdir={workdir}", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


SMALL = (
    f"--config={CONFIG}",
    "--config.seeds=(3, 5)",
    "--config.pipeline.num_ranks=3",
    "--config.pipeline.num_microbatches=6",
)


def test_the_command_prints_a_table_and_writes_its_files(tmp_path):
    ran = command(*SMALL, workdir=tmp_path / "new")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("policy ")
    policies = [line[:20].split("  ")[0] for line in lines[1:22]]
    assert policies[:4] == ["BF", "FB", "B-priority", "F-priority"]
    assert "simulate: 42/42 run" in ran.stderr
    assert "\r" not in ran.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "table.csv",
        "timeline.html",
        "timeline.png",
    ]
    with (tmp_path / "new" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["3"] * 21 + ["5"] * 21
    baseline = [row for row in rows if row["policy"] == "1F1B, fixed"]
    assert [row["speedup"] for row in baseline] == ["1.0", "1.0"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            (*SMALL, "--config.pipeline.num_rank=4"),
            "ConfigError: pipeline.num_rank is not a setting.\n"
            "  Did you mean --config.pipeline.num_ranks? ",
        ),
        (
            (*SMALL, "--config.jitter.level=J9"),
            "ConfigError: jitter.level='J9' is not known.\n"
            "  Set --config.jitter.level to one of J0, J1, J2, J3.\n",
        ),
        (
            (*SMALL, "--config.cost.forward_ms=fast"),
            "ConfigError: flag --config.cost.forward_ms=fast: ",
        ),
        ((*SMALL, "more"), "ConfigError: 'more' is not a flag.\n"),
        (("--config=nowhere.py",), "ConfigError: Configuration is not available"),
        ((), "ConfigError: there is no config.\n"),
    ],
    ids=["key", "value", "type", "argument", "file", "nothing"],
)
def test_a_mistake_ends_with_one_message_and_status_2(tmp_path, flags, message):
    ran = command(*flags, workdir=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith(message)
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""


def test_all_policies_face_the_same_delays(make):
    config = make()
    runs, traces = simulate.compare(simulate.contenders(config), config.seeds)
    whole = {run.lower_bound_s for run in runs if run.seed == 0}
    assert len(whole) == 2  # W need not wait in the way of B where it is split
    work_s = {}
    for name, trace in traces.items():
        work_s[name] = collections.Counter()
        for span in trace.spans:
            lasted = span.end_s - span.start_s
            is_forward = span.task.kind is Kind.F
            work_s[name][is_forward, *span.task[1:]] += lasted
    for of_policy in work_s.values():
        assert of_policy == pytest.approx(work_s["BF"])
    assert all(run.report.makespan_s >= run.lower_bound_s - 1e-12 for run in runs)


def test_the_same_seed_gives_the_same_table(make):
    config = make(jitter__transfer_tail=1.5, jitter__image_cv=0.5)
    chosen = simulate.contenders(config)
    first, second = (simulate.compare(chosen, config.seeds) for _ in range(2))
    assert first == second


def test_the_deep_order_is_as_deep_as_the_hints_may_be(make):
    config = make(pipeline__in_flight_limit=6)
    runs, _ = simulate.compare(simulate.contenders(config), config.seeds)
    peaks = {run.policy: max(run.report.peak_in_flight) for run in runs}
    assert peaks["1F1B, fixed"] == 4
    assert peaks["deep 1F1B, fixed"] == 6
    assert peaks["BF"] <= 6
    assert peaks["GPipe, fixed"] == 8


def test_orders_that_a_placement_does_not_have_are_left_out_with_a_warning(
    make, caplog
):
    config = make(pipeline__placement="v_shaped", cost__blocking=False)
    names = [contender.name for contender in simulate.contenders(config)]
    assert {"GPipe, fixed", "ZB-V, fixed", "V-Half, fixed"} < set(names)
    assert "1F1B, fixed" not in names
    assert "1F1B, one each" in names  # what a V is compared with
    left_out = caplog.text.split("left out, ")[1]
    assert "1F1B, fixed; deep 1F1B, fixed; ZB-H1, fixed" in left_out


def test_a_limit_in_bytes_binds_the_hints_and_not_the_orders(make):
    config = make(pipeline__memory_limit_gb=0.75)  # of 256 MiB a microbatch: 3
    runs, _ = simulate.compare(simulate.contenders(config), config.seeds)
    peaks = {run.policy: max(run.report.peak_bytes) / 2**28 for run in runs}
    assert peaks["BFW"] == peaks["BFW memory"] == peaks["BF"] == 3
    assert peaks["1F1B, fixed"] == 4
    assert peaks["ZB-H2, fixed"] == 7


def test_an_order_from_a_file_runs_beside_the_others(make, tmp_path):
    path = tmp_path / "mine.csv"
    config = make(cost__blocking=False)
    order = policies.fixed_orders(config.pipeline.graph(), policies.Policy("gpipe"))
    path.write_text(order_csv.to_csv(order))
    config = make(cost__blocking=False, pipeline__order_csvs=(str(path),))
    runs, _ = simulate.compare(simulate.contenders(config), (0,))
    found = {run.policy: run.report.makespan_s for run in runs}
    assert found["mine fixed"] == found["GPipe, fixed"]
    assert found["mine as hint"] == found["GPipe as hint"]


def test_an_order_from_a_file_that_cannot_finish_is_shown_with_its_fault(
    make, tmp_path
):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    changes = {"pipeline__num_ranks": 2, "pipeline__num_microbatches": 2}
    config = make(**changes, pipeline__order_csvs=(str(path),))
    with pytest.raises(errors.ConfigError, match=r"(?s)cannot finish.*\n.*!0B0"):
        simulate.contenders(config)


def test_chunks_share_the_work_of_a_rank(make):
    whole = make(jitter__level="J0").draw(0)
    assert len(whole.compute) == 3 * 4
    halves = make(jitter__level="J0", pipeline__placement="interleaved:2").draw(0)
    assert len(halves.compute) == 3 * 8


def test_every_disturbance_reaches_the_durations(make):
    plain = make(jitter__level="J0", jitter__compute_cv=0.0, jitter__transfer_cv=0.0)
    assert set(plain.draw(0).compute["F", 0]) == {0.01}
    for change in (
        {"level": "J3"},
        {"compute_cv": 0.5},
        {"transfer_cv": 0.5},
        {"transfer_tail": 2.0},
        {"straggler_rank": 1, "straggler_factor": 1.5},
        {"num_vision_stages": 1, "image_cv": 0.5},
    ):
        jitter = dataclasses.replace(plain.jitter, **change)
        assert dataclasses.replace(plain, jitter=jitter).draw(0) != plain.draw(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline__num_ranks": 0}, "pipeline.num_ranks=0 is below 1"),
        ({"pipeline__num_microbatches": 0}, "pipeline.num_microbatches=0 is below 1"),
        ({"pipeline__in_flight_limit": 0}, "pipeline.in_flight_limit=0 lets no"),
        ({"pipeline__launch_ahead": 0}, "pipeline.launch_ahead=0 launches nothing"),
        ({"pipeline__placement": "interleaved:0"}, "'interleaved:0' is not known"),
        ({"cost__transfer_ms": -1.0}, "cost.transfer_ms=-1.0 is below 0"),
        ({"cost__forward_ms": float("nan")}, "cost.forward_ms=nan is below 0"),
        ({"cost__weight_fraction": 1.5}, "cost.weight_fraction=1.5 is above 1"),
        ({"cost__weight_residual": -0.5}, "cost.weight_residual=-0.5 is below 0"),
        ({"pipeline__weight_limit": -1}, "pipeline.weight_limit=-1 is negative"),
        ({"cost__forward_ms": 0.0, "cost__backward_ms": 0.0}, "are both 0"),
        ({"jitter__compute_cv": -0.1}, "jitter.compute_cv=-0.1 is below 0"),
        ({"jitter__straggler_rank": 4}, "jitter.straggler_rank=4 is above 3"),
        ({"jitter__num_vision_stages": 5}, "jitter.num_vision_stages=5 is above 4"),
    ],
)
def test_an_impossible_value_names_its_flag(make, changes, message):
    with pytest.raises(errors.ConfigError, match=message) as raised:
        make(**changes)
    assert "Set --config." in str(raised.value)


@pytest.mark.parametrize("seeds", [(), (1, 1)])
def test_seeds_are_some_and_distinct(make, seeds):
    with pytest.raises(errors.ConfigError, match="is empty or repeats one"):
        dataclasses.replace(make(), seeds=seeds)


def test_the_config_knows_no_variant():
    with pytest.raises(ValueError, match="no variant 'big'"):
        importlib.machinery.SourceFileLoader(
            "sim", str(CONFIG)
        ).load_module().get_config("big")
