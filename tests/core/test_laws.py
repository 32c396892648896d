"""Laws of the core, over random pipelines: what holds after every event of any step.

The laws themselves are in `instrument.Watched`, which raises inside the run.
"""

from hypothesis import given, settings

from rrfp_jax.core import trace
from rrfp_jax.sim import machine, simulator
from tests.core import strategies

laws = settings(derandomize=True, deadline=None, max_examples=200)
no_stall = settings(derandomize=True, deadline=None, max_examples=1000)


@given(strategies.cases())
@no_stall
def test_any_hint_finishes_any_pipeline_and_breaks_no_promise(case):
    """Each task once, after its inputs, within the limits; no rank idles needlessly.

    Any DAG and placement, whole and split backwards, gradients in order or not, limits
    in microbatches, in queued weight gradients and in bytes, from the smallest on.
    """
    watched = case.watched()
    simulator.drive(watched, machine.Overlapped(case.graph, case.costs()))
    assert all(dispatcher.is_done for dispatcher in watched)


@given(strategies.cases())
@laws
def test_the_same_holds_where_transfers_block_both_ranks(case):
    """Blocking links delay arrivals in another way; no promise depends on them."""
    watched = case.watched()
    simulator.drive(watched, machine.Blocking(case.graph, case.costs()))
    assert all(dispatcher.is_done for dispatcher in watched)


@given(strategies.cases())
@laws
def test_the_traces_account_of_bytes_is_within_the_limit(case):
    """The trace's own account agrees with the rule that was enforced."""
    found = case.memory()
    if found is None:
        return
    made = machine.Overlapped(case.graph, case.costs())
    made.trace.residuals = found.residuals
    ran = simulator.drive(case.dispatchers(), made)
    assert trace.from_json(trace.to_json(ran)) == ran
    assert max(ran.peak_bytes()) <= found.limit
    assert [each[-1] for each in ran.live_bytes() if each] == [0] * sum(
        map(bool, ran.live_bytes())
    )


@given(strategies.cases())
@laws
def test_same_seed_same_trace(case):
    """No hidden state, clock or hash order decides anything."""
    first, second = (
        simulator.drive(
            case.dispatchers(), machine.Overlapped(case.graph, case.costs())
        )
        for _ in range(2)
    )
    assert first == second


@given(strategies.cases())
@laws
def test_replay_launches_the_same_and_json_keeps_everything(case):
    """A log of events is a complete record of the decisions."""
    ran = simulator.drive(
        case.dispatchers(), machine.Overlapped(case.graph, case.costs())
    )
    copy = trace.from_json(trace.to_json(ran))
    assert copy == ran
    assert trace.replay(copy, case.dispatchers()) == ran.launches()


@given(strategies.cases())
@laws
def test_peak_in_flight_of_the_trace_is_within_the_limit(case):
    """The trace's own count agrees with the rule that was enforced."""
    ran = simulator.drive(
        case.dispatchers(), machine.Overlapped(case.graph, case.costs())
    )
    if case.pressure == "reserving":
        assert max(ran.peak_in_flight()) <= min(case.limit, case.graph.num_microbatches)
