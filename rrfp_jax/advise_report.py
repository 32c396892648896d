"""Advice in words, as a CSV and as a picture."""

import csv
import io
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from matplotlib import figure

from rrfp_jax.core.task import Kind
from rrfp_jax.observe import palette, units
from rrfp_jax.sim import fit_candidates, fit_variation
from rrfp_jax.sim.fit import Fit
from rrfp_jax.sim.fit_candidates import Prediction
from rrfp_jax.sim.fit_draws import Settings

_ROWS = 24  # of the table and of the picture; the CSV has all
_NAMES_OF_ONE_REASON = 3
_HEADER = ("policy", "step ms", "90 % of steps", "speed-up", "in flight", "residuals")


def to_text(
    fitted: Fit,
    found: Sequence[Prediction],
    left_out: Mapping[str, Sequence[str]],
    settings: Settings,
) -> str:
    """Returns the whole advice.

    Args:
      fitted: the traced run.
      found: the fastest first.
      left_out: why -> the names of the candidates that could not be simulated.
      settings: of the draws.
    """
    parts = [
        "\n".join(_fitted(fitted)),
        _table(found),
        "\n".join(_notes(fitted, found, settings)),
        "\n".join(_left_out(left_out)),
        _advice(found),
    ]
    return "\n\n".join(part for part in parts if part)


def _fitted(fitted: Fit) -> Iterator[str]:
    steps_ms = ", ".join(f"{s * 1e3:.1f}" for s in fitted.step_s)
    yield (
        f"Fitted on {len(fitted.pool)} microbatches of {len(fitted.step_s)} traced "
        f"step(s): {steps_ms} ms. Host latency: {fitted.latency_s * 1e6:.0f} us."
    )
    stages, loads = fit_variation.variation(fitted)
    for s, times in enumerate(stages):
        yield (
            f"  stage {s}: {times.mean_s * 1e3:.2f} ms a microbatch, varies by "
            f"{times.cv:.0%}, by {times.own_cv:.0%} on its own"
        )
    for load in loads:
        named = ", ".join(map(str, load.stages))
        yield f"  stages {named} share a load by microbatch, varying by {load.cv:.0%}"


def _table(found: Sequence[Prediction]) -> str:
    over = fit_candidates.baseline(found)
    shown = _shown(found)
    rows = [_HEADER, *(_row(each, over) for each in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if len(shown) < len(found):
        lines.append(f"... {len(found) - len(shown)} slower ones are in advice.csv.")
    return "\n".join(lines)


def _row(each: Prediction, over: Prediction | None) -> tuple[str, ...]:
    least_s, most_s = each.interval_s
    return (
        each.candidate.name,
        f"{each.mean_s * 1e3:.1f}",
        f"{least_s * 1e3:.1f} .. {most_s * 1e3:.1f}",
        "-" if over is None else f"{each.speedup(over):.3f}",
        str(each.peak_in_flight),
        units.bytes_in_words(each.peak_bytes) if each.peak_bytes else "-",
    )


def _notes(
    fitted: Fit, found: Sequence[Prediction], settings: Settings
) -> Iterator[str]:
    over = fit_candidates.baseline(found)
    yield (
        f"Means over {settings.num_draws} simulated steps, and between what nine of "
        "ten of them lie. "
        + (
            "There is no 1F1B to compare with here."
            if over is None
            else f"Speed-up: over {over.candidate.name}, step by step."
        )
    )
    notes = {p.candidate.cut.name: p.candidate.cut.note for p in found}
    for name, note in notes.items():
        if note:
            yield f"Assumed for {name}: {note}."
    if not fitted.graph.is_split and any(p.candidate.policy.is_split for p in found):
        yield (
            "Assumed for split backwards: the traced backward is whole; "
            f"{settings.weight_fraction:.0%} of it would be weight gradients, up to 10 "
            "points more or less by step, which widens the interval; they would need "
            "all that F keeps. Trace a run with --config.pipeline.split=always to know."
        )


def _left_out(left_out: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for why, names in left_out.items():
        some = "; ".join(names[:_NAMES_OF_ONE_REASON])
        more = len(names) - _NAMES_OF_ONE_REASON
        if more > 0:
            some += f" and {more} more"
        yield f"Left out: {some}: {why.splitlines()[0]}"


def _advice(found: Sequence[Prediction]) -> str:
    best, fastest = fit_candidates.recommended(found), found[0]
    lines = [f"Best: {best.candidate.name}, {best.mean_s * 1e3:.1f} ms a step."]
    if best is not fastest:
        lines[0] += (
            f" {fastest.candidate.name} is faster by less than 1 % "
            f"({fastest.mean_s * 1e3:.1f} ms) and holds more."
        )
    return "\n".join([*lines, *(f"    {flag}" for flag in best.candidate.flags())])


def to_csv(found: Sequence[Prediction]) -> str:
    """Returns a line a candidate, the fastest first; seconds and bytes."""
    over = fit_candidates.baseline(found)
    best = fit_candidates.recommended(found)
    records = []
    for each in found:
        policy, (least_s, most_s) = each.candidate.policy, each.interval_s
        records.append(
            {
                "placement": each.candidate.cut.name,
                "order": policy.order,
                "hint": policy.hint,
                "in_flight_limit": policy.in_flight_limit,
                "in_flight_taper": policy.in_flight_taper,
                "memory_limit_gb": policy.memory_limit_gb,
                "launch_ahead": policy.launch_ahead,
                "step_s": each.mean_s,
                "step_p5_s": least_s,
                "step_p95_s": most_s,
                "speedup": "" if over is None else each.speedup(over),
                "peak_in_flight": each.peak_in_flight,
                "peak_bytes": each.peak_bytes,
                "is_best": int(each is best),
            }
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def draw(found: Sequence[Prediction], fitted: Fit, path: pathlib.Path) -> None:
    """Draws the fastest, and the baseline, as bars with intervals; a PNG."""
    over, best = fit_candidates.baseline(found), fit_candidates.recommended(found)
    shown = _shown(found)
    # An unregistered figure: nothing global, and none is left open.
    picture = figure.Figure(figsize=(9, 1.3 + 0.26 * len(shown)), layout="constrained")
    axes = picture.add_subplot()
    kinds = {id(over): Kind.B, id(best): Kind.W}  # which may be one
    shades = {kind: tuple(palette.ramp(kind, 0, 1, 5)[2]) for kind in Kind}
    whiskers = [
        (max(0.0, p.mean_s - low_s) * 1e3, max(0.0, high_s - p.mean_s) * 1e3)
        for p in shown
        for low_s, high_s in [p.interval_s]
    ]
    axes.barh(
        range(len(shown)),
        [p.mean_s * 1e3 for p in shown],
        xerr=list(zip(*whiskers, strict=True)),
        color=[shades[kinds.get(id(p), Kind.F)] for p in shown],
        error_kw={"ecolor": palette.INK, "elinewidth": 0.8, "capsize": 2},
    )
    axes.set_yticks(range(len(shown)), [p.candidate.name for p in shown], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("predicted step, ms (bars: mean; whiskers: 90 % of steps)")
    axes.set_title(
        f"{fitted.graph.num_ranks} ranks, {fitted.graph.num_microbatches} "
        "microbatches; green: advised, orange: fixed 1F1B",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, format="png", dpi=120, facecolor="white")


def _shown(found: Sequence[Prediction]) -> list[Prediction]:
    """Returns what the table and the picture have: the fastest, and the baseline."""
    over = fit_candidates.baseline(found)
    shown = list(found[:_ROWS])
    return shown if over is None or over in shown else [*shown, over]
