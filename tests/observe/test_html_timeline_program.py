"""The page's program finds what is pointed at, and says of it what is so.

Run by node, where there is one: the functions are those that a browser runs.
"""

import itertools
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from rrfp_jax.core import graph, memory, placement, policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.observe import html_timeline
from rrfp_jax.sim import bubbles, costs, simulator
from rrfp_jax.sim.bubbles import Cause
from tests.core.instrument import t
from tests.observe.test_html_timeline import data_of

MODEL = pathlib.Path(html_timeline.__file__).with_name("timeline_model.js")
MIB = 2**20
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node to run scripts")


def asked(page, question):
    """Returns what the model of a page answers to a JavaScript expression."""
    panel = json.dumps(data_of(page)["panels"][0])
    program = f"{MODEL.read_text()}\nconst panel = indexed({panel});\n"
    program += f"console.log(JSON.stringify({question}));"
    ran = subprocess.run(
        [NODE, "-"], input=program, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_program_is_javascript(simulate, tmp_path):
    page = html_timeline.compose([("one", simulate(2, 2))])
    *_, program = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (tmp_path / "program.js").write_text(program)
    subprocess.run([NODE, "--check", tmp_path / "program.js"], check=True)


def test_every_moment_of_a_rank_is_found_as_its_task_or_its_bubble(simulate):
    """In the middle of each interval, and at its very start."""
    ran = simulate(4, 6, placed=placement.v_shaped(4), hint="bfw")
    found = asked(
        html_timeline.compose([("one", ran)]),
        """[panel.tasks, panel.bubbles].map((of, which) => {
            const other = which ? panel.tasks : panel.bubbles;
            return panel.ranks.flatMap((_, rank) => of.start.slice(
                of.first[rank], of.first[rank + 1]).map((start, k) => {
              const i = of.first[rank] + k;
              const middle = (start + of.end[i]) / 2;
              return [intervalAt(of, rank, middle, 0) - i,
                intervalAt(of, rank, start, 0) - i,
                intervalAt(other, rank, middle, 0)];
            }));
          })""",
    )
    assert len(found[0]) == len(ran.spans)
    assert {tuple(each) for each in itertools.chain(*found)} == {(0, 0, -1)}


def test_a_zoom_keeps_what_is_pointed_at_and_no_view_leaves_the_step(simulate):
    page = html_timeline.compose([("one", simulate(2, 2))])
    whole, near, end, past, out = asked(
        page,
        """[zoomed({from: 0, to: 8}, 1, 3, 8), zoomed({from: 0, to: 8}, 0.5, 2, 8),
            zoomed({from: 4, to: 8}, 0.5, 8, 8), panned({from: 4, to: 6}, 5, 8),
            zoomed({from: 4, to: 8}, 100, 5, 8)]""",
    )
    assert whole == out == {"from": 0, "to": 8}
    assert near == {"from": 1, "to": 5}  # 2 stays at a quarter
    assert end == {"from": 6, "to": 8}
    assert past == {"from": 6, "to": 8}


def test_a_task_is_told_with_its_inputs_and_a_bubble_with_its_cause():
    """F = 1, B = 2, link 4: 1F0 runs 5 to 6, 1B0 6 to 8, 0B0 12 to 14."""
    of = graph.chain(1, (0, 1))
    table = costs.constant(of, 1.0, 2.0, 4.0)
    kept = memory.constant(of, 40 * MIB)
    ran = simulator.simulate(of, policies.Policy(), table, residuals=kept)
    forward, backward, moving = asked(
        html_timeline.compose([("one", ran)]),
        """[describeTask(panel, 2, unitFor(14)), describeTask(panel, 1, unitFor(14)),
            describeBubble(panel, 1, 9, unitFor(14))]""",
    )
    came = "0F0 (rank 0) to 1F0 (rank 1): ended at 1.0000 s, under way 1.0000 s to"
    assert forward == [
        "1F0: forward of stage 1, microbatch 0",
        "rank 1, 5.0000 s to 6.0000 s: 1.0000 s",
        f"input {came} 5.0000 s",
        "began 0.0000 s after all was there",
        "40.0 MiB on the rank after its launch",
    ]
    back = "1B0 (rank 1) to 0B0 (rank 0): ended at 8.0000 s, under way 8.0000 s to"
    assert backward[2:4] == [
        "input 0F0, of this rank, ended at 1.0000 s",
        f"input {back} 12.0000 s",
    ]
    assert moving == [
        "transfer: 4.0000 s, what the next task waited for was under way",
        "rank 0 was idle 8.0000 s to 12.0000 s",
        "then came 0B0",
        f"the last of its inputs: {back} 12.0000 s",
    ]


def test_inputs_are_told_in_the_order_in_which_they_came():
    """2F0 needs 0F0, here at 1, and 1F0 of its own rank, which ends at 2."""
    of = PipelineGraph(3, 1, ((0, 1), (1, 2), (0, 2)), (0, 1, 1))
    ran = simulator.simulate(of, policies.Policy(), costs.constant(of, 1.0, 1.0))
    which = [span.task for rank in ran.by_rank() for span in rank].index(t("2F0"))
    told = asked(
        html_timeline.compose([("one", ran)]),
        f"describeTask(panel, {which}, unitFor(14))",
    )
    assert [line.split()[1] for line in told if line.startswith("input")] == [
        "0F0",
        "1F0,",
    ]


def test_what_is_held_is_told_with_what_was_ready():
    """limit=1: 0F1 is ready all along and waits, 1 to 13, until 0B0 has begun."""
    of = graph.chain(2, (0, 1))
    table = costs.constant(of, 1.0, 2.0, 4.0)
    ran = simulator.simulate(of, policies.Policy(in_flight_limit=1), table)
    held = bubbles.find(ran)[0]
    assert Cause.HELD in [each.cause for each in held]
    which = next(i for i, each in enumerate(held) if each.cause is Cause.HELD)
    told = asked(
        html_timeline.compose([("one", ran)]),
        f"describeBubble(panel, {which}, {held[which].start_s}, unitFor(1))",
    )
    assert told[0].startswith("held: ")
    assert told[-1].endswith(": 0F1")


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (40 * MIB, "40.0 MiB"), (1000 * MIB, "1000 MiB")],
)
def test_bytes_are_told_in_binary_units(simulate, num_bytes, words):
    page = html_timeline.compose([("one", simulate(1, 1))])
    assert asked(page, f"levelInWords({num_bytes}, 'bytes')") == words
