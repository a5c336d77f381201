"""Listening sockets: bind, accept, hand over.

Rule 1: a listener knows addresses and file descriptors, never the protocol spoken on them.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from functools import partial

import trio

from simplebus.server import process
from simplebus.server.preauth.queue import Anteroom, Guest

log = logging.getLogger("simplebus.server")

_MAPPED = "::ffff:"
_BACKLOG = 1024
_ACCEPTS_PER_TURN = 4  # Many at once would hold up those who are inside.
# Out of file descriptors or memory: what is open must close first.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_EXHAUSTED_PAUSE_SECONDS = 0.5
_TRIES_MAX = 8
"""So many at most are told to make room for one: not all of them go in the same turn."""

# Idle peers whose host is gone are found by the kernel: 30 s of silence, then 3 probes 5 s apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


async def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of host. Port 0 picks one free port for all of them.

    Raises OSError, naming the address, when one cannot be had.
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
            chosen = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            try:
                sock.bind((address[0], chosen, *address[2:]))
            except OSError as error:
                raise OSError(
                    error.errno, f"cannot listen on {name((address[0], chosen))}: {error.strerror}"
                ) from None
            sock.listen(_BACKLOG)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


async def bind_all(hosts: tuple[str, ...], port: int) -> list[socket.socket]:
    """Listening sockets on several hosts and one port. An IPv6 address that this machine lacks is
    left out.

    Raises OSError when another one cannot be had.
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
        log.info("IPv6 left out: %s", problem)
    return sockets


def name(address: tuple[object, ...]) -> str:
    """HOST:PORT, with brackets around an IPv6 host. One of IPv4 is one at every socket."""
    host, port = str(address[0]), address[1]
    if host.startswith(_MAPPED) and "." in host:
        host = host.removeprefix(_MAPPED)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(peer: str) -> str:
    """The host of a `name`."""
    return peer.rpartition(":")[0].strip("[]")


async def accept(
    listener: socket.socket,
    serve: Callable[[socket.socket, str], None],
    room: Anteroom,
    *,
    spare: int = 0,
    make_room: Callable[[str], bool] = lambda peer: False,
) -> None:
    """Accept for ever, handing each connected, non-blocking socket over. Closes the listener.
    `spare` descriptors are for these sockets alone. Where none is left, `make_room` may have
    somebody leave for this peer.

    A listener is a guest of the anteroom: however many come, a few at a time are let in, in turn
    with what those do who have come. Where descriptors or memory run out, who comes waits in the
    queue, and who is inside notices nothing: some descriptors are left for what the server itself
    opens.
    """
    says_nothing = False
    guest = room.enter(listener, f"listener {name(listener.getsockname())}", is_listener=True)
    try:
        while True:
            await guest.readable()
            for _ in range(_ACCEPTS_PER_TURN):
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in _EXHAUSTED:
                        if not says_nothing:
                            log.error("cannot accept: %s; trying again", error.strerror)
                        says_nothing = True
                        await trio.sleep(_EXHAUSTED_PAUSE_SECONDS)
                    break  # Otherwise the peer left before it was accepted.
                with_place = await _placed(sock, guest, spare, partial(make_room, name(address)))
                if with_place is None:
                    if not says_nothing:
                        log.error("cannot accept: too many files are open; see LimitNOFILE")
                    says_nothing = True
                    await trio.sleep(_EXHAUSTED_PAUSE_SECONDS)
                    break
                if says_nothing:
                    log.warning("connections are accepted again")
                    says_nothing = False
                try:
                    _prepare(with_place)
                except OSError:  # It left meanwhile.
                    with_place.close()
                    continue
                serve(with_place, name(address))
    finally:
        guest.leave()
        listener.close()


async def _placed(
    sock: socket.socket, listener: Guest, spare: int, make_room: Callable[[], bool]
) -> socket.socket | None:
    """This socket, with a descriptor that is for peers; None, and it is closed, where none is to be
    had."""
    try:
        for _ in range(_TRIES_MAX):
            if _is_for_peers(sock, spare) or not make_room():
                break
            sock = _lowered(sock)
            if not _is_for_peers(sock, spare):
                await listener.turn()  # Behind those that were told to go.
                sock = _lowered(sock)
        if _is_for_peers(sock, spare):
            return sock
    except OSError:
        pass
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def _is_for_peers(sock: socket.socket, spare: int) -> bool:
    return sock.fileno() < process.descriptors_for_peers(spare)


def _lowered(sock: socket.socket) -> socket.socket:
    """The same with the lowest descriptor that is free. Raises OSError."""
    lower = sock.dup()
    sock.close()
    return lower


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
