"""Bandwidths: `device_put`, and JAX's transfer library in one process and between two.

Two processes share the first device, so what is measured is the library, not a link.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.transport.pulls import Pulls
from scripts.bench import transfers
from scripts.gpu import timing
from scripts.gpu.figures import Figure
from scripts.gpu.sizes import Size

MIB = transfers.MIB
_NUM_PULLS = 5
_NUM_ROUNDS, _BURST = 3, 2


def check_copies(size: Size) -> Iterator[Figure | str]:
    """Yields the rates of `device_put` and of copies on the device."""
    device = jax.local_devices()[0]
    there = jax.sharding.SingleDeviceSharding(device)
    copy = jax.jit(lambda x: x + 0)
    for mib in size.payload_mib:
        yield f"{mib} MiB"
        array = _payload(mib)
        placed = jax.device_put(array, there)
        calls: dict[str, Callable[[], Any]] = {
            "host to device": lambda x=array: jax.device_put(x, there),
            # A value that the host has read is kept there; each call needs a new one.
            "copy on the device": lambda x=placed: copy(x),
        }
        if len(jax.local_devices()) > 1:
            other = jax.local_devices()[1]
            calls["device to device"] = lambda x=placed, to=other: jax.device_put(x, to)
        for name, taken_s in timing.rounds(calls, size.repeats).items():
            yield _rate(f"{name}, {mib} MiB", mib, taken_s)
        yield _rate(f"device to host, {mib} MiB", mib, _reads(placed, size.repeats))
        unlike = int(np.count_nonzero(np.asarray(copy(placed)) != array))
        yield Figure(f"entries changed on the way, {mib} MiB", unlike, limit=0)


def check_pulls(size: Size) -> Iterator[Figure | str]:
    """Yields the rates of the transfer library between two servers of this process."""
    offering, pulling = Pulls("127.0.0.1"), Pulls("127.0.0.1")
    there = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for mib in size.payload_mib:
        yield f"{mib} MiB"
        array = _payload(mib)
        placed = jax.device_put(array, there)
        wanted = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=there)]

        def pull(placed: Any = placed, wanted: Any = wanted) -> Any:
            number = offering.offer([placed])
            return pulling.pull(offering.address, number, wanted)

        (pulled,) = pull()
        unlike = int(np.count_nonzero(np.asarray(pulled) != array))
        yield Figure(f"entries changed on the way, {mib} MiB", unlike, limit=0)
        yield _rate(
            f"pull, {mib} MiB", mib, [timing.seconds(pull) for _ in range(_NUM_PULLS)]
        )


def check_processes(size: Size) -> Iterator[Figure | str]:
    """Yields the rates between two processes, as the runtime's transport moves them."""
    payloads = {
        f"{mib} MiB": transfers.Payload(mib * MIB, _NUM_ROUNDS, _BURST, num_warm_up=1)
        for mib in size.payload_mib
    }
    rounds: dict[tuple[str, str], list[transfers.Round]] = {}
    for key, found in transfers.rounds_of(payloads):
        rounds.setdefault(key, []).append(found)
        yield f"{key[0]} by {key[1]}"
        if len(rounds[key]) == 1 + _NUM_ROUNDS:
            yield from _between(*key, payloads[key[0]], rounds[key][1:])


def _between(
    name: str, way: str, payload: transfers.Payload, rounds: list[transfers.Round]
) -> Iterator[Figure]:
    one_way_s = statistics.median(each.one_way_s for each in rounds)
    yield Figure(f"one way by {way}, {name}", one_way_s * 1e3, "ms")
    burst_s = statistics.median(each.burst_s for each in rounds)
    rate = payload.burst * payload.num_bytes / 2**30 / burst_s
    yield Figure(f"burst by {way}, {name}", rate, "GiB/s")


def _payload(mib: int) -> Any:
    return np.random.default_rng(mib).random(mib * MIB // 4, np.float32)


def _rate(name: str, mib: int, taken_s: list[float]) -> Figure:
    return Figure(name, mib / 1024 / statistics.median(taken_s), "GiB/s")


def _reads(placed: Any, repeats: int) -> list[float]:
    """Returns the seconds of reads by the host, each of a value that it has not."""
    fresh = [jnp.copy(placed) for _ in range(repeats)]
    jax.block_until_ready(fresh)
    return [timing.seconds(lambda x=x: np.array(x, copy=True)) for x in fresh]
