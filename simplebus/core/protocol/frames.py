r"""Bytes to frames and back: the wire of protocol version 1 (protocol/binary.md).

Rule 1: this file knows bytes, never classes' contents, sessions or sockets.
Rule 2: `ack_ranges` chooses between a plain loop and arrays by size alone; both give the same
answer, and a property test holds them together.

    0      1         3            7             9                n-4        n
    ├ type ┼ class ──┼ message id ┼ timer index ┼ content … ─────┼ <\r\n> ──┤
      u8     u16 BE    i32 BE       u16 BE

The first delimiter at or after offset 9 of a frame ends it; header bytes may look like one.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    ACK_DIGITS_MAX,
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)

Bytes = npt.NDArray[np.uint8]
"""Shape (n,), contiguous."""
Integers = npt.NDArray[np.int64]
"""Shape (n,)."""
Flags = npt.NDArray[np.bool_]
"""Shape (n,)."""
Words = npt.NDArray[np.uint64]
"""Shape (n,): eight characters each, the first one in the lowest byte."""
Keys = npt.NDArray[np.uint32]
"""Shape (n,): type and class of a frame, which are its first three bytes, the first one lowest."""

Item = TypeVar("Item", bound=np.generic)

DELIMITER = b"<\r\n>"
HEADER = struct.Struct(">BHiH")
"""Type, class id, message id, timer index."""

HEARTBEAT, MESSAGE, SUBSCRIBE, ACK, CONNECT = b"01234"
ENVELOPE, CONFIRM, DELIVER, NACK, WORKING, UNSUBSCRIBE, FETCH, ERROR = b"56789UFE"
INQUIRE, PURGE = b"IP"
"""Of version 2."""

_ID_AND_TIMER = struct.Struct(">iH")
_WORD: np.dtype[np.uint32] = np.dtype("<u4")
_LONG: np.dtype[np.uint64] = np.dtype("<u8")
_DASH = np.uint8(ord("-"))
_KEY_MASK = np.uint32(0xFFFFFF)
_KEY_SHIFT = np.uint64(32)

KEY_BITS = np.uint64(0xFFFFFF << 32)
"""Where the next frame's type and class stand in the eight bytes that a delimiter begins."""
_ACK_CONTENT = re.compile(rb"([0-9]{1,10})-([0-9]{1,10}|-2147483648)")
"""The second form is how the original writes 2**31, as a signed 32-bit number."""

assert HEADER.size == HEADER_BYTES
assert len(DELIMITER) == DELIMITER_BYTES


def encode(
    frame_type: int,
    *,
    class_id: int = 0,
    message_id: int = 0,
    timer_index: int = 0,
    content: bytes = b"",
) -> bytes:
    """One frame. The caller has checked that content holds no delimiter."""
    return HEADER.pack(frame_type, class_id, message_id, timer_index) + content + DELIMITER


def encode_ack(*, class_id: int, timer_index: int, first: int, last: int) -> bytes:
    """An Ack frame for the message ids first..last-1."""
    content = b"%d-%d" % (first, last)
    return HEADER.pack(ACK, class_id, 0, timer_index) + content + DELIMITER


@dataclass(frozen=True, slots=True)
class FrameBatch:
    """Whole frames, back to back. A view: valid until the buffer behind it is written again."""

    data: Bytes
    """Exactly the frames' bytes."""
    bounds: Integers
    """Shape (count+1,): frame n is data[bounds[n] : bounds[n+1]]; from 0 to data.size."""
    stride: int
    """Length of every frame when all are equal, else 0."""
    found_keys: Words | None = None
    """In KEY_BITS, what `keys` answers, where it has been found out already."""

    @property
    def count(self) -> int:
        return self.bounds.size - 1

    @property
    def starts(self) -> Integers:
        return self.bounds[:-1]

    @property
    def ends(self) -> Integers:
        return self.bounds[1:]

    @property
    def lengths(self) -> Integers:
        return self.ends - self.starts

    def keys(self) -> Keys:
        """Type and class of each frame as one number: the header's first three bytes, unordered."""
        if self.found_keys is not None:
            return (self.found_keys >> _KEY_SHIFT).astype(np.uint32)
        if self.stride:
            words = strided(self.data, _WORD, 0, self.stride, self.count)
        else:
            words = unaligned(self.data, _WORD)[self.starts]
        return words & _KEY_MASK

    def changes(self) -> Flags:
        """Whether each frame but the first differs in type or class from the one before it."""
        keys: Keys | Words = self.keys() if self.found_keys is None else self.found_keys
        flags: Flags = keys[1:] != keys[:-1]
        return flags

    def slice(self, first: int, last: int) -> FrameBatch:
        """Frames first..last-1, without a copy."""
        bounds = self.bounds[first : last + 1]
        at, end = int(bounds[0]), int(bounds[-1])
        return FrameBatch(self.data[at:end], bounds - at if at else bounds, self.stride)

    def take(self, order: npt.NDArray[np.intp]) -> FrameBatch:
        """The frames at these indexes, in that order, as a copy. One index at least."""
        if self.stride:
            rows = self.data.reshape(self.count, self.stride).take(order, axis=0)
            return FrameBatch(rows.reshape(-1), self.bounds[: order.size + 1], self.stride)
        # Frames of many lengths: neighbours are copied together.
        breaks = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
        firsts = self.starts[order[np.r_[0, breaks]]].tolist()
        lasts = self.ends[order[np.r_[breaks - 1, order.size - 1]]].tolist()
        view = self.data.data
        joined = b"".join([view[a:b] for a, b in zip(firsts, lasts, strict=True)])
        return FrameBatch(np.frombuffer(joined, np.uint8), _bounds(self.lengths[order]), 0)

    @classmethod
    def of_one(cls, frame: memoryview) -> FrameBatch:
        """A batch of a single frame."""
        data = np.frombuffer(frame, np.uint8)
        return cls(data, np.array([0, data.size], np.int64), data.size)

    def join(self, other: FrameBatch) -> FrameBatch:
        """These frames and the other ones behind them, in memory of their own."""
        return FrameBatch(
            np.concatenate([self.data, other.data]),
            np.concatenate([self.bounds, other.ends + self.data.size]),
            self.stride if self.stride == other.stride else 0,
        )

    def copy(self) -> FrameBatch:
        """The same frames in memory of their own."""
        return FrameBatch(self.data.copy(), self.bounds.copy(), self.stride)

    def check(self) -> None:
        """Raise AssertionError unless the columns describe data."""
        assert self.count > 0
        assert self.bounds[0] == 0
        assert self.bounds[-1] == self.data.size, (self.bounds[-1], self.data.size)
        assert (self.lengths >= FRAME_BYTES_MIN).all()
        assert self.stride == 0 or (self.lengths == self.stride).all()
        if self.found_keys is not None:
            assert (self.keys() == replace(self, found_keys=None).keys()).all()


def _bounds(lengths: Integers) -> Integers:
    bounds = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def unaligned(data: Bytes, dtype: np.dtype[Item]) -> npt.NDArray[Item]:
    """View every offset of data at which a whole item fits as one item: shape (size-item+1,)."""
    return np.ndarray((data.size - dtype.itemsize + 1,), dtype, buffer=data, strides=(1,))


def strided(
    data: Bytes, dtype: np.dtype[Item], offset: int, stride: int, count: int
) -> npt.NDArray[Item]:
    """One item of each of `count` equal frames, `offset` bytes into it: shape (count,), a view."""
    return np.ndarray((count,), dtype, buffer=data, offset=offset, strides=(stride,))


def wide(rows: Bytes, at: int, size: int) -> npt.NDArray[np.void]:
    """`size` bytes of each row from `at` on as one item: shape (n,), a view of a table of shape
    (n, bytes). Such items are copied several times faster. `size` is not 0."""
    return rows[:, at : at + size].view(f"V{size}")[:, 0]


# Ack ranges --------------------------------------------------------------------------------------


def ack_range(content: bytes | memoryview, whose: str = "an Ack") -> tuple[int, int]:
    """The half-open range of message ids in an Ack's content, or another frame's that holds one.

    Raises RemoteProtocolError (bad_ack) for anything but `first-last`, decimal, first < last.
    """
    match = _ACK_CONTENT.fullmatch(content)
    if match is not None:
        first, last = int(match[1]), abs(int(match[2]))
        if first < last <= MESSAGE_ID_MASK + 1:
            return first, last
    shown = bytes(content[:40]).decode("ascii", "backslashreplace")
    more = f"… ({len(content)} bytes)" if len(content) > 40 else ""
    raise RemoteProtocolError(
        Reason.BAD_ACK,
        f"{whose} held {shown!r}{more}; expected first-last with "
        f"0 <= first < last <= {MESSAGE_ID_MASK + 1}",
    )


def ack_ranges(batch: FrameBatch) -> tuple[Integers, Integers]:
    """Firsts and lasts of a batch of Ack frames, up to the first bad one.

    Shapes (n,), where n < batch.count says that frame n is one that `ack_range` refuses.
    """
    if batch.count <= PLAIN_FRAMES_MAX:
        raw = batch.data.tobytes()
        ranges: list[tuple[int, int]] = []
        for start, end in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True):
            try:
                ranges.append(ack_range(raw[start + HEADER_BYTES : end - DELIMITER_BYTES]))
            except RemoteProtocolError:
                break
        pairs = np.array(ranges, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]
    firsts, lasts, good = _ranges_in_columns(batch) or _ranges_anywhere(batch)
    good &= (firsts < lasts) & (lasts <= MESSAGE_ID_MASK + 1)
    if np.count_nonzero(good) < batch.count:
        starts, ends = batch.starts + HEADER_BYTES, batch.ends - DELIMITER_BYTES
        for doubtful in np.flatnonzero(~good).tolist():
            content = batch.data[starts[doubtful] : ends[doubtful]].tobytes()
            try:
                firsts[doubtful], lasts[doubtful] = ack_range(content)
            except RemoteProtocolError:
                return firsts[:doubtful], lasts[:doubtful]
    return firsts, lasts


def _ranges_in_columns(batch: FrameBatch) -> tuple[Integers, Integers, Flags] | None:
    """Firsts, lasts and which are good, when all frames have the same numbers of digits."""
    stride, count, data = batch.stride, batch.count, batch.data
    if not stride:
        return None
    begin, end = HEADER_BYTES, stride - DELIMITER_BYTES
    dash = begin + data[begin:end].tobytes().find(b"-")
    digits = (dash - begin, end - dash - 1)
    if min(digits) < 1 or max(digits) > ACK_DIGITS_MAX:
        return None
    if np.count_nonzero(data[dash::stride] == _DASH) < count:
        return None
    firsts, good = _decimals_in_columns(batch, dash, digits[0])
    if digits[0] == digits[1] and _goes_on(batch, dash, end, digits[0]):
        lasts = np.empty_like(firsts)
        lasts[:-1] = firsts[1:]
        lasts[-1:], good[-1:] = _decimals_in_columns(batch.slice(count - 1, count), end, digits[1])
        return firsts, lasts, good
    lasts, lasts_good = _decimals_in_columns(batch, end, digits[1])
    return firsts, lasts, good & lasts_good


def _goes_on(batch: FrameBatch, dash: int, end: int, digits: int) -> bool:
    """Whether what each ack ends with is, to the letter, what the next one begins with."""
    data, stride, count = batch.data, batch.stride, batch.count
    for behind in range(0, digits, 8):
        unused = np.uint64(max(0, 8 - (digits - behind)) * 8)
        lasts = strided(data, _LONG, end - behind - 8, stride, count)[:-1]
        firsts = strided(data, _LONG, dash - behind - 8, stride, count)[1:]
        differ = lasts ^ firsts
        differ >>= unused
        if differ.any():
            return False
    return True


def _decimals_in_columns(batch: FrameBatch, end: int, digits: int) -> tuple[Integers, Flags]:
    """The number in the `digits` characters before offset `end` of every frame, and which are
    decimal. All frames have the same length."""
    data, stride, count = batch.data, batch.stride, batch.count
    values, good = _eight_digits(strided(data, _LONG, end - 8, stride, count), min(digits, 8))
    if digits > 8:
        words = strided(data, _LONG, end - 16, stride, count)
        above, decimal = _eight_digits(words, digits - 8)
        values += above * 100_000_000
        good &= decimal
    return values, good


def _ranges_anywhere(batch: FrameBatch) -> tuple[Integers, Integers, Flags]:
    """Firsts, lasts and which are good."""
    begins = batch.starts + HEADER_BYTES
    ends = batch.ends - DELIMITER_BYTES
    dashes = _first_dashes(batch.data, begins, ends)
    firsts, firsts_good = _decimals(batch.data, begins, dashes)
    lasts, lasts_good = _decimals(batch.data, dashes + 1, ends)
    return firsts, lasts, firsts_good & lasts_good


def _first_dashes(data: Bytes, begins: Integers, ends: Integers) -> Integers:
    """Where each content's first dash is; begins where there is none within reach."""
    dashes = begins.copy()
    undecided = np.arange(begins.size)
    for digits in range(1, ACK_DIGITS_MAX + 1):
        at = begins[undecided] + digits
        hit = (at < ends[undecided]) & (data[np.minimum(at, data.size - 1)] == _DASH)
        dashes[undecided[hit]] = at[hit]
        undecided = undecided[~hit]
    return dashes


def _decimals(data: Bytes, begins: Integers, ends: Integers) -> tuple[Integers, Flags]:
    """The numbers written at begins..ends, and which of them are 1 to 10 decimal digits.

    Every begin lies at least HEADER_BYTES into data, so that eight bytes before each end exist.
    """
    digits = ends - begins
    good = (digits >= 1) & (digits <= ACK_DIGITS_MAX)
    digits = np.where(good, digits, 1)
    ends = np.where(good, ends, begins + 1)
    words = unaligned(data, _LONG)
    values, decimal = _eight_digits(words[ends - 8], np.minimum(digits, 8))
    good &= decimal
    long = digits > 8
    if long.any():
        above, decimal = _eight_digits(words[ends[long] - 16], digits[long] - 8)
        values[long] += above * 100_000_000
        good[long] &= decimal
    return values, good


def _eight_digits(words: Words, digits: Integers | int) -> tuple[Integers, Flags]:
    """The number in each word's last `digits` characters (1 to 8), and whether all are decimal.

    Works on all eight characters of a word at once: neighbours are joined into pairs, fours, eight.
    """
    u64 = np.uint64
    unused = u64((8 - digits) * 8) if isinstance(digits, int) else ((8 - digits) * 8).astype(u64)
    values = words ^ u64(0x3030303030303030)
    values >>= unused
    values <<= unused
    # Adding 0x76 carries a byte above 9 into its top bit.
    other = values & u64(0x7F7F7F7F7F7F7F7F)
    other += u64(0x7676767676767676)
    other |= values
    other &= u64(0x8080808080808080)
    good = other == 0
    np.right_shift(values, u64(8), out=other)
    values *= u64(10)
    values += other  # Two digits in every other byte.
    pairs = u64(0x000000FF000000FF)
    np.bitwise_and(values, pairs, out=other)
    other *= u64(100 + (1_000_000 << 32))
    values >>= u64(16)
    values &= pairs
    values *= u64(1 + (10_000 << 32))
    values += other
    values >>= u64(32)
    return values.view(np.int64), good


# Stamping ----------------------------------------------------------------------------------------


def stamp(buffer: memoryview, at: int, message_id: int, timer_index: int) -> None:
    """Write a frame's message id and timer index; the frame starts at `at`."""
    _ID_AND_TIMER.pack_into(buffer, at + 3, message_id, timer_index)


def ranges_of(flags: Flags) -> list[tuple[int, int]]:
    """The half-open index ranges in which flags are set."""
    steps = np.diff(np.concatenate(([0], flags.view(np.int8), [0])))
    begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
