"""Facts about a program (jaxpr) that decide where `slicing` cuts it.

Nothing here cuts. What is an equation, for the cut (`kind`)? Which results come from
which operands (`flows`)? Which values may be computed twice (`Analysis.free`), and
which belong to the first half even though no wanted output needs them (`roots`)?
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core import primitives

from rrfp_jax.runtime import jaxprs

# One operand, no arithmetic. A conversion is one too where it does not shrink.
_SHAPE_ONLY = frozenset(
    {
        primitives.bitcast_convert_type_p,
        primitives.broadcast_in_dim_p,
        primitives.convert_element_type_p,
        primitives.copy_p,
        primitives.name_p,
        primitives.reshape_p,
        primitives.rev_p,
        primitives.squeeze_p,
        primitives.stop_gradient_p,
        primitives.transpose_p,
    }
)


_EXTENDED = jax.dtypes.extended


class Treatment(enum.StrEnum):
    """How the cut treats an equation."""

    SCAN = enum.auto()  # its body is cut
    COND = enum.auto()  # its branches are cut
    BARRIER = enum.auto()  # each operand goes its own way
    OPAQUE = enum.auto()  # as a whole, in one half


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of the inputs of a program.

    Attributes:
      free: for each input, whether it is computed from parameters and constants alone.
      late: for each input, whether it is computed from a cotangent.
      chain: whether the first half is to take whatever is not the last step to a
        single output, since no output is wanted of it.
    """

    free: tuple[bool, ...]
    late: tuple[bool, ...]
    chain: bool


def variables(atoms: Iterable[Any]) -> list[jex.Var]:
    """Returns the variables among `atoms`, which may be literals."""
    return [atom for atom in atoms if isinstance(atom, jex.Var)]


def touches_refs(eqn: jex.JaxprEqn) -> bool:
    """Tells whether the effects of `eqn` name its operands: mutable arrays."""
    return any(hasattr(effect, "input") for effect in eqn.effects)


def bodies(eqn: jex.JaxprEqn) -> tuple[jex.ClosedJaxpr, ...]:
    """Returns the programs inside an equation that can be cut: a body or branches."""
    match kind(eqn):
        case Treatment.SCAN:
            return (eqn.params["jaxpr"],)
        case Treatment.COND:
            return tuple(eqn.params["branches"])
    return ()


def kind(eqn: jex.JaxprEqn) -> Treatment:
    """Tells how the cut treats an equation."""
    if touches_refs(eqn):
        return Treatment.OPAQUE
    if eqn.primitive is primitives.scan_p:
        return Treatment.SCAN
    if eqn.primitive is primitives.cond_p and _has_zeros(eqn):
        return Treatment.COND
    return (
        Treatment.BARRIER
        if eqn.primitive is jax.lax.optimization_barrier_p
        else Treatment.OPAQUE
    )


def _has_zeros(eqn: jex.JaxprEqn) -> bool:
    """Tells whether every value in the branches is an array that can be zero.

    A branch gives zeros for what only another branch computes; a random key has none.
    """
    pending = [branch.jaxpr for branch in eqn.params["branches"]]
    while pending:
        jaxpr = pending.pop()
        pending += jex.subjaxprs(jaxpr)
        made = [var.aval for inner in jaxpr.eqns for var in inner.outvars]
        dtypes = [getattr(aval, "dtype", None) for aval in made]
        if any(d is None or jax.numpy.issubdtype(d, _EXTENDED) for d in dtypes):
            return False
    return True


def close(
    closed: jex.ClosedJaxpr,
    invars: Sequence[jex.Var],
    eqns: Sequence[jex.JaxprEqn],
    outvars: Sequence[Any],
) -> jex.ClosedJaxpr:
    """Returns a program of equations of `closed`, with the constants that it uses."""
    read = {*variables(outvars), *(v for eqn in eqns for v in variables(eqn.invars))}
    paired = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    consts = [(var, value) for var, value in paired if var in read]
    jaxpr = closed.jaxpr.replace(
        constvars=[var for var, _ in consts],
        invars=list(invars),
        eqns=list(eqns),
        outvars=list(outvars),
        effects=effects_of(eqns),
        debug_info=jaxprs.without_names(closed.jaxpr),
    )
    return jex.ClosedJaxpr(jaxpr, [value for _, value in consts])


def effects_of(eqns: Iterable[jex.JaxprEqn]) -> frozenset[Any]:
    """Returns all effects of some equations."""
    return frozenset().union(*(eqn.effects for eqn in eqns))


def is_shape_only(eqn: jex.JaxprEqn) -> bool:
    """Tells whether `eqn` only rearranges one array, which is not larger than it."""
    if kind(eqn) is Treatment.BARRIER:
        return True
    if eqn.primitive not in _SHAPE_ONLY or eqn.effects:
        return False
    operands = variables(eqn.invars)
    return len(operands) == 1 and _num_bytes(operands[0]) <= _num_bytes(eqn.outvars[0])


def _num_bytes(var: jex.Var) -> int:
    aval: Any = var.aval
    return int(aval.size * aval.dtype.itemsize)


def flows(eqn: jex.JaxprEqn) -> list[int]:
    """Returns, for each result, a bit mask of the operands it is computed from."""
    match kind(eqn):
        case Treatment.SCAN:
            return _scan_flows(eqn)
        case Treatment.COND:
            masks = [sources(branch.jaxpr) for branch in bodies(eqn)]
            return [1 | _union(each) << 1 for each in zip(*masks, strict=True)]
        case Treatment.BARRIER:
            return [1 << i for i in range(len(eqn.invars))]
    return [(1 << len(eqn.invars)) - 1] * len(eqn.outvars)


def _scan_flows(eqn: jex.JaxprEqn) -> list[int]:
    start, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    masks = sources(eqn.params["jaxpr"].jaxpr)
    # The operands of a scan are in the order of the inputs of its body.
    for j in range(num_carry):
        masks[j] |= 1 << (start + j)
    for _ in range(num_carry):
        for i, mask in enumerate(masks):
            through = [j for j in range(num_carry) if mask >> (start + j) & 1]
            masks[i] = mask | _union(masks[j] for j in through)
    return masks


def sources(jaxpr: jex.Jaxpr) -> list[int]:
    """Returns, for each output, a bit mask of the inputs it is computed from."""
    masks = {var: 1 << i for i, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        operands = [_get(masks, atom) for atom in eqn.invars]
        for var, flow in zip(eqn.outvars, flows(eqn), strict=True):
            masks[var] = _union(m for i, m in enumerate(operands) if flow >> i & 1)
    return [_get(masks, atom) for atom in jaxpr.outvars]


def sinks(jaxpr: jex.Jaxpr) -> dict[jex.Var, int]:
    """Returns, for each variable, a bit mask of the outputs computed from it."""
    masks: dict[jex.Var, int] = {}
    for i, atom in enumerate(jaxpr.outvars):
        if isinstance(atom, jex.Var):
            masks[atom] = _get(masks, atom) | 1 << i
    for eqn in reversed(jaxpr.eqns):
        for var, flow in zip(eqn.outvars, flows(eqn), strict=True):
            for i, atom in enumerate(eqn.invars):
                if flow >> i & 1 and isinstance(atom, jex.Var):
                    masks[atom] = _get(masks, atom) | _get(masks, var)
    return masks


def _get(masks: dict[jex.Var, int], atom: Any) -> int:
    return masks.get(atom, 0) if isinstance(atom, jex.Var) else 0


def _union(masks: Iterable[int]) -> int:
    total = 0
    for mask in masks:
        total |= mask
    return total


class Analysis:
    """What is known of the values of one program.

    Attributes:
      free: the values computed from parameters and constants alone. Either half may
        compute them.
      roots: values that the first half computes although no wanted output needs them.
    """

    def __init__(self, jaxpr: jex.Jaxpr, facts: Facts):
        self._facts = facts
        marked = zip(jaxpr.invars, facts.free, facts.late, strict=True)
        self.free = set(jaxpr.constvars)
        self._late: set[jex.Var] = set()
        for var, is_free, is_late in marked:
            self.free.update([var] if is_free else [])
            self._late.update([var] if is_late else [])
        for eqn in jaxpr.eqns:
            self._follow(eqn)
        self._sinks = sinks(jaxpr) if facts.chain else {}
        self.roots = [*self._shared(jaxpr), *self._early(jaxpr)]

    def kind(self, eqn: jex.JaxprEqn) -> Treatment:
        """Tells how the cut treats `eqn`; what is computed again is not cut."""
        found = kind(eqn)
        is_whole = found is not Treatment.BARRIER and self.is_free(eqn)
        return Treatment.OPAQUE if is_whole else found

    def is_free(self, eqn: jex.JaxprEqn) -> bool:
        """Tells whether both halves may compute `eqn`."""
        return not eqn.effects and self._is_free(eqn.invars)

    def feeds_others(self, var: jex.Var, position: int) -> bool:
        """Tells whether outputs other than the one at `position` come from `var`."""
        return bool(self._sinks.get(var, 0) & ~(1 << position))

    def inside(self, eqn: jex.JaxprEqn) -> tuple[Facts, ...]:
        """Returns the facts about the inputs of the programs inside `eqn`."""
        free = [self._is_free([atom]) for atom in eqn.invars]
        late = [self._is_late(atom) for atom in eqn.invars]
        if kind(eqn) is Treatment.COND:
            inner = Facts(tuple(free[1:]), tuple(late[1:]), self._facts.chain)
            return (inner,) * len(bodies(eqn))
        start, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        for j in range(num_carry):
            # Its first value may be free; the others are the loop's.
            free[start + j] = False
            late[start + j] = eqn.outvars[j] in self._late or late[start + j]
        return (Facts(tuple(free), tuple(late), self._facts.chain),)

    def _follow(self, eqn: jex.JaxprEqn) -> None:
        """Marks the results of an equation whose operands are marked."""
        is_free = self.is_free(eqn)
        for var, flow in zip(eqn.outvars, flows(eqn), strict=True):
            operands = [atom for i, atom in enumerate(eqn.invars) if flow >> i & 1]
            if any(self._is_late(atom) for atom in operands):
                self._late.add(var)
            elif is_free or (
                kind(eqn) is Treatment.BARRIER and self._is_free(operands)
            ):
                self.free.add(var)

    def _is_free(self, atoms: Sequence[Any]) -> bool:
        return all(atom in self.free for atom in variables(atoms))

    def _is_late(self, atom: Any) -> bool:
        return isinstance(atom, jex.Var) and atom in self._late

    def _shared(self, jaxpr: jex.Jaxpr) -> list[jex.Var]:
        """Returns the values from which two or more outputs are computed."""
        made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
        shared = [v for v in made if self._sinks.get(v, 0).bit_count() > 1]
        return [v for v in shared if v not in self.free]

    def _early(self, jaxpr: jex.Jaxpr) -> list[jex.Var]:
        """Returns the last values of a recomputed forward: what a cotangent meets."""
        if not any(self._facts.late):
            return []
        met = list(variables(jaxpr.outvars))
        for eqn in jaxpr.eqns:
            if any(var in self._late for var in eqn.outvars):
                met += variables(eqn.invars)
        known = {*jaxpr.invars, *self.free, *self._late}
        return [var for var in met if var not in known]
