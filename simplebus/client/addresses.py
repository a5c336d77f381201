"""From an address to a connected socket, for both drivers.

Rule 1: nothing here waits. A driver starts a connection, waits in its own way, and finishes it.
Rule 2: an error says where it was tried to connect, what happened, and what was expected there.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from simplebus.core.errors import BusConnectionError

log = logging.getLogger("simplebus.client")

DEFAULT_PORT = 8888
_SCHEME, _SECURE_SCHEME = "simplebus", "simplebuss"
_UNDER_WAY = {0, errno.EINPROGRESS, errno.EWOULDBLOCK}

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]
"""What getaddrinfo gives."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a bus listens."""

    host: str
    port: int = DEFAULT_PORT
    is_secure: bool = False
    """Whether it is spoken to over TLS."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `simplebus://host:port` or `host:port`, or `simplebuss://host:port` for TLS; an IPv6
        host stands in brackets.

        Raises ValueError, with the text, for anything else, and TypeError for what is no text.
        """
        if not isinstance(text, str):
            raise _no_address(text)
        expected = f"expected {_SCHEME}://host:port or host:port, an IPv6 host in brackets"
        try:
            parts = urlsplit(text if "://" in text else f"{_SCHEME}://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(
                f"{_secretless(text)!r} is no address of a bus ({error}); {expected}"
            ) from None
        extra = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        if "@" in parts.netloc:
            expected += "; who one is stands elsewhere"
        if parts.scheme not in (_SCHEME, _SECURE_SCHEME) or not host or port == 0 or extra:
            raise ValueError(f"{_secretless(text)!r} is no address of a bus; {expected}")
        secure = parts.scheme == _SECURE_SCHEME
        return cls(host, DEFAULT_PORT if port is None else port, secure)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = _SECURE_SCHEME if self.is_secure else _SCHEME
        return f"{scheme}://{host}:{self.port}"


def _secretless(text: str) -> str:
    """An address without what may be a password."""
    return re.sub(r"(?<=//).*@|^[^/]*@", "…@", text)


def _no_address(given: object) -> TypeError:
    return TypeError(f"an address of a bus must be text, or several texts, got {given!r}")


def parse_addresses(given: str | Iterable[str]) -> list[Address]:
    """One address or several. Raises ValueError and TypeError for what is none."""
    if isinstance(given, str):
        given = [given]
    elif not isinstance(given, Iterable):
        raise _no_address(given)
    found = [Address.parse(text) for text in given]
    if not found:
        raise ValueError("no address of a bus was given, expected at least one")
    return found


def resolve_numeric(address: Address) -> list[AddressInfo]:
    """The address's sockets when its host is a number; empty when a name must be looked up."""
    try:
        return socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return []


def start_connect(info: AddressInfo) -> socket.socket:
    """A socket on its way to be connected: wait until it is writable, then `finish`."""
    family, kind, protocol, _, where = info
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _raise_for(sock.connect_ex(where), accepted=_UNDER_WAY)
    except BaseException:
        sock.close()
        raise
    return sock


def finish_connect(sock: socket.socket) -> None:
    """Raise OSError unless the socket, now writable, is connected."""
    _raise_for(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), accepted={0})


def _raise_for(code: int, *, accepted: set[int]) -> None:
    if code not in accepted:
        raise OSError(code, os.strerror(code))


def connect_error(place: object, error: OSError | None) -> BusConnectionError:
    """No connection could be made."""
    what = "it has no address" if error is None else error.strerror or str(error)
    return BusConnectionError(
        f"cannot connect to {place}: {what}; expected a simplebus server listening there"
    )


def tls_error(place: object, error: OSError) -> BusConnectionError:
    """There was no TLS handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return BusConnectionError(
            f"cannot connect to {place}: its certificate is not trusted "
            f"({error.verify_message}); expected one that an authority of this program has signed, "
            "for this host"
        )
    what = getattr(error, "reason", None) or error.strerror or str(error) or "it hung up"
    return BusConnectionError(
        f"cannot connect to {place}: the TLS handshake failed ({what}); expected a simplebus "
        "server that speaks TLS there"
    )


def connect_timeout_error(place: object, seconds: float, *, is_connected: bool) -> BusConnectionError:
    """The time for connecting has passed."""
    if not is_connected:
        return BusConnectionError(
            f"cannot connect to {place}: nothing answered within {_shown(seconds)} s; expected a "
            "simplebus server listening there"
        )
    return BusConnectionError(
        f"connected to {place}, but no answer to the Connect frame came within "
        f"{_shown(seconds)} s; "
        "expected a simplebus server there"
    )


def connection_lost_error(place: object, error: Exception | None) -> BusConnectionError:
    """What became of a connection. `error` is None at its orderly end."""
    if isinstance(error, BusConnectionError):
        return error
    if error is None or isinstance(error, ConnectionError):
        how = "" if error is None else f" ({error.strerror or error})"
        text = f"the bus at {place} closed the connection{how}; its log says why"
    elif isinstance(error, OSError):
        text = f"the connection to {place} is lost: {error.strerror or error}"
    else:
        text = f"the connection to {place} has ended: {error}"
    found = BusConnectionError(text)
    found.__cause__ = error
    return found


def reconnect_failed_error(
    loss: BusConnectionError, problem: BusConnectionError, seconds: float | None
) -> BusConnectionError:
    """There was no other connection after a loss; within so many seconds, or because of a refusal
    that trying again would not change."""
    within = "" if seconds is None else f" within {_shown(seconds)} s"
    found = BusConnectionError(f"{loss}; no other connection was made{within}: {problem}")
    found.__cause__ = problem
    return found


def log_forgotten_messages(place: object, count: int) -> None:
    """A bus has come back without so many messages that it had confirmed."""
    if count:
        log.warning("the bus at %s has lost %d messages that it had confirmed", place, count)


def connection_closed_error(place: object) -> BusConnectionError:
    """We ended the connection."""
    return BusConnectionError(f"the connection to {place} was left")


def _shown(seconds: float) -> str:
    return f"{round(seconds, 2):g}"


def unconfirmed_error(count: int, end: BusConnectionError) -> BusConnectionError:
    """The bus was left with messages that it did not confirm."""
    what = "1 message was" if count == 1 else f"{count:,} messages were"
    found = BusConnectionError(f"{what} not confirmed by the bus: {end}")
    found.__cause__ = end
    return found
