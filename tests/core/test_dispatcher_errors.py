"""Events that cannot be: our bug or a foreign message, never a silent launch."""

import pytest

from rrfp_jax.core import events, graph, policies
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.events import Arrived, Finished, Started
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import InvariantError
from tests.core.instrument import launches, t, ts

CHAIN = graph.chain(2, (0, 1, 2))


def rank_one(of=CHAIN, **policy) -> Dispatcher:
    """Returns the dispatcher of rank 1."""
    return policies.dispatchers(of, Policy(**policy))[1]


@pytest.mark.parametrize(
    ("story", "message"),
    [
        ([Arrived(t("0F0"), 1)] * 2, "0F0 came to 1F0 twice"),
        (
            [Arrived(t("0F0"), 1), Finished(t("1F0")), Arrived(t("0F0"), 1)],
            "0F0 came to",
        ),
        ([Arrived(t("2F0"), 1)], "2F0 came to 1F0 twice, or is no input of it"),
        ([Finished(t("1F0"))], "1F0 finished on rank 1 but is not running"),
        (
            [Arrived(t("0F0"), 1), Finished(t("1F0")), Finished(t("1F0"))],
            "1F0 finished on rank 1 but is not running",
        ),
    ],
)
def test_an_impossible_event_is_our_bug(story, message):
    one = rank_one()
    *before, last = story
    for event in before:
        one.handle(event)
    with pytest.raises(InvariantError, match=message):
        one.handle(last)


def test_an_invariant_error_carries_the_story_of_its_microbatch():
    """errors.py and style.md: what happened to it so far, for a report to us."""
    one = rank_one()
    for event in [Started(), Arrived(t("0F1"), 1), Arrived(t("0F0"), 1)]:
        one.handle(event)
    with pytest.raises(InvariantError, match=r"please report this story") as caught:
        one.handle(Arrived(t("0F0"), 1))
    assert str(caught.value).splitlines()[-1] == (
        "  #4 Arrived(0F0, 1)  #5 Launch(1F0)  #6 Send(1F0, 2)"
    )


def test_a_step_begins_once():
    """A frozen first stage: nothing else would notice that 0F0 runs twice."""
    of = PipelineGraph(2, 1, ((0, 1),), (0, 1), frozen=frozenset({0}))
    first = policies.dispatchers(of, Policy())[0]
    assert launches(first.handle(Started())) == ts("0F0")
    first.handle(Finished(t("0F0")))
    with pytest.raises(InvariantError):
        first.handle(Started())


@pytest.mark.parametrize("source", ["0F0", "1F0"])
def test_a_payload_for_another_rank_is_refused(source):
    """Both are inputs of 2F0, which rank 2 runs."""
    of = PipelineGraph(3, 2, ((0, 1), (1, 2), (0, 2)), (0, 1, 2))
    one = rank_one(of)
    with pytest.raises(InvariantError, match=f"{source} is no arrival of rank 1"):
        one.handle(Arrived(t(source), 2))


def test_a_payload_from_the_own_rank_is_refused():
    """Stages 0 and 2 share a rank, so 0F0 can only be supplied by its launch."""
    of = PipelineGraph(3, 2, ((0, 1), (1, 2), (0, 2)), (1, 0, 1))
    one = rank_one(of)
    with pytest.raises(InvariantError):
        one.handle(Arrived(t("0F0"), 2))


@pytest.mark.parametrize("microbatch", [2, 9, -1, -3])
def test_a_microbatch_that_does_not_exist_is_our_bug(microbatch):
    one = rank_one()
    with pytest.raises(InvariantError):
        one.handle(Arrived(Task(Kind.F, 0, microbatch), 1))


def test_explain_does_not_blame_back_pressure_when_the_rank_is_busy():
    """1F0 runs, one launch at a time: 1F1 waits for the rank and for nothing else."""
    one = rank_one(launch_ahead=1)
    one.handle(Arrived(t("0F0"), 1))
    assert one.handle(Arrived(t("0F1"), 1)) == []
    assert not any("back-pressure" in line for line in one.explain())


def test_an_early_arrival_needs_no_start():
    """Another rank may be faster than our own Started."""
    one = rank_one()
    first, *_ = one.handle(Arrived(t("0F0"), 1))
    assert first == events.Launch(t("1F0"))
    assert one.handle(Started()) == []
