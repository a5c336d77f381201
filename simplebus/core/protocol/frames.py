r"""Frames of the binary protocol: layout, batches and ack ranges (binary.md, "The frame").

    0      1         3            7             9                n-4        n
    ├ type ┼ class ──┼ message id ┼ timer index ┼ content … ─────┼ <\r\n> ──┤
      u8     u16 BE    i32 BE       u16 BE

The first delimiter at or after offset 9 ends a frame; header bytes may look like a delimiter. Ack
ranges of few frames are parsed in a loop, those of many with arrays; a property test checks that
both give the same result.
"""

from __future__ import annotations

import re
import struct
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
"""Eight characters each, the first one in the lowest byte; shape (n,)."""
TypeAndClassKeys = npt.NDArray[np.uint32]
"""First three bytes of frames, type and class, as little-endian numbers; shape (n,)."""

Item = TypeVar("Item", bound=np.generic)

DELIMITER = b"<\r\n>"
HEADER = struct.Struct(">BHiH")
"""Frame type, class id, message id, timer index.

The last field is a timer index in Message, Envelope and Ack frames; from a version 2 publisher it
is 0 or `CONFIRM_MAY_WAIT`. In other frames of version 2 it contains another number: the number of
the subscription (Deliver, Subscribe), the durability (Confirm) or the type of the refused frame
(Error).
"""

HEARTBEAT, MESSAGE, SUBSCRIBE, ACK, CONNECT = b"01234"
ENVELOPE, CONFIRM, DELIVER, NACK, WORKING, UNSUBSCRIBE, FETCH, ERROR = b"56789UFE"
INQUIRE, PURGE = b"IP"
"""Frame types of protocol version 2."""

CONFIRM_MAY_WAIT = 1
"""Last header field of a published message whose Confirm may wait (binary.md, "Confirm")."""

ID_AND_TIMER = struct.Struct(">iH")
"""Message id and timer index, which begin at `ID_OFFSET` of a frame."""
ID_OFFSET = 3

_UINT32: np.dtype[np.uint32] = np.dtype("<u4")
_UINT64: np.dtype[np.uint64] = np.dtype("<u8")
_DASH = np.uint8(ord("-"))
_KEY_MASK = np.uint32(0xFFFFFF)
_KEY_SHIFT = np.uint64(32)
_NO_CHANGES: npt.NDArray[np.intp] = np.empty(0, np.intp)

KEY_BITS = np.uint64(0xFFFFFF << 32)
"""Bits of the next frame's type and class in the eight bytes that start with a delimiter."""
_ACK_CONTENT = re.compile(rb"([0-9]{1,10})-([0-9]{1,10}|-2147483648)")
"""Content of an Ack. "-2147483648" stands for 2**31: the original implementation writes the
exclusive end as a signed 32-bit number.
"""

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
    """Encode one frame (binary.md, "The frame").

    Args:
        frame_type: ASCII code of the frame type.
        class_id: Class id, 0 to 65535.
        message_id: Message id, message number or request number.
        timer_index: Timer index, or the number in its place (see `HEADER`), 0 to 65535.
        content: Content that contains no delimiter; the caller has checked or stuffed it.

    Returns:
        The whole frame with header and delimiter.
    """
    return HEADER.pack(frame_type, class_id, message_id, timer_index) + content + DELIMITER


def encode_ack(*, class_id: int, timer_index: int, first: int, last: int) -> bytes:
    """Encode an Ack frame for the message ids first..last-1 (binary.md, "Ack")."""
    content = b"%d-%d" % (first, last)
    return HEADER.pack(ACK, class_id, 0, timer_index) + content + DELIMITER


class FrameBatch:
    """Whole frames, back to back.

    A batch is a view: it is valid until the underlying buffer is written again. It is never
    changed.
    """

    __slots__ = ("_ack_ranges", "_key_changes", "bounds", "count", "data", "known_keys", "stride")

    def __init__(
        self, data: Bytes, bounds: Integers, stride: int, known_keys: Words | None = None
    ) -> None:
        self.data = data
        """Bytes of the frames."""
        self.bounds = bounds
        """Shape (count+1,): frame n is data[bounds[n] : bounds[n+1]]."""
        self.count = bounds.size - 1
        """Number of frames."""
        self.stride = stride
        """Length of every frame if all are equal, else 0."""
        self.known_keys = known_keys
        """Result of `keys`, shifted to KEY_BITS; None if the splitter has not computed it."""
        self._key_changes = _NO_CHANGES if self.count == 1 else None
        """Result of `key_changes`; None until it is computed."""
        self._ack_ranges: tuple[Integers, Integers] | None = None
        """Result of `ack_ranges`; None until it is computed."""

    @property
    def is_uniform(self) -> bool:
        """True if all frames have the same type and class."""
        return not self.key_changes().size

    @property
    def starts(self) -> Integers:
        return self.bounds[:-1]

    @property
    def ends(self) -> Integers:
        return self.bounds[1:]

    @property
    def lengths(self) -> Integers:
        return self.ends - self.starts

    def keys(self) -> TypeAndClassKeys:
        """Return type and class of each frame as one number, for comparisons of equality."""
        if self.known_keys is not None:
            return (self.known_keys >> _KEY_SHIFT).astype(np.uint32)
        if self.stride:
            words = strided(self.data, _UINT32, 0, self.stride, self.count)
        else:
            words = unaligned(self.data, _UINT32)[self.starts]
        return words & _KEY_MASK

    def key_changes(self) -> npt.NDArray[np.intp]:
        """Return the indexes of the frames whose type or class differs from the previous frame's.

        They ascend.
        """
        if self._key_changes is None:
            keys: TypeAndClassKeys | Words = (
                self.keys() if self.known_keys is None else self.known_keys
            )
            # Not `np.flatnonzero`, which makes seven Python calls for the same result.
            self._key_changes = (keys[1:] != keys[:-1]).nonzero()[0] + 1
        return self._key_changes

    def ack_ranges(self) -> tuple[Integers, Integers]:
        """Return the result of `parse_ack_ranges`, which is computed once."""
        if self._ack_ranges is None:
            self._ack_ranges = parse_ack_ranges(self)
        return self._ack_ranges

    def slice(self, first: int, last: int) -> FrameBatch:
        """Return frames first..last-1 without a copy."""
        if self.stride:
            data = self.data[first * self.stride : last * self.stride]
            return FrameBatch(data, self.bounds[: last - first + 1], self.stride)
        bounds = self.bounds[first : last + 1]
        start, end = int(bounds[0]), int(bounds[-1])
        return FrameBatch(self.data[start:end], bounds - start if start else bounds, 0)

    def select(self, order: npt.NDArray[np.intp]) -> FrameBatch:
        """Return a copy of the frames at these indexes, in that order. `order` is not empty."""
        if self.stride:
            rows = self.data.reshape(self.count, self.stride).take(order, axis=0)
            return FrameBatch(rows.reshape(-1), self.bounds[: order.size + 1], self.stride)
        # Frames of different lengths: consecutive frames are copied together.
        breaks = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
        firsts = self.starts[order[np.r_[0, breaks]]].tolist()
        lasts = self.ends[order[np.r_[breaks - 1, order.size - 1]]].tolist()
        view = self.data.data
        joined = b"".join([view[a:b] for a, b in zip(firsts, lasts, strict=True)])
        return FrameBatch(
            np.frombuffer(joined, np.uint8), _lengths_to_bounds(self.lengths[order]), 0
        )

    @classmethod
    def from_frame(cls, frame: memoryview) -> FrameBatch:
        """Return a batch of a single frame."""
        data = np.frombuffer(frame, np.uint8)
        return cls(data, np.array([0, data.size], np.int64), data.size)

    def concatenate(self, other: FrameBatch) -> FrameBatch:
        """Return a copy of these frames followed by the other ones."""
        return FrameBatch(
            np.concatenate([self.data, other.data]),
            np.concatenate([self.bounds, other.ends + self.data.size]),
            self.stride if self.stride == other.stride else 0,
        )

    def copy(self) -> FrameBatch:
        """Return a copy of the frames."""
        return FrameBatch(self.data.copy(), self.bounds.copy(), self.stride)

    def check(self) -> None:
        """Raise AssertionError unless bounds, stride and keys describe the data."""
        assert self.count > 0
        assert self.bounds[0] == 0
        assert self.bounds[-1] == self.data.size, (self.bounds[-1], self.data.size)
        assert (self.lengths >= FRAME_BYTES_MIN).all()
        assert self.stride == 0 or (self.lengths == self.stride).all()
        if self.known_keys is not None:
            assert (self.keys() == FrameBatch(self.data, self.bounds, self.stride).keys()).all()


def _lengths_to_bounds(lengths: Integers) -> Integers:
    bounds = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def unaligned(data: Bytes, dtype: np.dtype[Item]) -> npt.NDArray[Item]:
    """View every offset of `data` as the start of an item: shape (size - itemsize + 1,)."""
    return np.ndarray((data.size - dtype.itemsize + 1,), dtype, buffer=data, strides=(1,))


def strided(
    data: Bytes, dtype: np.dtype[Item], offset: int, stride: int, count: int
) -> npt.NDArray[Item]:
    """View the item at `offset` of each of `count` frames, which have the length `stride`: shape
    (count,).
    """
    return np.ndarray((count,), dtype, buffer=data, offset=offset, strides=(stride,))


def view_byte_columns(rows: Bytes, at: int, size: int) -> npt.NDArray[np.void]:
    """View `size` bytes of each row from column `at` on as one item, which copies several times
    faster.

    Args:
        rows: Bytes, shape (n, row bytes).
        at: First column.
        size: Number of columns, at least 1.

    Returns:
        A view, shape (n,).
    """
    return rows[:, at : at + size].view(f"V{size}")[:, 0]


# Ack ranges --------------------------------------------------------------------------------------


def parse_ack_range(content: bytes | memoryview, frame_name: str = "an Ack") -> tuple[int, int]:
    """Parse the content of an Ack, or of another frame with a range (binary.md, "Ack").

    Args:
        content: `first-last`, decimal.
        frame_name: Name of the frame in the error message.

    Returns:
        The half-open range of message ids.

    Raises:
        RemoteProtocolError: bad_ack if the content is not such a range with first < last.
    """
    match = _ACK_CONTENT.fullmatch(content)
    if match is not None:
        first, last = int(match[1]), abs(int(match[2]))
        if first < last <= MESSAGE_ID_MASK + 1:
            return first, last
    excerpt = bytes(content[:40]).decode("ascii", "backslashreplace")
    more = f"… ({len(content)} bytes)" if len(content) > 40 else ""
    raise RemoteProtocolError(
        Reason.BAD_ACK,
        f"{frame_name} held {excerpt!r}{more}; expected first-last with "
        f"0 <= first < last <= {MESSAGE_ID_MASK + 1}",
    )


def parse_ack_ranges(batch: FrameBatch) -> tuple[Integers, Integers]:
    """Parse the ranges of a batch of Ack frames, up to the first malformed one.

    Returns:
        First message ids and exclusive ends, shape (n,) each. If n < batch.count, frame n is
        malformed.
    """
    if batch.count <= PLAIN_FRAMES_MAX:
        raw = batch.data.tobytes()
        ranges: list[tuple[int, int]] = []
        for start, end in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True):
            try:
                ranges.append(parse_ack_range(raw[start + HEADER_BYTES : end - DELIMITER_BYTES]))
            except RemoteProtocolError:
                break
        pairs = np.array(ranges, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]
    firsts, lasts, valid = _parse_uniform_ranges(batch) or _parse_mixed_ranges(batch)
    valid &= (firsts < lasts) & (lasts <= MESSAGE_ID_MASK + 1)
    if np.count_nonzero(valid) < batch.count:
        starts, ends = batch.starts + HEADER_BYTES, batch.ends - DELIMITER_BYTES
        # The array parsers may flag a valid range as invalid, but never the reverse.
        for index in np.flatnonzero(~valid).tolist():
            content = batch.data[starts[index] : ends[index]].tobytes()
            try:
                firsts[index], lasts[index] = parse_ack_range(content)
            except RemoteProtocolError:
                return firsts[:index], lasts[:index]
    return firsts, lasts


def _parse_uniform_ranges(batch: FrameBatch) -> tuple[Integers, Integers, Flags] | None:
    """Return firsts, lasts and validity if all frames have the same numbers of digits."""
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
    firsts, valid = _parse_uniform_decimals(batch, dash, digits[0])
    if digits[0] == digits[1] and _is_continuous(batch, dash, end, digits[0]):
        lasts = np.empty_like(firsts)
        lasts[:-1] = firsts[1:]
        lasts[-1:], valid[-1:] = _parse_uniform_decimals(
            batch.slice(count - 1, count), end, digits[1]
        )
        return firsts, lasts, valid
    lasts, lasts_good = _parse_uniform_decimals(batch, end, digits[1])
    return firsts, lasts, valid & lasts_good


def _is_continuous(batch: FrameBatch, dash: int, end: int, digits: int) -> bool:
    """Return True if the last id of each ack is, digit by digit, the first id of the next ack."""
    data, stride, count = batch.data, batch.stride, batch.count
    for digit_offset in range(0, digits, 8):
        unused = np.uint64(max(0, 8 - (digits - digit_offset)) * 8)
        lasts = strided(data, _UINT64, end - digit_offset - 8, stride, count)[:-1]
        firsts = strided(data, _UINT64, dash - digit_offset - 8, stride, count)[1:]
        differ = lasts ^ firsts
        differ >>= unused
        if differ.any():
            return False
    return True


def _parse_uniform_decimals(batch: FrameBatch, end: int, digits: int) -> tuple[Integers, Flags]:
    """Parse the `digits` characters before offset `end` of frames of one length: values and
    validity.
    """
    data, stride, count = batch.data, batch.stride, batch.count
    values, valid = _parse_eight_digits(
        strided(data, _UINT64, end - 8, stride, count), min(digits, 8)
    )
    if digits > 8:
        words = strided(data, _UINT64, end - 16, stride, count)
        above, decimal = _parse_eight_digits(words, digits - 8)
        values += above * 100_000_000
        valid &= decimal
    return values, valid


def _parse_mixed_ranges(batch: FrameBatch) -> tuple[Integers, Integers, Flags]:
    """Return firsts, lasts and validity of frames of any lengths."""
    begins = batch.starts + HEADER_BYTES
    ends = batch.ends - DELIMITER_BYTES
    dashes = _first_dashes(batch.data, begins, ends)
    firsts, firsts_good = _parse_decimals(batch.data, begins, dashes)
    lasts, lasts_good = _parse_decimals(batch.data, dashes + 1, ends)
    return firsts, lasts, firsts_good & lasts_good


def _first_dashes(data: Bytes, begins: Integers, ends: Integers) -> Integers:
    """Return the offset of the first dash of each content; the offset of the content if it has no
    dash behind 1 to ACK_DIGITS_MAX digits.
    """
    dashes = begins.copy()
    undecided = np.arange(begins.size)
    for digits in range(1, ACK_DIGITS_MAX + 1):
        at = begins[undecided] + digits
        hit = (at < ends[undecided]) & (data[np.minimum(at, data.size - 1)] == _DASH)
        dashes[undecided[hit]] = at[hit]
        undecided = undecided[~hit]
    return dashes


def _parse_decimals(data: Bytes, begins: Integers, ends: Integers) -> tuple[Integers, Flags]:
    """Parse the numbers at begins..ends: values, and True for those of 1 to 10 decimal digits.

    Every begin is at least HEADER_BYTES into data, so eight bytes before each end exist.
    """
    digits = ends - begins
    valid = (digits >= 1) & (digits <= ACK_DIGITS_MAX)
    digits = np.where(valid, digits, 1)
    ends = np.where(valid, ends, begins + 1)
    words = unaligned(data, _UINT64)
    values, decimal = _parse_eight_digits(words[ends - 8], np.minimum(digits, 8))
    valid &= decimal
    long = digits > 8
    if long.any():
        above, decimal = _parse_eight_digits(words[ends[long] - 16], digits[long] - 8)
        values[long] += above * 100_000_000
        valid[long] &= decimal
    return values, valid


def _parse_eight_digits(words: Words, digits: Integers | int) -> tuple[Integers, Flags]:
    """Parse the last `digits` characters (1 to 8) of each word: values, and True if all are
    decimal.

    Works on all eight characters at once: neighbours are combined into pairs, fours and eights.
    """
    u64 = np.uint64
    unused = u64((8 - digits) * 8) if isinstance(digits, int) else ((8 - digits) * 8).astype(u64)
    values = words ^ u64(0x3030303030303030)
    values >>= unused
    values <<= unused
    # Adding 0x76 carries a byte above 9 into its top bit.
    work = values & u64(0x7F7F7F7F7F7F7F7F)
    work += u64(0x7676767676767676)
    work |= values
    work &= u64(0x8080808080808080)
    valid = work == 0
    np.right_shift(values, u64(8), out=work)
    values *= u64(10)
    values += work  # Two digits in every other byte.
    pairs = u64(0x000000FF000000FF)
    np.bitwise_and(values, pairs, out=work)
    work *= u64(100 + (1_000_000 << 32))
    values >>= u64(16)
    values &= pairs
    values *= u64(1 + (10_000 << 32))
    values += work
    values >>= u64(32)
    return values.view(np.int64), valid


def flags_to_ranges(flags: Flags) -> list[tuple[int, int]]:
    """Return the half-open index ranges in which flags are set."""
    steps = np.diff(np.concatenate(([0], flags.view(np.int8), [0])))
    begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
