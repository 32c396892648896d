"""The ready set: the hint's order behind back-pressure, against a plain list."""

import random
import types

from rrfp_jax.core import back_pressure, graph, hints, placement, ready_set
from rrfp_jax.core.task import Kind
from tests.core.instrument import t, ts


class Pressure:
    """Admits what the test says, and counts what has begun."""

    def __init__(self, admits=lambda task: True, lowest=-1):
        self.admits = admits
        self.progress = types.SimpleNamespace(begun=set(), lowest=lowest)

    def launched(self, task):
        """Remembers the microbatch."""
        self.progress.begun.add(task.microbatch)


def filled(tasks, pressure):
    """Returns a ready set of `tasks`."""
    ready = ready_set.ReadySet((0, 2, 4), hints.early_first, pressure)
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


def test_forwards_of_begun_microbatches_do_not_wait_behind_new_ones():
    pressure = Pressure()
    pressure.admits = lambda task: task.microbatch in pressure.progress.begun
    ready = filled("0F0 0F1 2F1", pressure)
    assert ready.first(Kind.F) is None
    pressure.admits = lambda task: True
    ready.launched(t("0F1"))
    pressure.admits = lambda task: task.microbatch in pressure.progress.begun
    assert ready.first(Kind.F) == t("2F1")  # it was added before its microbatch began
    ready.add(t("4F1"))
    ready.launched(t("2F1"))
    assert ready.first(Kind.F) == t("4F1")


def test_the_lowest_microbatch_is_found_behind_others_that_are_held():
    pressure = Pressure(lambda task: task.microbatch == 2, lowest=2)
    ready = filled("0F1 0F2 2F2 2B1 2B2 0B2", pressure)
    assert ready.first(Kind.F) == t("0F2")
    assert ready.first(Kind.B) == t("2B2")
    pressure.progress.lowest = 7
    assert ready.first(Kind.F) == t("2F2")  # nothing stands before it


def test_the_first_that_is_admitted_of_each_stage_competes():
    ready = filled("0F1 2F0 4F3", Pressure(lambda task: task.stage != 0))
    assert ready.first(Kind.F) == t("2F0")


def test_it_agrees_with_a_plain_list_over_random_steps():
    """300 random interleavings of adding and launching on a rank with two chunks."""
    for seed in range(300):
        draw = random.Random(seed)
        of = graph.chain(6, placement.v_shaped(2), is_split=draw.random() < 0.5)
        progress = back_pressure.RankProgress(of, 0)
        rules = [back_pressure.InFlight(progress, draw.randint(1, 3))]
        if draw.random() < 0.5:
            rules.append(back_pressure.QueuedWeights(progress, draw.randint(1, 2), of))
        pressure = back_pressure.BackPressure(progress, rules)
        key = draw.choice([hints.early_first, hints.late_first])
        ready = ready_set.ReadySet(of.stages_of[0], key, pressure)
        waiting, plain = of.tasks(0), []
        draw.shuffle(waiting)
        while waiting or plain:
            if waiting and (draw.random() < 0.6 or not plain):
                ready.add(task := waiting.pop())
                plain.append(task)
            for kind in Kind:
                of_kind = [a for a in plain if a.kind is kind and pressure.admits(a)]
                best = min(of_kind, key=key, default=None)
                assert ready.first(kind) == best
            chosen = ready.first(draw.choice(list(Kind)))
            if chosen is not None:
                ready.launched(chosen)
                plain.remove(chosen)
            elif not waiting:
                break  # a B without its F: this walk is arbitrary, not a step
