"""The GPU check: its parts that compute nothing, and all of it on a CPU, tiny."""

import json
import math
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from rrfp_jax.errors import ConfigError
from rrfp_jax.models.layer import Shape
from rrfp_jax.models.model import build
from scripts import gpu_check
from scripts.gpu import figures, gradients, processes, sizes
from scripts.gpu.figures import Failure, Figure, Row
from scripts.gpu.processes import Machine

PATIENCE_S = 60.0
H200 = Machine("gpu", "NVIDIA H200", 1, 104.0, "0.11.2")
CPU = Machine("cpu", "cpu", 1, None, "0.10.2")


def test_a_figure_passes_up_to_its_limit_and_no_further():
    assert Figure("error", 1.0, limit=1.0).verdict == "PASS"
    assert Figure("error", 1.1, limit=1.0).verdict == "FAIL"
    assert Figure("rate", 1e9).verdict == "-"


def test_a_figure_that_is_no_number_fails():
    assert Figure("error", math.nan, limit=1.0).verdict == "FAIL"


def test_a_failure_and_a_figure_over_its_limit_fail_the_whole():
    good = Row("layer", Figure("time", 1.0, limit=1.1))
    told = Row("layer", Figure("F", 3.0, "ms"))
    assert figures.has_passed([good, told])
    assert not figures.has_passed([good, Row("host", Failure("it ended"))])
    assert not figures.has_passed([good, Row("layer", Figure("x", 2.0, limit=1.0))])


def test_no_row_at_all_is_no_pass():
    assert not figures.has_passed([])


def test_the_json_is_flat_and_says_what_the_table_says():
    rows = [
        Row("layer", Figure("1024 tokens, time of B + W over whole", 1.2, limit=1.1)),
        Row("copies", Figure("host to device, 16 MiB", 20.0, "GiB/s")),
        Row("pulls", Failure("RuntimeError: no server")),
    ]
    assert figures.flat(rows) == {
        "layer_1024_tokens_time_of_b_and_w_over_whole": 1.2,
        "layer_1024_tokens_time_of_b_and_w_over_whole_verdict": "FAIL",
        "copies_host_to_device_16_mib_gib_per_s": 20.0,
        "pulls_failure": "RuntimeError: no server",
        "passed": False,
    }


def test_every_line_of_the_table_has_its_columns_in_the_same_places():
    rows = {
        "value": figures.heading(),
        "12.35": str(Row("orders", Figure("BF: a step", 12.345678, "ms"))),
        "1e-07": str(Row("gradients", Figure("text: error", 1e-7, limit=1e-5))),
    }
    assert len({line.index(word) for word, line in rows.items()}) == 1


def test_a_gpu_that_is_asked_for_and_not_there_is_the_users_to_mend():
    with pytest.raises(ConfigError, match=r"--mode=gpu, but JAX sees 1 x cpu"):
        gpu_check.chosen("gpu", "full", CPU)


def test_the_machine_decides_the_sizes():
    assert gpu_check.chosen("auto", "full", H200) is sizes.GPU
    assert gpu_check.chosen("auto", "full", CPU) is sizes.CPU
    assert gpu_check.chosen("gpu", "tiny", H200) is sizes.TINY


def test_a_gpu_that_is_too_small_is_told_so_with_what_would_do():
    small = Machine("gpu", "NVIDIA T4", 1, 11.0, "0.11.2")
    with pytest.raises(ConfigError, match=r"need 32 GiB .* may have 11\.0 GiB"):
        gpu_check.chosen("auto", "full", small)
    assert gpu_check.chosen("auto", "tiny", small) is sizes.TINY


def test_the_layer_on_a_gpu_is_one_of_qwen3():
    """50.3 M parameters: 12.6 M in attention, 37.7 M in the MLP, and four norms."""
    layer = build(sizes.GPU.layer, None).layers[1]
    attention = 2048 * (16 + 8 + 8 + 16) * 128
    assert layer.num_params == attention + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    forward = 2 * (attention + 3 * 2048 * 6144) * 1024
    square = 4 * 1024 * 1024 * 16 * 128
    assert layer.flops(Shape(1, 1024, 0)) == forward + square


def test_shares_of_the_time_make_a_whole():
    assert sum(share for _, _, share in processes.CHECKS.values()) == pytest.approx(1)


def test_a_step_as_one_microbatch_counts_its_images_through():
    """Images of two tokens: two in the first microbatch, none in the second."""
    first = {
        "tokens_BL": np.array([[7, 7, 1], [7, 7, 2]]),
        "image_index_BL": np.array([[0, 1, -1], [2, 3, -1]]),
        "images_NHWC": np.zeros((2, 2, 1, 1)),
    }
    second = {"tokens_BL": np.array([[3, 4, 5]])}
    whole = gradients.joined([first, second, first], 2)
    assert whole["image_index_BL"].tolist() == [
        *([0, 1, -1], [2, 3, -1]),
        [-1, -1, -1],
        *([4, 5, -1], [6, 7, -1]),
    ]
    assert len(whole["tokens_BL"]) == 5
    assert len(whole["images_NHWC"]) == 4


def test_the_distance_is_over_all_arrays_together():
    exact = {"a": np.array([3.0, 0.0]), "b": np.array([4.0])}
    found = {"a": np.array([3.0, 0.3]), "b": np.array([4.4])}
    assert gradients.distance(found, exact) == pytest.approx(0.5 / 5)


def two_rows() -> Iterator[Figure]:
    yield Figure("first", 1.0)
    yield Figure("second", 2.0)


def fails_after_a_row() -> Iterator[Figure]:
    yield Figure("first", 1.0)
    raise ValueError("no\nfurther")


def is_killed_after_a_row() -> Iterator[Figure]:
    yield Figure("first", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_after_a_row() -> Iterator[Figure]:
    yield Figure("first", 1.0)
    signal.pause()


@pytest.mark.multiprocess
def test_what_a_check_has_told_stays_however_it_ends():
    first = Figure("first", 1.0)
    ends = {
        two_rows: Figure("second", 2.0),
        fails_after_a_row: Failure("ValueError: no"),
        is_killed_after_a_row: Failure("its process ended with status -9"),
    }
    for run, last in ends.items():
        assert list(processes._told(run, (), PATIENCE_S)) == [first, last]


@pytest.mark.multiprocess
def test_a_check_that_hangs_is_ended_at_its_limit():
    assert list(processes._told(hangs_after_a_row, (), 8.0))[-1] == Failure(
        "took longer than its 8 s"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_checks_pass_on_a_cpu_and_say_so_in_the_json(tmp_path, capfd, monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")  # so that what the script sets ends with the test
    path = tmp_path / "found.json"
    flags = ["--mode=cpu", "--size=tiny", "--budget_s=550", f"--json={path}"]
    status = gpu_check.main(flags)
    output = capfd.readouterr().out
    assert status == 0, output
    found = json.loads(path.read_text())
    assert found["passed"]
    assert not any(isinstance(value, dict | list) for value in found.values())
    for check in processes.CHECKS:
        assert f"\n{check} " in output
        assert any(key.startswith(f"{check}_") for key in found)
