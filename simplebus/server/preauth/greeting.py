"""First messages of connections that are not authenticated yet.

The bytes of all greetings together are bounded. If a client exceeds the limit, and has sent at
least an equal share of it, this client is refused. Otherwise the client that has sent most is
disconnected. Received bytes are searched for the end of the first frame only once.

    heartbeats │ first frame, as far as received
    discarded    buffered and searched up to `searched_bytes`
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DELIMITER_BYTES,
    HANDSHAKE_FRAME_BYTES_MAX,
    HANDSHAKE_HEARTBEATS_MAX,
    HANDSHAKES_BYTES_MAX,
    HEADER_BYTES,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import Auth, ConnectRequest, decode


class Greeting:
    """Received bytes of one client, and the function that disconnects it."""

    def __init__(self, disconnect: Callable[[RemoteProtocolError], object]) -> None:
        self.data = bytearray()
        self.disconnect = disconnect
        self.searched_bytes = 0
        """No frame or line ends before this offset."""
        self.heartbeat_count = 0
        """Discarded heartbeats."""


class GreetingBuffers:
    """Greetings of all listeners. Invariant: `held_bytes <= bytes_max`."""

    def __init__(self, bytes_max: int = HANDSHAKES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._counted_bytes: dict[Greeting, int] = {}
        """Bytes of each greeting when they were counted last."""
        self.held_bytes = 0

    def open(self, disconnect: Callable[[RemoteProtocolError], object]) -> Greeting:
        """Add a client. The caller calls `close` when it is authenticated or gone."""
        greeting = Greeting(disconnect)
        self._counted_bytes[greeting] = 0
        return greeting

    def enforce_limit(self, greeting: Greeting) -> None:
        """Count the greeting's new bytes. Raises RemoteProtocolError (pending_limit)."""
        if greeting not in self._counted_bytes:  # It was disconnected to free memory.
            raise _greeting_too_large(len(greeting.data))
        self._update_size(greeting)
        if self.held_bytes <= self._bytes_max:
            return
        share = self._bytes_max // len(self._counted_bytes)
        if len(greeting.data) >= share:
            raise _greeting_too_large(len(greeting.data))
        while self.held_bytes > self._bytes_max:
            largest = max(self._counted_bytes, key=self._counted_bytes.__getitem__)
            size = self._counted_bytes[largest]
            self.close(largest)
            largest.disconnect(_greeting_too_large(size))

    def _update_size(self, greeting: Greeting) -> None:
        size = len(greeting.data)
        self.held_bytes += size - self._counted_bytes[greeting]
        self._counted_bytes[greeting] = size

    def close(self, greeting: Greeting) -> None:
        """Remove a greeting."""
        self.held_bytes -= self._counted_bytes.pop(greeting, 0)


def _greeting_too_large(size: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.PENDING_LIMIT,
        f"unauthenticated clients have sent too much data, this one {size} bytes",
    )


def parse_greeting(greeting: Greeting) -> tuple[bool, Auth | None]:
    """Return whether the first frame of a binary client is complete, and its credentials.

    Heartbeats before the frame are skipped. An invalid frame is returned as complete without
    credentials; the session reports the error.

    Raises:
        RemoteProtocolError: frame_too_long or unauthorized.
    """
    data = greeting.data
    while (end := data.find(frames.DELIMITER, max(HEADER_BYTES, greeting.searched_bytes))) >= 0:
        if data[0] != frames.HEARTBEAT:
            return True, _parse_auth(data, end)
        greeting.heartbeat_count += 1
        if greeting.heartbeat_count > HANDSHAKE_HEARTBEATS_MAX:
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED,
                f"{greeting.heartbeat_count} heartbeats before authentication, "
                f"{HANDSHAKE_HEARTBEATS_MAX} are allowed",
            )
        del data[: end + DELIMITER_BYTES]
        greeting.searched_bytes = 0
    greeting.searched_bytes = len(data) - DELIMITER_BYTES + 1
    if len(data) > HANDSHAKE_FRAME_BYTES_MAX:
        raise RemoteProtocolError(
            Reason.FRAME_TOO_LONG,
            f"{len(data)} bytes before authentication, {HANDSHAKE_FRAME_BYTES_MAX} are allowed",
        )
    return False, None


def _parse_auth(data: bytearray, end: int) -> Auth | None:
    content = bytes(data[HEADER_BYTES:end])
    if data[0] != frames.CONNECT or not content.lstrip().startswith(b"{"):
        return None
    try:
        return decode(ConnectRequest, content).auth
    except RemoteProtocolError:
        return None
