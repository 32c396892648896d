"""The published files of the comparison: a CSV, and bars for every setting."""

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

from matplotlib import figure

from scripts.peers.figures import Line, fastest
from scripts.peers.registry import OURS

_OURS, _CONTROL, _PEER, _FASTEST = "#0072b2", "#9ecae1", "#bbbbbb", "#666666"


def publish(found: Sequence[Line], folder: pathlib.Path, name: str) -> None:
    """Writes a CSV and a PNG of this name into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w") as file:
        fields = [field.name for field in dataclasses.fields(Line)]
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for each in found:
            writer.writerow({k: _short(v) for k, v in vars(each).items()})
    drawn = draw(found)
    drawn.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def draw(found: Sequence[Line]) -> figure.Figure:
    """Returns a panel for each setting, a bar for each contender."""
    names = list(dict.fromkeys(each.setting for each in found))
    rows = -(-len(names) // 2)
    drawn = figure.Figure(figsize=(12, 0.5 + 3.2 * rows))
    grid = drawn.subplots(rows, 2, squeeze=False).flat
    for axes, name in zip(grid, names, strict=False):
        mine = [each for each in found if each.setting == name]
        bars = axes.barh(
            [f"{each.peer} {each.schedule}" for each in mine],
            [each.median_s for each in mine],
            color=[_colour(each, fastest(found, name)) for each in mine],
        )
        labels = [f"{e.over_bf:.2f}x, {e.peak_in_flight} in flight" for e in mine]
        axes.bar_label(bars, labels, padding=3, fontsize=7)
        axes.margins(x=0.3)
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
        axes.set_title(f"{name}: seconds a step (over BF, peak in flight)", fontsize=9)
    for axes in list(grid):
        axes.set_visible(False)
    drawn.tight_layout()
    return drawn


def _colour(line: Line, best: Line | None) -> str:
    if line.peer == OURS:
        return _OURS if line.schedule in ("bf", "bfw") else _CONTROL
    return _FASTEST if line == best else _PEER
