"""Cost tables as CSV, and each way in which a file can be wrong."""

import pytest

from rrfp_jax.core import graph
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs
from tests.core.instrument import t

CHAIN = graph.chain(3, (0, 1))
GOOD = """\
kind,stage,to,microbatch,seconds
F,0,,*,1
F,1,,*,2
B,0,,*,3
B,1,,*,4
F,0,1,*,0.5
F,0,,2,9
"""


def read(text, of=CHAIN):
    """Reads a table named bad.csv."""
    return costs.from_csv(text, of, "bad.csv")


def test_a_star_is_all_microbatches_and_later_lines_override():
    table = read(GOOD)
    assert [table.compute_s(t(f"0F{j}")) for j in range(3)] == [1.0, 1.0, 9.0]
    assert table.compute_s(t("1B0")) == 4.0


def test_a_transfer_that_is_not_listed_takes_no_time():
    table = read(GOOD)
    assert table.transfer_s(t("0F1"), to=1) == 0.5
    assert table.transfer_s(t("1B1"), to=0) == 0.0


def test_only_tasks_that_exist_need_a_line():
    """Stage 0 is frozen and microbatch 1 skips it: no 0B, no 0F1."""
    of = PipelineGraph(2, 2, ((0, 1),), (0, 1), frozenset({(0, 1)}), frozenset({0}))
    text = "kind,stage,to,microbatch,seconds\nF,1,,*,1\nB,1,,*,1\nF,0,,0,1\n"
    assert read(text, of).compute_s(t("0F0")) == 1.0


@pytest.mark.parametrize(
    "line",
    [
        "X,0,,*,1",  # no such kind
        "F,7,,*,1",  # no such stage
        "F,x,,*,1",
        "F,1,0,*,1",  # the activation goes the other way
        "F,0,x,*,1",
        "F,0,,3,1",  # no such microbatch
        "F,0,,all,1",
        "F,0,,*,fast",
        "F,0,,*",  # short
        "F,0",
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_the_columns(line):
    with pytest.raises(ConfigError, match=r"bad.csv, line 8") as caught:
        read(GOOD + line + "\n")
    assert "Columns: kind (F, B, W), stage, to (empty for a task)" in str(caught.value)


@pytest.mark.parametrize("text", ["", "kind,stage,to,microbatch,seconds\n"])
def test_an_empty_file_misses_the_first_task(text):
    with pytest.raises(ConfigError, match=r"bad.csv gives no duration for 0F0"):
        read(text)


def test_a_missing_task_is_named():
    with pytest.raises(ConfigError, match=r"bad.csv gives no duration for 1B0"):
        read(GOOD.replace("B,1,,*,4\n", "B,1,,2,4\n"))


def test_a_file_with_other_columns_is_refused():
    with pytest.raises(ConfigError, match=r"bad.csv, line 2"):
        read("task,seconds\n0F0,1\n")


def test_a_negative_microbatch_is_refused():
    with pytest.raises(ConfigError, match=r"bad.csv, line 8"):
        read(GOOD + "F,0,,-1,1\n")


@pytest.mark.parametrize("seconds", ["-1", "inf"])
def test_a_duration_that_cannot_be_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"bad.csv, line 8"):
        read(GOOD + f"F,0,,*,{seconds}\n")


def test_blank_lines_count_as_lines():
    with pytest.raises(ConfigError, match=r"bad.csv, line 9"):
        read(GOOD + "\nF,9,,*,1\n")
