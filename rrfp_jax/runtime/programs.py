"""The compiled programs of a stage: forward and backward, ahead of time.

Both are compiled for one signature (shapes, what is differentiated) on one rank. A
program's last result is a flag, whether all it computed is finite: what the executor
polls to learn of the finish (it is never donated), and what names the culprit when a
step is not finite.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.runtime.placing import RankMesh, avals_with
from rrfp_jax.runtime.stage import Layout, is_inexact
from rrfp_jax.runtime.tracing import Arrays, Signature, Traced

Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class StagePrograms:
    """The executables of one stage for one signature.

    Attributes:
      output: layout of the payload, or of (loss, auxiliary outputs).
      forward: (params, rest) -> (outputs, kept, is_finite).
      backward: (accumulators, params, saved, cotangents) -> (accumulators, cotangents
        by wanted source, is_finite); the accumulators are donated. None where the stage
        has no backward for this signature.
      saved: which arrays to keep for the backward: positions in the concatenation of
        `rest`, outputs and kept.
      residual_bytes: of the saved arrays, for one microbatch.
    """

    output: Layout
    forward: Compiled
    backward: Compiled | None
    saved: tuple[int, ...]
    residual_bytes: int


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
        return StagePrograms(traced.output, forward, None, (), 0)
    outputs, kept, _ = forward.out_info
    shardings, kept_shardings, _ = forward.output_shardings
    pool = [
        *rest,
        *avals_with(shardings, outputs),
        *avals_with(kept_shardings, kept),
    ]
    saved = [pool[i] for i in traced.saved]
    backward = _compile_backward(traced, signature, params, saved, rank)
    return StagePrograms(
        traced.output, forward, backward, traced.saved, sum(map(_num_bytes, saved))
    )


def _compile_forward(
    traced: Traced, params: list[Any], rest: list[Any], rank: RankMesh
) -> Any:
    def forward(params: Arrays, rest: Arrays) -> tuple[list[Any], list[Any], Any]:
        outputs, kept = traced.forward(params, rest)
        return outputs, kept, _all_finite(outputs)

    shardings = [rank.of_value(a.shape) for a in traced.output.avals]
    jitted = jax.jit(forward, out_shardings=(shardings, None, rank.replicated))
    return jitted.lower(params, rest).compile()


def _compile_backward(
    traced: Traced,
    signature: Signature,
    params: list[Any],
    saved: list[Any],
    rank: RankMesh,
) -> Any:
    assert traced.backward is not None
    run = traced.backward

    def backward(
        accumulators: Arrays,
        params: Arrays,
        saved: Arrays,
        cotangents: Sequence[Arrays],
    ) -> tuple[Any, Any, Any]:
        summed, onward, new = run(accumulators, params, saved, cotangents)
        return summed, onward, _all_finite(new)

    accumulators = [
        jax.ShapeDtypeStruct(params[i].shape, jnp.float32, sharding=params[i].sharding)
        for i in traced.trained
    ]
    given = _cotangent_avals(traced, signature, rank)
    onward = [
        [rank.of_value(a.shape) for a in source.avals if is_inexact(a)]
        for source, wants in zip(
            signature.sources, signature.wants_cotangent, strict=True
        )
        if wants and source
    ]
    shardings = ([a.sharding for a in accumulators], onward, rank.replicated)
    jitted = jax.jit(backward, donate_argnums=0, out_shardings=shardings)
    return jitted.lower(accumulators, params, saved, given).compile()


def _cotangent_avals(traced: Traced, signature: Signature, rank: RankMesh) -> list[Any]:
    if signature.is_loss:
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=rank.replicated)
        return [[scale]]
    one = _placed(rank, [a for a in traced.output.avals if is_inexact(a)])
    return [one] * signature.num_targets


def _placed(rank: RankMesh, avals: Sequence[Any]) -> list[Any]:
    return avals_with([rank.of_value(a.shape) for a in avals], avals)


def _all_finite(arrays: Arrays) -> Any:
    checks = [jnp.all(jnp.isfinite(a)) for a in arrays if is_inexact(a)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)


def _num_bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)
