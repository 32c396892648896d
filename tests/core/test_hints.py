"""Hints rank; they never wait (RRFP §5, §7.7)."""

import itertools

import pytest

from rrfp_jax.core import hints
from rrfp_jax.core.task import Kind
from tests.core.instrument import t, ts


class Ready:
    """A ready set without back-pressure: the whole list, sorted for every question."""

    def __init__(self, hint, tasks):
        self._hint = hint
        self._tasks = list(tasks)

    def first(self, kind):
        """Returns the best of `kind`."""
        of_kind = [task for task in self._tasks if task.kind is kind]
        return min(of_kind, key=self._hint.key, default=None)

    def count(self, kind):
        """Returns how many there are of `kind`."""
        return sum(task.kind is kind for task in self._tasks)

    def drain(self):
        """Launches all, as the hint chooses."""
        while self._tasks:
            task = self._hint.choose(self)
            assert task is not None, f"the hint waits beside {self._tasks}"
            self._tasks.remove(task)
            self._hint.launched(task)
            yield str(task)


def launched(hint, tasks):
    """Returns the order in which the hint takes `tasks`."""
    return " ".join(Ready(hint, ts(tasks)).drain())


EVERY = {
    "bf": lambda: hints.Alternating(Kind.B),
    "fb": lambda: hints.Alternating(Kind.F),
    "b_priority": lambda: hints.Priority((Kind.W, Kind.B, Kind.F)),
    "f_priority": lambda: hints.Priority((Kind.W, Kind.F, Kind.B)),
    "bfw": lambda: hints.Alternating(Kind.B, None),
    "bfw_memory": lambda: hints.Alternating(Kind.B, 2, hints.late_first),
    "ordered": lambda: hints.Ordered(ts("0B2 0F3 0F2 0B0 0F0 0F1 0B1 0W3")),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf", "0B0 0F2 0B1 0F3 0B2"),
        ("fb", "0F2 0B0 0F3 0B1 0B2"),
        ("b_priority", "0B0 0B1 0B2 0F2 0F3"),
        ("f_priority", "0F2 0F3 0B0 0B1 0B2"),
        ("ordered", "0B2 0F3 0F2 0B0 0B1"),
    ],
)
def test_each_rule_in_its_own_order(name, expected):
    """Three backwards and two forwards are ready at once."""
    assert launched(EVERY[name](), "0B2 0F3 0B0 0F2 0B1") == expected


def test_bf_alternates_and_is_no_backward_priority():
    """After a backward it takes a forward, although a backward is ready."""
    assert launched(EVERY["bf"](), "0B0 0B1 0F5 0F6") == "0B0 0F5 0B1 0F6"


def test_bf_passes_over_a_direction_with_nothing_ready_at_once():
    """With nothing to alternate with, one follows another of the same kind."""
    assert launched(EVERY["bf"](), "0B2 0B0 0B1") == "0B0 0B1 0B2"
    assert launched(EVERY["bf"](), "0F2 0F0 0F1") == "0F0 0F1 0F2"


def test_bf_turn_is_the_opposite_of_the_last_launch():
    """A forward that ran out of turn moves the turn on: the next is a backward."""
    hint = EVERY["bf"]()
    hint.launched(t("0F0"))
    assert hint.choose(Ready(hint, ts("0F1 0B0"))) == t("0B0")
    hint.launched(t("0B0"))
    assert hint.choose(Ready(hint, ts("0F1 0B1"))) == t("0F1")


def test_choosing_changes_nothing():
    """A choice may be asked for and not be launched (agreement in a rank)."""
    hint = EVERY["bf"]()
    ready = Ready(hint, ts("0F1 0B0"))
    assert [hint.choose(ready) for _ in range(3)] == ts("0B0 0B0 0B0")


def test_a_whole_backward_runs_its_weight_gradient_at_once():
    """BF and the priorities on a split backward: as if it were whole."""
    for name, expected in {
        "bf": "0W0 0B1 0F5 0B2",
        "b_priority": "0W0 0B1 0B2 0F5",
        "f_priority": "0W0 0F5 0B1 0B2",
    }.items():
        assert launched(EVERY[name](), "0F5 0B2 0B1 0W0") == expected


def test_bf_goes_on_with_its_round_after_a_weight_gradient():
    hint = EVERY["bf"]()
    hint.launched(t("0B0"))
    hint.launched(t("0W0"))
    assert hint.choose(Ready(hint, ts("0F1 0B1"))) == t("0F1")


def test_bfw_runs_weight_gradients_as_filler_and_then_begins_a_new_round():
    """RRFP §5: neither a B nor an F is ready, so one W; then B comes first again."""
    assert launched(EVERY["bfw"](), "0W0 0W1 0F5 0B2") == "0B2 0F5 0W0 0W1"
    hint = EVERY["bfw"]()
    hint.launched(t("0B0"))
    hint.launched(t("0W0"))
    assert hint.choose(Ready(hint, ts("0F1 0B1"))) == t("0B1")


def test_bfw_memory_puts_weight_gradients_first_once_two_wait():
    assert launched(EVERY["bfw_memory"](), "0W0 0W1 0F5 0B2") == "0W0 0B2 0F5 0W1"


def test_bfw_memory_finishes_what_is_half_through_before_it_begins_more():
    assert launched(EVERY["bfw_memory"](), "0F5 0F4 2F1 2F2") == "2F1 2F2 0F4 0F5"


def test_weight_gradients_go_by_microbatch_and_then_as_backwards():
    assert launched(EVERY["bfw"](), "0W1 2W1 2W0 0W0") == "2W0 0W0 2W1 0W1"


def test_forwards_take_the_earliest_chunk_backwards_the_latest():
    """Ranks that hold stages 0 and 2; ties go to the smallest microbatch."""
    tasks = "2F0 0F5 0F4 0B0 2B7 2B6"
    assert launched(EVERY["f_priority"](), tasks) == "0F4 0F5 2F0 2B6 2B7 0B0"
    assert launched(EVERY["bf"](), tasks) == "2B6 0F4 2B7 0F5 0B0 2F0"


def test_ordered_skips_what_is_not_ready():
    """The order begins with 0B2 and 0F3, but only later tasks of it are here."""
    assert launched(EVERY["ordered"](), "0B1 0F1 0F0") == "0F0 0F1 0B1"


@pytest.mark.parametrize("name", EVERY)
def test_no_hint_waits_whatever_subset_is_ready(name):
    """All 255 non-empty subsets; `drain` fails where a hint returns nothing."""
    tasks = ts("0B2 0F3 0F2 0B0 0F0 0F1 0B1 0W3")
    for size in range(1, len(tasks) + 1):
        for subset in itertools.combinations(tasks, size):
            assert len(list(Ready(EVERY[name](), subset).drain())) == size


@pytest.mark.parametrize("name", EVERY)
def test_nothing_ready_is_no_choice(name):
    hint = EVERY[name]()
    assert hint.choose(Ready(hint, [])) is None
