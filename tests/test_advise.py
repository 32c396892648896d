"""The command that advises: traces in; a table, flags, a CSV and a picture out."""

import csv
import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from rrfp_jax import advise, advise_report
from rrfp_jax.core import memory
from rrfp_jax.core import trace as trace_lib
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import fit, fit_candidates
from rrfp_jax.sim.fit_candidates import Search
from rrfp_jax.sim.fit_draws import Settings
from rrfp_jax.train.config import PipelineConfig
from tests.sim.traced import BF, BFW, chain, disturbed, fitted_on, ran

ROOT = pathlib.Path(__file__).parents[1]
KEPT = 1000  # bytes of a forward, of the traces that `traced` makes


@pytest.fixture
def workdir(tmp_path):
    """A work directory with the traces of two steps."""
    folder = tmp_path / "run" / "traces"
    folder.mkdir(parents=True)
    for seed in (0, 1):
        trace = ran(chain(), BFW, disturbed(chain(), seed), latency_s=1e-4)
        path = folder / f"step_{seed:06d}.trace.json"
        path.write_text(trace_lib.to_json(trace))
        (folder / f"step_{seed:06d}.perfetto.json").write_text("[]")
    return tmp_path / "run"


def command(*flags):
    return subprocess.run(
        [sys.executable, "-m", "rrfp_jax.advise", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def advice(fitted, memory_gb=0.0, **search):
    chosen = fit_candidates.candidates(fitted, Search(**search), memory_gb)
    return advise.compare(fitted, chosen, Settings(num_draws=4))


def test_the_command_prints_advice_and_writes_its_files(workdir):
    ran_ = command(
        f"--trace={workdir}",
        "--num_draws=3",
        "--config.hints=('bf','bfw')",
        "--config.launch_ahead=(1,)",
    )
    assert ran_.returncode == 0, ran_.stderr
    assert "Fitted on 16 microbatches of 2 traced step(s)" in ran_.stdout
    assert "Host latency: 100 us." in ran_.stdout
    assert "stages 0, 1 share a load by microbatch" in ran_.stdout
    assert "1f1b, fixed, one_each, ahead 1" in ran_.stdout
    assert "Assumed for v_shaped: each stage cut in half" in ran_.stdout
    assert "--config.pipeline.launch_ahead=1\n" in ran_.stdout
    assert "simulate: 20/20 candidate" in ran_.stderr
    assert (workdir / "advice.png").read_bytes().startswith(b"\x89PNG")
    with (workdir / "advice.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps_s = [float(row["step_s"]) for row in rows]
    assert steps_s == sorted(steps_s)
    assert [row["is_best"] for row in rows].count("1") == 1
    (fixed,) = [
        r for r in rows if (r["order"], r["placement"]) == ("fixed", "one_each")
    ]
    assert float(fixed["speedup"]) == 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "ConfigError: there is no trace.\n  Pass --trace=DIR"),
        (("--trace=nowhere",), "ConfigError: --trace=nowhere is not a folder.\n"),
        (
            ("--trace=x", "--config.limit=(8,)"),
            "ConfigError: limit is not a setting.\n",
        ),
    ],
    ids=["nothing", "folder", "setting"],
)
def test_a_mistake_ends_with_one_message_and_status_2(flags, message):
    ran_ = command(*flags)
    assert ran_.returncode == 2
    assert ran_.stderr.startswith(message)
    assert "Traceback" not in ran_.stderr
    assert ran_.stdout == ""


def test_traces_are_found_in_a_work_directory_and_in_a_folder_of_them(workdir):
    names = ["step_000000.trace.json", "step_000001.trace.json"]
    assert list(advise.read(workdir)) == names
    assert list(advise.read(workdir / "traces")) == names


def test_a_folder_without_traces_is_refused(tmp_path):
    (tmp_path / "step_000001.perfetto.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"has no \*\.trace\.json"):
        advise.read(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"graph": {}}', "\x00", '{"graph": 3}'],
)
def test_what_is_not_a_trace_is_named(tmp_path, text):
    (tmp_path / "a.trace.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.trace\.json is not a trace \("):
        advise.read(tmp_path)


@pytest.mark.parametrize("what", ["spans", "transfers"])
def test_what_ends_before_it_begins_is_refused(workdir, what):
    path = workdir / "traces" / "step_000001.trace.json"
    data = json.loads(path.read_text())
    data[what][5][-1] = -1.0
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="ends before it begins"):
        advise.read(workdir)


def test_memory_that_is_negative_or_not_known_is_refused():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    advise.check_memory(1.0, fitted)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"--memory_gb={wrong} is negative"):
            advise.check_memory(wrong, fitted)
    unknown = fit.fit({"a": _without_residuals()})
    advise.check_memory(0.0, unknown)
    with pytest.raises(ConfigError, match="--memory_gb=1 needs to know what tasks"):
        advise.check_memory(1.0, unknown)


def _without_residuals():
    trace = ran(chain(), BFW, disturbed(chain(), 0))
    trace.residuals = None
    return trace


def test_all_advice_is_within_the_memory_and_says_what_is_not():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    limit_gb = 3 * KEPT / memory.GIB
    found, left_out = advice(fitted, limit_gb, launch_ahead=(1,))
    assert max(p.peak_bytes for p in found) <= 3 * KEPT
    flag = f"--config.pipeline.memory_limit_gb={limit_gb}"
    assert all(flag in p.candidate.flags() for p in found)
    named = [n for why, n in left_out.items() if "order 1f1b keeps" in why]
    assert named == [
        [f"1f1b, fixed, {where}, ahead 1"] for where in ("one_each", "interleaved")
    ]
    text = advise_report.to_text(fitted, found, left_out, Settings(num_draws=4))
    assert "Left out: 1f1b, fixed, one_each, ahead 1: fixed order 1f1b keeps" in text


def test_memory_that_holds_nothing_is_refused():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    with pytest.raises(ConfigError, match=r"candidates can run here\. .*cannot hold"):
        advice(fitted, KEPT / 4 / memory.GIB, launch_ahead=(1,))


def test_the_flags_are_those_of_the_trainer_and_set_what_was_simulated():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    for each in fit_candidates.candidates(fitted, Search(), 0.5):
        given = {}
        for flag in each.flags():
            name, value = flag.removeprefix("--config.pipeline.").split("=")
            kind = type(getattr(PipelineConfig, name))
            given[name] = value == "True" if kind is bool else kind(value)
        config = PipelineConfig(num_ranks=4, num_microbatches=8, **given)
        assert config.policy == each.policy
        assert config.stage_ranks(()) == each.cut.placement


def test_a_guess_is_called_one():
    split, whole = (
        fitted_on(ran(chain(), policy, disturbed(chain(), 0))) for policy in (BFW, BF)
    )
    for fitted, is_guess in ((split, False), (whole, True)):
        found, left_out = advice(fitted, hints=("bf", "bfw"), launch_ahead=(1,))
        text = advise_report.to_text(fitted, found, left_out, Settings())
        assert ("Assumed for split backwards" in text) is is_guess


def test_advice_without_a_baseline_says_so():
    fitted = fitted_on(ran(chain((0, 0, 1)), BF, disturbed(chain((0, 0, 1)), 0)))
    found, left_out = advice(fitted, hints=("bf",), launch_ahead=(1,))
    assert fit_candidates.baseline(found) is None
    text = advise_report.to_text(fitted, found, left_out, Settings())
    assert "There is no 1F1B to compare with here." in text
    assert "pipeline.placement" not in text


def test_speedups_are_paired_by_step():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    found, _ = advice(fitted, hints=("bf",), limits=(8,), launch_ahead=(1,))
    over = fit_candidates.baseline(found)
    slower = dataclasses.replace(over, step_s=tuple(2 * s for s in over.step_s))
    assert over.speedup(slower) == 2.0
