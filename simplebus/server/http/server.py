"""HTTP server for operators: sockets and limits around the handlers of `monitor`.

Requests must not slow down messages. Connections, bytes and waits are bounded. Responses are
computed one at a time, and the event loop then has nine times as long for other work. If there are
too many connections, the server closes the longest idle connection of the network that has the most
connections. Health checks are answered even then: without an answer, a supervisor would restart the
server.
"""

from __future__ import annotations

import http
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

from simplebus.core.protocol.opening import OPENING_BYTES, Opening
from simplebus.core.session.rate_limits import address_network
from simplebus.core.steps import run_to_end
from simplebus.core.users.certificate_names import certificate_names
from simplebus.logs.event_logger import EventLogger
from simplebus.monitor.dashboard import TICK_SECONDS, Dashboard
from simplebus.monitor.requests import (
    METHODS,
    PUBLIC_PATHS,
    BadRequestError,
    Request,
    RequestHandler,
    Response,
    error_response,
)
from simplebus.server import listeners, process
from simplebus.server.http.api import BODY_BYTES_MAX, AdminApi, ApiRequest
from simplebus.server.http.api_routes import PREFIX
from simplebus.server.http.api_types import ApiError
from simplebus.server.http.auth import AllowedHosts
from simplebus.server.http.stream import HttpStream
from simplebus.server.preauth.address_limits import KeyedTokenBuckets, is_loopback
from simplebus.server.preauth.queue import PreAuthQueue
from simplebus.server.tls.handshake import HandshakeError
from simplebus.server.wrong_port import WrongPortCheck

log = EventLogger("simplebus.server")

CONNECTIONS_MAX = 64
HEAD_BYTES_MAX = 16 * 1024
HEADERS_MAX = 64
CONNECTION_BURST, CONNECTIONS_PER_SECOND = 100, 50.0
"""Burst and rate of new connections of one address. Connections above the rate are delayed."""
DELAYED_MAX = 64
"""Maximum number of delayed connections. Connections beyond it are rejected."""
REJECT_QUEUE_MAX = 128
"""Connections that wait to be rejected, so that a health check among them can be answered."""
REQUESTS_MAX = 1000
"""Requests per connection."""
HEAD_SECONDS_MAX = 5.0
"""Time limit from the first byte of a request to the end of its headers, and of a handshake."""
IDLE_SECONDS_MAX = 75.0
"""Time limit between two requests."""
SEND_SECONDS_MAX = 10.0
CLOSE_SECONDS_MAX = 1.0
LOOP_SHARE = 0.1
"""Share of the event loop's time that responses may take together."""
_API_PREFIX = PREFIX.encode()
_HEALTH_REQUEST = re.compile(rb"(GET|HEAD) (%b) HTTP/1\.[01]\r\n" % "|".join(PUBLIC_PATHS).encode())


class RequestAuth(Protocol):
    """Interface of the authentication of requests."""

    def __call__(
        self, request: Request, peer: str, authorization: str, certificate_names: Sequence[str], /
    ) -> Awaitable[Response | None]:
        """Return an error response, or None if the request is allowed."""

    def requires_valid_credentials(self, authorization: str) -> bool:
        """Return True if a request with this Authorization header is allowed only with valid
        credentials.
        """


T = TypeVar("T")

_SECURITY_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "default-src 'none'"),
)
"""Headers of every response that does not set them itself."""


class HttpServer:
    """Answers HTTP requests.

    Start `run` in a nursery, then call `serve` with each accepted socket.
    """

    def __init__(
        self,
        dashboard: Dashboard,
        extra_handlers: Mapping[str, RequestHandler] | None = None,
        *,
        auth: RequestAuth | None = None,
        api: AdminApi | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        allowed_hosts: Iterable[str] = (),
        preauth_queue: PreAuthQueue | None = None,
        wrong_port_check: WrongPortCheck | None = None,
    ) -> None:
        """Create the server.

        Args:
            dashboard: Source of the monitoring data and its standard handlers.
            extra_handlers: Handlers of further paths.
            auth: Authentication; None allows every request.
            api: Administration; None if the program has none.
            tls: Returns the SSL context for a new connection; None for plain HTTP.
            allowed_hosts: Host names that requests may use.
            preauth_queue: Queue shared with the other listeners; None creates one.
            wrong_port_check: Ports of the other listeners; None if the server has no other
                listener.
        """
        self.dashboard = dashboard
        self._handlers = dashboard.build_routes(extra_handlers)
        self.auth = auth
        self.api = api
        self.tls = tls
        self.allowed_hosts = AllowedHosts(allowed_hosts)
        self.preauth_queue = PreAuthQueue() if preauth_queue is None else preauth_queue
        self._owns_preauth_queue = preauth_queue is None
        self.wrong_port_check = wrong_port_check or WrongPortCheck()
        self.accepted_count = self.answered_count = self.rejected_count = 0
        """Accepted connections, answered requests, and rejected connections and requests."""
        self.cpu_seconds = 0.0
        """CPU time of the event loop for responses and for the periodic snapshot."""
        self._connections: dict[_HttpConnection, None] = {}
        """Open connections; the longest idle connection is the first."""
        self._connection_rate = KeyedTokenBuckets(CONNECTION_BURST, CONNECTIONS_PER_SECOND)
        self._delayed: deque[tuple[socket.socket, str]] = deque()
        """Connections that exceeded the rate and wait."""
        self._reject_queue: deque[socket.socket] = deque()
        """Connections that will be rejected."""
        self._delayed_added = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._response_lock = trio.Lock()
        self._next_response_at = 0.0
        """Time from which the next response may be computed."""

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer requests until cancelled. Each connection runs as a task of this nursery."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._serve_delayed)
            if self._owns_preauth_queue:
                nursery.start_soon(self.preauth_queue.run)
            task_status.started()
            await self._tick()

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled, also with descriptors reserved for operators."""
        spare_descriptors = process.SPARE_HTTP_DESCRIPTORS
        free_descriptor = self._close_idle_connection
        await listeners.accept(
            listener,
            self.serve,
            self.preauth_queue,
            spare_descriptors=spare_descriptors,
            free_descriptor=free_descriptor,
        )

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Serve a connected, non-blocking socket."""
        assert self._nursery is not None, "the server is not running"
        self.accepted_count += 1
        if self._connection_rate.take_token(
            address_network(listeners.host_from_address(peer)), trio.current_time()
        ):
            self._start_connection(sock, peer)
            return
        if len(self._delayed) < DELAYED_MAX:
            self._delayed.append((sock, peer))
        else:
            self._reject_queue.append(sock)
            if len(self._reject_queue) > REJECT_QUEUE_MAX:
                self._reject(self._reject_queue.popleft())
        self._delayed_added.set()

    async def _serve_delayed(self) -> None:
        """Serve the delayed connections at the allowed rate, and reject the rest."""
        try:
            while True:
                await self._delayed_added.wait()
                self._delayed_added = trio.Event()
                while self._delayed:
                    await trio.sleep(1 / CONNECTIONS_PER_SECOND)
                    self._start_connection(*self._delayed.popleft())
                while self._reject_queue:
                    self._reject(self._reject_queue.popleft())
        finally:
            for sock in [*(sock for sock, _ in self._delayed), *self._reject_queue]:
                sock.close()

    def _reject(self, sock: socket.socket) -> None:
        """Close a socket; answers a health check that was received completely."""
        self.rejected_count += 1
        with sock, suppress(OSError, h11.RemoteProtocolError):
            data = sock.recv(HEAD_BYTES_MAX) if self.tls is None else b""
            match = _HEALTH_REQUEST.match(data)
            if match is not None and data.endswith(b"\r\n\r\n"):
                response = run_to_end(self._handlers.handle(Request(match[2].decode())))
                protocol, without_body = h11.Connection(h11.SERVER), match[1] == b"HEAD"
                protocol.receive_data(data)
                protocol.next_event()
                sock.send(
                    _encode_response(protocol, response, without_body=without_body, is_last=True)
                )

    def _start_connection(self, sock: socket.socket, peer: str) -> None:
        assert self._nursery is not None
        if len(self._connections) >= CONNECTIONS_MAX:
            self._close_idle_connection(peer)
        connection = _HttpConnection(sock, peer, self)
        self._connections[connection] = None
        self._nursery.start_soon(connection.run)

    def _close_idle_connection(self, peer: str) -> bool:
        """Close the connection that was idle longest, from the network with most connections.

        A connection with a pending response is closed only if there is no other. Returns False
        if there is no connection.
        """
        if not self._connections:
            return False
        self.rejected_count += 1
        counts = Counter(each.network for each in self._connections)
        largest_count = max(counts.values())
        candidates = [each for each in self._connections if counts[each.network] == largest_count]
        longest_idle = next((each for each in candidates if not each.is_responding), candidates[0])
        del self._connections[longest_idle]  # The next call must not choose it again.
        longest_idle.scope.cancel()
        return True

    def mark_active(self, connection: _HttpConnection) -> None:
        """Record that the connection has sent bytes."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def on_closed(self, connection: _HttpConnection) -> None:
        self._connections.pop(connection, None)

    async def answer(self, request: Request) -> Response:
        """Return the response to a request."""
        steps = self._handlers.handle(request)
        try:
            # Health checks are cheap, and a supervisor restarts a server that is slow to answer.
            is_health = request.path in PUBLIC_PATHS
            response = run_to_end(steps) if is_health else await self.run_steps(steps)
        except Exception:
            log.exception("http_request.failed", "answering {path!r:.80} failed", path=request.path)
            return error_response(500, "internal error; see the server's log")
        self.answered_count += 1
        return response

    async def _tick(self) -> None:
        """Take a snapshot of the server once per second."""
        due = trio.current_time()
        while True:
            due = max(due + TICK_SECONDS, trio.current_time())
            try:
                await self.run_steps(self.dashboard.tick())
            except Exception:
                log.exception("monitor_snapshot.failed", "collecting the monitoring data failed")
            await trio.sleep_until(due)

    async def run_steps(self, steps: Generator[None, None, T]) -> T:
        """Run a generator to its end, one at a time, within the share of the event loop's time.

        Returns:
            The result of the generator. Its errors are raised.
        """
        async with self._response_lock:
            await trio.sleep_until(self._next_response_at)
            loop_seconds = 0.0
            try:
                while True:
                    started_at, cpu_started = trio.current_time(), time.thread_time()
                    self.dashboard.now = started_at
                    try:
                        next(steps)
                    except StopIteration as stop:
                        result: T = stop.value
                        return result
                    finally:
                        loop_seconds += trio.current_time() - started_at
                        self.cpu_seconds += time.thread_time() - cpu_started
                    await trio.lowlevel.checkpoint()
            finally:
                steps.close()
                self._next_response_at = trio.current_time() + loop_seconds * (1 / LOOP_SHARE - 1)


def warn_if_public(hosts: Iterable[str]) -> None:
    """Warn if other machines can reach these hosts: there is no authentication."""
    if public_hosts := [host for host in hosts if not is_loopback(host)]:
        log.warning(
            "http.public",
            "every client that reaches {address} can read metrics and client names: HTTP has "
            "no authentication here",
            address=" and ".join(public_hosts),
        )


async def start_http_server(
    dashboard: Dashboard, hosts: Iterable[str], port: int, nursery: trio.Nursery
) -> tuple[str, ...]:
    """Serve monitoring data of a program without other listeners, until the nursery ends.

    Returns:
        HOST:PORT of each listener.

    Raises:
        OSError: An address is not available.
    """
    hosts = tuple(hosts)
    with listeners.explain_port_in_use("is for HTTP: select another one with --http"):
        sockets = await listeners.bind_all(hosts, port)
    warn_if_public(hosts)
    http_server = HttpServer(dashboard, allowed_hosts=hosts)
    await nursery.start(http_server.run)
    for sock in sockets:
        nursery.start_soon(http_server.accept, sock)
    return tuple(listeners.format_address(sock.getsockname()) for sock in sockets)


class _HttpConnection:
    """One HTTP client. Owns the socket; `run` closes it and raises nothing but Cancelled."""

    def __init__(self, sock: socket.socket, peer: str, http_server: HttpServer) -> None:
        self.peer = peer
        self.scope = trio.CancelScope()
        self.is_responding = False
        """True while a response is computed: the server does not wait for the client."""
        self._http_server = http_server
        self._is_loopback = is_loopback("".join(sock.getsockname()[:1]))
        self.network = address_network(listeners.host_from_address(peer))
        preauth = http_server.preauth_queue.add(sock, (type(http_server), self.network))
        self._stream = HttpStream(sock, preauth, http_server.tls)
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)

    async def run(self) -> None:
        """Answer requests until the client closes, sends an invalid request or is too slow."""
        try:
            with self.scope:
                await self._stream.open_transport(HEAD_SECONDS_MAX)
                for _ in range(REQUESTS_MAX):
                    if not await self._handle_next():
                        break
                    self.is_responding = False
        except HandshakeError as error:
            self._refuse_plaintext(error.first_bytes)
        except (trio.TooSlowError, OSError):
            pass
        except Exception:
            log.exception(
                "http_connection.failed", "{peer}: answering an HTTP request failed", peer=self.peer
            )
        finally:
            await self._close()

    def _refuse_plaintext(self, first_bytes: bytes) -> None:
        """Answer in plain text to a client that has not started TLS."""
        error = self._http_server.wrong_port_check.find_error(
            first_bytes, Opening.HTTP_REQUEST, has_tls=True
        )
        if error is not None:
            log.info("http.wrong_port", "{peer}: {error}", peer=self.peer, error=error.sentence)
            response = error_response(400, error.sentence)
            data = _encode_response(h11.Connection(h11.SERVER), response, is_last=True)
            self._stream.send_plaintext(data)

    async def _close(self) -> None:
        """Close the connection. Waits for a limited time until the client has received the last
        response, unless the server closes this connection in favor of a newer one.
        """
        try:
            if (
                self._protocol.our_state in (h11.MUST_CLOSE, h11.ERROR)
                and not self.scope.cancel_called
            ):
                self.is_responding = False
                deadline = trio.current_time() + CLOSE_SECONDS_MAX
                with trio.CancelScope(shield=True, deadline=deadline) as self.scope:
                    await self._stream.finish()
        except OSError:
            pass
        finally:
            self._http_server.on_closed(self)
            self._stream.close()

    async def _handle_next(self) -> bool:
        """Answer one request. Returns True if another one may follow."""
        request_event: h11.Request | None = None
        try:
            request_event = await self._read_request()
            if request_event is None:
                return False
            self.is_responding = True
            response: Response | None
            if self._http_server.api is not None and request_event.target.startswith(_API_PREFIX):
                response = await self._answer_api(self._http_server.api, request_event)
            else:
                response = self._check_request(request_event)
            if response is None:
                request = self._parse_request(request_event)
                response = await self._check_auth(request, request_event) or self._check_host(
                    request, request_event
                )
                if response is None:
                    self._stream.is_authenticated = (
                        self._stream.is_authenticated or request.path not in PUBLIC_PATHS
                    )
                    response = await self._http_server.answer(request)
        except h11.RemoteProtocolError as error:
            self._http_server.rejected_count += 1
            if self._protocol.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                return False
            status = error.error_status_hint or 400
            await self._send_response(
                error_response(status, f"invalid HTTP request: {error}"), is_last=True
            )
            return False
        except BadRequestError as error:
            response = error_response(400, str(error))
        await self._send_response(
            response, without_body=request_event is not None and request_event.method == b"HEAD"
        )
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return True

    async def _read_request(self) -> h11.Request | None:
        """Return the next request, or None. Raises h11.RemoteProtocolError, TooSlowError."""
        request: h11.Request | None = None
        deadline = trio.current_time() + IDLE_SECONDS_MAX
        has_begun = False
        while True:
            if self._protocol.trailing_data[0] and not has_begun:
                has_begun, deadline = True, trio.current_time() + HEAD_SECONDS_MAX
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                data = await self._stream.receive(deadline)
                self._http_server.mark_active(self)
                if not has_begun:
                    has_begun, deadline = True, trio.current_time() + HEAD_SECONDS_MAX
                    self._check_opening(data)
                self._protocol.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
                if _has_body(event):
                    return event  # The body is not read: the connection ends after the response.
            elif isinstance(event, h11.EndOfMessage):
                return request
            else:  # The client has closed, or the stream is invalid.
                return None

    def _check_opening(self, data: bytes) -> None:
        """Check the first data of a request. Raises h11.RemoteProtocolError."""
        check = self._http_server.wrong_port_check
        error = check.find_error(data[:OPENING_BYTES], Opening.HTTP_REQUEST, has_tls=False)
        if error is not None:
            log.info("http.wrong_port", "{peer}: {error}", peer=self.peer, error=error.sentence)
            raise h11.RemoteProtocolError(error.sentence)

    def _check_request(self, request_event: h11.Request) -> Response | None:
        """Return an error response for a request that no path can answer, or None."""
        if request_event.method.decode("ascii") not in METHODS:
            error = error_response(405, f"expected {' or '.join(METHODS)}")
            return Response(error.body, status=405, headers=(("Allow", ", ".join(METHODS)),))
        if _has_body(request_event):
            return error_response(413, "expected a request without a body")
        return _check_header_count(request_event)

    async def _answer_api(self, api: AdminApi, request_event: h11.Request) -> Response:
        """Answer a request to the API. Its body is read after authentication."""
        request = self._parse_request(request_event)
        error = _check_header_count(request_event) or self._check_host(request, request_event)
        if error is not None:
            return error

        async def read_body() -> bytes:
            await self._stream.wait_turn()
            self._stream.is_authenticated = True
            return await self._read_body(request_event)

        api_request = ApiRequest(
            method=request_event.method.decode("ascii"),
            request=request,
            headers=_headers(request_event),
            peer=self.peer,
            certificate_names=certificate_names(self._stream.peer_certificate()),
            read_body=read_body,
        )
        try:
            response = await api.answer(api_request)
        except h11.RemoteProtocolError:
            raise
        except Exception:
            log.exception("http_request.failed", "answering {path!r:.80} failed", path=request.path)
            return error_response(500, "internal error; see the server's log")
        self._http_server.answered_count += 1
        return response

    async def _read_body(self, request_event: h11.Request) -> bytes:
        """Return the body. Raises ApiError, h11.RemoteProtocolError, TooSlowError."""
        length = _headers(request_event).get(b"content-length", b"0")
        if b"transfer-encoding" in _headers(request_event) or int(length) > BODY_BYTES_MAX:
            raise ApiError(413, f"expected a body with a length of at most {BODY_BYTES_MAX} bytes")
        deadline = trio.current_time() + HEAD_SECONDS_MAX
        if self._protocol.they_are_waiting_for_100_continue:
            head = h11.InformationalResponse(status_code=100, headers=[])
            await self._stream.send(self._protocol.send(head) or b"", SEND_SECONDS_MAX)
        body = bytearray()
        while True:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                self._protocol.receive_data(await self._stream.receive(deadline))
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return bytes(body)

    def _parse_request(self, request_event: h11.Request) -> Request:
        """Return the request for a handler. Raises BadRequestError."""
        return Request.parse(
            request_event.target.decode("ascii", "replace"),
            _headers(request_event).get(b"accept", b"").decode("latin-1"),
        )

    def _check_host(self, request: Request, request_event: h11.Request) -> Response | None:
        if (
            not self._is_loopback
            or self._http_server.tls is not None
            or request.path in PUBLIC_PATHS
        ):
            return None
        headers = _headers(request_event)
        data = headers.get(b"authorization", b"").decode("latin-1")
        if self._http_server.auth is not None and self._http_server.auth.requires_valid_credentials(
            data
        ):
            return None
        return self._http_server.allowed_hosts.refusal(headers.get(b"host", b""))

    async def _check_auth(self, request: Request, request_event: h11.Request) -> Response | None:
        if self._http_server.auth is None:
            return None
        authorization = _headers(request_event).get(b"authorization", b"").decode("latin-1")
        peer_names = certificate_names(self._stream.peer_certificate())
        error = await self._http_server.auth(request, self.peer, authorization, peer_names)
        await self._stream.wait_turn()
        return error

    async def _send_response(
        self, response: Response, *, without_body: bool = False, is_last: bool = False
    ) -> None:
        is_last = is_last or self._protocol.their_state is not h11.DONE
        data = _encode_response(
            self._protocol, response, without_body=without_body, is_last=is_last
        )
        await self._stream.send(data, SEND_SECONDS_MAX)


def _encode_response(
    protocol: h11.Connection, response: Response, *, without_body: bool = False, is_last: bool
) -> bytes:
    """Encode a response. The connection is closed after the last one."""
    present_names = {name.lower() for name, _ in response.headers}
    headers = [
        *response.headers,
        *(each for each in _SECURITY_HEADERS if each[0].lower() not in present_names),
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        *([("Connection", "close")] if is_last else []),
    ]
    phrase = http.HTTPStatus(response.status).phrase
    head = h11.Response(status_code=response.status, reason=phrase, headers=headers)
    body = [] if without_body else [h11.Data(data=response.body)]
    return b"".join(protocol.send(event) or b"" for event in [head, *body, h11.EndOfMessage()])


def _check_header_count(request_event: h11.Request) -> Response | None:
    count = len(request_event.headers)
    if count > HEADERS_MAX:
        return error_response(431, f"expected at most {HEADERS_MAX} headers, got {count}")
    return None


def _headers(request_event: h11.Request) -> Mapping[bytes, bytes]:
    """Return the headers by lower-case name; the last one of equal names."""
    return dict(request_event.headers)


def _has_body(request_event: h11.Request) -> bool:
    headers = _headers(request_event)
    return (
        headers.get(b"content-length", b"0").strip(b"0 ") != b"" or b"transfer-encoding" in headers
    )
