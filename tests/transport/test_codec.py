"""What peers send is checked before it is used, and refused with its values."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core.task import parse
from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport import codec
from rrfp_jax.transport.codec import Envelope


def test_an_envelope_comes_back():
    envelope = Envelope("run", True, 7, "news", (1, ("a", b"b"), None), (0, 5))
    assert codec.unpack(codec.pack(envelope)) == envelope


@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_be_refused(data):
    try:
        codec.unpack(data)
    except codec.RefusedLetter as refusal:
        assert str(refusal).startswith(refusal.reason)  # noqa: PT017


def test_what_a_refusal_repeats_is_bounded():
    with pytest.raises(codec.RefusedLetter) as caught:
        codec.unpack(b"\xdb\x00\x01\x00\x00" + b"x" * 65536)
    assert len(str(caught.value)) < 200


def test_a_task_travels_as_three_values():
    sent = Envelope("run", False, 0, "launch", parse("2F0"), ())
    body = codec.unpack(codec.pack(sent)).body
    assert body == ("F", 2, 0)
    assert codec.read_task(body) == parse("2F0")


@pytest.mark.parametrize(
    "value", [("X", 2, 0), ("F", -1, 0), ("F", 2), ("F", 2, True), "2F0", None]
)
def test_what_is_no_task_is_refused(value):
    with pytest.raises(ProtocolError, match="for a task; expected"):
        codec.read_task(value)


@pytest.mark.parametrize(
    "dtype", ["bool", "int32", "float16", "complex64", "bfloat16", "float8_e4m3fn"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_an_array_comes_back(dtype, shape):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    body = codec.pack_header(array.dtype, array.shape)
    header = codec.read_header(body)
    assert header == (array.dtype, array.shape)
    found = codec.read_array(header, memoryview(array.tobytes()))
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("dtype", [object, "S3", "datetime64[s]", "V4"])
def test_only_numbers_are_sent(dtype):
    with pytest.raises(TypeError, match="cannot be sent"):
        codec.pack_header(dtype, (3,))


@pytest.mark.parametrize(
    "value",
    [
        ("object", (2,)),
        ("finfo", (2,)),
        ("__name__", (2,)),
        ("float32", (-2,)),
        ("float32", 2),
        ("float32", (2.0,)),
        "float32",
    ],
)
def test_what_is_no_header_is_refused(value):
    with pytest.raises(ProtocolError, match="for an array's header; expected"):
        codec.read_header(value)


def test_bytes_that_do_not_fit_the_header_are_refused():
    header = codec.read_header(("float32", (2, 3)))
    with pytest.raises(ProtocolError, match=r"23 bytes .* \(2, 3\); expected 24"):
        codec.read_array(header, memoryview(bytes(23)))
