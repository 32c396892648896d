"""Who runs what: groups stay inside a host, neighbours close, replicas apart."""

import pytest

from rrfp_jax.coordination import layout
from rrfp_jax.coordination.layout import Spot
from rrfp_jax.errors import ConfigError


def spots(*hosts: str, each: int = 1) -> list[Spot]:
    """Returns the devices of one process a name, `each` of them."""
    return [
        Spot(host, process, process * each + i)
        for process, host in enumerate(hosts)
        for i in range(each)
    ]


def numbers(found):
    return [[[spot.number for spot in rank] for rank in ranks] for ranks in found]


def test_ranks_follow_each_other_and_replicas_come_last():
    found, doubts = layout.lay_out(spots("a", "a", "b", "b", each=2), [2, 2], 2)
    assert numbers(found) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert doubts == []


def test_processes_of_one_device_form_a_rank_within_their_host():
    found, doubts = layout.lay_out(spots(*"aaaabbbb"), [2, 2, 2, 2])
    assert numbers(found) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert doubts == []


def test_hosts_that_take_turns_still_keep_a_rank_together():
    """As with `srun --distribution=cyclic`: even processes here, odd ones there."""
    found, _ = layout.lay_out(spots(*"abababab"), [2, 2, 2, 2])
    assert numbers(found) == [[[0, 2], [4, 6], [1, 3], [5, 7]]]


def test_a_device_is_left_over_rather_than_a_rank_cut_in_two():
    found, doubts = layout.lay_out(spots("a", "b", each=3), [2, 2])
    assert numbers(found) == [[[0, 1], [3, 4]]]
    assert doubts == []


def test_a_rank_that_fits_no_host_spans_two_and_it_is_said():
    found, (doubt,) = layout.lay_out(spots(*"abcd"), [2, 2])
    assert numbers(found) == [[[0, 1], [2, 3]]]
    assert "span two hosts" in doubt


def test_ranks_may_be_of_different_sizes():
    found, _ = layout.lay_out(spots(*"aaa"), [1, 2])
    assert numbers(found) == [[[0], [1, 2]]]


def test_too_few_devices_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"needs 8 devices; there are 3"):
        layout.lay_out(spots(*"aaa"), [2, 2], 2)


def test_a_process_with_nothing_to_run_is_refused():
    with pytest.raises(ConfigError, match=r"processes \[2, 3\] have nothing to run"):
        layout.lay_out(spots(*"aabb"), [1, 1])


def test_the_table_and_the_names_say_who_has_what():
    found, _ = layout.lay_out(spots("n1", "n2", each=2), [2], 2)
    head, *lines = layout.table(found, [2]).splitlines()
    assert " ".join(head.split()) == "host process device replica rank data model"
    assert [line.split() for line in lines] == [
        ["n1", "0", "0", "0", "0", "0", "0"],
        ["n1", "0", "1", "0", "0", "0", "1"],
        ["n2", "1", "2", "1", "0", "0", "0"],
        ["n2", "1", "3", "1", "0", "0", "1"],
    ]
    assert layout.held_by(found, 1) == "rank 0 of replica 1"
