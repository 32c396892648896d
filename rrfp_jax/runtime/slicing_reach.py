"""Finding what the first half of a cut backward computes. See `slicing`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from rrfp_jax.runtime.slicing_facts import Analysis, Facts, Treatment, bodies, variables
from rrfp_jax.runtime.slicing_sums import sums_at_hand


@dataclasses.dataclass(frozen=True)
class Reach:
    """What the first half computes of one program.

    Attributes:
      analysis: of the program.
      have: the values it computes.
      reads: the inputs it reads.
      carried: if the program is the body of a scan, the carries it takes along.
      inner: for each equation that is cut, by position, the same for what is inside.
    """

    analysis: Analysis
    have: set[jex.Var]
    reads: set[jex.Var]
    carried: tuple[int, ...]
    inner: dict[int, tuple["Reach", ...]]


def reach(jaxpr: jex.Jaxpr, facts: Facts, wanted: Sequence[Any]) -> Reach:
    """Finds what the first half computes so as to compute `wanted`.

    And what it sums up of that: the gradient of a bias or of a norm's scale is small,
    and costs next to nothing where its terms are at hand. In the second half it would
    need all of them.
    """
    analysis = Analysis(jaxpr, facts)
    found = _reach(jaxpr, facts, analysis, wanted)
    sums = [v for v in sums_at_hand(jaxpr, found.have) if v not in analysis.free]
    return _reach(jaxpr, facts, analysis, [*wanted, *sums]) if sums else found


def _reach(
    jaxpr: jex.Jaxpr, facts: Facts, analysis: Analysis, wanted: Sequence[Any]
) -> Reach:
    need = {*variables(wanted), *analysis.roots}
    have: set[jex.Var] = set()
    inner: dict[int, tuple[Reach, ...]] = {}
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        outs = [j for j, var in enumerate(eqn.outvars) if var in need]
        match analysis.kind(eqn):
            case Treatment.SCAN if outs or eqn.effects or facts.chain:
                body = _reach_scan(eqn, analysis, outs)
                inner[i] = (body,)
                have.update(eqn.outvars[j] for j in _scan_has(eqn, body, outs))
                need.update(variables(_scan_reads(eqn, body)))
            case Treatment.COND if outs or eqn.effects or facts.chain:
                inner[i] = _reach_cond(eqn, analysis, outs)
                have.update(eqn.outvars[j] for j in outs)
                need.update(variables(_cond_reads(eqn, inner[i])))
            case Treatment.BARRIER:
                have.update(eqn.outvars[j] for j in outs)
                need.update(variables(eqn.invars[j] for j in outs))
            case Treatment.OPAQUE if outs or eqn.effects:
                have.update(eqn.outvars)
                need.update(variables(eqn.invars))
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    return Reach(analysis, have, need & inputs, (), inner)


def nothing(eqn: jex.JaxprEqn, analysis: Analysis) -> tuple[Reach, ...]:
    """Returns what the first half computes inside an equation that it does without."""
    paired = zip(bodies(eqn), analysis.inside(eqn), strict=True)
    return tuple(
        Reach(Analysis(closed.jaxpr, facts), set(), set(), (), {})
        for closed, facts in paired
    )


def _reach_scan(eqn: jex.JaxprEqn, analysis: Analysis, outs: Sequence[int]) -> Reach:
    """Finds the carries that the first half needs, and what its body computes."""
    start, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    (closed,), (facts,) = bodies(eqn), analysis.inside(eqn)
    jaxpr = closed.jaxpr
    inputs = jaxpr.invars[start : start + num_carry]
    ys = [j for j in outs if j >= num_carry]
    alone = Analysis(jaxpr, facts)
    carried = {j for j, var in enumerate(inputs) if alone.feeds_others(var, j)}
    carried |= {*outs} - {*ys}
    while True:
        body = reach(jaxpr, facts, [jaxpr.outvars[j] for j in [*sorted(carried), *ys]])
        more = {j for j, var in enumerate(inputs) if var in body.reads} - carried
        if not more:
            return dataclasses.replace(body, carried=tuple(sorted(carried)))
        carried |= more


def _scan_has(eqn: jex.JaxprEqn, body: Reach, outs: Sequence[int]) -> list[int]:
    """Returns the positions of the results that the first half has at no cost."""
    made, num_carry = eqn.params["jaxpr"].jaxpr.outvars, eqn.params["num_carry"]
    return [
        j
        for j, atom in enumerate(made)
        if j in outs
        or j in body.carried
        or (j >= num_carry and isinstance(atom, jex.Var) and atom in body.have)
    ]


def _scan_reads(eqn: jex.JaxprEqn, body: Reach) -> list[Any]:
    inputs, start = eqn.params["jaxpr"].jaxpr.invars, eqn.params["num_consts"]
    carried = [eqn.invars[start + j] for j in body.carried]
    paired = zip(inputs, eqn.invars, strict=True)
    return [*carried, *(atom for var, atom in paired if var in body.reads)]


def _reach_cond(
    eqn: jex.JaxprEqn, analysis: Analysis, outs: Sequence[int]
) -> tuple[Reach, ...]:
    paired = zip(bodies(eqn), analysis.inside(eqn), strict=True)
    return tuple(
        reach(branch.jaxpr, facts, [branch.jaxpr.outvars[j] for j in outs])
        for branch, facts in paired
    )


def _cond_reads(eqn: jex.JaxprEqn, branches: Sequence[Reach]) -> list[Any]:
    read = [eqn.invars[0]]
    for branch, has in zip(bodies(eqn), branches, strict=True):
        paired = zip(branch.jaxpr.invars, eqn.invars[1:], strict=True)
        read += [atom for var, atom in paired if var in has.reads]
    return read
