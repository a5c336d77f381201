"""How fast somebody may publish: messages and bytes a second, by all connections together.

Rule 1: what is beyond a rate waits. Nothing is refused or lost for it, and nobody else waits.
Rule 2: a message is let in when there is anything left of what it takes: it may take more, which
those behind it wait for. So what is longer than all that there ever is goes through, too.
Rule 3: time is an argument, in seconds; who has been quiet may have a second's worth at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simplebus.core.limits import (
    METERED_MESSAGE_BYTES,
    METERED_PART_SECONDS,
    METERED_READ_BYTES,
    METERED_WAIT_SECONDS,
)
from simplebus.core.protocol.frames import Integers

SECONDS_AT_ONCE = 1.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What may be published in a second; 0 sets no limit. Raises ValueError below that."""

    messages: float = 0.0
    bytes: float = 0.0

    def __post_init__(self) -> None:
        for what, value in (("messages", self.messages), ("bytes", self.bytes)):
            if not 0 <= value < math.inf:
                raise ValueError(f"a rate of {what} is 0 or more a second, got {value:g}")

    def __bool__(self) -> bool:
        return bool(self.messages or self.bytes)


UNLIMITED = Rate()


class Meter:
    """What is left of one rate."""

    __slots__ = ("_bytes", "_messages", "_since", "rate", "waiting")

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self.waiting = 0
        """Sessions some of whose messages wait for this."""
        self._since = now
        self._messages = _at_once(rate.messages)
        self._bytes = _at_once(rate.bytes)
        """Below 0 when the last message took more than was left."""

    def set(self, rate: Rate, now: float) -> None:
        """Have another rate from now on."""
        self._fill(now)
        if not self.rate.messages:
            self._messages = _at_once(rate.messages)
        if not self.rate.bytes:
            self._bytes = _at_once(rate.bytes)
        self.rate = rate
        self._fill(now)

    def is_full(self, now: float) -> bool:
        """Whether it is as if nothing had been published."""
        self._fill(now)
        rate = self.rate
        return self._messages >= _at_once(rate.messages) and self._bytes >= _at_once(rate.bytes)

    def fits(self, ends: Integers, now: float) -> int:
        """How many messages are let in, of which the last bytes have these offsets, shape (n,)."""
        self._fill(now)
        count, rate = len(ends), self.rate
        if rate.messages:
            count = min(count, max(0, math.floor(self._messages)))
        if rate.bytes and count:
            if self._bytes < 1:
                return 0
            # The first one that takes more than is left is let in, too.
            count = min(count, int(np.searchsorted(ends, self._bytes)) + 1)
        return count

    def charge(self, messages: int, size: int) -> None:
        """So many were let in, of so many bytes together."""
        if self.rate.messages:
            self._messages -= messages
        if self.rate.bytes:
            self._bytes -= size

    def due(self, now: float) -> float:
        """When there is something left again: enough for a little while, so that nobody is asked
        for each message. Now, if there is."""
        self._fill(now)
        seconds = 0.0
        for rate, left in (
            (self.rate.messages, self._messages),
            (self.rate.bytes, self._bytes),
        ):
            if rate and left < 1:
                wanted = max(1.0, rate * METERED_PART_SECONDS)
                seconds = max(seconds, (wanted - left) / rate, METERED_WAIT_SECONDS)
        return now + seconds

    def _fill(self, now: float) -> None:
        passed, rate = now - self._since, self.rate
        if passed <= 0:
            return
        self._since = now
        self._messages = min(_at_once(rate.messages), self._messages + passed * rate.messages)
        self._bytes = min(_at_once(rate.bytes), self._bytes + passed * rate.bytes)


def _at_once(per_second: float) -> float:
    """What may be left at most."""
    return max(1.0, per_second * SECONDS_AT_ONCE)


# Several, all of which count ---------------------------------------------------------------------


def fits(meters: Sequence[Meter], ends: Integers, now: float) -> int:
    """See `Meter.fits`."""
    return min((meter.fits(ends, now) for meter in meters), default=len(ends))


def fits_one(meters: Sequence[Meter], size: int, now: float) -> bool:
    """Whether a message of this size is let in, and nobody waits for the same."""
    ends = np.array([size])
    return not is_awaited(meters) and bool(fits(meters, ends, now))


def charge(meters: Sequence[Meter], messages: int, size: int) -> None:
    """See `Meter.charge`."""
    for meter in meters:
        meter.charge(messages, size)


def due(meters: Sequence[Meter], now: float) -> float:
    """See `Meter.due`."""
    return max((meter.due(now) for meter in meters), default=now)


def is_awaited(meters: Sequence[Meter]) -> bool:
    """Whether some session waits for one of them already."""
    return any(meter.waiting for meter in meters)


def read_bytes(meters: Sequence[Meter]) -> int:
    """How much to read at once of what is not told apart before it is let in, so that it is not
    far beyond the rate, whatever it is."""
    least = math.inf
    for meter in meters:
        rate = meter.rate
        for per_second in (rate.bytes, rate.messages * METERED_MESSAGE_BYTES):
            if per_second:
                least = min(least, per_second * METERED_PART_SECONDS)
    return max(METERED_READ_BYTES, math.ceil(min(least, 1 << 30)))
