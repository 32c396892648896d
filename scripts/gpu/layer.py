"""What splitting the backward of one transformer block costs: FLOPs and time.

FLOPs are XLA's count of the device's programs. Where it does not see the matrix
products, since they are calls of a library, they are those of the same programs
compiled for the CPU.
"""

import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.models.layer import Layer, Shape
from rrfp_jax.models.model import build
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.programs import StagePrograms
from scripts.bench import split_backward
from scripts.bench.split_backward import Compiled, flops
from scripts.gpu import timing
from scripts.gpu.figures import Figure
from scripts.gpu.sizes import Size

FLOPS_LIMIT = 1.02
# Of B's and W's gradients to those of the whole backward: two programs round where
# their own fusions end, by up to an epsilon, and 16 such roundings add up.
ERROR_LIMITS = {"float32": 16 * 2.0**-23, "bfloat16": 16 * 2.0**-7}
SEEN = 0.9  # of the FLOPs that the model's formula counts


def check(size: Size) -> Iterator[Figure | str]:
    """Yields the figures, and what is done before each."""
    layer = build(size.layer, None).layers[1]
    for length in size.layer_tokens:
        yield f"a block on {length} tokens"
        case = _case(size, layer, length)
        split, whole = Compiled(case, True), Compiled(case, False)
        name = f"{length} tokens"
        error = split_backward.relative_error(split.backward(), whole.backward())
        limit = ERROR_LIMITS[size.layer.compute_dtype]
        yield Figure(f"{name}, B + W: worst array's error", error, limit=limit)
        yield from _flops(name, case, split, whole, layer.flops(Shape(1, length, 0)))
        yield from _times(name, split, whole, size)


def _case(size: Size, layer: Layer, length: int) -> split_backward.Case:
    """Returns the block on one row."""
    fn, params = split_backward.unrolled([layer])
    draw = np.random.default_rng(0)
    shape = (1, length, size.layer.width)
    hidden = jnp.asarray(draw.normal(size=shape), size.layer.compute_dtype)
    feed = {
        "positions_BL": np.arange(length, dtype=np.int32)[None],
        "segment_ids_BL": np.ones((1, length), np.int32),
    }
    return split_backward.Case(fn, params, hidden, feed)


def _flops(
    name: str,
    case: split_backward.Case,
    split: Compiled,
    whole: Compiled,
    formula: float,
) -> Iterator[Figure]:
    """Yields what XLA counts, in GFLOP; `formula` is of F."""
    of_split, of_whole, where = split.programs, whole.programs, "device"
    if flops(of_split.forward) < SEEN * formula:
        cpu = placing.mesh_of(jax.devices("cpu")[:1], 1, 1)
        of_split = split_backward.compiled_programs(case, True, cpu)
        of_whole = split_backward.compiled_programs(case, False, cpu)
        where = "cpu"
    f, b, w, both = _counted(of_split, of_whole)
    for part, counted in (("F", f), ("B", b), ("W", w), ("whole backward", both)):
        yield Figure(f"{name}, {part}, {where} program", counted / 1e9, "GFLOP")
    ratio = (b + w) / both
    yield Figure(f"{name}, FLOPs of B + W over whole", ratio, limit=FLOPS_LIMIT)


def _counted(split: StagePrograms, whole: StagePrograms) -> list[float]:
    programs = (split.forward, split.backward, split.weight, whole.backward)
    return [flops(program) for program in programs]


def _times(name: str, split: Compiled, whole: Compiled, size: Size) -> Iterator[Figure]:
    _, kept = split.launch_input_half()
    calls = {
        "F": lambda: split.programs.forward(split.params, split.rest)[-1],
        "B": lambda: split.launch_input_half()[0],
        "W": lambda: split.launch_weight_half(kept),
        "B + W": lambda: split.launch()[1],
        "whole backward": lambda: whole.launch()[1],
    }
    found = timing.rounds(calls, size.repeats)
    for part, taken_s in found.items():
        yield Figure(f"{name}, {part}", statistics.median(taken_s) * 1e3, "ms")
    ratio = timing.ratio(found["B + W"], found["whole backward"])
    yield Figure(f"{name}, time of B + W over whole", ratio, limit=size.time_limit)
