"""The legend of a timeline: what its colours, and the heights of its strips, mean."""

from collections.abc import Sequence

import numpy as np
from matplotlib import axes, colors, figure

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.observe import layout as layouts
from rrfp_jax.observe import palette, strips, units
from rrfp_jax.observe.layout import KEY, Layout

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weights"}
_IDLE_SHADES = np.array([colors.to_rgb(palette.IDLE)])


def draw(
    picture: figure.Figure, graphs: Sequence[PipelineGraph], layout: Layout
) -> None:
    """Draws shades for each kind and chunk, a patch for idle, a line on memory."""
    num_chunks = max(map(layouts.num_chunks, graphs))
    last = max(graph.num_microbatches for graph in graphs) - 1
    is_one_line = num_chunks == 1
    wide = min(1.7, (layout.across - 2.4) / num_chunks)
    x, y = layout.left, 0.12 + KEY * (layout.num_keys - 1)
    if layout.full_bytes:
        _draw_memory(picture, layout)
    for kind in layout.kinds:
        _write(picture, layout, x, y, _NAMES[kind])
        for chunk in range(num_chunks):
            box = layout.box(x + 0.65 + chunk * wide, y, wide - 0.07, 0.2)
            shades = palette.ramp(kind, chunk, num_chunks, last + 1)
            name = f"chunk {chunk}" if num_chunks > 1 else "microbatch"
            _draw_strip(picture.add_axes(box), shades, name)
        if is_one_line:
            x += 0.65 + wide + 0.25
        else:
            y -= KEY
    if not is_one_line:
        x = layout.left + 0.65 + num_chunks * wide + 0.25
        y = 0.12 + KEY * (layout.num_keys - 1)
    _write(picture, layout, x, y, "idle")
    _draw_strip(picture.add_axes(layout.box(x + 0.35, y, 0.4, 0.2)), _IDLE_SHADES, "")


def _draw_memory(picture: figure.Figure, layout: Layout) -> None:
    """Says what a strip shows, how high it is, and where the limit is."""
    x, y = layout.left, 0.12
    _write(picture, layout, x, y, "memory")
    key = picture.add_axes(layout.box(x + 0.65, y, 0.4, 0.2))
    key.set_axis_off()
    strips.fill(key, [(0.0, 0.4), (0.3, 0.9), (0.6, 0.6), (1.0, 0.6)], 0.0, 1.0)
    height = units.bytes_in_words(layout.full_bytes)
    words = f"live residuals; a strip is {height} high; numbers are peaks"
    _write(picture, layout, x + 1.15, y, words)
    if layout.limit_bytes:
        limit = units.bytes_in_words(layout.limit_bytes)
        key = picture.add_axes(layout.box(x + 4.4, y, 0.4, 0.2))
        key.set_axis_off()
        strips.line(key, 0.5, 1.0)
        _write(picture, layout, x + 4.9, y, f"limit {limit}")


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
