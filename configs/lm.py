"""A small language model learns Python from the running interpreter's own library.

    python -m rrfp_jax.main --config=configs/lm.py --workdir=runs/lm

Input: the bytes of the standard library's sources; some files are held out. Four
pipeline ranks, hint BF. Expected: eval_bits_per_byte <= 3.0 on the held-out files, in
under 5 minutes on 2 cores (measured: 2.7 after 2 min 15 s).

`--config=configs/lm.py:small` is the same in seconds, for tests: it learns nothing.
"""

import ml_collections


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """Returns the config; `variant` is empty or `small`."""
    config = ml_collections.ConfigDict()
    config.data = {
        "source": "stdlib",
        "batch_size": 32,  # rows a step
        "length_buckets": (128,),  # bytes a row
        "image_buckets": (0,),
        "paths": (),  # for source=jsonl
        "eval_paths": (),
        "tokenizer": "bytes",  # or the path of a tokenizer.json
        "seed": 0,
        "num_workers": 2,  # threads that prepare batches
        "prefetch": 4,  # batches prepared ahead
        "validate": True,
        "progress": True,
    }
    config.model = {
        "language": {
            "kind": "llama",  # or gpt3
            "vocab_size": 320,  # at least the 256 bytes and the special tokens
            "num_layers": 4,
            "width": 128,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "mlp_width": 384,
            "max_length": 128,
            "qk_norm": False,
            "tied": False,
            "rope_theta": 10_000.0,
            "norm_eps": 1e-5,
            "dropout": 0.0,
            "compute_dtype": "float32",  # or bfloat16
        },
        "recompute": "none",  # or dots, stage
        "frozen": (),  # beginnings of layer names
    }
    config.pipeline = {
        "num_ranks": 4,
        "num_microbatches": 8,
        "placement": "one_each",  # or interleaved, v_shaped, colocated
        "num_chunks": 1,  # of interleaved
        "layer_counts": (),  # of each stage; none: balanced
        "balance": "flops",  # or measured
        "hint": "bf",
        "order": "readiness",
        "in_flight_limit": 8,  # microbatches on a rank
        "in_flight_taper": 0.0,  # by how much less on each next rank
        "weight_limit": 0,  # weight gradients that may wait on a rank; 0: any number
        "memory_limit_gb": 0.0,  # residuals on each device, GiB; 0: any
        "back_pressure": "reserving",
        "split": "as_needed",  # the backward, by the hint; or always
        "deterministic": False,  # bitwise, whatever the hint and the delays
        "warmup_factor": 2.0,  # of order deep_1f1b
        "microbatch_group": 0,  # of interleaved 1f1b; 0: one a rank
        "launch_ahead": 2,
        "agreement": "intersection",  # of the processes of a rank; or per_task
    }
    config.mesh = {
        "data": 1,  # inside a pipeline rank
        "model": 1,
        "vision_model": 0,  # of ranks of the vision tower; 0: as the others
        "replicas": 1,  # of the whole pipeline
        "num_cpu_devices": 0,  # that a process shows; 0: as many as are needed
    }
    config.cluster = {
        "coordinator": "",  # HOST:PORT; none: one process, or what SLURM says
        "num_processes": 0,
        "process_id": -1,
        "peer_timeout_s": 60.0,  # silence after which a process counts as lost
        "stall_timeout_s": 600.0,
        "payloads": "auto",  # or host, transfer
        "host_limit_kib": 256,  # with transfer: what goes through the host all the same
    }
    config.optimizer = {
        "learning_rate": 2e-3,
        "warmup_steps": 30,
        "final_fraction": 0.05,
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "shard_state": False,  # over replicas (ZeRO-1)
    }
    config.train = {
        "num_steps": 240,
        "seed": 0,
        "log_every": 1,
        "eval_every": 0,
        "eval_batches": 0,  # all
        "checkpoint_every": 80,
        "keep_checkpoints": 2,
        "trace_step": 20,
        "num_traced": 8,  # from that on
    }
    if variant == "small":
        config.data.update({"batch_size": 8, "length_buckets": (64,)})
        config.model.language.update({"width": 32, "head_dim": 8, "mlp_width": 32})
        config.model.language.update({"num_layers": 2, "max_length": 64})
        config.pipeline.num_microbatches = 4
        config.optimizer.warmup_steps = 2
        config.train.update({"num_steps": 6, "checkpoint_every": 2, "trace_step": 3})
        config.train.eval_batches = 4
    elif variant:
        raise ValueError(f"variant {variant!r} is not known; there is only 'small'.")
    return config
