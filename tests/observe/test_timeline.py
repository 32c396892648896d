"""Timelines are readable: one time axis, nothing on top of anything else."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.backends import backend_agg
from PIL import Image

from rrfp_jax.core import graph, memory, placement, trace
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Span, Trace
from rrfp_jax.observe import palette, timeline
from tests.core.instrument import t

MIB = 2**20


def texts_of(picture):
    """The words and the box, in pixels, of every text that is drawn."""
    renderer = backend_agg.FigureCanvasAgg(picture).get_renderer()
    picture.draw(renderer)
    found = list(picture.texts)
    for axes in picture.axes:
        found += axes.texts
        if axes.axison:
            found += [axes.xaxis.label, *axes.get_yticklabels()]
            found += [
                label
                for label in axes.get_xticklabels()
                if label.get_position()[0] <= axes.get_xlim()[1]
            ]
            found += [axes._left_title, axes._right_title]
    return [
        (text.get_text().strip(), text.get_window_extent(renderer))
        for text in found
        if text.get_text().strip() and text.get_visible()
    ]


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "placed"),
    [
        (1, 1, None),
        (4, 8, None),
        (16, 64, None),
        (8, 16, placement.v_shaped(8)),
        (4, 8, placement.interleaved(4, 4)),
    ],
    ids=["1x1", "4x8", "16x64", "V", "four chunks"],
)
def test_no_two_labels_overlap_and_all_are_inside(
    simulate, num_ranks, num_microbatches, placed
):
    orders = ["readiness", "fixed"] if placed is None else ["readiness"]
    panels = [
        (f"{o}, a name", simulate(num_ranks, num_microbatches, o, placed))
        for o in orders
    ]
    assert_readable(timeline.compose(panels))


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "placed"),
    [
        (1, 1, None),
        (4, 8, None),
        (16, 32, None),
        (8, 16, placement.v_shaped(8)),
        (4, 8, placement.interleaved(4, 4)),
    ],
    ids=["1x1", "4x8", "16x32", "V", "four chunks"],
)
def test_no_two_labels_overlap_where_memory_is_shown(
    simulate, num_ranks, num_microbatches, placed
):
    panels = [
        (
            "split",
            simulate(
                num_ranks,
                num_microbatches,
                placed=placed,
                hint=hint,
                forward_bytes=kept,
            ),
        )
        for hint, kept in [("bfw", 51 * MIB), ("bfw_memory", 51 * MIB), ("bf", None)]
    ]
    assert_readable(timeline.compose(panels, limit_bytes=1020 * MIB))


def assert_readable(picture):
    """No text is cut off, or on top of another."""
    boxes = texts_of(picture)
    assert len(boxes) > 10
    for _, box in boxes:
        assert picture.bbox.contains(box.x0, box.y0)
        assert picture.bbox.contains(box.x1, box.y1)
    x0, y0, x1, y1 = np.array([box.extents for _, box in boxes]).T[:, :, None]
    overlaps = (x0 < x1.T) & (x1 > x0.T) & (y0 < y1.T) & (y1 > y0.T)
    clashes = np.argwhere(np.triu(overlaps, k=1))
    assert [(boxes[i][0], boxes[j][0]) for i, j in clashes] == []


def test_panels_share_the_time_axis_and_state_their_figures(simulate):
    fast, slow = simulate(4, 8), simulate(4, 8, "fixed")
    picture = timeline.compose([("fast", fast), ("slow", slow)])
    above, below = picture.axes[:2]
    assert above.get_xlim() == below.get_xlim() == (0, slow.makespan_s * 1e3)
    assert above.get_title(loc="left") == "fast"
    assert f"makespan {fast.makespan_s * 1e3:.4g} ms" in above.get_title(loc="right")
    assert "bubble " in above.get_title(loc="right")
    sooner = f"{1 - fast.makespan_s / slow.makespan_s:.1%} sooner"
    assert sooner in [words for words, _ in texts_of(picture)]


def test_an_endless_title_is_shortened(simulate):
    picture = timeline.compose([("many words " * 40, simulate(2, 2))])
    left, right = (picture.axes[0].get_title(loc=side) for side in ("left", "right"))
    assert left.endswith("…")
    assert right.startswith("makespan")


def words_of(picture):
    return [words for words, _ in texts_of(picture)]


def colours_of(picture):
    """The colours of the bars of the first panel."""
    bars = max(picture.axes[0].collections, key=lambda each: len(each.get_facecolor()))
    return {tuple(rgba[:3]) for rgba in bars.get_facecolor()}


def test_weight_gradients_are_green_and_in_the_legend_only_where_there_are_any(
    simulate,
):
    whole, split = (
        timeline.compose([("one", simulate(2, 4, hint=hint))]) for hint in ("bf", "bfw")
    )
    greens = set(map(tuple, palette.ramp(Kind.W, 0, 1, 4)))
    assert greens <= colours_of(split)
    assert not greens & colours_of(whole)
    legend = ["forward", "backward", "idle"]
    assert [word for word in words_of(whole) if word in (*legend, "weights")] == legend
    assert "weights" in words_of(split)


def split_in_two():
    """One rank, one microbatch: F from 0 to 1 s, B from 2 to 4, W from 4 to 5."""
    steps = graph.chain(1, (0,), is_split=True)
    ran = Trace(steps, memory.constant(steps, 40 * MIB, 0.75))
    for task, start_s, end_s in [("0F0", 0, 1), ("0B0", 2, 4), ("0W0", 4, 5)]:
        ran.spans.append(Span(t(task), 0, float(start_s), float(end_s)))
    return ran


def test_a_strip_steps_at_launches_and_its_peak_is_named():
    picture = timeline.compose([("one", split_in_two())])
    panel = picture.axes[0]
    (curve,) = [x for x in panel.lines if x.get_drawstyle() == "steps-post"]
    times_ms, heights = curve.get_data()
    assert list(times_ms) == [0, 0, 2000, 4000, 5000]
    low, full = heights[0], heights[1]
    bottom, _ = panel.get_ylim()  # the axis points down
    assert bottom > low > full > 0.43, "it must be below the bar, inside the panel"
    assert (low - heights) / (low - full) == pytest.approx([0, 1, 0.75, 0, 0])
    assert "40 MiB" in words_of(picture)
    assert "peak residuals 40 MiB" in panel.get_title(loc="right")


def dashed_of(picture):
    """The dashed lines in the first panel."""
    return [x for x in picture.axes[0].lines if x.is_dashed()]


def test_a_limit_is_a_dashed_line_at_its_height():
    picture = timeline.compose([("one", split_in_two())], limit_bytes=60 * MIB)
    (curve,) = [x for x in picture.axes[0].lines if x.get_drawstyle() == "steps-post"]
    low, full = curve.get_ydata()[:2]
    (limit,) = dashed_of(picture)
    assert (low - limit.get_ydata()) / (low - full) == pytest.approx([1.5, 1.5])
    assert "limit 60 MiB" in words_of(picture)


@pytest.mark.parametrize("limit_bytes", [None, 0])
def test_without_a_limit_there_is_no_dashed_line(limit_bytes):
    picture = timeline.compose([("one", split_in_two())], limit_bytes)
    assert dashed_of(picture) == []
    assert not [words for words in words_of(picture) if words.startswith("limit")]


def test_without_residuals_nothing_is_said_of_memory(simulate):
    ran = simulate(4, 8)
    bare, limited = (
        timeline.compose([("one", ran)], limit_bytes) for limit_bytes in (None, MIB)
    )
    assert words_of(bare) == words_of(limited)
    assert not {"memory", "0 B"} & set(words_of(bare))
    assert "residuals" not in bare.axes[0].get_title(loc="right")
    assert tuple(bare.get_size_inches()) == tuple(limited.get_size_inches())
    assert bare.axes[0].get_ylim() == (3.5, -0.5)


def test_draw_writes_a_png_of_sensible_size(simulate, tmp_path):
    timeline.draw([("one", simulate(2, 4))], tmp_path / "one.png", dpi=100)
    with Image.open(tmp_path / "one.png") as image:
        assert image.format == "PNG"
        assert 900 < image.width < 1200


def test_an_empty_step_can_be_drawn():
    picture = timeline.compose([("nothing", trace.Trace(graph.chain(1, (0,))))])
    assert "makespan 0" in picture.axes[0].get_title(loc="right")


def test_no_panel_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        timeline.compose([])


def test_pyplot_and_its_global_state_are_left_alone():
    code = (
        "import sys, rrfp_jax.observe.timeline; "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ran.stdout == b"False\n"
