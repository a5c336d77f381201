"""Connection to one of several NATS servers, with reconnect.

The `handle` callback receives each event at once and never waits. Without a connection nothing is
buffered or resent: callers that need certainty use requests. Servers are tried in random order,
with a growing delay after each round, including servers that the cluster announced. Output is
bounded for callers that await `wait_for_output_space`.
"""

from __future__ import annotations

import logging
import math
import random
import re
import secrets
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import trio

from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import (
    NatsClientCore,
    NatsClientEvent,
    RequestReplies,
    ServerReady,
)
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.events import ReceivedMessages, ServerError, ServerInfo
from simplebus.nats.client.jetstream_codec import JetStreamError

log = EventLogger("simplebus.engine")

OUTPUT_BYTES_MAX = 4 * 1024 * 1024
"""Pending output above which `wait_for_output_space` waits."""
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 5.0
REQUEST_SECONDS_MAX = 60.0
"""Longest wait for a reply.

The timeout of a request starts when the server has received it. Much earlier output can delay that,
so the deadline is extended up to this time while the server responds.
"""
PING_SECONDS = 5.0
"""Silence after which the server is sent a PING; after three times as long the connection is lost.

Servers that lose power or network do not close their connections.
"""
RECONNECT_DELAY_MIN_SECONDS, RECONNECT_DELAY_MAX_SECONDS = 0.05, 5.0
_PORT = 4222
_UNJOINED_BYTES_MIN = 64 * 1024
_READ_BYTES = 512 * 1024
_TICK_SECONDS = 1.0
_READ_DELAYS = ((64 * 1024, 0.010), (24 * 1024, 0.005), (4 * 1024, 0.002))
"""Pairs (bytes, seconds): after a read of more than `bytes`, the next read waits for `seconds`.

A few large reads cost less than many small ones.
"""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """Address of a server: `nats://[user[:password]@]host[:port]` or `tls://…`."""

    host: str
    port: int = _PORT
    tls: bool = False
    """True if TLS is required."""
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> NatsAddress:
        """Parse an address. Raises ValueError for an invalid one, without its password."""
        if "://" not in text:
            text = f"nats://{text}"
        try:
            parts = urlsplit(text)
            port = _PORT if parts.port is None else parts.port
        except ValueError:
            raise _invalid_address(text) from None
        is_known = parts.scheme in ("nats", "tls") and parts.hostname and port
        if not is_known or parts.path.strip("/"):
            raise _invalid_address(text)
        assert parts.hostname
        return cls(
            parts.hostname,
            port,
            parts.scheme == "tls",
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )

    @property
    def credentials(self) -> Credentials | None:
        """User with password, or token, in the address; None for none."""
        if self.password:
            return Credentials(user=self.user, password=self.password)
        return Credentials(token=self.user) if self.user else None


def _invalid_address(text: str) -> ValueError:
    shown = re.sub(r"(?<=//).*@", "…@", text)
    return ValueError(f"{shown!r}: expected nats://HOST[:PORT] or tls://HOST[:PORT]")


@dataclass(slots=True)
class NatsConnectionLost:
    """Event: the connection was lost."""

    reason: str


NatsConnectionEvent = NatsClientEvent | NatsConnectionLost


def new_inbox() -> str:
    """Return a unique inbox subject."""
    return f"_INBOX.{secrets.token_hex(11)}"


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """Request whose reply is awaited."""

    ping_number: int
    """PING sent after the request: its PONG shows that the server has received the request."""
    seconds: float
    """Timeout after the server has received the request."""
    deadline: float
    """Latest time to wait for the reply."""


class _ConnectionEndedError(Exception):
    """The connection has ended for this reason."""


_END_ERRORS = (OSError, trio.BrokenResourceError, RemoteProtocolError, _ConnectionEndedError)
"""Errors that end a connection."""


class NatsConnection:
    """Connection to a NATS cluster. Start `run` in a nursery."""

    def __init__(
        self,
        servers: list[NatsAddress],
        handle: Callable[[NatsConnectionEvent], None],
        *,
        name: str = "simplebus",
        credentials: Credentials | None = None,
        tls: ssl.SSLContext | None = None,
        echo: bool = True,
        ping_seconds: float = PING_SECONDS,
        min_payload_bytes: int = 0,
        is_quiet: bool = False,
    ) -> None:
        """Create a connection.

        Args:
            servers: Addresses to try, at least one.
            handle: Called with every event except replies to `request`.
            name: Client name in CONNECT.
            credentials: Credentials; None for those in the first address.
            tls: TLS context; None for the system's trusted authorities.
            echo: False to not receive messages that this client publishes.
            ping_seconds: Silence after which the server is sent a PING.
            min_payload_bytes: Smallest acceptable `max_payload`; other servers are not used.
            is_quiet: True to log connection changes at debug level only.
        """
        if not servers:
            raise ValueError("no NATS server address, expected at least one")
        if credentials is None:
            credentials = servers[0].credentials
        self.core = NatsClientCore(
            inbox=new_inbox(),
            name=name,
            credentials=credentials,
            echo=echo,
            ping_seconds=ping_seconds,
        )
        self.server = ""
        """The current or last server."""
        self.connection_count = 0
        """Connections made so far."""
        self.problem = ""
        """Errors of the last round in which no server could be reached."""
        self._handle = handle
        self._tls = tls
        self._min_payload_bytes = min_payload_bytes
        self._problem_level = logging.DEBUG if is_quiet else logging.WARNING
        self._connected_level = logging.DEBUG if is_quiet else logging.INFO
        self._servers = list(servers)
        random.shuffle(self._servers)
        self._discovered_servers: list[NatsAddress] = []
        """Servers announced by the last server."""
        self._preferred_server: NatsAddress | None = None
        """Server to try first after a switch."""
        self._switch_reason = ""
        """Reason of the switch, for the log."""
        self._switch_requested = trio.Event()
        """Set when the current server is to be left."""
        self._wakeup = trio.Event()
        self._emptied = trio.Event()
        self._changed = trio.Event()
        self._reply_channels: dict[int, trio.MemorySendChannel[tuple[bytes, bytes]]] = {}
        """Channels of awaited replies, by request number."""
        self._open_requests: dict[trio.CancelScope, _OpenRequest] = {}
        """Awaited requests by their cancel scope."""
        self._message_channels: dict[int, trio.MemorySendChannel[ReceivedMessages]] = {}
        """Channels of `request_many`, by subscription id."""

    @property
    def is_ready(self) -> bool:
        return self.core.is_ready

    @property
    def payload_bytes_max(self) -> int:
        """Longest message of this cluster, including headers."""
        return ServerInfo().max_payload if self.core.info is None else self.core.info.max_payload

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect and reconnect until cancelled."""
        task_status.started()
        pause = RECONNECT_DELAY_MIN_SECONDS
        has_logged_problem = False
        while True:
            errors: list[str] = []
            for server in self._servers_to_try():
                before = self.connection_count
                try:
                    await self._run_connection(server)
                except _END_ERRORS as error:
                    reason = _describe_error(error)
                    if self.connection_count > before:
                        log.log(
                            self._problem_level,
                            "nats.connection_lost",
                            "lost the connection to NATS at {server}: {reason}",
                            server=server,
                            reason=reason,
                        )
                        pause, errors, has_logged_problem = RECONNECT_DELAY_MIN_SECONDS, [], False
                        break
                    errors.append(f"{server}: {reason}")
            self.problem = "; ".join(sorted(errors))  # Sorted: the order of attempts is random.
            if errors and not has_logged_problem:
                log.log(
                    self._problem_level,
                    "nats.unreachable",
                    "cannot connect to any NATS server, retrying: {error}",
                    error=self.problem,
                )
                has_logged_problem = True
            await trio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RECONNECT_DELAY_MAX_SECONDS)

    def _servers_to_try(self) -> list[NatsAddress]:
        """Return the known servers: preferred first, the last used one last."""
        discovered = (
            discovered_server
            for discovered_server in self._discovered_servers
            if discovered_server not in self._servers
        )
        servers = [*self._servers, *discovered]
        servers.sort(
            key=lambda server: (server != self._preferred_server, str(server) == self.server)
        )
        return servers

    def other_servers(self) -> list[NatsAddress]:
        """Return the known servers except the current one."""
        return [server for server in self._servers_to_try() if str(server) != self.server]

    def switch_to(self, server: NatsAddress, reason: str) -> None:
        """Leave the current server as if the connection were lost, and try this one first."""
        self._preferred_server, self._switch_reason = server, reason
        self._switch_requested.set()

    async def wait_ready(self) -> None:
        """Wait until the connection is ready."""
        while not self.core.is_ready:
            await self._changed.wait()

    # Sending -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the output of `core`. Call after every use of the core."""
        if self.core.output_bytes:
            self._wakeup.set()

    @property
    def is_full(self) -> bool:
        """True if `wait_for_output_space` would wait."""
        return self.core.output_bytes > OUTPUT_BYTES_MAX

    async def wait_for_output_space(self) -> None:
        """Wait while too much output is pending. Raises BusConnectionError if the connection is
        lost.
        """
        while self.is_full and self.core.is_ready:
            await self._emptied.wait()
        if not self.core.is_ready:
            raise BusConnectionError("there is no connection to a NATS server")

    async def request(
        self, subject: str, payload: bytes = b"", *, seconds: float = REQUEST_SECONDS
    ) -> tuple[bytes, bytes]:
        """Send a request and wait for the reply.

        Args:
            subject: Subject of the request.
            payload: Payload of the request.
            seconds: Timeout, from when the server has received the request.

        Returns:
            Headers and payload of the reply.

        Raises:
            BusConnectionError: There is no connection, it was lost, or there was no reply in time.
        """
        if not self.core.is_ready:
            raise BusConnectionError("there is no connection to a NATS server")
        number = self.core.request(subject, payload)
        send, receive = trio.open_memory_channel[tuple[bytes, bytes]](1)
        self._reply_channels[number] = send
        self.flush()
        try:
            with self._wait_for_reply(subject, seconds):
                return await receive.receive()
        finally:
            self._reply_channels.pop(number, None)

    async def request_many(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        max_messages: int,
        seconds: float = REQUEST_SECONDS,
    ) -> list[ReceivedMessages]:
        """Send a request and collect up to `max_messages` messages.

        A status message may end the request earlier.

        Raises:
            BusConnectionError: As for `request`.
            JetStreamError: There are no responders.
        """
        if not self.core.is_ready:
            raise BusConnectionError("there is no connection to a NATS server")
        core = self.core
        inbox = new_inbox()
        sid = core.subscribe(inbox)
        # Unbounded: the server sends at most as many messages as were requested.
        send, receive = trio.open_memory_channel[ReceivedMessages](math.inf)
        self._message_channels[sid] = send
        core.publish(subject, payload, reply=inbox)
        self.flush()
        received: list[ReceivedMessages] = []
        count = 0
        try:
            with self._wait_for_reply(subject, seconds):
                while count < max_messages:
                    messages, ended = _remove_status(await receive.receive())
                    if messages.count:
                        received.append(messages)
                        count += messages.count
                    if ended:
                        break
        finally:
            self._message_channels.pop(sid, None)
            core.unsubscribe(sid)
            self.flush()
        return received

    @contextmanager
    def _wait_for_reply(self, subject: str, seconds: float) -> Iterator[None]:
        """Bound the wait for replies. Raises BusConnectionError on timeout or loss."""
        ping_number, deadline = self.core.send_ping(), trio.current_time() + REQUEST_SECONDS_MAX
        self.flush()
        try:
            with trio.fail_after(seconds) as scope:
                self._open_requests[scope] = _OpenRequest(ping_number, seconds, deadline)
                try:
                    yield
                finally:
                    del self._open_requests[scope]
        except trio.TooSlowError:
            raise BusConnectionError(
                f"no reply to {subject} from NATS at {self.server} within {seconds:g} s"
            ) from None
        except trio.EndOfChannel:
            raise BusConnectionError(
                f"lost the connection to NATS at {self.server} during a request to {subject}"
            ) from None

    async def api_request(
        self, subject: str, body: dict[str, Any] | None = None, *, seconds: float = REQUEST_SECONDS
    ) -> dict[str, Any]:
        """Send a request to the JetStream API, for example `STREAM.INFO.orders`, and return its
        JSON.

        Raises:
            BusConnectionError: As for `request`.
            JetStreamError: JetStream returned an error.
        """
        headers, payload = await self.request(
            *jetstream_codec.encode_api_request(subject, body), seconds=seconds
        )
        return jetstream_codec.parse_api_reply(headers, payload, subject)

    # One connection ------------------------------------------------------------------------------

    async def _run_connection(self, server: NatsAddress) -> None:
        """Connect to a server and serve the connection until it ends."""
        core = self.core
        with _fail_after_timeout("no connection was established"):
            try:
                socket = await trio.open_tcp_stream(server.host, server.port)
            except UnicodeError as error:  # Servers may announce any text as an address.
                raise _ConnectionEndedError(f"invalid host name: {error}") from None
        async with socket:
            stream: trio.abc.Stream = socket
            core.start_connection(trio.current_time())
            with _fail_after_timeout("the server sent no INFO"):
                info = await _read_info(socket, core)
                if info.max_payload < self._min_payload_bytes:
                    raise _ConnectionEndedError(
                        f"the server accepts messages of {info.max_payload} bytes (max_payload), "
                        f"expected at least {self._min_payload_bytes}"
                    )
                if info.tls_required or server.tls:
                    if not (info.tls_required or info.tls_available):
                        raise _ConnectionEndedError(
                            "the server does not offer TLS, which the address requires"
                        )
                    stream = await self._encrypt(socket, server)
            core.send_connect()
            self._switch_requested = trio.Event()
            end_reason: Exception | None = None
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream)
                    nursery.start_soon(self._tick)
                    nursery.start_soon(self._wait_for_switch)
                    nursery.start_soon(self._read, stream, server)
            except* _END_ERRORS as group:
                end_reason = _most_specific_error(group)
            finally:
                self._on_lost(server, end_reason)
            # Python 3.11.2 would wrap an error raised in the except block in a group again.
            if end_reason is not None:
                raise end_reason

    async def _encrypt(self, socket: trio.SocketStream, server: NatsAddress) -> trio.abc.Stream:
        context = self._tls or ssl.create_default_context()
        stream = trio.SSLStream(socket, context, server_hostname=server.host, https_compatible=True)
        await stream.do_handshake()
        return stream

    def _on_lost(self, server: NatsAddress, end_reason: Exception | None) -> None:
        was_ready = self.core.is_ready
        self.core.end_connection()
        for send in self._reply_channels.values():
            send.close()
        self._reply_channels.clear()
        for channel in self._message_channels.values():
            channel.close()
        self._message_channels.clear()
        self._emptied.set()
        self._emptied = trio.Event()
        if was_ready:
            detail = "" if end_reason is None else f": {_describe_error(end_reason)}"
            self._handle(NatsConnectionLost(f"lost the connection to NATS at {server}{detail}"))

    async def _read(self, stream: trio.abc.Stream, server: NatsAddress) -> None:
        error_text = ""
        while True:
            data = await stream.receive_some(_READ_BYTES)
            if not data:
                raise _ConnectionEndedError(error_text or "the server closed the connection")
            for event in self.core.receive(data, trio.current_time()):
                match event:
                    case ServerReady(info=info):
                        self._on_connected(server, info)
                    case ServerInfo(ldm=True):
                        raise _ConnectionEndedError("the server is shutting down")
                    case ServerInfo():
                        self._update_discovered_servers(event)
                    case ServerError(text=error_text):
                        if not self.core.is_ready:
                            raise _ConnectionEndedError(
                                f"the server refused the connection: {error_text}"
                            )
                        log.log(
                            self._problem_level,
                            "nats.error_reported",
                            "NATS at {server} reported an error: {error}",
                            server=server,
                            error=error_text,
                        )
                    case RequestReplies():
                        self._dispatch_replies(event)
                        continue
                    case ReceivedMessages() if self._message_channels:
                        self._dispatch_messages(event)
                        continue
                self._handle(event)
            self.flush()
            if len(data) < _READ_BYTES:  # A full read means that more data is there already.
                for read_bytes, seconds in _READ_DELAYS:
                    if len(data) > read_bytes:
                        await trio.sleep(seconds)
                        break

    def _on_connected(self, server: NatsAddress, info: ServerInfo) -> None:
        self.connection_count += 1
        self.server = str(server)
        self._update_discovered_servers(info)
        self._preferred_server = None
        log.log(
            self._connected_level, "nats.connected", "connected to NATS at {server}", server=server
        )
        self._changed.set()
        self._changed = trio.Event()

    def _update_discovered_servers(self, info: ServerInfo) -> None:
        """Remember the servers that INFO announces."""
        addresses = (_parse_address(text) for text in info.connect_urls)
        self._discovered_servers = [address for address in addresses if address is not None]

    def _dispatch_replies(self, replies: RequestReplies) -> None:
        """Pass replies to their requests, and the others to `handle`."""
        if not self._reply_channels:
            self._handle(replies)
            return
        unrequested_rows = []
        for row, number in enumerate(replies.numbers.tolist()):
            send = self._reply_channels.pop(number, None)
            if send is None:
                unrequested_rows.append(row)
                continue
            send.send_nowait((replies.messages.headers(row), replies.messages.payload(row)))
        if len(unrequested_rows) == replies.messages.count:
            self._handle(replies)
        elif unrequested_rows:
            rows = np.array(unrequested_rows)
            self._handle(RequestReplies(replies.numbers[rows], replies.messages.pick(rows)))

    def _dispatch_messages(self, messages: ReceivedMessages) -> None:
        """Pass messages to `request_many`, and the others to `handle`."""
        for sid, part in messages.split_by_sid().items():
            send = self._message_channels.get(sid)
            if send is not None:
                send.send_nowait(part)
            else:
                self._handle(part)

    async def _write(self, stream: trio.abc.Stream) -> None:
        core = self.core
        while True:
            while output := core.drain_output():
                for part in _join_short_parts(output):
                    await stream.send_all(part)
            self._emptied.set()
            self._emptied = trio.Event()
            self._wakeup = trio.Event()
            if core.output_bytes:
                continue
            await self._wakeup.wait()

    async def _wait_for_switch(self) -> None:
        await self._switch_requested.wait()
        raise _ConnectionEndedError(self._switch_reason)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(_TICK_SECONDS)
            now = trio.current_time()
            self.core.tick(now)
            for scope, request in self._open_requests.items():
                is_alive = self.core.last_received_at > now - request.seconds
                if is_alive and not self.core.is_ping_answered(request.ping_number):
                    scope.deadline = min(now + request.seconds, request.deadline)
            self.flush()


def _describe_error(error: Exception) -> str:
    """Return the cause of a lost connection, which trio's own error does not contain."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate is not trusted ({cause.verify_message}); expected a "
            "certificate for this host, signed by a trusted authority"
        )
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed ({cause.reason or cause})"
    return str(error) or str(cause or "") or type(error).__name__


def _remove_status(messages: ReceivedMessages) -> tuple[ReceivedMessages, bool]:
    """Return the messages without status messages, and True if a status ends the request.

    Raises JetStreamError if there are no responders.
    """
    is_status = (messages.payloads == messages.ends) & (messages.bodies < messages.payloads)
    ended = False
    for row in is_status.nonzero()[0].tolist():
        code, words = jetstream_codec.parse_status(messages.headers(row))
        if code == jetstream_codec.NO_RESPONDERS:
            raise JetStreamError(code, f"no responders: {words or 'there is no leader now'}")
        is_status[row] = bool(code)
        ended |= code > 100
    return (messages.pick(~is_status) if is_status.any() else messages), ended


def _join_short_parts(output: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the output in few parts: short ones are joined, long ones stay as they are."""
    short: list[bytes | memoryview] = []
    for part in output:
        if len(part) < _UNJOINED_BYTES_MIN:
            short.append(part)
            continue
        if short:
            yield b"".join(short)
            short.clear()
        yield part
    if short:
        yield b"".join(short)


async def _read_info(stream: trio.abc.ReceiveStream, core: NatsClientCore) -> ServerInfo:
    """Return the INFO that the server sends first."""
    while True:
        data = await stream.receive_some(_READ_BYTES)
        if not data:
            raise _ConnectionEndedError("the server closed the connection")
        for event in core.receive(data, trio.current_time()):
            match event:
                case ServerInfo():
                    return event
                case ServerError(text=text):
                    raise _ConnectionEndedError(f"the server refused the connection: {text}")


@contextmanager
def _fail_after_timeout(problem: str) -> Iterator[None]:
    try:
        with trio.fail_after(CONNECT_SECONDS):
            yield
    except trio.TooSlowError:
        raise _ConnectionEndedError(f"{problem} within {CONNECT_SECONDS:g} s") from None


def _most_specific_error(group: BaseExceptionGroup[Exception]) -> Exception:
    """Return the most specific of several errors."""
    errors: list[Exception] = []
    for exception in group.exceptions:
        errors.append(
            _most_specific_error(exception)
            if isinstance(exception, BaseExceptionGroup)
            else exception
        )
    return min(errors, key=lambda error: isinstance(error, trio.BrokenResourceError))


def _parse_address(text: str) -> NatsAddress | None:
    try:
        return NatsAddress.parse(text)
    except ValueError:
        return None
