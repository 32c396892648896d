"""Evaluation through the training pipeline, forwards only."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from rrfp_jax.coordination.desk import Share, with_nobody
from rrfp_jax.data.microbatch import Microbatch
from rrfp_jax.runtime.outcome import Result


def evaluate(
    run: Callable[[list[Microbatch]], Iterable[Result]],
    batches: Iterable[list[Microbatch]],
    is_bytes: bool,
    share: Share = with_nobody,
) -> dict[str, float]:
    """Scores the held-out samples.

    Args:
      run: runs the pipelines of this process that train, forwards only; returns the
        results of those that it is to report.
      batches: lists of microbatches.
      is_bytes: whether a token is a byte.
      share: the exchange with all other processes.

    Returns:
      `eval_loss` in nats a token; `eval_accuracy`, the share of right tokens;
      `eval_exact_match`, the share of samples with every token right (with the right
      answer before it a token is predicted as it is in greedy decoding, so this is the
      share of samples that greedy decoding answers exactly); and for bytes
      `eval_bits_per_byte`.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for batch in batches:
        for result in run(batch):
            sums["loss"] += sum(result.losses)
            for aux in result.aux:
                for name, value in aux.items():
                    sums[name] += float(value)
    told = share(sorted(sums.items()))
    sums.clear()
    for each in told:
        for name, value in each:
            sums[name] += value
    tokens, rows = max(sums["num_tokens"], 1), max(sums["num_rows"], 1)
    scores = {
        "eval_loss": sums["loss"] / tokens,
        "eval_accuracy": sums["num_correct"] / tokens,
        "eval_exact_match": sums["num_exact"] / rows,
    }
    if is_bytes:
        scores["eval_bits_per_byte"] = sums["loss"] / tokens / math.log(2)
    return scores
