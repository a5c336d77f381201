"""Limits on published messages and bytes per second.

Messages beyond the limit wait; none is refused or lost. A message is admitted while any of its
budget is left and may overdraw it, so messages longer than the burst pass, too. After a pause, one
second's worth may be published at once. Time is an argument, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simplebus.core.limits import (
    RATE_LIMIT_MESSAGE_BYTES,
    RATE_LIMIT_SLICE_SECONDS,
    RATE_LIMIT_WAIT_SECONDS_MIN,
    RATE_LIMITED_READ_BYTES_MIN,
)
from simplebus.core.protocol.frames import Integers

BURST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Messages and bytes per second; 0 for unlimited. Raises ValueError if negative."""

    messages: float = 0.0
    bytes: float = 0.0

    def __post_init__(self) -> None:
        for unit, value in (("messages", self.messages), ("bytes", self.bytes)):
            if not 0 <= value < math.inf:
                raise ValueError(f"a rate of {unit} is 0 or more a second, got {value:g}")

    def __bool__(self) -> bool:
        return bool(self.messages or self.bytes)


UNLIMITED = RateLimit()


class RateLimiter:
    """Token bucket of one rate limit."""

    __slots__ = ("_bytes", "_messages", "_since", "limit", "waiting_session_count")

    def __init__(self, rate: RateLimit, now: float) -> None:
        self.limit = rate
        self.waiting_session_count = 0
        """Sessions with messages that wait for this limit."""
        self._since = now
        self._messages = _burst(rate.messages)
        self._bytes = _burst(rate.bytes)
        """Negative if the last message took more than was left."""

    def update_limit(self, rate: RateLimit, now: float) -> None:
        """Change the limit from now on."""
        self._refill(now)
        if not self.limit.messages:
            self._messages = _burst(rate.messages)
        if not self.limit.bytes:
            self._bytes = _burst(rate.bytes)
        self.limit = rate
        self._refill(now)

    def is_full(self, now: float) -> bool:
        """Return True if the bucket is full."""
        self._refill(now)
        rate = self.limit
        return self._messages >= _burst(rate.messages) and self._bytes >= _burst(rate.bytes)

    def count_allowed(self, ends: Integers, now: float) -> int:
        """Return how many messages are admitted now.

        Args:
            ends: End offsets of the messages, in bytes, shape (n,).
            now: Current time in seconds.
        """
        self._refill(now)
        count, rate = len(ends), self.limit
        if rate.messages:
            count = min(count, max(0, math.floor(self._messages)))
        if rate.bytes and count:
            if self._bytes < 1:
                return 0
            # The first message that exceeds the rest is admitted, too.
            count = min(count, int(np.searchsorted(ends, self._bytes)) + 1)
        return count

    def consume(self, messages: int, size: int) -> None:
        """Record admitted messages and their total bytes."""
        if self.limit.messages:
            self._messages -= messages
        if self.limit.bytes:
            self._bytes -= size

    def next_available(self, now: float) -> float:
        """Return the time at which messages are admitted again; `now` if they are.

        The time is late enough for several messages, so that sessions are not woken for each one.
        """
        self._refill(now)
        seconds = 0.0
        for rate, remaining in (
            (self.limit.messages, self._messages),
            (self.limit.bytes, self._bytes),
        ):
            if rate and remaining < 1:
                target = max(1.0, rate * RATE_LIMIT_SLICE_SECONDS)
                seconds = max(seconds, (target - remaining) / rate, RATE_LIMIT_WAIT_SECONDS_MIN)
        return now + seconds

    def _refill(self, now: float) -> None:
        elapsed, rate = now - self._since, self.limit
        if elapsed <= 0:
            return
        self._since = now
        self._messages = min(_burst(rate.messages), self._messages + elapsed * rate.messages)
        self._bytes = min(_burst(rate.bytes), self._bytes + elapsed * rate.bytes)


def _burst(per_second: float) -> float:
    """Return the most that a bucket holds."""
    return max(1.0, per_second * BURST_SECONDS)


# Several limiters, all of which apply ------------------------------------------------------------


def count_allowed(limiters: Sequence[RateLimiter], ends: Integers, now: float) -> int:
    """Return the messages that all limiters admit. See `RateLimiter.count_allowed`."""
    return min((limiter.count_allowed(ends, now) for limiter in limiters), default=len(ends))


def is_one_allowed(limiters: Sequence[RateLimiter], size: int, now: float) -> bool:
    """Return True if a message of this size is admitted now and no session waits for a limiter."""
    ends = np.array([size])
    return not has_waiting_sessions(limiters) and bool(count_allowed(limiters, ends, now))


def consume(limiters: Sequence[RateLimiter], messages: int, size: int) -> None:
    """Record admitted messages in all limiters."""
    for limiter in limiters:
        limiter.consume(messages, size)


def next_available(limiters: Sequence[RateLimiter], now: float) -> float:
    """Return the time at which all limiters admit messages again."""
    return max((limiter.next_available(now) for limiter in limiters), default=now)


def has_waiting_sessions(limiters: Sequence[RateLimiter]) -> bool:
    """Return True if a session waits for one of the limiters."""
    return any(limiter.waiting_session_count for limiter in limiters)


def read_bytes(limiters: Sequence[RateLimiter]) -> int:
    """Return how many bytes to read at once from a peer whose messages are not counted before the
    read.

    Limits how far a single read can exceed the rate.
    """
    bytes_min = math.inf
    for limiter in limiters:
        rate = limiter.limit
        for per_second in (rate.bytes, rate.messages * RATE_LIMIT_MESSAGE_BYTES):
            if per_second:
                bytes_min = min(bytes_min, per_second * RATE_LIMIT_SLICE_SECONDS)
    return max(RATE_LIMITED_READ_BYTES_MIN, math.ceil(min(bytes_min, 1 << 30)))
