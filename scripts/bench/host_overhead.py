"""Host time of the runtime against a plain loop over the same executables.

    python scripts/bench/host_overhead.py [--json FILE]

4 ranks x 64 microbatches of tiny programs, without emulation: all that is measured is
the host. The plain loop makes the same calls (executables and `device_put`s) for one
microbatch after another, knows the order beforehand and waits only at the end. Both
run in turn; the medians are compared.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

NUM_RANKS, NUM_MICROBATCHES, NUM_REPEATS = 4, 64, 15
jax.config.update("jax_num_cpu_devices", NUM_RANKS)  # before the first use

import toy
from plain_loop import PlainLoop


def seconds(call: Callable[[], Any]) -> float:
    """Times one call."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    pipeline, params, microbatches = toy.make_pipeline(NUM_RANKS, NUM_MICROBATCHES)
    plain_loop = PlainLoop(pipeline, params, microbatches)
    runs: dict[str, list[float]] = {"plain loop": [], "rrfp_jax": []}
    for repeat in range(NUM_REPEATS + 2):
        loop_s = seconds(plain_loop)
        ours_s = seconds(lambda: pipeline.run(params, microbatches))
        if repeat >= 2:  # the first two compile and warm up
            runs["plain loop"].append(loop_s)
            runs["rrfp_jax"].append(ours_s)
    num_tasks = 2 * NUM_RANKS * NUM_MICROBATCHES
    print(f"{'':>12} {'ms a step':>10} {'us a task':>10}")
    for name, times in runs.items():
        median_s = statistics.median(times)
        print(f"{name:>12} {median_s * 1e3:10.1f} {median_s / num_tasks * 1e6:10.0f}")
    pairs = zip(runs["rrfp_jax"], runs["plain loop"], strict=True)
    figures = {
        "ratio_to_plain_loop": statistics.median(a / b for a, b in pairs),
        "host_us_per_task": statistics.median(runs["rrfp_jax"]) / num_tasks * 1e6,
    }
    print(f"ratio, median of {NUM_REPEATS} pairs: {figures['ratio_to_plain_loop']:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
