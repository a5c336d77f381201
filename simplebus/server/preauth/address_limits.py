"""How many connections one address may have, and how fast it may make them.

Rule 1: what is kept of addresses is bounded by the connections that are open.
"""

from __future__ import annotations

import ipaddress
from collections import Counter

from simplebus.core.errors import Reason
from simplebus.core.session.rate_limits import address_network

KEYS_MAX = 65_536


class Buckets:
    """A bucket for each key: full at first, and filled again at a rate. Time is an argument."""

    def __init__(self, at_once: float, per_second: float) -> None:
        assert at_once >= 1
        self._at_once = at_once
        self._per_second = per_second
        self._left: dict[str, tuple[float, float]] = {}
        """How much is left, and since when that was true."""

    def __len__(self) -> int:
        return len(self._left)

    def left(self, key: str, now: float) -> float:
        """How many it has."""
        left, since = self._left.get(key, (self._at_once, now))
        return min(self._at_once, left + (now - since) * self._per_second)

    def has(self, key: str, now: float) -> bool:
        """Whether there is one that could be taken."""
        return self.left(key, now) >= 1

    def take(self, key: str, now: float) -> bool:
        """Take one, if there is one."""
        left = self.left(key, now)
        self._left.pop(key, None)
        is_there = left >= 1
        if is_there:
            left -= 1
        while len(self._left) >= KEYS_MAX:
            del self._left[next(iter(self._left))]  # The one that was asked for longest ago.
        self._left[key] = (left, now)
        return is_there

    def forget_full(self, now: float) -> None:
        """Forget those that have filled up again."""
        for key, (left, since) in list(self._left.items()):
            if left + (now - since) * self._per_second < self._at_once:
                break  # Those behind it were asked for later.
            del self._left[key]


_SECONDS_AT_ONCE = 10.0
"""An address that was quiet may make so many seconds' worth of connections at once."""


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Addresses:
    """Of all doors of one bus. 0 sets no limit."""

    def __init__(self, at_once: int = 0, per_second: float = 0.0) -> None:
        self._open: Counter[str] = Counter()
        self.limit(at_once, per_second)

    def limit(self, at_once: int, per_second: float) -> None:
        """Have these limits from now on. Connections that are open stay."""
        self._at_once = at_once
        self._rates: Buckets | None = None
        if per_second > 0:
            self._rates = Buckets(max(1.0, per_second * _SECONDS_AT_ONCE), per_second)

    def refuse(self, address: str, now: float) -> tuple[Reason, str] | None:
        """Why a connection from this address is not taken; None when it is, and `left` is to be
        called at its end."""
        address = address_network(address)
        if self._at_once and self._open[address] >= self._at_once:
            return (
                Reason.TOO_MANY_CONNECTIONS,
                f"{self._at_once} connections from this address are open",
            )
        if self._rates is not None and not self._rates.take(address, now):
            return Reason.TOO_MANY_ATTEMPTS, "this address connects too often"
        self._open[address] += 1
        return None

    def left(self, address: str) -> None:
        """A connection has ended."""
        address = address_network(address)
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]
