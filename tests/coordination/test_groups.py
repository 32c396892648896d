"""Proposals go to the members of their rank, and are heard in their step."""

import pytest

from rrfp_jax.coordination.groups import Groups
from rrfp_jax.core.agreement import Group
from rrfp_jax.core.events import Proposal, Proposed
from rrfp_jax.core.task import parse
from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport.mail import Letter


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
