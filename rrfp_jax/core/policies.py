"""Names for hints and fixed orders, as configs give them, made into arbiters."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rrfp_jax.core import (
    agreement,
    arbiters,
    back_pressure,
    dispatcher,
    dry_run,
    hints,
    memory,
    order_csv,
    orders,
    zero_bubble,
)
from rrfp_jax.core.agreement import Group
from rrfp_jax.core.back_pressure import BackPressure, RankProgress
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.hints import Hint
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.orders import Order
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError, check_choice

# `bfw_memory`: weight gradients that may wait, as a part of the ranks. Found by search,
# scripts/bench/equal_memory.py; from 0.625 to 1 it hardly matters.
_URGENT = 0.75

# The hint of one rank of a pipeline with so many ranks.
_RULES: Mapping[str, Callable[[int], Hint]] = {
    "bf": lambda _: hints.Alternating(Kind.B),
    "fb": lambda _: hints.Alternating(Kind.F),
    "b_priority": lambda _: hints.Priority((Kind.W, Kind.B, Kind.F)),
    "f_priority": lambda _: hints.Priority((Kind.W, Kind.F, Kind.B)),
    "bfw": lambda _: hints.Alternating(Kind.B, None),
    "bfw_memory": lambda ranks: hints.Alternating(
        Kind.B, math.ceil(_URGENT * ranks), hints.late_first
    ),
}
RULES = tuple(_RULES)
ORDERS = (
    "gpipe",
    "1f1b",
    "deep_1f1b",
    "eager_1f1b",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
)
_SPLIT = ("bfw", "bfw_memory", "zb_h1", "zb_h2", "zb_v", "v_half")
_NOT_NEGATIVE = (
    "in_flight_taper",
    "weight_limit",
    "memory_limit_gb",
    "microbatch_group",
)
MODES = ("readiness", "fixed", "opportunistic")
PRESSURES = ("reserving", "one_by_one")
SPLITS = ("as_needed", "always")


@dataclasses.dataclass(frozen=True)
class Policy:
    """How the ranks of a pipeline choose among their tasks.

    Attributes:
      hint: one of RULES, one of ORDERS, or the path of a CSV with an order.
      order: `readiness` ranks by the hint whatever is ready. `fixed` waits for each
        next task of the order that the hint names, `1f1b` where the hint is a rule.
        `opportunistic` is Varuna's variant of that.
      in_flight_limit: microbatches in flight on a rank. Fixed orders bring their own
        depth, so for `fixed` it is only checked.
      in_flight_taper: by how much less it is on each next rank, but never below 1. What
        ranks near the loss admit, they have back sooner.
      weight_limit: weight gradients that may wait on a rank; 0 for any number.
      memory_limit_gb: residuals on each device, GiB; 0 for any number. For fixed orders
        it is only checked.
      back_pressure: which rule enforces `in_flight_limit`, see `core.back_pressure`.
      split: whether the backward is split `as_needed` by the hint, or `always`.
      deterministic: whether weight gradients are committed in microbatch order, which
        makes results bitwise independent of all else here. Splits the backward.
      warmup_factor: how much deeper than 1F1B `deep_1f1b` is.
      microbatch_group: of interleaved 1F1B, see `core.orders`; 0 for one a rank.
      launch_ahead: unfinished launches a rank may have.
      agreement: how the processes of a rank that spans several come to launch the same
        sequence, see `core.agreement`: by the `intersection` of what is ready at each;
        `per_task` as the paper, one at a time, whatever `launch_ahead`; or `off`, for
        tests.

    Raises:
      ConfigError: a value is not one of these, or out of range.
    """

    hint: str = "bf"
    order: str = "readiness"
    in_flight_limit: int = 32
    in_flight_taper: float = 0.0
    weight_limit: int = 0
    memory_limit_gb: float = 0.0
    back_pressure: str = "reserving"
    split: str = "as_needed"
    deterministic: bool = False
    warmup_factor: float = 2.0
    microbatch_group: int = 0
    launch_ahead: int = dispatcher.LAUNCH_AHEAD
    agreement: str = "intersection"

    def __post_init__(self) -> None:
        back_pressure.check_limit("in_flight_limit", self.in_flight_limit)
        dispatcher.check_launch_ahead(self.launch_ahead)
        if not self.hint.endswith(".csv"):
            known = (*RULES, *ORDERS, "or the path of a .csv")
            check_choice("pipeline.hint", self.hint, known)
        check_choice("pipeline.order", self.order, MODES)
        check_choice("pipeline.back_pressure", self.back_pressure, PRESSURES)
        check_choice("pipeline.split", self.split, SPLITS)
        check_choice("pipeline.agreement", self.agreement, agreement.NAMES)
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"pipeline.{name}={getattr(self, name)} is negative.\n"
                    f"  Set --config.pipeline.{name} above 0, or to 0 for none."
                )

    @property
    def is_split(self) -> bool:
        """Whether the backward is split into B and W."""
        if self.deterministic or self.split == "always" or self.hint in _SPLIT:
            return True
        return self.hint.endswith(".csv") and order_csv.is_split(self.order_text)

    @property
    def memory_limit_bytes(self) -> int:
        """The limit on residuals; 0 for none."""
        return round(self.memory_limit_gb * memory.GIB)

    @functools.cached_property
    def order_text(self) -> str:
        """What the CSV that `hint` names says: read once, the same for every step.

        Raises:
          ConfigError: it cannot be read.
        """
        return _read(self.hint)

    def applied_to(self, graph: PipelineGraph) -> PipelineGraph:
        """Returns the graph with the backward split, and committed, as this says."""
        return dataclasses.replace(
            graph, is_split=self.is_split, in_order=self.deterministic
        )


def dispatchers(
    graph: PipelineGraph,
    policy: Policy,
    residuals: Residuals | None = None,
    ranks: Sequence[int] | None = None,
    groups: Mapping[int, Group] | None = None,
) -> list[Dispatcher]:
    """Returns a fresh dispatcher for each of `ranks`, for one step.

    Args:
      graph: the step; `policy.applied_to` has split it.
      policy: how the ranks choose.
      residuals: what tasks keep; needed for a limit in bytes.
      ranks: those that this process takes part in; None for all.
      groups: by rank, of those that span several processes.

    Raises:
      ConfigError: the hint, order or limit does not fit the graph.
    """
    found = []
    made = arbiters_for(graph, policy, residuals)
    for rank in range(graph.num_ranks) if ranks is None else ranks:
        arbiter, ahead = made[rank], policy.launch_ahead
        group = groups.get(rank) if groups else None
        agreed = agreement.among(group, policy.agreement, arbiter, ahead)
        found.append(Dispatcher(graph, rank, arbiter, ahead, agreed))
    return found


@functools.lru_cache(maxsize=64)  # the steps of a run have few different graphs
def check(graph: PipelineGraph, policy: Policy) -> None:
    """Checks all but a limit in bytes, for which one must know what tasks keep.

    Raises:
      ConfigError: the hint or order does not fit the graph.
    """
    dispatchers(graph, dataclasses.replace(policy, memory_limit_gb=0.0))


def fixed_orders(graph: PipelineGraph, policy: Policy) -> list[Order]:
    """Returns the order of each rank that `policy.hint` names, 1F1B for a rule.

    Raises:
      ConfigError: there is no such order for this graph.
    """
    group = policy.microbatch_group or None
    one_f_one_b = functools.partial(orders.one_forward_one_backward, graph, group=group)
    match policy.hint:
        case "gpipe":
            return orders.gpipe(graph)
        case "deep_1f1b":
            return one_f_one_b(policy.warmup_factor)
        case "eager_1f1b":
            return one_f_one_b(2)
        case "zb_h1":
            return zero_bubble.zb_h1(graph)
        case "zb_h2":
            return zero_bubble.zb_h2(graph)
        case "zb_v":
            return zero_bubble.zb_v(graph)
        case "v_half":
            return zero_bubble.v_half(graph)
        case path if path.endswith(".csv"):
            return _from_csv(graph, policy)
        case _:
            return one_f_one_b()


def arbiters_for(
    graph: PipelineGraph, policy: Policy, residuals: Residuals | None = None
) -> Sequence[arbiters.Arbiter]:
    """Returns a fresh arbiter for each rank, for one step.

    Args:
      graph: the step; `policy.applied_to` has split it.
      policy: how the ranks choose.
      residuals: what tasks keep; needed for a limit in bytes.

    Raises:
      ConfigError: the hint, order or limit does not fit the graph.
    """
    limit = policy.memory_limit_bytes
    if limit and residuals is None:
        raise ConfigError(
            f"pipeline.memory_limit_gb={policy.memory_limit_gb:.6g} needs to know what "
            "tasks keep, and here that is not known.\n"
            "  Set --config.pipeline.memory_limit_gb=0."
        )
    if limit and residuals is not None:
        memory.check_limit(graph, residuals, limit)
    if policy.order == "readiness":
        return [
            arbiters.ReadinessFirst(
                graph.stages_of[rank], hint, _pressure(graph, rank, policy, residuals)
            )
            for rank, hint in enumerate(hints_for(graph, policy))
        ]
    ran = checked_orders(graph, policy)
    ordered = ran.trace.launches()
    name = "1f1b" if policy.hint in RULES else policy.hint
    peak = max(ran.trace.peak_in_flight())
    if peak > policy.in_flight_limit:
        raise ConfigError(
            f"{policy.order} order {name} holds {peak} microbatches in flight, more "
            f"than pipeline.in_flight_limit={policy.in_flight_limit}.\n"
            f"  Set --config.pipeline.in_flight_limit to {peak} or more, or use "
            "--config.pipeline.order=readiness."
        )
    if limit and residuals is not None:
        memory.check_orders(f"{policy.order} order {name}", ordered, residuals, limit)
    if policy.order == "opportunistic":
        return [arbiters.Opportunistic(o, policy.in_flight_limit) for o in ordered]
    return [arbiters.FixedOrder(order) for order in ordered]


def checked_orders(graph: PipelineGraph, policy: Policy) -> dry_run.DryRun:
    """Returns the dry run of the orders that `policy.hint` names.

    Raises:
      ConfigError: there is no such order for this graph, or it cannot finish.
    """
    text = policy.order_text if policy.hint.endswith(".csv") else ""
    return _checked_orders(graph, policy, text)


@functools.lru_cache(maxsize=64)  # the steps of a run have few different graphs
def _checked_orders(graph: PipelineGraph, policy: Policy, text: str) -> dry_run.DryRun:
    del text  # of the file that the policy names, which may have changed
    return dry_run.check_finishes(fixed_orders(graph, policy), graph)


def _pressure(
    graph: PipelineGraph, rank: int, policy: Policy, residuals: Residuals | None
) -> BackPressure:
    progress = RankProgress(graph, rank)
    rules: list[back_pressure.Rule] = []
    limit = max(1, round(policy.in_flight_limit - policy.in_flight_taper * rank))
    if policy.back_pressure == "one_by_one":
        rules.append(back_pressure.OneByOne(progress, limit, graph, rank))
    else:
        rules.append(back_pressure.InFlight(progress, limit))
    if policy.weight_limit:
        rules.append(back_pressure.QueuedWeights(progress, policy.weight_limit, graph))
    if policy.memory_limit_bytes and residuals is not None:
        rules.append(
            memory.ResidualBytes(
                progress, policy.memory_limit_bytes, graph, rank, residuals
            )
        )
    return BackPressure(progress, rules)


def hints_for(graph: PipelineGraph, policy: Policy) -> list[Hint]:
    """Returns a fresh hint for each rank.

    Raises:
      ConfigError: the hint is an order that this graph does not have.
    """
    if policy.hint in _RULES:
        make = _RULES[policy.hint]
        return [make(graph.num_ranks) for _ in range(graph.num_ranks)]
    return [hints.Ordered(order) for order in fixed_orders(graph, policy)]


def _from_csv(graph: PipelineGraph, policy: Policy) -> list[Order]:
    path = policy.hint
    try:
        return order_csv.from_csv(policy.order_text, graph, path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n  Or set --config.pipeline.hint to another order than {path}."
        ) from error


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the order {path} cannot be read: {error}.\n"
            "  Set --config.pipeline.hint to a CSV with one line a rank."
        ) from error
