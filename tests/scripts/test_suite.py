"""What the figures of the suite have in common."""

import argparse
import json

import pytest
from matplotlib import figure

from rrfp_jax import workload_files
from rrfp_jax.workloads.stage_times import Workload
from scripts.bench import suite

CONFIG = workload_files.read(suite.CONFIGS / workload_files.WORKLOADS, "gpt3_large")


@pytest.fixture(scope="module")
def runs():
    """Three contenders on two seeds of a small step."""
    contenders = {
        "blocking": suite.fixed("1f1b", True),
        "overlapped": suite.fixed("1f1b", False),
        "bfw": suite.readiness("bfw"),
    }
    graph = suite.chain(4, 16)
    return {
        name: [suite.simulate(Workload(CONFIG), each, graph, k) for k in range(2)]
        for name, each in contenders.items()
    }


def test_speed_ups_are_means_of_pairs(runs):
    a, b = runs["blocking"], runs["bfw"]
    expected = sum(x.makespan_s / y.makespan_s for x, y in zip(a, b, strict=True)) / 2
    assert suite.paired(a, b) == pytest.approx(expected)
    assert suite.paired(a, a) == 1


def test_a_row_states_depth_memory_and_transfers(runs):
    row = suite.row("x", suite.fixed("1f1b", True), runs["blocking"], table=1)
    assert (row["table"], row["transfers"], row["peak_in_flight"]) == (1, "blocking", 4)
    assert row["peak_residual_bytes"] == max(r.peak_bytes for r in runs["blocking"])
    causes = [row[name] for name in ("fill_drain", "input", "transfer", "held")]
    bubbles = [r.report.bubble.total_s for r in runs["blocking"]]
    whole = sum(4 * r.makespan_s for r in runs["blocking"])
    assert sum(causes) == pytest.approx(sum(bubbles) / whole, abs=1e-3)


def test_as_deep_is_as_deep():
    graph = suite.chain(4, 16)
    for depth in (4, 6, 8):
        deep = suite.as_deep(depth, 4, False)
        assert suite.simulate(Workload(CONFIG), deep, graph, 0).depth == depth


def test_within_a_limit_no_rank_keeps_more(runs):
    peak = runs["blocking"][0].peak_bytes
    small = suite.within(suite.readiness("bfw"), peak)
    ran = suite.simulate(Workload(CONFIG), small, suite.chain(4, 16), 0)
    assert ran.peak_bytes <= peak < runs["bfw"][0].peak_bytes


def test_a_figure_leaves_csv_picture_json_and_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    out = tmp_path / "docs/bench"
    flags = argparse.Namespace(json=tmp_path / "f.json", out=out)
    for result in ("first", "second"):
        about = suite.Figure("name", "A title", "python x.py", "a config", 3, result)
        rows = [{"contender": "bf", "makespan_s": 1.5}]
        suite.publish(flags, about, rows, figure.Figure(), {"figure": 2.0})
    other = suite.Figure("other", "B title", "python y.py", "a config", 3, "third")
    suite.publish(flags, other, rows, figure.Figure(), {"figure": 2.0})
    assert json.loads(flags.json.read_text()) == {"figure": 2.0}
    assert (out / "name.csv").read_text() == "contender,makespan_s\nbf,1.5\n"
    assert (out / "name.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "docs/benchmarks.md").read_text().splitlines()
    told = [line for line in lines if line.startswith("| [")]
    assert len(told) == 2
    assert "second" in told[0]
    assert "`python y.py`" in told[1]
