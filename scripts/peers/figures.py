"""From results to ratios: pair by pair, over the fastest peer, and their means."""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.peers.registry import OURS
from scripts.peers.running import Result, Step
from scripts.peers.settings import Setting

Contender = tuple[str, str]  # system, schedule
Twin = tuple[str, int]  # setting, seed: a step, whoever runs it
BF, BFW = (OURS, "bf"), (OURS, "bfw")


@dataclasses.dataclass(frozen=True)
class Line:
    """A contender in a setting.

    Attributes:
      setting: where.
      peer, schedule: who.
      median_s: of its steps.
      over_bf, over_bfw: the median of its time over ours, step by step.
      peak_in_flight: the most microbatches on any rank in any step.
      gradient_error: the worst.
      num_steps: that count.
    """

    setting: str
    peer: str
    schedule: str
    median_s: float
    over_bf: float
    over_bfw: float
    peak_in_flight: int
    gradient_error: float
    num_steps: int


def lines(results: Sequence[Result], settings: Sequence[Setting]) -> list[Line]:
    """Returns a line for each contender in each setting, none for those that failed.

    Args:
      results: of all systems and repeats. A step's twin is that of the same setting and
        seed.
      settings: in the order of the lines.

    Raises:
      RuntimeError: ours failed, so there is nothing to compare with.
    """
    bad = {(each.peer, each.schedule) for each in results if not each.is_ok}
    for result in results:
        if result.peer == OURS and not result.is_ok:
            raise RuntimeError(f"{OURS} {result.schedule}: {result.reason}")
    steps: dict[Contender, dict[Twin, Step]] = collections.defaultdict(dict)
    for result in results:
        who = (result.peer, result.schedule)
        if who not in bad:
            steps[who] |= {(step.setting, step.seed): step for step in result.steps}
    return [
        _line(who, {twin: s for twin, s in ran.items() if twin[0] == name}, steps)
        for name in map(str, settings)
        for who, ran in steps.items()
    ]


def _line(
    who: Contender,
    mine: Mapping[Twin, Step],
    steps: Mapping[Contender, Mapping[Twin, Step]],
) -> Line:
    """Returns the line of a contender's steps in one setting, beside those of ours."""
    bf, bfw = steps[BF], steps[BFW]
    return Line(
        next(iter(mine.values())).setting,
        *who,
        median_s=statistics.median(step.seconds for step in mine.values()),
        over_bf=statistics.median(s.seconds / bf[t].seconds for t, s in mine.items()),
        over_bfw=statistics.median(s.seconds / bfw[t].seconds for t, s in mine.items()),
        peak_in_flight=max(max(step.peak_in_flight) for step in mine.values()),
        gradient_error=max(step.gradient_error for step in mine.values()),
        num_steps=len(mine),
    )


def fastest(found: Sequence[Line], setting: str) -> Line | None:
    """Returns the external contender with the smallest median; None without any."""
    peers = [e for e in found if e.setting == setting and e.peer != OURS]
    return min(peers, key=lambda each: each.median_s, default=None)


def summary(
    found: Sequence[Line],
    settings: Sequence[Setting],
    results: Sequence[Result],
    bounds_s: Mapping[Twin, float],
) -> dict[str, Any]:
    """Returns the figures for `--json`: over the fastest peer of each setting.

    Args:
      found: what `lines` returns.
      settings: all of them.
      results: that the lines are of.
      bounds_s: what no order of one stage a rank can beat, of each step.
    """
    best = {str(s): fastest(found, str(s)) for s in settings}
    over = {name: line for name, line in best.items() if line is not None}
    multimodal = {n: e.over_bf for n, e in over.items() if n.startswith("multimodal")}
    top = max(multimodal, key=multimodal.__getitem__, default="")
    bad = [each for each in results if not each.is_ok]
    return {
        "best_setting_bf": multimodal.get(top),
        "best_setting_bf_name": top,
        "geomean_bf": _geomean([each.over_bf for each in over.values()]),
        "geomean_bfw": _geomean([each.over_bfw for each in over.values()]),
        "min_bf": min((each.over_bf for each in over.values()), default=None),
        "peers_run": sorted({e.peer for e in found if e.peer != OURS}),
        "versions": {each.peer: each.version for each in results if each.version},
        "not_counted": {f"{each.peer} {each.schedule}": each.reason for each in bad},
        "settings": {
            name: {
                "fastest_peer": f"{line.peer} {line.schedule}",
                "over_bf": line.over_bf,
                "over_bfw": line.over_bfw,
                "over_bound": _over_bound(line, results, bounds_s),
            }
            for name, line in over.items()
        },
        "lines": [dataclasses.asdict(each) for each in found],
    }


def _over_bound(
    line: Line, results: Sequence[Result], bounds_s: Mapping[Twin, float]
) -> float:
    """Returns how much slower than the bound a contender is: no ratio can be more."""
    return statistics.median(
        step.seconds / bounds_s[step.setting, step.seed]
        for result in results
        for step in result.steps
        if (result.peer, result.schedule, step.setting)
        == (line.peer, line.schedule, line.setting)
    )


def _geomean(ratios: Sequence[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios else None


def table(found: Sequence[Line]) -> str:
    """Returns the lines as text; the fastest peer of each setting is marked."""
    head = (
        f"{'setting':<20} {'system':<17} {'schedule':<12} {'median s':>8} "
        f"{'over BF':>8} {'over BFW':>8} {'in flight':>9}"
    )
    rows = [head]
    for each in found:
        mark = "*" if each == fastest(found, each.setting) else ""
        rows.append(
            f"{each.setting:<20} {each.peer:<17} {each.schedule:<12} "
            f"{each.median_s:>8.3f} {each.over_bf:>8.3f} {each.over_bfw:>8.3f} "
            f"{each.peak_in_flight:>9} {mark}".rstrip()
        )
    return "\n".join(rows)
