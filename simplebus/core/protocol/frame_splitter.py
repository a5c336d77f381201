"""Search for frame bounds in received bytes.

The search strategy depends on the data: a plain loop for few frames, strides for frames of one
length, arrays for the rest. All return the same frames; a property test compares them with one
oracle. The array search inspects every byte once, and then only words that contain a `<`. The flags
of a block fit into the processor's second-level cache.

    bytes   ex<rn>1--00000000t…
    words   │  .  │  <  │  .  │     one flag for eight bytes
    groups  │ . < . . . . . < │     one flag for eight words
"""

from __future__ import annotations

import numpy as np

from simplebus.core.limits import DELIMITER_BYTES, FRAME_BYTES_MIN, HEADER_BYTES
from simplebus.core.protocol.frames import (
    DELIMITER,
    KEY_BITS,
    Bytes,
    Flags,
    FrameBatch,
    Integers,
    Words,
    strided,
    unaligned,
)

# Below these, a plain search for each delimiter is cheaper than arrays.
_ARRAYS_FRAMES_MIN = 50
_ARRAYS_BYTES_MIN = 16 * 1024

# Frames of one batch if all are as long as the first one. A turn may stop after it, before the
# other bytes of the read are searched.
_ARRAYS_FRAMES_MAX = 16_384

# From this many frames of one length on, checking strides is faster than searching.
_UNIFORM_FRAMES_MIN = 16
# A run of this length is split separately, also if it begins behind the first few frames.
_UNIFORM_RUN_MIN = 256
_FRAMES_BEFORE_UNIFORM_MAX = 4

# From this length on, searching each frame is cheaper than comparing all bytes.
_LONG_FRAME_BYTES = 192

# A block and its flags fit together into a processor's second-level cache.
_BLOCK_WORDS = 32 * 1024

_WORD: np.dtype[np.uint64] = np.dtype("<u8")
_HALF_WORD: np.dtype[np.uint32] = np.dtype("<u4")
_SIZE = _WORD.itemsize
_DELIMITER_HALF = np.uint32(int.from_bytes(DELIMITER, "little"))
_DELIMITER_WORD = np.uint64(int.from_bytes(DELIMITER, "little"))
_LOW_HALF = np.uint64(0xFFFFFFFF)
_LESS_THAN = np.uint8(DELIMITER[0])
_EVERY_LESS_THAN = np.uint64(DELIMITER[0] * 0x0101010101010101)
_EVERY_ONE = np.uint64(0x0101010101010101)
_EVERY_TOP = np.uint64(0x8080808080808080)
_EIGHT_TIMES_BYTE = np.uint64(0x0008101820283038)
"""A word in which only byte n is 1, times this, has 8 * n in its top byte."""
_NONE, _ONE, _THREE, _SEVEN, _TOP_BYTE, _BITS = map(np.uint64, (0, 1, 3, 7, 56, 64))


class SplitterScratch:
    """Scratch memory that is reused by every split."""

    def __init__(self, size: int) -> None:
        """Allocate memory for splits of up to `size` bytes."""
        self.flags: Flags = np.empty(_BLOCK_WORDS * _SIZE, np.bool_)
        self.hits: Flags = np.empty(size // _SIZE + 2 * _SIZE, np.bool_)


def split_frames(
    buffer: bytearray, first: int, last: int, scratch: SplitterScratch
) -> FrameBatch | None:
    """Return whole frames at the front of buffer[first:last].

    May return fewer frames than there are: call it again from the end of the returned batch.

    Args:
        buffer: Received bytes, with SPARE_BYTES of any content after `last`: whole words are read.
        first: Offset of the first frame.
        last: End of the received bytes.
        scratch: Scratch memory for at least `last - first` bytes.

    Returns:
        A view of the buffer, or None if only the beginning of a frame is left.
    """
    end = buffer.find(DELIMITER, first + HEADER_BYTES, last)
    if end < 0:
        return None
    stride = end + DELIMITER_BYTES - first
    estimated_count = (last - first) // stride
    is_many = estimated_count > _ARRAYS_FRAMES_MIN or last - first > _ARRAYS_BYTES_MIN
    batch = None
    if estimated_count >= _UNIFORM_FRAMES_MIN and buffer.startswith(DELIMITER, end + stride):
        batch = _split_uniform(buffer, first, stride, estimated_count, scratch)
    elif is_many:  # Not after a failed uniform split: it would be repeated for each frame.
        batch = _split_before_uniform(buffer, first, end, last)
    if batch is not None:
        return batch
    if is_many:
        last = min(last, first + _ARRAYS_FRAMES_MAX * stride)
        return _split_with_arrays(buffer, first, last, scratch)
    bounds = [0]
    while end >= 0:
        offset = end + DELIMITER_BYTES
        bounds.append(offset - first)
        end = buffer.find(DELIMITER, offset + HEADER_BYTES, last)
    size = bounds[-1]
    is_uniform = stride * (len(bounds) - 1) == size and bounds == list(range(0, size + 1, stride))
    data = np.frombuffer(buffer, np.uint8, size, first)
    return FrameBatch(data, np.array(bounds, np.int64), stride if is_uniform else 0)


def _split_uniform(
    buffer: bytearray, first: int, stride: int, estimated_count: int, scratch: SplitterScratch
) -> FrameBatch | None:
    """Return up to `estimated_count` frames of one length at the front; None if they are few."""
    data = np.frombuffer(buffer, np.uint8, estimated_count * stride, first)
    offset = stride - DELIMITER_BYTES
    is_delimiter = strided(data, _HALF_WORD, offset, stride, estimated_count) == _DELIMITER_HALF
    first_other = int(is_delimiter.argmin())  # 0 if there is no other.
    count = estimated_count if is_delimiter[first_other] else first_other
    if count < min(estimated_count // 2, _UNIFORM_RUN_MIN) or count < _UNIFORM_FRAMES_MIN:
        return None
    block = data[: count * stride]
    if not _has_no_inner_delimiter(block, stride, scratch):
        less_than = block == _LESS_THAN
        less_than[offset::stride] = False
        # The last delimiter ends the block, so every other candidate starts a whole word.
        candidates = np.flatnonzero(less_than[:-DELIMITER_BYTES])
        if (unaligned(block, _HALF_WORD)[candidates] == _DELIMITER_HALF).any():
            return None
    return FrameBatch(block, np.arange(0, block.size + 1, stride, dtype=np.int64), stride)


def _split_before_uniform(buffer: bytearray, first: int, end: int, last: int) -> FrameBatch | None:
    """Return the few frames in front of a long run that looks uniform; None if there is no such
    run.

    The delimiter of the first frame is at `end`.
    """
    bounds = [0]
    while len(bounds) <= _FRAMES_BEFORE_UNIFORM_MAX:
        offset = end + DELIMITER_BYTES
        bounds.append(offset - first)
        end = buffer.find(DELIMITER, offset + HEADER_BYTES, last)
        if end < 0:
            return None
        stride = end + DELIMITER_BYTES - offset
        if (last - offset) // stride >= _UNIFORM_RUN_MIN and all(
            buffer.startswith(DELIMITER, end + frame * stride) for frame in (1, 2, 3)
        ):
            data = np.frombuffer(buffer, np.uint8, bounds[-1], first)
            return FrameBatch(data, np.array(bounds, np.int64), 0 if len(bounds) > 2 else data.size)
    return None


def _has_no_inner_delimiter(block: Bytes, stride: int, scratch: SplitterScratch) -> bool:
    """Return True if frames with a delimiter at each stride contain no other `<`.

    False means only that a closer check is needed.
    """
    count = block.size // stride
    if stride >= _LONG_FRAME_BYTES:
        offset = np.strings.find(block.view(f"S{stride}"), DELIMITER[:1], HEADER_BYTES)
        return bool(np.count_nonzero(offset == stride - DELIMITER_BYTES) == count)
    matches: int | np.signedinteger = 0
    for first in range(0, block.size, scratch.flags.size):
        part = block[first : first + scratch.flags.size]
        matches += np.count_nonzero(np.equal(part, _LESS_THAN, out=scratch.flags[: part.size]))
    if matches > count:  # Headers may contain any byte: subtract the `<` in their nine bytes.
        headers = strided(block, _WORD, 1, stride, count).copy().view(np.uint8)
        matches -= np.count_nonzero(headers == _LESS_THAN)
        matches -= np.count_nonzero(block[::stride] == _LESS_THAN)
    return matches == count


def _split_with_arrays(
    buffer: bytearray, first: int, last: int, scratch: SplitterScratch
) -> FrameBatch:
    """Return all whole frames at the front; there is at least one."""
    delimiters, words = find_delimiters(buffer, first, last, scratch)
    bounds = np.empty(delimiters.size + 1, np.int64)
    bounds[0] = 0
    np.add(delimiters, DELIMITER_BYTES, out=bounds[1:])
    keys = None
    if (bounds[1:] - bounds[:-1]).min() < FRAME_BYTES_MIN:
        bounds = _bounds_outside_headers(delimiters)
    else:  # The bytes behind each delimiter are type and class of the next frame.
        keys = np.empty(words.size, _WORD)
        keys[0] = int.from_bytes(buffer[first : first + 3], "little") << 32
        np.bitwise_and(words[:-1], KEY_BITS, out=keys[1:])
    size = int(bounds[-1])
    return FrameBatch(np.frombuffer(buffer, np.uint8, size, first), bounds, 0, keys)


def _bounds_outside_headers(delimiters: Integers) -> Integers:
    """Return frame bounds, ignoring delimiters inside headers."""
    bounds = [0]
    for offset in delimiters.tolist():
        if offset >= bounds[-1] + HEADER_BYTES:
            bounds.append(offset + DELIMITER_BYTES)
    return np.array(bounds, np.int64)


def find_delimiters(
    buffer: bytearray, first: int, last: int, scratch: SplitterScratch
) -> tuple[Integers, Words]:
    """Find the delimiters in buffer[first:last].

    Returns:
        Offsets from `first`, ascending, and the eight bytes at each, which may reach behind `last`.
        Shape (n,) each.
    """
    begin = first - first % _SIZE
    count = -(-(last - begin) // _SIZE)
    data = np.frombuffer(buffer, np.uint8, count * _SIZE, begin)
    words = np.frombuffer(buffer, _WORD, count + 1, begin)
    offset = _words_with_less_than(data, scratch)
    matches = words.take(offset)
    shift = _less_than_shifts(matches)
    if shift is None:
        every = np.flatnonzero(data == _LESS_THAN)
        offset = every >> 3
        matches = words.take(offset)
        shift = ((every & 7) << 3).view(np.uint64)
    # In place from here on: fewer arrays stay in the cache.
    matches >>= shift
    above = words[1:].take(offset)
    above <<= _BITS - shift
    matches |= above
    shift >>= _THREE
    positions = offset
    positions <<= 3
    positions += shift.view(np.int64)
    positions += begin - first
    good = np.bitwise_and(matches, _LOW_HALF, out=above) == _DELIMITER_WORD
    # The first and the last words reach beyond first..last.
    good[:_SIZE] &= positions[:_SIZE] >= 0
    good[-2 * _SIZE :] &= positions[-2 * _SIZE :] <= last - first - DELIMITER_BYTES
    if np.count_nonzero(good) < good.size:
        return positions[good], matches[good]
    return positions, matches


def _less_than_shifts(words: Words) -> Words | None:
    """Return the number of bits below the `<` in each word; None if a word may contain several."""
    flags = words ^ _EVERY_LESS_THAN
    below = flags - _EVERY_ONE
    np.invert(flags, out=flags)
    flags &= below
    flags &= _EVERY_TOP  # The top bit of a word's first `<`, and perhaps of bytes above it.
    np.subtract(flags, _ONE, out=below)
    below &= flags
    if below.any():
        return None
    flags >>= _SEVEN
    flags *= _EIGHT_TIMES_BYTE
    flags >>= _TOP_BYTE
    return flags


def _words_with_less_than(data: Bytes, scratch: SplitterScratch) -> Integers:
    """Return the indexes of the words that contain a `<`, ascending."""
    count = data.size // _SIZE
    groups = -(-count // _SIZE)
    hits, flags = scratch.hits[: groups * _SIZE], scratch.flags
    hits[count:] = False
    for offset in range(0, count, _BLOCK_WORDS):
        block = min(_BLOCK_WORDS, count - offset)
        block_flags = flags[: block * _SIZE]
        np.equal(data[offset * _SIZE : (offset + block) * _SIZE], _LESS_THAN, out=block_flags)
        np.not_equal(block_flags.view(_WORD), _NONE, out=hits[offset : offset + block])
    by_group = hits.view(_WORD)
    matches = np.flatnonzero(by_group != _NONE)
    within = np.flatnonzero(by_group.take(matches).view(np.bool_))
    words: Integers = matches.take(within >> 3)
    words <<= 3
    within &= 7
    words += within
    return words
