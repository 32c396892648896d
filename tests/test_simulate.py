"""The simulator's command: one table, paired delays, one message for a mistake."""

import csv
import dataclasses
import importlib.util
import pathlib
import subprocess
import sys

import pytest

from rrfp_jax import config_border, errors, sim_config, simulate

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
    policies = [line[:20].split("  ")[0] for line in lines[1:15]]
    assert policies[:4] == ["BF", "FB", "B-priority", "F-priority"]
    assert "simulate: 28/28 run" in ran.stderr
    assert "\r" not in ran.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "table.csv",
        "timeline.png",
    ]
    with (tmp_path / "new" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["3"] * 14 + ["5"] * 14
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
    runs, traces = simulate.compare(config, simulate.contenders(config))
    assert len({run.lower_bound_s for run in runs if run.seed == 0}) == 1
    work_s = {
        name: sorted(round(s.end_s - s.start_s, 9) for s in trace.spans)
        for name, trace in traces.items()
    }
    assert all(seconds == work_s["BF"] for seconds in work_s.values())
    assert all(run.report.makespan_s >= run.lower_bound_s - 1e-12 for run in runs)


def test_the_same_seed_gives_the_same_table(make):
    config = make(jitter__transfer_tail=1.5, jitter__image_cv=0.5)
    chosen = simulate.contenders(config)
    assert simulate.compare(config, chosen) == simulate.compare(config, chosen)


def test_the_deep_order_is_as_deep_as_the_hints_may_be(make):
    config = make(pipeline__in_flight_limit=6)
    runs, _ = simulate.compare(config, simulate.contenders(config))
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
    assert "GPipe, fixed" in names
    assert "1F1B, fixed" not in names
    assert "1F1B, fixed is left out" in caplog.text


def test_chunks_share_the_work_of_a_rank(make):
    whole = make(jitter__level="J0").draw(0)
    assert len(whole.compute) == 2 * 4
    halves = make(jitter__level="J0", pipeline__placement="interleaved:2").draw(0)
    assert len(halves.compute) == 2 * 8


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
