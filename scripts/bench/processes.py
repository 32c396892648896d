"""Ranks in processes of their own against ranks in one process, emulated.

    python scripts/bench/processes.py [--json FILE]

8 ranks, 32 microbatches, 20/40 ms tasks, messages of 64 KiB and transfers of 1 ms, hint
BF. Both run the real runtime: in one process payloads are copied from device to device,
in eight they go through the host and over the mail, encrypted. Makespans in turn, A B A
B; the ratio is of the medians. And how busy a process is that only waits.
"""

import argparse
import json
import pathlib
import statistics

import emulated_runs
import tqdm

NUM_RANKS, NUM_MICROBATCHES = 8, 32
PAYLOAD_BYTES = 64 << 10
RUN = {
    "hint": "bf",
    "in_flight_limit": NUM_MICROBATCHES,
    "forward_ms": 20,
    "backward_ms": 40,
    "transfer_ms": 1,
}
NUM_ROUNDS, STEPS_A_ROUND = 3, 3


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    times: dict[int, list[float]] = {1: [], NUM_RANKS: []}
    cpu: dict[int, list[float]] = {1: [], NUM_RANKS: []}
    with tqdm.tqdm(total=2 * NUM_ROUNDS, desc="rounds", leave=False) as bar:
        for _ in range(NUM_ROUNDS):
            for count in times:
                runs = emulated_runs.run(
                    count,
                    num_ranks=NUM_RANKS,
                    model=1,
                    num_microbatches=NUM_MICROBATCHES,
                    payload_bytes=PAYLOAD_BYTES,
                    runs=[RUN] * STEPS_A_ROUND,
                )
                times[count] += map(emulated_runs.makespan_s, runs)
                cpu[count] += [
                    seen["cpu_s"] / (seen["end_s"] - seen["start_s"])
                    for run in runs
                    for seen in run
                ]
                bar.update()
    print(f"{'processes':>9} {'makespan s (median, range)':>30} {'CPU of each':>12}")
    for count, each in times.items():
        spread = f"{min(each):.4f} .. {max(each):.4f}"
        print(
            f"{count:>9} {statistics.median(each):>9.4f} {spread:>20} "
            f"{statistics.median(cpu[count]):>12.1%}"
        )
    ratio = statistics.median(times[NUM_RANKS]) / statistics.median(times[1])
    print(f"{NUM_RANKS} processes / one: {ratio:.4f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"ratio_to_one_process": ratio}))


if __name__ == "__main__":
    main()
