"""Results put together from processes, and ratios of twins."""

import pathlib

import pytest

from scripts.peers import drawing, figures, registry, running, settings
from scripts.peers.figures import Line
from scripts.peers.running import Result, Step
from scripts.peers.settings import Setting
from third_party import peer_job

ONE, OTHER = Setting("multimodal", 4, "J3"), Setting("language", 4, "J1")
SYSTEM = registry.System("peer", pathlib.Path("d"), pathlib.Path("p"), ("1f1b",))


def step(setting, seed, seconds, peak=(3, 1), error=1e-7):
    return Step(str(setting), seed, seconds, peak, error)


def result(peer, schedule, *steps, reason=""):
    return Result(peer, "1", schedule, tuple(steps), reason)


def ours(bf, bfw):
    found = []
    for name, each in (("bf", bf), ("bfw", bfw)):
        steps = [step(ONE, seed, s) for seed, s in enumerate(each)]
        found.append(result("ours", name, *steps, step(OTHER, 0, 2.0)))
    return found


def summarised(results, *wanted):
    bounds_s = {(str(s), seed): 0.5 for s in wanted for seed in range(3)}
    found = figures.lines(results, wanted)
    return figures.summary(found, wanted, results, bounds_s)


def seen(begin_s, end_s, rank, error=1e-7):
    return {
        "setting": "a",
        "seed": 0,
        "begin_s": begin_s,
        "end_s": end_s,
        "peak_in_flight": {str(rank): 4 - rank},
        "gradient_error": error,
    }


def report(*iterations, schedule="1f1b"):
    schedules = [{"schedule": schedule, "iterations": [*iterations]}]
    return {"peer": "peer", "version": "2.0", "schedules": schedules}


def job():
    seconds = {kind: [[0.5] * 2] * 2 for kind in peer_job.KINDS}
    each = [peer_job.Iteration("a", 0, seconds)]
    return peer_job.Job(2, 2, 4, 2, 0, 1.0, ["1f1b"], each)


def test_a_step_lasts_from_the_first_begin_to_the_last_end_of_any_process():
    reports = [report(seen(10.0, 13.0, 1)), report(seen(9.5, 12.0, 0, error=2e-6))]
    (found,) = running.together(SYSTEM, job(), reports, 2, "")
    assert found.is_ok
    assert found.version == "2.0"
    assert found.steps == (Step("a", 0, 3.5, (4, 3), 2e-6),)


def test_a_schedule_that_a_process_did_not_finish_has_the_reason():
    log = "[1] hello\n[1] RuntimeError: no\n[0] RuntimeError: peer gone\n"
    reports = [report(seen(0.0, 1.0, 0)), report(schedule="gpipe")]
    (found,) = running.together(SYSTEM, job(), reports, 2, log)
    assert not found.is_ok
    assert found.reason == "[1] RuntimeError: no"


def test_a_peer_that_says_nothing_has_a_reason_too():
    (found,) = running.together(SYSTEM, job(), [], 2, "")
    assert found.reason == "it ended without a word"


def test_wrong_gradients_do_not_count():
    reports = [report(seen(0.0, 1.0, rank, error=1e-2)) for rank in range(2)]
    (found,) = running.together(SYSTEM, job(), reports, 2, "")
    assert found.reason == "its gradients are off by 1.0e-02, more than 1e-05"


def test_ratios_are_of_twins_and_not_of_medians():
    theirs = result("p", "1f1b", step(ONE, 0, 3.0), step(ONE, 1, 2.0), step(ONE, 2, 9))
    found = figures.lines([*ours((1.0, 2.0, 3.0), (0.5, 4.0, 1.0)), theirs], [ONE])
    (line,) = (each for each in found if each.peer == "p")
    assert line.median_s == 3.0
    assert line.over_bf == 3.0  # of 3, 1, 3
    assert line.over_bfw == 6.0  # of 6, 0.5, 9
    assert line.peak_in_flight == 3


def test_the_faster_peer_is_the_smallest_median_of_all_their_schedules():
    results = [
        *ours((2.0,), (1.0,)),
        result("p", "1f1b", step(ONE, 0, 4.0), step(OTHER, 0, 5.0)),
        result("p", "zb", step(ONE, 0, 3.0), step(OTHER, 0, 6.0)),
        result("q", "1f1b", step(ONE, 0, 3.5), step(OTHER, 0, 1.0)),
    ]
    summary = summarised(results, ONE, OTHER)
    one, other = summary["settings"][str(ONE)], summary["settings"][str(OTHER)]
    assert one["fastest_peer"] == "p zb"
    assert (one["over_bf"], one["over_bfw"], one["over_bound"]) == (1.5, 3.0, 6.0)
    assert other["fastest_peer"] == "q 1f1b"
    assert (other["over_bf"], other["over_bfw"]) == (0.5, 0.5)
    assert summary["best_setting_bf"] == 1.5
    assert summary["geomean_bf"] == pytest.approx(0.75**0.5)
    assert summary["geomean_bfw"] == pytest.approx(1.5**0.5)
    assert summary["min_bf"] == 0.5
    assert summary["peers_run"] == ["p", "q"]


def test_a_schedule_that_failed_once_is_reported_and_not_counted():
    results = [
        *ours((2.0,), (1.0,)),
        result("p", "1f1b", step(ONE, 0, 4.0)),
        result("p", "zb", step(ONE, 0, 1.0)),
        result("p", "zb", reason="it hung"),
    ]
    summary = summarised(results, ONE)
    assert summary["not_counted"] == {"p zb": "it hung"}
    assert summary["settings"][str(ONE)]["fastest_peer"] == "p 1f1b"


def test_there_is_no_comparison_without_ours():
    with pytest.raises(RuntimeError, match="ours bfw: it hung"):
        figures.lines([result("ours", "bfw", reason="it hung")], [ONE])


def test_without_any_peer_there_is_no_figure():
    results = ours((2.0,), (1.0,))
    summary = summarised(results, ONE)
    assert summary["geomean_bf"] is None
    assert summary["best_setting_bf"] is None
    assert summary["peers_run"] == []


def test_the_csv_and_the_picture_have_every_line(tmp_path):
    found = figures.lines(
        [*ours((2.0,), (1.0,)), result("p", "1f1b", step(ONE, 0, 4.0))], [ONE]
    )
    drawing.publish(found, tmp_path, "peers")
    head, *rows = (tmp_path / "peers.csv").read_text().splitlines()
    assert head.split(",") == list(Line.__dataclass_fields__)
    assert rows[2] == "multimodal P=4 J3,p,1f1b,4.0,2.0,4.0,3,1e-07,1"
    assert len(drawing.draw(found).axes[0].patches) == 3
    assert (tmp_path / "peers.png").stat().st_size > 0


def test_draws_depend_on_setting_and_seed_alone():
    first, again = (settings.draw(ONE, 4, 3) for _ in range(2))
    assert first == again
    assert first.seconds != settings.draw(ONE, 4, 4).seconds
    assert [len(first.seconds[kind]) for kind in peer_job.KINDS] == [4, 4, 4]
    assert {len(each) for kind in peer_job.KINDS for each in first.seconds[kind]} == {4}


def test_the_busiest_rank_is_a_bound_on_every_schedule():
    seconds = {"F": [[1.0, 2.0], [9.0, 0.0]], "B": [[3.0, 0.0], [0.0, 0.0]]}
    seconds["W"] = [[1.0, 1.0], [0.5, 0.0]]
    assert settings.busiest_s(seconds) == 9.5


def test_the_bound_adds_the_way_in_and_out_of_the_busiest_rank():
    seconds = {"F": [[1.0, 1.0], [5.0, 4.0]], "B": [[2.0, 2.0], [3.0, 3.0]]}
    seconds["W"] = [[0.5, 0.5], [0.25, 0.25]]
    # Rank 1 is busy for 15.5 and not before 0F; its last task may be a W.
    assert settings.bound_s(seconds) == 16.5
