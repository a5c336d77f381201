"""Schedule of connection attempts. Time and random numbers are arguments.

The first connection tries each address once, in order. After a lost connection the addresses are
tried in rounds, starting with the lost one. The delay between rounds doubles up to a maximum and is
shortened by up to a half at random, so that many clients do not reconnect at the same moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from simplebus.client.core import arguments
from simplebus.core.errors import BusConnectionError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.protocol.opening import WrongProtocolError

RETRY_DELAY_MIN_SECONDS = 0.05
RETRY_DELAY_MAX_SECONDS = 5.0
# A connection that lasted this long resets the backoff.
STABLE_CONNECTION_SECONDS = 5.0
# Replaces an infinite timeout, which sockets and event loops do not accept.
_ATTEMPT_SECONDS_MAX = 1e6

_TEMPORARY_REASONS = {
    Reason.HEARTBEAT_TIMEOUT,
    Reason.HELLO_TIMEOUT,
    Reason.FRAME_TIMEOUT,
    Reason.STALLED,
    Reason.PENDING_LIMIT,
    Reason.TOO_MANY_CONNECTIONS,
    Reason.TOO_MANY_ATTEMPTS,
    Reason.UNDELIVERED_AT_CLOSE,
}
"""Reasons that may no longer apply a moment later."""

_SERVER_SPECIFIC_REASONS = {Reason.CLASS_NAME_CONFLICT, Reason.TOO_MANY_CLASSES}
"""Reasons that may not apply to another server."""


def is_worth_retrying(error: BaseException | None) -> bool:
    """Return True if another attempt may succeed.

    `error` is None if the server has closed the connection without an error.
    """
    if isinstance(error, RemoteProtocolError):
        return error.reason in _TEMPORARY_REASONS
    return not isinstance(error, RefusedError)


@dataclass(frozen=True, slots=True)
class ConnectAttempt:
    """One attempt to connect."""

    delay_seconds: float
    """Seconds to wait before the attempt."""
    address_index: int
    """Index of the address."""
    timeout_seconds: float
    """Timeout of the attempt, including the reply to the Connect."""


class ReconnectSchedule:
    """Connection attempts of one client, for the first connection and after each loss.

    Times are in seconds of a monotonic clock.
    """

    def __init__(
        self,
        address_count: int,
        *,
        timeout: float,
        reconnect: float | None,
        now: float,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self.timeout_seconds = min(
            arguments.check_seconds("timeout", timeout), _ATTEMPT_SECONDS_MAX
        )
        """Timeout of all first attempts together, and of each later attempt."""
        self.reconnect_seconds = (
            arguments.check_seconds("reconnect", reconnect) if reconnect else 0.0
        )
        """Time after a loss during which attempts are made; 0 disables reconnecting."""
        self.is_first = True
        """True until the first connection is made."""
        self.last_error: BusConnectionError | None = None
        """The last permanent refusal since the last connection, else the last error."""
        self.has_permanent_refusal = False
        """True if a server has refused the client for a reason that a retry would not change."""
        self._refused_addresses: set[int] = set()
        """Addresses that are not tried any more."""
        self._address_count = address_count
        self._random_fraction = random_fraction
        self._started_at = now
        self._first_address = 0
        """Index of the address that each round starts with."""
        self._round_offset = 0
        """Addresses of this round that were tried or skipped."""
        self._failed_rounds = 0
        """Rounds since the last stable connection."""
        self._connected_at = -math.inf

    def mark_connected(self, address: int, now: float) -> None:
        """Note a connection to this address."""
        self.is_first = False
        self._first_address = address
        self._connected_at = now

    def mark_failed(self, address: int, error: BusConnectionError) -> bool:
        """Note a failed attempt. Return True if another attempt may succeed."""
        if is_worth_retrying(error.__cause__):
            if not self.has_permanent_refusal:
                self.last_error = error
            return True
        self.last_error, self.has_permanent_refusal = error, True
        self._refused_addresses.add(address)
        cause = error.__cause__
        is_server_specific = isinstance(cause, WrongProtocolError) or (
            isinstance(cause, RemoteProtocolError) and cause.reason in _SERVER_SPECIFIC_REASONS
        )
        return is_server_specific and len(self._refused_addresses) < self._address_count

    def mark_lost(self, now: float) -> None:
        """Start new attempts, because the connection is lost."""
        self._started_at = now
        self.last_error, self.has_permanent_refusal = None, False
        self._refused_addresses.clear()
        self._round_offset = 0
        self._failed_rounds = (
            0 if now - self._connected_at >= STABLE_CONNECTION_SECONDS else self._failed_rounds + 1
        )

    def next_attempt(self, now: float) -> ConnectAttempt | None:
        """Return the next attempt; None if the client must give up."""
        remaining_seconds = (
            self._started_at
            + (self.timeout_seconds if self.is_first else self.reconnect_seconds)
            - now
        )
        if len(self._refused_addresses) == self._address_count:
            return None
        offsets = self._remaining_offsets()
        if not offsets:
            if self.is_first:
                return None
            self._round_offset = 0
            self._failed_rounds += 1
            offsets = self._remaining_offsets()
        delay = 0.0
        if self._failed_rounds and not self._round_offset:
            delay = min(
                RETRY_DELAY_MIN_SECONDS * 2.0 ** min(self._failed_rounds - 1, 32),
                RETRY_DELAY_MAX_SECONDS,
            )
            delay *= 1 - self._random_fraction() / 2
        if remaining_seconds <= delay:
            return None
        offset = offsets[0]
        timeout = min(self.timeout_seconds, remaining_seconds - delay)
        if self.is_first:  # Time that an address does not use is left to the next ones.
            timeout = remaining_seconds / len(offsets)
        self._round_offset = offset + 1
        return ConnectAttempt(delay, self._address_at(offset), timeout)

    def _remaining_offsets(self) -> list[int]:
        """Return the offsets of this round that are still to be tried."""
        offsets = range(self._round_offset, self._address_count)
        return [
            offset for offset in offsets if self._address_at(offset) not in self._refused_addresses
        ]

    def _address_at(self, offset: int) -> int:
        """Return the address index at an offset of a round."""
        return (self._first_address + offset) % self._address_count
