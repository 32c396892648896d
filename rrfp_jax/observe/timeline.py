"""Pictures of what every rank did: one panel a run, all on one time axis.

A row is a rank, a bar a task, its number the microbatch. Forwards are cold, backwards
warm; light is the first microbatch of the step and dark the last, so a schedule that
reorders shows as a change of shade. Where a rank holds several stages, each of its
chunks has a hue of its own. What stays grey is idle.
"""

import pathlib
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import axes, collections, colors, figure

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Span, Trace
from rrfp_jax.observe import layout as layouts
from rrfp_jax.observe import palette
from rrfp_jax.observe.layout import Layout
from rrfp_jax.sim import report

_BAR = 0.86  # height of a bar; rows are 1 apart
_NAMES = {Kind.F: "forward", Kind.B: "backward"}
_IDLE_SHADES = np.array([colors.to_rgb(palette.IDLE)])


def draw(
    panels: Sequence[tuple[str, Trace]], path: str | pathlib.Path, dpi: int = 130
) -> None:
    """Writes the picture that `compose` makes as a PNG.

    Args:
      panels: (title, trace) of each run, the uppermost first.
      path: of the file.
      dpi: pixels an inch; the picture is 10 to 22 inches wide.

    Raises:
      ValueError: there is no panel.
    """
    compose(panels, dpi).savefig(path, format="png", facecolor="white")


def compose(panels: Sequence[tuple[str, Trace]], dpi: int = 130) -> figure.Figure:
    """Draws runs one above another, so that equal times are above each other.

    Raises:
      ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("a timeline needs at least one run.")
    layout = layouts.plan([trace for _, trace in panels])
    picture = figure.Figure(figsize=(layout.width, layout.height), dpi=dpi)
    for (title, trace), bottom in zip(panels, layout.bottoms, strict=True):
        up = trace.graph.num_ranks * layout.row
        panel = picture.add_axes(layout.box(layout.left, bottom, layout.across, up))
        _draw_panel(panel, title, trace, layout)
    panel.tick_params(axis="x", length=3, labelbottom=True)
    panel.set_xlabel(f"time ({layout.unit})", fontsize=8, color=palette.INK)
    _draw_legend(picture, [trace.graph for _, trace in panels], layout)
    return picture


def _draw_panel(panel: axes.Axes, title: str, trace: Trace, layout: Layout) -> None:
    num_ranks, scale = trace.graph.num_ranks, layout.scale
    panel.set_xlim(0, layout.longest_s * scale)
    panel.set_ylim(num_ranks - 0.5, -0.5)
    names = layouts.row_names(trace.graph)
    panel.set_yticks(range(num_ranks), labels=names, fontsize=layout.name_font)
    panel.tick_params(axis="y", length=0, pad=4, colors=palette.INK)
    panel.tick_params(
        axis="x", labelsize=7, colors=palette.INK, length=0, labelbottom=False
    )
    panel.grid(axis="x", color="white", linewidth=1)
    panel.spines[:].set_visible(False)
    idle = [
        (0, rank - _BAR / 2, trace.makespan_s * scale, _BAR)
        for rank in range(num_ranks)
    ]
    panel.add_collection(_rectangles(idle, palette.IDLE, zorder=0), autolim=False)
    _draw_tasks(panel, trace, layout)
    _draw_end(panel, trace, layout)
    _draw_title(panel, title, trace, layout)


def _draw_tasks(panel: axes.Axes, trace: Trace, layout: Layout) -> None:
    scale = layout.scale
    shades = _Shades(trace.graph)
    rectangles = [
        (
            span.start_s * scale,
            span.rank - _BAR / 2,
            (span.end_s - span.start_s) * scale,
            _BAR,
        )
        for span in trace.spans
    ]
    filled = [shades.of(span) for span in trace.spans]
    panel.add_collection(_rectangles(rectangles, filled, zorder=2), autolim=False)
    numbered = {kind for kind in Kind if _is_numbered(trace, kind, layout)}
    for span, rgb in zip(trace.spans, filled, strict=True):
        if span.task.kind in numbered and _fits(span, layout):
            panel.text(
                (span.start_s + span.end_s) / 2 * scale,
                span.rank,
                str(span.task.microbatch),
                fontsize=layout.font,
                color=palette.ink_on(rgb),
                ha="center",
                va="center_baseline",
            )


def _is_numbered(trace: Trace, kind: Kind, layout: Layout) -> bool:
    """Whether most numbers of a kind fit; a few scattered ones would only be noise."""
    fits = [_fits(span, layout) for span in trace.spans if span.task.kind is kind]
    return 2 * sum(fits) > len(fits)


def _fits(span: Span, layout: Layout) -> bool:
    room = (span.end_s - span.start_s) * layout.points_per_s - layouts.PADDING
    return len(str(span.task.microbatch)) * layouts.DIGIT_EM * layout.font < room


class _Shades:
    """The colour of each task of a graph."""

    def __init__(self, graph: PipelineGraph) -> None:
        self._chunk = {
            stage: chunk
            for stages in graph.stages_of
            for chunk, stage in enumerate(stages)
        }
        count = layouts.num_chunks(graph)
        self._ramps = {
            (kind, chunk): palette.ramp(kind, chunk, count, graph.num_microbatches)
            for kind in Kind
            for chunk in range(count)
        }

    def of(self, span: Span) -> palette.Shades:
        """Returns the colour of a task."""
        kind, stage, microbatch = span.task
        shade: palette.Shades = self._ramps[kind, self._chunk[stage]][microbatch]
        return shade


def _rectangles(
    boxes: Sequence[tuple[float, float, float, float]],
    filled: str | Sequence[palette.Shades],
    zorder: int,
) -> collections.PolyCollection:
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    return collections.PolyCollection(
        corners,
        facecolors=filled,
        edgecolors="white",
        linewidths=0.5 if zorder else 0,
        zorder=zorder,
    )


def _draw_end(panel: axes.Axes, trace: Trace, layout: Layout) -> None:
    """Marks the makespan, and how much sooner than the longest run it is."""
    end_s, num_ranks = trace.makespan_s, trace.graph.num_ranks
    panel.plot(
        [end_s * layout.scale] * 2,
        [-0.5, num_ranks - 0.5],
        color=palette.INK,
        linewidth=1.4,
        clip_on=False,
    )
    gap = (layout.longest_s - end_s) * layout.points_per_s
    is_wide = gap > 60
    if gap < 14 or (not is_wide and num_ranks * layout.row < 1):
        return
    middle = num_ranks / 2 - 0.5
    panel.text(
        (layout.longest_s + end_s) / 2 * layout.scale,
        middle,
        f"{1 - end_s / layout.longest_s:.1%} sooner" + "\n" * is_wide,
        fontsize=7.5,
        color=palette.INK,
        rotation=0 if is_wide else 90,
        ha="center",
        va="center",
    )
    if is_wide:
        panel.annotate(
            "",
            (end_s * layout.scale, middle),
            (layout.longest_s * layout.scale, middle),
            arrowprops={"arrowstyle": "->", "color": palette.FAINT, "shrinkB": 0},
        )


def _draw_title(panel: axes.Axes, title: str, trace: Trace, layout: Layout) -> None:
    figures = report.report(trace)
    makespan = f"{trace.makespan_s * layout.scale:.4g} {layout.unit}"
    right = (
        f"makespan {makespan}     bubble {figures.bubble_fraction:.1%}     "
        f"peak in flight {max(figures.peak_in_flight)}"
    )
    room = layout.across * 72 - len(right) * 9 * 0.6
    left = textwrap.shorten(title, max(8, int(room / (10 * 0.68))), placeholder=" …")
    panel.set_title(left, loc="left", fontsize=10, fontweight="bold", pad=5)
    panel.set_title(right, loc="right", fontsize=9, pad=5)


def _draw_legend(
    picture: figure.Figure, graphs: Sequence[PipelineGraph], layout: Layout
) -> None:
    """Draws a strip of shades for each kind and chunk, and a patch for idle."""
    num_chunks = max(map(layouts.num_chunks, graphs))
    last = max(graph.num_microbatches for graph in graphs) - 1
    wide = min(1.7, (layout.across - 2.4) / num_chunks)
    x, y = layout.left, 0.12 + 0.27 * (layout.num_keys - 1)
    for kind in Kind:
        _write(picture, layout, x, y, _NAMES[kind])
        for chunk in range(num_chunks):
            box = layout.box(x + 0.65 + chunk * wide, y, wide - 0.07, 0.2)
            shades = palette.ramp(kind, chunk, num_chunks, last + 1)
            name = f"chunk {chunk}" if num_chunks > 1 else "microbatch"
            _draw_strip(picture.add_axes(box), shades, name)
        if layout.num_keys == 1:
            x += 0.65 + wide + 0.25
        else:
            y -= 0.27
    if layout.num_keys > 1:
        x, y = layout.left + 0.65 + num_chunks * wide + 0.25, 0.12 + 0.27
    _write(picture, layout, x, y, "idle")
    _draw_strip(picture.add_axes(layout.box(x + 0.35, y, 0.4, 0.2)), _IDLE_SHADES, "")


def _write(
    picture: figure.Figure, layout: Layout, x: float, y: float, text: str
) -> None:
    at = (x / layout.width, (y + 0.1) / layout.height)
    picture.text(*at, text, fontsize=8, color=palette.INK, va="center")


def _draw_strip(strip: axes.Axes, shades: palette.Shades, name: str) -> None:
    strip.imshow(shades[None], aspect="auto", extent=(0, 1, 0, 1))
    strip.set_axis_off()
    last = len(shades) - 1
    ends = (("0", 0.03, "left", 0), (str(last), 0.97, "right", last))
    for text, x, align, shade in (*ends, (name, 0.5, "center", last // 2)):
        if name:
            strip.text(
                x,
                0.48,
                text,
                fontsize=7,
                color=palette.ink_on(shades[shade]),
                ha=align,
                va="center_baseline",
            )
