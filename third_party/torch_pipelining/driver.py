"""One rank of torch.distributed.pipelining.

    python driver.py JOB.json REPORT.json RANK HOST:PORT

Each task of a stage is timed around the stage's own method for it, so the schedules
themselves tell F, input gradient and weight gradient apart. Gloo, on the CPU.
"""

import pathlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import peer_job

SCHEDULES = {  # name -> class, ranks of its stages, whether the backward is split
    "gpipe": (pipelining.ScheduleGPipe, None, False),
    "1f1b": (pipelining.Schedule1F1B, None, False),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, peer_job.loop, False),
    "zb_v": (pipelining.ScheduleZBVZeroBubble, peer_job.v_shape, True),
}


class Layer(torch.nn.Module):
    """tanh(h @ w)."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(weight).clone())

    def forward(self, h_BD: torch.Tensor) -> torch.Tensor:
        """Returns the next activations."""
        return torch.tanh(h_BD @ self.weight)


class TimedStage(pipelining.PipelineStage):
    """A stage whose tasks last as long as its meter says."""

    meter: peer_job.Meter

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """F of a microbatch."""
        with self.meter.task("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """B of a microbatch, with or without its weight gradient."""
        with self.meter.task("B", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        """W of a microbatch."""
        with self.meter.task("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipeline:
    """The stages of this rank under one schedule."""

    def __init__(self, job: peer_job.Job, name: str, rank: int) -> None:
        kind, place, self.is_split = SCHEDULES[name]
        self.ranks = place(job.num_ranks) if place else [*range(job.num_ranks)]
        held = 2 * job.num_ranks // len(self.ranks)  # layers of a stage
        weights = peer_job.weights(job)
        self.layers: dict[int, Layer] = {}
        self.stages = []
        for s in (s for s, r in enumerate(self.ranks) if r == rank):
            mine = {i: Layer(weights[i]) for i in range(s * held, (s + 1) * held)}
            self.layers |= mine
            module = torch.nn.Sequential(*mine.values())
            device = torch.device("cpu")
            stage = TimedStage(module, s, len(self.ranks), device)
            self.stages.append(stage)
        self._schedule = kind(
            self.stages if place else self.stages[0],
            job.num_microbatches,
            loss_fn=torch.nn.functional.mse_loss,
        )

    def step(
        self, seconds: peer_job.Seconds, x: torch.Tensor, target: torch.Tensor
    ) -> tuple[float, peer_job.Meter]:
        """Runs a step; returns when it began, and what it did."""
        table = peer_job.placed(seconds, self.ranks)
        meter = peer_job.Meter(table, self.ranks, self.is_split)
        for stage in self.stages:
            stage.meter = meter
        for layer in self.layers.values():
            layer.weight.grad = None
        indices = [stage.stage_index for stage in self.stages]
        inputs = (x,) if 0 in indices else ()
        is_last = len(self.ranks) - 1 in indices
        dist.barrier()
        begin_s = time.perf_counter()
        self._schedule.step(
            *inputs, target=target if is_last else None, return_outputs=False
        )
        return begin_s, meter


def main(job_path: str, report_path: str, rank: str, address: str) -> None:
    """Runs the job's schedules."""
    job = peer_job.read(job_path)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=int(rank),
        world_size=job.num_ranks,
    )
    expected = peer_job.reference(job)
    x, target = map(torch.from_numpy, peer_job.batch(job))
    report = peer_job.Report(
        report_path, "torch.distributed.pipelining", torch.__version__, job.limit_s
    )
    for name in job.schedules:
        with report.schedule(name) as iterations:
            pipeline = Pipeline(job, name, int(rank))
            for is_dropped, iteration in job.steps():
                begin_s, meter = pipeline.step(iteration.seconds, x, target)
                grads = {i: layer.weight.grad for i, layer in pipeline.layers.items()}
                error = peer_job.error(grads, expected)
                if not is_dropped:
                    iterations.append(meter.seen(iteration, begin_s, error))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
