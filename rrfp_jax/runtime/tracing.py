"""Tracing a stage into a forward with residuals and a backward that uses them.

The forward is traced once through `jax.vjp`. What the backward needs of it, the
*residuals*, comes from one of five places, and only the last costs memory of its own:

* a parameter: passed again, by reference;
* a stage input or feed: kept alive, by reference;
* an output: kept alive, by reference;
* a function of parameters alone (a cast to bfloat16, a transpose): computed again in
  the backward, since a copy per microbatch would cost more than the parameters;
* anything else: an extra output of the forward.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import jaxprs
from rrfp_jax.runtime.stage import Layout, Stage, Tree, flatten, is_inexact

Arrays = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Signature:
    """What the programs of a stage depend on: one is compiled for each distinct value.

    Attributes:
      params: layout of the stage's parameters.
      sources: layout of each declared in-edge's payload; None where it is skipped.
      wants_cotangent: for each in-edge, whether its source waits for a cotangent.
      num_targets: out-edges along which a cotangent comes back.
      feed: layout of the microbatch's feed.
      has_backward: whether anything will be differentiated.
      is_split: whether the backward is split; only of stages that have a W.
      is_loss: whether this is the last stage.
    """

    params: Layout
    sources: tuple[Layout | None, ...]
    wants_cotangent: tuple[bool, ...]
    num_targets: int
    feed: Layout
    has_backward: bool
    is_split: bool
    is_loss: bool

    @property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """All array arguments: parameters, inputs, feed."""
        inputs = [a for source in self.sources if source for a in source.avals]
        return (*self.params.avals, *inputs, *self.feed.avals)

    def call(self, stage: Stage, arrays: Arrays) -> Tree:
        """Calls the stage's function on the flat arguments."""
        rest = iter(arrays)

        def take(layout: Layout) -> Tree:
            return layout.unflatten([next(rest) for _ in layout.avals])

        params = take(self.params)
        inputs = tuple(take(s) if s else None for s in self.sources)
        single = inputs[0] if inputs else None
        return stage.fn(params, inputs if len(inputs) > 1 else single, take(self.feed))


@dataclasses.dataclass(frozen=True)
class Traced:
    """A stage as flat functions, ready to be compiled.

    Attributes:
      output: layout of the payload, or of (loss, auxiliary outputs).
      forward: (params, rest) -> (outputs, kept). `rest` is inputs, then feed.
      backward: (params, saved, cotangents) -> (gradients of the trained parameters,
        cotangents for each wanted source). None where there is none. The cotangents
        given are one list for each out-edge; for the loss stage, one list with its
        scale.
      saved: which arrays to keep for the backward: positions in the concatenation of
        `rest`, outputs and kept.
      saved_avals: shapes and dtypes of those.
      trained: positions of the trained parameters.
    """

    output: Layout
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    saved: tuple[int, ...]
    saved_avals: tuple[jax.ShapeDtypeStruct, ...]
    trained: tuple[int, ...]

    @property
    def num_saved_bytes(self) -> int:
        """Bytes of what is kept for the backward, on all devices together."""
        return sum(aval.size * aval.dtype.itemsize for aval in self.saved_avals)

    def cotangent_avals(self, signature: Signature) -> list[list[jax.ShapeDtypeStruct]]:
        """Returns what the backward is given: one list for each out-edge."""
        if signature.is_loss:
            return [[jax.ShapeDtypeStruct((), jnp.float32)]]
        one = [aval for aval in self.output.avals if is_inexact(aval)]
        return [one] * signature.num_targets


def trace_stage(stage: Stage, signature: Signature, trained: Sequence[bool]) -> Traced:
    """Traces the programs of a stage.

    Args:
      stage: the function.
      signature: what it is called on.
      trained: for each parameter leaf, whether it is trained.

    Raises:
      ConfigError: the last stage does not return a scalar loss.
    """
    found: list[Layout] = []

    def run(*arrays: Any) -> list[Any]:
        out = signature.call(stage, arrays)
        leaves, layout = flatten(_with_loss(out) if signature.is_loss else out)
        found.append(layout)
        return leaves

    plain = jaxprs.trace(run, *signature.avals)
    output = found[-1]
    trained_at = tuple(i for i, is_trained in enumerate(trained) if is_trained)
    if not signature.has_backward:
        inlined = jaxprs.inline(plain)

        def forward(params: Arrays, rest: Arrays) -> tuple[list[Any], list[Any]]:
            return inlined(*params, *rest), []

        return Traced(output, forward, None, (), (), trained_at)
    wanted_at = _wanted(signature)
    split = _Residuals.find(
        plain, signature, output, (*trained_at, *sum(wanted_at, ()))
    )
    counts = [len(trained_at), *map(len, wanted_at)]
    return Traced(
        output,
        split.forward(),
        split.backward(counts),
        split.saved,
        split.saved_avals(signature),
        trained_at,
    )


def grouped(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Cuts `values` into lists of these lengths."""
    rest = iter(values)
    return [[next(rest) for _ in range(count)] for count in counts]


def _with_loss(out: Tree) -> tuple[jax.Array, Tree]:
    """Checks and normalises what the last stage returns."""
    loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    if not hasattr(loss, "shape") or loss.shape != () or not is_inexact(loss):
        raise ConfigError(
            "the last stage must return a scalar loss, or (loss, auxiliary outputs); "
            f"it returned {jax.tree.map(jax.typeof, out)}.\n"
            "  Sum the loss over the microbatch."
        )
    return loss, aux


def _wanted(signature: Signature) -> list[tuple[int, ...]]:
    """Returns the positions of the inexact leaves of each source that waits."""
    at, wanted = len(signature.params.avals), []
    for source, wants in zip(signature.sources, signature.wants_cotangent, strict=True):
        avals = source.avals if source else ()
        if wants:
            leaves = enumerate(avals, start=at)
            wanted.append(tuple(i for i, aval in leaves if is_inexact(aval)))
        at += len(avals)
    return wanted


@dataclasses.dataclass(frozen=True)
class _Residuals:
    """The differentiated stage, and where each residual comes from."""

    closed: jex.ClosedJaxpr  # flat arguments -> outputs, residuals
    treedef: jax.tree_util.PyTreeDef  # of the vjp function
    num_outputs: int
    kept: tuple[jex.Var, ...]  # residuals that are extra outputs
    saved: tuple[int, ...]
    # For each residual: ("saved", i), ("again", i) or ("const", value). A parameter is
    # "computed again" by naming it.
    origins: tuple[tuple[str, Any], ...]
    again: jex.ClosedJaxpr  # parameters -> what is computed again
    is_loss: bool

    @classmethod
    def find(
        cls,
        plain: jex.ClosedJaxpr,
        signature: Signature,
        output: Layout,
        diff_at: tuple[int, ...],
    ) -> "_Residuals":
        """Differentiates with respect to the arguments at `diff_at`."""
        inlined = jaxprs.inline(plain)
        found = []
        differentiable = [is_inexact(aval) for aval in output.avals]
        if signature.is_loss:
            differentiable = [i == 0 for i in range(len(output.avals))]

        def run(*flat: Any) -> tuple[list[Any], list[Any]]:
            def inner(diff: list[Any]) -> tuple[list[Any], list[Any]]:
                args = list(flat)
                for i, value in zip(diff_at, diff, strict=True):
                    args[i] = value
                outs = inlined(*args)
                return [o for o, d in zip(outs, differentiable, strict=True) if d], outs

            _, pullback, outs = jax.vjp(inner, [flat[i] for i in diff_at], has_aux=True)
            leaves, treedef = jax.tree.flatten(pullback)
            found.append(treedef)
            return outs, leaves

        closed = jaxprs.trace(run, *signature.avals)
        num_outputs, num_params = len(output.avals), len(signature.params.avals)
        kept, saved, origins, again = _classify(closed, num_outputs, num_params)
        return cls(
            closed,
            found[-1],
            num_outputs,
            kept,
            saved,
            origins,
            again,
            signature.is_loss,
        )

    def saved_avals(self, signature: Signature) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shapes and dtypes of what is kept for the backward."""
        rest = signature.avals[len(signature.params.avals) :]
        outputs = self.closed.jaxpr.outvars[: self.num_outputs]
        pool = [*rest, *(var.aval for var in [*outputs, *self.kept])]
        return tuple(
            jax.ShapeDtypeStruct(pool[i].shape, pool[i].dtype) for i in self.saved
        )

    def forward(self) -> Callable[..., Any]:
        """Returns (params, rest) -> (outputs, kept)."""
        outvars = [*self.closed.jaxpr.outvars[: self.num_outputs], *self.kept]
        run = jex.jaxpr_as_fun(
            jaxprs.with_outputs(self.closed, outvars, keep_effects=True)
        )

        def forward(params: Arrays, rest: Arrays) -> tuple[list[Any], list[Any]]:
            results = run(*params, *rest)
            return list(results[: self.num_outputs]), list(results[self.num_outputs :])

        return forward

    def backward(self, counts: Sequence[int]) -> Callable[..., Any]:
        """Returns (params, saved, cotangents) -> (gradients, onward cotangents).

        Args:
          counts: of the gradients, then of the cotangents for each wanted source.
        """
        again = jex.jaxpr_as_fun(self.again)

        def backward(
            params: Arrays, saved: Arrays, cotangents: Sequence[Arrays]
        ) -> tuple[list[Any], list[list[Any]]]:
            recomputed = again(*params) if self.again.jaxpr.outvars else []
            places = {"saved": saved, "again": recomputed}
            leaves = [
                places[place][i] if place in places else i for place, i in self.origins
            ]
            pullback = jax.tree.unflatten(self.treedef, leaves)
            given = [self._total(each) for each in zip(*cotangents, strict=True)]
            if self.is_loss:
                given = [given[0].astype(self.closed.jaxpr.outvars[0].aval.dtype)]
            (found,) = pullback(given)
            grads, *onward = grouped(found, counts)
            return grads, onward

        return backward

    @staticmethod
    def _total(each: Sequence[Any]) -> Any:
        """Adds the cotangents of one output, in the order of its edges."""
        total = each[0]
        for other in each[1:]:
            total = total + other
        return total


def _classify(
    closed: jex.ClosedJaxpr, num_outputs: int, num_params: int
) -> tuple[Any, ...]:
    """Finds where each residual comes from: (kept, saved, origins, again)."""
    jaxpr = closed.jaxpr
    params, rest = jaxpr.invars[:num_params], jaxpr.invars[num_params:]
    outputs = jaxpr.outvars[:num_outputs]
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    of_data = jaxprs.depends_on(jaxpr, rest)
    # Position in the concatenation of rest, outputs and kept; the first place wins.
    place: dict[Any, int] = {}
    for i, var in enumerate([*rest, *outputs]):
        if isinstance(var, jex.Var):
            place.setdefault(var, i)
    kept: list[Any] = []
    again: dict[Any, int] = {}
    saved: dict[int, int] = {}
    origins: list[tuple[str, Any]] = []
    for var in jaxpr.outvars[num_outputs:]:
        if isinstance(var, jex.Literal):
            origins.append(("const", var.val))
        elif var in consts:
            origins.append(("const", consts[var]))
        elif var not in of_data:
            origins.append(("again", again.setdefault(var, len(again))))
        else:
            if var not in place:
                place[var] = len(rest) + num_outputs + len(kept)
                kept.append(var)
            origins.append(("saved", saved.setdefault(place[var], len(saved))))
    sliced = jaxprs.with_outputs(closed, list(again), keep_effects=False)
    only = sliced.jaxpr.replace(
        invars=list(params), debug_info=jaxprs.without_names(sliced.jaxpr)
    )
    recompute = jex.ClosedJaxpr(only, sliced.consts)
    return tuple(kept), tuple(saved), tuple(origins), recompute
