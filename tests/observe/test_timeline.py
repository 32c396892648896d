"""Timelines are readable: one time axis, nothing on top of anything else."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.backends import backend_agg
from PIL import Image

from rrfp_jax.core import graph, placement, trace
from rrfp_jax.observe import palette, timeline


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
    picture = timeline.compose(panels)
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


def test_later_microbatches_and_other_chunks_look_different():
    shades = palette.ramp("F", 0, 2, 8)
    assert shades.shape == (8, 3)
    assert all(shades[j].sum() > shades[j + 1].sum() for j in range(7))
    assert abs(shades - palette.ramp("F", 1, 2, 8)).max() > 0.05


def test_pyplot_and_its_global_state_are_left_alone():
    code = (
        "import sys, rrfp_jax.observe.timeline; "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ran.stdout == b"False\n"
