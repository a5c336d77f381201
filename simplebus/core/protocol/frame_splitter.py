r"""From bytes to the frames in them.

Rule 1: how bytes are searched depends on how they look, the frames found never do: a property test
holds the plain loop, the strides and the arrays to one oracle.
Rule 2: by arrays, every byte is looked at once; from then on only words that hold a `<`.
Rule 3: what is looked at twice stays in the cache: a block's flags, then one flag for eight bytes.

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

# Below either of them, a plain search for each delimiter is cheaper than arrays are.
_ARRAYS_FRAMES_MIN = 50
_ARRAYS_BYTES_MIN = 16 * 1024

# From this many frames of one length on, looking for nothing else beats searching.
_UNIFORM_FRAMES_MIN = 16
# A run this long is worth a call of its own, however much follows it, and a look for its beginning
# behind the first few frames.
_UNIFORM_FRAMES_ENOUGH = 256
_OTHERS_BEFORE_MAX = 4

# From this length on, searching each frame is cheaper than looking at all bytes at once.
_LONG_FRAME_BYTES = 192

# A block and its flags fit into a processor's second cache together.
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
"""A word in which only byte n is 1, times this, has 8 n in its top byte."""
_NONE, _ONE, _THREE, _SEVEN, _TOP_BYTE, _BITS = map(np.uint64, (0, 1, 3, 7, 56, 64))


class Scratch:
    """Memory that splitting needs, to be used again by the next split."""

    def __init__(self, size: int) -> None:
        """For splits of up to `size` bytes."""
        self.flags: Flags = np.empty(_BLOCK_WORDS * _SIZE, np.bool_)
        self.hits: Flags = np.empty(size // _SIZE + 2 * _SIZE, np.bool_)


def split(buffer: bytearray, first: int, last: int, scratch: Scratch) -> FrameBatch | None:
    """The whole frames at the front of buffer[first:last], or None when there is none.

    May stop early, at a change from frames of one length to others: call again from the end of what
    came back. What remains when it returns None is the beginning of one frame. The buffer holds
    SPARE_BYTES behind `last`, whatever they are: words are read whole.
    """
    end = buffer.find(DELIMITER, first + HEADER_BYTES, last)
    if end < 0:
        return None
    stride = end + DELIMITER_BYTES - first
    likely = (last - first) // stride
    is_many = likely > _ARRAYS_FRAMES_MIN or last - first > _ARRAYS_BYTES_MIN
    found = None
    if likely >= _UNIFORM_FRAMES_MIN and buffer.startswith(DELIMITER, end + stride):
        found = _split_uniform(buffer, first, stride, likely, scratch)
    elif is_many:  # Never behind what only looked so: it would be looked at again for each frame.
        found = _before_uniform(buffer, first, end, last)
    if found is not None:
        return found
    if is_many:
        return _split_arrays(buffer, first, last, scratch)
    bounds = [0]
    while end >= 0:
        at = end + DELIMITER_BYTES
        bounds.append(at - first)
        end = buffer.find(DELIMITER, at + HEADER_BYTES, last)
    size = bounds[-1]
    same = stride * (len(bounds) - 1) == size and bounds == list(range(0, size + 1, stride))
    data = np.frombuffer(buffer, np.uint8, size, first)
    return FrameBatch(data, np.array(bounds, np.int64), stride if same else 0)


def _split_uniform(
    buffer: bytearray, first: int, stride: int, likely: int, scratch: Scratch
) -> FrameBatch | None:
    """Up to `likely` frames of one length at the front, if they are a good part of them."""
    data = np.frombuffer(buffer, np.uint8, likely * stride, first)
    offset = stride - DELIMITER_BYTES
    here = strided(data, _HALF_WORD, offset, stride, likely) == _DELIMITER_HALF
    count = likely if np.count_nonzero(here) == likely else int(here.argmin())
    if count < min(likely // 2, _UNIFORM_FRAMES_ENOUGH) or count < _UNIFORM_FRAMES_MIN:
        return None
    block = data[: count * stride]
    if not _is_plain(block, stride, scratch):
        less_than = block == _LESS_THAN
        less_than[offset::stride] = False
        # The last delimiter ends the block, so that a whole word stands at every other candidate.
        candidates = np.flatnonzero(less_than[:-DELIMITER_BYTES])
        if (unaligned(block, _HALF_WORD)[candidates] == _DELIMITER_HALF).any():
            return None
    return FrameBatch(block, np.arange(0, block.size + 1, stride, dtype=np.int64), stride)


def _before_uniform(buffer: bytearray, first: int, end: int, last: int) -> FrameBatch | None:
    """The few frames before many that look as if they were of one length; None where none do. The
    first one's delimiter is at `end`."""
    bounds = [0]
    while len(bounds) <= _OTHERS_BEFORE_MAX:
        at = end + DELIMITER_BYTES
        bounds.append(at - first)
        end = buffer.find(DELIMITER, at + HEADER_BYTES, last)
        if end < 0:
            return None
        stride = end + DELIMITER_BYTES - at
        if (last - at) // stride >= _UNIFORM_FRAMES_ENOUGH and all(
            buffer.startswith(DELIMITER, end + frame * stride) for frame in (1, 2, 3)
        ):
            data = np.frombuffer(buffer, np.uint8, bounds[-1], first)
            return FrameBatch(data, np.array(bounds, np.int64), 0 if len(bounds) > 2 else data.size)
    return None


def _is_plain(block: Bytes, stride: int, scratch: Scratch) -> bool:
    """Whether frames, which have a delimiter each at the stride, hold no other `<`: then they hold
    no other delimiter. False means only that one has to look closer."""
    count = block.size // stride
    if stride >= _LONG_FRAME_BYTES:
        at = np.strings.find(block.view(f"S{stride}"), DELIMITER[:1], HEADER_BYTES)
        return bool(np.count_nonzero(at == stride - DELIMITER_BYTES) == count)
    found: int | np.signedinteger = 0
    for first in range(0, block.size, scratch.flags.size):
        part = block[first : first + scratch.flags.size]
        found += np.count_nonzero(np.equal(part, _LESS_THAN, out=scratch.flags[: part.size]))
    if found > count:  # A header may look like anything: its first byte, and the eight behind it.
        headers = strided(block, _WORD, 1, stride, count).copy().view(np.uint8)
        found -= np.count_nonzero(headers == _LESS_THAN)
        found -= np.count_nonzero(block[::stride] == _LESS_THAN)
    return found == count


def _split_arrays(buffer: bytearray, first: int, last: int, scratch: Scratch) -> FrameBatch:
    """All whole frames at the front, where one is at least."""
    delimiters, words = find_delimiters(buffer, first, last, scratch)
    bounds = np.empty(delimiters.size + 1, np.int64)
    bounds[0] = 0
    np.add(delimiters, DELIMITER_BYTES, out=bounds[1:])
    keys = None
    if (bounds[1:] - bounds[:-1]).min() < FRAME_BYTES_MIN:
        bounds = _outside_headers(delimiters)
    else:  # What stands behind each delimiter begins the next frame.
        keys = np.empty(words.size, _WORD)
        keys[0] = int.from_bytes(buffer[first : first + 3], "little") << 32
        np.bitwise_and(words[:-1], KEY_BITS, out=keys[1:])
    size = int(bounds[-1])
    return FrameBatch(np.frombuffer(buffer, np.uint8, size, first), bounds, 0, keys)


def _outside_headers(delimiters: Integers) -> Integers:
    """The bounds of the frames that these delimiters end; one inside a header ends none."""
    bounds = [0]
    for at in delimiters.tolist():
        if at >= bounds[-1] + HEADER_BYTES:
            bounds.append(at + DELIMITER_BYTES)
    return np.array(bounds, np.int64)


def find_delimiters(
    buffer: bytearray, first: int, last: int, scratch: Scratch
) -> tuple[Integers, Words]:
    """Where delimiters begin in buffer[first:last], counted from `first`, and what stands there.

    Shapes (n,), ascending: positions, and eight bytes each, which may reach behind `last`.
    """
    begin = first - first % _SIZE
    count = -(-(last - begin) // _SIZE)
    data = np.frombuffer(buffer, np.uint8, count * _SIZE, begin)
    words = np.frombuffer(buffer, _WORD, count + 1, begin)
    at = _words_with_less_than(data, scratch)
    found = words.take(at)
    shift = _shift_of_less_than(found)
    if shift is None:
        every = np.flatnonzero(data == _LESS_THAN)
        at = every >> 3
        found = words.take(at)
        shift = ((every & 7) << 3).view(np.uint64)
    # In place from here on: an array less is one that stays in the cache.
    found >>= shift
    above = words[1:].take(at)
    above <<= _BITS - shift
    found |= above
    shift >>= _THREE
    positions = at
    positions <<= 3
    positions += shift.view(np.int64)
    positions += begin - first
    good = np.bitwise_and(found, _LOW_HALF, out=above) == _DELIMITER_WORD
    # The first and the last words reach over what was asked for.
    good[:_SIZE] &= positions[:_SIZE] >= 0
    good[-2 * _SIZE :] &= positions[-2 * _SIZE :] <= last - first - DELIMITER_BYTES
    if np.count_nonzero(good) < good.size:
        return positions[good], found[good]
    return positions, found


def _shift_of_less_than(words: Words) -> Words | None:
    """How many bits lie below the `<` in each word, or None if it is not plain which one it is."""
    marks = words ^ _EVERY_LESS_THAN
    below = marks - _EVERY_ONE
    np.invert(marks, out=marks)
    marks &= below
    marks &= _EVERY_TOP  # The top bit of a word's first `<`, and perhaps of bytes above it.
    np.subtract(marks, _ONE, out=below)
    below &= marks
    if below.any():
        return None
    marks >>= _SEVEN
    marks *= _EIGHT_TIMES_BYTE
    marks >>= _TOP_BYTE
    return marks


def _words_with_less_than(data: Bytes, scratch: Scratch) -> Integers:
    """Which words of data hold a `<`, the delimiter's first byte: ascending."""
    count = data.size // _SIZE
    groups = -(-count // _SIZE)
    hits, flags = scratch.hits[: groups * _SIZE], scratch.flags
    hits[count:] = False
    for at in range(0, count, _BLOCK_WORDS):
        block = min(_BLOCK_WORDS, count - at)
        here = flags[: block * _SIZE]
        np.equal(data[at * _SIZE : (at + block) * _SIZE], _LESS_THAN, out=here)
        np.not_equal(here.view(_WORD), _NONE, out=hits[at : at + block])
    by_group = hits.view(_WORD)
    found = np.flatnonzero(by_group != _NONE)
    within = np.flatnonzero(by_group.take(found).view(np.bool_))
    words: Integers = found.take(within >> 3)
    words <<= 3
    within &= 7
    words += within
    return words
