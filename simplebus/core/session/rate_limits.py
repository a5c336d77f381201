"""How fast each user, and each address, may publish: of all its connections, at all doors.

Rule 1: rates that end, or are others, hold for connections that are there, too.
Rule 2: what is kept is bounded by the users there are, and by a number of addresses that have
published lately.
"""

from __future__ import annotations

import functools
import ipaddress

from simplebus.core.limits import METERS_MAX
from simplebus.core.redelivery.delivery_policy import Clock
from simplebus.core.users.rate_limit import UNLIMITED, Meter, Rate
from simplebus.core.users.users import User, Users

_NETWORK_BITS = 64


@functools.lru_cache(maxsize=4096)
def address_network(address: str) -> str:
    """What addresses have in common that are one host's, or one network's that it may choose its
    addresses from: 64 bits of version 6. One of version 4 is itself, however it is written."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))


class SessionRateLimits:
    """Of one bus."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._user_buckets: dict[str, Meter] = {}
        self._address_buckets: dict[str, Meter] = {}
        """Who has come last comes last."""
        self._address_rate = UNLIMITED
        self._is_unlimited = False

    def set_address_rate(self, rate: Rate) -> None:
        """How fast all connections of one address together may publish."""
        self._address_rate = rate
        if not rate:
            self._address_buckets.clear()
        for meter in self._address_buckets.values():
            meter.set(rate, self._clock.now)

    def remove_limits(self) -> None:
        """Nobody is to wait any more: what has come is to be taken."""
        self._is_unlimited = True
        for meter in (*self._user_buckets.values(), *self._address_buckets.values()):
            meter.set(UNLIMITED, self._clock.now)

    def apply_users(self, users: Users | None) -> None:
        """These are the users from now on, with these rates."""
        rates = {user.name: user.rate for user in users.users} if users is not None else {}
        for name, meter in list(self._user_buckets.items()):
            rate = rates.get(name, UNLIMITED)
            if rate:
                meter.set(rate, self._clock.now)
            else:
                del self._user_buckets[name]

    def token_buckets_for(self, user: User | None, address: str) -> tuple[Meter, ...]:
        """By what a connection of this user and from this address is measured."""
        found: list[Meter] = []
        if self._is_unlimited:
            return ()
        if user is not None and user.rate:
            meter = self._user_buckets.get(user.name)
            if meter is None:
                meter = self._user_buckets[user.name] = Meter(user.rate, self._clock.now)
            found.append(meter)
        if self._address_rate and address:
            found.append(self._address_bucket(address_network(address)))
        return tuple(found)

    def _address_bucket(self, address: str) -> Meter:
        meters = self._address_buckets
        meter = meters.pop(address, None) or Meter(self._address_rate, self._clock.now)
        while len(meters) >= METERS_MAX:
            del meters[next(iter(meters))]
        meters[address] = meter
        return meter
