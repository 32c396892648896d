"""Ours against other pipeline systems, on the same durations, in turn.

    python scripts/compare_peers.py [--quick] [--peers=a,b] [--ranks 4 8]
        [--links=auto] [--json FILE] [--out=docs/bench]

Each system builds a model of the same size and occupies a rank for as long as one table
says for (kind, stage, microbatch); what differs is the order, and what it costs to run
it. The tables are draws of the workloads in `configs/bench/emulated_language.py` and
`emulated_multimodal.py`, on 4 and 8 ranks that each hold what a rank holds there, under
jitter J1 and J3 of the paper. Systems run in turn, A B A B; every step has its twins of
the same seed, and ratios are of twins. The first step of a schedule is dropped.

With `--links=workload` every rank is a host of its own, in a network namespace, behind
links on which a payload takes what it takes in the workload; this needs root. With
`none` payloads take what they take on this machine, next to nothing. `auto` takes the
first where it can. SpectraX has all ranks in one process, so that its payloads cross no
link: it takes part without links only.

Ours runs with one process a rank, like the peers that can, and at most 32 microbatches
in flight on a rank; its own fixed 1F1B runs beside as a control, and BF and BFW on a V.
`third_party/README.md` says how to install the peers, and what is measured how. All of
it takes about 20 minutes on two cores.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tqdm

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from rrfp_jax.errors import ConfigError
from scripts.bench import suite
from scripts.peers import drawing, figures, network, registry, running, settings
from scripts.peers.figures import Line
from scripts.peers.registry import System
from scripts.peers.running import Result
from scripts.peers.settings import Setting
from third_party.peer_job import Job


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      systems: in turn.
      settings: all of them.
      num_microbatches: of a step.
      repeats: how often each has its turn.
      seeds: steps of each setting in a turn.
      has_links: whether ranks are hosts behind links as slow as the workload's.
    """

    systems: Sequence[System]
    settings: Sequence[Setting]
    num_microbatches: int
    repeats: int
    seeds: int
    has_links: bool


@dataclasses.dataclass(frozen=True)
class Turn:
    """What every system does before the next turn begins.

    Attributes:
      job: which schedules it runs, its system says.
      link_bytes_per_s: that each rank can send; 0 for what this machine can.
    """

    job: Job
    link_bytes_per_s: float


def measure(systems: Sequence[System], turns: Sequence[Turn]) -> list[Result]:
    """Runs all systems on each turn, which is the same for all of them."""
    both = [(system, turn) for turn in turns for system in systems]
    results = []
    for system, turn in (bar := tqdm.tqdm(both, "turns", leave=False, disable=None)):
        bar.set_postfix_str(f"{system.name}, {turn.job.num_ranks} ranks")
        job = dataclasses.replace(turn.job, schedules=system.schedules)
        results += running.run(system, job, turn.link_bytes_per_s)
    return results


def turns(plan: Plan) -> list[Turn]:
    """Returns the turns: settings with the same ranks, and links, share one."""
    alike: dict[tuple[int, float], list[Setting]] = {}
    for each in plan.settings:
        rate = each.link_bytes_per_s if plan.has_links else 0.0
        alike.setdefault((each.num_ranks, rate), []).append(each)
    found = []
    for repeat in range(plan.repeats):
        seeds = range(repeat * plan.seeds, (repeat + 1) * plan.seeds)
        for (_, rate), same in sorted(alike.items(), key=lambda item: item[0]):
            job = settings.job(same, plan.num_microbatches, seeds)
            found.append(Turn(job, rate))
    return found


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one setting, one turn")
    parser.add_argument("--peers", default=",".join(registry.PEERS), help="by comma")
    parser.add_argument(
        "--peer_venvs", type=pathlib.Path, help="a folder with an environment for each"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=settings.RANKS, help="of the pipelines"
    )
    parser.add_argument(
        "--links",
        choices=("auto", "workload", "none"),
        default="auto",
        help="between ranks: as slow as the workload's, or what this machine has",
    )
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2, help="of a setting in a turn")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="for a CSV and a PNG")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Measures, prints and publishes."""
    flags = parse(words)
    peers = [registry.peer(n, flags.peer_venvs) for n in flags.peers.split(",") if n]
    has_links = flags.links == "workload"
    if flags.links == "auto":
        has_links = network.is_possible()
        print(f"links between ranks: {'workload' if has_links else 'none'}")
    if has_links:
        network.check()
        peers = [each for each in peers if not each.is_one_process]
    plan = Plan(
        systems=[registry.ours(), *peers],
        settings=settings.QUICK if flags.quick else settings.on(flags.ranks),
        num_microbatches=flags.microbatches,
        repeats=1 if flags.quick else flags.repeats,
        seeds=flags.seeds,
        has_links=has_links,
    )
    given = turns(plan)
    results = measure(plan.systems, given)
    found = figures.lines(results, plan.settings)
    bounds_s = {
        (each.setting, each.seed): settings.bound_s(each.seconds)
        for turn in given
        for each in turn.job.iterations
    }
    summary = figures.summary(found, plan.settings, results, bounds_s)
    print(figures.table(found))
    for name, each in summary["settings"].items():
        print(
            f"{name}: {each['fastest_peer']} takes {each['over_bf']:.3f} times as "
            f"long as BF, {each['over_bfw']:.3f} as BFW, {each['over_bound']:.3f} as "
            "what no order of one stage a rank can beat"
        )
    for name, reason in summary["not_counted"].items():
        print(f"not counted: {name}: {reason}")
    for name in ("best_setting_bf", "geomean_bf", "geomean_bfw", "min_bf"):
        if summary[name] is not None:
            print(f"{name}: {summary[name]:.3f}")
    if flags.json:
        flags.json.write_text(json.dumps(summary, indent=2) + "\n")
    if flags.out:
        publish(flags.out, plan, found, summary)


def publish(
    folder: pathlib.Path, plan: Plan, found: Sequence[Line], summary: Mapping[str, Any]
) -> None:
    """Writes the CSV and the picture, and for docs/bench their row."""
    name = "peers" if plan.has_links else "peers_local"
    drawing.publish(found, folder, name)
    links = "workload" if plan.has_links else "none"
    where = "links of the workload" if plan.has_links else "no links to wait for"
    result = (
        f"over the faster of {', '.join(summary['peers_run'])} with the best of its "
        f"schedules, {where}: BF {summary['geomean_bf']:.2f}, BFW "
        f"{summary['geomean_bfw']:.2f} (geometric means of {len(plan.settings)} "
        f"settings), BF at the least {summary['min_bf']:.2f}, at the most in a "
        f"multimodal one {summary['best_setting_bf']:.2f}"
    )
    about = suite.Figure(
        name,
        "Tables 4 and 5, peers" + ("" if plan.has_links else ", no links"),
        f"python scripts/compare_peers.py --links={links}",
        "`configs/bench/emulated_{language,multimodal}.py`",
        plan.repeats * plan.seeds,
        result,
    )
    suite.record(folder, about)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
