"""The configs of `configs/bench/`: every one is read, every mistake is explained."""

import pathlib

import pytest

from rrfp_jax import workload_files
from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError

CONFIGS = pathlib.Path(__file__).parents[1] / "configs/bench"
PATH = CONFIGS / "workloads.py"


def test_the_six_workloads_have_the_twenty_rows():
    loaded = workload_files.read_all(PATH)
    assert len(loaded) == 6
    assert sum(len(config.runs) for config in loaded) == 20
    assert len({config.machine for config in loaded}) == 1  # one cost model for all
    assert len({config.variation for config in loaded}) == 1


def test_another_tower_can_be_put_before_a_language_model():
    config = workload_files.read(PATH, "qwen3_1_7b_vit_g")
    assert config.model.vision is not None
    assert config.model.vision.num_layers == 40
    assert config.rows == ()


@pytest.mark.parametrize("kind", ["language", "multimodal"])
def test_emulated_runs_take_milliseconds(kind):
    config, workload = workload_files.emulated(CONFIGS / f"emulated_{kind}.py")
    graph = graphs.chain(1, placement.one_each(config.ranks))
    mean_s = workload.scale * workload.times(config.ranks).mean_s
    assert mean_s * 1e3 == pytest.approx(config.task_ms)
    assert workload.draw(graph, 0).compute[Kind.F, 0][0] > 0


def test_an_emulated_run_can_be_cut_for_fewer_ranks():
    config, workload = workload_files.emulated(CONFIGS / "emulated_language.py", 4)
    assert config.ranks == 4
    mean_s = workload.scale * workload.times(4).mean_s
    assert mean_s * 1e3 == pytest.approx(config.task_ms)


@pytest.mark.parametrize(
    ("path", "variant", "words"),
    [
        (CONFIGS / "nowhere.py", "gpt3_large", "cannot be read"),
        (PATH, "gpt5", "'gpt5' is none of gpt3_large"),
        (PATH, "gpt3_large_vit_z", "with a tower of vit_l"),
        (pathlib.Path(workload_files.__file__), "x", "no config of a workload"),
    ],
)
def test_what_is_no_workload_is_refused(path, variant, words):
    with pytest.raises(ConfigError, match=words):
        workload_files.read(path, variant)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("config.machine.tflops = 0.0", "machine.tflops=0.0 is not positive"),
        ("config.machine.link_ms = -1.0", "machine.link_ms=-1.0 is negative"),
        ("config.variation.image_cv = -0.1", "variation.image_cv=-0.1 is negative"),
        ("config.model.tokens = 0", "model.tokens=0 is not positive"),
        ("config.colour = 'red'", "colour"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, line, words):
    copy = tmp_path / "workloads.py"
    copy.write_text(
        PATH.read_text().replace(
            "    return config\n", f"    {line}\n    return config\n", 1
        )
    )
    with pytest.raises(ConfigError, match=words):
        workload_files.read(copy, "gpt3_large")
