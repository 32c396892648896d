"""Reading every sample once before anything compiles."""

import concurrent.futures

import tqdm

from rrfp_jax.data import buckets as buckets_lib
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import sample as sample_lib

_CHUNK = 256  # Samples in work at a time; an error waits for no more than these.


def validate(
    source: sample_lib.SampleSource, config: config_lib.DataConfig, what: str
) -> None:
    """Reads all samples as training will, images included, with a progress bar.

    Args:
      source: the samples.
      config: with the declared length buckets.
      what: is being read, for the progress bar.

    Raises:
      ConfigError: for the first sample that cannot be read or is too long.
    """

    def check(index: int) -> None:
        buckets_lib.check_length(source[index], config)

    num_threads = max(config.num_workers, 1)
    with (
        concurrent.futures.ThreadPoolExecutor(num_threads) as pool,
        tqdm.tqdm(
            total=len(source),
            desc=f"checking {what}",
            unit="sample",
            disable=None if config.progress else True,
        ) as bar,
    ):
        for start in range(0, len(source), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(source)))
            for _ in pool.map(check, chunk):
                bar.update()
