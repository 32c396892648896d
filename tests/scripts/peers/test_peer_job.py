"""What all drivers share: the job, derived tables, the reference, the meter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from third_party import peer_job
from third_party.peer_job import Iteration, Job, Meter

SECONDS = {
    "F": [[1.0, 2.0], [3.0, 4.0]],
    "B": [[5.0, 6.0], [7.0, 8.0]],
    "W": [[0.5, 0.25], [1.5, 2.5]],
}


def job(**changes):
    values = {"num_ranks": 2, "num_microbatches": 2, "width": 6, "rows": 3, "seed": 7}
    values |= {"limit_s": 60.0, "schedules": ["1f1b"]}
    values |= {"iterations": [Iteration("a", 0, SECONDS), Iteration("b", 1, SECONDS)]}
    return Job(**values | changes)


def test_a_job_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "job.json"
    peer_job.write(job(), path)
    assert peer_job.read(str(path)) == job()


def test_only_the_first_step_is_dropped_and_is_short():
    (dropped, *counted) = list(job().steps())
    assert dropped[0]
    assert dropped[1].setting == "a"
    assert dropped[1].seconds["F"] == [[0.1, 0.2], [pytest.approx(0.3), 0.4]]
    assert counted == [(False, each) for each in job().iterations]


@pytest.mark.parametrize("place", [peer_job.loop, peer_job.v_shape])
def test_two_stages_of_a_rank_take_together_what_one_did(place):
    ranks = place(2)
    table = peer_job.placed(SECONDS, ranks)
    for kind, stages in SECONDS.items():
        for rank in range(2):
            held = [s for s, r in enumerate(ranks) if r == rank]
            assert len(held) == 2
            for j, whole in enumerate(stages[rank]):
                assert [table[kind][s][j] for s in held] == [whole / 2] * 2


def test_placements_go_round_and_down_and_up():
    assert peer_job.loop(3) == [0, 1, 2, 0, 1, 2]
    assert peer_job.v_shape(3) == [0, 1, 2, 2, 1, 0]


def test_one_stage_a_rank_keeps_its_table():
    assert peer_job.placed(SECONDS, [0, 1]) == SECONDS


def test_the_reference_is_the_gradient_that_jax_finds():
    x, target = peer_job.batch(job())

    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - target) ** 2)

    grads = jax.grad(loss)(peer_job.weights(job()))
    expected = peer_job.reference(job())
    assert len(expected) == 4
    assert peer_job.error(dict(enumerate(grads)), expected) < 1e-5


def test_a_wrong_gradient_of_one_layer_is_seen():
    expected = peer_job.reference(job())
    found = {i: np.array(each) for i, each in enumerate(expected)}
    assert peer_job.error(found, expected) == 0
    found[2][0, 0] += 0.5 * np.abs(expected[2]).max()
    assert peer_job.error(found, expected) == pytest.approx(0.5)


def test_a_whole_backward_lasts_as_long_as_its_parts():
    whole, split = Meter(SECONDS, [0, 1], False), Meter(SECONDS, [0, 1], True)
    assert whole.duration_s("B", 1, 0) == 8.5
    assert [split.duration_s(kind, 1, 0) for kind in "BW"] == [7.0, 1.5]
    assert whole.duration_s("F", 0, 1) == 2.0


def test_a_task_is_recorded_with_its_begin_and_end():
    meter = Meter(peer_job.scaled(SECONDS, 0.0), [0, 1], False)
    with meter.task("F", 1, 0):
        pass
    ((*name, begin_s, end_s),) = meter.tasks
    assert name == ["F", 1, 0]
    assert begin_s <= end_s


def ran(is_split, *tasks):
    meter = Meter(SECONDS, [0, 1, 1, 0], is_split)
    meter.tasks += tasks
    return meter


def test_a_microbatch_is_in_flight_from_its_first_forward_to_its_last_backward():
    tasks = [("F", 0, 0, 0, 1), ("F", 0, 1, 1, 2), ("F", 3, 0, 2, 3)]
    tasks += [("B", 3, 0, 3, 4), ("B", 0, 0, 5, 6), ("F", 0, 2, 6, 7)]
    assert ran(False, *tasks).peak_in_flight(0) == 2  # the third begins as one ends
    assert ran(False, *tasks).peak_in_flight(1) == 0


def test_a_split_backward_is_in_flight_until_its_weight_gradient():
    tasks = [("F", 0, 0, 0, 1), ("B", 0, 0, 1, 2), ("F", 0, 1, 2, 3), ("W", 0, 0, 3, 4)]
    assert ran(True, *tasks).peak_in_flight(0) == 2
    assert ran(False, *tasks).peak_in_flight(0) == 1


def every(kinds, stages):
    names = [(k, s, j) for k in kinds for s in stages for j in range(2)]
    return [(*name, float(at), at + 1.0) for at, name in enumerate(names)]


def test_a_step_is_whole_where_each_task_of_its_ranks_ran_once():
    ran(False, *every("FB", (0, 3))).check([0])
    ran(True, *every("FBW", (1, 2))).check([1])


@pytest.mark.parametrize("change", [lambda t: t[1:], lambda t: [*t, t[0]]])
def test_a_task_that_is_missing_or_ran_twice_is_found(change):
    with pytest.raises(AssertionError, match="tasks for 8"):
        ran(False, *change(every("FB", (0, 3)))).check([0])


def test_two_tasks_of_a_rank_at_a_time_are_found():
    first, second, *others = every("FB", (0, 3))
    with pytest.raises(AssertionError, match="rank 0: "):
        ran(False, first, (*second[:3], 0.9, 2.0), *others).check([0])


def test_ranks_may_work_at_the_same_time():
    stages = [every("FB", held) for held in ((0, 3), (1, 2))]
    ran(False, *stages[0], *stages[1]).check([0, 1])


def test_a_report_has_the_schedules_that_ended_even_if_one_fails(tmp_path):
    path = tmp_path / "report.json"
    report = peer_job.Report(str(path), "peer", "1.0", 600.0)
    with report.schedule("gpipe") as iterations:
        iterations.append({"setting": "a"})
    with pytest.raises(ValueError, match="broke"), report.schedule("zb_v"):
        raise ValueError("broke")
    text = path.read_text()
    assert '"gpipe"' in text
    assert '"zb_v"' not in text
