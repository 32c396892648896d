"""The ready set: the hint's order behind back-pressure, against a plain list."""

import random

from rrfp_jax.core import back_pressure, graph, hints, placement, ready_set
from rrfp_jax.core.back_pressure import Lowest, Only, Open
from rrfp_jax.core.task import Kind
from tests.core.instrument import t, ts


class Pressure:
    """Admits what the test says."""

    limit = 1

    def __init__(self, admission=Open.ALL):
        self.admitted = admission
        self.begun = set()
        self.has_begun = self.begun.__contains__

    def admission(self):
        """Returns what the test set."""
        return self.admitted

    def launched(self, task):
        """Remembers the microbatch."""
        self.begun.add(task.microbatch)


def filled(tasks, pressure):
    """Returns a ready set of `tasks`."""
    ready = ready_set.ReadySet(hints.chunk_key, pressure)
    for task in ts(tasks):
        ready.add(task)
    return ready


def test_it_is_the_set_of_what_was_added_and_not_launched():
    ready = filled("0F1 0B0 0F0", Pressure())
    assert len(ready) == 3
    assert t("0F1") in ready
    ready.launched(t("0F1"))
    assert list(ready) == ts("0B0 0F0")
    assert t("0F1") not in ready


def test_each_kind_has_a_first_of_its_own():
    ready = filled("0F1 2F0 0B1 2B3", Pressure())
    assert ready.first(Kind.F) == t("0F1")
    assert ready.first(Kind.B) == t("2B3")


def test_looking_does_not_remove():
    ready = filled("0F1", Pressure())
    assert [ready.first(Kind.F) for _ in range(2)] == ts("0F1 0F1")


def test_admitted_means_forwards_of_microbatches_that_have_begun():
    pressure = Pressure()
    ready = filled("0F0 0F1 2F1", pressure)
    pressure.admitted = Open.ADMITTED
    assert ready.first(Kind.F) is None
    ready.launched(t("0F1"))
    assert ready.first(Kind.F) == t("2F1")  # it was added before its microbatch began
    ready.add(t("4F1"))
    ready.launched(t("2F1"))
    assert ready.first(Kind.F) == t("4F1")


def test_lowest_adds_one_new_microbatch_to_those():
    pressure = Pressure(Lowest(2))
    ready = filled("0F1 0F2 2F2", pressure)
    assert ready.first(Kind.F) == t("0F2")
    pressure.begun.add(3)
    ready.add(t("0F3"))
    assert ready.first(Kind.F) == t("0F2")
    pressure.admitted = Lowest(7)
    assert ready.first(Kind.F) == t("0F3")


def test_only_admits_one_task_of_one_kind():
    ready = filled("0F0 0F1 0B2", Pressure(Only(t("0F1"))))
    assert ready.first(Kind.F) == t("0F1")
    assert ready.first(Kind.B) is None
    ready.launched(t("0F1"))
    assert ready.first(Kind.F) is None


def test_backwards_are_never_withheld_by_reserving():
    for admission in (Open.ALL, Open.ADMITTED, Lowest(9)):
        assert filled("0B4", Pressure(admission)).first(Kind.B) == t("0B4")


def test_it_agrees_with_a_plain_list_over_random_steps():
    """200 random interleavings of adding and launching on a rank with two chunks."""
    of = graph.chain(6, placement.v_shaped(2))
    for seed in range(200):
        draw = random.Random(seed)
        pressure = back_pressure.Reserving(of, 0, limit=draw.randint(1, 3))
        ready = ready_set.ReadySet(hints.chunk_key, pressure)
        waiting, plain, begun = of.tasks(0), [], set()
        draw.shuffle(waiting)
        while waiting or plain:
            if waiting and (draw.random() < 0.6 or not plain):
                ready.add(task := waiting.pop())
                plain.append(task)
            for kind in Kind:
                admitted = [
                    a for a in plain if a.kind is kind and _admits(pressure, begun, a)
                ]
                best = min(admitted, key=hints.chunk_key, default=None)
                assert ready.first(kind) == best
            chosen = ready.first(draw.choice(list(Kind)))
            if chosen is not None:
                ready.launched(chosen)
                plain.remove(chosen)
                begun.add(chosen.microbatch)
            elif not waiting:
                break  # a B without its F: this walk is arbitrary, not a step


def _admits(pressure, begun, task):
    match pressure.admission():
        case Open.ALL:
            return True
        case Open.ADMITTED:
            return task.kind is Kind.B or task.microbatch in begun
        case Lowest(j):
            return task.kind is Kind.B or task.microbatch in begun | {j}
