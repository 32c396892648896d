"""Strips of a timeline: the live residual bytes of each rank, all on one scale.

A strip hangs below the bars of its rank and grows upwards. It steps where a task
starts: a launch adds what the task keeps and frees what it uses, see `core.memory`.
"""

from collections.abc import Sequence

from matplotlib import axes

from rrfp_jax.core.trace import Trace
from rrfp_jax.observe import palette, units
from rrfp_jax.observe.layout import Layout

_TOP, _HEIGHT = 0.06, 0.66  # below the bars, in rows

Point = tuple[float, float]


def draw(panel: axes.Axes, trace: Trace, layout: Layout, bars: Sequence[float]) -> None:
    """Draws a strip for each rank, with its peak beside it.

    Args:
      panel: whose y axis counts rows, downwards.
      trace: whose residuals are known.
      layout: of the picture.
      bars: the lower edge of the bars of each rank.
    """
    unit = -_HEIGHT / layout.full_bytes
    end = trace.makespan_s * layout.scale
    each = zip(bars, trace.by_rank(), trace.live_bytes(), strict=True)
    for bar, spans, live in each:
        base = bar + _TOP + _HEIGHT
        starts = [span.start_s * layout.scale for span in spans]
        steps = list(zip(starts, live, strict=True))
        last = live[-1] if live else 0
        fill(panel, [(0.0, 0), *steps, (end, last)], base, unit)
        if layout.limit_bytes:
            line(panel, base + layout.limit_bytes * unit, end)
        _draw_peak(panel, steps, layout, base, unit)


def _draw_peak(
    panel: axes.Axes, steps: Sequence[Point], layout: Layout, base: float, unit: float
) -> None:
    """Marks the first time of the peak, and writes it at the right."""
    at, peak = max(steps, key=lambda step: step[1], default=(0.0, 0))
    colour = palette.MEMORY_EDGE
    if peak:
        panel.plot([at], [base + peak * unit], ".", color=colour, markersize=3)
    panel.text(
        layout.longest_s * layout.scale,
        base - _HEIGHT / 2,
        "  " + units.bytes_in_words(peak),
        fontsize=layout.name_font,
        color=colour,
        ha="left",
        va="center",
    )


def fill(panel: axes.Axes, curve: Sequence[Point], base: float, unit: float) -> None:
    """Draws a curve that steps at each of its points, filled down to `base`.

    Args:
      panel: to draw on.
      curve: (time, value), by time.
      base: where 0 is on the y axis.
      unit: how far 1 is from 0.
    """
    times = [time for time, _ in curve]
    heights = [base + value * unit for _, value in curve]
    panel.fill_between(
        times, heights, base, step="post", color=palette.MEMORY, linewidth=0, zorder=1
    )
    panel.step(
        times,
        heights,
        where="post",
        color=palette.MEMORY_EDGE,
        linewidth=0.7,
        zorder=2,
    )


def line(panel: axes.Axes, at: float, end: float) -> None:
    """Draws a limit, from 0 to `end`."""
    panel.plot(
        [0, end], [at, at], color=palette.INK, linewidth=0.8, dashes=(4, 3), zorder=3
    )
