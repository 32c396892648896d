"""Names for hints and fixed orders, as configs give them, made into arbiters."""

import dataclasses
import functools
import pathlib

from rrfp_jax.core import arbiters, back_pressure, dispatcher, hints, orders
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError, check_choice

RULES = ("bf", "fb", "b_priority", "f_priority")
ORDERS = ("gpipe", "1f1b", "deep_1f1b")
MODES = ("readiness", "fixed", "opportunistic")
PRESSURES = ("reserving", "one_by_one")


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
      back_pressure: which rule enforces the limit, see `core.back_pressure`.
      warmup_factor: how much deeper than 1F1B `deep_1f1b` is.
      launch_ahead: unfinished launches a rank may have.

    Raises:
      ConfigError: a value is not one of these, or below 1.
    """

    hint: str = "bf"
    order: str = "readiness"
    in_flight_limit: int = 32
    back_pressure: str = "reserving"
    warmup_factor: float = 2.0
    launch_ahead: int = dispatcher.LAUNCH_AHEAD

    def __post_init__(self) -> None:
        back_pressure.check_limit(self.in_flight_limit)
        dispatcher.check_launch_ahead(self.launch_ahead)
        if not self.hint.endswith(".csv"):
            known = (*RULES, *ORDERS, "or the path of a .csv")
            check_choice("pipeline.hint", self.hint, known)
        check_choice("pipeline.order", self.order, MODES)
        check_choice("pipeline.back_pressure", self.back_pressure, PRESSURES)

    @functools.cached_property
    def order_text(self) -> str:
        """What the CSV that `hint` names says: read once, the same for every step.

        Raises:
          ConfigError: it cannot be read.
        """
        return _read(self.hint)


def dispatchers(graph: PipelineGraph, policy: Policy) -> list[Dispatcher]:
    """Returns a fresh dispatcher for each rank, for one step.

    Raises:
      ConfigError: the hint or order does not fit the graph.
    """
    return [
        Dispatcher(graph, rank, arbiter, policy.launch_ahead)
        for rank, arbiter in enumerate(_arbiters(graph, policy))
    ]


def fixed_orders(graph: PipelineGraph, policy: Policy) -> list[orders.Order]:
    """Returns the order of each rank that `policy.hint` names, 1F1B for a rule.

    Raises:
      ConfigError: there is no such order for this graph.
    """
    match policy.hint:
        case "gpipe":
            return orders.gpipe(graph)
        case "deep_1f1b":
            return orders.one_forward_one_backward(graph, policy.warmup_factor)
        case path if path.endswith(".csv"):
            return _from_csv(graph, policy)
        case _:
            return orders.one_forward_one_backward(graph)


def _arbiters(graph: PipelineGraph, policy: Policy) -> list[arbiters.Arbiter]:
    if policy.order == "readiness":
        return [
            arbiters.ReadinessFirst(hint, _pressure(graph, rank, policy))
            for rank, hint in enumerate(_hints(graph, policy))
        ]
    ordered = fixed_orders(graph, policy)
    orders.check_finishes(ordered, graph)
    peak = max(orders.peak_in_flight(o, graph, r) for r, o in enumerate(ordered))
    if peak > policy.in_flight_limit:
        name = "1f1b" if policy.hint in RULES else policy.hint
        raise ConfigError(
            f"{policy.order} order {name} holds {peak} microbatches in flight, more "
            f"than pipeline.in_flight_limit={policy.in_flight_limit}.\n"
            f"  Set --config.pipeline.in_flight_limit to {peak} or more, or use "
            "--config.pipeline.order=readiness."
        )
    if policy.order == "opportunistic":
        return [arbiters.Opportunistic(o, policy.in_flight_limit) for o in ordered]
    return [arbiters.FixedOrder(order) for order in ordered]


def _pressure(
    graph: PipelineGraph, rank: int, policy: Policy
) -> back_pressure.BackPressure:
    if policy.back_pressure == "one_by_one":
        return back_pressure.OneByOne(graph, rank, policy.in_flight_limit)
    return back_pressure.Reserving(graph, rank, policy.in_flight_limit)


def _hints(graph: PipelineGraph, policy: Policy) -> list[hints.Hint]:
    ranks = range(graph.num_ranks)
    match policy.hint:
        case "bf":
            return [hints.Alternating(Kind.B) for _ in ranks]
        case "fb":
            return [hints.Alternating(Kind.F) for _ in ranks]
        case "b_priority":
            return [hints.Priority(Kind.B) for _ in ranks]
        case "f_priority":
            return [hints.Priority(Kind.F) for _ in ranks]
        case _:
            return [hints.Ordered(order) for order in fixed_orders(graph, policy)]


def _from_csv(graph: PipelineGraph, policy: Policy) -> list[orders.Order]:
    path = policy.hint
    try:
        return orders.from_csv(policy.order_text, graph, path)
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
