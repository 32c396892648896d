"""The paper's Table 6: injected jitter J0 to J3, simulated and in the runtime.

    python scripts/bench/jitter_levels.py [--seeds=3] [--json FILE] [--out=docs/bench]

Qwen3-4B + ViT-Big, TP2 on 8 ranks, a batch of 96 (RRFP §7.6). A level's sleeps are
drawn per task, the same for all. In the runtime all durations are scaled so that a task
takes 6 ms on average; the slow-downs are ratios and do not change.

Twice: with injected jitter alone (images and compute do not vary by themselves), which
is what a slow-down from J0 measures; and with all the variation of the workload, where
1F1B has lost much at J0 already and the same sleeps weigh less on it.
"""

import dataclasses
from typing import Any

import jax

RANKS, BATCH, TENSOR, VARIANT = 8, 96, 2, "qwen3_4b_vit_big"
jax.config.update("jax_num_cpu_devices", RANKS)  # before the first use

import suite
from emulation import Field
from matplotlib import figure
from suite import Ran

from rrfp_jax import workload_files
from rrfp_jax.sim import costs
from rrfp_jax.workloads.stage_times import Workload

LEVELS = tuple(costs.LEVELS)
TASK_S = 0.006
CONTENDERS = {
    "1F1B, blocking": suite.fixed("1f1b", True),
    "1F1B, overlapped": suite.fixed("1f1b", False),
    "BF": suite.readiness("bf"),
    "BFW": suite.readiness("bfw"),
}
OURS, FIXED = ("BF", "BFW"), ("1F1B, blocking", "1F1B, overlapped")
ALONE, ALL = "injected alone", "all variation"
_Runs = dict[tuple[str, str], list[Ran]]  # by level and contender


def workload_of(what: str) -> Workload:
    """Returns the workload, scaled, with or without variation of its own."""
    config = workload_files.read(suite.CONFIGS / workload_files.WORKLOADS, VARIANT)
    if what == ALONE:
        still = dataclasses.replace(config.variation, compute_cv=0.0, image_cv=0.0)
        config = dataclasses.replace(config, variation=still)
    workload = Workload(config, TENSOR)
    return dataclasses.replace(workload, scale=TASK_S / workload.times(RANKS).mean_s)


def measure(what: str, seeds: int) -> dict[str, _Runs]:
    """Returns all runs, simulated and emulated."""
    workload = workload_of(what)
    graph = suite.chain(RANKS, BATCH)
    found: dict[str, _Runs] = {"simulated": {}, "emulated": {}}
    fields = {
        level: Field(dataclasses.replace(workload, level=level), RANKS, BATCH)
        for level in LEVELS
    }
    jobs = [(level, name) for level in LEVELS for name in CONTENDERS]
    for level, name in suite.steps(jobs, what):
        contender = CONTENDERS[name]
        jittery = dataclasses.replace(workload, level=level)
        found["simulated"][level, name] = [
            suite.simulate(jittery, contender, graph, seed) for seed in range(seeds)
        ]
        found["emulated"][level, name] = [
            fields[level].run(contender, seed) for seed in range(seeds)
        ]
    return found


def slowdown(runs: _Runs, level: str, name: str) -> float:
    """Returns how much longer than at J0 a step takes."""
    return suite.mean_s(runs[level, name]) / suite.mean_s(runs[LEVELS[0], name]) - 1


def draw(found: dict[str, dict[str, _Runs]]) -> figure.Figure:
    """Returns the slow-downs by level."""
    drawn = figure.Figure(figsize=(9, 7))
    panels = [(what, where) for what in found for where in found[what]]
    for axes, (what, where) in zip(drawn.subplots(2, 2).flat, panels, strict=True):
        for name in CONTENDERS:
            values = [slowdown(found[what][where], level, name) for level in LEVELS]
            style = "-o" if name in OURS else "--s"
            axes.plot(LEVELS, [100 * v for v in values], style, label=name)
        axes.set_title(f"{where}, {what}", fontsize=9)
        axes.set_ylabel("slow-down from J0, %")
    axes.legend(fontsize=8)
    drawn.tight_layout()
    return drawn


def main() -> None:
    """Measures and publishes."""
    flags = suite.arguments(__doc__, 3).parse_args()
    found = {what: measure(what, flags.seeds) for what in (ALONE, ALL)}
    rows: list[dict[str, Any]] = []
    for what, by_place in found.items():
        for where, runs in by_place.items():
            for (level, name), ran in runs.items():
                row = suite.row(name, CONTENDERS[name], ran, variation=what)
                row |= {"where": where, "level": level}
                row["slow-down"] = round(slowdown(runs, level, name), 4)
                rows.append(row)
    shown = ("variation", "where", "level", "contender", "makespan_s", "slow-down")
    print(suite.table([{name: row[name] for name in shown} for row in rows]))
    last = LEVELS[-1]
    figures: dict[str, float] = {}
    parts = []
    for what, by_place in found.items():
        for where, runs in by_place.items():
            by_name = {name: slowdown(runs, last, name) for name in CONTENDERS}
            short = "alone" if what == ALONE else "all"
            figures |= {f"{where}, {short}, {n}": v for n, v in by_name.items()}
            listed = ", ".join(f"{n} {v:.1%}" for n, v in by_name.items())
            parts.append(f"{where}, {what}: {listed}")
    worst = {
        where: max(slowdown(found[ALONE][where], last, name) for name in OURS)
        < min(slowdown(found[ALONE][where], last, name) for name in FIXED)
        for where in found[ALONE]
    }
    figures |= {f"smaller_when_{where}": float(is_so) for where, is_so in worst.items()}
    about = suite.Figure(
        "jitter_levels",
        "Table 6, slow-down from J0 to J3",
        "python scripts/bench/jitter_levels.py",
        f"`configs/bench/workloads.py:{VARIANT}`",
        flags.seeds,
        "; ".join(parts) + " (published: 1F1B 18.1 %, BF 11.4 %)",
    )
    suite.publish(flags, about, rows, draw(found), figures)


if __name__ == "__main__":
    main()
