"""Which of some stored messages a subscription is to be sent, and in which form.

Rule 1: pure questions about a ring; nothing changes here.
Rule 2: what is due is decided at delivery, by the clock reading of that moment: a message that
expires at 12.5 is delivered before 12.5 and never after.

    messages   3    4    5    6    7    8
    send       ■    ■              ■          wanted, open, not expired
    later                     ■               wanted, opens later
    others               ■              ■     not wanted, or expired
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.frames import DELIMITER, Flags, ranges_of
from simplebus.core.ring.ring import Ring
from simplebus.core.subscription.channel_filter import ChannelFilter

# So few are looked at one after the other: arrays have a price of their own.
_SCALAR_MESSAGES_MAX = 8

Ranges = list[tuple[int, int]]
"""Half-open, ascending, none of them empty."""


@dataclass(frozen=True, slots=True)
class MessageSelection:
    """Half-open ranges of sequences, ascending."""

    sendable: Ranges
    delayed: Ranges
    skipped: Ranges
    expired: Ranges
    """Those of the others that were wanted and came too late."""


def select_from_ranges(
    ring: Ring, ranges: Ranges, channel_filter: ChannelFilter | None, now: float
) -> MessageSelection:
    """The same for several ranges of messages."""
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
    """Sort messages first..last-1 by what is to become of them."""
    if channel_filter is None and first >= ring.timed_until:
        return MessageSelection([(first, last)] * (first < last), [], [], [])
    if last - first <= _SCALAR_MESSAGES_MAX:
        return _select_one_by_one(ring, first, last, channel_filter, now)
    rows = ring.rows(first, last)
    here: Flags = np.ones(last - first, np.bool_)
    if channel_filter is not None:
        here &= channel_filter.match_numbers(rows.channels)
    expired = later = None
    if rows.expires is not None:
        expired = here & (rows.expires <= now)
        here &= ~expired
    if rows.opens is not None:
        later = here & (rows.opens > now)
        here &= ~later
    others = ~here if later is None else ~(here | later)
    return MessageSelection(
        _flags_to_ranges(here, first),
        _flags_to_ranges(later, first),
        _flags_to_ranges(others, first),
        _flags_to_ranges(expired, first),
    )


def _select_one_by_one(
    ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None, now: float
) -> MessageSelection:
    """The same, one after the other."""
    picked = MessageSelection([], [], [], [])
    for sequence in range(first, last):
        row = ring.row(sequence)
        kind = picked.sendable
        if channel_filter is not None and not channel_filter.is_match(row.channel):
            kind = picked.skipped
        elif row.expires <= now:
            kind = picked.skipped
            _append_sequence(picked.expired, sequence)
        elif row.opens > now:
            kind = picked.delayed
        _append_sequence(kind, sequence)
    return picked


def _append_sequence(ranges: Ranges, sequence: int) -> None:
    if ranges and ranges[-1][1] == sequence:
        ranges[-1] = (ranges[-1][0], sequence + 1)
    else:
        ranges.append((sequence, sequence + 1))


def matching_run_end(ring: Ring, first: int, last: int, channel_filter: ChannelFilter) -> int:
    """The end of what is wanted without a gap, of messages first..last-1, none of which expires or
    opens later."""
    channels = ring.channels(first, last)
    if not channel_filter.is_match(channels if isinstance(channels, int) else int(channels[0])):
        return first  # Of the others nothing has to be known.
    if isinstance(channels, int):
        return last
    here = channel_filter.match_numbers(channels)
    return last if np.count_nonzero(here) == here.size else first + int(here.argmin())


def first_unexpired(ring: Ring, first: int, last: int, now: float) -> int:
    """The first of messages first..last-1 that has not expired, whoever wants it; or last."""
    expires = ring.rows(first, last).expires
    if expires is None:
        return first
    late = expires <= now
    return last if late.all() else first + int(late.argmin())


def count_matching(ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None) -> int:
    """How many of messages first..last-1 are wanted."""
    if channel_filter is None or first >= last:
        return max(0, last - first)
    if last - first == 1:
        return int(channel_filter.is_match(ring.row(first).channel))
    here = channel_filter.match_numbers(ring.channels(first, last))
    number = int(np.count_nonzero(here))
    return number * (last - first) if here.size == 1 else number


def find_first_matching(
    ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None, max_count: int
) -> tuple[int, int]:
    """How many of messages first..last-1 are wanted, up to `most`, and where those end."""
    here = (
        None if channel_filter is None else channel_filter.match_numbers(ring.channels(first, last))
    )
    if here is None or (here.size == 1 and here[0]):
        number = min(max_count, last - first)
        return number, first + number
    at = np.flatnonzero(here)[:max_count] if here.size > 1 else here[:0]
    return at.size, first + int(at[-1]) + 1 if at.size == max_count else last


def matching_ranges(
    ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None
) -> Ranges:
    """Which of messages first..last-1 are wanted."""
    if channel_filter is None or first >= last:
        return [(first, last)] * (first < last)
    here = channel_filter.match_numbers(ring.channels(first, last))
    if here.size == 1:  # All of them have the same.
        return [(first, last)] * bool(here[0])
    return _flags_to_ranges(here, first)


def opening_times(ring: Ring, first: int, last: int) -> list[tuple[float, int, int]]:
    """When messages first..last-1 may be delivered: times, and whose they are."""
    times = ring.rows(first, last).opens
    assert times is not None, "messages that are put off have a time"
    breaks = (np.flatnonzero(times[1:] != times[:-1]) + 1).tolist()
    return [
        (float(times[a]), first + a, first + b) for a, b in pairwise([0, *breaks, last - first])
    ]


def limit_ranges(ranges: Ranges, max_count: int) -> Ranges:
    """The first `most` sequences of these ranges."""
    kept: Ranges = []
    for first, last in ranges:
        if max_count <= 0:
            break
        kept.append((first, min(last, first + max_count)))
        max_count -= kept[-1][1] - first
    return kept


def count_sequences(ranges: Ranges) -> int:
    """How many sequences there are in these ranges."""
    return sum(last - first for first, last in ranges)


def ranges_before(ranges: Ranges, end: int) -> Ranges:
    """The part of these ranges that lies before a sequence."""
    return [(first, min(last, end)) for first, last in ranges if first < end]


def ranges_from(ranges: Ranges, first: int) -> Ranges:
    """The part of these ranges that lies from a sequence on."""
    return [(max(begin, first), last) for begin, last in ranges if last > first]


def strip_envelopes(ring: Ring, first: int, last: int) -> tuple[bytes, list[int]]:
    """Messages first..last-1 as version 1 knows them, and the sequences of those that it cannot
    carry, because their payload holds the delimiter."""
    plain: list[bytes] = []
    uncarriable: list[int] = []
    for sequence in range(first, last):
        frame = ring.frame(sequence)
        if frame[0] == frames.ENVELOPE:
            payload = envelope_batch.payload_of(frame[HEADER_BYTES:-DELIMITER_BYTES])
            if DELIMITER in payload:
                uncarriable.append(sequence)
                continue
            frame = b"1" + frame[1:HEADER_BYTES] + payload + DELIMITER
        plain.append(frame)
    return b"".join(plain), uncarriable


def _flags_to_ranges(flags: Flags | None, first: int) -> Ranges:
    if flags is None:
        return []
    return [(first + a, first + b) for a, b in ranges_of(flags)]
