"""Laws of the launch agreement, over random steps; and what it costs.

The laws of each moment are in `group_network.Network`, which raises inside the run.
"""

import dataclasses
import random

import pytest

from rrfp_jax.core import graph, orders, placement, trace
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from tests.core import group_network
from tests.core.group_network import Delays, Network


def network(seed, agreement) -> Network:
    """Returns a random step of two to four members a rank, some of them apart in time.

    The policies are readiness-first behind small limits, and fixed orders.
    """
    draw = random.Random(seed)
    num_ranks = draw.randint(1, 3)
    ranks = placement.interleaved(num_ranks, draw.choice((1, 1, 2)))
    policy = Policy(
        draw.choice(("bf", "bfw", "b_priority", "1f1b")),
        in_flight_limit=draw.randint(1, 4),
        launch_ahead=draw.randint(1, 3),
        deterministic=draw.random() < 0.1,
        agreement=agreement,
    )
    num_microbatches = draw.randint(1, 6)
    if policy.hint == "1f1b":
        num_microbatches += -num_microbatches % num_ranks  # as it is interleaved
        if draw.random() < 0.5:
            policy = dataclasses.replace(policy, order="fixed", in_flight_limit=32)
    of = graph.chain(num_microbatches, ranks)
    delays = group_network.random_delays(seed)
    return Network(of, policy, draw.randint(2, 4), delays)


@pytest.mark.parametrize(
    ("agreement", "count"), [("intersection", 1000), ("per_task", 200)]
)
def test_members_launch_the_same_whatever_they_see_when_and_finish(agreement, count):
    """Each task once, after its inputs, within the limit; no stall, and no spinning.

    A member begins a round only when a task became ready or finished at it since it
    spoke last, so there are at most as many rounds as such events at all members.
    """
    for seed in range(count):
        ran = network(seed, agreement).run()
        assert ran.is_done, f"seed {seed}"
        for rank, num_rounds in enumerate(ran.num_rounds):
            first, *others = ran.sequences(rank)
            assert all(other == first for other in others)
            assert len(set(ran.hashes(rank))) == 1
            peak = orders.peak_in_flight(first, ran.graph, rank)
            assert peak <= ran.policy.in_flight_limit
            assert num_rounds <= 2 * len(first) * ran.size


def test_without_agreement_members_mismatch_and_the_hashes_show_it():
    """The control: each member finishes by itself, and collectives would hang."""
    are_equal = []
    for seed in range(200):
        ran = network(seed, "off").run()
        assert ran.is_done
        assert ran.num_rounds == [0] * ran.graph.num_ranks
        for rank in range(ran.graph.num_ranks):
            first, *others = ran.sequences(rank)
            is_equal = all(other == first for other in others)
            assert is_equal == (len(set(ran.hashes(rank))) == 1)
            are_equal.append(is_equal)
    assert are_equal.count(False) > len(are_equal) / 10


@pytest.mark.parametrize("agreement", ["intersection", "per_task"])
def test_the_log_of_a_member_replays_alone(agreement):
    """What others proposed is among its events; JSON keeps every word of it."""
    for seed in range(30):
        ran = network(seed, agreement).run()
        for member in range(ran.size):
            record = Trace(ran.graph)
            record.log = ran.logs[member]
            copy = trace.from_json(trace.to_json(record))
            assert copy == record
            expected = [ran.sequences(r)[member] for r in range(ran.graph.num_ranks)]
            assert trace.replay(copy, ran.fresh(member)) == expected


def opposed(agreement, message_s, **policy) -> Network:
    """Runs 4 ranks of 2 members that see arrivals 10 ms apart, in opposite orders."""
    delays = Delays(
        compute_s=lambda task, member: 0.020 if task.kind == "F" else 0.040,
        arrival_s=lambda source, to, member: 0.010 * (source.microbatch % 2 == member),
        message_s=lambda: message_s,
    )
    policy = Policy(agreement=agreement, **policy)
    ran = Network(graph.chain(32, (0, 1, 2, 3)), policy, 2, delays).run()
    assert ran.is_done
    return ran


def test_agreement_costs_less_than_half_a_percent_and_half_of_the_papers():
    """Of the makespan, a device idles beside a task that is ready at all members.

    A message takes 0.3 ms. With free messages nothing is lost, so it is all theirs.
    """
    lost = {}
    for agreement in ("intersection", "per_task"):
        ran = opposed(agreement, 0.0003)
        parts = [ran.lost_s(rank) / ran.makespan_s for rank in range(4)]
        lost[agreement] = (max(parts), sum(parts) / 4)
        print(
            f"{agreement}: makespan {ran.makespan_s:.4f} s; lost at most "
            f"{max(parts):.3%}, mean {sum(parts) / 4:.3%}; rounds {ran.num_rounds}"
        )
        free = opposed(agreement, 0.0)
        assert all(free.lost_s(rank) < 1e-9 for rank in range(4))
    for ours, theirs in zip(lost["intersection"], lost["per_task"], strict=True):
        assert 0 < ours <= 0.005
        assert ours <= theirs / 2


def test_without_launch_ahead_agreement_is_on_the_critical_path():
    """The control: what hides the messages is the task that is already launched."""
    ahead, bare = (opposed("intersection", 0.0003, launch_ahead=a) for a in (2, 1))
    assert bare.lost_s(3) > 10 * ahead.lost_s(3)
