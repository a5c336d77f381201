"""HTTP for operators, on a trio clock: sockets bring questions, `monitor` has the answers.

Rule 1: whoever asks may not hurt the bus. Connections, bytes and waits are bounded; one answer is
made at a time, and after each the loop has nine times as long for everything else.
Rule 2: a connection that waits for its peer is never worth more than a new one: when there are too
many, the one that has been silent longest is closed, of the place that has most of them.
Rule 3: health is told to whoever asks for it, however many others come: who is not told in time
starts the server again.
"""

from __future__ import annotations

import http
import logging
import re
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import h11
import trio

from simplebus.core.session.rate_limits import address_network
from simplebus.monitor.board import TICK_SECONDS, Board
from simplebus.monitor.requests import (
    METHODS,
    OPEN_PATHS,
    Answer,
    BadRequestError,
    Request,
    Response,
    problem,
)
from simplebus.nats.server.users import certificate_names
from simplebus.server import listeners, process
from simplebus.server.http.auth import Names
from simplebus.server.http.stream import HttpStream
from simplebus.server.preauth.address_limits import KeyedTokenBuckets, is_loopback
from simplebus.server.preauth.queue import Anteroom
from simplebus.server.tls.handshake import HandshakeError

log = logging.getLogger("simplebus.server")

CONNECTIONS_MAX = 64
HEAD_BYTES_MAX = 16 * 1024
HEADERS_MAX = 64
COMERS_AT_ONCE, COMERS_PER_SECOND = 100, 50.0
"""Connections of one address: more wait before anything is read, so many of all;"""
WAITING_MAX = 64
"""more are closed, so that whoever waits is heard in the end,"""
DOORSTEP_MAX = 128
"""but not before so many others have come: those that ask for health are told."""
REQUESTS_MAX = 1000
"""Of one connection."""
HEAD_SECONDS_MAX = 5.0
"""From the first byte of a request to the end of its head; and for a handshake."""
IDLE_SECONDS_MAX = 75.0
"""Between two requests."""
SEND_SECONDS_MAX = 10.0
FAREWELL_SECONDS_MAX = 1.0
PART_OF_LOOP = 0.1
"""How much of the event loop's time answers may take, whoever asks for how many."""
_HEALTH_ASKED = re.compile(rb"(GET|HEAD) (%b) HTTP/1\.[01]\r\n" % "|".join(OPEN_PATHS).encode())


class Gate(Protocol):
    """Who is answered."""

    def __call__(
        self, request: Request, peer: str, authorization: str, certified: Sequence[str], /
    ) -> Awaitable[Response | None]:
        """Says of a question, who asks, the Authorization that came with it and the names of the
        certificate that was shown why it is not answered, or None."""

    def decides_by(self, authorization: str) -> bool:
        """Whether nobody is answered who says this and is not who it says."""


T = TypeVar("T")

_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "default-src 'none'"),
)
"""Of every answer that does not say otherwise."""


class HttpDoor:
    """Enter `run` in a nursery; then `serve` each accepted socket."""

    def __init__(
        self,
        board: Board,
        more: Mapping[str, Answer] | None = None,
        *,
        gate: Gate | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        names: Iterable[str] = (),
        anteroom: Anteroom | None = None,
    ) -> None:
        """`more` are answers besides the board's own; `tls` gives what a new connection is wrapped
        with, None for HTTP in clear; `names` are what the door is called; `anteroom` is that of all
        doors, None for one of its own."""
        self.board = board
        self._routes = board.routes(more)
        self.gate = gate
        self.tls = tls
        self.names = Names(names)
        self.anteroom = Anteroom() if anteroom is None else anteroom
        self._has_own_anteroom = anteroom is None
        self.accepted = self.answered = self.turned_away = 0
        """Connections; requests; connections that made place or came too fast, and requests that
        made no sense."""
        self.spent_seconds = 0.0
        """Processor time of the event loop for what is answered, and for looking once a second."""
        self._connections: dict[_HttpConnection, None] = {}
        """Who has been silent longest comes first."""
        self._comers = KeyedTokenBuckets(COMERS_AT_ONCE, COMERS_PER_SECOND)
        self._waiting: deque[tuple[socket.socket, str]] = deque()
        """Who has come too fast,"""
        self._doorstep: deque[socket.socket] = deque()
        """and who is not to wait."""
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._turn = trio.Lock()
        self._free_at = 0.0
        """When the next answer may be made."""

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled. Every connection is a task in here."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._let_in)
            if self._has_own_anteroom:
                nursery.start_soon(self.anteroom.run)
            task_status.started()
            await self._tick()

    async def accept(self, listener: socket.socket) -> None:
        """Accept for ever, also where no descriptors are left for peers of the bus."""
        spare = process.SPARE_FOR_OPERATORS
        make_room = self._make_room
        await listeners.accept(
            listener, self.serve, self.anteroom, spare=spare, make_room=make_room
        )

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Take over a connected, non-blocking socket."""
        assert self._nursery is not None, "the door is not running"
        self.accepted += 1
        if self._comers.take_token(address_network(listeners.host_of(peer)), trio.current_time()):
            self._begin(sock, peer)
            return
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append((sock, peer))
        else:
            self._doorstep.append(sock)
            if len(self._doorstep) > DOORSTEP_MAX:
                self._turn_away(self._doorstep.popleft())
        self._wake.set()

    async def _let_in(self) -> None:
        """Let those in who have come too fast, one after the other."""
        try:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._waiting:
                    await trio.sleep(1 / COMERS_PER_SECOND)
                    self._begin(*self._waiting.popleft())
                while self._doorstep:
                    self._turn_away(self._doorstep.popleft())
        finally:
            for sock in [*(sock for sock, _ in self._waiting), *self._doorstep]:
                sock.close()

    def _turn_away(self, sock: socket.socket) -> None:
        """Close a socket. If health was asked for, it is told."""
        self.turned_away += 1
        with sock, suppress(OSError):
            said = sock.recv(HEAD_BYTES_MAX) if self.tls is None else b""
            found = _HEALTH_ASKED.match(said)
            if found is not None and said.endswith(b"\r\n\r\n"):
                response = _made(self._routes.answer(Request(found[2].decode())))
                sock.send(_alone(response, without_body=found[1] == b"HEAD"))

    def _begin(self, sock: socket.socket, peer: str) -> None:
        assert self._nursery is not None
        if len(self._connections) >= CONNECTIONS_MAX:
            self._make_room(peer)
        connection = _HttpConnection(sock, peer, self)
        self._connections[connection] = None
        self._nursery.start_soon(connection.run)

    def _make_room(self, peer: str) -> bool:
        """Of the place with most connections, have the one go that has been silent longest; one
        that is answered only if all there are. Returns whether there was any."""
        if not self._connections:
            return False
        self.turned_away += 1
        counts = Counter(each.place for each in self._connections)
        most = max(counts.values())
        fullest = [each for each in self._connections if counts[each.place] == most]
        longest = next((each for each in fullest if not each.is_answered), fullest[0])
        del self._connections[longest]  # Who comes next is not to choose it again.
        longest.scope.cancel()
        return True

    def heard(self, connection: _HttpConnection) -> None:
        """It is the one that has said something last."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def closed(self, connection: _HttpConnection) -> None:
        self._connections.pop(connection, None)

    async def answer(self, request: Request) -> Response:
        """What is answered."""
        self.board.now = trio.current_time()
        making = self._routes.answer(request)
        try:
            # Health costs next to nothing, and whoever waits for it for long restarts the server.
            is_health = request.path in OPEN_PATHS
            response = _made(making) if is_health else await self.make(making)
        except Exception:
            log.exception("the answer about %.80r failed", request.path)
            return problem(500, "the answer could not be made; the server's log says why")
        self.answered += 1
        return response

    async def _tick(self) -> None:
        """Have the board look once per second."""
        due = trio.current_time()
        while True:
            due = max(due + TICK_SECONDS, trio.current_time())
            self.board.now = trio.current_time()
            try:
                await self.make(self.board.tick())
            except Exception:
                log.exception("looking at the figures failed")
            await trio.sleep_until(due)

    async def make(self, making: Generator[None, None, T]) -> T:
        """Make something, one thing at a time, and leave the loop to others for long enough. Raises
        what is wrong with the making."""
        async with self._turn:
            await trio.sleep_until(self._free_at)
            took = 0.0
            try:
                while True:
                    began, spent = trio.current_time(), time.thread_time()
                    try:
                        next(making)
                    except StopIteration as made:
                        result: T = made.value
                        return result
                    finally:
                        took += trio.current_time() - began
                        self.spent_seconds += time.thread_time() - spent
                    await trio.lowlevel.checkpoint()
            finally:
                making.close()
                self._free_at = trio.current_time() + took * (1 / PART_OF_LOOP - 1)


def _made(making: Generator[None, None, T]) -> T:
    """What is made, at once."""
    while True:
        try:
            next(making)
        except StopIteration as made:
            result: T = made.value
            return result


def warn_of_open_door(hosts: Iterable[str]) -> None:
    """Say it where the network comes in without being asked who it is."""
    if seen := [host for host in hosts if not is_loopback(host)]:
        log.warning(
            "whoever reaches %s may see the figures, and the names of who is there: nobody is "
            "asked who he is",
            " and ".join(seen),
        )


async def open_door(
    board: Board, hosts: Iterable[str], port: int, nursery: trio.Nursery
) -> tuple[str, ...]:
    """Open a door for a program that has no other one, until the nursery ends. Returns HOST:PORT of
    each listener. Raises OSError when one cannot be had."""
    hosts = tuple(hosts)
    sockets = await listeners.bind_all(hosts, port)
    warn_of_open_door(hosts)
    door = HttpDoor(board, names=hosts)
    await nursery.start(door.run)
    for sock in sockets:
        nursery.start_soon(door.accept, sock)
    return tuple(listeners.name(sock.getsockname()) for sock in sockets)


class _HttpConnection:
    """One peer. Resources: owns the socket; `run` closes it. Errors: only Cancelled escapes."""

    def __init__(self, sock: socket.socket, peer: str, door: HttpDoor) -> None:
        self.peer = peer
        self.scope = trio.CancelScope()
        self.is_answered = False
        """Whether what it has asked for is being answered: it does not wait for its peer."""
        self._door = door
        self._is_local = is_loopback("".join(sock.getsockname()[:1]))
        self.place = address_network(listeners.host_of(peer))
        guest = door.anteroom.enter(sock, (type(door), self.place))
        self._stream = HttpStream(sock, guest, door.tls)
        self._talk = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)

    async def run(self) -> None:
        """Answer until the peer leaves, says nothing that makes sense, or is too slow."""
        try:
            with self.scope:
                await self._stream.begin(HEAD_SECONDS_MAX)
                for _ in range(REQUESTS_MAX):
                    if not await self._answer_next():
                        break
                    self.is_answered = False
        except (trio.TooSlowError, HandshakeError, OSError):
            pass
        except Exception:
            log.exception("%s: an answer over HTTP failed", self.peer)
        finally:
            await self._end()

    async def _end(self) -> None:
        """Close, so that what was sent last arrives, unless its place is needed."""
        try:
            if self._talk.our_state in (h11.MUST_CLOSE, h11.ERROR) and not self.scope.cancel_called:
                self.is_answered = False
                deadline = trio.current_time() + FAREWELL_SECONDS_MAX
                with trio.CancelScope(shield=True, deadline=deadline) as self.scope:
                    await self._stream.end()
        except OSError:
            pass
        finally:
            self._door.closed(self)
            self._stream.close()

    async def _answer_next(self) -> bool:
        """Answer one request. Returns whether another one may come."""
        asked: h11.Request | None = None
        try:
            asked = await self._hear()
            if asked is None:
                return False
            self.is_answered = True
            response = self._refusal(asked)
            if response is None:
                request = self._request(asked)
                response = await self._denial(request, asked) or self._misdirected(request, asked)
                if response is None:
                    self._stream.is_known = self._stream.is_known or request.path not in OPEN_PATHS
                    response = await self._door.answer(request)
        except h11.RemoteProtocolError as error:
            self._door.turned_away += 1
            if self._talk.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                return False
            status = error.error_status_hint or 400
            await self._say(problem(status, f"that is no request: {error}"), is_last=True)
            return False
        except BadRequestError as error:
            response = problem(400, str(error))
        await self._say(response, without_body=asked is not None and asked.method == b"HEAD")
        if self._talk.our_state is not h11.DONE or self._talk.their_state is not h11.DONE:
            return False
        self._talk.start_next_cycle()
        return True

    async def _hear(self) -> h11.Request | None:
        """The next request; None at the end. Raises h11.RemoteProtocolError, TooSlowError."""
        request: h11.Request | None = None
        deadline = trio.current_time() + IDLE_SECONDS_MAX
        has_begun = False
        while True:
            if self._talk.trailing_data[0] and not has_begun:
                has_begun, deadline = True, trio.current_time() + HEAD_SECONDS_MAX
            event = self._talk.next_event()
            if event is h11.NEED_DATA:
                data = await self._stream.receive(deadline)
                self._door.heard(self)
                if not has_begun:
                    has_begun, deadline = True, trio.current_time() + HEAD_SECONDS_MAX
                self._talk.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
                if _has_body(event):
                    return event  # It is not read: the connection ends behind the answer.
            elif isinstance(event, h11.EndOfMessage):
                return request
            else:  # The peer has left, or there is nothing more that could be understood.
                return None

    def _refusal(self, asked: h11.Request) -> Response | None:
        """Why a request is not answered, whatever it asks for."""
        if asked.method.decode("ascii") not in METHODS:
            refused = problem(405, f"expected {' or '.join(METHODS)}")
            return Response(refused.body, status=405, headers=(("Allow", ", ".join(METHODS)),))
        if _has_body(asked):
            return problem(413, "expected a request without a body")
        if len(asked.headers) > HEADERS_MAX:
            return problem(431, f"expected at most {HEADERS_MAX} headers, got {len(asked.headers)}")
        return None

    def _request(self, asked: h11.Request) -> Request:
        """Raises BadRequestError."""
        return Request.of(
            asked.target.decode("ascii", "replace"),
            _headers(asked).get(b"accept", b"").decode("latin-1"),
        )

    def _misdirected(self, request: Request, asked: h11.Request) -> Response | None:
        if not self._is_local or self._door.tls is not None or request.path in OPEN_PATHS:
            return None
        headers = _headers(asked)
        said = headers.get(b"authorization", b"").decode("latin-1")
        if self._door.gate is not None and self._door.gate.decides_by(said):
            return None
        return self._door.names.refusal(headers.get(b"host", b""))

    async def _denial(self, request: Request, asked: h11.Request) -> Response | None:
        if self._door.gate is None:
            return None
        authorization = _headers(asked).get(b"authorization", b"").decode("latin-1")
        certified = certificate_names(self._stream.certificate())
        denial = await self._door.gate(request, self.peer, authorization, certified)
        await self._stream.turn()
        return denial

    async def _say(
        self, response: Response, *, without_body: bool = False, is_last: bool = False
    ) -> None:
        headers = [*response.headers]
        named = {name.lower() for name, _ in headers}
        headers += [(name, value) for name, value in _HEADERS if name.lower() not in named]
        headers += [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
        ]
        if is_last or self._talk.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        phrase = http.HTTPStatus(response.status).phrase
        head = h11.Response(status_code=response.status, reason=phrase, headers=headers)
        events: list[h11.Event] = [head]
        if not without_body:
            events.append(h11.Data(data=response.body))
        data = b"".join(self._talk.send(event) or b"" for event in [*events, h11.EndOfMessage()])
        await self._stream.send(data, SEND_SECONDS_MAX)


def _alone(response: Response, *, without_body: bool) -> bytes:
    """An answer behind which nothing comes."""
    talk = h11.Connection(h11.SERVER)
    headers = [
        *_HEADERS,
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        ("Connection", "close"),
    ]
    phrase = http.HTTPStatus(response.status).phrase
    head = talk.send(h11.Response(status_code=response.status, reason=phrase, headers=headers))
    return (head or b"") + (b"" if without_body else response.body)


def _headers(asked: h11.Request) -> Mapping[bytes, bytes]:
    """By their names, in lower case; of two of one name the last one."""
    return dict(asked.headers)


def _has_body(asked: h11.Request) -> bool:
    headers = _headers(asked)
    return (
        headers.get(b"content-length", b"0").strip(b"0 ") != b"" or b"transfer-encoding" in headers
    )
