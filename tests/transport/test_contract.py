"""The contract of every transport; whoever joins `TRANSPORTS` is held to it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.core.task import parse
from rrfp_jax.errors import ProtocolError
from rrfp_jax.runtime import placing
from rrfp_jax.transport.base import Message
from rrfp_jax.transport.in_process import InProcess

TRANSPORTS = {"in_process": InProcess}
A, B, C = Message(parse("0F0"), 1), Message(parse("0F1"), 1), Message(parse("0F0"), 2)


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return TRANSPORTS[request.param]()


@pytest.fixture
def there():
    """Where payloads are to lie: the second device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[1])


def wait_for(transport, count):
    """Returns the next `count` arrivals; the test's own timeout ends a wait in vain."""
    found = []
    while len(found) < count:
        found += [arrival.message for arrival in transport.arrived()]
        time.sleep(1e-4)
    return found


def arrays(*values):
    return [jnp.asarray(value) for value in values]


def test_a_payload_arrives_whole_where_it_is_to_lie(transport, there):
    payload = arrays(np.arange(3.0), np.bool_([True]), np.int32(7), np.zeros((0, 2)))
    transport.send(A, payload, [there] * 4)
    assert wait_for(transport, 1) == [A]
    taken = transport.take(A)
    for sent, found in zip(payload, taken, strict=True):
        assert found.sharding == there
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(found, sent)


def test_payloads_are_taken_in_any_order(transport, there):
    for i, message in enumerate((A, B, C)):
        transport.send(message, arrays(float(i)), [there])
    for i, message in ((2, C), (0, A), (1, B)):
        (found,) = transport.take(message)
        assert float(found) == i


def test_a_payload_may_be_taken_before_it_has_arrived(transport, there):
    transport.send(A, arrays(1.0), [there])
    assert float(transport.take(A)[0]) == 1.0


def test_messages_from_one_source_to_two_stages_are_two(transport, there):
    transport.send(A, arrays(1.0), [there])
    transport.send(C, arrays(2.0), [there])
    assert sorted(wait_for(transport, 2)) == [A, C]
    assert [float(transport.take(m)[0]) for m in (A, C)] == [1.0, 2.0]


def test_an_empty_payload_arrives_too(transport):
    transport.send(A, [], [])
    assert wait_for(transport, 1) == [A]
    assert transport.take(A) == []


def test_an_arrival_is_reported_once(transport, there):
    transport.send(A, arrays(1.0), [there])
    assert wait_for(transport, 1) == [A]
    assert transport.arrived() == []
    transport.send(B, arrays(1.0), [there])
    assert wait_for(transport, 1) == [B]
    assert transport.arrived() == []


def test_what_is_in_transit_is_counted_until_it_is_reported(transport, there):
    assert transport.num_in_transit() == 0
    transport.send(A, arrays(1.0), [there])
    transport.send(B, arrays(1.0), [there])
    assert transport.num_in_transit() == 2
    found = wait_for(transport, 1)
    assert transport.num_in_transit() == 2 - len(found)
    wait_for(transport, 2 - len(found))
    assert transport.num_in_transit() == 0


def test_a_name_in_use_is_refused(transport, there):
    transport.send(A, arrays(1.0), [there])
    with pytest.raises(ProtocolError, match="0F0 was sent to 1 twice"):
        transport.send(A, arrays(2.0), [there])
    assert float(transport.take(A)[0]) == 1.0


def test_what_was_never_sent_is_refused(transport, there):
    transport.send(A, arrays(1.0), [there])
    with pytest.raises(ProtocolError, match="0F1 is not here for 1"):
        transport.take(B)


def test_what_was_taken_is_gone(transport, there):
    transport.send(A, arrays(1.0), [there])
    wait_for(transport, 1)
    transport.take(A)
    with pytest.raises(ProtocolError, match="0F0 is not here for 1"):
        transport.take(A)


def test_a_payload_is_cut_over_the_receivers_mesh(transport):
    """From one device to two, and back to one."""
    (rank,) = placing.make_ranks(1, data=2, devices=jax.devices()[2:4])
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    transport.send(A, arrays(x), [rank.split])
    (cut,) = transport.take(A)
    assert cut.sharding == rank.split
    back = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    transport.send(B, [cut], [back])
    (whole,) = transport.take(B)
    assert whole.sharding == back
    np.testing.assert_array_equal(whole, x)


@pytest.fixture
def quick():
    """An array that exists. A new one would queue behind what its device runs."""
    return jnp.asarray(2.0).block_until_ready()


@pytest.fixture
def late(quick):
    """An array that was launched and does not exist yet, for a few tenths of a second.

    A long program is the only one that JAX runs beside the caller on a CPU: small ones,
    and those with host callbacks, run in the calling thread.
    """

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 80, lambda i, y: jnp.tanh(y @ x), x)[0, 0]

    x = jnp.full((700, 700), 0.001)
    program = slow.lower(x).compile()
    x.block_until_ready()
    value = program(x)
    yield value
    value.block_until_ready()


def test_a_send_does_not_wait_for_values_that_do_not_exist(transport, there, late):
    transport.send(A, [late], [there])
    transport.send(B, [late], [there])
    assert not late.is_ready()
    assert transport.arrived() == []
    assert transport.num_in_transit() == 2
    assert sorted(wait_for(transport, 2)) == [A, B]
    assert late.is_ready()


def test_a_message_that_takes_long_holds_up_no_other(transport, there, late, quick):
    """Neither a later send, nor its report, nor its taking waits for it."""
    transport.send(A, [late], [there])
    transport.send(B, [quick], [there])
    assert wait_for(transport, 1) == [B]
    assert float(transport.take(B)[0]) == 2.0
    assert not late.is_ready()
    assert wait_for(transport, 1) == [A]
    assert float(transport.take(A)[0]) == float(late)


def test_what_is_taken_on_its_way_still_arrives(transport, there):
    """`take` allows it: the values may still be under way."""
    transport.send(A, arrays(1.0), [there])
    transport.take(A)
    assert wait_for(transport, 1) == [A]
    assert transport.num_in_transit() == 0


def test_a_name_is_used_once_a_step(transport, there):
    transport.send(A, arrays(1.0), [there])
    wait_for(transport, 1)
    transport.take(A)
    with pytest.raises(ProtocolError, match="0F0 was sent to 1 twice"):
        transport.send(A, arrays(2.0), [there])
