"""Stories: what the members of a group say, and what all of them launch."""

import re

import pytest

from rrfp_jax.core import graph, policies
from rrfp_jax.core.agreement import Group
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.events import (
    Arrived,
    Finished,
    Launch,
    Proposal,
    Propose,
    Proposed,
    Send,
    Started,
)
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError, InvariantError, ProtocolError
from tests.core.instrument import launches, t, ts

CHAIN = graph.chain(3, (0, 1, 2))


def member_of(size=2, member=0, rank=1, of=CHAIN, **policy) -> Dispatcher:
    """Returns the dispatcher of one member of the group that runs `rank`."""
    groups = {rank: Group(member, size)}
    only, *others = policies.dispatchers(
        of, Policy(**policy), ranks=[rank], groups=groups
    )
    assert not others
    return only


def says(number, tasks="", room=2):
    """Returns what a member says in a round."""
    return Proposal(number, tuple(ts(tasks)), room)


def forward(tasks):
    """Returns the launches of forwards of stage 1, each with its send."""
    return [order for a in ts(tasks) for order in (Launch(a), Send(a, to=a.stage + 1))]


def told(dispatcher, *story):
    """Tells a story and returns the answers."""
    return [dispatcher.handle(event) for event in story]


def test_what_is_ready_at_all_members_is_launched_at_once():
    """This member learns of 0F0 first, says so, and launches on the other's word."""
    story = [Started(), Arrived(t("0F0"), 1), Proposed(1, says(0, "1F0"))]
    assert told(member_of(), *story) == [
        [],
        [Propose(says(0, "1F0"))],
        forward("1F0"),
    ]


def test_a_round_is_answered_at_once_and_what_comes_later_is_news_for_the_next():
    """The other has 0F0, this one not yet: the empty round ends and nobody spins."""
    story = [
        Proposed(1, says(0, "1F0")),
        Arrived(t("0F0"), 1),
        Proposed(1, says(1)),
    ]
    assert told(member_of(), *story) == [
        [Propose(says(0))],
        [Propose(says(1, "1F0"))],
        forward("1F0"),
    ]


def test_an_answer_may_be_the_last_word():
    """Both have 0F0 by the time this one answers: it launches in the same breath."""
    one = member_of(size=3)
    story = [Proposed(2, says(0, "1F0")), Proposed(1, says(0))]
    assert told(one, *story) == [[Propose(says(0))], []]
    story = [Proposed(1, says(1, "1F0", 1)), Arrived(t("0F0"), 1)]
    assert told(one, *story) == [[Propose(says(1))], []]  # it has spoken in round 1
    assert told(one, Proposed(2, says(1))) == [[Propose(says(2, "1F0"))]]
    story = [Proposed(1, says(2)), Proposed(2, says(2))]
    assert told(one, *story) == [[], forward("1F0")]
    both = member_of()
    both.handle(Arrived(t("0F1"), 1))
    assert both.handle(Proposed(1, says(0, "1F1 1F2"))) == forward("1F1")


def test_members_that_see_opposite_orders_launch_the_same():
    """0F0 comes late here, 0F1 late there: both begin with 1F0, as the hint says."""
    first, second = member_of(member=0), member_of(member=1)
    assert told(first, Arrived(t("0F1"), 1)) == [[Propose(says(0, "1F1"))]]
    assert told(second, Arrived(t("0F0"), 1)) == [[Propose(says(0, "1F0"))]]
    assert told(first, Proposed(1, says(0, "1F0"))) == [[]]
    assert told(second, Proposed(0, says(0, "1F1"))) == [[]]
    assert told(first, Arrived(t("0F0"), 1)) == [[Propose(says(1, "1F0"))]]
    assert told(second, Arrived(t("0F1"), 1)) == [[Propose(says(1, "1F1"))]]
    assert told(first, Proposed(1, says(1, "1F1"))) == [forward("1F0 1F1")]
    assert told(second, Proposed(0, says(1, "1F0"))) == [forward("1F0 1F1")]
    assert first.sequence_hash == second.sequence_hash
    assert first.num_launched == 2


def test_the_smallest_room_bounds_the_launches_and_its_owner_begins_the_next_round():
    """The other has room for one. This one still has room, and leaves it to them."""
    one = member_of()
    told(one, Arrived(t("0F0"), 1))
    assert told(one, Proposed(1, says(0, "1F0 1F1"))) == [forward("1F0")]
    assert told(one, Arrived(t("0F1"), 1)) == [[Propose(says(1, "1F1", 1))]]
    assert told(one, Proposed(1, says(1, "", 0))) == [[]]  # 1F1 is common, it is full
    assert told(one, Finished(t("1F0"))) == [[]]
    assert told(one, Proposed(1, says(2, "", 1))) == [
        [Propose(says(2)), *forward("1F1")]
    ]


def test_a_member_whose_room_barred_a_common_task_begins_when_it_has_room():
    """Three are common, two are launched; the first finish here lets the third go."""
    one = member_of()
    told(one, *[Arrived(a, 1) for a in ts("0F0 0F1 0F2")])
    assert told(one, Proposed(1, says(0, "1F0 1F1 1F2"))) == [
        [*forward("1F0"), Propose(says(1, "1F1 1F2", 1))]
    ]
    assert told(one, Proposed(1, says(1, "", 1))) == [forward("1F1")]
    assert told(one, Finished(t("1F0")), Proposed(1, says(2, "", 1))) == [
        [Propose(says(2, "", 1))],
        forward("1F2"),
    ]


def test_a_full_member_keeps_its_news_but_answers():
    """Nothing could be launched before it has room, when all goes in one message."""
    one = member_of(launch_ahead=1)
    told(one, Arrived(t("0F0"), 1), Proposed(1, says(0, "1F0", 1)))
    story = [Arrived(t("0F1"), 1), Arrived(t("0F2"), 1), Finished(t("1F0"))]
    assert told(one, *story) == [[], [], [Propose(says(1, "1F1 1F2", 1))]]
    one = member_of(launch_ahead=1)
    told(one, Arrived(t("0F0"), 1), Proposed(1, says(0, "1F0", 1)))
    story = [Arrived(t("0F1"), 1), Proposed(1, says(1, "1F1", 0))]
    assert told(one, *story) == [[], [Propose(says(1, "1F1", 0))]]
    assert told(one, Finished(t("1F0"))) == [[Propose(says(2, "", 1))]]
    assert told(one, Proposed(1, says(2, "", 1))) == [forward("1F1")]


def test_what_a_launch_makes_ready_is_news_for_the_next_round():
    """The loss stage: 2B0 needs 2F0 alone, so all members have it at the launch."""
    last = member_of(rank=2)
    told(last, Arrived(t("1F0"), 2))
    assert told(last, Proposed(1, says(0, "2F0"))) == [
        [Launch(t("2F0")), Propose(says(1, "2B0", 1))]
    ]
    assert told(last, Proposed(1, says(1, "2B0", 1))) == [
        [Launch(t("2B0")), Send(t("2B0"), to=1)]
    ]


def test_an_answer_a_launch_and_the_next_round_come_in_one_breath():
    last = member_of(rank=2)
    told(last, Arrived(t("1F0"), 2), Proposed(1, says(0)))
    assert last.handle(Proposed(1, says(1, "2F0"))) == [
        Propose(says(1)),
        Launch(t("2F0")),
        Propose(says(2, "2B0", 1)),
    ]


def test_a_proposal_for_the_next_round_is_kept_until_this_one_is_closed():
    """Member 1 has heard all of round 0 before member 2's word is here."""
    one = member_of(size=3)
    story = [
        Arrived(t("0F0"), 1),
        Proposed(1, says(0, "1F0")),
        Proposed(1, says(1, "1F1")),
        Proposed(2, says(0, "1F0")),
        Proposed(2, says(1)),
    ]
    assert told(one, *story) == [
        [Propose(says(0, "1F0"))],
        [],
        [],
        [*forward("1F0"), Propose(says(1, "", 1))],
        [],
    ]


def test_back_pressure_holds_a_common_task_and_nobody_spins():
    """limit=1: 1F1 is ready everywhere; until 1B0 is launched nobody says a word."""
    one = member_of(in_flight_limit=1)
    told(one, *[Arrived(a, 1) for a in ts("0F0 0F1")])
    both = Proposed(1, says(0, "1F0 1F1"))
    assert one.handle(both) == [*forward("1F0"), Propose(says(1, "1F1", 1))]
    assert told(one, Proposed(1, says(1, "", 1)), Finished(t("1F0"))) == [[], []]
    assert one.explain()[0] == "1F1 held by back-pressure (limit=1)"
    story = [Arrived(t("2B0"), 1), Proposed(1, says(2, "1B0"))]
    assert told(one, *story) == [
        [Propose(says(2, "1B0"))],
        [Launch(t("1B0")), Send(t("1B0"), to=0), *forward("1F1")],
    ]


def test_a_fixed_order_is_agreed_on_too_and_waits_for_its_next_task_everywhere():
    one = member_of(hint="1f1b", order="fixed")
    told(one, *[Arrived(a, 1) for a in ts("0F1 0F0")])
    assert one.handle(Proposed(1, says(0, "1F1"))) == [Propose(says(1, "1F0"))]
    assert one.handle(Proposed(1, says(1, "1F0"))) == forward("1F0 1F1")


def test_explain_says_for_which_members_a_task_waits():
    one = member_of(size=4)
    one.handle(Arrived(t("0F0"), 1))
    one.handle(Proposed(2, says(0, "1F0")))
    assert one.explain()[0] == (
        "1F0 is ready here; round 0 of the group misses members 1, 3"
    )
    told(one, Proposed(1, says(0)), Proposed(3, says(0, "", 0)))
    assert one.explain()[0] == (
        "1F0 is ready here; not yet at members 1, 3 of the group"
    )
    told(one, Proposed(1, says(1, "1F0", 0)), Proposed(2, says(1)))
    told(one, Proposed(3, says(1, "1F0")))
    assert one.explain()[0] == (
        "1F0 is ready at every member of the group; one of them is busy"
    )


def test_per_task_launches_what_all_choose_and_then_only_when_the_device_is_free():
    one = member_of(agreement="per_task")
    story = [
        Arrived(t("0F0"), 1),
        Arrived(t("0F1"), 1),
        Proposed(1, says(0, "1F0", 1)),
        Proposed(1, says(1, "1F1", 1)),
        Finished(t("1F0")),
    ]
    assert told(one, *story) == [
        [Propose(says(0, "1F0", 1))],
        [],
        forward("1F0"),
        [],
        [Propose(says(1, "1F1", 1)), *forward("1F1")],
    ]


def test_per_task_launches_nothing_while_members_choose_differently():
    """1F1 is ready at both, but the other prefers 1F0: nobody runs until it is here."""
    one = member_of(agreement="per_task")
    story = [
        Arrived(t("0F1"), 1),
        Proposed(1, says(0, "1F0", 1)),
        Arrived(t("0F2"), 1),  # does not change the choice
        Arrived(t("0F0"), 1),
        Proposed(1, says(1, "1F0", 1)),
    ]
    assert told(one, *story) == [
        [Propose(says(0, "1F1", 1))],
        [],
        [],
        [Propose(says(1, "1F0", 1))],
        forward("1F0"),
    ]


def test_per_task_answers_once_it_has_a_choice_and_repeats_it_where_others_changed():
    one = member_of(agreement="per_task")
    story = [
        Proposed(1, says(0, "1F1", 1)),
        Arrived(t("0F0"), 1),
        Proposed(1, says(1, "1F0", 1)),
    ]
    assert told(one, *story) == [
        [],
        [Propose(says(0, "1F0", 1))],
        [Propose(says(1, "1F0", 1)), *forward("1F0")],
    ]


def test_per_task_launches_what_was_agreed_though_it_now_would_choose_another():
    """1B0 became ready after it had spoken: the turn was the forward's."""
    one = member_of(agreement="per_task", hint="b_priority")
    told(one, Arrived(t("0F0"), 1), Proposed(1, says(0, "1F0", 1)))
    story = [
        Finished(t("1F0")),
        Arrived(t("0F1"), 1),
        Arrived(t("2B0"), 1),
        Proposed(1, says(1, "1F1", 1)),
        Finished(t("1F1")),
    ]
    assert told(one, *story) == [
        [],
        [Propose(says(1, "1F1", 1))],
        [],
        forward("1F1"),
        [Propose(says(2, "1B0", 1))],
    ]


def test_explain_says_why_per_task_waits():
    one = member_of(agreement="per_task", launch_ahead=1)
    one.handle(Arrived(t("0F1"), 1))
    assert one.explain()[0] == (
        "1F1 is ready here; round 0 of the group misses member 1"
    )
    one.handle(Proposed(1, says(0, "1F0", 1)))
    assert one.explain()[0] == ("1F1 is ready here; the group has not agreed on it")
    told(one, Arrived(t("0F0"), 1), Proposed(1, says(1, "1F0", 1)))
    assert one.explain()[:2] == [
        "1F0 was launched and has not finished",
        "1F1 waits for its rank",
    ]


@pytest.mark.parametrize(
    ("size", "agreement"), [(2, "off"), (1, "intersection"), (1, "per_task")]
)
def test_one_process_and_members_that_go_apart_say_nothing(size, agreement):
    one = member_of(size=size, agreement=agreement)
    assert told(one, Started(), Arrived(t("0F1"), 1)) == [[], forward("1F1")]
    with pytest.raises(ProtocolError, match=r"proposed to rank 1 \(round 0: 1F0, room"):
        one.handle(Proposed(1, says(0, "1F0")))


def test_going_apart_shows_in_the_hash():
    """The order of arrivals decides; each sequence is legal, together they are not."""
    first, second = (member_of(member=i, agreement="off") for i in (0, 1))
    for a, b in zip(ts("0F0 0F1"), ts("0F1 0F0"), strict=True):
        told(first, Arrived(a, 1))
        told(second, Arrived(b, 1))
    assert first.num_launched == second.num_launched == 2
    assert first.sequence_hash != second.sequence_hash


def test_the_hash_is_of_the_whole_sequence_and_the_same_in_every_process():
    """Golden: no seed, no salt. A change makes old and new processes disagree."""
    one = member_of(size=1)
    assert one.sequence_hash.hex() == "e4a6a0577479b2b4"
    one.handle(Arrived(t("0F0"), 1))
    assert one.sequence_hash.hex() == "9d0815722272a57e"


@pytest.mark.parametrize("agreement", ["intersection", "per_task"])
@pytest.mark.parametrize(
    ("story", "message"),
    [
        ([(0, 0)], "member 0 proposed to member 0 of a group of 3 (round 0: 1F0"),
        ([(3, 0)], "member 3 proposed to member 0 of a group of 3"),
        ([(-1, 0)], "member -1 proposed to member 0 of a group of 3"),
        ([(1, 1)], "member 1 proposed out of turn (round 1: 1F0, room 1): member 0 is"),
        ([(1, 0), (1, 0)], "in round 0, in which [0, 1] have spoken, and [] in the"),
        ([(1, 0), (1, 1), (1, 1)], "and [1] in the next."),
        ([(1, 0), (1, 2)], "proposed out of turn (round 2"),
        ([(1, 0), (2, 0), (1, 0)], "is in round 1"),
        ([(1, -1)], "proposed out of turn (round -1"),
    ],
)
def test_what_a_member_may_not_say_is_refused_with_the_state(story, message, agreement):
    """This member has spoken in round 0 only where another has begun it."""
    one = member_of(size=3, agreement=agreement)
    *before, (member, number) = story
    if before:
        one.handle(Arrived(t("0F0"), 1))
    for other, earlier in before:
        one.handle(Proposed(other, says(earlier, "1F0", 1)))
    with pytest.raises(ProtocolError, match=re.escape(message)):
        one.handle(Proposed(member, says(number, "1F0", 1)))


@pytest.mark.parametrize(("member", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_member_has_a_place_in_its_group(member, size):
    with pytest.raises(InvariantError, match=f"{member} is no member of {size}"):
        Group(member, size)


def test_an_unknown_agreement_is_refused_with_the_legal_ones():
    with pytest.raises(ConfigError, match=r"(?s)agreement='on' is.*intersection, per_"):
        Policy(agreement="on")


def test_dispatchers_are_made_for_the_ranks_of_the_process_only():
    """Rank 2 spans two processes, rank 0 does not; rank 1 is elsewhere."""
    found = policies.dispatchers(
        CHAIN, Policy(), ranks=[2, 0], groups={2: Group(1, 2), 0: Group(0, 1)}
    )
    assert [each.rank for each in found] == [2, 0]
    assert launches(found[1].handle(Started())) == ts("0F0 0F1")
    assert found[0].handle(Arrived(t("1F0"), 2)) == [Propose(says(0, "2F0"))]


def test_an_invariant_error_tells_what_was_said_of_its_microbatch():
    one = member_of()
    told(one, Arrived(t("0F1"), 1), Proposed(1, says(0, "1F1 1F0")))
    with pytest.raises(InvariantError) as caught:
        one.handle(Arrived(t("0F1"), 1))
    assert str(caught.value).splitlines()[-1] == (
        "  #0 Arrived(0F1, 1)  #1 Propose(round 0: 1F1, room 2)  "
        "#2 Proposed(1, round 0: 1F1 1F0, room 2)  #3 Launch(1F1)  #4 Send(1F1, 2)"
    )
