"""How many connections one address may have, and how fast it may make them.

Rule 1: what is kept of addresses is bounded by the connections that are open.
"""

from __future__ import annotations

import ipaddress
from collections import Counter

from simplebus.core.errors import Reason
from simplebus.core.session.rate_limits import address_network

BUCKETS_MAX = 65_536


class KeyedTokenBuckets:
    """A bucket for each key: full at first, and filled again at a rate. Time is an argument."""

    def __init__(self, burst: float, tokens_per_second: float) -> None:
        assert burst >= 1
        self._burst = burst
        self._tokens_per_second = tokens_per_second
        self._tokens: dict[str, tuple[float, float]] = {}
        """How much is left, and since when that was true."""

    def __len__(self) -> int:
        return len(self._tokens)

    def token_count(self, key: str, now: float) -> float:
        """How many it has."""
        left, since = self._tokens.get(key, (self._burst, now))
        return min(self._burst, left + (now - since) * self._tokens_per_second)

    def has_token(self, key: str, now: float) -> bool:
        """Whether there is one that could be taken."""
        return self.token_count(key, now) >= 1

    def take_token(self, key: str, now: float) -> bool:
        """Take one, if there is one."""
        left = self.token_count(key, now)
        self._tokens.pop(key, None)
        is_there = left >= 1
        if is_there:
            left -= 1
        while len(self._tokens) >= BUCKETS_MAX:
            del self._tokens[next(iter(self._tokens))]  # The one that was asked for longest ago.
        self._tokens[key] = (left, now)
        return is_there

    def remove_full(self, now: float) -> None:
        """Forget those that have filled up again."""
        for key, (left, since) in list(self._tokens.items()):
            if left + (now - since) * self._tokens_per_second < self._burst:
                break  # Those behind it were asked for later.
            del self._tokens[key]


_BURST_SECONDS = 10.0
"""An address that was quiet may make so many seconds' worth of connections at once."""


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class AddressLimits:
    """Of all doors of one bus. 0 sets no limit."""

    def __init__(self, connections_max: int = 0, connections_per_second: float = 0.0) -> None:
        self._open_counts: Counter[str] = Counter()
        self.set_limits(connections_max, connections_per_second)

    def set_limits(self, connections_max: int, connections_per_second: float) -> None:
        """Have these limits from now on. Connections that are open stay."""
        self._connections_max = connections_max
        self._rate_buckets: KeyedTokenBuckets | None = None
        if connections_per_second > 0:
            self._rate_buckets = KeyedTokenBuckets(max(1.0, connections_per_second * _BURST_SECONDS), connections_per_second)

    def register_connection(self, address: str, now: float) -> tuple[Reason, str] | None:
        """Why a connection from this address is not taken; None when it is, and `left` is to be
        called at its end."""
        address = address_network(address)
        if self._connections_max and self._open_counts[address] >= self._connections_max:
            return (
                Reason.TOO_MANY_CONNECTIONS,
                f"{self._connections_max} connections from this address are open",
            )
        if self._rate_buckets is not None and not self._rate_buckets.take_token(address, now):
            return Reason.TOO_MANY_ATTEMPTS, "this address connects too often"
        self._open_counts[address] += 1
        return None

    def remove_connection(self, address: str) -> None:
        """A connection has ended."""
        address = address_network(address)
        self._open_counts[address] -= 1
        if self._open_counts[address] <= 0:
            del self._open_counts[address]
