"""What a run would cost is shown before it is run, and is what it costs."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from rrfp_jax import inspect as command
from rrfp_jax.core.memory import GIB
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime.figures import KindCost, ProgramCost
from rrfp_jax.train.inspection import Inspection, inspect
from rrfp_jax.train.setup import set_up
from tests.train import tiny
from tests.train.conftest import cheap_compiling, programs  # noqa: F401

ROOT = pathlib.Path(__file__).parents[1]
FIXED = {"pipeline.order": "fixed", "pipeline.hint": "1f1b"}


@pytest.fixture(scope="module")
def found() -> Inspection:
    return inspect(tiny.mm())


def with_images(found: Inspection) -> KindCost:
    pairs = zip(found.buckets, found.kinds, strict=True)
    return next(kind for bucket, kind in pairs if bucket.num_images)


def test_every_kind_of_microbatch_has_its_stages(found: Inspection):
    assert [bucket.num_images for bucket in found.buckets] == [0, 4]
    blind, seeing = found.kinds
    skipped = [names[0].startswith("vision") for names in found.layers]
    assert [stage.forward is None for stage in blind.stages] == skipped
    assert all(stage.forward for stage in seeing.stages)
    assert seeing.flops > blind.flops
    tied = 260 * 16  # in the first and in the last stage of the language model
    total = sum(stage.num_params for stage in seeing.stages)
    assert total == found.num_params + tied


def test_split_and_whole_backward_do_about_the_same_work(found: Inspection):
    for stage in with_images(found).stages:
        assert stage.backward
        assert stage.weight
        assert stage.whole
        assert stage.split_ratio == pytest.approx(1, abs=0.3)
        assert stage.saved_bytes > 0
        assert stage.kept_bytes > 0
        assert stage.whole.argument_bytes >= stage.saved_bytes
        assert stage.weight.alias_bytes == 4 * stage.num_params


def test_a_program_allocates_what_is_temporary_and_what_is_new():
    program = ProgramCost(
        0, 0, argument_bytes=7, output_bytes=5, alias_bytes=4, temp_bytes=2
    )
    assert program.allocated_bytes == 2 + 5 - 4


@pytest.mark.parametrize("split", ["as_needed", "always"])
def test_the_foretold_peak_of_1f1b_is_that_of_a_step(split: str):
    config = tiny.mm({**FIXED, "pipeline.split": split})
    found = inspect(config)
    live = tiny.Live(config, is_compiled=False)
    seeing = next(m for m in live.next_batch() if m.bucket.num_images)
    result = live.forward_backward([seeing] * 4)
    live.close()
    ranks = with_images(found).ranks
    assert result.trace.peak_bytes() == [rank.fixed_1f1b for rank in ranks]
    assert [rank.at_limit for rank in ranks] == [4 * rank.one for rank in ranks]
    assert found.is_split == (split == "always")


def test_the_smallest_limit_is_accepted_and_a_byte_less_is_not(found: Inspection):
    def limited(num_bytes: int) -> Any:
        return tiny.mm({"pipeline.memory_limit_gb": num_bytes / GIB})

    set_up(limited(found.smallest_limit)).data.train.close()
    with pytest.raises(ConfigError, match="memory_limit_gb"):
        set_up(limited(found.smallest_limit - 1))
    assert inspect(limited(1)).smallest_limit == found.smallest_limit


def test_what_is_not_trained_has_no_backward_and_shows_as_a_dash():
    frozen = {"model.frozen": ("vision/", "projector", "language/block")}
    counts = {"pipeline.layer_counts": (3, 1, 1, 1)}
    found = inspect(tiny.mm({**frozen, **counts}))
    vision, _, block, _ = with_images(found).stages
    assert vision.forward
    assert vision.backward is vision.weight is vision.whole is None
    assert block.backward  # for the embedding
    assert block.backward == block.whole
    assert block.weight is block.split_ratio is None
    lines = command.to_text(found).splitlines()
    at = lines.index("2 rows of 48 tokens, 4 images")
    assert lines[at + 3].split()[3:5] == ["3:", "patch_embed..projector"]
    assert lines[at + 3].split().count("-") == 12
    assert lines[at + 5].split().count("-") == 5


def test_a_placement_without_1f1b_has_no_peak_of_it():
    ranks = {"pipeline.num_ranks": 2, "pipeline.placement": "v_shaped"}
    found = inspect(tiny.mm(ranks))
    assert [stage.rank for stage in with_images(found).stages] == [0, 1, 1, 0]
    assert [rank.fixed_1f1b for rank in with_images(found).ranks] == [None, None]
    text = command.to_text(found)
    table = text[text.index("Residuals by rank") :].splitlines()
    assert table[3].split()[2] == "-"


def test_the_text_has_a_line_a_stage_a_line_a_rank_and_a_summary(found: Inspection):
    lines = command.to_text(found).splitlines()
    assert lines[0] == "2 rows of 48 tokens"
    assert lines[2].split()[:4] == ["stage", "rank", "layers", "params"]
    assert [line.split()[0] for line in lines[3:7]] == ["0", "1", "2", "3"]
    assert lines[7].startswith("F + B + W: ")
    assert lines[-2].startswith(f"{found.num_params:,} parameters")
    assert lines[-1].startswith("smallest pipeline.memory_limit_gb: 0.000")


def test_the_shown_smallest_limit_is_enough(found: Inspection):
    shown = command.to_text(found).splitlines()[-1].split()[2]
    assert int(float(shown) * GIB) >= found.smallest_limit


def test_the_json_has_all_figures(found: Inspection):
    read = json.loads(command.to_json(found))
    assert read["layers"] == [list(names) for names in found.layers]
    assert read["smallest_limit"] == found.smallest_limit
    kind = read["kinds"][1]
    assert kind["bucket"] == {"rows": 2, "length": 48, "num_images": 4}
    stage = found.kinds[1].stages[1]
    assert stage.forward
    assert kind["stages"][1]["forward"]["flops"] == stage.forward.flops
    assert kind["stages"][1]["kept_bytes"] == stage.kept_bytes
    assert kind["imbalance"] == found.kinds[1].imbalance


@pytest.mark.parametrize(
    ("number", "base", "text"),
    [
        (None, 1000, "-"),
        (0, 1000, "0"),
        (999, 1000, "999"),
        (1234, 1000, "1.23k"),
        (12_345_678, 1000, "12.3M"),
        (999_700, 1000, "1.00M"),
        (1000, 1024, "0.98Ki"),
        (1536, 1024, "1.50Ki"),
        (340 * 1024, 1024, "340Ki"),
        (3 * 2**30, 1024, "3.00Gi"),
    ],
)
def test_numbers_are_short(number: float | None, base: int, text: str):
    assert command._short(number, base) == text


def start(*flags: str, folder: pathlib.Path) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "rrfp_jax.inspect", *flags]
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=False,
        timeout=250,
    )


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_only_the_json(tmp_path: pathlib.Path):
    config = f"--config={ROOT}/configs/mm.py:small"
    file = tmp_path / "figures.json"
    ran = start(config, f"--json={file}", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "2 rows of 40 tokens, 4 images" in ran.stdout
    assert "compile split" in ran.stderr
    assert json.loads(file.read_text())["num_params"] == 32_032
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.pipeline.num_ranks=9"], "9 stages for 2 towers"),
        (["--json=gone/figures.json"], "--json=gone/figures.json is in a folder"),
    ],
)
def test_the_command_ends_a_mistake_with_one_message_and_status_2(
    flags: list[str], message: str, tmp_path: pathlib.Path
):
    ran = start(f"--config={ROOT}/configs/mm.py:small", *flags, folder=tmp_path)
    assert ran.returncode == 2, ran.stderr
    assert f"ConfigError: {message}" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not ran.stdout
