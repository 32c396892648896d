"""Which pipeline rank holds which stage.

A placement is a tuple: entry `s` is the rank of stage `s`. Any tuple is legal as long
as every rank up to the largest holds a stage; these are the usual ones.
"""

Placement = tuple[int, ...]


def one_each(num_ranks: int) -> Placement:
    """Returns the placement of one stage a rank."""
    return tuple(range(num_ranks))


def interleaved(num_ranks: int, num_chunks: int) -> Placement:
    """Returns round-robin placement: rank r holds stages r, r+P, r+2P, ...

    Source: arXiv:2104.04473 §2.2.
    """
    return tuple(range(num_ranks)) * num_chunks


def v_shaped(num_ranks: int) -> Placement:
    """Returns the V: rank r holds stages r and 2P-1-r.

    Source: arXiv:2405.15362 §3.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def colocated(*tower_lengths: int) -> Placement:
    """Returns the placement of towers on shared ranks: stage i of each is on rank i.

    So a vision encoder spreads over the ranks of the language model, as an extra chunk
    on each, instead of taking ranks of its own.

    Args:
      tower_lengths: the stages of each tower, in the order in which they are numbered.
    """
    return tuple(rank for length in tower_lengths for rank in range(length))
