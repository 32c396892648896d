"""What splitting a backward costs: FLOPs, time, memory, compile time; on real stages.

    python scripts/bench/split_backward.py [--json FILE] [--repeats=15]

Stages of the package's own models, compiled as the runtime compiles them: blocks of a
Llama-like and of a GPT-3-like model, unrolled and as a scan over stacked layers, under
each recomputation policy; a ViT with and without its patch embedding (the first stage
of a pipeline, whose input cotangents nobody wants); the head with the loss.

FLOPs are XLA's cost analysis, which on a CPU counts the body of a scan once. Times are
medians of runs that take turns. Bars: (B + W) / whole of 1.02 for FLOPs and 1.10 for
time; three programs over forward and whole backward, 2.2 to trace and compile.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from rrfp_jax import Stage
from rrfp_jax.models import cut
from rrfp_jax.models.config import LanguageConfig, VisionConfig
from rrfp_jax.models.layer import Layer
from rrfp_jax.models.model import build
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.programs import StagePrograms, compile_stage
from rrfp_jax.runtime.stage import flatten, is_inexact
from rrfp_jax.runtime.tracing import Signature, trace_stage

ROWS, LENGTH, NUM_BLOCKS = 4, 128, 4
LLAMA = LanguageConfig(
    vocab_size=512,
    num_layers=NUM_BLOCKS,
    width=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_width=512,
    max_length=LENGTH,
    qk_norm=True,
)
GPT3 = dataclasses.replace(LLAMA, kind="gpt3", num_kv_heads=4, qk_norm=False)
VISION = VisionConfig(
    image_size=(32, 32),
    channels=3,
    patch_size=4,
    width=256,
    num_layers=NUM_BLOCKS,
    num_heads=4,
    mlp_width=1024,
)
POLICIES = {
    "none": lambda fn: fn,
    "dots": lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable),
    "stage": lambda fn: jax.checkpoint(
        fn, policy=jax.checkpoint_policies.nothing_saveable
    ),
}
Function = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A stage and what it is run on."""

    fn: Function
    params: Any
    inputs: Any  # None for a first stage
    feed: Any
    is_loss: bool = False


def unrolled(layers: Sequence[Layer], is_loss: bool = False) -> tuple[Function, Any]:
    """Returns a stage of consecutive layers, and its parameters."""
    run = cut.run(layers)

    def fn(params: Any, inputs: Any, feed: Any) -> Any:
        out = run(params, inputs, feed)
        return out["loss"] if is_loss else out

    keys = jax.random.split(jax.random.key(0), len(layers))
    pairs = zip(layers, keys, strict=True)
    return fn, {layer.name: jax.jit(layer.init)(key) for layer, key in pairs}


def scanned(
    layers: Sequence[Layer], wrap: Callable[[Function], Function]
) -> tuple[Function, Any]:
    """Returns a scan over layers of one kind, and their stacked parameters."""
    _, by_name = unrolled(layers)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *by_name.values())
    apply = wrap(layers[0].apply)

    def fn(params: Any, inputs: Any, feed: Any) -> Any:
        return jax.lax.scan(
            lambda carry, layer: (apply(layer, carry, feed), None), inputs, params
        )[0]

    return fn, stacked


def cases() -> dict[str, Case]:
    """Returns the stages to measure."""
    draw = np.random.default_rng(0)
    text = (ROWS, LENGTH)
    feed = {
        "positions_BL": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "segment_ids_BL": np.ones(text, np.int32),
    }
    hidden = draw.normal(size=(*text, LLAMA.width)).astype(np.float32)
    found = {}
    for name, config in (("llama", LLAMA), ("gpt3", GPT3)):
        layers = build(config, None).layers
        fn, params = unrolled(layers[1:-1])
        for policy, wrap in POLICIES.items():
            found[f"{name}, recompute {policy}"] = Case(wrap(fn), params, hidden, feed)
        for policy, wrap in POLICIES.items():
            fn_of_scan, stacked = scanned(layers[1:-1], wrap)
            found[f"{name} scan, recompute {policy}"] = Case(
                fn_of_scan, stacked, hidden, feed
            )
    layers = build(LLAMA, None).layers
    labels = {
        "labels_BL": draw.integers(0, 512, text).astype(np.int32),
        "mask_BL": np.ones(text, np.float32),
    }
    fn, params = unrolled(layers[-2:], is_loss=True)
    found["llama block and head"] = Case(fn, params, hidden, feed | labels, True)
    vision = build(LLAMA, VISION).towers[0].layers
    images = draw.normal(size=(8, 32, 32, 3)).astype(np.float32)
    patches = draw.normal(size=(8, 64, VISION.width)).astype(np.float32)
    fn, params = unrolled(vision[1:-1])
    found["ViT blocks"] = Case(fn, params, patches, {})
    fn, params = unrolled(vision[:-1])
    found["ViT, first stage"] = Case(fn, params, None, {"images_NHWC": images})
    return found


def compiled_programs(
    case: Case, is_split: bool, rank: placing.RankMesh
) -> StagePrograms:
    """Returns the programs of a case, as the runtime compiles them for a rank."""
    params, layout = flatten(case.params)
    inputs, source = flatten(case.inputs)
    stage = Stage(case.fn)
    signature = Signature(
        params=layout,
        sources=(source,) if inputs else (),
        wants_cotangent=(True,) if inputs else (),
        num_targets=0 if case.is_loss else 1,
        feed=flatten(case.feed)[1],
        has_backward=True,
        is_split=is_split,
        is_loss=case.is_loss,
    )
    traced = trace_stage(stage, signature, stage.trained(case.params))
    return compile_stage(traced, signature, rank, [rank.replicated] * len(params))


class Compiled:
    """A case, compiled with its backward whole or split."""

    def __init__(self, case: Case, is_split: bool) -> None:
        (self.rank,) = placing.make_ranks(1)
        began_s = time.perf_counter()
        self.programs = compiled_programs(case, is_split, self.rank)
        self.compile_s = time.perf_counter() - began_s
        self.params = flatten(case.params)[0]
        arrays = [*flatten(case.inputs)[0], *flatten(case.feed)[0]]
        self.rest = jax.device_put(arrays, self.rank.device)
        outputs, kept, _ = self.programs.forward(self.params, self.rest)
        self.saved = self.programs.saved.of([*self.rest, *outputs, *kept])
        if case.is_loss:
            self.cotangents = [[jnp.float32(1)]]
        else:
            self.cotangents = [[jnp.ones_like(o) for o in outputs if is_inexact(o)]]
        self.grads = [jnp.zeros(p.shape, jnp.float32) for p in self.params]

    def launch(self) -> tuple[Any, Any]:
        """Starts a backward; returns input cotangents, and what is ready last."""
        programs = self.programs
        assert programs.backward is not None
        if programs.weight is None:
            self.grads, onward, flag = programs.backward(
                self.grads, self.params, self.saved, self.cotangents
            )
            return onward, flag
        onward, kept = self.launch_input_half()
        return onward, self.launch_weight_half(kept)

    def launch_input_half(self) -> tuple[Any, Any]:
        """Starts a B; returns the input cotangents and what W needs."""
        assert self.programs.backward is not None
        onward, crossing, _ = self.programs.backward(
            self.params, self.saved, self.cotangents
        )
        pool = [*self.saved, *self.cotangents[0], *crossing]
        return onward, self.programs.kept.of(pool)

    def launch_weight_half(self, kept: Any) -> Any:
        """Starts a W; returns what is ready when it is done."""
        assert self.programs.weight is not None
        self.grads, flag = self.programs.weight(self.grads, self.params, kept)
        return flag

    def backward(self) -> tuple[list[Any], Any]:
        """Runs it all; returns gradients, added up, and input cotangents."""
        onward, flag = self.launch()
        flag.block_until_ready()
        return self.grads, onward

    def seconds(self) -> float:
        """Times one backward."""
        began_s = time.perf_counter()
        self.backward()
        return time.perf_counter() - began_s


def flops(program: Any) -> float:
    """Returns XLA's count."""
    return float(program.cost_analysis()["flops"])


def relative_error(found: Any, expected: Any) -> float:
    """Returns the largest error of any array, over its largest entry.

    An array that is nothing but rounding (the gradient of a key's bias is 0) is
    measured by the largest entry of all.
    """

    def largest(array: Any) -> float:
        return float(jnp.max(jnp.abs(array)))

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    sizes = [(largest(a - b), largest(b)) for a, b in pairs]
    most = max(size for _, size in sizes)
    return max(error / (size if size > 1e-6 * most else most) for error, size in sizes)


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Returns the figures of a case."""
    whole, split = Compiled(case, False), Compiled(case, True)
    error = relative_error(split.backward(), whole.backward())
    pairs = [(split.seconds(), whole.seconds()) for _ in range(repeats)]
    parts = [flops(p) for p in (split.programs.backward, split.programs.weight)]
    saved, kept = split.programs.saved.num_bytes, split.programs.kept.num_bytes
    return {
        "flops_b": parts[0],
        "flops_w": parts[1],
        "flops": sum(parts) / flops(whole.programs.backward),
        "time": statistics.median(a / b for a, b in pairs),
        "compile": split.compile_s / whole.compile_s,
        "saved_mib": saved / 2**20,
        "kept_mib": kept / 2**20,
        "error": error,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=15)
    flags = parser.parse_args()
    found = {}
    print(
        f"{'stage':30} {'B MFLOP':>8} {'W MFLOP':>8} {'FLOPs':>7} {'time':>6} "
        f"{'compile':>8} {'F keeps':>9} {'B keeps':>9} {'error':>8}"
    )
    for name, case in tqdm.tqdm(cases().items(), leave=False, disable=None):
        each = found[name] = measure(case, flags.repeats)
        tqdm.tqdm.write(
            f"{name:30} {each['flops_b'] / 1e6:8.1f} {each['flops_w'] / 1e6:8.1f} "
            f"{each['flops']:7.4f} {each['time']:6.3f} {each['compile']:8.2f} "
            f"{each['saved_mib']:5.2f} MiB {each['kept_mib']:5.2f} MiB "
            f"{each['error']:8.1e}"
        )
    for figure, bar in (("flops", 1.02), ("time", 1.10), ("compile", 2.2)):
        worst = max(found, key=lambda name: found[name][figure])
        middle = statistics.median(each[figure] for each in found.values())
        print(
            f"{figure}: at most {found[worst][figure]:.3f} ({worst}), median "
            f"{middle:.3f}, bar {bar}"
        )
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
