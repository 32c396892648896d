"""Compares policies in virtual time.

    python -m rrfp_jax.simulate --config=configs/sim.py --workdir=runs/sim

Prints a table; writes `table.csv`, `timeline.png` and the resolved `config.json` to the
work directory. Every policy faces the same delays; each row also states its memory, as
the most microbatches in flight on a rank, without which no two policies compare.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from absl import flags, logging
from ml_collections import config_flags

from rrfp_jax import config_border
from rrfp_jax.core import orders, policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.observe import breakdown, timeline
from rrfp_jax.observe.breakdown import Run
from rrfp_jax.observe.progress import progress
from rrfp_jax.sim import report, simulator
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim_config import SimConfig

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="The settings, such as configs/sim.py.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", "runs/sim", "Where to write the results.")

_FAVOURITE = "BF"
_HINTS = {
    _FAVOURITE: "bf",
    "FB": "fb",
    "B-priority": "b_priority",
    "F-priority": "f_priority",
    "GPipe as hint": "gpipe",
    "1F1B as hint": "1f1b",
}
_BASELINES = ("1F1B, fixed", "GPipe, fixed")  # the first that exists is compared with

_LEGEND = """
Means over {} seed(s). Speed-up: over {}, paired by seed. Bubble and its causes:
shares of all ranks' time. In flight: the most microbatches on any rank. Bound:
makespan over that which no order can beat.
Wrote config.json, table.csv and timeline.png to {}."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One line of the table.

    Attributes:
      name: in the table.
      policy: how the ranks choose.
      blocking: whether transfers occupy both ranks.
    """

    name: str
    policy: Policy
    blocking: bool = False

    def run(self, graph: PipelineGraph, drawn: CostTable) -> Trace:
        """Simulates one step."""
        return simulator.simulate(graph, self.policy, drawn, self.blocking)


def contenders(config: SimConfig) -> list[Contender]:
    """Returns the policies to compare: hints, then baselines.

    A policy that does not exist for the placement is left out, with a warning.
    """
    pipeline = config.pipeline
    graph = pipeline.graph()
    limited = Policy(
        in_flight_limit=pipeline.in_flight_limit, launch_ahead=pipeline.launch_ahead
    )
    # Fixed orders bring their own depth: the limit is no business of theirs.
    unbounded = pipeline.num_microbatches * pipeline.num_stages
    fixed = dataclasses.replace(limited, order="fixed", in_flight_limit=unbounded)
    hinted = [
        Contender(name, dataclasses.replace(limited, hint=hint))
        for name, hint in _HINTS.items()
    ]
    baselines = {
        "GPipe, fixed": dataclasses.replace(fixed, hint="gpipe"),
        "1F1B, fixed": dataclasses.replace(fixed, hint="1f1b"),
        "deep 1F1B, fixed": dataclasses.replace(
            fixed, hint="deep_1f1b", warmup_factor=_depth_factor(graph, limited)
        ),
        "Varuna": dataclasses.replace(limited, hint="1f1b", order="opportunistic"),
    }
    ordered = [Contender(name, policy) for name, policy in baselines.items()]
    legal = [each for each in hinted + ordered if _exists(each, graph)]
    if not config.cost.blocking:
        return legal
    return legal + [
        Contender(f"{each.name}, blocking", each.policy, blocking=True)
        for each in legal
        if each in ordered
    ]


def _depth_factor(graph: PipelineGraph, limited: Policy) -> float:
    """Returns how much deeper than 1F1B an order of the limit's depth is."""
    try:
        found = policies.fixed_orders(graph, limited)
    except ConfigError:  # there is no 1F1B, and `_exists` will say so
        return 1.0
    shallow = max(orders.peak_in_flight(o, graph, r) for r, o in enumerate(found))
    most = min(limited.in_flight_limit, graph.num_microbatches)
    return max(1.0, most / shallow)


def _exists(contender: Contender, graph: PipelineGraph) -> bool:
    try:
        policies.dispatchers(graph, contender.policy)
    except ConfigError as error:
        reason = str(error).splitlines()[0]
        logging.warning("%s is left out: %s", contender.name, reason)
        return False
    return True


def compare(
    config: SimConfig, chosen: Sequence[Contender]
) -> tuple[list[Run], dict[str, Trace]]:
    """Runs every contender with every seed.

    Returns:
      The figures of all runs, and the traces of the first seed by name.
    """
    graph = config.pipeline.graph()
    runs: list[Run] = []
    traces: dict[str, Trace] = {}
    total = len(config.seeds) * len(chosen)
    with progress(total, "simulate", "run") as bar:
        for seed in config.seeds:
            drawn = config.draw(seed)
            bound_s = report.lower_bound_s(graph, drawn)
            for contender in chosen:
                trace = contender.run(graph, drawn)
                figures = report.report(trace, contender.blocking)
                runs.append(Run(contender.name, seed, figures, bound_s))
                traces.setdefault(contender.name, trace)
                bar.advance()
    return runs, traces


def main() -> None:
    """Simulates what the flags say."""
    config = config_border.from_config_dict(SimConfig, _CONFIG.value)
    chosen = contenders(config)
    names = [contender.name for contender in chosen]
    baseline = next(name for name in _BASELINES if name in names)
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    resolved = json.dumps(dataclasses.asdict(config), indent=2)
    (workdir / "config.json").write_text(resolved + "\n")
    runs, traces = compare(config, chosen)
    (workdir / "table.csv").write_text(breakdown.to_csv(runs, baseline))
    shown = (_FAVOURITE, baseline)
    panels = [(name, traces[name]) for name in shown]
    timeline.draw(panels, workdir / "timeline.png")
    print(breakdown.table(runs, baseline))
    print(_LEGEND.format(len(config.seeds), baseline, workdir))


if __name__ == "__main__":
    config_border.run(main)
