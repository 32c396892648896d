"""The command that draws recorded steps: one page, one message for a mistake."""

import pathlib
import subprocess
import sys

import pytest

from rrfp_jax import timeline
from rrfp_jax.core import graph, trace
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.observe import chrome_trace
from rrfp_jax.sim import costs, simulator
from tests.observe.test_html_timeline import data_of

ROOT = pathlib.Path(__file__).parents[1]


def step() -> Trace:
    of = graph.chain(3, (0, 1))
    return simulator.simulate(of, Policy("bf"), costs.constant(of, 1.0, 2.0, 0.5))


@pytest.fixture
def recorded(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "step_000003.trace.json"
    path.write_text(trace.to_json(step()))
    return path


def command(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rrfp_jax.timeline", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_two_traces_are_drawn_on_one_page_under_their_names(
    recorded: pathlib.Path, tmp_path: pathlib.Path
):
    other = tmp_path / "other.trace.json"
    other.write_text(trace.to_json(step()))
    out = tmp_path / "both.html"
    ran = command(recorded, f"--out={out}", other, "--memory_limit_gb=0.5")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"Wrote {out}.\n"
    data = data_of(out.read_text(encoding="utf-8"))
    assert [panel["title"] for panel in data["panels"]] == [str(recorded), str(other)]
    assert {panel["makespan"] for panel in data["panels"]} == {step().makespan_s}
    assert data["limit_bytes"] == 2**29


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is no trace.\n  Pass the traces/step_*.trace.json"),
        (("gone.json",), "gone.json cannot be read: "),
        (("TRACE", "--out=page.htm"), "--out=page.htm is not the name of a page.\n"),
        (("TRACE", "--out=no/where.html"), "--out=no/where.html is in a folder that"),
        (("TRACE", "--memory_limit_gb=-1"), "--memory_limit_gb=-1.0 is no limit.\n"),
        (("TRACE", "--memory_limit_gb=nan"), "--memory_limit_gb=nan is no limit.\n"),
        (("TRACE", "--memory_limit_gb=few"), "flag --memory_limit_gb=few: "),
        (("TRACE", "--output=x.html"), "Unknown command line flag 'output'"),
    ],
)
def test_a_mistake_ends_with_one_message_and_status_2(
    recorded: pathlib.Path, flags: tuple[str, ...], message: str
):
    ran = command(*(recorded if each == "TRACE" else each for each in flags))
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"ConfigError: {message}")
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"graph": 1}',
        trace.to_json(step()).replace("0F0", "0X0"),
        trace.to_json(step()).replace('"placement": [0, 1]', '"placement": [0, 7]'),
    ],
    ids=["empty", "cut", "list", "number", "keys", "task", "placement"],
)
def test_what_is_no_trace_is_refused_by_its_name(tmp_path: pathlib.Path, text: str):
    path = tmp_path / "a.trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.trace\.json is not a trace: "):
        timeline.read(str(path))


def test_a_trace_for_perfetto_is_refused(tmp_path: pathlib.Path):
    path = tmp_path / "step_000003.perfetto.json"
    chrome_trace.write(step(), path)
    with pytest.raises(ConfigError, match=r"(?s)is not a trace.*\.trace\.json"):
        timeline.read(str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: pathlib.Path):
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConfigError, match=r"a\.png cannot be read: "):
        timeline.read(str(path))


def test_a_trace_of_a_part_of_the_pipeline_is_refused(tmp_path: pathlib.Path):
    part = step()
    part.spans = [span for span in part.spans if span.rank == 0]
    path = tmp_path / "part.trace.json"
    path.write_text(trace.to_json(part))
    with pytest.raises(ConfigError, match="lacks 6 tasks of its step, such as 1B0"):
        timeline.read(str(path))


def test_what_was_recorded_is_read(recorded: pathlib.Path):
    assert timeline.read(str(recorded)) == step()
