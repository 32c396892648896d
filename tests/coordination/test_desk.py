"""Values come together, whatever else is in the mail and however many gather."""

import logging
import threading

import msgpack
import pytest

from rrfp_jax.coordination import desk as desk_lib
from rrfp_jax.coordination.desk import Desk
from rrfp_jax.errors import PeerLost, RemoteError, StallError
from rrfp_jax.transport.mail import Mail


@pytest.fixture(params=["direct", "tree"])
def way(request, monkeypatch):
    """How values are gathered, be the groups as small as they are."""
    if request.param == "tree":
        monkeypatch.setattr(desk_lib, "LARGEST_DIRECT", 0)


@pytest.fixture
def make_desks():
    """Makes the desks of some processes, all in this one."""
    opened = []

    def make(count, check=lambda: None):
        mails = [Mail(process, "run") for process in range(count)]
        opened.extend(mails)
        for mail in mails:
            mail.introduce([each.address for each in mails])
        return [Desk(process, mail, check) for process, mail in enumerate(mails)]

    yield make
    for mail in opened:
        mail.close()


@pytest.fixture
def desks(make_desks, way):
    return make_desks(3)


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


@pytest.mark.parametrize("process", [0, 1])
def test_whoever_waits_learns_that_the_run_has_ended(way, process):
    """In a tree the first waits for one under it, and the other for the first."""
    mail = Mail(process, "run")
    nowhere = mail.address._replace(endpoint="tcp://127.0.0.1:1")
    mail.introduce([nowhere, mail.address] if process else [mail.address, nowhere])

    def check():
        raise PeerLost("process 7 is lost")

    try:
        with pytest.raises(PeerLost):
            Desk(process, mail, check).all_gather(1, (0, 1))
    finally:
        mail.close()


MANY = 20  # more than gather directly; the tree is two deep


def count_sent(desk, sent):
    """Notes whom a desk writes to, and how long the bodies are."""
    send = desk.mail.send

    def counting(to, kind, body, frames):
        sent.append((to, len(msgpack.packb(body))))
        send(to, kind, body, frames)

    desk.mail.send = counting


def test_many_gather_in_a_row_with_few_letters(make_desks):
    """Who is done begins with the next one, while others still pass the last one on."""
    desks = make_desks(MANY)
    sent = [[] for _ in desks]
    for desk, mine in zip(desks, sent, strict=True):
        count_sent(desk, mine)

    def thrice(desk):
        return [desk.all_gather((desk.process, i), range(MANY)) for i in range(3)]

    found = together(*(lambda d=d: thrice(d) for d in desks))
    assert found == [[[(p, i) for p in range(MANY)] for i in range(3)]] * MANY
    assert sum(map(len, sent)) == 3 * 2 * (MANY - 1)
    assert max(len({to for to, _ in mine}) for mine in sent) == 8
    assert [desk._said for desk in desks] == [{}] * MANY


def test_letters_of_a_gather_are_as_short_among_many_as_among_few(make_desks):
    desks, sent = make_desks(MANY), []
    count_sent(desks[-1], sent)
    for members in (range(MANY - 2, MANY), range(MANY)):
        desks[-1].gather(None, members)
    assert len({length for _, length in sent}) == 1


def test_large_groups_that_overlap_do_not_mix(make_desks):
    """Every other process gathers with its like in between."""
    desks, odd = make_desks(MANY), range(1, MANY, 2)

    def gathers(desk):
        found = []
        for i in range(3):
            if desk.process in odd:
                found.append(desk.all_gather(f"{desk.process} odd {i}", odd))
                desk.gather(f"{desk.process} traces {i}", odd)  # numbered with them
            found.append(desk.all_gather(f"{desk.process} all {i}", range(MANY)))
        return found

    found = together(*(lambda d=d: gathers(d) for d in desks))
    for process, mine in enumerate(found):
        expected = []
        for i in range(3):
            if process in odd:
                expected.append([f"{p} odd {i}" for p in odd])
            expected.append([f"{p} all {i}" for p in range(MANY)])
        assert mine == expected


def test_nobody_among_many_has_the_values_before_all_have_called(make_desks):
    """The first of all calls last: when all that is under it has spoken."""
    desks, story, num_heard = make_desks(MANY), [], 0
    whole = desks[0]._gathered

    def hear(letter):
        nonlocal num_heard
        num_heard += 1
        whole(letter)

    def gather(desk):
        if desk is desks[0]:
            desk.handle("gather", hear)
            desk.until(lambda: num_heard == 8)
            story.append("the last one calls")
        desk.all_gather(None, range(MANY))
        story.append("has all")

    together(*(lambda d=d: gather(d) for d in desks))
    assert story == ["the last one calls"] + ["has all"] * MANY


@pytest.mark.parametrize("error", [PeerLost, RemoteError, StallError])
@pytest.mark.parametrize("missing", [0, 1, MANY - 1])
def test_all_who_gather_learn_that_one_is_lost(make_desks, error, missing):
    """Be it the first, one with others under it, or one without."""
    is_known = threading.Event()

    def check():
        if is_known.is_set():
            raise error(f"process {missing} is lost")

    desks = make_desks(MANY, check)
    missed = [d for d in desks if d.process != missing]
    num_waiting = threading.Semaphore(0)
    for desk in missed:
        desk._progress = lambda is_idle: num_waiting.release() if is_idle else None

    def gather(desk):
        with pytest.raises(error, match=f"process {missing} is lost"):
            desk.all_gather(None, range(MANY))
        return "learned"

    def tell():
        for _ in missed:  # each waits, some twice
            assert num_waiting.acquire(timeout=30)
        is_known.set()

    found = together(*(lambda d=d: gather(d) for d in missed), tell)
    assert found == ["learned"] * (MANY - 1) + [None]


def test_who_waits_in_a_tree_says_for_whom(caplog):
    """One of 9 waits for the first, which would name the one that is late."""
    mail = Mail(5, "run")
    mail.introduce([mail.address._replace(endpoint="tcp://127.0.0.1:1")] * 9)

    def check():
        raise PeerLost("process 0 is lost")

    desk = Desk(5, mail, check, watchdog_s=0.0)
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(PeerLost):
            desk.all_gather(None, range(9))
    finally:
        mail.close()
    (record,) = caplog.records
    assert record.getMessage().endswith("process 5 waits for a word of [0]")


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
