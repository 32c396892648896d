"""Where the parts of a timeline go, and how large: in inches, fonts in points."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Trace

DIGIT_EM = 0.64
"""Width of a digit of DejaVu Sans, in font sizes."""

PADDING = 1.5
"""Points that a number leaves free in its bar."""

KEY = 0.27
"""Height of a line of the legend."""

_STRIP = 0.85  # what a strip of live bytes adds to the row of a rank, in rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things go, in inches from the lower left corner, and how time is shown.

    Attributes:
      width, height: of the picture.
      left, across: start and width of the time axis.
      row: height of a rank's row, without its strip of live bytes.
      name_font: size of the names of the rows, in points.
      font: size of the numbers in bars, in points.
      bottoms: lower edge of each panel.
      kinds: those in the legend.
      num_keys: lines of the legend.
      full_bytes: the height of a strip of live bytes; 0 where no panel has any.
      limit_bytes: what ranks were held to; 0 for nothing.
      longest_s: the end of the time axis.
      unit: of the time axis.
      scale: units in a second.
    """

    width: float
    height: float
    left: float
    across: float
    row: float
    name_font: float
    font: float
    bottoms: tuple[float, ...]
    kinds: tuple[Kind, ...]
    num_keys: int
    full_bytes: float
    limit_bytes: int
    longest_s: float
    unit: str
    scale: float

    def box(
        self, left: float, bottom: float, across: float, up: float
    ) -> tuple[float, float, float, float]:
        """Returns a box in fractions of the picture, as matplotlib wants it."""
        w, h = self.width, self.height
        return left / w, bottom / h, across / w, up / h

    @property
    def points_per_s(self) -> float:
        """Points (1/72 inch) in a second of the time axis."""
        return self.across * 72 / self.longest_s


def plan(traces: Sequence[Trace], limit_bytes: int = 0) -> Layout:
    """Plans a picture of some runs, the first one uppermost."""
    graphs = [trace.graph for trace in traces]
    num_rows = sum(trace.graph.num_ranks * pitch(trace) for trace in traces)
    full_bytes = _full_bytes(traces, limit_bytes)
    busiest = max(len(spans) for trace in traces for spans in trace.by_rank())
    across = float(np.clip(0.15 * busiest, 9.0, 20.5))
    row = float(np.clip((12.0 if full_bytes else 9.0) / num_rows, 0.13, 0.34))
    longest_name = max(len(name) for graph in graphs for name in row_names(graph))
    left = 0.35 + 0.07 * longest_name
    kinds = _kinds(traces)
    num_keys = 1 if max(map(num_chunks, graphs)) == 1 else len(kinds)
    num_keys += full_bytes > 0
    bottom, bottoms = 0.66 + KEY * num_keys, []
    for trace in reversed(traces):
        bottoms.append(bottom)
        bottom += trace.graph.num_ranks * pitch(trace) * row + 0.5
    longest_s = max(trace.makespan_s for trace in traces) or 1.0
    unit, scale = _unit(longest_s)
    name_font = min(7.0, row * 38)
    return Layout(
        width=left + across + (0.75 if full_bytes else 0.35),
        height=bottom - 0.05,
        left=left,
        across=across,
        row=row,
        name_font=name_font,
        font=_font(traces, across * 72 / longest_s, name_font),
        bottoms=tuple(reversed(bottoms)),
        kinds=kinds,
        num_keys=num_keys,
        full_bytes=full_bytes,
        limit_bytes=limit_bytes,
        longest_s=longest_s,
        unit=unit,
        scale=scale,
    )


def pitch(trace: Trace) -> float:
    """Returns the distance from a rank to the next, in rows."""
    return 1.0 if trace.residuals is None else 1.0 + _STRIP


def _full_bytes(traces: Sequence[Trace], limit_bytes: int) -> float:
    known = [trace.peak_bytes() for trace in traces if trace.residuals is not None]
    return 1.08 * max(*map(max, known), limit_bytes, 1) if known else 0.0


def _kinds(traces: Sequence[Trace]) -> tuple[Kind, ...]:
    """Returns F, B, and W where there is one."""
    found = {span.task.kind for trace in traces for span in trace.spans}
    return tuple(kind for kind in Kind if kind is not Kind.W or kind in found)


def _unit(longest_s: float) -> tuple[str, float]:
    if longest_s >= 10:
        return "s", 1.0
    return ("ms", 1e3) if longest_s >= 0.01 else ("µs", 1e6)


def _font(traces: Sequence[Trace], points_per_s: float, most: float) -> float:
    """Returns the size, at most `most`, at which the number of a long task fits."""
    spans = [span for trace in traces for span in trace.spans]
    long_s = float(np.quantile([s.end_s - s.start_s for s in spans] or [0.0], 0.6))
    num_digits = max(len(str(trace.graph.num_microbatches - 1)) for trace in traces)
    fitting = (long_s * points_per_s - PADDING) / (num_digits * DIGIT_EM)
    return float(np.clip(fitting, min(5.0, most), most))


def num_chunks(graph: PipelineGraph) -> int:
    """Returns how many stages the fullest rank holds."""
    return max(map(len, graph.stages_of))


def row_names(graph: PipelineGraph) -> list[str]:
    """Returns the name of each rank, with its stages where that is news."""
    if num_chunks(graph) == 1:
        return [f"rank {rank}" for rank in range(graph.num_ranks)]
    return [
        f"rank {rank} (stages {', '.join(map(str, stages))})"
        for rank, stages in enumerate(graph.stages_of)
    ]
