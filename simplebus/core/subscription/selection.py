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
from simplebus.core.subscription.channel_filter import Wanted

# So few are looked at one after the other: arrays have a price of their own.
_PLAIN_MAX = 8

Ranges = list[tuple[int, int]]
"""Half-open, ascending, none of them empty."""


@dataclass(frozen=True, slots=True)
class Picked:
    """Half-open ranges of sequences, ascending."""

    send: Ranges
    later: Ranges
    others: Ranges
    expired: Ranges
    """Those of the others that were wanted and came too late."""


def pick_of(ring: Ring, ranges: Ranges, wanted: Wanted | None, now: float) -> Picked:
    """The same for several ranges of messages."""
    if wanted is None and (not ranges or ranges[0][0] >= ring.timed_until):
        return Picked(ranges, [], [], [])
    parts = [pick(ring, first, last, wanted, now) for first, last in ranges]
    return Picked(
        [r for part in parts for r in part.send],
        [r for part in parts for r in part.later],
        [r for part in parts for r in part.others],
        [r for part in parts for r in part.expired],
    )


def pick(ring: Ring, first: int, last: int, wanted: Wanted | None, now: float) -> Picked:
    """Sort messages first..last-1 by what is to become of them."""
    if wanted is None and first >= ring.timed_until:
        return Picked([(first, last)] * (first < last), [], [], [])
    if last - first <= _PLAIN_MAX:
        return _pick_plainly(ring, first, last, wanted, now)
    rows = ring.rows(first, last)
    here: Flags = np.ones(last - first, np.bool_)
    if wanted is not None:
        here &= wanted.of(rows.channels)
    expired = later = None
    if rows.expires is not None:
        expired = here & (rows.expires <= now)
        here &= ~expired
    if rows.opens is not None:
        later = here & (rows.opens > now)
        here &= ~later
    others = ~here if later is None else ~(here | later)
    return Picked(
        _ranges(here, first), _ranges(later, first), _ranges(others, first), _ranges(expired, first)
    )


def _pick_plainly(ring: Ring, first: int, last: int, wanted: Wanted | None, now: float) -> Picked:
    """The same, one after the other."""
    picked = Picked([], [], [], [])
    for sequence in range(first, last):
        row = ring.row(sequence)
        kind = picked.send
        if wanted is not None and not wanted.wants(row.channel):
            kind = picked.others
        elif row.expires <= now:
            kind = picked.others
            _add(picked.expired, sequence)
        elif row.opens > now:
            kind = picked.later
        _add(kind, sequence)
    return picked


def _add(ranges: Ranges, sequence: int) -> None:
    if ranges and ranges[-1][1] == sequence:
        ranges[-1] = (ranges[-1][0], sequence + 1)
    else:
        ranges.append((sequence, sequence + 1))


def wanted_from(ring: Ring, first: int, last: int, wanted: Wanted) -> int:
    """The end of what is wanted without a gap, of messages first..last-1, none of which expires or
    opens later."""
    channels = ring.channels(first, last)
    if not wanted.wants(channels if isinstance(channels, int) else int(channels[0])):
        return first  # Of the others nothing has to be known.
    if isinstance(channels, int):
        return last
    here = wanted.of(channels)
    return last if np.count_nonzero(here) == here.size else first + int(here.argmin())


def first_in_time(ring: Ring, first: int, last: int, now: float) -> int:
    """The first of messages first..last-1 that has not expired, whoever wants it; or last."""
    expires = ring.rows(first, last).expires
    if expires is None:
        return first
    late = expires <= now
    return last if late.all() else first + int(late.argmin())


def count(ring: Ring, first: int, last: int, wanted: Wanted | None) -> int:
    """How many of messages first..last-1 are wanted."""
    if wanted is None or first >= last:
        return max(0, last - first)
    if last - first == 1:
        return int(wanted.wants(ring.row(first).channel))
    here = wanted.of(ring.channels(first, last))
    number = int(np.count_nonzero(here))
    return number * (last - first) if here.size == 1 else number


def first_wanted(
    ring: Ring, first: int, last: int, wanted: Wanted | None, most: int
) -> tuple[int, int]:
    """How many of messages first..last-1 are wanted, up to `most`, and where those end."""
    here = None if wanted is None else wanted.of(ring.channels(first, last))
    if here is None or (here.size == 1 and here[0]):
        number = min(most, last - first)
        return number, first + number
    at = np.flatnonzero(here)[:most] if here.size > 1 else here[:0]
    return at.size, first + int(at[-1]) + 1 if at.size == most else last


def wanted_ranges(ring: Ring, first: int, last: int, wanted: Wanted | None) -> Ranges:
    """Which of messages first..last-1 are wanted."""
    if wanted is None or first >= last:
        return [(first, last)] * (first < last)
    here = wanted.of(ring.channels(first, last))
    if here.size == 1:  # All of them have the same.
        return [(first, last)] * bool(here[0])
    return _ranges(here, first)


def opens(ring: Ring, first: int, last: int) -> list[tuple[float, int, int]]:
    """When messages first..last-1 may be delivered: times, and whose they are."""
    times = ring.rows(first, last).opens
    assert times is not None, "messages that are put off have a time"
    breaks = (np.flatnonzero(times[1:] != times[:-1]) + 1).tolist()
    return [
        (float(times[a]), first + a, first + b) for a, b in pairwise([0, *breaks, last - first])
    ]


def front(ranges: Ranges, most: int) -> Ranges:
    """The first `most` sequences of these ranges."""
    kept: Ranges = []
    for first, last in ranges:
        if most <= 0:
            break
        kept.append((first, min(last, first + most)))
        most -= kept[-1][1] - first
    return kept


def total(ranges: Ranges) -> int:
    """How many sequences there are in these ranges."""
    return sum(last - first for first, last in ranges)


def before(ranges: Ranges, end: int) -> Ranges:
    """The part of these ranges that lies before a sequence."""
    return [(first, min(last, end)) for first, last in ranges if first < end]


def behind(ranges: Ranges, first: int) -> Ranges:
    """The part of these ranges that lies from a sequence on."""
    return [(max(begin, first), last) for begin, last in ranges if last > first]


def without_envelopes(ring: Ring, first: int, last: int) -> tuple[bytes, list[int]]:
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


def _ranges(flags: Flags | None, first: int) -> Ranges:
    if flags is None:
        return []
    return [(first + a, first + b) for a, b in ranges_of(flags)]
