"""A connection to a NATS server, one of several, that is made again when it is lost.

Rule 1: what is to be done when something comes is done at once, in `handle`, which never waits.
Rule 2: nothing is sent twice and nothing is kept for later: what was said while there is no
connection, or was not sent when it was lost, is nowhere. Who needs more asks for answers.
Rule 3: servers are tried in turn, at random from the first on; behind a round in vain comes a
pause, longer each time. Servers that one of them names are tried as well.
Rule 4: what waits to be sent is bounded for whom `room` is awaited before saying more.
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
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import ClientCore, Ready, Replies, Said
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.events import Complaint, Info, Messages
from simplebus.nats.client.jetstream_codec import JetStreamError

log = logging.getLogger("simplebus.engine")

OUTPUT_BYTES_MAX = 4 * 1024 * 1024
"""With more that waits to be sent, `room` waits."""
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 5.0
REQUEST_SECONDS_MAX = 60.0
"""What is asked behind much else is on its way for long before anybody can answer it: as long as it
is, and something is heard of the server, it is waited for, up to this."""
PING_SECONDS = 5.0
"""A server that is silent so long is asked whether it is there; three times as long, and it is not:
one that loses its power or its network says no word."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.05, 5.0
_PORT = 4222
_ALONE_BYTES = 64 * 1024
_READ_BYTES = 512 * 1024
_TICK_SECONDS = 1.0
_RESTS = ((64 * 1024, 0.010), (24 * 1024, 0.005), (4 * 1024, 0.002))
"""Behind a read of more bytes than this the next one waits for so many seconds: a few large pieces
cost less than many small ones."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """A server, as `nats://[user[:password]@]host[:port]` or `tls://…` names it."""

    host: str
    port: int = _PORT
    tls: bool = False
    """Whether it has to speak TLS."""
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, text: str) -> NatsAddress:
        """Raises ValueError for a text that names no server, and shows no secret of it."""
        if "://" not in text:
            text = f"nats://{text}"
        try:
            parts = urlsplit(text)
            port = _PORT if parts.port is None else parts.port
        except ValueError:
            raise _no_address(text) from None
        is_known = parts.scheme in ("nats", "tls") and parts.hostname and port
        if not is_known or parts.path.strip("/"):
            raise _no_address(text)
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
        """Who it says one is: a user with a password, or a token; None for nobody."""
        if self.password:
            return Credentials(user=self.user, password=self.password)
        return Credentials(token=self.user) if self.user else None


def _no_address(text: str) -> ValueError:
    shown = re.sub(r"(?<=//).*@", "…@", text)
    return ValueError(f"{shown!r}: expected nats://HOST[:PORT] or tls://HOST[:PORT]")


@dataclass(slots=True)
class Lost:
    """The connection is gone."""

    why: str


Event = Said | Lost


def new_inbox() -> str:
    """A subject that is nobody else's."""
    return f"_INBOX.{secrets.token_hex(11)}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """Something that is to be answered."""

    mark: int
    """By which it is known whether the server has it,"""
    seconds: float
    """how long it may take from then on,"""
    most: float
    """and until when it is waited for at most."""


class _GoneError(Exception):
    """The connection has ended, for this reason."""


_ENDS = (OSError, trio.BrokenResourceError, RemoteProtocolError, _GoneError)
"""What a connection ends with."""


class Link:
    """Enter `run` in a nursery. See the module's law."""

    def __init__(
        self,
        servers: list[NatsAddress],
        handle: Callable[[Event], None],
        *,
        name: str = "simplebus",
        credentials: Credentials | None = None,
        tls: ssl.SSLContext | None = None,
        echo: bool = True,
        ping_seconds: float = PING_SECONDS,
        payload_bytes_least: int = 0,
        is_quiet: bool = False,
    ) -> None:
        """`handle` is called with everything that happens; what answers `request` is not among
        it. `tls` says who is trusted; None for whom the system trusts. A server that takes no
        messages of `payload_bytes_least` is none to be connected to: it would end the connection
        with each. One that `is_quiet` leaves it to its user to tell what becomes of connections."""
        if not servers:
            raise ValueError("no NATS server was named, expected one at least")
        if credentials is None:
            credentials = servers[0].credentials
        self.core = ClientCore(
            inbox=new_inbox(),
            name=name,
            credentials=credentials,
            echo=echo,
            ping_seconds=ping_seconds,
        )
        self.server = ""
        """Which one it is, or was, connected to."""
        self.connections = 0
        """How often it was connected."""
        self.problem = ""
        """Why there was no connection when all servers were tried last."""
        self._handle = handle
        self._tls = tls
        self._payload_bytes_least = payload_bytes_least
        self._tell = log.debug if is_quiet else log.warning
        self._tell_good = log.debug if is_quiet else log.info
        self._servers = list(servers)
        random.shuffle(self._servers)
        self._told: list[NatsAddress] = []
        """Servers that are known from the last one."""
        self._next: NatsAddress | None = None
        """Which one is to be tried first,"""
        self._why_leave = ""
        """and why,"""
        self._leaves = trio.Event()
        """once the one that it is connected to is to be left."""
        self._wakeup = trio.Event()
        self._emptied = trio.Event()
        self._changed = trio.Event()
        self._waiting: dict[int, trio.MemorySendChannel[tuple[bytes, bytes]]] = {}
        """Whose answers come one by one, by number."""
        self._asked: dict[trio.CancelScope, _Asked] = {}
        """What is asked: in which block it is waited for."""
        self._collecting: dict[int, trio.MemorySendChannel[Messages]] = {}
        """Who is sent several answers, by sid."""

    @property
    def is_ready(self) -> bool:
        return self.core.is_ready

    @property
    def payload_bytes_max(self) -> int:
        """How long a message of this cluster may be, its headers included."""
        return Info().max_payload if self.core.info is None else self.core.info.max_payload

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, again and again, until cancelled."""
        task_status.started()
        pause = PAUSE_SECONDS_MIN
        has_complained = False
        while True:
            errors: list[str] = []
            for server in self._known():
                before = self.connections
                try:
                    await self._serve(server)
                except _ENDS as error:
                    why = _why(error)
                    if self.connections > before:
                        self._tell("the connection to NATS at %s is lost: %s", server, why)
                        pause, errors, has_complained = PAUSE_SECONDS_MIN, [], False
                        break
                    errors.append(f"{server}: {why}")
            self.problem = "; ".join(sorted(errors))  # In whatever order they were tried.
            if errors and not has_complained:
                self._tell("no NATS server can be reached, trying on: %s", self.problem)
                has_complained = True
            await trio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _known(self) -> list[NatsAddress]:
        """Servers to be tried, the last one last."""
        known = [*self._servers, *(t for t in self._told if t not in self._servers)]
        known.sort(key=lambda server: (server != self._next, str(server) == self.server))
        return known

    def others(self) -> list[NatsAddress]:
        """Servers that are known besides the one that it is connected to."""
        return [server for server in self._known() if str(server) != self.server]

    def go_to(self, server: NatsAddress, why: str) -> None:
        """Leave the server that it is connected to, as if the connection were lost, and try this
        one first."""
        self._next, self._why_leave = server, why
        self._leaves.set()

    async def wait_ready(self) -> None:
        """Wait until there is a connection."""
        while not self.core.is_ready:
            await self._changed.wait()

    # Saying --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """The core has been told something: have it sent. To be called whenever that is so."""
        if self.core.output_bytes:
            self._wakeup.set()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that `room` would wait."""
        return self.core.output_bytes > OUTPUT_BYTES_MAX

    async def room(self) -> None:
        """Wait while too much waits to be sent. Raises BusConnectionError when it is lost."""
        while self.is_full and self.core.is_ready:
            await self._emptied.wait()
        if not self.core.is_ready:
            raise BusConnectionError("there is no connection to a NATS server")

    async def request(
        self, subject: str, payload: bytes = b"", *, seconds: float = REQUEST_SECONDS
    ) -> tuple[bytes, bytes]:
        """Ask, and wait for the answer: its headers, and what it says.

        Raises BusConnectionError when there is no connection, it is lost meanwhile, or nothing was
        answered in time, which begins when the server has what is asked.
        """
        if not self.core.is_ready:
            raise BusConnectionError("there is no connection to a NATS server")
        number = self.core.request(subject, payload)
        send, receive = trio.open_memory_channel[tuple[bytes, bytes]](1)
        self._waiting[number] = send
        self.flush()
        try:
            with self._answered(subject, seconds):
                return await receive.receive()
        finally:
            self._waiting.pop(number, None)

    async def collect(
        self, subject: str, payload: bytes = b"", *, most: int, seconds: float = REQUEST_SECONDS
    ) -> list[Messages]:
        """Ask for several messages: up to `most` of them, or until it is said that there are no
        more. Raises BusConnectionError as `request` does, and JetStreamError."""
        if not self.core.is_ready:
            raise BusConnectionError("there is no connection to a NATS server")
        core = self.core
        inbox = new_inbox()
        sid = core.subscribe(inbox)
        send, receive = trio.open_memory_channel[Messages](math.inf)  # No more than is asked for.
        self._collecting[sid] = send
        core.publish(subject, payload, reply=inbox)
        self.flush()
        found: list[Messages] = []
        count = 0
        try:
            with self._answered(subject, seconds):
                while count < most:
                    messages, ended = _without_status(await receive.receive())
                    if messages.count:
                        found.append(messages)
                        count += messages.count
                    if ended:
                        break
        finally:
            self._collecting.pop(sid, None)
            core.unsubscribe(sid)
            self.flush()
        return found

    @contextmanager
    def _answered(self, subject: str, seconds: float) -> Iterator[None]:
        """Wait for answers. Raises BusConnectionError where they do not come."""
        mark, most = self.core.mark(), trio.current_time() + REQUEST_SECONDS_MAX
        self.flush()
        try:
            with trio.fail_after(seconds) as scope:
                self._asked[scope] = _Asked(mark, seconds, most)
                try:
                    yield
                finally:
                    del self._asked[scope]
        except trio.TooSlowError:
            raise BusConnectionError(
                f"{subject} was not answered within {seconds:g} s by NATS at {self.server}"
            ) from None
        except trio.EndOfChannel:
            raise BusConnectionError(
                f"the connection to NATS at {self.server} was lost while {subject} was asked"
            ) from None

    async def ask(
        self, subject: str, body: dict[str, Any] | None = None, *, seconds: float = REQUEST_SECONDS
    ) -> dict[str, Any]:
        """A request of JetStream's API, such as `STREAM.INFO.orders`. Raises BusConnectionError as
        `request` does, and JetStreamError."""
        headers, said = await self.request(*jetstream_codec.ask(subject, body), seconds=seconds)
        return jetstream_codec.answer(headers, said, subject)

    # One connection ------------------------------------------------------------------------------

    async def _serve(self, server: NatsAddress) -> None:
        """Be connected to this server until that ends."""
        core = self.core
        with _in_time("it did not let itself be connected to"):
            try:
                socket = await trio.open_tcp_stream(server.host, server.port)
            except UnicodeError as error:  # Servers name others as they like.
                raise _GoneError(f"it can have no address: {error}") from None
        async with socket:
            stream: trio.abc.Stream = socket
            core.open(trio.current_time())
            with _in_time("it did not say what it is"):
                info = await _read_info(socket, core)
                if info.max_payload < self._payload_bytes_least:
                    raise _GoneError(
                        f"it takes messages of {info.max_payload} bytes (max_payload), expected "
                        f"{self._payload_bytes_least}, as when this was started"
                    )
                if info.tls_required or server.tls:
                    if not (info.tls_required or info.tls_available):
                        raise _GoneError("it does not speak TLS, which was asked for")
                    stream = await self._encrypt(socket, server)
            core.greet()
            self._leaves = trio.Event()
            ended: Exception | None = None
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream)
                    nursery.start_soon(self._tick)
                    nursery.start_soon(self._leave)
                    nursery.start_soon(self._read, stream, server)
            except* _ENDS as group:
                ended = _first(group)
            finally:
                self._lose(server, ended)
            if ended is not None:  # Raised in there, Python 3.11.2 would make a group of it again.
                raise ended

    async def _encrypt(self, socket: trio.SocketStream, server: NatsAddress) -> trio.abc.Stream:
        context = self._tls or ssl.create_default_context()
        stream = trio.SSLStream(socket, context, server_hostname=server.host, https_compatible=True)
        await stream.do_handshake()
        return stream

    def _lose(self, server: NatsAddress, ended: Exception | None) -> None:
        was_ready = self.core.is_ready
        self.core.lose()
        for send in self._waiting.values():
            send.close()
        self._waiting.clear()
        for channel in self._collecting.values():
            channel.close()
        self._collecting.clear()
        self._emptied.set()
        self._emptied = trio.Event()
        if was_ready:
            why = "" if ended is None else f": {_why(ended)}"
            self._handle(Lost(f"the connection to NATS at {server} is lost{why}"))

    async def _read(self, stream: trio.abc.Stream, server: NatsAddress) -> None:
        complaint = ""
        while True:
            data = await stream.receive_some(_READ_BYTES)
            if not data:
                raise _GoneError(complaint or "it has closed the connection")
            for event in self.core.receive(data, trio.current_time()):
                match event:
                    case Ready(info=info):
                        self._is_connected(server, info)
                    case Info(ldm=True):
                        raise _GoneError("it shuts down")
                    case Info():
                        self._hear_of(event)
                    case Complaint(says=complaint):
                        if not self.core.is_ready:
                            raise _GoneError(f"it refuses: {complaint}")
                        self._tell("NATS at %s says: %s", server, complaint)
                    case Replies():
                        self._answer(event)
                        continue
                    case Messages() if self._collecting:
                        self._hand_out(event)
                        continue
                self._handle(event)
            self.flush()
            if len(data) < _READ_BYTES:  # Else there is more already.
                for rest_bytes, seconds in _RESTS:
                    if len(data) > rest_bytes:
                        await trio.sleep(seconds)
                        break

    def _is_connected(self, server: NatsAddress, info: Info) -> None:
        self.connections += 1
        self.server = str(server)
        self._hear_of(info)
        self._next = None
        self._tell_good("connected to NATS at %s", server)
        self._changed.set()
        self._changed = trio.Event()

    def _hear_of(self, info: Info) -> None:
        """Servers of the same cluster."""
        told = (_address_of(text) for text in info.connect_urls)
        self._told = [address for address in told if address is not None]

    def _answer(self, replies: Replies) -> None:
        """Give answers to those who wait for them one by one, and the others away."""
        if not self._waiting:
            self._handle(replies)
            return
        others = []
        for row, number in enumerate(replies.numbers.tolist()):
            send = self._waiting.pop(number, None)
            if send is None:
                others.append(row)
                continue
            send.send_nowait((replies.messages.headers(row), replies.messages.payload(row)))
        if len(others) == replies.messages.count:
            self._handle(replies)
        elif others:
            rows = np.array(others)
            self._handle(Replies(replies.numbers[rows], replies.messages.pick(rows)))

    def _hand_out(self, messages: Messages) -> None:
        """Give messages to those who collect them, and the others away."""
        for sid, some in messages.by_sid().items():
            send = self._collecting.get(sid)
            if send is not None:
                send.send_nowait(some)
            else:
                self._handle(some)

    async def _write(self, stream: trio.abc.Stream) -> None:
        core = self.core
        while True:
            while output := core.take_output():
                for part in _joined(output):
                    await stream.send_all(part)
            self._emptied.set()
            self._emptied = trio.Event()
            self._wakeup = trio.Event()
            if core.output_bytes:
                continue
            await self._wakeup.wait()

    async def _leave(self) -> None:
        await self._leaves.wait()
        raise _GoneError(self._why_leave)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(_TICK_SECONDS)
            now = trio.current_time()
            self.core.tick(now)
            for scope, asked in self._asked.items():
                is_alive = self.core.heard_at > now - asked.seconds
                if is_alive and not self.core.has_passed(asked.mark):
                    scope.deadline = min(now + asked.seconds, asked.most)
            self.flush()


def _why(error: Exception) -> str:
    """What a connection has ended with. trio says only that it is broken; why is its cause."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}); expected one that an "
            "authority of this program has signed, for this host"
        )
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed ({cause.reason or cause})"
    return str(error) or str(cause or "") or type(error).__name__


def _without_status(messages: Messages) -> tuple[Messages, bool]:
    """Messages without what is said of the request, and whether that ends it. Raises
    JetStreamError when nobody is there to be asked."""
    told = (messages.payloads == messages.ends) & (messages.bodies < messages.payloads)
    ended = False
    for row in told.nonzero()[0].tolist():
        code, words = jetstream_codec.status(messages.headers(row))
        if code == jetstream_codec.NO_RESPONDERS:
            raise JetStreamError(code, f"nobody answers: {words or 'it has no leader now'}")
        told[row] = bool(code)
        ended |= code > 100
    return (messages.pick(~told) if told.any() else messages), ended


def _joined(output: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same in few parts: a long one goes as it is, others are joined."""
    short: list[bytes | memoryview] = []
    for part in output:
        if len(part) < _ALONE_BYTES:
            short.append(part)
            continue
        if short:
            yield b"".join(short)
            short.clear()
        yield part
    if short:
        yield b"".join(short)


async def _read_info(stream: trio.abc.ReceiveStream, core: ClientCore) -> Info:
    """What the server says first."""
    while True:
        data = await stream.receive_some(_READ_BYTES)
        if not data:
            raise _GoneError("it has closed the connection")
        for event in core.receive(data, trio.current_time()):
            match event:
                case Info():
                    return event
                case Complaint(says=says):
                    raise _GoneError(f"it refuses: {says}")


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    try:
        with trio.fail_after(CONNECT_SECONDS):
            yield
    except trio.TooSlowError:
        raise _GoneError(f"{what} within {CONNECT_SECONDS:g} s") from None


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """Of what happened at once, one that says most."""
    found: list[Exception] = []
    for each in group.exceptions:
        found.append(_first(each) if isinstance(each, BaseExceptionGroup) else each)
    return min(found, key=lambda error: isinstance(error, trio.BrokenResourceError))


def _address_of(text: str) -> NatsAddress | None:
    try:
        return NatsAddress.of(text)
    except ValueError:
        return None
