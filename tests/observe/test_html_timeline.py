"""The page holds the traces to the last digit, and says of them what is so."""

import fnmatch
import html
import itertools
import json
import pathlib
import re
import tomllib

import pytest

from rrfp_jax.core import graph, placement, policies
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.core.trace import Trace
from rrfp_jax.observe import html_timeline, palette
from rrfp_jax.sim import bubbles, costs, report, simulator
from rrfp_jax.sim.bubbles import Cause

ROOT = pathlib.Path(__file__).parents[2]
OBSERVE = ROOT / "rrfp_jax" / "observe"
MIB = 2**20
PART_OF_A_PAGE = {".html", ".css", ".js"}


def data_of(page):
    """Returns what a page has embedded."""
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page)
    assert found, page[:2000]
    return json.loads(found[1])


def panel_of(trace):
    (panel,) = data_of(html_timeline.compose([("one", trace)]))["panels"]
    return panel


@pytest.fixture(params=["whole", "split", "V"])
def ran(request, simulate):
    """A step of 4 ranks, of each shape."""
    hint = "bf" if request.param == "whole" else "bfw"
    placed = placement.v_shaped(4) if request.param == "V" else None
    kept = None if request.param == "whole" else 40 * MIB
    return simulate(4, 6, placed=placed, hint=hint, forward_bytes=kept)


def tasks_of(panel):
    """Returns the tasks of a panel, and the rank of each."""
    columns = panel["tasks"]
    named = zip(columns["kind"], columns["stage"], columns["microbatch"], strict=True)
    return [Task(Kind(kind), *rest) for kind, *rest in named]


def by_rank(columns, rows):
    assert columns["first"][0] == 0
    assert columns["first"][-1] == len(rows)
    return [rows[a:b] for a, b in itertools.pairwise(columns["first"])]


def test_every_task_is_there_exactly(ran):
    panel = panel_of(ran)
    columns = panel["tasks"]
    rows = list(zip(tasks_of(panel), columns["start"], columns["end"], strict=True))
    assert by_rank(columns, rows) == [
        [(span.task, span.start_s, span.end_s) for span in spans]
        for spans in ran.by_rank()
    ]
    assert panel["makespan"] == ran.makespan_s


def test_every_transfer_is_there_exactly_from_task_to_task(ran):
    panel = panel_of(ran)
    tasks, columns = tasks_of(panel), panel["transfers"]
    names = ("source", "target", "start", "end")
    rows = list(zip(*(columns[name] for name in names), strict=True))
    found = [(tasks[source], tasks[target].stage, *at) for source, target, *at in rows]
    assert found == [tuple(moved) for moved in ran.transfers]
    assert all(tasks[u] in ran.graph.inputs(tasks[v]) for u, v, *_ in rows)


def test_every_bubble_is_there_exactly_with_its_cause(ran):
    panel = panel_of(ran)
    tasks, columns = tasks_of(panel), panel["bubbles"]

    def named(index):
        return None if index < 0 else tasks[index]

    rows = [
        (start_s, end_s, cause, named(until), named(awaited))
        for start_s, end_s, cause, until, awaited in zip(
            *(columns[n] for n in ("start", "end", "cause", "until", "awaited")),
            strict=True,
        )
    ]
    found = [[tuple(idle[1:]) for idle in each] for each in bubbles.find(ran)]
    assert by_rank(columns, rows) == found


def test_the_bubbles_sum_to_the_report_and_so_do_the_shares(ran):
    panel, figures = panel_of(ran), report.report(ran)
    columns = panel["bubbles"]
    spent_s = dict.fromkeys(Cause, 0.0)
    for start_s, end_s, cause in zip(
        columns["start"], columns["end"], columns["cause"], strict=True
    ):
        spent_s[Cause(cause)] += end_s - start_s
    bubble, total_s = figures.bubble, 4 * ran.makespan_s
    expected = {
        "fill_drain": spent_s[Cause.FILL] + spent_s[Cause.DRAIN],
        "input": spent_s[Cause.INPUT],
        "transfer": spent_s[Cause.TRANSFER],
        "held": spent_s[Cause.HELD],
    }
    sums = [bubble.fill_drain_s, bubble.input_s, bubble.transfer_s, bubble.held_s]
    assert sums == pytest.approx(list(expected.values()))
    shares = panel["shares"]
    assert shares.pop("bubble") == figures.bubble_fraction
    assert shares == pytest.approx({k: v / total_s for k, v in expected.items()})


def test_inputs_are_those_of_the_graph_from_this_rank_or_by_transfer(ran):
    panel = panel_of(ran)
    tasks, moved = tasks_of(panel), panel["transfers"]
    inputs = [{tasks[i] for i in local} for local in panel["tasks"]["local"]]
    for i, local in enumerate(inputs):
        assert all(
            ran.graph.rank_of(source) == ran.graph.rank_of(tasks[i]) for source in local
        )
    for source, target in zip(moved["source"], moved["target"], strict=True):
        assert tasks[source] not in inputs[target]
        inputs[target].add(tasks[source])
    assert inputs == [set(ran.graph.inputs(task)) for task in tasks]


def test_levels_are_the_live_bytes_where_they_are_known(simulate):
    ran = simulate(4, 6, hint="bfw", forward_bytes=40 * MIB)
    panel = panel_of(ran)
    columns = panel["tasks"]
    assert panel["measure"] == "bytes"
    assert by_rank(columns, columns["level"]) == ran.live_bytes()
    assert panel["peaks"] == ran.peak_bytes()


def test_levels_are_microbatches_in_flight_where_bytes_are_not_known():
    """Rank 0 begins both, rank 1 one after the other."""
    of = graph.chain(2, (0, 1))
    table = costs.constant(of, 1.0, 1.0)
    panel = panel_of(simulator.simulate(of, policies.Policy("bf"), table))
    assert panel["measure"] == "microbatches"
    columns = panel["tasks"]
    assert by_rank(columns, tasks_of(panel))[0][:2] == [(Kind.F, 0, 0), (Kind.F, 0, 1)]
    assert by_rank(columns, columns["level"]) == [[1, 2, 1, 0], [1, 0, 1, 0]]
    assert panel["peaks"] == [2, 1]


def test_two_runs_are_two_panels_in_their_order(simulate):
    fast, slow = simulate(4, 8), simulate(4, 8, "fixed")
    page = html_timeline.compose([("fast", fast), ("slow", slow)], 3 * MIB)
    data = data_of(page)
    assert data["limit_bytes"] == 3 * MIB
    assert [(p["title"], p["makespan"]) for p in data["panels"]] == [
        ("fast", fast.makespan_s),
        ("slow", slow.makespan_s),
    ]


def test_colours_are_those_of_the_png():
    of = graph.chain(3, placement.v_shaped(2))
    ran = simulator.simulate(of, policies.Policy("bf"), costs.constant(of, 1.0, 1.0))
    panel = panel_of(ran)
    assert panel["chunks"] == [0, 0, 1, 1]
    for kind, chunk, j in itertools.product(Kind, (0, 1), (0, 1, 2)):
        shade, ink = panel["shades"][kind][chunk][j]
        rgb = palette.ramp(kind, chunk, 2, 3)[j]
        parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert parts == pytest.approx(list(rgb), abs=0.51 / 255)
        assert ink == palette.ink_on(rgb)


EVIL = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "<b>BF</b> & \"BF\" 'x'",
    "{{data}} {{title}}",
    "\u2028\u2029 é 日本 \\u003c",
]


@pytest.mark.parametrize("title", EVIL)
def test_a_title_is_text_whatever_it_says(simulate, title):
    ran = simulate(2, 2)
    page = html_timeline.compose([(title, ran)])
    plain = html_timeline.compose([("plain", ran)])
    tags = re.compile(r"<[a-z/!][^>]*>", re.IGNORECASE)
    assert tags.findall(page) == tags.findall(plain)
    assert data_of(page)["panels"][0]["title"] == title
    shown = re.search("<title>(.*?)</title>", page, re.DOTALL)
    assert html.unescape(shown[1]) == title


def test_the_page_asks_for_nothing_else(simulate):
    page = html_timeline.compose([("one", simulate(2, 2))])
    assert not re.search(
        r"https?:|//[\w-]+\.\w|\b(src|href)\s*=|url\(|@import|\bimport\b|fetch\(|"
        r"XMLHttpRequest|WebSocket|innerHTML|\beval\b",
        page,
    )
    assert "default-src 'none'" in page
    assert "{{" not in page


def test_a_page_is_small(simulate):
    """Measured: 105 bytes a task, beside the program and its colours."""
    ran = simulate(8, 32, hint="bfw", forward_bytes=40 * MIB)
    assert len(html_timeline.compose([("one", ran)])) < 45_000 + 130 * len(ran.spans)


def test_every_cause_and_kind_has_words_and_every_cause_a_fill():
    model = (OBSERVE / "timeline_model.js").read_text()
    view = (OBSERVE / "timeline_view.js").read_text()
    words = re.search(r"const CAUSES = \{(.*?)\};", model, re.DOTALL)[1]
    fills = re.search(r"return \{ (fill: .*?)\};", view, re.DOTALL)[1]
    kinds = re.search(r"const KINDS = \{(.*?)\};", model, re.DOTALL)[1]
    for text, names in ((words, Cause), (fills, Cause), (kinds, Kind)):
        assert sorted(re.findall(r"(\w+):", text)) == sorted(names)


def test_what_the_page_is_made_of_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["rrfp_jax"]
    parts = [path.name for path in OBSERVE.iterdir() if path.suffix in PART_OF_A_PAGE]
    assert len(parts) == 5
    for name in parts:
        assert any(fnmatch.fnmatch(f"observe/{name}", each) for each in patterns)


def test_an_empty_step_can_be_drawn(tmp_path):
    empty = Trace(graph.chain(1, (0,)))
    html_timeline.draw([("nothing", empty)], tmp_path / "empty.html")
    page = (tmp_path / "empty.html").read_text(encoding="utf-8")
    (panel,) = data_of(page)["panels"]
    assert panel["makespan"] == panel["shares"]["bubble"] == 0.0
    assert tasks_of(panel) == []


def test_no_panel_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        html_timeline.compose([])
