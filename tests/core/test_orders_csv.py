"""Orders as CSV: the round trip, and each way in which a file can be wrong."""

import dataclasses

import pytest
from hypothesis import given, settings

from rrfp_jax.core import graph, order_csv, orders
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError
from tests.core import strategies
from tests.core.instrument import ts

CHAIN = graph.chain(1, (0, 1))


def read(text, of=CHAIN):
    """Reads an order file named bad.csv."""
    return order_csv.from_csv(text, of, "bad.csv")


def test_format_is_a_line_a_rank():
    assert order_csv.to_csv([ts("0F0 0B0"), ts("1F0 1B0")]) == "0F0,0B0\n1F0,1B0\n"


def test_empty_entries_spaces_and_line_ends_are_skipped():
    """PyTorch writes an empty entry for an idle slot."""
    found = read("0F0,,0B0,\r\n ,1F0, 1B0 ")
    assert found == [tuple(ts("0F0 0B0")), tuple(ts("1F0 1B0"))]


@given(strategies.graphs())
@settings(derandomize=True, deadline=None)
def test_what_is_written_reads_the_same_less_what_the_step_skips(of):
    """A file is for every step of a run; each step has images in other microbatches."""
    whole = dataclasses.replace(of, skipped=frozenset())
    text = order_csv.to_csv(orders.gpipe(whole))
    assert order_csv.from_csv(text, whole, "x.csv") == orders.gpipe(whole)
    assert order_csv.from_csv(text, of, "x.csv") == orders.gpipe(of)


SPLIT = dataclasses.replace(CHAIN, is_split=True)


def test_an_input_gradient_is_an_i_as_pytorch_writes_it():
    orders_of = [tuple(ts("0F0 0B0 0W0")), tuple(ts("1F0 1B0 1W0"))]
    text = order_csv.to_csv(orders_of)
    assert text == "0F0,0I0,0W0\n1F0,1I0,1W0\n"
    assert order_csv.is_split(text)
    assert read(text, SPLIT) == orders_of


def test_a_b_beside_an_i_is_a_whole_backward():
    """PyTorch's zero-bubble orders mix them."""
    found = read("0F0,0B0\n1F0,1I0,1W0\n", SPLIT)
    assert found == [tuple(ts("0F0 0B0 0W0")), tuple(ts("1F0 1B0 1W0"))]


def test_a_file_without_i_orders_a_split_backward_too():
    text = "0F0,0B0\n1F0,1B0\n"
    assert not order_csv.is_split(text)
    assert read(text, SPLIT)[0] == tuple(ts("0F0 0B0 0W0"))


def test_the_policy_splits_the_backward_for_a_file_that_does(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert Policy(str(path)).is_split
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert not Policy(str(path)).is_split


def test_a_file_that_splits_is_no_order_of_a_whole_backward():
    with pytest.raises(ConfigError, match=r"bad.csv, line 1 lists, .* 0W0"):
        read("0F0,0I0,0W0\n1F0,1I0,1W0\n")


def test_a_rank_without_work_in_this_step_has_an_empty_order():
    """C15 (c): no image anywhere, yet the file lists the tower."""
    of = PipelineGraph(3, 1, ((0, 2), (1, 2)), (0, 1, 2), frozenset({(0, 0)}))
    assert read("0F0,0B0\n1F0,1B0\n2F0,2B0\n", of)[0] == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "bad.csv orders 1 ranks; the pipeline has 2"),
        ("0F0,0B0\n1F0,1B0\n0F0\n", "bad.csv orders 3 ranks; the pipeline has 2"),
        ("0F0,0B0\n1F0,1X0\n", "'1X0' is not a task"),
        ("0F0,0B0\n1F0\n", "bad.csv, line 2 misses 1B0"),
        ("0F0,0B0,0F0\n1F0,1B0\n", "bad.csv, line 1 repeats 0F0"),
        ("0F0,0B0\n1F0,1B0,1F1\n", "bad.csv, line 2 lists, .* 1F1"),
        ("0F0,0B0,1F0\n1F0,1B0\n", "bad.csv, line 1 lists, .* of this rank, 1F0"),
        ("", "bad.csv orders 0 ranks"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_and_a_remedy(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(text)
    assert "\n  " in str(caught.value)


def test_an_entry_that_is_no_task_is_located():
    with pytest.raises(ConfigError, match=r"bad.csv, line 2"):
        read("0F0,0B0\n1F0,1X0\n")


def test_a_long_list_of_problems_is_cut_at_six():
    with pytest.raises(
        ConfigError, match=r"misses 0B0 0B1 .* 0B5 and 11 more"
    ) as caught:
        read("0F0\n", graph.chain(9, (0,)))
    assert "List each of the 18 tasks of rank 0 once" in str(caught.value)


def test_an_order_of_the_tasks_that_exist_is_complete():
    """A frozen stage has no backward, and a file must not list one."""
    of = PipelineGraph(2, 1, ((0, 1),), (0, 1), frozen=frozenset({0}))
    assert read("0F0\n1F0,1B0\n", of)[0] == tuple(ts("0F0"))
    with pytest.raises(ConfigError, match=r"line 1 lists, .* 0B0"):
        read("0F0,0B0\n1F0,1B0\n", of)
