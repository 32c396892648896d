"""The compiled programs of a stage: F, B and W, ahead of time.

All are compiled for one signature (shapes, what is differentiated, whether the backward
is split) on one rank. A program's last result is a flag, whether all it computed is
finite: what the executor polls to learn of the finish (it is never donated), and what
names the culprit when a step is not finite.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.runtime.placing import RankMesh, avals_with
from rrfp_jax.runtime.split_backward import SplitBackward, split_backward
from rrfp_jax.runtime.stage import Layout, is_inexact
from rrfp_jax.runtime.tracing import Arrays, Signature, Traced
from rrfp_jax.runtime.twins import compile_lowered

Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one task keeps for another on its rank.

    Attributes:
      positions: of the arrays, in a pool that the task's program defines.
      num_bytes: of them, on each device of the rank.
    """

    positions: tuple[int, ...] = ()
    num_bytes: int = 0

    def of(self, pool: Sequence[Any]) -> list[Any]:
        """Returns the arrays to keep."""
        return [pool[i] for i in self.positions]


@dataclasses.dataclass(frozen=True)
class StagePrograms:
    """The executables of one stage for one signature.

    Attributes:
      output: layout of the payload, or of (loss, auxiliary outputs).
      forward: (params, rest) -> (outputs, kept, is_finite).
      backward: None where the stage has no backward for this signature. Whole:
        (accumulators, params, saved, cotangents) -> (accumulators, cotangents by wanted
        source, is_finite); the accumulators are donated. Split:
        (params, saved, cotangents) -> (cotangents by wanted source, crossing values,
        is_finite).
      weight: (accumulators, params, kept) -> (accumulators, is_finite); the
        accumulators are donated. None where the backward is whole.
      saved: of F for B: in the concatenation of `rest`, outputs and kept.
      kept: of B for W: in that of saved, all cotangents and crossing values.
    """

    output: Layout
    forward: Compiled
    backward: Compiled | None = None
    weight: Compiled | None = None
    saved: Kept = Kept()
    kept: Kept = Kept()


def compile_stage(
    traced: Traced,
    signature: Signature,
    rank: RankMesh,
    param_shardings: Sequence[jax.sharding.Sharding],
) -> StagePrograms:
    """Lowers and compiles the programs of a traced stage. Thread-safe.

    Args:
      traced: the stage's functions.
      signature: what they were traced for.
      rank: where they run.
      param_shardings: of each parameter leaf.
    """
    params = avals_with(param_shardings, signature.params.avals)
    rest = _placed(rank, signature.avals[len(params) :])
    forward = _compile_forward(traced, params, rest, rank)
    if traced.backward is None:
        return StagePrograms(traced.output, forward)
    outputs, kept, _ = _results(forward)
    pool = [*rest, *outputs, *kept]
    saved = [pool[i] for i in traced.saved]
    programs = StagePrograms(
        traced.output, forward, saved=Kept(traced.saved, _num_bytes(saved))
    )
    given = [_placed(rank, each) for each in traced.cotangent_avals(signature)]
    builder = _Backward(traced, signature, params, saved, given, rank)
    if not signature.is_split:
        return dataclasses.replace(programs, backward=builder.whole())
    halves = split_backward(traced, signature)
    backward = builder.input_half(halves)
    _, crossing, _ = _results(backward)
    pool = [*saved, *(x for each in given for x in each), *crossing]
    kept = [pool[i] for i in halves.kept]
    return dataclasses.replace(
        programs,
        backward=backward,
        weight=builder.weight_half(halves, kept),
        kept=Kept(halves.kept, _num_bytes(kept)),
    )


def _compile_forward(
    traced: Traced, params: list[Any], rest: list[Any], rank: RankMesh
) -> Any:
    def forward(params: Arrays, rest: Arrays) -> tuple[list[Any], list[Any], Any]:
        outputs, kept = traced.forward(params, rest)
        return outputs, kept, _all_finite(outputs)

    shardings = [rank.of_value(a.shape) for a in traced.output.avals]
    jitted = jax.jit(forward, out_shardings=(shardings, None, rank.replicated))
    return compile_lowered(jitted.lower(params, rest), rank.mesh)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """Compiles the backward of a stage, whole or in two."""

    traced: Traced
    signature: Signature
    params: list[Any]
    saved: list[Any]
    given: list[list[Any]]
    rank: RankMesh

    @property
    def accumulators(self) -> list[Any]:
        """Where the gradients of the trained parameters add up."""
        trained = [self.params[i] for i in self.traced.trained]
        return [
            jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding)
            for p in trained
        ]

    @property
    def onward(self) -> list[Any]:
        """Where the cotangents for each wanted source lie."""
        pairs = zip(self.signature.sources, self.signature.wants_cotangent, strict=True)
        return [
            [self.rank.of_value(a.shape) for a in source.avals if is_inexact(a)]
            for source, wants in pairs
            if wants and source
        ]

    def whole(self) -> Any:
        """Returns input and weight gradients in one program."""
        run = self.traced.backward
        assert run is not None

        def backward(
            accumulators: Arrays,
            params: Arrays,
            saved: Arrays,
            cotangents: Sequence[Arrays],
        ) -> tuple[Any, Any, Any]:
            grads, onward = run(params, saved, cotangents)
            flat = [x for each in onward for x in each]
            return _added(accumulators, grads), onward, _all_finite([*grads, *flat])

        accumulators = self.accumulators
        where = [a.sharding for a in accumulators]
        shardings = (where, self.onward, self.rank.replicated)
        jitted = jax.jit(backward, donate_argnums=0, out_shardings=shardings)
        lowered = jitted.lower(accumulators, self.params, self.saved, self.given)
        return compile_lowered(lowered, self.rank.mesh)

    def input_half(self, halves: SplitBackward) -> Any:
        """Returns the program of B."""

        def backward(
            params: Arrays, saved: Arrays, cotangents: Sequence[Arrays]
        ) -> tuple[Any, Any, Any]:
            onward, crossing = halves.backward(params, saved, cotangents)
            sent = [x for each in onward for x in each]
            return onward, crossing, _all_finite(sent)

        shardings = (self.onward, None, self.rank.replicated)
        jitted = jax.jit(backward, out_shardings=shardings)
        lowered = jitted.lower(self.params, self.saved, self.given)
        return compile_lowered(lowered, self.rank.mesh)

    def weight_half(self, halves: SplitBackward, kept: list[Any]) -> Any:
        """Returns the program of W."""

        def weight(
            accumulators: Arrays, params: Arrays, kept: Arrays
        ) -> tuple[Any, Any]:
            grads = halves.weight(params, kept)
            return _added(accumulators, grads), _all_finite(grads)

        accumulators = self.accumulators
        shardings = ([a.sharding for a in accumulators], self.rank.replicated)
        jitted = jax.jit(weight, donate_argnums=0, out_shardings=shardings)
        lowered = jitted.lower(accumulators, self.params, kept)
        return compile_lowered(lowered, self.rank.mesh)


def _added(accumulators: Arrays, grads: Arrays) -> list[Any]:
    pairs = zip(accumulators, grads, strict=True)
    return [total + grad.astype(total.dtype) for total, grad in pairs]


def _results(compiled: Any) -> Any:
    """Returns the results of a program with their shardings, in its own structure."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        compiled.out_info,
        compiled.output_shardings,
    )


def _placed(rank: RankMesh, avals: Sequence[Any]) -> list[Any]:
    return avals_with([rank.of_value(a.shape) for a in avals], avals)


def _all_finite(arrays: Arrays) -> Any:
    checks = [jnp.all(jnp.isfinite(a)) for a in arrays if is_inexact(a)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)


def _num_bytes(avals: Sequence[Any]) -> int:
    """Returns the bytes of placed arrays on each device."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in avals
    )
