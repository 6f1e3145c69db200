"""Values as bytes: what is written is read back equal, and nothing else is read."""

from __future__ import annotations

import math
import pickle
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cache.codec import Codec, CodecError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Box:
    inner: Any


CODEC = Codec((Pair, Box))

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Box, inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    found = CODEC.decode(CODEC.encode(value))
    assert found == value
    assert repr(found) == repr(value)  # types too: 1, 1.0 and True are equal


@given(st.floats())
def test_floats_keep_every_bit_that_counts(value: float) -> None:
    (found,) = CODEC.decode(CODEC.encode((value,)))
    assert struct.pack("d", found) == struct.pack("d", value) or math.isnan(value)
    array = CODEC.decode(CODEC.encode(np.array([value])))
    assert array.tobytes() == np.array([value]).tobytes()


def test_arrays_keep_shape_and_type() -> None:
    for array in (np.zeros((0, 3)), np.arange(6).reshape(2, 3), np.array([True]), np.array(1.5)):
        found = CODEC.decode(CODEC.encode(array))
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert (found == array).all()
        assert found.flags.writeable


def test_an_object_held_twice_is_one_object_again() -> None:
    one = Box((1.0, 2.0))
    first, second = CODEC.decode(CODEC.encode((one, one)))
    assert first is second


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", len, np.array(["a"]), Codec(())])
def test_what_is_not_in_the_list_is_not_written(value: Any) -> None:
    with pytest.raises(CodecError):
        CODEC.encode((value,))


def test_no_pickle_is_read() -> None:
    for blob in (pickle.dumps(Box(1)), zlib.compress(pickle.dumps(Box(1)))):
        with pytest.raises(CodecError):
            CODEC.decode(blob)


CHECKSUM_BYTES = 4
"""At the end: zlib's Adler-32 of what was compressed."""


@given(st.data())
def test_damaged_bytes_are_told(data: st.DataObject) -> None:
    """But for a few of the last bits of what is compressed, which say nothing."""
    whole = CODEC.encode((Box(1.5), np.arange(5), "text"))
    blob = bytearray(whole)
    at = data.draw(st.integers(2, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    try:
        found = CODEC.decode(bytes(blob))
    except CodecError:
        return
    assert at >= len(blob) - CHECKSUM_BYTES - 2
    assert CODEC.encode(found) == whole


def test_bytes_of_other_classes_are_told() -> None:
    with pytest.raises(CodecError):
        Codec((Box,)).decode(CODEC.encode(1))
