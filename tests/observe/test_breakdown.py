"""Tables pair runs by seed and keep every cause of idling apart."""

import csv
import dataclasses
import io

from rrfp_jax.observe.breakdown import Run, table, to_csv
from rrfp_jax.sim.report import Bubble, Report


def run(policy, seed, makespan_s, bubble):
    busy_s = (2 * makespan_s - bubble.total_s,)  # two ranks, their work on the first
    figures = Report(makespan_s, (*busy_s, 0.0), (bubble, Bubble()), (4, 2), (0, 0))
    return Run(policy, seed, figures, lower_bound_s=1.0)


RUNS = [
    run("fast", 0, 1.0, Bubble(0.1, 0.2, 0.0, 0.1)),
    run("slow", 0, 2.0, Bubble(1.0, 0.0, 0.0, 0.0)),
    run("fast", 1, 2.0, Bubble(0.1, 0.2, 0.3, 0.0)),
    run("slow", 1, 3.0, Bubble(0.0, 0.0, 0.0, 3.0)),
]


def test_the_table_is_aligned_and_speedups_are_paired():
    assert table(RUNS, "slow").splitlines() == [
        "policy  makespan ms  speed-up    std  bubble  fill+drain  input  transfer   "
        "held  in flight  bound",
        "fast         1500.0     1.750  0.354   16.7%        3.3%   6.7%      5.0%   "
        "1.7%          4  1.500",
        "slow         2500.0     1.000  0.000   40.0%       10.0%   0.0%      0.0%  "
        "30.0%          4  2.500",
    ]


def test_residuals_have_a_column_where_any_run_knows_them():
    known = [
        dataclasses.replace(
            run, report=dataclasses.replace(run.report, peak_bytes=(2**20, peak))
        )
        for run, peak in zip(RUNS[::2], (3 * 2**29, 2**30), strict=True)
    ]
    lines = table(known + RUNS[1::2], "slow").splitlines()
    assert [line[-27:] for line in lines] == [
        "in flight  residuals  bound",
        "        4    1.5 GiB  1.500",
        "        4          -  2.500",
    ]
    rows = csv.DictReader(io.StringIO(to_csv(known + RUNS[1::2], "slow")))
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks == [str(3 * 2**29), str(2**30), "0", "0"]


def test_one_seed_has_no_deviation():
    assert " 2.000    -  " in table(RUNS[:2], "slow")


def test_the_csv_has_a_line_a_run():
    rows = list(csv.DictReader(io.StringIO(to_csv(RUNS, "slow"))))
    assert [(r["policy"], r["seed"], r["speedup"]) for r in rows] == [
        ("fast", "0", "2.0"),
        ("slow", "0", "1.0"),
        ("fast", "1", "1.5"),
        ("slow", "1", "1.0"),
    ]
    assert rows[2]["transfer_s"] == "0.3"
    assert rows[2]["peak_in_flight"] == "4"
