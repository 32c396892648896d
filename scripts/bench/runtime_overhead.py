"""What the runtime adds to the makespan that its decisions deserve.

    python scripts/bench/runtime_overhead.py [--repeats=5] [--json FILE]
        [--out=docs/bench]

The real runtime on 16 emulated ranks, 64 microbatches, F = 5 ms, B = 10 ms (BFW: 5 ms
each of B and W), transfers of 1 ms, in one process and one thread. Overhead: the
makespan, until the host knows of the last finish, over the simulator's on the same
durations, less one. Also the host's CPU time for a task. Where it goes:

    py-spy record --format raw -o stacks.txt -- python scripts/bench/runtime_overhead.py
"""

import statistics
import time
from typing import Any

import jax

RANKS, MICROBATCHES = 16, 64
jax.config.update("jax_num_cpu_devices", RANKS)  # before the first use

import suite
import toy
from matplotlib import figure

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.sim import costs
from rrfp_jax.sim.costs import CostTable

HINTS = ("bf", "bfw")


def constant(graph: PipelineGraph) -> CostTable:
    """Returns 5 ms of F and 10 of the whole backward, transfers of 1 ms."""
    return costs.constant(graph, 5e-3, 5e-3, 1e-3, weight_s=5e-3)


def measure(hint: str, both: toy.Both) -> dict[str, Any]:
    """Runs a step; returns its makespans and its CPU time."""
    contender = suite.readiness(hint)
    began_s = time.process_time()
    ran = both.real(contender.policy, constant)
    cpu_s = time.process_time() - began_s
    simulated_s = both.simulated_s(contender.policy, constant, False, ran)
    return {
        "contender": hint,
        "emulated_s": round(ran.log[-1].time_s, 4),
        "simulated_s": round(simulated_s, 4),
        "overhead": round(ran.log[-1].time_s / simulated_s - 1, 4),
        "cpu_us_a_task": round(1e6 * cpu_s / len(ran.spans), 1),
        "busy_share": round(cpu_s / ran.log[-1].time_s, 3),
    }


def draw(rows: list[dict[str, Any]]) -> figure.Figure:
    """Returns the overhead of every run."""
    drawn = figure.Figure(figsize=(5, 3))
    axes = drawn.subplots()
    for hint in HINTS:
        values = [100 * row["overhead"] for row in rows if row["contender"] == hint]
        axes.plot(values, "o-", label=hint)
    axes.axhline(6, color="black", linewidth=0.8, label="bar")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("emulated over simulated makespan, %")
    axes.set_xlabel("run")
    axes.legend()
    return drawn


def main() -> None:
    """Measures and publishes."""
    parser = suite.arguments(__doc__, 1)
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    both = toy.Both(RANKS, MICROBATCHES)
    for hint in HINTS:
        both.compile(suite.readiness(hint).policy)
    jobs = [hint for _ in range(flags.repeats) for hint in HINTS]
    rows = [measure(hint, both) for hint in suite.steps(jobs, "overhead")]
    print(suite.table(rows))
    overheads, cpu = (
        {
            hint: statistics.median(r[what] for r in rows if r["contender"] == hint)
            for hint in HINTS
        }
        for what in ("overhead", "cpu_us_a_task")
    )
    result = ", ".join(
        f"{hint} {overheads[hint]:.1%} ({cpu[hint]:.0f} us of CPU a task)"
        for hint in HINTS
    )
    about = suite.Figure(
        "runtime_overhead",
        "Overhead of the runtime, 16 ranks, 5/10 ms",
        "python scripts/bench/runtime_overhead.py",
        "constants, in the script",
        flags.seeds,
        f"median of {flags.repeats}: {result}",
    )
    figures = {f"overhead_{hint}": value for hint, value in overheads.items()}
    figures |= {f"cpu_us_a_task_{hint}": value for hint, value in cpu.items()}
    suite.publish(flags, about, rows, draw(rows), figures)


if __name__ == "__main__":
    main()
