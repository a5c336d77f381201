"""Addresses of servers, non-blocking connects, and the errors of a connection.

Nothing here waits: a driver calls `start_connect`, waits until the socket is writable in its own
way, and calls `finish_connect`.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from simplebus.core.errors import BusConnectionError
from simplebus.core.protocol.opening import Opening, WrongProtocolError, recognize_opening
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.sampling import FailureCounts, is_logged

log = EventLogger("simplebus.client")

DEFAULT_PORT = 8888
DEFAULT_URL = f"simplebus://127.0.0.1:{DEFAULT_PORT}"
URL_VARIABLE = "SIMPLEBUS_URL"
"""Environment variable with the address for programs that give none."""
_SCHEME, _SECURE_SCHEME = "simplebus", "simplebuss"
_IN_PROGRESS_CODES = {0, errno.EINPROGRESS, errno.EWOULDBLOCK}

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]
"""One entry of `socket.getaddrinfo`."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server."""

    host: str
    port: int = DEFAULT_PORT
    is_secure: bool = False
    """True to connect with TLS."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `simplebus://host:port`, `host:port`, or `simplebuss://host:port` for TLS.

        An IPv6 host is written in brackets. The default port is 8888.

        Raises:
            ValueError: If `text` is not an address.
            TypeError: If `text` is not a str.
        """
        if not isinstance(text, str):
            raise _address_type_error(text)
        expected = f"expected {_SCHEME}://host:port or host:port, an IPv6 host in brackets"
        try:
            parts = urlsplit(text if "://" in text else f"{_SCHEME}://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(
                f"{_hide_credentials(text)!r} is not a server address ({error}); {expected}"
            ) from None
        has_extra_parts = (
            parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        )
        if "@" in parts.netloc:
            expected += "; pass user and password as arguments"
        if (
            parts.scheme not in (_SCHEME, _SECURE_SCHEME)
            or not host
            or port == 0
            or has_extra_parts
        ):
            raise ValueError(f"{_hide_credentials(text)!r} is not a server address; {expected}")
        is_secure = parts.scheme == _SECURE_SCHEME
        return cls(host, DEFAULT_PORT if port is None else port, is_secure)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = _SECURE_SCHEME if self.is_secure else _SCHEME
        return f"{scheme}://{host}:{self.port}"


def _hide_credentials(text: str) -> str:
    """Return an address text without user and password."""
    return re.sub(r"(?<=//).*@|^[^/]*@", "…@", text)


def _address_type_error(value: object) -> TypeError:
    return TypeError(f"a server address must be text, or several texts, got {value!r}")


def parse_addresses(
    value: str | Iterable[str] | None, environment: Mapping[str, str] = os.environ
) -> list[Address]:
    """Return one or several addresses.

    Args:
        value: One or several texts; None for the address in SIMPLEBUS_URL, or if it is not set,
            a server on this machine.
        environment: Environment variables.

    Raises:
        ValueError: If a text is not an address, or `value` is empty.
        TypeError: If `value` is neither a str nor an iterable of str.
    """
    if value is None:
        try:
            return [Address.parse(environment.get(URL_VARIABLE) or DEFAULT_URL)]
        except ValueError as error:
            raise ValueError(f"{URL_VARIABLE}: {error}") from None
    if isinstance(value, str):
        value = [value]
    elif not isinstance(value, Iterable):
        raise _address_type_error(value)
    parsed = [Address.parse(text) for text in value]
    if not parsed:
        raise ValueError("got no server address, expected at least one")
    return parsed


def resolve_numeric(address: Address) -> list[AddressInfo]:
    """Return the socket addresses of a numeric host; an empty list for a host name."""
    try:
        return socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return []


def start_connect(info: AddressInfo) -> socket.socket:
    """Return a socket that is connecting. When it is writable, call `finish_connect`."""
    family, socket_type, protocol, _, socket_address = info
    sock = socket.socket(family, socket_type, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _check_error_code(sock.connect_ex(socket_address), accepted=_IN_PROGRESS_CODES)
    except BaseException:
        sock.close()
        raise
    return sock


def finish_connect(sock: socket.socket) -> None:
    """Raise OSError unless the socket, which is writable now, is connected."""
    _check_error_code(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), accepted={0})


def _check_error_code(code: int, *, accepted: set[int]) -> None:
    if code not in accepted:
        raise OSError(code, os.strerror(code))


def connect_error(server: object, error: OSError | None) -> BusConnectionError:
    """Return the error for a failed connect; `error` is None if the host has no address."""
    reason = "it has no address" if error is None else error.strerror or str(error)
    return BusConnectionError(
        f"cannot connect to {server}: {reason}; expected a simplebus server listening there"
    )


def tls_error(server: object, error: OSError, first_bytes: bytes = b"") -> BusConnectionError:
    """Return the error for a failed TLS handshake. `first_bytes` are those of the server."""
    opening = recognize_opening(first_bytes)
    if opening is not None and opening is not Opening.TLS:
        return BusConnectionError(
            f"cannot connect to {server}: it sent {opening} instead of a TLS handshake; expected "
            "the port for bus clients with TLS (`simplebus serve --port`, 8888 by default)"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return BusConnectionError(
            f"cannot connect to {server}: its certificate is not trusted "
            f"({error.verify_message}); expected one for this host, signed by an authority that "
            "this program trusts"
        )
    reason = getattr(error, "reason", None) or error.strerror or str(error) or "connection closed"
    return BusConnectionError(
        f"cannot connect to {server}: the TLS handshake failed ({reason}); expected a simplebus "
        "server with TLS there; without TLS, the address begins with simplebus://"
    )


def connect_timeout_error(
    server: object, seconds: float, *, is_connected: bool
) -> BusConnectionError:
    """Return the error for a connect, or a Connect request, without an answer in time."""
    if not is_connected:
        return BusConnectionError(
            f"cannot connect to {server}: nothing answered within {_format_seconds(seconds)} s; "
            "expected a simplebus server listening there"
        )
    return BusConnectionError(
        f"connected to {server}, but no answer to the Connect frame came within "
        f"{_format_seconds(seconds)} s; "
        "expected a simplebus server there"
    )


def connection_lost_error(server: object, error: Exception | None) -> BusConnectionError:
    """Return the error for a lost connection.

    `error` is None if the server has closed the connection without an error.
    """
    if isinstance(error, BusConnectionError):
        return error
    if isinstance(error, WrongProtocolError):
        text = f"cannot connect to {server}: {error.sentence}"
    elif error is None or isinstance(error, ConnectionError):
        reason = "" if error is None else f" ({error.strerror or error})"
        text = f"the server at {server} closed the connection{reason}; see its log for the reason"
    elif isinstance(error, OSError):
        text = f"the connection to {server} is lost: {error.strerror or error}"
    else:
        text = f"the connection to {server} has ended: {error}"
    lost = BusConnectionError(text)
    lost.__cause__ = error
    return lost


def reconnect_failed_error(
    loss: BusConnectionError, problem: BusConnectionError, seconds: float | None
) -> BusConnectionError:
    """Return the error for a connection that was lost and not replaced.

    Args:
        loss: The error of the lost connection.
        problem: The error of the last attempt to reconnect.
        seconds: Duration of the attempts; None if the last error was permanent.
    """
    within = "" if seconds is None else f" within {_format_seconds(seconds)} s"
    failed = BusConnectionError(f"{loss}; reconnecting failed{within}: {problem}")
    failed.__cause__ = problem
    return failed


def log_forgotten_messages(server: object, count: int) -> None:
    """Log a warning if the server has lost confirmed messages in a restart."""
    if count:
        log.warning(
            "messages.forgotten",
            "the server at {server} has lost {count} confirmed messages",
            server=server,
            count=count,
        )


class NoticeLog:
    """Log of the notices of a server: errors that belong to no request.

    Equal notices are logged three times, then each time that their number has doubled.
    """

    def __init__(self) -> None:
        self._counts = FailureCounts()

    def add(self, sentence: str) -> None:
        """Log a notice."""
        if is_logged(self._counts.add(sentence)):
            log.warning("notice.received", "the server reports: {notice}", notice=sentence)


def connection_closed_error(server: object) -> BusConnectionError:
    """Return the error for a connection that this client closed."""
    return BusConnectionError(f"the connection to {server} was closed at the end of its block")


def _format_seconds(seconds: float) -> str:
    return f"{round(seconds, 2):g}"


def unconfirmed_error(count: int, end: BusConnectionError) -> BusConnectionError:
    """Return the error for messages that were not confirmed before the bus was closed."""
    messages = "1 message was" if count == 1 else f"{count:,} messages were"
    unconfirmed = BusConnectionError(f"{messages} not confirmed by the server: {end}")
    unconfirmed.__cause__ = end
    return unconfirmed
