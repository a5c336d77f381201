"""Listening sockets: bind, accept, and reserve file descriptors for the journal."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from functools import partial

import trio

from simplebus.logs.event_logger import EventLogger
from simplebus.server import process
from simplebus.server.preauth.queue import PreAuthConnection, PreAuthQueue

log = EventLogger("simplebus.server")

_MAPPED = "::ffff:"
_BACKLOG = 1024
_ACCEPTS_PER_TURN = 4  # More would delay established connections.
# Errors for exhausted file descriptors or memory.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_EXHAUSTED_PAUSE_SECONDS = 0.5
_DESCRIPTOR_ATTEMPTS_MAX = 8
"""Attempts to free a descriptor for one connection: a closed one may not be free at once."""

# The kernel detects hosts that are gone: after 30 s of silence, 3 probes 5 s apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class ListenError(OSError):
    """Address that is not available to a listener."""


async def bind(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on every address of `host`. Port 0 selects one free port for all.

    Raises ListenError, with the address in its text, if an address is not available.
    """
    infos = await trio.socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(infos):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen_port = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            try:
                sock.bind((address[0], chosen_port, *address[2:]))
            except OSError as error:
                requested_address = format_address((address[0], chosen_port))
                text = f"cannot listen on {requested_address}: {error.strerror}"
                raise ListenError(error.errno, text) from None
            sock.listen(_BACKLOG)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


async def bind_all(hosts: tuple[str, ...], port: int) -> list[socket.socket]:
    """Return listening sockets on several hosts and one port.

    An IPv6 address that is not available is skipped. Raises OSError if any other address is not.
    """
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for host in hosts:
        try:
            sockets += await bind(host, port)
            port = port or sockets[0].getsockname()[1]
        except OSError as error:
            if not (":" in host and sockets):
                for sock in sockets:
                    sock.close()
                raise
            problem = error
    if problem is not None:
        log.info("listener.ipv6_unavailable", "not listening on IPv6: {error}", error=problem)
    return sockets


@contextlib.contextmanager
def explain_port_in_use(purpose: str) -> Iterator[None]:
    """Add to "address in use" errors what the port is for, and how to change it.

    Args:
        purpose: End of the sentence that begins with "That port".
    """
    try:
        yield
    except ListenError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ListenError(error.errno, f"{error.strerror}. That port {purpose}") from None


def format_address(address: tuple[object, ...]) -> str:
    """Return HOST:PORT. IPv6 hosts are in brackets; IPv4-mapped addresses are shown as IPv4."""
    host, port = str(address[0]), address[1]
    if host.startswith(_MAPPED) and "." in host:
        host = host.removeprefix(_MAPPED)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_from_address(peer: str) -> str:
    """Return the host of a `format_address` text."""
    return peer.rpartition(":")[0].strip("[]")


async def accept(
    listening_socket: socket.socket,
    on_accept: Callable[[socket.socket, str], None],
    preauth_queue: PreAuthQueue,
    *,
    spare_descriptors: int = 0,
    free_descriptor: Callable[[str], bool] = lambda peer: False,
) -> None:
    """Accept connections until cancelled, then close the listening socket.

    The listener takes turns with unauthenticated connections in the queue and accepts a few
    connections per turn. If descriptors or memory run out, clients wait in the system's backlog,
    and established connections are not affected.

    Args:
        on_accept: Called with each connected, non-blocking socket and its address.
        spare_descriptors: Descriptors reserved for this listener alone.
        free_descriptor: Called with the peer's address if no descriptor is left; may close another
            connection and return True.
    """
    has_logged = False
    queue_entry = preauth_queue.add(
        listening_socket,
        f"listener {format_address(listening_socket.getsockname())}",
        is_listener=True,
    )
    try:
        while True:
            await queue_entry.wait_readable()
            for _ in range(_ACCEPTS_PER_TURN):
                try:
                    sock, address = listening_socket.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in _EXHAUSTED:
                        if not has_logged:
                            log.error(
                                "listener.accept_failed",
                                "cannot accept connections: {error}; retrying",
                                error=error.strerror,
                            )
                        has_logged = True
                        await trio.sleep(_EXHAUSTED_PAUSE_SECONDS)
                    break  # For any other error, the client has closed before the accept.
                accepted = await _move_below_limit(
                    sock,
                    queue_entry,
                    spare_descriptors,
                    partial(free_descriptor, format_address(address)),
                )
                if accepted is None:
                    if not has_logged:
                        log.error(
                            "listener.descriptors_exhausted",
                            "cannot accept connections: too many open files; see LimitNOFILE",
                        )
                    has_logged = True
                    await trio.sleep(_EXHAUSTED_PAUSE_SECONDS)
                    break
                if has_logged:
                    log.warning("listener.recovered", "accepting connections again")
                    has_logged = False
                try:
                    _set_socket_options(accepted)
                except OSError:  # The client has closed meanwhile.
                    accepted.close()
                    continue
                on_accept(accepted, format_address(address))
    finally:
        queue_entry.leave()
        listening_socket.close()


async def _move_below_limit(
    sock: socket.socket,
    queue_entry: PreAuthConnection,
    spare_descriptors: int,
    free_descriptor: Callable[[], bool],
) -> socket.socket | None:
    """Return the socket with a descriptor below the limit for peers.

    Closes the socket and returns None if no such descriptor can be freed.
    """
    try:
        for _ in range(_DESCRIPTOR_ATTEMPTS_MAX):
            if _has_peer_descriptor(sock, spare_descriptors) or not free_descriptor():
                break
            sock = _with_lowest_descriptor(sock)
            if not _has_peer_descriptor(sock, spare_descriptors):
                await queue_entry.wait_turn()  # Let the evicted connections close first.
                sock = _with_lowest_descriptor(sock)
        if _has_peer_descriptor(sock, spare_descriptors):
            return sock
    except OSError:
        pass
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def _has_peer_descriptor(sock: socket.socket, spare_descriptors: int) -> bool:
    return sock.fileno() < process.peer_descriptor_limit(spare_descriptors)


def _with_lowest_descriptor(sock: socket.socket) -> socket.socket:
    """Duplicate the socket to the lowest free descriptor. Raises OSError."""
    lower = sock.dup()
    sock.close()
    return lower


def _set_socket_options(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
