"""From an address to a connected socket, waiting without an event loop.

Rule 1: what is tried, and what is said when it fails, is the business of `dial`.
"""

from __future__ import annotations

import selectors
import socket
from selectors import EVENT_WRITE
from time import monotonic

from simplebus.client import dial
from simplebus.client.dial import Address
from simplebus.core.errors import BusConnectionError


def dialled(where: Address, until: float, seconds: float) -> socket.socket:
    """A connected socket. Raises BusConnectionError, at that time at the latest."""
    problem: OSError | None = None
    try:
        infos = dial.numeric(where) or socket.getaddrinfo(
            where.host, where.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise dial.refused(where, error) from error
    for info in infos:
        try:
            sock = dial.start(info)
        except OSError as error:
            problem = error
            continue
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(sock, EVENT_WRITE)
                if not selector.select(max(0.0, until - monotonic())):
                    raise dial.unanswered(where, seconds, connected=False)
            dial.finish(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, BusConnectionError) or not isinstance(error, OSError):
                raise
            problem = error
        else:
            return sock
    raise dial.refused(where, problem) from problem
