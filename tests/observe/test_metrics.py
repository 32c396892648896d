"""Metrics survive crashes and resumption: every step once, every line valid JSON."""

import json
import math
import struct

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from rrfp_jax.observe import metrics


def lines_of(workdir):
    return [
        json.loads(line)
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]


def board_of(workdir):
    """The (step, tag, value) of every TensorBoard event, oldest file first."""
    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            content = content[16 + length :]
    return found


def test_every_line_is_there_before_the_next_one_is_written(tmp_path):
    with metrics.MetricsWriter(tmp_path / "new" / "run") as writer:
        writer.write(1, {"loss": 2.5, "tokens": 128})
        writer.write(2, {"loss": np.float32(1.5)})
        assert lines_of(tmp_path / "new" / "run") == [
            {"step": 1, "loss": 2.5, "tokens": 128},
            {"step": 2, "loss": 1.5},
        ]
    assert board_of(tmp_path / "new" / "run") == [
        (1, "loss", 2.5),
        (1, "tokens", 128.0),
        (2, "loss", 1.5),
    ]


def test_what_is_not_finite_is_null(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": math.nan, "norm": math.inf, "rate": -math.inf})
    assert lines_of(tmp_path) == [{"step": 1, "loss": None, "norm": None, "rate": None}]


def test_a_resumed_run_has_every_step_once(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": float(step)})
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.rewind(3)
        writer.write(4, {"loss": 40.0})
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "tensorboard",
    ]


def test_rewinding_also_works_in_mid_run_and_on_nothing(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.rewind(0)
        writer.write(1, {"loss": 1.0})
        writer.rewind(0)
        writer.write(1, {"loss": 2.0})
    assert lines_of(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_a_line_torn_by_a_crash_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(2, {"loss": 2.0})
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_the_name_step_is_taken(tmp_path):
    with (
        metrics.MetricsWriter(tmp_path) as writer,
        pytest.raises(ValueError, match="'step'"),
    ):
        writer.write(1, {"step": 2.0})
