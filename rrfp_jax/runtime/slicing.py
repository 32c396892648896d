"""The split backward: one program for input cotangents (B), one for the rest (W).

Another stage waits for the cotangents of a stage's inputs; nobody waits for the
gradients of its parameters. So the backward is made as two programs, and the second
runs whenever there is time.

**What is sliced.** Not the forward, twice differentiated: that would repeat the chain,
the products by which a cotangent goes from layer to layer. The backward is traced once,
and its program is cut. B is the backward slice from the wanted outputs, with all that
has an effect. W is what the other outputs need on top of it. Every equation is in one
of the two, therefore nothing is computed twice.

One thing more is in B: small sums of what B has, such as the gradient of a bias or of a
norm's scale. In W their terms would have to cross, which are many times as large.

**What crosses.** W reads the inputs of the whole by reference. What it reads of B's
values crosses: B returns it, and it is held until W has run. Two kinds of values do not
cross although both halves use them, for computing them again is cheaper than holding
them: what comes from parameters and constants alone (a cast, a mask), and what merely
rearranges an array that is not larger (a transpose, a broadcast), which crosses itself.

**What is opened.** A call (`jit`, `checkpoint`, `custom_vjp`) is dissolved: nothing is
to be differentiated any more. A rematerialised forward thus runs once, in B, and what W
needs of it crosses; the barrier that keeps it behind the cotangent stays, but each
value goes through it on its own. A scan is cut into two scans: the first takes every
carry that the wanted outputs depend on, and stacks what the second reads of its
iterations; the second carries only what nothing of the first reads, such as the sum of
the gradients of a parameter used in each iteration. A cond is cut into two conds, whose
branches are cut. Everything else (`while`, `shard_map`, a kernel) is in B as a whole if
B needs any of it.

**Where nobody waits.** The first stage has no wanted output. Its B is then the chain:
the values from which two or more outputs are computed, and every carry of a scan that
feeds more than itself. W is left with the products that give single gradients.

Invariants: the same program is cut in the same way, always; an effect happens once, in
B; B and W together return what the whole returns.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core import primitives

from rrfp_jax.runtime import slicing_facts as facts
from rrfp_jax.runtime.slicing_loops import Halving
from rrfp_jax.runtime.slicing_reach import reach


@dataclasses.dataclass(frozen=True)
class Halves:
    """A backward in two programs that together compute what the whole computes, once.

    Attributes:
      first: all inputs of the whole -> its wanted outputs, then the crossing values.
      second: (the inputs of the whole at `needed`, then the crossing values) -> the
        other outputs.
      needed: positions of the inputs of the whole that `second` reads, ascending.
      num_crossing: how many values cross.
    """

    first: jex.ClosedJaxpr
    second: jex.ClosedJaxpr
    needed: tuple[int, ...]
    num_crossing: int


def halve(
    closed: jex.ClosedJaxpr,
    wanted: Sequence[int],
    free: Sequence[int] = (),
    cotangents: Sequence[int] = (),
) -> Halves:
    """Cuts a backward into what computes its `wanted` outputs, and the rest.

    Args:
      closed: the whole.
      wanted: positions of the outputs that `first` computes, in the order in which it
        returns them. Every other output is computed by `second`. If there are none,
        `first` computes the chain.
      free: positions of inputs (parameters) such that whatever is computed from them
        and constants alone is computed again in `second` rather than kept: a copy per
        microbatch would cost more than the parameters.
      cotangents: positions of the inputs that are cotangents. If given, `first`
        finishes each rematerialised forward, also where only `second` reads the
        result: an attention's output crosses, and not its larger probabilities.
    """
    flat = dissolve(closed)
    jaxpr, outvars = flat.jaxpr, flat.jaxpr.outvars
    others = [atom for i, atom in enumerate(outvars) if i not in wanted]
    known = facts.Facts(
        tuple(i in free for i in range(len(jaxpr.invars))),
        tuple(i in cotangents for i in range(len(jaxpr.invars))),
        chain=not wanted,
    )
    roots = [outvars[i] for i in wanted]
    cut = Halving(jaxpr, reach(jaxpr, known, roots), roots, others)
    needed = [i for i, var in enumerate(jaxpr.invars) if var in cut.needs[1]]
    inputs = [*(jaxpr.invars[i] for i in needed), *cut.crossing]
    return Halves(
        facts.close(flat, jaxpr.invars, cut.first, [*roots, *cut.crossing]),
        facts.close(flat, inputs, cut.second, others),
        tuple(needed),
        len(cut.crossing),
    )


def dissolve(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns `closed` without calls, inside its loops and branches too."""
    walk = _Dissolving()
    jaxpr = closed.jaxpr
    env = {var: var for var in jaxpr.invars}
    outvars = walk.run(closed, env, is_outermost=True)
    consts = list(walk.consts.values())
    opened = jaxpr.replace(constvars=[var for var, _ in consts])
    values = [value for _, value in consts]
    return facts.close(
        jex.ClosedJaxpr(opened, values), jaxpr.invars, walk.eqns, outvars
    )


class _Dissolving:
    """Collects the equations of a program and of the calls in it.

    The values of a call get new names, since one program may be called twice.
    """

    def __init__(self) -> None:
        self.eqns: list[jex.JaxprEqn] = []
        # By identity: a program called twice brings each of its constants twice.
        self.consts: dict[int, tuple[jex.Var, Any]] = {}

    def run(
        self, closed: jex.ClosedJaxpr, env: dict[jex.Var, Any], is_outermost: bool
    ) -> list[Any]:
        """Adds the equations of `closed` called on `env`; returns its outputs."""
        jaxpr = closed.jaxpr
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var], _ = self.consts.setdefault(id(value), (jex.Var(var.aval), value))

        def read(atom: Any) -> Any:
            return env[atom] if isinstance(atom, jex.Var) else atom

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            called = _called(eqn)
            if called is None:
                results = eqn.outvars if is_outermost else _renamed(eqn.outvars)
                self.eqns.append(
                    eqn.replace(invars=operands, outvars=results, params=_opened(eqn))
                )
            else:
                operands = self._behind_barrier(eqn, operands)
                inputs = dict(zip(called.jaxpr.invars, operands, strict=True))
                results = self.run(called, inputs, is_outermost=False)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _behind_barrier(self, eqn: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
        """Keeps a rematerialised forward from being merged with the first forward.

        Nor may it be moved before the cotangent is there: its values would be held for
        long. This is what JAX does when it lowers a `jax.checkpoint`.
        """
        if eqn.primitive is not primitives.remat_p or not eqn.params["differentiated"]:
            return operands
        prevent = eqn.params["prevent_cse"]
        prevents = [prevent] * len(operands) if isinstance(prevent, bool) else prevent
        paired = list(zip(operands, prevents, strict=True))
        guarded = [a for a, p in paired if p and isinstance(a, jex.Var)]
        guarded = list(dict.fromkeys(guarded))
        if not guarded:
            return operands
        behind = dict(zip(guarded, _renamed(guarded), strict=True))
        self.eqns.append(
            eqn.replace(
                primitive=jax.lax.optimization_barrier_p,
                params={},
                invars=list[Any](guarded),
                outvars=list(behind.values()),
                effects=frozenset(),
            )
        )
        return [behind[a] if p and a in guarded else a for a, p in paired]


def _renamed(outvars: Sequence[jex.Var]) -> list[jex.Var]:
    return [v if isinstance(v, jex.DropVar) else jex.Var(v.aval) for v in outvars]


def _called(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """Returns the program that `eqn` calls, if it is one that can be dissolved."""
    if eqn.primitive not in _CALLS:
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    called = jex.ClosedJaxpr(inner, ()) if isinstance(inner, jex.Jaxpr) else inner
    # The effects of a mutable array name it, and would have to be renamed too.
    assert called is not None
    uses_refs = any(facts.touches_refs(each) for each in called.jaxpr.eqns)
    return None if uses_refs else called


_CALLS = frozenset(
    {
        primitives.call_p,
        primitives.closed_call_p,
        primitives.custom_jvp_call_p,
        primitives.custom_vjp_call_p,
        primitives.jit_p,
        primitives.remat_p,
    }
)


def _opened(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of `eqn`, with the programs that are cut dissolved."""
    match facts.kind(eqn):
        case facts.Treatment.SCAN:
            return {**eqn.params, "jaxpr": dissolve(eqn.params["jaxpr"])}
        case facts.Treatment.COND:
            return {**eqn.params, "branches": tuple(map(dissolve, facts.bodies(eqn)))}
    return dict(eqn.params)
