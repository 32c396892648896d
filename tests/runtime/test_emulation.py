"""Emulated devices: real programs that keep the simulator's time."""

import itertools
import random

import pytest

from rrfp_jax import Emulation, Policy
from rrfp_jax.core import memory, policies
from rrfp_jax.core import task as task_lib
from rrfp_jax.core import trace as trace_lib
from rrfp_jax.sim import costs, simulator
from tests.runtime import toys

COUNT = 4
NAMES = ("one_each", "interleaved", "v_shaped", "two_towers_that_join", "skip_edges")


def random_costs(seed, unit_s=1.0):
    """Durations that differ by microbatch, and of which no two are equal."""

    def draw_all(graph):
        draw = random.Random(seed)
        flat = costs.constant(graph, 1.0, 1.0, 1.0)

        def drawn(table):
            return {
                key: tuple(unit_s * draw.uniform(0.1, 1.0) for _ in each)
                for key, each in sorted(table.items())
            }

        return costs.CostTable(drawn(flat.compute), drawn(flat.transfer))

    return draw_all


@pytest.fixture
def emulated():
    """Runs one step of a toy under a cost model."""
    used = []

    def run(name, policy, of_graph, blocking=False):
        pipeline = toys.compiled(name)
        used.append(pipeline)
        pipeline.policy = policy
        pipeline.emulation = Emulation(of_graph, blocking)
        return pipeline.run(toys.TOYS[name].params(), toys.microbatches_of(COUNT))

    yield run
    for pipeline in used:
        pipeline.emulation = None


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("name", NAMES)
def test_without_host_delay_the_trace_is_the_simulators(
    name, blocking, emulated, virtual_time
):
    """On a clock that only sleeping moves: the same launches, at the same times."""
    for seed, rule in enumerate(policies.RULES):
        policy = Policy(rule, launch_ahead=seed % 2 + 1)
        result = emulated(name, policy, random_costs(seed), blocking)
        graph = result.trace.graph
        simulated = simulator.simulate(
            graph, policy, random_costs(seed)(graph), blocking
        )
        assert result.trace.launches() == simulated.launches()
        # The sleeper is at most a timer tick too late, at each of the events.
        late_s = 150e-6 * len(simulated.log)
        for found, exact in zip(
            sorted(result.trace.spans), sorted(simulated.spans), strict=True
        ):
            assert found.task == exact.task
            assert exact.start_s - 1e-9 <= found.start_s <= exact.start_s + late_s
        toys.assert_close((result.loss, list(result.grads)), toys.expected(name, COUNT))


def test_a_slow_transfer_makes_bf_overtake(emulated, virtual_time):
    """The emulation decides what is ready: 1F1 is late, so 1B0 goes first."""

    def late_second(graph):
        table = costs.constant(graph, 1.0, 1.0, 0.1)
        first_edge = (trace_lib.task.Kind.F, 0, 1)
        slow = {first_edge: tuple(9.0 * (j == 1) for j in range(COUNT))}
        return costs.CostTable(table.compute, {**table.transfer, **slow})

    result = emulated("three", Policy("f_priority", launch_ahead=1), late_second)
    names = [str(task) for task in result.trace.launches()[1]]
    assert names.index("1B0") < names.index("1F1")


LATE_S = 100.0  # after all else


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("two_towers_that_join", (0, 1)),
        ("two_towers_that_join", (1, 3)),
        ("two_towers_that_join", (2, 3)),
        ("skip_edges", (0, 3)),
        ("skip_edges", (0, 2)),
    ],
)
def test_a_late_transfer_delays_only_what_needs_it(name, edge, emulated, virtual_time):
    """All else is launched as early as without it, whatever edge it comes by.

    It is that of the last microbatch: behind it on its link are no others.
    """
    microbatch = COUNT - 1

    def of_graph(late_s):
        def table_of(graph):
            table = costs.constant(graph, 1.0, 2.0, 0.25)
            transfers = dict(table.transfer)
            key = (task_lib.Kind.F, *edge)
            late = [late_s * (j == microbatch) for j in range(COUNT)]
            transfers[key] = tuple(map(sum, zip(transfers[key], late, strict=True)))
            return costs.CostTable(table.compute, transfers)

        return table_of

    starts = []
    for late_s in (0.0, LATE_S):
        result = emulated(name, Policy("bf", in_flight_limit=COUNT), of_graph(late_s))
        starts.append({span.task: span.start_s for span in result.trace.spans})
    route = result.trace.graph.route(microbatch)
    needing, more = set(), [(task_lib.Kind.F, edge[1])]
    while more:
        needing.add(node := more.pop())
        more += set(route.successors.get(node, ())) - needing
    usual, found = starts
    for task, start_s in found.items():
        if task.microbatch == microbatch and task[:2] in needing:
            assert start_s >= LATE_S
        else:
            assert start_s < usual[task] + 0.1  # the sleeper's lateness, not a task's


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
def test_in_real_time_a_step_takes_at_least_what_was_simulated(emulated, blocking):
    """Every span lasts as long as its cost; the step no less than the simulated one."""
    of_graph = random_costs(7, unit_s=2e-3)
    policy = Policy("1f1b", "fixed")  # whose order no delay can change
    result = emulated("one_each", policy, of_graph, blocking)
    graph = result.trace.graph
    table = costs.applied_to(of_graph(graph), graph)
    simulated = simulator.simulate(graph, policy, of_graph(graph), blocking)
    assert result.trace.launches() == simulated.launches()
    assert result.trace.makespan_s >= simulated.makespan_s - 1e-9
    for span in result.trace.spans:
        assert span.end_s - span.start_s == pytest.approx(table.compute_s(span.task))
    for transfer in result.trace.transfers:
        lasted = transfer.end_s - transfer.start_s
        assert lasted == pytest.approx(table.transfer_s(transfer.source, transfer.to))
    toys.assert_close(
        (result.loss, list(result.grads)), toys.expected("one_each", COUNT)
    )


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
def test_no_event_is_told_before_it_is_due(emulated, blocking, virtual_time):
    """Finishes after their span, arrivals after their transfer, in ascending time."""
    result = emulated("one_each", Policy(), random_costs(3), blocking)
    ended = {span.task: span.end_s for span in result.trace.spans}
    arrived = {(t.source, t.to): t.end_s for t in result.trace.transfers}
    told = [t for t in result.trace.log if len(t.event)]
    assert len(told) == len(ended) + len(arrived)
    for each in told:
        due_s = arrived[each.event] if len(each.event) == 2 else ended[each.event.task]
        assert each.time_s >= due_s - 1e-9
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(told))


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
def test_an_emulated_trace_replays_to_itself(emulated, blocking, virtual_time):
    policy = Policy("bf", in_flight_limit=2)
    trace = emulated("interleaved", policy, random_costs(5), blocking).trace
    fresh = policies.dispatchers(trace.graph, policy)
    assert trace_lib.replay(trace, fresh) == trace.launches()
    assert trace_lib.from_json(trace_lib.to_json(trace)) == trace


def test_a_real_trace_replays_to_itself():
    pipeline, policy = toys.compiled("interleaved"), Policy("bf", in_flight_limit=2)
    pipeline.policy = policy
    params, microbatches = toys.TOYS["interleaved"].params(), toys.microbatches_of(5)
    trace = pipeline.run(params, microbatches).trace
    fresh = policies.dispatchers(trace.graph, policy)
    assert trace_lib.replay(trace, fresh) == trace.launches()
    assert len(trace.transfers) == 5 * 2 * 3
    for spans in trace.by_rank():
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_a_real_transfer_begins_when_its_source_has_ended():
    """Otherwise nearly all have no length, and begin while the source still runs."""
    pipeline, toy = toys.compiled("one_each"), toys.TOYS["one_each"]
    pipeline.policy = Policy()
    pipeline.run(toy.params(), toys.microbatches_of(8))
    trace = pipeline.run(toy.params(), toys.microbatches_of(8)).trace
    ended = {span.task: span.end_s for span in trace.spans}
    assert all(t.start_s >= ended[t.source] for t in trace.transfers)


def test_an_emulated_step_keeps_what_its_model_says(emulated, virtual_time):
    """Tiny programs stand for a model whose first stage keeps ten times as much: the
    limit in bytes and the trace count that, not what the programs keep."""
    pipeline = toys.compiled("one_each")
    free = Policy("f_priority", launch_ahead=1)
    limited = Policy("f_priority", launch_ahead=1, memory_limit_gb=20 / memory.GIB)

    def kept(graph):
        return memory.tabulate(graph, lambda _, s: (10 if s == 0 else 1, 0))

    def peaks(policy):
        pipeline.policy = policy
        pipeline.emulation = Emulation(random_costs(0), residuals=kept)
        ran = pipeline.run(toys.TOYS["one_each"].params(), toys.microbatches_of(COUNT))
        return ran.trace.peak_bytes()

    emulated("one_each", free, random_costs(0))  # cleans up after us
    assert peaks(free)[0] == 10 * COUNT
    assert peaks(limited)[0] == 20
