"""Compares policies in virtual time.

    python -m rrfp_jax.simulate --config=configs/sim.py --workdir=runs/sim

Prints a table; writes `table.csv`, `timeline.png`, `timeline.html` (the same runs, to
look into) and the resolved `config.json` to the work directory. Every policy faces the
same delays; each row also states its memory, as the most microbatches in flight on a
rank, without which no two policies compare.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence

from absl import flags, logging
from ml_collections import config_flags

from rrfp_jax import config_border
from rrfp_jax.core import memory, orders, policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.observe import breakdown, html_timeline, timeline
from rrfp_jax.observe.breakdown import Run
from rrfp_jax.observe.progress import progress
from rrfp_jax.sim import report, simulator
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim_config import SimConfig

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="The settings, such as configs/sim.py.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", "runs/sim", "Where to write the results.")

_HINTS = {
    "BF": "bf",
    "FB": "fb",
    "B-priority": "b_priority",
    "F-priority": "f_priority",
    "BFW": "bfw",
    "BFW memory": "bfw_memory",
    "GPipe as hint": "gpipe",
    "1F1B as hint": "1f1b",
    "ZB-H1 as hint": "zb_h1",
    "ZB-V as hint": "zb_v",
}
_FIXED = {
    "GPipe, fixed": "gpipe",
    "1F1B, fixed": "1f1b",
    "deep 1F1B, fixed": "deep_1f1b",
    "ZB-H1, fixed": "zb_h1",
    "ZB-H2, fixed": "zb_h2",
    "ZB-V, fixed": "zb_v",
    "V-Half, fixed": "v_half",
}
_BASELINE = "1F1B, fixed"
_PLAIN = "1F1B, one each"  # the baseline where ranks hold several stages
_FAVOURITES = ("BFW memory", "BF")  # shown in the picture: the better placed of them

_LEGEND = """
Means over {} seed(s). Speed-up: over {}, paired by seed. Bubble and its causes:
shares of all ranks' time. In flight: the most microbatches on any rank; memory: the
most residuals. Bound: makespan over that which no order can beat.
Wrote config.json, table.csv, timeline.png and timeline.html to {}."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One line of the table.

    Attributes:
      name: in the table.
      policy: how the ranks choose.
      config: what they run, and how long it takes.
      blocking: whether transfers occupy both ranks.
    """

    name: str
    policy: Policy
    config: SimConfig
    blocking: bool = False

    @functools.cached_property
    def graph(self) -> PipelineGraph:
        """The tasks of the step."""
        return self.policy.applied_to(self.config.pipeline.graph())

    @functools.cached_property
    def residuals(self) -> Residuals:
        """What the tasks keep."""
        return self.config.residuals(self.graph)

    def run(self, drawn: CostTable) -> Trace:
        """Simulates one step."""
        return simulator.simulate(
            self.graph, self.policy, drawn, self.blocking, self.residuals
        )


def contenders(config: SimConfig) -> list[Contender]:
    """Returns the policies to compare: hints, then baselines.

    Orders that do not exist for the placement are left out, with a warning; but where
    ranks hold several stages, 1F1B runs on one stage a rank.

    Raises:
      ConfigError: a limit holds no microbatch, or a CSV is wrong.
    """
    limited = config.pipeline.policy
    # Fixed orders bring their own depth: the limits are no business of theirs.
    unbounded = config.pipeline.num_microbatches * config.pipeline.num_stages
    fixed = Policy(
        order="fixed", in_flight_limit=unbounded, launch_ahead=limited.launch_ahead
    )
    hinted = [
        Contender(name, dataclasses.replace(limited, hint=hint), config)
        for name, hint in _HINTS.items()
    ]
    deep = _depth_factor(config.pipeline.graph(), limited)
    ordered = [
        Contender(
            name, dataclasses.replace(fixed, hint=hint, warmup_factor=deep), config
        )
        for name, hint in _FIXED.items()
    ]
    varuna = dataclasses.replace(
        fixed,
        hint="1f1b",
        order="opportunistic",
        in_flight_limit=limited.in_flight_limit,
    )
    ordered.append(Contender("Varuna", varuna, config))
    if config.pipeline.num_chunks > 1:
        plain = config.on_one_stage_a_rank()
        policy = dataclasses.replace(fixed, hint="1f1b")
        ordered.append(Contender(_PLAIN, policy, plain))
    legal = _existing(hinted + ordered)
    for path in config.pipeline.order_csvs:
        for what, policy in (("as hint", limited), ("fixed", fixed)):
            policy = dataclasses.replace(policy, hint=path)
            legal.append(Contender(f"{pathlib.Path(path).stem} {what}", policy, config))
            policies.dispatchers(legal[-1].graph, policy, legal[-1].residuals)
    if not config.cost.blocking:
        return legal
    return legal + [
        dataclasses.replace(each, name=f"{each.name}, blocking", blocking=True)
        for each in legal
        if each in ordered
    ]


def _depth_factor(graph: PipelineGraph, limited: Policy) -> float:
    """Returns how much deeper than 1F1B an order of the limit's depth is."""
    try:
        found = policies.fixed_orders(graph, limited)
    except ConfigError:  # there is no 1F1B, and `_existing` will say so
        return 1.0
    shallow = max(orders.peak_in_flight(o, graph, r) for r, o in enumerate(found))
    most = min(limited.in_flight_limit, graph.num_microbatches)
    return max(1.0, most / shallow)


def _existing(chosen: Sequence[Contender]) -> list[Contender]:
    """Leaves out orders that their placement does not have."""
    found, missing = [], []
    for each in chosen:
        if each.policy.memory_limit_bytes:
            limit = each.policy.memory_limit_bytes
            memory.check_limit(each.graph, each.residuals, limit)
        try:
            policies.dispatchers(each.graph, each.policy, each.residuals)
        except ConfigError:
            missing.append(each.name)
        else:
            found.append(each)
    if missing:
        logging.warning(
            "left out, since they do not exist for this placement and number of "
            "microbatches: %s",
            "; ".join(missing),
        )
    return found


def compare(
    chosen: Sequence[Contender], seeds: Sequence[int]
) -> tuple[list[Run], dict[str, Trace]]:
    """Runs every contender with every seed.

    Returns:
      The figures of all runs, and the traces of the first seed by name.
    """
    runs: list[Run] = []
    traces: dict[str, Trace] = {}
    with progress(len(seeds) * len(chosen), "simulate", "run") as bar:
        for seed in seeds:
            # Few placements, and on each of them a whole backward and a split one.
            draws: dict[SimConfig, CostTable] = {}
            bounds: dict[PipelineGraph, float] = {}
            for contender in chosen:
                config, graph = contender.config, contender.graph
                if config not in draws:
                    draws[config] = config.draw(seed)
                drawn = draws[config]
                if graph not in bounds:
                    bounds[graph] = report.lower_bound_s(graph, drawn)
                bound_s = bounds[graph]
                trace = contender.run(drawn)
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
    baseline = next(n for n in (_PLAIN, _BASELINE, "GPipe, fixed") if n in names)
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    resolved = json.dumps(dataclasses.asdict(config), indent=2)
    (workdir / "config.json").write_text(resolved + "\n")
    runs, traces = compare(chosen, config.seeds)
    (workdir / "table.csv").write_text(breakdown.to_csv(runs, baseline))
    favourite = _FAVOURITES[config.pipeline.num_chunks == 1]
    panels = [(name, traces[name]) for name in (favourite, baseline)]
    limit = config.pipeline.policy.memory_limit_bytes
    timeline.draw(panels, workdir / "timeline.png", limit)
    html_timeline.draw(panels, workdir / "timeline.html", limit)
    print(breakdown.table(runs, baseline))
    print(_LEGEND.format(len(config.seeds), baseline, workdir))


if __name__ == "__main__":
    config_border.run(main)
