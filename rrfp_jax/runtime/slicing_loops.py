"""Cutting one program in two, and the scans and conds inside it. See `slicing`."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core as jex

from rrfp_jax.runtime.slicing_facts import (
    Treatment,
    bodies,
    close,
    effects_of,
    is_shape_only,
    variables,
)
from rrfp_jax.runtime.slicing_reach import Reach, nothing

# The equation of each half, and the values that cross: made by the one, read by the
# other.
Shares: TypeAlias = tuple[jex.JaxprEqn | None, jex.JaxprEqn | None, list[jex.Var]]


class Halving:
    """Shares out the equations of one program.

    Attributes:
      first: the equations of the first half, of which each is needed there or crosses.
      second: the equations of the second half.
      crossing: the values that the first half makes and the second reads.
      needs: for each half, the variables it reads.
    """

    def __init__(
        self,
        jaxpr: jex.Jaxpr,
        has: Reach,
        wanted: Sequence[Any],
        others: Sequence[Any],
    ):
        self._has = has
        self.needs = {*variables(wanted)}, {*variables(others)}
        self._crossing: dict[jex.Var, None] = {}
        self._shares: tuple[list[jex.JaxprEqn], list[jex.JaxprEqn]] = ([], [])
        for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
            self._share(i, eqn)
        self.first, self.second = (share[::-1] for share in self._shares)
        self.crossing = list(self._crossing)[::-1]

    def _share(self, i: int, eqn: jex.JaxprEqn) -> None:
        """Gives one equation to a half, to both in parts, or to none."""
        analysis = self._has.analysis
        repeats = analysis.is_free(eqn) or is_shape_only(eqn)
        here = []
        for j, var in enumerate(eqn.outvars):
            if var in self.needs[1]:
                if var in self._has.have and not repeats:
                    self._crossing[var] = None
                    self.needs[0].add(var)
                else:
                    here.append(j)
        there = [j for j, var in enumerate(eqn.outvars) if var in self.needs[0]]
        first, second, crossing = self._parts(i, eqn, there, here)
        self._crossing.update(dict.fromkeys(crossing))
        for half, part in enumerate((first, second)):
            if part is not None:
                self._shares[half].append(part)
                self.needs[half].update(variables(part.invars))

    def _parts(
        self, i: int, eqn: jex.JaxprEqn, there: list[int], here: list[int]
    ) -> Shares:
        """Returns what each half computes of `eqn`, given which results it needs."""
        analysis = self._has.analysis
        match analysis.kind(eqn):
            case Treatment.SCAN:
                (has,) = self._has.inner.get(i) or nothing(eqn, analysis)
                return _Scan(eqn, has).cut(there, here)
            case Treatment.COND:
                all_have = self._has.inner.get(i) or nothing(eqn, analysis)
                return _cut_cond(eqn, all_have, there, here)
            case Treatment.BARRIER:
                return _some(eqn, there), _some(eqn, here), []
        first = eqn if there or eqn.effects else None
        return first, eqn if here else None, []


def _some(eqn: jex.JaxprEqn, at: Sequence[int]) -> jex.JaxprEqn | None:
    """Returns a barrier of some of its operands."""
    if not at:
        return None
    invars, outvars = [eqn.invars[j] for j in at], [eqn.outvars[j] for j in at]
    return _replaced(eqn, invars=invars, outvars=outvars)


def _replaced(eqn: jex.JaxprEqn, **changes: Any) -> jex.JaxprEqn:
    changed: jex.JaxprEqn = eqn.replace(**changes)
    return changed


class _Scan:
    """A scan that is cut into two.

    The first stacks what the second reads of its iterations. What the second reads of
    the operands it reads by reference.
    """

    def __init__(self, eqn: jex.JaxprEqn, has: Reach):
        self._eqn, self._has = eqn, has
        self._closed: jex.ClosedJaxpr = eqn.params["jaxpr"]
        self._start: int = eqn.params["num_consts"]
        self._num_carry: int = eqn.params["num_carry"]

    def cut(self, there: Sequence[int], here: Sequence[int]) -> Shares:
        """Cuts so that the first gives results `there`, and the second `here`."""
        ys = [j for j in there if j >= self._num_carry]
        own, body = self._carries(ys, here)
        inputs = self._closed.jaxpr.invars[self._start :]
        through = [inputs[j] for j in self._has.carried if inputs[j] in body.needs[1]]
        stacked = self._stack([*through, *body.crossing], ys)
        first = second = None
        if there or stacked or effects_of(body.first):
            known = {self._eqn.outvars[j] for j in ys}
            made = {v: outer for v, outer in stacked.items() if outer not in known}
            carried = self._has.carried
            first = self._part(body.first, body.needs[0], carried, ys, {}, made)
        if here:
            rest = [j for j in here if j >= self._num_carry]
            second = self._part(body.second, body.needs[1], own, rest, stacked, {})
        return first, second, list(stacked.values())

    def _carries(
        self, ys: Sequence[int], here: Sequence[int]
    ) -> tuple[list[int], Halving]:
        """Finds the carries of the second scan: none of which the first needs."""
        jaxpr, carried = self._closed.jaxpr, self._has.carried
        wanted = [jaxpr.outvars[j] for j in [*carried, *ys]]
        rest = [j for j in here if j >= self._num_carry]
        own = [j for j in here if j < self._num_carry]
        while True:
            others = [jaxpr.outvars[j] for j in [*own, *rest]]
            body = Halving(jaxpr, self._has, wanted, others)
            inputs = jaxpr.invars[self._start : self._start + self._num_carry]
            read = [j for j, var in enumerate(inputs) if var in body.needs[1]]
            more = [j for j in read if j not in carried and j not in own]
            if not more:
                return own, body
            own = sorted([*own, *more])

    def _stack(
        self, values: Sequence[jex.Var], ys: Sequence[int]
    ) -> dict[jex.Var, jex.Var]:
        """Returns the stacks of values of the body, of which some are results."""
        outer: dict[jex.Var, jex.Var] = {}
        for j in ys:
            atom = self._closed.jaxpr.outvars[j]
            if isinstance(atom, jex.Var):
                outer.setdefault(atom, self._eqn.outvars[j])
        length = self._eqn.params["length"]
        return {
            v: outer.get(v) or jex.Var(jex.unmapped_aval(length, 0, v.aval))
            for v in values
        }

    def _part(
        self,
        eqns: Sequence[jex.JaxprEqn],
        needs: set[jex.Var],
        carries: Sequence[int],
        ys: Sequence[int],
        given: dict[jex.Var, jex.Var],
        made: dict[jex.Var, jex.Var],
    ) -> jex.JaxprEqn:
        """Builds one of the two: `given` and `made` are stacks by value of the body."""
        inner, outer = self._closed.jaxpr, self._eqn
        used = [p for p, v in enumerate(inner.invars) if v in needs and v not in given]
        consts = [p for p in used if p < self._start]
        xs = [p for p in used if p >= self._start + self._num_carry]
        kept = [*consts, *(self._start + j for j in carries), *xs]
        outs = [*carries, *ys]
        body = close(
            self._closed,
            [*(inner.invars[p] for p in kept), *given],
            eqns,
            [*(inner.outvars[j] for j in outs), *made],
        )
        counts = {"num_consts": len(consts), "num_carry": len(carries)}
        return _replaced(
            outer,
            invars=[*(outer.invars[p] for p in kept), *given.values()],
            outvars=[*(outer.outvars[j] for j in outs), *made.values()],
            params={**outer.params, **counts, "jaxpr": body},
            effects=body.effects,
        )


def _cut_cond(
    eqn: jex.JaxprEqn,
    has: Sequence[Reach],
    there: Sequence[int],
    here: Sequence[int],
) -> Shares:
    """Cuts each branch; the values that cross share slots of the same type."""
    branches = bodies(eqn)
    cuts = [
        Halving(
            branch.jaxpr,
            each,
            [branch.jaxpr.outvars[j] for j in there],
            [branch.jaxpr.outvars[j] for j in here],
        )
        for branch, each in zip(branches, has, strict=True)
    ]
    slots, taken = _slots([cut.crossing for cut in cuts])
    crossing = [jex.Var(aval) for aval in slots]
    first = second = None
    if there or slots or any(effects_of(cut.first) for cut in cuts):
        fills = [_fill(slots, each) for each in taken]
        made = [values for _, values in fills]
        eqns = [cut.first + zeros for cut, (zeros, _) in zip(cuts, fills, strict=True)]
        needs = [cut.needs[0] for cut in cuts]
        first = _branches(eqn, eqns, needs, there, [[]] * len(cuts), made)
        first = first.replace(outvars=[*first.outvars, *crossing])
    if here:
        given = [
            [each.get(i) or jex.Var(aval) for i, aval in enumerate(slots)]
            for each in taken
        ]
        needs = [cut.needs[1] for cut in cuts]
        eqns = [cut.second for cut in cuts]
        second = _branches(eqn, eqns, needs, here, given, [[]] * len(cuts))
        second = second.replace(invars=[*second.invars, *crossing])
    return first, second, crossing


def _slots(
    crossing: Sequence[Sequence[jex.Var]],
) -> tuple[list[Any], list[dict[int, jex.Var]]]:
    """Returns the types of the slots and, for each branch, what it puts in which."""
    slots: list[Any] = []
    taken: list[dict[int, jex.Var]] = []
    for values in crossing:
        mine: dict[int, jex.Var] = {}
        for var in values:
            fitting = (i for i, a in enumerate(slots) if a == var.aval)
            at = next((i for i in fitting if i not in mine), len(slots))
            if at == len(slots):
                slots.append(var.aval)
            mine[at] = var
        taken.append(mine)
    return slots, taken


def _fill(
    slots: Sequence[Any], mine: dict[int, jex.Var]
) -> tuple[list[jex.JaxprEqn], list[Any]]:
    """Returns what a branch puts into all slots, and the equations of its zeros."""
    eqns: list[jex.JaxprEqn] = []
    values: list[Any] = []
    for i, aval in enumerate(slots):
        if i in mine:
            values.append(mine[i])
        else:
            zeros = jax.make_jaxpr(lambda a=aval: jax.lax.full(a.shape, 0, a.dtype))()
            eqns += zeros.jaxpr.eqns
            values += zeros.jaxpr.outvars
    return eqns, values


def _branches(
    eqn: jex.JaxprEqn,
    eqns: Sequence[Sequence[jex.JaxprEqn]],
    needs: Sequence[set[jex.Var]],
    outs: Sequence[int],
    given: Sequence[Sequence[jex.Var]],
    made: Sequence[Sequence[Any]],
) -> jex.JaxprEqn:
    """Builds a cond of parts of branches, with the operands that any of them reads."""
    branches = bodies(eqn)
    used = [
        p
        for p in range(len(eqn.invars) - 1)
        if any(b.jaxpr.invars[p] in n for b, n in zip(branches, needs, strict=True))
    ]
    parts = tuple(
        close(
            branch,
            [*(branch.jaxpr.invars[p] for p in used), *given[i]],
            eqns[i],
            [*(branch.jaxpr.outvars[j] for j in outs), *made[i]],
        )
        for i, branch in enumerate(branches)
    )
    return _replaced(
        eqn,
        invars=[eqn.invars[0], *(eqn.invars[1 + p] for p in used)],
        outvars=[eqn.outvars[j] for j in outs],
        params={**eqn.params, "branches": parts},
        effects=frozenset().union(*(part.effects for part in parts)),
    )
