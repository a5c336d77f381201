"""When to try to reach a bus, and what is worth another try. Time and chance are arguments.

Rule 1: at first every address is tried once, in order, and that is all: who starts a program wants
to know. After a loss they are tried in turns, beginning with the one that was lost.
Rule 2: between two turns is a pause, twice as long as the one before, by chance up to a half
shorter: a thousand clients of a bus that was away do not come back in one moment. A connection that
did not last does not begin the pauses anew.
Rule 3: what the bus gave as its reason, and what would only happen again, is not tried again; where
that is about this bus and not about the program, other addresses still are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from simplebus.client.core import arguments
from simplebus.core.errors import BusConnectionError, Reason, RefusedError, RemoteProtocolError

RETRY_DELAY_MIN_SECONDS = 0.05
RETRY_DELAY_MAX_SECONDS = 5.0
# A connection that lasted so long is as good as any: the pauses begin anew.
STABLE_CONNECTION_SECONDS = 5.0
# The longest that an attempt takes, for those who wait for ever: no more is asked of a system.
_SECONDS_MAX = 1e6

_PASSING = {
    Reason.HEARTBEAT_TIMEOUT,
    Reason.HELLO_TIMEOUT,
    Reason.FRAME_TIMEOUT,
    Reason.STALLED,
    Reason.PENDING_LIMIT,
    Reason.TOO_MANY_CONNECTIONS,
    Reason.TOO_MANY_ATTEMPTS,
    Reason.UNDELIVERED_AT_CLOSE,
}
"""Reasons of the bus that may have passed a moment later."""

_OF_ONE_BUS = {Reason.CLASS_NAME_CONFLICT, Reason.TOO_MANY_CLASSES}
"""Reasons that another bus may not have."""


def is_worth_retrying(error: BaseException | None) -> bool:
    """Whether another connection may fare better. None is an orderly end: the bus went away."""
    if isinstance(error, RemoteProtocolError):
        return error.reason in _PASSING
    return not isinstance(error, RefusedError)


@dataclass(frozen=True, slots=True)
class ConnectAttempt:
    """A connection to be tried."""

    delay_seconds: float
    """Seconds to wait before."""
    address_index: int
    """Index of the address."""
    timeout_seconds: float
    """How long it may take, the answer to the Connect included."""


class ReconnectSchedule:
    """The attempts of one client, the first ones and those after every loss."""

    def __init__(
        self,
        address_count: int,
        *,
        timeout: float,
        reconnect: float | None,
        now: float,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self.timeout = min(arguments.check_seconds("timeout", timeout), _SECONDS_MAX)
        """Seconds for all first attempts together, and for each later one."""
        self.reconnect_seconds = arguments.check_seconds("reconnect", reconnect) if reconnect else 0.0
        """Seconds after a loss for which attempts are made; 0 for none."""
        self.is_first = True
        """Whether there was no connection yet."""
        self.last_error: BusConnectionError | None = None
        """What became of the attempts since the last connection: the last lasting refusal if there
        was one, otherwise the last failure."""
        self.has_permanent_refusal = False
        """Whether some address refuses for good."""
        self._refused_addresses: set[int] = set()
        """Addresses that are not tried any more."""
        self._address_count = address_count
        self._chance = chance
        self._started_at = now
        self._first_address = 0
        """The one that attempts begin with."""
        self._round_offset = 0
        """Addresses of this turn that were tried, or passed over."""
        self._failed_rounds = 0
        """Turns without a connection that lasted."""
        self._connected_at = -math.inf

    def mark_connected(self, address: int, now: float) -> None:
        """There is a connection to this address."""
        self.is_first = False
        self._first_address = address
        self._connected_at = now

    def mark_failed(self, address: int, problem: BusConnectionError) -> bool:
        """An attempt came to nothing. Whether another one may fare better."""
        if is_worth_retrying(problem.__cause__):
            if not self.has_permanent_refusal:
                self.last_error = problem
            return True
        self.last_error, self.has_permanent_refusal = problem, True
        self._refused_addresses.add(address)
        cause = problem.__cause__
        is_of_one_bus = isinstance(cause, RemoteProtocolError) and cause.reason in _OF_ONE_BUS
        return is_of_one_bus and len(self._refused_addresses) < self._address_count

    def mark_lost(self, now: float) -> None:
        """The connection is gone: attempts begin."""
        self._started_at = now
        self.last_error, self.has_permanent_refusal = None, False
        self._refused_addresses.clear()
        self._round_offset = 0
        self._failed_rounds = 0 if now - self._connected_at >= STABLE_CONNECTION_SECONDS else self._failed_rounds + 1

    def next_attempt(self, now: float) -> ConnectAttempt | None:
        """What to try now; None to give up."""
        left = self._started_at + (self.timeout_seconds if self.is_first else self.reconnect_seconds) - now
        if len(self._refused_addresses) == self._address_count:
            return None
        in_turn = self._in_turn()
        if not in_turn:
            if self.is_first:
                return None
            self._round_offset = 0
            self._failed_rounds += 1
            in_turn = self._in_turn()
        pause = 0.0
        if self._failed_rounds and not self._round_offset:
            pause = min(RETRY_DELAY_MIN_SECONDS * 2.0 ** min(self._failed_rounds - 1, 32), RETRY_DELAY_MAX_SECONDS)
            pause *= 1 - self._chance() / 2
        if left <= pause:
            return None
        place = in_turn[0]
        seconds = min(self.timeout_seconds, left - pause)
        if self.is_first:  # What one does not need of its share is the others'.
            seconds = left / len(in_turn)
        self._round_offset = place + 1
        return ConnectAttempt(pause, self._at(place), seconds)

    def _in_turn(self) -> list[int]:
        """The places of this turn that are still to be tried."""
        places = range(self._round_offset, self._address_count)
        return [place for place in places if self._at(place) not in self._refused_addresses]

    def _at(self, place: int) -> int:
        """The address that is tried at this place of a turn."""
        return (self._first_address + place) % self._address_count
