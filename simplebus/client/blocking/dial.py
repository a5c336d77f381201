"""From an address to a connected socket, in steps, without an event loop.

Rule 1: what is tried, and what is said when it fails, is the business of `dial`.
Rule 2: no step waits. Each gives what is to be waited for before the next one, and whoever takes
the steps waits as long as it may: a connection that is being made outlives the call that began it.
"""

from __future__ import annotations

import math
import selectors
import socket
from collections.abc import Generator
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic, sleep

from simplebus.client import addresses
from simplebus.client import credentials as access_of
from simplebus.client.addresses import Address
from simplebus.client.credentials import Access
from simplebus.core.errors import BusConnectionError
from simplebus.net.tls import TlsSocket

Step = tuple[socket.socket | None, int, float]
"""A socket, its events, and the time until which they are waited for; None for that time alone."""


def wait(step: Step, deadline: float) -> None:
    """Return when the next step may be taken, or at the deadline."""
    sock, events, until = step
    seconds = max(0.0, min(until, deadline) - monotonic())
    if sock is None:
        sleep(seconds)
    else:
        _is_ready(sock, events, seconds)


def wait_ready(sock: socket.socket, events: int, until: float) -> Generator[Step, None, bool]:
    """Steps until a socket is ready; False if it is not in time."""
    while not _is_ready(sock, events, 0.0):
        if monotonic() >= until:
            return False
        yield sock, events, until
    return True


def dial(where: Address, until: float, seconds: float) -> Generator[Step, None, socket.socket]:
    """Steps to a connected socket. Raises BusConnectionError, at that time at the latest."""
    problem: OSError | None = None
    try:
        infos = addresses.resolve_numeric(where) or socket.getaddrinfo(
            where.host, where.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise addresses.connect_error(where, error) from error
    for info in infos:
        try:
            sock = addresses.start_connect(info)
        except OSError as error:
            problem = error
            continue
        try:
            if not (yield from wait_ready(sock, EVENT_WRITE, until)):
                raise addresses.connect_timeout_error(where, seconds, is_connected=False)
            addresses.finish_connect(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, BusConnectionError) or not isinstance(error, OSError):
                raise
            problem = error
        else:
            return sock
    raise addresses.connect_error(where, problem) from problem


def start_tls(
    sock: socket.socket, where: Address, access: Access | None, until: float, seconds: float
) -> Generator[Step, None, socket.socket | TlsSocket]:
    """Steps to what is spoken on a connected socket: itself, or TLS where the address says so.
    Raises BusConnectionError, at that time at the latest."""
    if not where.is_secure:
        return sock
    try:
        tls = access_of.start_tls(sock, where, access)
        while not access_of.continue_handshake(tls):
            events = EVENT_WRITE if tls.unsent else EVENT_READ
            if not (yield from wait_ready(sock, events, until)):
                raise addresses.connect_timeout_error(where, seconds, is_connected=False)
            tls.flush()
    except BusConnectionError:
        raise
    except OSError as error:
        raise addresses.tls_error(where, error) from error
    return tls


def _is_ready(sock: socket.socket, events: int, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(sock, events)
        return bool(selector.select(None if seconds == math.inf else seconds))
