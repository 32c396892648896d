"""Values come together whatever else is in the mail; proposals go to their rank."""

import logging
import threading

import pytest

from rrfp_jax.coordination.desk import Desk
from rrfp_jax.coordination.groups import Groups
from rrfp_jax.core.agreement import Group
from rrfp_jax.core.events import Proposal, Proposed
from rrfp_jax.core.task import parse
from rrfp_jax.errors import PeerLost, ProtocolError
from rrfp_jax.transport.mail import Letter, Mail


@pytest.fixture
def desks():
    """The desks of three processes, all in this one."""
    mails = [Mail(process, "run") for process in range(3)]
    for mail in mails:
        mail.introduce([each.address for each in mails])
    yield [Desk(process, mail, lambda: None) for process, mail in enumerate(mails)]
    for mail in mails:
        mail.close()


def together(*calls):
    """Returns what the calls return, each made in a thread of its own."""
    found = [None] * len(calls)

    def run(i, call):
        found[i] = call()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def test_all_members_get_the_values_of_all_in_their_order(desks):
    found = together(*(lambda d=d: d.all_gather([d.process], range(3)) for d in desks))
    assert [[tuple(value) for value in each] for each in found] == [
        [(0,), (1,), (2,)]
    ] * 3


def test_only_the_first_gets_what_is_gathered(desks):
    found = together(*(lambda d=d: d.gather(d.process, range(3)) for d in desks))
    assert found == [[0, 1, 2], None, None]


def test_a_fast_member_may_be_ahead_and_groups_do_not_mix(desks):
    """Process 1 gathers twice with 0 before 0 has gathered once with 2."""
    zero, one, two = desks

    def first():
        with_two = zero.all_gather("0 to 2", (0, 2))
        return [with_two, *(zero.all_gather(i, (0, 1)) for i in range(2))]

    found = together(
        first,
        lambda: [one.all_gather(10 + i, (0, 1)) for i in range(2)],
        lambda: two.all_gather("2", (0, 2)),
    )
    assert found[0] == [["0 to 2", "2"], [0, 10], [1, 11]]
    assert found[1] == [[0, 10], [1, 11]]
    assert found[2] == ["0 to 2", "2"]


def test_a_value_may_be_large(desks):
    text = "x" * 3_000_000
    zero, one, _ = desks
    found = together(
        lambda: zero.all_gather(text, (0, 1)), lambda: one.all_gather("", (0, 1))
    )
    assert found[1] == [text, ""]


def test_whoever_waits_learns_that_the_run_has_ended():
    mail = Mail(0, "run")
    mail.introduce([mail.address, mail.address._replace(endpoint="tcp://127.0.0.1:1")])

    def check():
        raise PeerLost("process 1 is lost")

    try:
        with pytest.raises(PeerLost):
            Desk(0, mail, check).all_gather(1, (0, 1))
    finally:
        mail.close()


def test_who_waits_is_at_rest_and_says_for_what(caplog):
    """Else processes that all wait in this way would never count as stalled."""
    mail = Mail(0, "run")
    mail.introduce([mail.address])
    told = []
    desk = Desk(0, mail, lambda: None, told.append, watchdog_s=0.0)
    answers = iter([False, False, False, True])
    try:
        with caplog.at_level(logging.WARNING):
            desk.until(lambda: next(answers), lambda: "a word of [1]")
    finally:
        mail.close()
    assert told == [True, False]
    (record,) = caplog.records
    assert record.getMessage() == (
        "nothing has happened here for 0 s: process 0 waits for a word of [1]"
    )


class Post:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, to, kind, body):
        self.sent.append((to, kind, body))


def groups(process, post=None):
    members = [(0, 1), (2,), (2, 3)]
    return Groups(post or Post(), "proposal 0", process, members)


PROPOSAL = Proposal(0, (parse("0F1"),), 2)


def test_a_process_has_a_group_where_it_shares_a_rank():
    assert groups(2).groups == {2: Group(0, 2)}
    assert groups(1).groups == {0: Group(1, 2)}


def test_a_proposal_goes_to_the_other_members_of_its_rank_only():
    post = Post()
    mine = groups(0, post)
    mine.begin()
    mine.propose(0, PROPOSAL)
    assert post.sent == [(1, "proposal 0", [0, 0, PROPOSAL])]


def letter(step, rank=0, sender=1):
    body = (step, rank, (0, (("F", 0, 1),), 2))
    return Letter(sender, "proposal 0", body, [])


def test_a_proposal_of_the_next_step_is_held_and_one_of_the_last_is_late():
    mine = groups(0)
    mine.begin()
    mine.on_letter(letter(1))
    assert mine.heard() == []
    mine.begin()
    assert mine.heard() == [(0, Proposed(1, PROPOSAL))]
    assert mine.heard() == []
    mine.on_letter(letter(0))
    assert mine.heard() == []


@pytest.mark.parametrize(
    "wrong", [letter(0, sender=3), letter(0, rank=7), Letter(1, "p", ("x",), [])]
)
def test_a_proposal_from_outside_the_rank_is_refused(wrong):
    mine = groups(0)
    mine.begin()
    with pytest.raises(ProtocolError):
        mine.on_letter(wrong)
