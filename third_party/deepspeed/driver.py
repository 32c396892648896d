"""One rank of DeepSpeed's pipeline engine.

    DS_ACCELERATOR=cpu python driver.py JOB.json REPORT.json RANK HOST:PORT

A stage is one autograd function, so that its forward is F and its backward is B and W,
each lasting as long as its meter says. Gloo, on the CPU. The engine steps its optimizer
at the end of every batch; ours keeps the gradients and leaves the weights alone.
"""

import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import peer_job

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for another

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule


class Timed(torch.autograd.Function):
    """Two layers, tanh(tanh(h @ v) @ w), that take their time."""

    @staticmethod
    def forward(
        ctx: Any, h_BD: Any, v: Any, w: Any, stage: "Stage", microbatch: int
    ) -> Any:
        """F of a microbatch."""
        with stage.meter.task("F", stage.index, microbatch):
            mid_BD = torch.tanh(h_BD @ v)
            out_BD = torch.tanh(mid_BD @ w)
        ctx.save_for_backward(h_BD, mid_BD, out_BD, v, w)
        ctx.stage, ctx.microbatch = stage, microbatch
        return out_BD

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """B and W of a microbatch."""
        h_BD, mid_BD, out_BD, v, w = ctx.saved_tensors
        with ctx.stage.meter.task("B", ctx.stage.index, ctx.microbatch):
            through_BD = cotangents[0] * (1 - out_BD**2)
            grad_w = mid_BD.T @ through_BD
            through_BD = (through_BD @ w.T) * (1 - mid_BD**2)
            return through_BD @ v.T, h_BD.T @ through_BD, grad_w, None, None


class Stage(torch.nn.Module):
    """The two layers of a rank. The engine runs the microbatches in their order."""

    meter: peer_job.Meter

    def __init__(self, index: int, v: Any, w: Any) -> None:
        super().__init__()
        self.index, self.next_microbatch = index, 0
        self.v = torch.nn.Parameter(torch.from_numpy(v).clone())
        self.w = torch.nn.Parameter(torch.from_numpy(w).clone())

    def forward(self, h_BD: torch.Tensor) -> torch.Tensor:
        """Returns the next activations."""
        microbatch = self.next_microbatch
        self.next_microbatch += 1
        return Timed.apply(h_BD, self.v, self.w, self, microbatch)


class Keeper(torch.optim.SGD):
    """An optimizer that keeps the gradients, by layer, and changes nothing."""

    kept: list[torch.Tensor]

    def step(self, closure: Any = None) -> None:
        """Takes the gradients."""
        (group,) = self.param_groups
        self.kept = [p.grad.clone() for p in group["params"]]


def microbatches(job: peer_job.Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the microbatches of a step with their targets."""
    parts = [torch.from_numpy(each).split(job.rows) for each in peer_job.batch(job)]
    return zip(*parts, strict=True)


def start(job: peer_job.Job, rank: int) -> tuple[Any, Stage, Keeper]:
    """Returns the engine, this rank's stage and its optimizer."""
    weights = peer_job.weights(job)
    layers = [
        deepspeed.pipe.LayerSpec(Stage, s, weights[2 * s], weights[2 * s + 1])
        for s in range(job.num_ranks)
    ]
    module = PipelineModule(
        layers,
        num_stages=job.num_ranks,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    optimizer = Keeper(module.parameters(), lr=0.0)
    config = {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": job.num_microbatches,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    (stage,) = (each for each in module.modules() if isinstance(each, Stage))
    assert stage.index == rank
    return engine, stage, optimizer


def main(job_path: str, report_path: str, rank: str, address: str) -> None:
    """Runs the job's schedule, which can only be 1F1B."""
    job = peer_job.read(job_path)
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(job.num_ranks)}
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.split(":")
    deepspeed.init_distributed("gloo")
    (name,) = job.schedules
    assert name == "1f1b", name
    expected = peer_job.reference(job)
    report = peer_job.Report(
        report_path, "DeepSpeed", deepspeed.__version__, job.limit_s
    )
    with report.schedule(name) as iterations:
        engine, stage, optimizer = start(job, int(rank))
        ranks = [*range(job.num_ranks)]
        for is_dropped, iteration in job.steps():
            stage.next_microbatch = 0
            stage.meter = peer_job.Meter(iteration.seconds, ranks, is_split=False)
            data = microbatches(job)
            dist.barrier()
            begin_s = time.perf_counter()
            engine.train_batch(data)
            grads = {2 * int(rank) + i: g for i, g in enumerate(optimizer.kept)}
            error = peer_job.error(grads, expected)
            if not is_dropped:
                iterations.append(stage.meter.seen(iteration, begin_s, error))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
