"""The parts of a trace, each of some ranks, make the whole."""

from rrfp_jax.core import trace_parts
from rrfp_jax.core.graph import chain
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import costs, simulator

GRAPH = chain(3, (0, 1, 2))


def simulated() -> Trace:
    return simulator.simulate(GRAPH, Policy(), costs.constant(GRAPH, 1.0, 2.0, 0.5))


def test_the_parts_of_all_ranks_are_the_trace():
    whole = simulated()
    parts = [trace_parts.pack(whole, ranks) for ranks in ([0], [1, 2])]
    found = Trace(GRAPH)
    trace_parts.complete(found, parts)
    assert found.launches() == whole.launches()
    assert sorted(found.spans) == sorted(whole.spans)
    assert sorted(found.transfers) == sorted(whole.transfers)
    assert sorted(map(str, found.log)) == sorted(map(str, whole.log))
    times = [told.time_s for told in found.log]
    assert times == sorted(times)


def test_a_part_holds_only_what_concerns_its_ranks():
    spans, transfers, log = trace_parts.pack(simulated(), [0])
    assert {rank for _, rank, *_ in spans} == {0}
    assert {name[:2] + f" to {to}" for name, to, *_ in transfers} == {
        "0F to 1",
        "1B to 0",
    }
    assert {rank for _, rank, *_ in log} == {0}


def test_a_receiver_that_does_not_know_when_a_transfer_began_is_told():
    """It began when its source ended, on another rank."""
    whole = simulated()
    seen = [t._replace(start_s=t.end_s) for t in whole.transfers]
    blind = simulated()
    blind.transfers = seen
    found = Trace(GRAPH)
    trace_parts.complete(found, [trace_parts.pack(blind, range(3))])
    ended_s = {span.task: span.end_s for span in whole.spans}
    assert [t.start_s for t in found.transfers] == [
        min(ended_s[t.source], t.end_s) for t in found.transfers
    ]
