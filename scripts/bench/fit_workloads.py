"""Fits the machine of `configs/bench/workloads.py` to the baselines' published times.

    python scripts/bench/fit_workloads.py [--published=docs/paper_tables.csv]
        [--seeds=2] [--steps=300]

Least squares on the logarithms of the 1F1B and ZB columns of RRFP's Tables 1 and 2, 20
rows each, simulated with transfers that block both ranks. The columns of RRFP and of
other systems are not read. So that what is lost to waiting is not taken for compute,
1F1B's compute in the paper's breakdown (RRFP §8: Qwen3-4B + ViT-Big, PP16, batch 32,
TP1, 2, 4) counts four times each. What is fitted: nine numbers that all rows share. The
CV of compute is not: RRFP §2 has (p95 - p5) / p50 of up to 0.73, which for a lognormal
is a CV of 0.22. Prints the values to be written into the config, and every row.

    python scripts/bench/fit_workloads.py --emulated

instead finds the `transfer_factor` of the two emulated configs: with it, the published
row that each stands for takes, under blocking 1F1B, what it took in the paper.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np
import tqdm
from scipy import optimize

from rrfp_jax import workload_files, workloads
from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement
from rrfp_jax.core.policies import Policy
from rrfp_jax.sim import simulator
from rrfp_jax.workloads.config import Row, WorkloadConfig
from rrfp_jax.workloads.stage_times import Workload

CONFIG = pathlib.Path(workloads.__file__).parents[2] / "configs/bench/workloads.py"
MACHINE = ("tflops", "layer_ms", "tensor_gb_per_s", "link_gb_per_s", "link_ms")
VARIATION = ("transfer_cv", "image_cv")
MODEL = ("tokens", "images")  # of the multimodal workloads
COLUMNS = {"f1b_s": "1f1b", "zb_s": "zb_h1"}
EMULATED = {"language": Row(1, 1, 16, 1, 64), "multimodal": Row(2, 1, 32, 1, 64)}
COMPUTE_S = {1: 0.859, 2: 0.946, 4: 0.938}  # of a rank, by tensor-parallel ways
COMPUTED, COMPUTE_ROW, COMPUTE_WEIGHT = "Qwen3-4B+ViT-Big", (16, 32), 2.0
LAUNCH_AHEAD = 1
Published = dict[tuple[str, int, int, int], dict[str, float]]


def read(path: pathlib.Path) -> Published:
    """Returns the baselines' columns by (workload, tensor, ranks, replicas)."""
    with path.open() as file:
        return {
            (row["workload"], int(row["tp"]), int(row["pp"]), int(row["dp"])): {
                column: float(row[column]) for column in COLUMNS
            }
            for row in csv.DictReader(file)
        }


def changed(config: WorkloadConfig, values: dict[str, float]) -> WorkloadConfig:
    """Returns the config with other values of what is fitted."""
    machine = {name: values[name] for name in MACHINE}
    varies = {name: values[name] for name in VARIATION}
    model = {name: values[name] for name in MODEL} if config.model.vision else {}
    if model:
        model["tokens"] = round(model["tokens"])
    return dataclasses.replace(
        config,
        machine=dataclasses.replace(config.machine, **machine),
        variation=dataclasses.replace(config.variation, **varies),
        model=dataclasses.replace(config.model, **model),
    )


def simulated_s(config: WorkloadConfig, row: Row, hint: str, seeds: int) -> float:
    """Returns the mean step time of a fixed order with blocking transfers."""
    graph = graphs.chain(row.num_microbatches, placement.one_each(row.ranks))
    drawn = Workload(config, row.tensor)
    policy = Policy(hint, "fixed", in_flight_limit=row.batch, launch_ahead=LAUNCH_AHEAD)
    steps = [
        max(
            simulator.simulate(
                graph, policy, drawn.draw(graph, seed * row.replicas + k), True
            ).makespan_s
            for k in range(row.replicas)
        )
        for seed in range(seeds)
    ]
    return sum(steps) / seeds


def compute_errors(loaded: Sequence[WorkloadConfig]) -> list[float]:
    """Returns how far a rank's compute is from the breakdown's, weighted."""
    config = next(each for each in loaded if each.name == COMPUTED)
    ranks, num_microbatches = COMPUTE_ROW
    found = []
    for tensor, published_s in COMPUTE_S.items():
        mean_s = 3 * Workload(config, tensor).times(ranks).mean_s * num_microbatches
        found.append(COMPUTE_WEIGHT * math.log(mean_s / published_s))
    return found


def transfer_factor(kind: str, row: Row, published: Published) -> float:
    """Returns the factor at which blocking 1F1B takes the published time of a row."""
    path = CONFIG.with_name(f"emulated_{kind}.py")
    config, _ = workload_files.emulated(path)
    whole = workload_files.read(CONFIG, config.workload)
    goal_s = published[whole.name, row.tensor, row.ranks, row.replicas]["f1b_s"]

    def excess_s(log: float) -> float:
        factor = math.exp(log)
        tried = dataclasses.replace(config, layer_fraction=1.0, transfer_factor=factor)
        return simulated_s(tried.applied_to(whole), row, "1f1b", 5) - goal_s

    return math.exp(optimize.bisect(excess_s, math.log(0.2), math.log(8), xtol=1e-3))


def main() -> None:
    """Fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = pathlib.Path("docs/paper_tables.csv")
    parser.add_argument("--published", type=pathlib.Path, default=default)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--emulated", action="store_true")
    arguments = parser.parse_args()
    published = read(arguments.published)
    if arguments.emulated:
        for kind, row in EMULATED.items():
            print(f"{kind} {transfer_factor(kind, row, published):.2f}")
        return
    loaded = workload_files.read_all(CONFIG)
    names = [*MACHINE, *VARIATION, *MODEL]
    given = loaded[-1]
    start = {n: getattr(given.machine, n) for n in MACHINE}
    start |= {n: getattr(given.variation, n) for n in VARIATION}
    start |= {n: float(getattr(given.model, n)) for n in MODEL}
    bar = tqdm.tqdm(total=arguments.steps)

    def errors(logs: Sequence[float]) -> list[tuple[WorkloadConfig, Row, str, float]]:
        values = dict(zip(names, map(math.exp, logs), strict=True))
        found = []
        for each in loaded:
            config = changed(each, values)
            for row in config.runs:
                key = (config.name, row.tensor, row.ranks, row.replicas)
                for column, hint in COLUMNS.items():
                    ours_s = simulated_s(config, row, hint, arguments.seeds)
                    error = math.log(ours_s / published[key][column])
                    found.append((config, row, hint, error))
        return found

    def loss(logs: Sequence[float]) -> float:
        total = sum(error**2 for *_, error in errors(logs))
        rms = math.sqrt(total / (2 * len(published)))
        values = dict(zip(names, map(math.exp, logs), strict=True))
        compute = compute_errors([changed(each, values) for each in loaded])
        total += sum(error**2 for error in compute)
        bar.update()
        now = dict(zip(names, np.exp(logs).round(3).tolist(), strict=True))
        bar.set_postfix_str(f"rms {rms:.3f}, all {total:.3f} {now}")
        return total

    logs = [math.log(start[name]) for name in names]
    best = optimize.minimize(
        loss,
        logs,
        method="Nelder-Mead",
        options={
            "maxfev": arguments.steps,
            "initial_simplex": [
                logs,
                *(
                    [x + 0.35 * (i == k) for i, x in enumerate(logs)]
                    for k in range(len(logs))
                ),
            ],
        },
    )
    bar.close()
    for name, log in zip(names, best.x, strict=True):
        print(f"{name:>16} {math.exp(log):.4g}")
    for config, row, hint, error in errors(best.x):
        where = f"TP{row.tensor} PP{row.ranks} DP{row.replicas}"
        print(f"{config.name:>20} {where:>14} {hint:>6} {math.exp(error):.3f}")
    print(f"sum of squares: {best.fun:.3f}")


if __name__ == "__main__":
    main()
