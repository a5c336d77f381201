"""In which lane a message is: a number that follows from its key.

Rule 1: messages with one key are in one lane, whoever asks and when. Two keys in one lane are
harmless: their messages wait for each other.
Rule 2: many messages are read in arrays, few one after the other; both find the same lanes, and a
property test says so.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np

from simplebus.core.group.partition_queues import NO_PARTITION
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, SEND_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import key_of
from simplebus.core.protocol.envelope_reader import EnvelopeReader
from simplebus.core.protocol.frames import FrameBatch, Integers, Words, unaligned
from simplebus.core.ring.ring import Ring

# So few are read one after the other: arrays have a price of their own.
_SCALAR_FRAMES_MAX = 16
# A longer key is read by a checksum, not word by word.
_WORD_HASH_BYTES_MAX = 64

_MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15
_FACTOR = 0xBF58476D1CE4E5B9
_SHIFT = 32
_WORD_DTYPE: np.dtype[np.uint64] = np.dtype("<u8")


def hash_bytes(data: bytes) -> int:
    """64 bits that follow from some bytes, the same ones in every process."""
    state = (len(data) * _SEED) & _MASK
    if len(data) > _WORD_HASH_BYTES_MAX:
        return _mix(_mix(state, zlib.crc32(data)), 0)
    for at in range(0, len(data), _WORD_DTYPE.itemsize):
        state = _mix(state, int.from_bytes(data[at : at + _WORD_DTYPE.itemsize], "little"))
    return _mix(state, 0)  # Else a word's last bytes would not reach the lowest bits.


def _mix(state: int, word: int) -> int:
    state = ((state ^ word) * _FACTOR) & _MASK
    return state ^ (state >> _SHIFT)


def partition_of_key(key: bytes) -> int:
    """The lane of a key, from 1 to 2^32 - 1; NO_LANE for none."""
    return (hash_bytes(key) & 0xFFFFFFFF) or 1 if key else NO_PARTITION


def stored_partitions(ring: Ring, first: int, last: int) -> list[int]:
    """The lanes of messages first..last-1, which are stored."""
    found: list[int] = []
    while first < last:
        if first >= ring.envelopes_until:
            return found + [NO_PARTITION] * (last - first)
        if last - first <= _SCALAR_FRAMES_MAX:
            return found + [
                _frame_partition(ring.frame(sequence)) for sequence in range(first, last)
            ]
        batch, first = ring.batch(first, last, SEND_BYTES)
        found += batch_partitions(batch)
    return found


def batch_partitions(batch: FrameBatch) -> list[int]:
    """The lanes of these messages, with or without an envelope."""
    found = _uniform_batch_partitions(batch) if batch.count > _SCALAR_FRAMES_MAX else None
    if found is not None:
        return found
    raw, bounds = batch.data.tobytes(), batch.bounds.tolist()
    return [_frame_partition(raw[a:b]) for a, b in pairwise(bounds)]


def _frame_partition(frame: bytes) -> int:
    if frame[0] != frames.ENVELOPE:
        return NO_PARTITION
    return partition_of_key(key_of(frame[HEADER_BYTES:-DELIMITER_BYTES]))


def _uniform_batch_partitions(batch: FrameBatch) -> list[int] | None:
    """The same where all have envelopes, nearly all with the same fields; else None."""
    if (batch.data[batch.starts] != frames.ENVELOPE).any():
        return None
    reader = EnvelopeReader.of(batch)
    if reader is None:
        return None
    begins, ends = reader.keys()
    odd = reader.odd_ones()
    if odd is None:
        return None
    found: list[int] = _hash_keys(batch, begins, ends).tolist()
    for index in odd:
        found[index] = _frame_partition(batch.slice(index, index + 1).data.tobytes())
    return found


def _hash_keys(batch: FrameBatch, begins: Integers, ends: Integers) -> Words:
    """The lanes of the keys in data[begins:ends]. Shape (n,)."""
    data = batch.data
    lengths = ends - begins
    words, last = unaligned(data, _WORD_DTYPE), data.size - _WORD_DTYPE.itemsize
    factor, shift = np.uint64(_FACTOR), np.uint64(_SHIFT)
    states = lengths.astype(np.uint64) * np.uint64(_SEED)
    short = np.flatnonzero((lengths > 0) & (lengths <= _WORD_HASH_BYTES_MAX))
    for at in range(0, int(lengths[short].max(initial=0)), _WORD_DTYPE.itemsize):
        if at:
            short = short[lengths[short] > at]
        places = begins[short] + at
        inside = np.minimum(places, last)  # The last words may begin too close to the end.
        word = words[inside] >> ((places - inside) * 8).astype(np.uint64)
        unused = np.maximum(_WORD_DTYPE.itemsize - (lengths[short] - at), 0) * 8
        unused_bits = unused.astype(np.uint64)
        word = (word << unused_bits) >> unused_bits
        state = (states[short] ^ word) * factor
        states[short] = state ^ (state >> shift)
    states *= factor
    states ^= states >> shift
    for index in np.flatnonzero(lengths > _WORD_HASH_BYTES_MAX).tolist():
        states[index] = hash_bytes(data[begins[index] : ends[index]].tobytes())
    found: Words = states & np.uint64(0xFFFFFFFF)
    found[found == 0] = 1
    found[lengths == 0] = NO_PARTITION
    return found
