"""A timeline as one HTML file to look into: zoom, the inputs of a task, why a rank was
idle, transfers as arrows, and what each rank holds; all runs on one time axis.

The page has its data, style and program within itself and asks for nothing else, so it
opens from a disk. Its figures are those of the trace and of `sim.report`; colours are
those of the PNG (`observe.timeline`). What is drawn where and in which words is in
`timeline_model.js`, the canvases in `timeline_view.js`, the reader's doings in
`timeline_page.js`.

Causes are those of links that overlap with compute: a trace does not say whether its
transfers have blocked their ranks.
"""

import html
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from matplotlib import colors

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.core.trace import Span, Trace
from rrfp_jax.observe import layout as layouts
from rrfp_jax.observe import palette
from rrfp_jax.sim import bubbles, report

_PROGRAM = ("timeline_model.js", "timeline_view.js", "timeline_page.js")
_HOLE = re.compile(r"\{\{(\w+)\}\}")
_Columns = dict[str, Any]


def draw(
    panels: Sequence[tuple[str, Trace]],
    path: str | pathlib.Path,
    memory_limit_bytes: int = 0,
) -> None:
    """Writes the page that `compose` makes.

    Args:
      panels: (title, trace) of each run, the uppermost first.
      path: of the file.
      memory_limit_bytes: a limit on the residuals of a rank, drawn where they are
        known; 0 for none.

    Raises:
      ValueError: there is no panel.
    """
    page = compose(panels, memory_limit_bytes)
    pathlib.Path(path).write_text(page, encoding="utf-8")


def compose(panels: Sequence[tuple[str, Trace]], memory_limit_bytes: int = 0) -> str:
    """Returns a page of runs one above another, so that equal times are above each
    other.

    Args:
      panels: (title, trace) of each run, the uppermost first; finished steps.
      memory_limit_bytes: a limit on the residuals of a rank; 0 for none.

    Raises:
      ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("a timeline needs at least one run.")
    data = {
        "limit_bytes": memory_limit_bytes,
        "panels": [_panel(title, trace) for title, trace in panels],
    }
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    style = _filled(
        _read("timeline.css"),
        ink=palette.INK,
        faint=palette.FAINT,
        idle=palette.IDLE,
        memory=palette.MEMORY,
        memory_edge=palette.MEMORY_EDGE,
    )
    return _filled(
        _read("timeline.html"),
        title=html.escape(" | ".join(title for title, _ in panels)),
        style=style,
        # Nothing within a string may end the script that holds it.
        data=text.replace("<", "\\u003c"),
        program="\n".join(map(_read, _PROGRAM)),
    )


def _read(name: str) -> str:
    folder = resources.files("rrfp_jax.observe")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _filled(template: str, **parts: str) -> str:
    """Fills each `{{name}}`, all at once: what a part says is not looked into."""
    return _HOLE.sub(lambda hole: parts[hole[1]], template)


def _panel(title: str, trace: Trace) -> _Columns:
    """Returns what the program calls a panel; tasks are named by their index."""
    graph, figures = trace.graph, report.report(trace)
    spans = [span for each in trace.by_rank() for span in each]
    index = {span.task: i for i, span in enumerate(spans)}
    is_known = trace.residuals is not None
    levels = trace.live_bytes() if is_known else _in_flight(trace)
    moved = {(transfer.source, transfer.to) for transfer in trace.transfers}
    return {
        "title": title,
        "makespan": trace.makespan_s,
        "ranks": layouts.row_names(graph),
        "shares": _shares(figures),
        "peak_in_flight": max(figures.peak_in_flight),
        "measure": "bytes" if is_known else "microbatches",
        "peaks": figures.peak_bytes if is_known else figures.peak_in_flight,
        "tasks": {
            **_intervals(trace.by_rank(), spans),
            "kind": "".join(span.task.kind for span in spans),
            "stage": [span.task.stage for span in spans],
            "microbatch": [span.task.microbatch for span in spans],
            "level": [level for each in levels for level in each],
            "local": [
                [
                    index[source]
                    for source in graph.inputs(span.task)
                    if (source, span.task.stage) not in moved
                ]
                for span in spans
            ],
        },
        "transfers": _transfers(trace, index),
        "bubbles": _bubbles(trace, index),
        **_colours(graph),
    }


def _shares(figures: report.Report) -> dict[str, float]:
    """Returns the bubble and its causes, as shares of all ranks' time."""
    bubble = figures.bubble
    total_s = figures.makespan_s * len(figures.busy_s) or 1.0
    return {
        "bubble": figures.bubble_fraction,
        "fill_drain": bubble.fill_drain_s / total_s,
        "input": bubble.input_s / total_s,
        "transfer": bubble.transfer_s / total_s,
        "held": bubble.held_s / total_s,
    }


def _in_flight(trace: Trace) -> list[list[int]]:
    """Returns, by rank, the microbatches in flight after each launch."""
    found = []
    for rank, order in enumerate(trace.launches()):
        left: dict[int, int] = {}
        counts = []
        for _, _, j in order:
            left[j] = left.get(j, trace.graph.route(j).num_tasks[rank]) - 1
            if not left[j]:
                del left[j]
            counts.append(len(left))
        found.append(counts)
    return found


def _intervals(
    by_rank: Iterable[Sequence[Any]], flat: Sequence[Span | bubbles.Idle]
) -> _Columns:
    """Returns starts and ends, and where the entries of each rank begin."""
    first = [0]
    for each in by_rank:
        first.append(first[-1] + len(each))
    return {
        "first": first,
        "start": [each.start_s for each in flat],
        "end": [each.end_s for each in flat],
    }


def _transfers(trace: Trace, index: Mapping[Task, int]) -> _Columns:
    """Returns each transfer, from the task that made it to the one that it is for."""
    return {
        "source": [index[moved.source] for moved in trace.transfers],
        "target": [
            index[moved.source._replace(stage=moved.to)] for moved in trace.transfers
        ],
        "start": [moved.start_s for moved in trace.transfers],
        "end": [moved.end_s for moved in trace.transfers],
    }


def _bubbles(trace: Trace, index: Mapping[Task, int]) -> _Columns:
    by_rank = bubbles.find(trace)
    flat = [idle for each in by_rank for idle in each]
    return {
        **_intervals(by_rank, flat),
        "cause": [idle.cause for idle in flat],
        "until": [-1 if not idle.until else index[idle.until] for idle in flat],
        "awaited": [-1 if not idle.awaited else index[idle.awaited] for idle in flat],
    }


def _colours(graph: PipelineGraph) -> _Columns:
    """Returns the chunk of each stage, and by kind, chunk and microbatch the colour of
    a task and that of a text on it.
    """
    chunks = [graph.stages_of[r].index(s) for s, r in enumerate(graph.placement)]
    num_chunks = layouts.num_chunks(graph)
    return {
        "chunks": chunks,
        "shades": {
            kind: [
                [
                    (colors.to_hex(rgb), palette.ink_on(rgb))
                    for rgb in palette.ramp(
                        kind, chunk, num_chunks, graph.num_microbatches
                    )
                ]
                for chunk in range(num_chunks)
            ]
            for kind in Kind
        },
    }
