"""Partition numbers of messages, computed from their keys.

Messages with the same key always have the same partition, in every process. Two keys may share a
partition; their messages then wait for each other. Large batches are hashed with arrays, small ones
in a loop; a property test checks that both agree.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np

from simplebus.core.group.partition_queues import NO_PARTITION
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, SEND_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import extract_key
from simplebus.core.protocol.envelope_reader import UniformEnvelopeReader
from simplebus.core.protocol.frames import FrameBatch, Integers, Words, unaligned
from simplebus.core.ring.ring import Ring

# Up to this many frames a loop is faster than arrays.
_SCALAR_FRAMES_MAX = 16
# Longer keys are hashed by their CRC-32, not word by word.
_WORD_HASH_BYTES_MAX = 64

_MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15
_FACTOR = 0xBF58476D1CE4E5B9
_SHIFT = 32
_WORD_DTYPE: np.dtype[np.uint64] = np.dtype("<u8")


def hash_bytes(data: bytes) -> int:
    """Return a 64-bit hash of `data` that is the same in every process."""
    state = (len(data) * _SEED) & _MASK
    if len(data) > _WORD_HASH_BYTES_MAX:
        return _mix(_mix(state, zlib.crc32(data)), 0)
    for at in range(0, len(data), _WORD_DTYPE.itemsize):
        state = _mix(state, int.from_bytes(data[at : at + _WORD_DTYPE.itemsize], "little"))
    return _mix(state, 0)  # Spreads the last bytes of a word to the lowest bits.


def _mix(state: int, word: int) -> int:
    state = ((state ^ word) * _FACTOR) & _MASK
    return state ^ (state >> _SHIFT)


def partition_of_key(key: bytes) -> int:
    """Return the partition of a key, from 1 to 2^32 - 1, or NO_PARTITION for an empty key."""
    return (hash_bytes(key) & 0xFFFFFFFF) or 1 if key else NO_PARTITION


def stored_partitions(ring: Ring, first: int, last: int) -> list[int]:
    """Return the partitions of the stored messages first..last-1."""
    partitions: list[int] = []
    while first < last:
        if first >= ring.envelopes_until:
            return partitions + [NO_PARTITION] * (last - first)
        if last - first <= _SCALAR_FRAMES_MAX:
            return partitions + [
                _frame_partition(ring.copy_frame(sequence)) for sequence in range(first, last)
            ]
        batch, first = ring.view_batch(first, last, SEND_BYTES)
        partitions += batch_partitions(batch)
    return partitions


def batch_partitions(batch: FrameBatch) -> list[int]:
    """Return the partitions of the messages of a batch, with or without envelopes."""
    partitions = _uniform_batch_partitions(batch) if batch.count > _SCALAR_FRAMES_MAX else None
    if partitions is not None:
        return partitions
    raw, bounds = batch.data.tobytes(), batch.bounds.tolist()
    return [_frame_partition(raw[a:b]) for a, b in pairwise(bounds)]


def _frame_partition(frame: bytes) -> int:
    if frame[0] != frames.ENVELOPE:
        return NO_PARTITION
    return partition_of_key(extract_key(frame[HEADER_BYTES:-DELIMITER_BYTES]))


def _uniform_batch_partitions(batch: FrameBatch) -> list[int] | None:
    """Return the partitions of a batch of envelopes with nearly uniform fields, or None."""
    if (batch.data[batch.starts] != frames.ENVELOPE).any():
        return None
    reader = UniformEnvelopeReader.for_batch(batch)
    if reader is None:
        return None
    begins, ends = reader.locate_keys()
    odd_indexes = reader.irregular_indexes()
    if odd_indexes is None:
        return None
    partitions: list[int] = _hash_keys(batch, begins, ends).tolist()
    for index in odd_indexes:
        partitions[index] = _frame_partition(batch.slice(index, index + 1).data.tobytes())
    return partitions


def _hash_keys(batch: FrameBatch, begins: Integers, ends: Integers) -> Words:
    """Return the partitions of the keys in data[begins:ends], as an array of shape (n,)."""
    data = batch.data
    lengths = ends - begins
    words, last = unaligned(data, _WORD_DTYPE), data.size - _WORD_DTYPE.itemsize
    factor, shift = np.uint64(_FACTOR), np.uint64(_SHIFT)
    states = lengths.astype(np.uint64) * np.uint64(_SEED)
    short = np.flatnonzero((lengths > 0) & (lengths <= _WORD_HASH_BYTES_MAX))
    for offset in range(0, int(lengths[short].max(initial=0)), _WORD_DTYPE.itemsize):
        if offset:
            short = short[lengths[short] > offset]
        positions = begins[short] + offset
        clipped = np.minimum(
            positions, last
        )  # The last words may reach beyond the end of the data.
        word = words[clipped] >> ((positions - clipped) * 8).astype(np.uint64)
        unused_bit_counts = np.maximum(_WORD_DTYPE.itemsize - (lengths[short] - offset), 0) * 8
        unused_bits = unused_bit_counts.astype(np.uint64)
        word = (word << unused_bits) >> unused_bits
        state = (states[short] ^ word) * factor
        states[short] = state ^ (state >> shift)
    states *= factor
    states ^= states >> shift
    for index in np.flatnonzero(lengths > _WORD_HASH_BYTES_MAX).tolist():
        states[index] = hash_bytes(data[begins[index] : ends[index]].tobytes())
    partitions: Words = states & np.uint64(0xFFFFFFFF)
    partitions[partitions == 0] = 1
    partitions[lengths == 0] = NO_PARTITION
    return partitions
