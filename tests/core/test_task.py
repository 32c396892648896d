"""The `2F0` notation."""

import pytest

from rrfp_jax.core import task
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError


def test_notation_is_stage_kind_microbatch():
    assert str(Task(Kind.F, 2, 0)) == "2F0"
    assert task.parse(" 12B345 ") == Task(Kind.B, 12, 345)


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X0", "0f0", "-1F0", "0F0,1F0", "0F0 1"]
)
def test_what_is_no_task_is_refused_by_its_text(text):
    with pytest.raises(ConfigError, match="is not a task") as caught:
        task.parse(text)
    assert repr(text.strip()) in str(caught.value)
    assert "such as 2F0" in str(caught.value)


def test_kinds_are_their_letters_and_hash_alike():
    """Tables keyed by kind are read with the letter as well."""
    assert {Kind.F: 1}["F"] == 1
    assert f"{Kind.B}" == "B"
