"""Limits on the connections of one address, and token buckets by key.

Memory is bounded: counters exist only for addresses with open connections, and buckets have a
maximum number.
"""

from __future__ import annotations

import ipaddress
from collections import Counter

from simplebus.core.errors import Reason
from simplebus.core.session.rate_limits import address_network

BUCKETS_MAX = 65_536


class KeyedTokenBuckets:
    """A token bucket per key, full at first. Time is an argument, in seconds."""

    def __init__(self, burst: float, tokens_per_second: float) -> None:
        assert burst >= 1
        self._burst = burst
        self._tokens_per_second = tokens_per_second
        self._tokens: dict[str, tuple[float, float]] = {}
        """Tokens by key, with the time of the count. Least recently used first.
        """

    def __len__(self) -> int:
        return len(self._tokens)

    def token_count(self, key: str, now: float) -> float:
        """Return the number of tokens of a key."""
        tokens, since = self._tokens.get(key, (self._burst, now))
        return min(self._burst, tokens + (now - since) * self._tokens_per_second)

    def has_token(self, key: str, now: float) -> bool:
        """Return True if the key has at least one token."""
        return self.token_count(key, now) >= 1

    def take_token(self, key: str, now: float) -> bool:
        """Take a token. Returns False if the key has no token."""
        tokens = self.token_count(key, now)
        self._tokens.pop(key, None)
        is_there = tokens >= 1
        if is_there:
            tokens -= 1
        while len(self._tokens) >= BUCKETS_MAX:
            del self._tokens[next(iter(self._tokens))]  # The least recently used one.
        self._tokens[key] = (tokens, now)
        return is_there

    def remove_full(self, now: float) -> None:
        """Remove buckets that have refilled."""
        for key, (tokens, since) in list(self._tokens.items()):
            if tokens + (now - since) * self._tokens_per_second < self._burst:
                break  # Later buckets were used more recently.
            del self._tokens[key]


_BURST_SECONDS = 10.0
"""Burst of an idle address, in seconds of its connection rate."""


def is_loopback(host: str) -> bool:
    """Return True if only programs on this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class AddressLimits:
    """Connection limits per address, for all listeners of a server. 0 means no limit."""

    def __init__(self, connections_max: int = 0, connections_per_second: float = 0.0) -> None:
        self._open_counts: Counter[str] = Counter()
        self.set_limits(connections_max, connections_per_second)

    def set_limits(self, connections_max: int, connections_per_second: float) -> None:
        """Replace the limits. Open connections stay."""
        self._connections_max = connections_max
        self._rate_buckets: KeyedTokenBuckets | None = None
        if connections_per_second > 0:
            self._rate_buckets = KeyedTokenBuckets(
                max(1.0, connections_per_second * _BURST_SECONDS), connections_per_second
            )

    def register_connection(self, address: str, now: float) -> tuple[Reason, str] | None:
        """Count a new connection, or return why it is refused.

        The caller calls `remove_connection` at the end of each connection that is not refused.
        """
        address = address_network(address)
        if self._connections_max and self._open_counts[address] >= self._connections_max:
            return (
                Reason.TOO_MANY_CONNECTIONS,
                f"{self._connections_max} connections from this address are open",
            )
        if self._rate_buckets is not None and not self._rate_buckets.take_token(address, now):
            return (
                Reason.TOO_MANY_ATTEMPTS,
                "too many new connections from this address; try again later",
            )
        self._open_counts[address] += 1
        return None

    def remove_connection(self, address: str) -> None:
        """Count the end of a connection."""
        address = address_network(address)
        self._open_counts[address] -= 1
        if self._open_counts[address] <= 0:
            del self._open_counts[address]
