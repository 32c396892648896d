"""Groups in virtual time: the model of a round, held to the state machines."""

import dataclasses
import functools
import random
import statistics

import pytest

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import agreed, costs, members, simulator
from tests.core.group_network import Delays, Network

LETTER_S = 0.0003


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of groups; its fields are the arguments of `simulate`."""

    graph: graphs.PipelineGraph
    policy: Policy
    costs: costs.CostTable
    transfers: tuple[costs.CostTable, ...]

    def arguments(self):
        return self.graph, self.policy, self.costs, self.transfers


def drawn(of, policy, size, seed, transfer_s=0.001, cv=1.0) -> Case:
    """Returns a case with lognormal tasks of 10 ms and transfers, each member's own."""
    table = costs.constant(of, 0.010, 0.010, transfer_s, weight_s=0.010)
    transfers = tuple(
        costs.with_lognormal_transfers(table, cv, seed * 8 + member)
        for member in range(size)
    )
    return Case(of, policy, costs.with_lognormal(table, 0.3, seed), transfers)


def varied(seed) -> Case:
    """Returns a case of 4 ranks and 2 to 8 members, of any shape and policy."""
    draw = random.Random(seed)
    placed = draw.choice((placement.one_each(4), placement.v_shaped(4)))
    edges = graphs.chain_edges(len(placed))
    if draw.random() < 0.3:
        edges = (*edges, (0, 2), (1, len(placed) - 1))  # joins, of several inputs
    of = graphs.PipelineGraph(len(placed), draw.choice((8, 16)), edges, placed)
    policy = Policy(
        draw.choice(("bf", "bfw", "bfw_memory", "f_priority")),
        in_flight_limit=draw.choice((2, 4, 8)),
        launch_ahead=draw.choice((1, 2, 2, 3)),
        deterministic=draw.random() < 0.2,
    )
    transfer_s, cv = draw.choice((0.0, 0.001, 0.02)), draw.choice((0.3, 1.0, 3.0))
    return drawn(of, policy, draw.randint(2, 8), seed, transfer_s, cv)


def chain(seed, size=4, hint="bf", num_microbatches=32, **policy) -> Case:
    """Returns a plain chain of 4 ranks under a policy."""
    of = graphs.chain(num_microbatches, placement.one_each(4))
    return drawn(of, Policy(hint, in_flight_limit=8, **policy), size, seed)


@pytest.mark.parametrize("seed", range(24))
def test_the_model_is_exact_where_all_letters_take_the_same_time(seed):
    """Every span, round and letter, as with a dispatcher a member; to the last bit."""
    case = varied(seed)
    letter_s = random.Random(seed).choice((0.0, LETTER_S, 0.003, 0.012))
    model = agreed.simulate(*case.arguments(), letter_s)
    real = members.simulate(*case.arguments(), lambda: letter_s)
    assert model.trace.by_rank() == real.trace.by_rank()
    assert model.num_rounds == real.num_rounds
    assert model.num_letters == real.num_letters


@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_where_letters_vary_the_model_is_near_with_their_mean(hint):
    """Letters of 0.2 to 0.4 ms, 2 to 8 members: the makespan is within 1.5 % in
    each case and 0.3 % on average, the number of rounds within 6 % and 1.5 %.
    """
    makespans, rounds = [], []
    for seed in range(12):
        case, draw = chain(seed, 2 + seed % 7, hint, 24), random.Random(seed)
        model = agreed.simulate(*case.arguments(), LETTER_S)
        letter_s = functools.partial(draw.uniform, 0.0002, 0.0004)
        real = members.simulate(*case.arguments(), letter_s)
        makespans.append(model.trace.makespan_s / real.trace.makespan_s - 1)
        rounds.append(sum(model.num_rounds) / sum(real.num_rounds) - 1)
    assert any(rounds)
    assert max(map(abs, makespans)) <= 0.015
    assert abs(statistics.mean(makespans)) <= 0.003
    assert max(map(abs, rounds)) <= 0.06
    assert abs(statistics.mean(rounds)) <= 0.015


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_members_with_devices_of_their_own_take_as_long(size, hint):
    """The virtual network of the core's tests, whose members share no collective.

    Two members then drift apart by a letter, since the one that answers a round closes
    it first, and say some things twice; three or more close all at once.
    """
    case = chain(size, size, hint, num_microbatches=16)
    of = case.policy.applied_to(case.graph)
    table = costs.applied_to(case.costs, of)
    delays = Delays(
        compute_s=lambda task, member: table.compute_s(task),
        arrival_s=lambda a, to, member: case.transfers[member].transfer_s(a, to),
        message_s=lambda: LETTER_S,
    )
    network = Network(of, case.policy, size, delays).run()
    model = agreed.simulate(*case.arguments(), LETTER_S)
    ratio = model.trace.makespan_s / network.makespan_s
    rounds = sum(model.num_rounds) / sum(network.num_rounds)
    assert ratio == pytest.approx(1, abs=0.01)
    assert rounds == pytest.approx(1, abs=0.03 if size > 2 else 0.2)
    if size > 2:
        pairs = [
            pair
            for rank, launches in enumerate(model.trace.launches())
            for pair in zip(launches, network.sequences(rank)[0], strict=True)
        ]
        assert sum(a == b for a, b in pairs) >= 0.8 * len(pairs)


@pytest.mark.parametrize("seed", range(6))
def test_free_letters_and_members_that_see_the_same_cost_nothing(seed):
    case = varied(seed)
    alike = dataclasses.replace(case, transfers=case.transfers[:1] * 4)
    table = dataclasses.replace(case.costs, transfer=case.transfers[0].transfer)
    alone = simulator.simulate(case.graph, case.policy, table)
    model = agreed.simulate(*alike.arguments(), 0.0)
    assert model.trace.by_rank() == alone.by_rank()
    assert sorted(model.trace.transfers) == sorted(alone.transfers)


def test_the_agreement_of_the_paper_is_on_the_critical_path():
    """A round a task or more, while the device waits; ours hides behind what is ahead.

    On ranks that are hardly ever idle: 32 microbatches on 2, and free transfers.
    """
    of = graphs.chain(32, placement.one_each(2))
    slower = {}
    for name in ("intersection", "per_task"):
        policy = Policy(in_flight_limit=8, agreement=name)
        case = drawn(of, policy, 4, seed=0, transfer_s=0.0)
        free = members.simulate(*case.arguments(), lambda: 0.0)
        found = members.simulate(*case.arguments(), lambda: LETTER_S)
        slower[name] = found.trace.makespan_s - free.trace.makespan_s
        if name == "per_task":
            assert min(found.num_rounds) >= 64
    assert slower["per_task"] >= 64 * LETTER_S
    assert slower["intersection"] <= slower["per_task"] / 3


@pytest.mark.parametrize(
    ("simulate", "change", "named"),
    [
        (agreed.simulate, {"agreement": "per_task"}, "agreement=per_task"),
        (members.simulate, {"agreement": "off"}, "agreement=off"),
    ],
)
def test_an_agreement_that_cannot_be_simulated_is_refused(simulate, change, named):
    case = chain(0)
    policy = dataclasses.replace(case.policy, **change)
    with pytest.raises(ConfigError, match=named):
        simulate(case.graph, policy, case.costs, case.transfers, LETTER_S)


def test_letters_that_arrive_before_they_are_sent_and_lone_members_are_refused():
    case = chain(0)
    with pytest.raises(ConfigError, match=r"letters of -0\.1 s"):
        agreed.simulate(*case.arguments(), -0.1)
    lone = dataclasses.replace(case, transfers=case.transfers[:1])
    with pytest.raises(ConfigError, match="a group of 1 "):
        agreed.simulate(*lone.arguments(), LETTER_S)
