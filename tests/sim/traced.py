"""Traces of simulated steps, and what is predicted from them."""

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import memory, placement
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import costs, fit, fit_candidates, fit_cut, fit_draws, fit_host
from rrfp_jax.sim.fit_candidates import Candidate, Prediction
from rrfp_jax.sim.fit_draws import Settings

ONE_EACH = placement.one_each(4)
BF, BFW = Policy("bf", launch_ahead=1), Policy("bfw", launch_ahead=1)
FIXED = Policy("1f1b", "fixed", launch_ahead=1)
# Two towers, the first frozen: stage 0 has no backward, and half the microbatches do
# not visit it.
DAG = PipelineGraph(
    num_stages=4,
    num_microbatches=8,
    edges=((0, 2), (1, 2), (2, 3)),
    placement=ONE_EACH,
    skipped=frozenset((0, j) for j in range(0, 8, 2)),
    frozen=frozenset({0}),
)


def constant(graph):
    """Stages of different length, in halves where there are eight. No sum of them meets
    another, so that no order hangs on how such a tie is rounded."""
    whole = (0.0100331, 0.0201707, 0.0290129, 0.0410513)
    halves = graph.num_stages // len(whole)
    each = [whole[s // halves] / halves for s in range(graph.num_stages)]
    backward, weight = ([f * s for s in each] for f in (1.3131, 0.8717))
    return costs.constant(graph, each, backward, 0.0020411, weight)


def disturbed(graph, seed, image_cv=0.6):
    table = costs.constant(graph, 0.01, 0.01, 0.002, 0.01)
    table = costs.with_image_load(table, range(graph.num_stages // 2), image_cv, seed)
    table = costs.with_lognormal(table, 0.1, seed)
    return costs.with_lognormal_transfers(table, 0.5, seed)


def ran(graph, policy, table, latency_s=0.0):
    graph = policy.applied_to(graph)
    kept = memory.constant(graph, 1000, 0.5)
    return fit_host.simulate(graph, policy, table, latency_s, kept)


def chain(where=ONE_EACH, count=8):
    return graphs.chain(count, where)


def fitted_on(*traces: Trace):
    return fit.fit({f"step {i}": trace for i, trace in enumerate(traces)})


def predicted(fitted, policy, cut=0, **settings) -> Prediction:
    drawn = fit_draws.draws(fitted, Settings(**settings))
    return fit_candidates.predict(Candidate(fit_cut.cuts(fitted)[cut], policy), drawn)
