"""A vision-language model learns to read handwritten digits. Runs on a laptop's CPU.

    python -m rrfp_jax.main --config=configs/mm.py --workdir=runs/mm

Input: scikit-learn's 8x8 digits with questions about them, none, one or two images a
sample. Four pipeline ranks, hint BF. Expected: eval_exact_match >= 0.9 on digits that
were held out, in under 5 minutes on 2 cores (measured: 0.94 after 1 min 41 s).

`--config=configs/mm.py:small` is the same in seconds, for tests: it learns nothing.
"""

import ml_collections


def get_config(variant: str = "") -> ml_collections.ConfigDict:
    """Returns the config; `variant` is empty or `small`."""
    image = {"image_size": (8, 8), "channels": 1, "patch_size": 4}  # 4 tokens
    config = ml_collections.ConfigDict()

    config.data = {
        "source": "digits",
        "batch_size": 32,  # samples a step
        "length_buckets": (40,),  # tokens a row, image tokens included
        "image_buckets": (4, 8),  # image slots a microbatch
        "max_images_per_sample": 2,
        "paths": (),  # for source=llava: files or globs
        "eval_paths": (),
        "image_folder": "",
        "tokenizer": "bytes",  # or the path of a tokenizer.json
        "seed": 0,
        "num_workers": 2,  # threads that prepare batches
        "prefetch": 4,  # batches prepared ahead
        "validate": True,
        "progress": True,
        **image,
    }
    config.model = {
        "language": {
            "kind": "llama",  # with qk_norm: Qwen3-like
            "vocab_size": 320,  # at least the 256 bytes and the special tokens
            "num_layers": 2,
            "width": 96,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 24,
            "mlp_width": 192,
            "max_length": 40,
            "qk_norm": True,
            "tied": True,
            "rope_theta": 10_000.0,
            "norm_eps": 1e-5,
            "dropout": 0.0,
            "compute_dtype": "float32",  # or bfloat16
        },
        "vision": {
            "width": 64,
            "num_layers": 2,
            "num_heads": 4,
            "mlp_width": 128,
            "dropout": 0.0,
            "compute_dtype": "float32",
            **image,
        },
        "recompute": "none",  # or dots, stage
        "frozen": (),  # beginnings of layer names, such as ("vision/",)
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
        "learning_rate": 1e-3,
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
        "num_steps": 800,
        "seed": 0,
        "log_every": 1,
        "eval_every": 400,
        "eval_batches": 0,  # all
        "checkpoint_every": 200,
        "keep_checkpoints": 2,
        "trace_step": 20,
        "num_traced": 8,  # from that on
    }
    if variant == "small":
        config.data.update({"batch_size": 8, "image_buckets": (0, 4)})
        config.model.language.update({"width": 32, "head_dim": 8, "mlp_width": 32})
        config.model.language.update({"num_layers": 2})
        config.model.vision.update({"width": 32, "num_layers": 1, "mlp_width": 32})
        config.pipeline.num_microbatches = 4
        config.optimizer.warmup_steps = 2
        config.train.update({"num_steps": 6, "eval_every": 0, "checkpoint_every": 2})
        config.train.trace_step = 3
    elif variant:
        raise ValueError(f"variant {variant!r} is not known; there is only 'small'.")
    return config
