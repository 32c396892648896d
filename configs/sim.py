"""Readiness against fixed orders, simulated: 8 ranks, jittered compute and transfers.

    python -m rrfp_jax.simulate --config=configs/sim.py --workdir=runs/sim

Expected, over fixed 1F1B (3265 ms, bubble 29 %, 8 in flight), 10 seeds, in 12 seconds:
BF 1.224 +- 0.028 (bubble 14 %, 32 in flight), B-priority 1.220, F-priority 1.187; but
also, as deep as BF, fixed 1F1B 1.207 and Varuna 1.222. Most of the gain is depth. BFW,
whose weight gradients are filler, 1.318; fixed ZB-H2 1.263. With
--config.pipeline.in_flight_limit=8, the depth of 1F1B, BF is at 0.950 and BFW at 1.113.
"""

import ml_collections


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """Returns the settings; the only variant is "", the empty one."""
    if variant:
        raise ValueError(f"configs/sim.py has no variant {variant!r}; drop it.")
    config = ml_collections.ConfigDict()
    config.seeds = tuple(range(10))  # of all draws; two policies share the draws of one

    config.pipeline = pipeline = ml_collections.ConfigDict()
    pipeline.num_ranks = 8
    pipeline.placement = "one_each"  # or "interleaved:CHUNKS", "v_shaped"
    pipeline.num_microbatches = 64
    pipeline.in_flight_limit = 32  # microbatches on a rank, RRFP §5; not for baselines
    pipeline.in_flight_taper = 0.0  # by how much less on each next rank
    pipeline.weight_limit = 0  # weight gradients that may wait on a rank; 0: any number
    pipeline.memory_limit_gb = 0.0  # residuals on a rank, GiB; 0: any
    pipeline.launch_ahead = 2  # unfinished launches of a rank
    pipeline.order_csvs = ()  # files with orders to run too

    config.cost = cost = ml_collections.ConfigDict()
    cost.forward_ms = 10.0  # of one microbatch on one rank, over all its stages
    cost.backward_ms = 20.0  # likewise
    cost.weight_fraction = 0.5  # of the backward that is weight gradients
    cost.transfer_ms = 1.0  # of one payload between two ranks
    cost.blocking = True  # run each baseline also with transfers that block both ranks
    cost.residual_mb = 256.0  # MiB that a rank's forward of one microbatch keeps
    cost.weight_residual = 32 / 34  # of it that W needs, in a transformer layer

    config.jitter = jitter = ml_collections.ConfigDict()
    jitter.level = "J2"  # injected sleeps, J0 (none) to J3, RRFP §7.6
    jitter.compute_cv = 0.2  # standard deviation / mean of each task, lognormal
    jitter.transfer_cv = 1.0  # the same of each transfer
    jitter.transfer_tail = (
        0.0  # Pareto exponent of transfers; 0 for none, 0.57 measured
    )
    jitter.straggler_rank = 0  # the rank that is always slow
    jitter.straggler_factor = 1.0  # by how much; 1 for none
    jitter.image_cv = 0.0  # of the images of a microbatch, felt in each vision stage
    jitter.num_vision_stages = 0  # the first stages of the pipeline
    return config
