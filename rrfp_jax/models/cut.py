"""Cutting layers into contiguous parts, by count or by cost.

A part becomes a stage somewhere else. Costs are any additive measure of one layer
(FLOPs, milliseconds, bytes); only their sums are compared.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rrfp_jax import errors
from rrfp_jax.models import layer

_T = TypeVar("_T")


def run(
    layers: Sequence[layer.Layer],
) -> Callable[[Mapping[str, layer.Params], Any, layer.Feed], Any]:
    """Composes consecutive layers into (parameters by layer name, carry, feed).

    The function is pure and reads only the parameters of its own layers.
    """

    def composed(
        params: Mapping[str, layer.Params], carry: Any, feed: layer.Feed
    ) -> Any:
        for each in layers:
            carry = each.apply(params[each.name], carry, feed)
        return carry

    return composed


def by_counts(layers: Sequence[_T], counts: Sequence[int]) -> list[tuple[_T, ...]]:
    """Cuts layers into contiguous parts of the given sizes, in order.

    Raises:
      ConfigError: a count is below 1, or they do not sum to the number of layers.
    """
    if min(counts, default=0) < 1 or sum(counts) != len(layers):
        raise errors.ConfigError(
            f"Layer counts {list(counts)} sum to {sum(counts)}, but the tower has "
            f"{len(layers)} layers, and each stage needs at least 1.\n"
            f"  Give counts of at least 1 that sum to {len(layers)}."
        )
    ends = list(itertools.accumulate(counts))
    starts = [0, *ends[:-1]]
    return [tuple(layers[i:j]) for i, j in zip(starts, ends, strict=True)]


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Returns the counts of contiguous parts whose largest cost is smallest.

    Exact, by dynamic programming in O(len(costs)^2 * num_parts). Among the best cuts
    it takes one with the smallest sum of squared costs, so that the other parts are
    even too; the result depends on nothing but the arguments.

    Raises:
      ConfigError: `num_parts` is below 1 or above the number of costs.
    """
    _check_parts(len(costs), num_parts)
    sums = [0.0, *itertools.accumulate(costs)]
    limit = _smallest_maxima(sums, num_parts)[num_parts - 1]

    def penalty(start: int, end: int) -> float:
        cost = sums[end] - sums[start]
        return cost * cost if cost <= limit else math.inf

    return _cheapest_cut(penalty, len(costs), num_parts)


def apportion(tower_costs: Sequence[Sequence[float]], num_stages: int) -> list[int]:
    """Shares stages among towers so that the most expensive stage is cheapest.

    Each further stage goes to the tower that holds the most expensive one and still
    has layers to cut: optimal, since no better share could give that tower fewer.

    Args:
      tower_costs: for each tower, the costs of its layers.
      num_stages: stages of all towers together.

    Returns:
      The number of stages of each tower; `balanced` says where to cut it.

    Raises:
      ConfigError: fewer stages than towers, or more than layers.
    """
    num_layers = sum(map(len, tower_costs))
    if not len(tower_costs) <= num_stages <= num_layers:
        raise errors.ConfigError(
            f"{num_stages} stages for {len(tower_costs)} towers with {num_layers} "
            "layers in all: each tower and each stage needs at least 1.\n"
            f"  Ask for {len(tower_costs)} to {num_layers} stages."
        )
    sums = [[0.0, *itertools.accumulate(costs)] for costs in tower_costs]
    most = num_stages - len(tower_costs) + 1  # what one tower can get
    maxima = [_smallest_maxima(tower, min(most, len(tower) - 1)) for tower in sums]
    shares = [1] * len(tower_costs)
    for _ in range(num_stages - len(tower_costs)):
        divisible = [i for i, share in enumerate(shares) if share < len(maxima[i])]
        shares[max(divisible, key=lambda i: maxima[i][shares[i] - 1])] += 1
    return shares


def _smallest_maxima(sums: Sequence[float], max_parts: int) -> list[float]:
    """Returns, for 1, 2, ... parts, the smallest possible largest cost."""
    num_layers = len(sums) - 1
    best = [math.inf, *(sums[end] - sums[0] for end in range(1, num_layers + 1))]
    maxima = [best[num_layers]]
    for _ in range(max_parts - 1):
        best = [
            min(
                (max(best[i], sums[end] - sums[i]) for i in range(end)),
                default=math.inf,
            )
            for end in range(num_layers + 1)
        ]
        maxima.append(best[num_layers])
    return maxima


def _cheapest_cut(
    penalty: Callable[[int, int], float], num_layers: int, num_parts: int
) -> list[int]:
    """Returns the counts of the cut with the smallest sum of penalties."""
    best = {0: 0.0}
    start_of: list[dict[int, int]] = []  # for each part: its end -> its start
    for _ in range(num_parts):
        cheapest = {
            end: min(
                (total + penalty(start, end), start)
                for start, total in best.items()
                if start < end
            )
            for end in range(min(best) + 1, num_layers + 1)
        }
        best = {end: total for end, (total, _) in cheapest.items()}
        start_of.append({end: start for end, (_, start) in cheapest.items()})
    ends = [num_layers]
    for starts in reversed(start_of):
        ends.append(starts[ends[-1]])
    return [end - start for start, end in itertools.pairwise(reversed(ends))]


def _check_parts(num_layers: int, num_parts: int) -> None:
    if not 1 <= num_parts <= num_layers:
        raise errors.ConfigError(
            f"{num_layers} layers cannot be cut into {num_parts} parts of at least 1.\n"
            f"  Ask for 1 to {num_layers} stages, or for more layers."
        )
