"""Integration with systemd: readiness, status, watchdog and socket activation (sd_listen_fds(3)).

Inherited listening sockets belong to systemd. They are closed but never shut down, so that
clients wait in their backlog while one server ends and the next one starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import trio

from simplebus.core.errors import BusError
from simplebus.logs.event_logger import EventLogger
from simplebus.server.listeners import format_address

log = EventLogger("simplebus.server")


def has_notify_socket() -> bool:
    """Return True if systemd expects notifications."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(*states: str) -> bool:
    """Send states such as "READY=1" in one datagram. Returns False if nothing was sent."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)  # A full socket must not block the event loop.
            sock.connect(address)
            sock.send("\n".join(states).encode())
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning(
            "systemd.notify_failed",
            "cannot send {state} to systemd: {error}",
            state=states[0],
            error=error,
        )
        return False
    return True


FIRST_FD = 3
LISTENER_NAMES = ("tcp", "nats", "http")
"""Valid values of FileDescriptorName=. Sockets with another name are assigned by their port."""
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class SocketActivationError(BusError):
    """An inherited socket cannot be used; the message says why."""


def take_inherited_sockets(
    environment: MutableMapping[str, str],
) -> list[tuple[str, socket.socket]]:
    """Return the sockets that systemd passed to this process, with their names.

    Removes the variables from `environment`, so that child processes do not use them.

    Raises:
        SocketActivationError: A descriptor is not a listening TCP socket.
    """
    pid, count, names, _ = (environment.pop(variable, "") for variable in _VARIABLES)
    if not (count.isdigit() and pid == str(os.getpid())):
        return []
    names_by_index = names.split(":") if names else []
    sockets = []
    for index in range(int(count)):
        fd = FIRST_FD + index
        label = names_by_index[index] if index < len(names_by_index) else ""
        sockets.append((label, _open_listening_socket(fd, label)))
        os.set_inheritable(fd, False)
    return sockets


def _open_listening_socket(fd: int, label: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise SocketActivationError(
            f"descriptor {fd} ({label!r}) of LISTEN_FDS is not a socket: {error.strerror}"
        ) from None
    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not (is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        sock.close()
        raise SocketActivationError(
            f"descriptor {fd} ({label!r}) of LISTEN_FDS is not a listening TCP socket"
        )
    sock.setblocking(False)
    return sock


def assign_sockets(
    sockets: Sequence[tuple[str, socket.socket]], ports: Mapping[str, int | None]
) -> dict[str, list[socket.socket]]:
    """Return the inherited sockets of each listener.

    Args:
        sockets: Names and sockets.
        ports: Port of each listener by name; None for a disabled one.

    Raises:
        SocketActivationError: A socket belongs to no enabled listener.
    """
    by_listener: dict[str, list[socket.socket]] = {}
    for label, sock in sockets:
        address = sock.getsockname()
        listener = label
        if label not in LISTENER_NAMES:
            listener = next((each for each, port in ports.items() if port == address[1]), "")
        if not listener:
            raise SocketActivationError(
                f"socket {label!r} on {format_address(address)} belongs to no listener: expected "
                "FileDescriptorName=tcp, nats or http, or the port of a listener"
            )
        if ports.get(listener) is None:
            raise SocketActivationError(
                f"socket {label!r} on {format_address(address)} is for the {listener} listener, "
                "which is disabled"
            )
        by_listener.setdefault(listener, []).append(sock)
    return by_listener


STATUS_INTERVAL_SECONDS = 10.0


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Return the watchdog interval that systemd expects, or None."""
    interval, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not interval.isdigit() or not int(interval) or (pid and pid != str(os.getpid())):
        return None
    return int(interval) / 1e6


async def send_notifications(
    status: Callable[[], str],
    *,
    watchdog_interval: float | None,
    send: Callable[..., object] = notify,
) -> None:
    """Send watchdog messages at twice the expected rate, and the status periodically.

    `watchdog_interval` is in seconds. Returns at once if systemd expects no notifications.
    """
    if not has_notify_socket():
        return
    interval_seconds = min(
        STATUS_INTERVAL_SECONDS,
        watchdog_interval / 2 if watchdog_interval else STATUS_INTERVAL_SECONDS,
    )
    status_sent_at = trio.current_time()
    while True:
        await trio.sleep(interval_seconds)
        states = ["WATCHDOG=1"] if watchdog_interval else []
        if trio.current_time() - status_sent_at >= STATUS_INTERVAL_SECONDS:
            status_sent_at = trio.current_time()
            states.append(f"STATUS={status()}")
        if states:
            send(*states)
