"""What it costs that the processes of a pipeline rank agree on what it launches.

    python scripts/bench/agreement.py [--json FILE]

4 ranks of 2 processes each (tensor-parallel ways, with a real collective in each task),
32 microbatches, emulated tasks of 20/40 ms, hint BF. Of each rank one process sees the
even microbatches 10 ms later, the other one the odd ones. Runs of the intersection
(ours), of the paper's per-task scheme and of no agreement at all, in turn.

*Lost* is the time in which a rank's device did nothing although some task was ready at
all members: it was only the agreement that was missing, until the member learned of it.
For each rank the larger of its members' counts, as a part of the makespan; the table
has the mean of the ranks, which is the figure, the worst of them, and the mean if one
counts until the task began: what the host takes to launch it, with or without anybody
to agree with, on cores that all these processes share. Without agreement, the members'
sequences are to differ, and that is to be found.

And how busy a process is that only waits for another, with tasks of 1 s.
"""

import argparse
import collections
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import emulated_runs
import tqdm

NUM_RANKS, MODEL, NUM_MICROBATCHES = 4, 2, 32
TIMES = {"forward_ms": 20, "backward_ms": 40, "transfer_ms": 1, "late_ms": 10}
BASE = {"hint": "bf", "in_flight_limit": NUM_MICROBATCHES, **TIMES}
KINDS = ("intersection", "per_task")
NUM_ROUNDS, STEPS_A_ROUND = 3, 2


def lost_s(run: Sequence[dict[str, Any]], until_begun: bool = False) -> list[float]:
    """Returns, by rank, the time lost to agreement: the most of any member.

    Args:
      run: what each process saw.
      until_begun: whether to count until a task began, not until that was agreed.
    """
    members: dict[int, list[list[Any]]] = collections.defaultdict(list)
    for seen in run:
        by_rank: dict[int, list[Any]] = collections.defaultdict(list)
        for name, rank, start_s, end_s, ready_s, decided_s in seen["launches"]:
            until_s = start_s if until_begun else min(start_s, decided_s)
            by_rank[rank].append((name, until_s, end_s, ready_s))
        for rank, launches in by_rank.items():
            members[rank].append(launches)
    found = []
    for _, each in sorted(members.items()):
        ready_s: dict[str, float] = {}  # at all members
        for launches in each:
            for name, _, _, at_s in launches:
                ready_s[name] = max(at_s, ready_s.get(name, at_s))
        found.append(max(_lost(launches, ready_s) for launches in each))
    return found


def _lost(launches: Sequence[Any], ready_s: dict[str, float]) -> float:
    free_s, lost = 0.0, 0.0
    for i, (_, until_s, end_s, _) in enumerate(launches):
        # With as many in flight as there are, nothing holds a ready task back.
        first_s = min(ready_s[name] for name, *_ in launches[i:])
        lost += max(0.0, until_s - max(free_s, first_s))
        free_s = end_s
    return lost


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    job = {"num_ranks": NUM_RANKS, "model": MODEL, "payload_bytes": 4096}
    wanted = [BASE | {"agreement": kind} for kind in KINDS] * STEPS_A_ROUND
    parts: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    makespans: dict[str, list[float]] = {kind: [] for kind in KINDS}
    until_begun: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in tqdm.tqdm(range(NUM_ROUNDS), "rounds", leave=False):
        runs = emulated_runs.run(
            NUM_RANKS * MODEL, num_microbatches=NUM_MICROBATCHES, runs=wanted, **job
        )
        for each, run in zip(wanted, runs, strict=True):
            kind = str(each["agreement"])
            makespan_s = emulated_runs.makespan_s(run)
            makespans[kind].append(makespan_s)
            parts[kind].append([lost / makespan_s for lost in lost_s(run)])
            begun = statistics.mean(lost_s(run, until_begun=True))
            until_begun[kind].append(begun / makespan_s)
    print(
        f"{'agreement':>13} {'makespan s':>11} {'lost, mean':>11} {'worst rank':>11} "
        f"{'until begun':>12}"
    )
    means, worst = {}, {}
    for kind in KINDS:
        means[kind] = statistics.median(map(statistics.mean, parts[kind]))
        worst[kind] = statistics.median(map(max, parts[kind]))
        print(
            f"{kind:>13} {statistics.median(makespans[kind]):>11.4f} "
            f"{means[kind]:>11.3%} {worst[kind]:>11.3%} "
            f"{statistics.median(until_begun[kind]):>12.3%}"
        )
    over = means["intersection"] / means["per_task"]
    print(f"intersection / per_task: {over:.2f}")
    apart = emulated_runs.run(
        NUM_RANKS * MODEL,
        num_microbatches=NUM_MICROBATCHES,
        runs=[BASE | {"agreement": "off"}],
        **job,
    )[0]
    errors = {seen.get("error", "not detected").split("\n")[0] for seen in apart}
    print("without agreement:", *errors)
    idle = emulated_runs.run(
        NUM_RANKS * MODEL,
        num_microbatches=1,
        runs=[BASE | {"forward_ms": 1000, "backward_ms": 1000}],
        **job,
    )[0]
    busy = max(seen["cpu_s"] / (seen["end_s"] - seen["start_s"]) for seen in idle)
    print(f"CPU of a process that waits: at most {busy:.1%} of a core")
    if arguments.json:
        figures = {"fraction_of_makespan": means["intersection"], "over_per_task": over}
        figures |= {"worst_rank": worst["intersection"], "idle_cpu": busy}
        arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
