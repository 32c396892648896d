"""Pictures of what every rank did: one panel a run, all on one time axis.

A row is a rank, a bar a task, its number the microbatch. Forwards are cold, backwards
warm, weight gradients green; light is the first microbatch of the step and dark the
last, so a schedule that reorders shows as a change of shade. Where a rank holds several
stages, each of its chunks has a hue of its own. What stays grey is idle. Where it is
known what tasks keep, a strip below each rank shows the bytes that are live.
"""

import pathlib
import textwrap
from collections.abc import Sequence

from matplotlib import axes, collections, figure

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Span, Trace
from rrfp_jax.observe import layout as layouts
from rrfp_jax.observe import legend, palette, strips, units
from rrfp_jax.observe.layout import Layout
from rrfp_jax.sim import report

_BAR = 0.86  # height of a bar; rows are 1 apart


def draw(
    panels: Sequence[tuple[str, Trace]],
    path: str | pathlib.Path,
    limit_bytes: int | None = None,
    dpi: int = 130,
) -> None:
    """Writes the picture that `compose` makes as a PNG.

    Args:
      panels: (title, trace) of each run, the uppermost first.
      path: of the file.
      limit_bytes: a limit on the residuals of a rank, drawn where they are known; None
        or 0 for none.
      dpi: pixels an inch; the picture is 10 to 22 inches wide.

    Raises:
      ValueError: there is no panel.
    """
    picture = compose(panels, limit_bytes, dpi)
    picture.savefig(path, format="png", facecolor="white")


def compose(
    panels: Sequence[tuple[str, Trace]],
    limit_bytes: int | None = None,
    dpi: int = 130,
) -> figure.Figure:
    """Draws runs one above another, so that equal times are above each other.

    Raises:
      ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("a timeline needs at least one run.")
    layout = layouts.plan([trace for _, trace in panels], limit_bytes or 0)
    picture = figure.Figure(figsize=(layout.width, layout.height), dpi=dpi)
    for (title, trace), bottom in zip(panels, layout.bottoms, strict=True):
        up = trace.graph.num_ranks * layouts.pitch(trace) * layout.row
        panel = picture.add_axes(layout.box(layout.left, bottom, layout.across, up))
        _draw_panel(panel, title, trace, layout)
    panel.tick_params(axis="x", length=3, labelbottom=True)
    panel.set_xlabel(f"time ({layout.unit})", fontsize=8, color=palette.INK)
    legend.draw(picture, [trace.graph for _, trace in panels], layout)
    return picture


def _draw_panel(panel: axes.Axes, title: str, trace: Trace, layout: Layout) -> None:
    scale, rows = layout.scale, _rows(trace)
    panel.set_xlim(0, layout.longest_s * scale)
    panel.set_ylim(_lower_edge(trace), -0.5)
    names = layouts.row_names(trace.graph)
    panel.set_yticks(rows, labels=names, fontsize=layout.name_font)
    panel.tick_params(axis="y", length=0, pad=4, colors=palette.INK)
    panel.tick_params(
        axis="x", labelsize=7, colors=palette.INK, length=0, labelbottom=False
    )
    panel.grid(axis="x", color="white", linewidth=1)
    panel.spines[:].set_visible(False)
    idle = [(0, row - _BAR / 2, trace.makespan_s * scale, _BAR) for row in rows]
    panel.add_collection(_rectangles(idle, palette.IDLE, zorder=0), autolim=False)
    _draw_tasks(panel, trace, layout)
    if trace.residuals is not None:
        strips.draw(panel, trace, layout, [row + _BAR / 2 for row in rows])
    _draw_end(panel, trace, layout)
    _draw_title(panel, title, trace, layout)


def _rows(trace: Trace) -> list[float]:
    """Returns where the bars of each rank are centred."""
    pitch = layouts.pitch(trace)
    return [rank * pitch for rank in range(trace.graph.num_ranks)]


def _lower_edge(trace: Trace) -> float:
    return trace.graph.num_ranks * layouts.pitch(trace) - 0.5


def _draw_tasks(panel: axes.Axes, trace: Trace, layout: Layout) -> None:
    scale, rows = layout.scale, _rows(trace)
    shades = _Shades(trace.graph)
    rectangles = [
        (
            span.start_s * scale,
            rows[span.rank] - _BAR / 2,
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
                rows[span.rank],
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
    end_s, lower = trace.makespan_s, _lower_edge(trace)
    panel.plot(
        [end_s * layout.scale] * 2,
        [-0.5, lower],
        color=palette.INK,
        linewidth=1.4,
        clip_on=False,
    )
    gap = (layout.longest_s - end_s) * layout.points_per_s
    is_wide = gap > 60
    if gap < 14 or (not is_wide and (lower + 0.5) * layout.row < 1):
        return
    middle = (lower - 0.5) / 2
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
    if trace.residuals is not None:
        peak = units.bytes_in_words(max(figures.peak_bytes))
        right += f"     peak residuals {peak}"
    room = layout.across * 72 - len(right) * 9 * 0.6
    left = textwrap.shorten(title, max(8, int(room / (10 * 0.68))), placeholder=" …")
    panel.set_title(left, loc="left", fontsize=10, fontweight="bold", pad=5)
    panel.set_title(right, loc="right", fontsize=9, pad=5)
