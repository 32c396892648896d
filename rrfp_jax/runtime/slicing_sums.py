"""Small sums over values that the first half of a cut backward has. See `slicing`."""

from collections.abc import Collection
from typing import Any

from jax.extend import core as jex

from rrfp_jax.runtime.slicing_facts import variables

# What a sum must shrink its terms by, to be worth more than they are.
_LEAST_SHRINKAGE = 8

# One pass over arrays, which compilers fuse into the sum.
_ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "and",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "cos",
        "div",
        "eq",
        "erf",
        "exp",
        "expand_dims",
        "ge",
        "gt",
        "integer_pow",
        "le",
        "log",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "pow",
        "reduce_sum",
        "reshape",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sqrt",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "tanh",
        "transpose",
    }
)


def sums_at_hand(jaxpr: jex.Jaxpr, have: Collection[jex.Var]) -> list[jex.Var]:
    """Returns the small sums whose terms are elementwise in values at hand.

    Args:
      jaxpr: the program.
      have: the values that the first half computes. Inputs are at hand too, but at
        least one term must be computed there.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    sums = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "reduce_sum" or eqn.outvars[0] in have:
            continue
        terms: Any = eqn.invars[0].aval
        total: Any = eqn.outvars[0].aval
        is_small = total.size * _LEAST_SHRINKAGE <= terms.size
        if is_small and _is_at_hand(eqn, made_by, have):
            sums.append(eqn.outvars[0])
    return sums


def _is_at_hand(
    eqn: jex.JaxprEqn, made_by: dict[jex.Var, jex.JaxprEqn], have: Collection[jex.Var]
) -> bool:
    touches = False
    pending, seen = variables(eqn.invars), set[jex.Var]()
    while pending:
        var = pending.pop()
        if var in seen:
            continue
        seen.add(var)
        if var in have:
            touches = True
        elif var in made_by:
            maker = made_by[var]
            if maker.primitive.name not in _ELEMENTWISE or maker.effects:
                return False
            pending += variables(maker.invars)
    return touches
