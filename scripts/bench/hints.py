"""The paper's Table 7: which hint, simulated and in the runtime.

    python scripts/bench/hints.py [--seeds=5] [--json FILE] [--out=docs/bench]

Qwen3-1.7B + ViT-H on 8 ranks, a batch of 192 (RRFP §7.7): BF, FB, B-priority and
F-priority, the same limit of 32 microbatches in flight; also BFW, which the paper's
table does not have. In the runtime all durations are scaled so that a task takes 4 ms
on average. Simulated also with images that vary less, CV 0.3 instead of 0.68: a
backward whenever one is ready costs the more, the more the vision ranks' forwards vary.
"""

import dataclasses
from typing import Any

import jax

RANKS, BATCH, VARIANT = 8, 192, "qwen3_1_7b_vit_h"
jax.config.update("jax_num_cpu_devices", RANKS)  # before the first use

import suite
from emulation import Field
from matplotlib import figure
from suite import Ran

from rrfp_jax import workload_files
from rrfp_jax.workloads.stage_times import Workload

TASK_S = 0.004
PUBLISHED = {"bf": 0.0, "fb": 0.0045, "b_priority": 0.0084, "f_priority": 0.0492}
HINTS = (*PUBLISHED, "bfw")
ALIKE = ("bf", "fb", "b_priority")
CALM, CALM_CV = "simulated, images CV 0.3", 0.3
PLACES = ("simulated", "emulated", CALM)


def slower(runs: dict[str, list[Ran]], hint: str) -> float:
    """Returns how much slower than BF a hint is."""
    return 1 / suite.paired(runs["bf"], runs[hint]) - 1


def draw(found: dict[str, dict[str, list[Ran]]]) -> figure.Figure:
    """Returns the step times over BF's."""
    drawn = figure.Figure(figsize=(7, 3.5))
    axes = drawn.subplots()
    for k, (where, runs) in enumerate(found.items()):
        values = [100 * slower(runs, hint) for hint in HINTS]
        places = [i + 0.2 * k for i in range(len(HINTS))]
        axes.bar(places, values, 0.19, label=where)
    published = [100 * PUBLISHED[hint] for hint in PUBLISHED]
    places = [i + 0.6 for i in range(len(PUBLISHED))]
    axes.bar(places, published, 0.19, label="published", color="#999999")
    axes.set_xticks([i + 0.3 for i in range(len(HINTS))], HINTS)
    axes.set_ylabel("step time over BF's, %")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend()
    return drawn


def main() -> None:
    """Measures and publishes."""
    flags = suite.arguments(__doc__, 5).parse_args()
    config = workload_files.read(suite.CONFIGS / workload_files.WORKLOADS, VARIANT)
    true = Workload(config)
    varies = dataclasses.replace(config.variation, image_cv=CALM_CV)
    calm = Workload(dataclasses.replace(config, variation=varies))
    scaled = dataclasses.replace(true, scale=TASK_S / true.times(RANKS).mean_s)
    field, graph = Field(scaled, RANKS, BATCH), suite.chain(RANKS, BATCH)
    contenders = {hint: suite.readiness(hint) for hint in HINTS}
    found: dict[str, dict[str, list[Ran]]] = {
        where: {hint: [] for hint in HINTS} for where in PLACES
    }
    jobs = [(seed, hint) for seed in range(flags.seeds) for hint in HINTS]
    for seed, hint in suite.steps(jobs, "hints"):
        contender = contenders[hint]
        found["simulated"][hint].append(suite.simulate(true, contender, graph, seed))
        found["emulated"][hint].append(field.run(contender, seed))
        found[CALM][hint].append(suite.simulate(calm, contender, graph, seed))
    rows: list[dict[str, Any]] = [
        suite.row(hint, contenders[hint], each, where=where)
        | {
            "over BF": round(slower(runs, hint), 4),
            "published over BF": PUBLISHED.get(hint, ""),
        }
        for where, runs in found.items()
        for hint, each in runs.items()
    ]
    print(suite.table(rows))
    figures: dict[str, float] = {}
    parts = []
    for where, runs in found.items():
        over = {hint: slower(runs, hint) for hint in HINTS}
        figures |= {f"{where}, {hint} over bf": value for hint, value in over.items()}
        times_s = [suite.mean_s(runs[hint]) for hint in ALIKE]
        figures[f"{where}, spread of {'/'.join(ALIKE)}"] = (
            max(times_s) / min(times_s) - 1
        )
        listed = ", ".join(f"{hint} {over[hint]:+.1%}" for hint in HINTS[1:])
        parts.append(f"{where}, over BF: {listed}")
    about = suite.Figure(
        "hints",
        "Table 7, hints",
        "python scripts/bench/hints.py",
        f"`configs/bench/workloads.py:{VARIANT}`",
        flags.seeds,
        "; ".join(parts) + " (published +0.5 %, +0.8 %, +4.9 %)",
    )
    suite.publish(flags, about, rows, draw(found), figures)


if __name__ == "__main__":
    main()
