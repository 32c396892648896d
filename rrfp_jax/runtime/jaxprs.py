"""Cutting up traced programs (jaxprs) with the public `jax.extend.core` only."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

Values = Sequence[Any]


def inline(closed: jex.ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a function that runs `closed` with every `jit` inside it dissolved.

    A value that depends on parameters alone is visible as such only if no inner `jit`
    mixes its computation with that of activations.
    """

    def run(*args: Any) -> list[Any]:
        return _evaluate(closed.jaxpr, closed.consts, args)

    return run


def _evaluate(jaxpr: jex.Jaxpr, consts: Values, args: Values) -> list[Any]:
    values: dict[jex.Var, Any] = {}
    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name == "jit" and isinstance(inner, jex.ClosedJaxpr):
            operands = [read(atom) for atom in eqn.invars]
            results: Values = _evaluate(inner.jaxpr, inner.consts, operands)
        else:
            results = _run_equation(eqn, values, without_names(jaxpr))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_equation(
    eqn: jex.JaxprEqn, values: dict[jex.Var, Any], debug_info: Any
) -> Values:
    """Runs one equation as a program of its own, which needs nothing private of JAX."""
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, jex.Var)))
    alone = jex.Jaxpr((), invars, eqn.outvars, [eqn], eqn.effects, debug_info)
    run = jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, ()))
    results: Values = run(*(values[v] for v in invars))
    return results


def depends_on(jaxpr: jex.Jaxpr, roots: Sequence[jex.Var]) -> set[jex.Var]:
    """Returns the variables of `jaxpr` that are computed from any of `roots`."""
    tainted = set(roots)
    for eqn in jaxpr.eqns:
        if any(isinstance(v, jex.Var) and v in tainted for v in eqn.invars):
            tainted.update(eqn.outvars)
    return tainted


def with_outputs(
    closed: jex.ClosedJaxpr, outvars: Sequence[Any], keep_effects: bool
) -> jex.ClosedJaxpr:
    """Returns the part of `closed` that computes `outvars`, with the same inputs.

    Args:
      closed: the whole.
      outvars: what to compute.
      keep_effects: whether to keep what has an effect (a debug print) and no output.
    """
    needed = {v for v in outvars if isinstance(v, jex.Var)}
    kept = []
    for eqn in reversed(closed.jaxpr.eqns):
        if (keep_effects and eqn.effects) or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, jex.Var))
    jaxpr = closed.jaxpr.replace(
        eqns=kept[::-1],
        outvars=list(outvars),
        effects=frozenset().union(*(eqn.effects for eqn in kept)),
        debug_info=without_names(closed.jaxpr),
    )
    return jex.ClosedJaxpr(jaxpr, closed.consts)


def without_names(jaxpr: jex.Jaxpr) -> Any:
    """Debug information without result paths, whose number must match the outputs."""
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None)


def trace(fun: Callable[..., Any], *avals: Any) -> jex.ClosedJaxpr:
    """Returns the jaxpr of a function of flat arrays."""
    return jax.make_jaxpr(fun)(*avals)
