"""The paper's bound on the makespan (RRFP §6, Appendix B), on 2,000 random pipelines.

Non-interleaved, BF, one launch at a time, free transfers, no limit:

    C <= Fwd + Bwd + sum_{j=1}^{M-1} (Fmax^j - Flast^j)
                   + sum_{j=0}^{M-2} (Bmax^j - Blast^j)

Fwd and Bwd come from the recurrence of a flow shop, written here, not from the code.
"""

import random

import pytest

from rrfp_jax.core import graph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.sim import costs, report, simulator

NUM_INSTANCES = 2000


def flow_shop_s(durations):
    """Returns the makespan of jobs that pass the machines in order.

    Args:
      durations: a row a machine, in the order of passing; a column a job.
    """
    ends = [0.0] * len(durations[0])  # of each job on the machine before
    for row in durations:
        free = 0.0
        for j, seconds in enumerate(row):
            free = max(free, ends[j]) + seconds
            ends[j] = free
    return ends[-1]


def bound_s(forward, backward):
    """Returns the right side of the theorem; rows are stages, columns microbatches."""
    count = len(forward[0])
    largest = [
        [max(row[j] for row in rows) for j in range(count)]
        for rows in (forward, backward)
    ]
    return (
        flow_shop_s(forward)
        + flow_shop_s(backward[::-1])
        + sum(largest[0][j] - forward[-1][j] for j in range(1, count))
        + sum(largest[1][j] - backward[-1][j] for j in range(count - 1))
    )


def instance(seed):
    """Returns durations of a pipeline: even, skewed, heavy-tailed or integer."""
    draw = random.Random(seed)
    num_stages, count = draw.randint(1, 6), draw.randint(1, 9)
    sampler = draw.choice(
        [
            lambda: draw.uniform(0.5, 1.5),
            lambda: draw.expovariate(1.0),
            lambda: draw.paretovariate(1.1),
            lambda: float(draw.randint(1, 4)),  # ties
            lambda: draw.choice((0.0, 1.0, 20.0)),
        ]
    )
    backward = draw.choice((1.0, 2.0, 0.3))
    slow = draw.randrange(num_stages)  # a straggler
    weight = [draw.choice((1.0, 4.0)) if s == slow else 1.0 for s in range(num_stages)]
    return (
        [[w * sampler() for _ in range(count)] for w in weight],
        [[w * backward * sampler() for _ in range(count)] for w in weight],
    )


def makespan_s(forward, backward, hint="bf", ahead=1):
    """Simulates the instance under the theorem's premises."""
    num_stages, count = len(forward), len(forward[0])
    of = graph.chain(count, tuple(range(num_stages)))
    table = costs.CostTable(
        {
            (kind, s): tuple(rows[s])
            for kind, rows in ((Kind.F, forward), (Kind.B, backward))
            for s in range(num_stages)
        },
        costs.constant(of, 0.0, 0.0).transfer,
    )
    policy = Policy(hint=hint, in_flight_limit=count, launch_ahead=ahead)
    makespan = simulator.simulate(of, policy, table).makespan_s
    assert makespan >= report.lower_bound_s(of, table) - 1e-9 * makespan
    return makespan


def test_bf_keeps_the_papers_bound_on_2000_random_pipelines():
    """Also: it is tight, not only where one stage or one microbatch makes it so."""
    ratios = []
    for seed in range(NUM_INSTANCES):
        forward, backward = instance(seed)
        ratio = makespan_s(forward, backward) / max(bound_s(forward, backward), 1e-12)
        assert ratio <= 1 + 1e-9, f"instance {seed}: C is {ratio} of the bound"
        if min(len(forward), len(forward[0])) > 2:
            ratios.append(ratio)
    assert len(ratios) > NUM_INSTANCES / 3
    assert max(ratios) >= 1 - 1e-9


@pytest.mark.parametrize(("num_stages", "count"), [(1, 4), (4, 1), (4, 8), (8, 3)])
def test_balanced_stages_have_no_variability_terms(num_stages, count):
    """Then the bound is (P - 1 + M)(F + B), which is 1F1B's makespan, and is met."""
    forward = [[1.0] * count for _ in range(num_stages)]
    backward = [[2.0] * count for _ in range(num_stages)]
    expected = (num_stages - 1 + count) * 3.0
    assert bound_s(forward, backward) == expected
    assert makespan_s(forward, backward) <= expected


def test_the_check_can_fail():
    """With the backwards of the bound half as long, most instances break it."""
    broken = 0
    for seed in range(200):
        forward, backward = instance(seed)
        half = [[s / 2 for s in row] for row in backward]
        broken += makespan_s(forward, backward) > bound_s(forward, half) * (1 + 1e-9)
    assert broken > 100
