"""Orders made for a split backward: ZB-H1, ZB-H2, ZB-V, V-Half.

`zb_h1`, `zb_h2` (arXiv:2401.10241 §2): 1F1B in which stage s puts off its weight
gradients by as many microbatches as it is away from the first. So every rank holds what
the first one does, 1F1B's depth for H1 and nearly twice that for H2, and cotangents
travel back without waiting for weight gradients.

`zb_v`, `v_half` (arXiv:2405.15362): rank r of P holds stages r and 2P-1-r. Both repeat
a *building block*, the tasks of one microbatch, every six units, a unit being half a
rank's forward. How far a block is stretched says how much is held: a chunk lives from
its F to its W. ZB-V stretches it until no rank ever waits, at 1F1B's peak memory;
V-Half to half of that.
"""

import itertools
from collections.abc import Iterator

from rrfp_jax.core import placement
from rrfp_jax.core.graph import PipelineGraph, chain_edges
from rrfp_jax.core.orders import Order, alternate_on, depths
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError

_F, _B, _W = Kind.F, Kind.B, Kind.W


def zb_h1(graph: PipelineGraph) -> list[Order]:
    """Returns the ZB-H1 order of each rank.

    Raises:
      ConfigError: a rank holds several stages, or the backward is not split.
    """
    return _horizontal(graph, 1)


def zb_h2(graph: PipelineGraph) -> list[Order]:
    """Returns the ZB-H2 order of each rank.

    Raises:
      ConfigError: a rank holds several stages, or the backward is not split.
    """
    return _horizontal(graph, 2)


def _horizontal(graph: PipelineGraph, factor: int) -> list[Order]:
    _check_split(graph, f"zb_h{factor}")
    if graph.num_ranks < graph.num_stages:
        raise ConfigError(
            f"order zb_h{factor} is not defined for placement {graph.placement}: a "
            "rank holds several stages.\n  Set --config.pipeline.placement to one_each."
        )
    depth = depths(graph)
    return [
        alternate_on(
            graph,
            stage,
            warmup=factor * (depth[stage] - 1),
            put_off=factor * (max(depth) - depth[stage]),
        )
        for (stage,) in graph.stages_of
    ]


def zb_v(graph: PipelineGraph) -> list[Order]:
    """Returns the ZB-V order of each rank.

    Phases of a rank: forwards of the first chunk until the first microbatch has come
    back; both chunks' forwards in turn; backwards of the second chunk; then a steady
    cycle of F, B, W of both chunks; at the end backwards first, weights last.

    Raises:
      ConfigError: the placement is not a V, or the backward is not split.
    """
    _check_v(graph, "zb_v")
    ranks = graph.num_ranks
    # Shorter steps run the cycle of a longer one without what they do not have.
    count = max(graph.num_microbatches, 2 * ranks - 1)
    orders = []
    for rank in range(ranks):
        tasks = _zb_v_phases(rank, ranks, count)
        orders.append(
            tuple(
                t
                for t in tasks
                if t.microbatch < graph.num_microbatches and graph.exists(t)
            )
        )
    return orders


def _zb_v_phases(rank: int, ranks: int, count: int) -> Iterator[Task]:
    stages = (rank, 2 * ranks - 1 - rank)
    numbers = {(kind, chunk): itertools.count() for kind in Kind for chunk in range(2)}

    def take(*names: tuple[Kind, int]) -> Iterator[Task]:
        for kind, chunk in names:
            yield Task(kind, stages[chunk], next(numbers[kind, chunk]))

    ahead = 2 * (ranks - rank) - 1
    for _ in range(ahead):
        yield from take((_F, 0))
    for _ in range(rank):
        yield from take((_F, 1), (_F, 0))
    for _ in range(ranks - rank):
        yield from take((_F, 1), (_B, 1), (_W, 1))
    for k in range(count - ranks):
        if k < count - ahead - rank:
            yield from take((_F, 0))
        yield from take((_B, 0), (_W, 0), (_F, 1), (_B, 1), (_W, 1))
    for _ in range(rank):
        yield from take((_B, 0), (_B, 1))
    for _ in range(ranks - rank):
        yield from take((_B, 0), (_W, 0))
    for chunk in (1, 0):
        for _ in range(rank):
            yield from take((_W, chunk))


def v_half(graph: PipelineGraph) -> list[Order]:
    """Returns the V-Half order of each rank: a building block every six units.

    Along the ranks, forwards of the first chunk are two units apart and the others'
    one; likewise backwards. A rank's lifespans then add up to half of 1F1B's.

    Raises:
      ConfigError: the placement is not a V, or the backward is not split.
    """
    _check_v(graph, "v_half")
    ranks = graph.num_ranks
    blocks = [_half_block(rank, ranks) for rank in range(ranks)]
    return [
        tuple(
            t
            for _, t in sorted(
                (time + 6 * j, Task(kind, stage, j))
                for kind, stage, time in block
                for j in range(graph.num_microbatches)
            )
            if graph.exists(t)
        )
        for block in blocks
    ]


def _half_block(rank: int, ranks: int) -> list[tuple[Kind, int, int]]:
    """Returns (kind, stage, start) of the tasks of microbatch 0 on a rank.

    Starts are in units, and distinct modulo 6, the period.
    """
    turn, loss, back = _half_turns(ranks)
    onward = ranks - 1 - rank
    chain = {
        (_F, rank): 2 * rank,
        (_F, 2 * ranks - 1 - rank): turn + onward,
        (_B, 2 * ranks - 1 - rank): loss + 2 * rank,
        (_B, rank): back + onward,
    }
    free = sorted(set(range(6)) - {start % 6 for start in chain.values()})
    choices = []
    for slots in itertools.permutations(free):
        weights = {
            (_W, stage): next(
                t for t in itertools.count(chain[_B, stage] + 1) if t % 6 == slot
            )
            for stage, slot in zip((rank, 2 * ranks - 1 - rank), slots, strict=True)
        }
        choices.append((sum(weights.values()), sorted(weights.items())))
    block = [*chain.items(), *min(choices)[1]]
    return [(kind, stage, start) for (kind, stage), start in block]


def _half_turns(ranks: int) -> tuple[int, int, int]:
    """Returns when the second chunk's forwards and backwards, and then the first
    chunk's backwards begin: the earliest such that no two tasks of a rank collide.
    """
    last = ranks - 1
    found = []
    for delays in itertools.product(range(6), repeat=3):
        turn = 2 * last + 1 + delays[0]  # on the last rank, after its first F
        loss = turn + last + 1 + delays[1]  # on the first rank
        back = loss + 2 * last + 1 + delays[2]  # on the last rank
        starts = (
            (2 * r, turn + last - r, loss + 2 * r, back + last - r)
            for r in range(ranks)
        )
        if all(len({start % 6 for start in each}) == 4 for each in starts):
            found.append((back, turn, loss))
    back, turn, loss = min(found)
    return turn, loss, back


def _check_split(graph: PipelineGraph, name: str) -> None:
    if not graph.is_split:
        raise ConfigError(
            f"order {name} needs a split backward, and this pipeline's is whole.\n"
            "  Split it: is_split=True of the graph, or policy.is_split."
        )


def _check_v(graph: PipelineGraph, name: str) -> None:
    _check_split(graph, name)
    ranks = graph.num_ranks
    is_plain = graph.edges == chain_edges(graph.num_stages)
    if not is_plain or graph.placement != placement.v_shaped(ranks):
        raise ConfigError(
            f"order {name} is not defined for placement {graph.placement}: it is made "
            "for a chain in the shape of a V.\n"
            "  Set --config.pipeline.placement to v_shaped, or use a rule such as bfw."
        )
