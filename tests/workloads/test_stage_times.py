"""Stage times from dimensions: against figures worked out by hand."""

import dataclasses
import pathlib

import pytest

from rrfp_jax import workload_files
from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.workloads.config import Machine, Variation
from rrfp_jax.workloads.stage_times import Workload

CONFIGS = pathlib.Path(__file__).parents[2] / "configs/bench"
STILL = Variation(compute_cv=0.0, transfer_cv=0.0, image_cv=0.0)


def still(variant, tensor=1, **machine):
    """A workload that does not vary, on a machine of 1 TFLOP/s and 1 GB/s links."""
    config = workload_files.read(CONFIGS / "workloads.py", variant)
    plain = {"tflops": 1.0, "layer_ms": 0.0, "tensor_gb_per_s": 1.0}
    plain |= {"link_gb_per_s": 1.0, "link_ms": 0.0} | machine
    return Workload(
        dataclasses.replace(config, machine=Machine(**plain), variation=STILL), tensor
    )


def graph_of(stages, microbatches=4, **more):
    return graphs.chain(microbatches, placement.one_each(stages), **more)


def test_a_forward_is_the_layers_flops_over_the_rate():
    """GPT-3 Large: 24 blocks, then the head alone is 2 * tokens * width * vocab."""
    tokens, width = 2048, 1536
    maps = 2 * tokens * width * (4 * width + 2 * 6144)
    square = 2 * tokens * tokens * width  # causal: half of 4 t^2 w
    head = 2 * tokens * width * 50_257
    times = still("gpt3_large").times(1)
    assert times.forward_s[0] * 1e12 == pytest.approx(24 * (maps + square) + head)
    assert times.backward_s == times.forward_s == times.weight_s


def test_tensor_parallelism_divides_compute_and_adds_all_reduces():
    one, two = still("gpt3_large").times(1), still("gpt3_large", tensor=2).times(1)
    reduced_s = 24 * 2 * 2 * 2048 * 1536 / 1e9  # two of a block, two bytes a number
    assert two.weight_s[0] == pytest.approx(one.weight_s[0] / 2)
    assert two.forward_s[0] == pytest.approx(one.forward_s[0] / 2 + reduced_s)
    assert two.backward_s == two.forward_s


def test_a_layer_takes_no_less_than_its_launches():
    times = still("gpt3_large", layer_ms=10_000.0).times(1)
    assert times.forward_s[0] == pytest.approx(
        25 * 10
    )  # the embedding computes nothing


def test_a_payload_is_the_residual_stream_in_16_bits():
    times = still("gpt3_large", link_ms=2.0).times(4)
    assert times.transfer_s[0] == pytest.approx(0.002 + 2 * 2048 * 1536 / 1e9)


@pytest.mark.parametrize("tensor", [1, 2])
def test_residuals_are_those_of_a_block_by_its_tokens(tensor):
    graph = graph_of(1, is_split=True)
    kept = still("gpt3_large", tensor).residuals(graph)
    each = (10 + 24 / tensor) * 2048 * 1536 * 24
    assert kept.num_bytes[Kind.F, 0][0] == pytest.approx(each)
    assert kept.num_bytes[Kind.B, 0][0] == pytest.approx(each * 32 / 34, rel=1e-9)
    whole = still("gpt3_large", tensor).residuals(graph_of(1))
    assert whole.num_bytes[Kind.B, 0] == (0, 0, 0, 0)


def test_stages_are_cut_within_towers():
    workload = still("qwen3_1_7b_vit_h")
    times = workload.times(8)
    assert 0 < times.num_vision < 8
    assert max(times.forward_s) < 1.6 * sum(times.forward_s) / 8


def test_images_are_felt_by_the_whole_tower_and_by_nobody_else():
    workload = still("qwen3_1_7b_vit_h")
    varies = dataclasses.replace(STILL, image_cv=0.7)
    many = dataclasses.replace(
        workload, config=dataclasses.replace(workload.config, variation=varies)
    )
    graph = graph_of(8)
    plain, drawn = workload.draw(graph, 3), many.draw(graph, 3)
    tower = range(workload.times(8).num_vision)
    loads = [b / a for a, b in _pairs(plain, drawn, (Kind.F, 0))]
    assert len(set(loads)) == graph.num_microbatches
    for key in plain.compute:
        found = [b / a for a, b in _pairs(plain, drawn, key)]
        assert found == pytest.approx(loads if key[1] in tower else [1.0] * 4)
    for kind, u, v in plain.transfer:
        pairs = zip(plain.transfer[kind, u, v], drawn.transfer[kind, u, v], strict=True)
        expected = loads if min(u, v) in tower else [1.0] * 4
        assert [b / a for a, b in pairs] == pytest.approx(expected)


def _pairs(plain, drawn, key):
    return zip(plain.compute[key], drawn.compute[key], strict=True)


def test_equal_seeds_draw_equal_steps_and_others_do_not():
    config = workload_files.read(CONFIGS / "workloads.py", "llama3_8b_vit_5b")
    workload, graph = Workload(config, 2), graph_of(16)
    assert workload.draw(graph, 1) == workload.draw(graph, 1)
    assert workload.draw(graph, 1) != workload.draw(graph, 2)


def test_a_straggler_is_slow_throughout():
    workload = still("gpt3_large")
    slow = dataclasses.replace(workload, straggler=(2, 3.0))
    graph = graph_of(4)
    for key, each in workload.draw(graph, 0).compute.items():
        factor = 3.0 if key[1] == 2 else 1.0
        expected = [s * factor for s in each]
        assert slow.draw(graph, 0).compute[key] == pytest.approx(expected)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"40 stages .* 26 layers"):
        still("gpt3_large").times(40)
