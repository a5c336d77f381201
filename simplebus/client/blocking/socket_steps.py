"""Connecting a socket in steps that do not block.

Each step yields the socket events to wait for before the next step. The caller waits up to its own
timeout, so a connection attempt can outlive the call that began it.
"""

from __future__ import annotations

import math
import selectors
import socket
from collections.abc import Generator
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic, sleep

from simplebus.client import addresses, credentials
from simplebus.client.addresses import Address
from simplebus.client.credentials import Access
from simplebus.core.errors import BusConnectionError
from simplebus.net.tls import TlsSocket

Step = tuple[socket.socket | None, int, float]
"""Socket to wait for, the events to wait for, and the end of the wait by `time.monotonic`.

The socket is None if the step only waits for the time.
"""


def wait(step: Step, deadline: float) -> None:
    """Return when the next step may be taken, or at the deadline."""
    sock, events, until = step
    seconds = max(0.0, min(until, deadline) - monotonic())
    if sock is None:
        sleep(seconds)
    else:
        _is_ready(sock, events, seconds)


def wait_ready(sock: socket.socket, events: int, until: float) -> Generator[Step, None, bool]:
    """Yield steps until a socket is ready. Returns False if it is not ready in time."""
    while not _is_ready(sock, events, 0.0):
        if monotonic() >= until:
            return False
        yield sock, events, until
    return True


def connect_socket(
    address: Address, until: float, seconds: float
) -> Generator[Step, None, socket.socket]:
    """Yield steps until a socket is connected. Raises BusConnectionError at `until` or before."""
    last_error: OSError | None = None
    try:
        infos = addresses.resolve_numeric(address) or socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise addresses.connect_error(address, error) from error
    for info in infos:
        try:
            sock = addresses.start_connect(info)
        except OSError as error:
            last_error = error
            continue
        try:
            if not (yield from wait_ready(sock, EVENT_WRITE, until)):
                raise addresses.connect_timeout_error(address, seconds, is_connected=False)
            addresses.finish_connect(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, BusConnectionError) or not isinstance(error, OSError):
                raise
            last_error = error
        else:
            return sock
    raise addresses.connect_error(address, last_error) from last_error


def start_tls(
    sock: socket.socket, address: Address, access: Access | None, until: float, seconds: float
) -> Generator[Step, None, socket.socket | TlsSocket]:
    """Yield steps until the TLS handshake is done, if the address is secure.

    Returns the TLS socket, or `sock` itself. Raises BusConnectionError, at the latest at `until`.
    """
    if not address.is_secure:
        return sock
    tls: TlsSocket | None = None
    try:
        tls = credentials.start_tls(sock, address, access)
        while not credentials.continue_handshake(tls):
            events = EVENT_WRITE if tls.has_unsent else EVENT_READ
            if not (yield from wait_ready(sock, events, until)):
                raise addresses.connect_timeout_error(address, seconds, is_connected=False)
            tls.flush()
    except BusConnectionError:
        raise
    except OSError as error:
        first_bytes = tls.first_bytes if tls is not None else b""
        raise addresses.tls_error(address, error, first_bytes) from error
    return tls


def _is_ready(sock: socket.socket, events: int, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(sock, events)
        return bool(selector.select(None if seconds == math.inf else seconds))
