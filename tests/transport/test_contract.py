"""The contract of every transport; whoever joins `WAYS` is held to it.

In one process: `InProcess`; `near`, `CrossProcess` between ranks of one process; and
`letters`, the same by letters to itself, as where a rank spans this process and
others. Between two real ones: `host` and `transfer`.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

from rrfp_jax.core.task import parse
from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport.base import Message, Tied
from tests.transport.nodes import LATE, Bring, Key, Link, Place

IN_ONE = ("in_process", "near", "letters")
BETWEEN = ("host", "transfer")
WAYS = (*IN_ONE, *(pytest.param(w, marks=pytest.mark.multiprocess) for w in BETWEEN))
BY_LETTER = WAYS[2:]
A, B, C = Message(parse("0F0"), 1), Message(parse("0F1"), 1), Message(parse("0F0"), 2)
BACK = Message(parse("1B0"), 0)
HERE, THERE = Place((0,)), Place((2,))


@pytest.fixture
def link_by(request):
    """Connects two nodes in one way or another."""

    def connect(way, **options):
        nodes = request.getfixturevalue("pair") if way in BETWEEN else None
        return Link(way, nodes or [request.getfixturevalue("alone")], **options)

    return connect


@pytest.fixture(params=WAYS)
def link(request, link_by):
    return link_by(request.param)


@pytest.fixture(params=BY_LETTER)
def by_letter(request, link_by):
    return link_by(request.param)


@pytest.fixture(params=IN_ONE[:2])
def by_copy(request, link_by):
    return link_by(request.param)


def bring(*values, source=HERE, target=THERE, sample_ids=()):
    return Bring(values, source, target, sample_ids)


def number(taken):
    (array,) = taken
    return float(array.whole())


EVERY_DTYPE = [
    np.arange(6).reshape(2, 3).astype(dtype)
    for dtype in (
        *("f4", "f2", "i4", "u4", "i1", "u1", "c8", "?"),
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
    )
]
OTHERS = [
    np.int32(7),
    np.bool_(True),
    np.float32(np.nan),
    np.zeros((0, 2), np.float32),
    np.zeros((3, 0), ml_dtypes.bfloat16),
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
]


def assert_arrives(link, values, source=HERE, target=THERE):
    link.begin({A: bring(*values, source=source, target=target)})
    senders, takers = link.takers(source), link.takers(target)
    for node in senders:
        node.send(A)
    for node in takers:
        assert link.wait_for(1, at=link.nodes.index(node)) == [A]
        for sent, taken in zip(values, node.take(A), strict=True):
            assert taken.is_as_expected
            for box, part in taken.parts.items():
                cut = sent[tuple(slice(*each) for each in box)]
                assert part.dtype == sent.dtype
                np.testing.assert_array_equal(part, cut)
    assert [node.num_in_transit() for node in link.nodes] == [0] * len(link.nodes)


def test_a_payload_arrives_whole_where_it_is_to_lie(link):
    assert_arrives(link, [*EVERY_DTYPE, *OTHERS])


def test_many_arrays_arrive(link):
    assert_arrives(link, [np.full(i, i, np.float32) for i in range(100)])


def test_a_large_array_arrives(link):
    assert_arrives(link, [np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)])


def test_a_payload_without_arrays_arrives_too(link):
    assert_arrives(link, [])


def test_a_payload_without_elements_arrives_too(link):
    """Of which no part has to travel."""
    assert_arrives(link, [np.zeros((0, 2), np.float32)])


def test_random_keys_arrive_as_keys(link):
    link.begin({A: bring(Key(3), np.float32(1.0))})
    link.one.send(A)
    assert link.wait_for(1) == [A]
    key, _ = link.two.take(A)
    assert key.is_as_expected
    assert key.dtype == "key<fry>"
    np.testing.assert_array_equal(key.whole(), [0, 3])


MESHES = {
    "one device": lambda a, b: Place((a,)),
    "data 2": lambda a, b: Place((a, b), data=2),
    "model 2, whole": lambda a, b: Place((a, b)),
    "model 2, by rows": lambda a, b: Place((a, b), spec=("model", None)),
    "model 2, by columns": lambda a, b: Place((a, b), spec=(None, "model")),
}


@pytest.mark.parametrize(("source", "target"), itertools.product(MESHES, MESHES))
def test_a_value_is_cut_as_the_receivers_mesh_wants_it(link, source, target):
    values = [np.arange(24, dtype=np.float32).reshape(4, 6), np.zeros((0, 2), bool)]
    assert_arrives(link, values, MESHES[source](0, 1), MESHES[target](2, 3))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Place((0, 1, 2, 3), data=4), Place((2, 3), data=2)),
        (Place((0, 1, 2, 3), data=4), Place((0, 1, 2, 3), spec=(None, "model"))),
        (Place((0, 1, 2, 3), data=2), Place((1,))),
        (Place((0, 2), data=2), Place((3, 1), data=2)),
        (Place((0, 2)), Place((1, 3), data=2)),
        (Place((1,)), Place((0, 2))),
        (Place((3,)), Place((0, 1, 2, 3), data=4)),
        (Place((2, 3), data=2), Place((0, 1), data=2)),
    ],
    ids=str,
)
def test_a_process_may_be_at_both_ends(link, source, target):
    values = [np.arange(32, dtype=np.float32).reshape(4, 8), np.int32(5)]
    for place in (source, target):
        if place.spec:
            values = values[:1]
    assert_arrives(link, values, source, target)


def test_messages_in_both_directions_do_not_meet(link):
    link.begin(
        {A: bring(np.float32(1)), BACK: bring(np.float32(2), source=THERE, target=HERE)}
    )
    link.one.send(A)
    link.two.send(BACK)
    if len(link.nodes) == 1:
        assert sorted(link.wait_for(2)) == sorted([A, BACK])
    else:
        assert (link.wait_for(1), link.wait_for(1, at=0)) == ([A], [BACK])
    assert (number(link.two.take(A)), number(link.one.take(BACK))) == (1, 2)


ABC = {name: bring(np.float32(i)) for i, name in enumerate((A, B, C))}


def test_payloads_are_taken_in_any_order(link):
    """Messages from one source to two stages are two."""
    link.begin(ABC)
    for name in ABC:
        link.one.send(name)
    assert sorted(link.wait_for(3)) == sorted(ABC)
    for i, name in ((2, C), (0, A), (1, B)):
        assert link.two.has(name)
        assert number(link.two.take(name)) == i
        assert not link.two.has(name)


def test_an_arrival_is_reported_once(link):
    link.begin(ABC)
    for name in (A, B):
        link.one.send(name)
        assert link.wait_for(1) == [name]
        assert link.two.arrived() == []


def test_names_of_tied_parameters_are_names(link):
    """Those of a value and of its gradient differ, and so do both ways."""
    names = [
        Tied(*each) for each in itertools.product((False, True), (0, 1), (0,), (1,))
    ]
    link.begin({name: bring(np.float32(i)) for i, name in enumerate(names)})
    for name in names:
        link.one.send(name)
    assert sorted(link.wait_for(4)) == sorted(names)
    assert [number(link.two.take(name)) for name in names] == [0, 1, 2, 3]
    with pytest.raises(ProtocolError, match="gradient of tied parameter 1 from copy 0"):
        link.one.send(names[-1])


def test_what_is_in_transit_is_counted_until_it_is_reported(by_copy):
    by_copy.begin(ABC)
    assert by_copy.one.num_in_transit() == 0
    by_copy.one.send(A)
    by_copy.one.send(B)
    assert by_copy.one.num_in_transit() == 2
    assert sorted(by_copy.wait_for(2)) == [A, B]
    assert by_copy.one.num_in_transit() == 0


def test_a_payload_may_be_taken_before_it_has_arrived(by_copy):
    by_copy.begin(ABC)
    by_copy.one.send(B)
    assert number(by_copy.one.take(B)) == 1
    assert by_copy.wait_for(1) == [B]
    assert by_copy.one.num_in_transit() == 0


def test_what_was_never_sent_is_refused(link):
    link.begin(ABC)
    link.one.send(A)
    assert not link.two.has(B)
    with pytest.raises(ProtocolError, match=r"0F1 \(stage 0, .*\) for stage 1 is not"):
        link.two.take(B)


def test_what_was_taken_is_gone(link):
    link.begin(ABC)
    link.one.send(A)
    link.wait_for(1)
    link.two.take(A)
    with pytest.raises(ProtocolError, match=r"0F0 \(stage 0, .*\) for stage 1 is not"):
        link.two.take(A)


def test_a_name_is_used_once_a_step(link):
    """Whether the first use is here yet or not."""
    link.begin(ABC)
    for _ in range(2):
        link.one.send(A)
        for name in (A, A):
            with pytest.raises(
                ProtocolError, match=r"0F0 \(stage 0, .*\) .* sent twice"
            ):
                link.one.send(name)
        assert link.wait_for(1) == [A]
        with pytest.raises(ProtocolError, match="sent twice"):
            link.one.send(A)
        assert number(link.two.take(A)) == 0
        link.begin(ABC)


def test_a_step_forgets_what_the_last_one_left(link):
    link.begin(ABC)
    link.one.send(A)
    assert link.wait_for(1) == [A]
    link.begin(ABC)
    assert not link.two.has(A)
    assert [node.num_in_transit() for node in link.nodes] == [0] * len(link.nodes)
    with pytest.raises(ProtocolError, match="is not here"):
        link.two.take(A)


def test_a_send_does_not_wait_for_values_that_do_not_exist(link):
    link.begin(ABC)
    link.one.begin_late()
    link.one.send(A, is_late=True)
    link.one.send(C, is_late=True)
    assert link.one.arrived() == []
    assert not link.one.is_late_here()
    if link.way != "transfer":  # there, it is the receiver who waits
        assert link.one.num_in_transit() == 2
    link.one.let_late_come()
    assert sorted(link.wait_for(2)) == [A, C]
    assert number(link.two.take(A)) == LATE


def test_a_message_that_takes_long_holds_up_no_other(link):
    """Neither a later send, nor its report, nor its taking waits for it."""
    link.begin({**ABC, BACK: bring(np.float32(9), source=THERE, target=HERE)})
    link.one.begin_late()
    link.one.send(A, is_late=True)
    link.two.send(BACK)
    assert link.wait_for(1, at=0) == [BACK]
    link.one.send(B)
    assert link.wait_for(1) == [B]
    assert number(link.two.take(B)) == 1
    assert number(link.one.take(BACK)) == 9
    assert not link.one.is_late_here()
    link.one.let_late_come()
    assert link.wait_for(1) == [A]
    assert number(link.two.take(A)) == LATE


BIG = np.arange(1 << 22, dtype=np.float32)  # 16 MiB: more than any socket buffers


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", BETWEEN)
def test_a_receiver_that_does_not_look_holds_up_no_sender(way, link_by):
    """Neither what it sends, nor what it receives."""
    link = link_by(way)
    names = [Message(parse(f"0F{j}"), 1) for j in range(5)]
    back = bring(np.float32(1), source=THERE, target=HERE)
    link.begin({**{name: bring(BIG) for name in names}, BACK: back})
    link.two.send(BACK)
    link.two.arrived()  # the last time that it does
    for name in names:
        link.one.send(name)
    while not (found := link.one.arrived()):
        pass
    assert found == [BACK]
    assert sorted(link.wait_for(5)) == names
    for name in names:
        np.testing.assert_array_equal(link.two.take(name)[0].whole(), BIG)


def test_a_tied_parameter_that_was_sent_may_be_donated(link):
    """As soon as it exists, and whether or not anything of it has left."""
    names = [Tied(True, group, 0, 1) for group in range(5)]
    link.begin({name: bring(BIG) for name in names})
    for name in names:
        link.one.send(name, is_donated=True)
    link.wait_for(5)
    for name in names:
        np.testing.assert_array_equal(link.two.take(name)[0].whole(), BIG)


def test_nothing_is_kept_alive(link):
    """Not by the sender once it is out, not by the receiver once it is taken."""
    link.begin({name: bring(np.arange(8.0), np.zeros((0, 1))) for name in (A, B)})
    for name in (A, B):
        link.one.send(name)
    link.wait_for(2)
    link.two.take(A)
    assert [node.num_alive(A) for node in link.nodes] == [0] * len(link.nodes)
    link.begin({})  # B goes untaken
    assert [node.num_alive(B) for node in link.nodes] == [0] * len(link.nodes)


# C23: what comes from other processes.


@pytest.mark.parametrize(
    ("sent", "wanted", "reason"),
    [
        (
            bring(np.zeros((2, 3), np.float32)),
            bring(np.zeros((3, 2), np.float32)),
            "has float32[2, 3] for array 0 at ((0, 2), (0, 3)); the whole is to be "
            "['float32[3, 2]'].",
        ),
        (
            bring(np.zeros(2, np.float32)),
            bring(np.zeros(2, np.int32)),
            "has float32[2] for array 0; expected int32[2].",
        ),
        (
            bring(np.float32(0), np.int32(0)),
            bring(np.float32(0)),
            "has int32[] for array 1 at (); the whole is to be ['float32[]'].",
        ),
        (
            bring(np.float32(0)),
            bring(np.float32(0), np.int32(0)),
            "has 1 of 2 parts; the whole is to be ['float32[]', 'int32[]'].",
        ),
        (
            bring(),
            bring(np.float32(0)),
            "has 0 of 1 parts; the whole is to be ['float32[]'].",
        ),
        (
            bring(np.zeros(2, np.float32), source=Place((0, 1), data=2)),
            bring(np.zeros(2, np.float32)),
            "has float32[1] for array 0 at ((0, 1),); the whole is to be "
            "['float32[2]'].",
        ),
        (
            bring(np.float32(0), sample_ids=(4, 5)),
            bring(np.float32(0), sample_ids=(4, 6)),
            "was computed from the samples (4, 5); here that microbatch is (4, 6).",
        ),
    ],
    ids=[
        "shape",
        "dtype",
        "array too many",
        "array too few",
        "no array",
        "part",
        "sample ids",
    ],
)
def test_what_does_not_fit_is_refused_and_named(by_letter, sent, wanted, reason):
    """By step, stage and microbatch."""
    by_letter.begin({})
    by_letter.begin({A: sent})
    by_letter.one.send(A)
    by_letter.one.flush()
    by_letter.two.expect({A: wanted})
    with pytest.raises(ProtocolError) as caught:
        by_letter.two.read_letters(1)
    who = "0F0 (stage 0, microbatch 0) for stage 1 of step 1, from process 0, "
    assert str(caught.value).startswith(who + reason)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", BETWEEN)
def test_who_has_nothing_to_tell_is_refused(way, link_by):
    link = link_by(way)
    link.begin({A: bring(np.float32(0))})
    link.one.send(A)
    link.one.flush()
    link.two.expect({A: bring(np.float32(0), source=Place((3,)), target=Place((0, 2)))})
    with pytest.raises(ProtocolError, match=r"not expected from there, but from \[1\]"):
        link.two.read_letters(1)


def test_a_message_that_the_step_does_not_have_is_refused(by_letter):
    by_letter.begin(ABC)
    by_letter.one.send(A)
    by_letter.one.flush()
    by_letter.two.expect({})
    with pytest.raises(ProtocolError, match=r"of step 0, from .* is not expected here"):
        by_letter.two.read_letters(1)


@pytest.mark.parametrize("is_here", [False, True])
def test_a_duplicate_is_refused(by_letter, is_here):
    """Whether the first is whole or not, and also when it was taken."""
    two_parts = bring(np.zeros(2, np.float32), source=Place((0, 2), data=2))
    by_letter.begin({A: ABC[A] if is_here else two_parts})
    by_letter.one.send(A)
    by_letter.one.flush()
    by_letter.two.read_letters(1)
    for is_last in (False, True):
        with pytest.raises(ProtocolError, match=r"0F0 .* of step 0, .*, came twice"):
            by_letter.two.read_again()
        if is_here and not is_last:
            assert by_letter.wait_for(1) == [A]
            by_letter.two.take(A)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", BETWEEN)
def test_a_message_of_a_later_step_is_held_until_it_begins(way, link_by):
    link = link_by(way)
    link.begin({A: bring(np.float32(1))})
    link.one.send(A)
    link.one.begin({A: bring(np.float32(2)), B: bring(np.float32(3))})
    link.one.send(A)
    link.one.send(B)
    link.one.begin({A: bring(np.float32(4))})
    link.one.send(A)
    link.one.flush()
    link.two.read_letters(4)
    assert link.wait_for(1) == [A]
    assert number(link.two.take(A)) == 1
    link.two.begin({A: bring(np.float32(2)), B: bring(np.float32(3))})
    assert sorted(link.wait_for(2)) == [A, B]
    assert [number(link.two.take(name)) for name in (A, B)] == [2, 3]
    link.two.begin({A: bring(np.float32(4))})
    assert link.wait_for(1) == [A]
    assert number(link.two.take(A)) == 4


def test_a_message_of_an_earlier_step_is_refused(by_letter):
    """Also what was launched in it goes out."""
    by_letter.begin(ABC)
    by_letter.one.send(A)
    by_letter.begin(ABC)
    by_letter.one.flush()
    with pytest.raises(
        ProtocolError, match=r"0F0 .* of step 0, .* in step 1: too late"
    ):
        by_letter.two.read_letters(1)


@pytest.mark.parametrize(
    "body",
    [
        None,
        (0, "task"),
        (0, "task", (("F", 0, 0), 1), None, (), None, 0, ((0, (), "float32"),)),
        (0, "task", (("F", 0, 0), 1), None, (), None, 0, ((0, (), ("float32", ())),)),
        (0, "task", (("X", 0, 0), 1), None, (), None, 0, ()),
        (0, "tied", (1,), None, (), None, 0, ()),
        ("0", "?", (), None, (), None, 0, ()),
    ],
)
def test_what_tells_of_no_message_is_refused(by_letter, body):
    by_letter.begin(ABC)
    by_letter.one.post(len(by_letter.nodes) - 1, body)
    with pytest.raises(ProtocolError, match="sent"):
        by_letter.two.read_letters(1)


# What is pulled ahead.


@pytest.mark.multiprocess
def test_no_more_is_pulled_than_may_be(link_by):
    """But for the lowest that is there, for which the other edge of a join may wait."""
    link = link_by("transfer", max_pulls=2)
    names = [Message(parse(f"0F{j}"), 1) for j in range(6)]
    link.begin({name: bring(np.float32(name.source.microbatch)) for name in names})
    for j in (5, 3, 4):
        link.one.send(names[j])
    assert sorted(link.wait_for(2)) == [names[3], names[5]]
    assert link.two.num_in_transit() == 1
    for j in (2, 1):  # one after another, lower and lower
        link.one.send(names[j])
        assert link.wait_for(1) == [names[j]]
    link.one.send(names[0])
    assert link.wait_for(1) == [names[0]]
    assert link.two.num_pulled() == 5
    for j in (0, 1, 2):
        link.two.take(names[j])
        assert link.two.arrived() == []
    link.two.take(names[5])
    assert link.wait_for(1) == [names[4]]
    for j in (3, 4):
        assert number(link.two.take(names[j])) == j
    assert link.two.num_pulled() == 0


@pytest.mark.multiprocess
def test_an_edge_has_its_own_limit(link_by):
    link = link_by("transfer", max_pulls=1)
    names = [Message(parse(f"{s}F{j}"), 2) for s in (0, 1) for j in (0, 1)]
    link.begin({name: bring(np.float32(0)) for name in names})
    for name in names:
        link.one.send(name)
    assert sorted(link.wait_for(2)) == [names[0], names[2]]
    link.two.take(names[2])
    assert link.wait_for(1) == [names[3]]


@pytest.mark.multiprocess
def test_a_join_of_two_edges_ends_whatever_comes_first(link_by):
    """With one pull an edge, and every order of three microbatches on each."""
    for orders in itertools.product(itertools.permutations(range(3)), repeat=2):
        link = link_by("transfer", max_pulls=1)
        names = [[Message(parse(f"{s}F{j}"), 2) for j in range(3)] for s in (0, 1)]
        link.begin({name: bring(np.float32(0)) for each in names for name in each})
        for at in range(3):
            for each, order in zip(names, orders, strict=True):
                link.one.send(each[order[at]])
        here, left = set(), set(range(3))
        while left:
            here |= set(link.wait_for(1))
            for j in sorted(left):
                if {names[0][j], names[1][j]} <= here:
                    link.two.take(names[0][j])
                    link.two.take(names[1][j])
                    left.remove(j)


@pytest.mark.multiprocess
def test_a_payload_of_two_senders_counts_once(link_by):
    """And what came through the host does not count."""
    link = link_by("transfer", max_pulls=2, host_limit_bytes=64)
    names = [Message(parse(f"0F{j}"), 1) for j in range(8)]
    big, small = np.zeros((4, 16), np.float32), np.zeros((4, 2), np.float32)
    source, target = Place((0, 2), data=2), Place((1, 3), spec=(None, "model"))
    table = {
        name: bring(big if j < 4 else small, source=source, target=target)
        for j, name in enumerate(names)
    }
    link.begin(table)
    for name in names:
        link.one.send(name)
        link.two.send(name)
    for at in (0, 1):
        assert {names[0], names[1]} <= set(link.wait_for(6, at=at))
        for name in names[4:]:
            link.nodes[at].take(name)
        assert link.nodes[at].num_pulled() == 2
        link.nodes[at].take(names[1])
        link.nodes[at].take(names[0])
        assert sorted(link.wait_for(2, at=at)) == names[2:4]


@pytest.mark.multiprocess
def test_what_is_small_goes_through_the_host(link_by):
    link = link_by("transfer", host_limit_bytes=64)
    link.begin({A: bring(np.zeros(16, np.float32)), B: bring(np.zeros(17, np.float32))})
    for name in (A, B):
        link.one.send(name)
    assert sorted(link.wait_for(2)) == [A, B]
    assert link.two.num_pulled() == 1
