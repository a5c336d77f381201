"""Publish rates per user and per address, over all connections and listeners.

Changed or removed limits apply to existing connections, too. Memory is bounded by the number of
users and a fixed number of recently active addresses.
"""

from __future__ import annotations

import functools
import ipaddress

from simplebus.core.clock import BrokerClock
from simplebus.core.limits import TOKEN_BUCKETS_MAX
from simplebus.core.users.rate_limit import UNLIMITED, RateLimit, RateLimiter
from simplebus.core.users.users import User, Users

_NETWORK_BITS = 64


@functools.lru_cache(maxsize=4096)
def address_network(address: str) -> str:
    """Return the network that shares a rate limit: an IPv4 address, or an IPv6 /64."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))


class SessionRateLimits:
    """Rate limits of one bus."""

    def __init__(self, clock: BrokerClock) -> None:
        self._clock = clock
        self._user_buckets: dict[str, RateLimiter] = {}
        self._address_buckets: dict[str, RateLimiter] = {}
        """Buckets by address, the most recently used last."""
        self._address_rate = UNLIMITED
        self._is_unlimited = False

    def set_address_rate(self, rate: RateLimit) -> None:
        """Limit the rate of all connections of one address together."""
        self._address_rate = rate
        if not rate:
            self._address_buckets.clear()
        for bucket in self._address_buckets.values():
            bucket.update_limit(rate, self._clock.now)

    def remove_limits(self) -> None:
        """Remove all limits, so that waiting messages are accepted."""
        self._is_unlimited = True
        for bucket in (*self._user_buckets.values(), *self._address_buckets.values()):
            bucket.update_limit(UNLIMITED, self._clock.now)

    def apply_users(self, users: Users | None) -> None:
        """Apply the rates of a new user table."""
        rates = {user.name: user.rate for user in users.users} if users is not None else {}
        for name, bucket in list(self._user_buckets.items()):
            rate = rates.get(name, UNLIMITED)
            if rate:
                bucket.update_limit(rate, self._clock.now)
            else:
                del self._user_buckets[name]

    def token_buckets_for(self, user: User | None, address: str) -> tuple[RateLimiter, ...]:
        """Return the buckets that limit a connection of this user and address."""
        buckets: list[RateLimiter] = []
        if self._is_unlimited:
            return ()
        if user is not None and user.rate:
            bucket = self._user_buckets.get(user.name)
            if bucket is None:
                bucket = self._user_buckets[user.name] = RateLimiter(user.rate, self._clock.now)
            buckets.append(bucket)
        if self._address_rate and address:
            buckets.append(self._address_bucket(address_network(address)))
        return tuple(buckets)

    def _address_bucket(self, address: str) -> RateLimiter:
        buckets = self._address_buckets
        bucket = buckets.pop(address, None) or RateLimiter(self._address_rate, self._clock.now)
        while len(buckets) >= TOKEN_BUCKETS_MAX:
            del buckets[next(iter(buckets))]
        buckets[address] = bucket
        return bucket
