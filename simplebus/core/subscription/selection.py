"""Selection of the stored messages that a subscription can be sent.

Pure functions on a ring; times are in seconds since 1970. Expiry and delay are decided when
messages are delivered: a message that expires at 12.5 is delivered before 12.5 and never after.

    messages    3    4    5    6    7    8
    sendable    ■    ■              ■          matching, due and not expired
    delayed                    ■               matching, not due yet
    skipped               ■              ■     not matching, or expired
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.frames import DELIMITER, Flags, flags_to_ranges
from simplebus.core.ring.ring import Ring
from simplebus.core.subscription.channel_filter import ChannelFilter

# Up to this many messages a loop is faster than arrays.
_SCALAR_MESSAGES_MAX = 8

Ranges = list[tuple[int, int]]
"""Half-open ranges of sequences, ascending, none of them empty."""


@dataclass(frozen=True, slots=True)
class MessageSelection:
    """Result of a selection, as half-open ascending ranges of sequences."""

    sendable: Ranges
    delayed: Ranges
    skipped: Ranges
    expired: Ranges
    """Skipped messages that matched and have expired."""


def select_from_ranges(
    ring: Ring, ranges: Ranges, channel_filter: ChannelFilter | None, now: float
) -> MessageSelection:
    """Select from several ranges of messages."""
    if channel_filter is None and (not ranges or ranges[0][0] >= ring.timed_until):
        return MessageSelection(ranges, [], [], [])
    parts = [select_messages(ring, first, last, channel_filter, now) for first, last in ranges]
    return MessageSelection(
        [r for part in parts for r in part.sendable],
        [r for part in parts for r in part.delayed],
        [r for part in parts for r in part.skipped],
        [r for part in parts for r in part.expired],
    )


def select_messages(
    ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None, now: float
) -> MessageSelection:
    """Sort messages first..last-1 into sendable, delayed and skipped ones."""
    if channel_filter is None and first >= ring.timed_until:
        return MessageSelection([(first, last)] * (first < last), [], [], [])
    if last - first <= _SCALAR_MESSAGES_MAX:
        return _select_one_by_one(ring, first, last, channel_filter, now)
    rows = ring.read_rows(first, last)
    sendable: Flags = np.ones(last - first, np.bool_)
    if channel_filter is not None:
        sendable &= channel_filter.match_numbers(rows.channels)
    expired = delayed = None
    if rows.expires is not None:
        expired = sendable & (rows.expires <= now)
        sendable &= ~expired
    if rows.not_before is not None:
        delayed = sendable & (rows.not_before > now)
        sendable &= ~delayed
    skipped = ~sendable if delayed is None else ~(sendable | delayed)
    return MessageSelection(
        _flags_to_ranges(sendable, first),
        _flags_to_ranges(delayed, first),
        _flags_to_ranges(skipped, first),
        _flags_to_ranges(expired, first),
    )


def _select_one_by_one(
    ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None, now: float
) -> MessageSelection:
    """Slow path of `select_messages` for few messages."""
    selected = MessageSelection([], [], [], [])
    for sequence in range(first, last):
        row = ring.read_row(sequence)
        target = selected.sendable
        if channel_filter is not None and not channel_filter.is_match(row.channel):
            target = selected.skipped
        elif row.expires <= now:
            target = selected.skipped
            _append_sequence(selected.expired, sequence)
        elif row.not_before > now:
            target = selected.delayed
        _append_sequence(target, sequence)
    return selected


def is_sendable(
    ring: Ring, sequence: int, channel_filter: ChannelFilter | None, now: float
) -> bool:
    """Return True if `select_messages` would select this message as sendable."""
    row = ring.read_row(sequence)
    return (
        channel_filter is None or channel_filter.is_match(row.channel)
    ) and row.not_before <= now < row.expires


def _append_sequence(ranges: Ranges, sequence: int) -> None:
    if ranges and ranges[-1][1] == sequence:
        ranges[-1] = (ranges[-1][0], sequence + 1)
    else:
        ranges.append((sequence, sequence + 1))


def matching_run_end(ring: Ring, first: int, last: int, channel_filter: ChannelFilter) -> int:
    """Return the end of the run of matching messages from `first` on.

    None of them may expire or be delayed.
    """
    channels = ring.read_channels(first, last)
    if not channel_filter.is_match(channels if isinstance(channels, int) else int(channels[0])):
        return first  # The others need not be matched.
    if isinstance(channels, int):
        return last
    matched = channel_filter.match_numbers(channels)
    return last if np.count_nonzero(matched) == matched.size else first + int(matched.argmin())


def first_unexpired(ring: Ring, first: int, last: int, now: float) -> int:
    """Return the first message of first..last-1 that has not expired, or `last`."""
    expires = ring.read_rows(first, last).expires
    if expires is None:
        return first
    expired = expires <= now
    return last if expired.all() else first + int(expired.argmin())


def count_matching(ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None) -> int:
    """Return how many of the messages first..last-1 match."""
    if channel_filter is None or first >= last:
        return max(0, last - first)
    if last - first == 1:
        return int(channel_filter.is_match(ring.read_row(first).channel))
    matched = channel_filter.match_numbers(ring.read_channels(first, last))
    count = int(np.count_nonzero(matched))
    return count * (last - first) if matched.size == 1 else count


def find_first_matching(
    ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None, max_count: int
) -> tuple[int, int]:
    """Return how many of first..last-1 match, up to `max_count`, and where those end."""
    matched = (
        None
        if channel_filter is None
        else channel_filter.match_numbers(ring.read_channels(first, last))
    )
    if matched is None or (matched.size == 1 and matched[0]):
        count = min(max_count, last - first)
        return count, first + count
    indexes = np.flatnonzero(matched)[:max_count] if matched.size > 1 else matched[:0]
    return indexes.size, first + int(indexes[-1]) + 1 if indexes.size == max_count else last


def matching_ranges(
    ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None
) -> Ranges:
    """Return the ranges of first..last-1 that match."""
    if channel_filter is None or first >= last:
        return [(first, last)] * (first < last)
    matched = channel_filter.match_numbers(ring.read_channels(first, last))
    if matched.size == 1:  # All have the same channel.
        return [(first, last)] * bool(matched[0])
    return _flags_to_ranges(matched, first)


def due_times(ring: Ring, first: int, last: int) -> list[tuple[float, int, int]]:
    """Return rows (due, first, last) for delayed messages, in runs of equal times."""
    times = ring.read_rows(first, last).not_before
    assert times is not None, "delayed messages have a time"
    breaks = (np.flatnonzero(times[1:] != times[:-1]) + 1).tolist()
    return [
        (float(times[a]), first + a, first + b) for a, b in pairwise([0, *breaks, last - first])
    ]


def limit_ranges(ranges: Ranges, max_count: int) -> Ranges:
    """Return the first `max_count` sequences of `ranges`."""
    leading_ranges: Ranges = []
    for first, last in ranges:
        if max_count <= 0:
            break
        leading_ranges.append((first, min(last, first + max_count)))
        max_count -= leading_ranges[-1][1] - first
    return leading_ranges


def count_sequences(ranges: Ranges) -> int:
    """Return the number of sequences in `ranges`."""
    return sum(last - first for first, last in ranges)


def ranges_before(ranges: Ranges, end: int) -> Ranges:
    """Return the part of `ranges` before `end`."""
    return [(first, min(last, end)) for first, last in ranges if first < end]


def ranges_from(ranges: Ranges, first: int) -> Ranges:
    """Return the part of `ranges` from `first` on."""
    return [(max(begin, first), last) for begin, last in ranges if last > first]


def strip_envelopes(ring: Ring, first: int, last: int) -> tuple[bytes, list[int]]:
    """Return messages as version 1 frames, and the sequences that cannot be converted.

    A version 1 frame cannot carry a payload that contains the delimiter.
    """
    plain: list[bytes] = []
    uncarriable: list[int] = []
    for sequence in range(first, last):
        frame = ring.copy_frame(sequence)
        if frame[0] == frames.ENVELOPE:
            payload = envelope_batch.extract_payload(frame[HEADER_BYTES:-DELIMITER_BYTES])
            if DELIMITER in payload:
                uncarriable.append(sequence)
                continue
            frame = b"1" + frame[1:HEADER_BYTES] + payload + DELIMITER
        plain.append(frame)
    return b"".join(plain), uncarriable


def _flags_to_ranges(flags: Flags | None, first: int) -> Ranges:
    if flags is None:
        return []
    return [(first + a, first + b) for a, b in flags_to_ranges(flags)]
