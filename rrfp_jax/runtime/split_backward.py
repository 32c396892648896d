"""A traced backward as two functions: B for those who wait, W for later.

What W needs comes, by reference, from parameters, from what F kept and from the
cotangents that B was given; and from what B computed (the crossing values).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex

from rrfp_jax.runtime import jaxprs
from rrfp_jax.runtime.slicing import halve
from rrfp_jax.runtime.tracing import Arrays, Signature, Traced, grouped


@dataclasses.dataclass(frozen=True)
class SplitBackward:
    """The backward of a stage in two.

    Attributes:
      backward: (params, saved, cotangents) -> (cotangents for each wanted source,
        crossing values).
      weight: (params, kept) -> gradients of the trained parameters.
      kept: which arrays to keep for `weight`: positions in the concatenation of saved,
        all cotangents, crossing values.
    """

    backward: Callable[..., Any]
    weight: Callable[..., Any]
    kept: tuple[int, ...]


def split_backward(traced: Traced, signature: Signature) -> SplitBackward:
    """Cuts the backward of a traced stage."""
    whole, groups = _flat_backward(traced, signature)
    num_params, num_saved = len(signature.params.avals), len(traced.saved)
    num_onward = sum(groups)
    given = traced.cotangent_avals(signature)
    num_cotangents = sum(map(len, given))
    first_cotangent = num_params + num_saved
    halves = halve(
        whole,
        wanted=range(num_onward),
        free=range(num_params),
        cotangents=range(first_cotangent, first_cotangent + num_cotangents),
    )
    run_first = jex.jaxpr_as_fun(halves.first)
    run_second = jex.jaxpr_as_fun(halves.second)

    def backward(
        params: Arrays, saved: Arrays, cotangents: Sequence[Arrays]
    ) -> tuple[list[list[Any]], list[Any]]:
        flat = [x for each in cotangents for x in each]
        results = run_first(*params, *saved, *flat)
        return grouped(results[:num_onward], groups), list(results[num_onward:])

    of_params = [i for i in halves.needed if i < num_params]
    kept = [i - num_params for i in halves.needed if i >= num_params]
    first_crossing = num_saved + num_cotangents
    kept += range(first_crossing, first_crossing + halves.num_crossing)

    def weight(params: Arrays, kept: Arrays) -> list[Any]:
        return list(run_second(*(params[i] for i in of_params), *kept))

    return SplitBackward(backward, weight, tuple(kept))


def _flat_backward(
    traced: Traced, signature: Signature
) -> tuple[jex.ClosedJaxpr, list[int]]:
    """Returns (params, saved, cotangents) -> (onward cotangents, gradients), all flat,
    and how many cotangents go to each wanted source.
    """
    assert traced.backward is not None
    run = traced.backward
    params, given = signature.params.avals, traced.cotangent_avals(signature)
    groups: list[int] = []

    def whole(*flat: Any) -> list[Any]:
        rest = iter(flat)
        of_params = [next(rest) for _ in params]
        saved = [next(rest) for _ in traced.saved]
        cotangents = [[next(rest) for _ in each] for each in given]
        grads, onward = run(of_params, saved, cotangents)
        groups[:] = map(len, onward)
        return [*(x for each in onward for x in each), *grads]

    avals = [*params, *traced.saved_avals, *(a for each in given for a in each)]
    return jaxprs.trace(whole, *avals), groups
