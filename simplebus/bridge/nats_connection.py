"""One connection to a NATS server, for the length of a block.

A lost connection is not replaced; the block is cancelled at once. A server that does not send an
expected answer within three heartbeats counts as lost, too.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import trio

from simplebus.bridge.reserved_headers import (
    is_permission_violation,
    is_required_permission_violation,
    normalize_subjects,
)
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.client import RequestReplies, ServerReady
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.events import ReceivedMessages, ServerError, ServerPong
from simplebus.net.nats_connection import (
    CONNECT_SECONDS,
    NatsAddress,
    NatsConnection,
    NatsConnectionEvent,
    NatsConnectionLost,
)

TIMEOUT_HEARTBEATS = 3


class BridgeNatsConnection:
    """Connection to a NATS server that collects received messages, replies and errors in lists.

    `nats` is the underlying connection, and `core` its protocol state. `server_errors`
    are the texts of the `-ERR` lines that the server sent.
    """

    def __init__(
        self,
        servers: str,
        name: str,
        credentials: dict[str, str],
        *,
        heartbeat: float = 20.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        server_addresses = parse_addresses(servers)
        client_credentials = Credentials(**credentials) if credentials else None
        self.nats = NatsConnection(
            server_addresses,
            self._on_event,
            name=name,
            credentials=client_credentials,
            tls=tls,
            ping_seconds=heartbeat,
            is_quiet=True,  # The copier logs failed attempts, without repeating itself.
        )
        self.timeout_seconds = TIMEOUT_HEARTBEATS * heartbeat
        self.core = self.nats.core
        self.messages: list[ReceivedMessages] = []
        self.replies: list[RequestReplies] = []
        self.server_errors: list[str] = []
        self.on_messages: Callable[[ReceivedMessages], object] = self.messages.append
        self.lost_reason = ""
        """Reason why the connection was lost; empty while it is open."""
        self.on_lost: Callable[[], object] = lambda: None
        self._event_received, self._pong_event = trio.Event(), trio.Event()

    def _on_event(self, event: NatsConnectionEvent) -> None:
        match event:
            case ReceivedMessages():
                self.on_messages(event)
            case RequestReplies():
                self.replies.append(event)
            case ServerError(text=text):
                self.server_errors.append(text)
            case NatsConnectionLost(reason=reason):
                self.lost_reason = reason
                self.on_lost()
                self._wake_pong_waiters()
            case ServerPong():  # Not an expected answer: a server that is stuck may still send it.
                self._wake_pong_waiters()
                return
            case ServerReady():
                return
        self._event_received.set()
        self._event_received = trio.Event()

    def _wake_pong_waiters(self) -> None:
        self._pong_event.set()
        self._pong_event = trio.Event()

    def check(self) -> None:
        """Raise BusConnectionError if the connection is lost."""
        if self.lost_reason:
            raise BusConnectionError(self.lost_reason)

    def check_permissions(
        self, is_relevant: Callable[[str], bool] = is_permission_violation
    ) -> None:
        """Raise BusConnectionError if the connection is lost or the user lacks a permission.

        `is_relevant` selects the errors that count. By default, all permission errors count.
        """
        self.check()
        if violation := next(filter(is_relevant, self.server_errors), ""):
            raise BusConnectionError(
                f"NATS at {self.nats.server} refused an operation: {normalize_subjects(violation)}"
            )

    def with_server_error(self, error: BusConnectionError) -> BusConnectionError:
        """Return the error with the last error of the server added to its text."""
        server_error = normalize_subjects(self.server_errors[-1]) if self.server_errors else ""
        if not server_error or server_error in str(error) or type(error) is not BusConnectionError:
            return error
        return BusConnectionError(f"{error}; the server had sent the error: {server_error}")

    async def wait_event(self) -> None:
        """Wait until something was received. Raises BusConnectionError on a lost connection."""
        self.check()
        await self._event_received.wait()
        self.check()

    async def wait_expected(self, expected: str) -> None:
        """Wait like `wait_event`. Raises BusConnectionError also if nothing is received in time."""
        self.check()
        await self._wait_or_fail(self._event_received, expected)

    async def _wait_or_fail(self, event: trio.Event, expected: str) -> None:
        with trio.move_on_after(self.timeout_seconds) as waiting:
            await event.wait()
        if waiting.cancelled_caught:
            raise BusConnectionError(
                f"NATS at {self.nats.server} did not send {expected} within "
                f"{self.timeout_seconds:g} s"
            )
        self.check()

    async def round_trip(self) -> None:
        """Wait until the server has processed everything that was sent before.

        A message to the connection's own inbox returns after everything that the server sent
        before it.
        """
        number = self.core.reserve_numbers(1)
        self.core.publish(self.core.reply_subject(number).decode(), b"")
        self.nats.flush()
        while not self._pop_reply(number):
            await self.wait_expected("the message to the own inbox")
            self.check_permissions(is_required_permission_violation)

    async def wait_processed(self, ping_number: int) -> None:
        """Wait until the server has answered the PING with this number, and so has processed what
        was sent before.

        Raises BusConnectionError if the connection is lost: a PING number belongs to one
        connection.
        """
        self.check()
        while not self.core.is_ping_answered(ping_number):
            await self._wait_or_fail(self._pong_event, "a PONG")

    def _pop_reply(self, number: int) -> bool:
        """Remove the reply with this number. Returns False if it has not arrived."""
        for index, each in enumerate(self.replies):
            is_match = each.numbers == number
            if is_match.any():
                indexes = np.flatnonzero(~is_match)
                remaining_replies = (
                    [RequestReplies(each.numbers[indexes], each.messages.pick(indexes))]
                    if indexes.size
                    else []
                )
                self.replies[index : index + 1] = remaining_replies
                return True
        return False


@asynccontextmanager
async def connect_nats(
    servers: str,
    name: str,
    credentials: dict[str, str],
    *,
    heartbeat: float = 20.0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[BridgeNatsConnection]:
    """Connect to one of several NATS servers.

    Args:
        servers: Addresses, separated by commas.
        name: Name of the client.
        credentials: User and password, token or seed.
        heartbeat: Seconds of silence after which the server is pinged.
        tls: TLS settings; None for the system's certificate authorities.

    Raises:
        BusConnectionError: No server accepted the connection in time, or the connection was
            lost. After a loss the block is cancelled first.
    """
    connection = BridgeNatsConnection(servers, name, credentials, heartbeat=heartbeat, tls=tls)
    body_scope = trio.CancelScope()
    connection.on_lost = body_scope.cancel
    failure: BaseException | None = None
    run_scope = trio.CancelScope(shield=True)  # So that a cancelled copier can commit its position.

    async def run() -> None:
        with run_scope:
            await connection.nats.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            with trio.move_on_after(CONNECT_SECONDS):
                await connection.nats.wait_ready()
            if not connection.nats.is_ready:
                problem = (
                    f": {normalize_subjects(connection.nats.problem)}"
                    if connection.nats.problem
                    else ""
                )
                raise BusConnectionError(
                    f"no NATS server at {format_addresses(servers)} accepted a connection within "
                    f"{CONNECT_SECONDS:g} s{problem}"
                )
            with body_scope:
                yield connection
            connection.check()
        except BusConnectionError as error:
            failure = connection.with_server_error(error)
        except Exception as error:
            failure = error  # Raised outside the nursery, which would wrap it.
        finally:
            run_scope.cancel()
    if failure is not None:
        raise failure


def format_addresses(servers: str) -> str:
    """Return the addresses without credentials."""
    return ", ".join(map(str, parse_addresses(servers)))


def parse_addresses(servers: str) -> list[NatsAddress]:
    """Parse addresses that are separated by commas.

    Raises ValueError, without the credentials, if one is invalid.
    """
    return [NatsAddress.parse(server.strip()) for server in servers.split(",")]
