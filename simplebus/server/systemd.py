"""Listening sockets that systemd hands over, or whoever else holds them: sd_listen_fds(3), without
its library.

Rule 1: they stay the activator's. They are closed here and never shut down, so that who connects
while one server ends and the next begins waits in their queue, and is not refused.
Rule 2: a socket that no door is for is a sentence: nobody would accept what comes in there.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import trio

from simplebus.core.errors import BusError
from simplebus.server.listeners import name

log = logging.getLogger("simplebus.server")


def is_listening() -> bool:
    """Whether there is anybody to be told."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(*states: str) -> bool:
    """Send states such as "READY=1" or "STATUS=…" as one datagram. Returns whether it was sent."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)  # Who does not listen just now must not hold the loop.
            sock.connect(address)
            sock.send("\n".join(states).encode())
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("systemd cannot be told %s: %s", states[0], error)
        return False
    return True


FIRST_FD = 3
DOORS = ("tcp", "nats", "http")
"""What a socket may be called, FileDescriptorName=; of others, the port says which door it is."""
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class ActivationError(BusError):
    """What was handed over cannot be used; says why."""


def inherited(environment: MutableMapping[str, str]) -> list[tuple[str, socket.socket]]:
    """The sockets that this process was handed, with their names; none where none were. What says
    so is taken out of the environment: programs that are started from here have none.

    Raises ActivationError for what is no listening TCP socket.
    """
    pid, count, names, _ = (environment.pop(each, "") for each in _VARIABLES)
    if not (count.isdigit() and pid == str(os.getpid())):
        return []
    called = names.split(":") if names else []
    found = []
    for at in range(int(count)):
        fd = FIRST_FD + at
        label = called[at] if at < len(called) else ""
        found.append((label, _listening(fd, label)))
        os.set_inheritable(fd, False)
    return found


def _listening(fd: int, label: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ActivationError(
            f"LISTEN_FDS names descriptor {fd}, {label!r}, which is no socket: {error.strerror}"
        ) from None
    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not (is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        sock.close()
        raise ActivationError(f"descriptor {fd}, {label!r}, is no TCP socket that listens")
    sock.setblocking(False)
    return sock


def for_doors(
    found: Sequence[tuple[str, socket.socket]], ports: Mapping[str, int | None]
) -> dict[str, list[socket.socket]]:
    """The sockets of each door. `ports` are those of the doors by name, None for a closed one.

    Raises ActivationError for a socket that is none's.
    """
    doors: dict[str, list[socket.socket]] = {}
    for label, sock in found:
        address = sock.getsockname()
        door = label
        if label not in DOORS:
            door = next((each for each, port in ports.items() if port == address[1]), "")
        if not door:
            raise ActivationError(
                f"no door is for the socket {label!r} on {name(address)}: expected the port of "
                "one, or FileDescriptorName=tcp, nats or http"
            )
        if ports.get(door) is None:
            raise ActivationError(
                f"the socket {label!r} on {name(address)} is for the {door} door, which is closed"
            )
        doors.setdefault(door, []).append(sock)
    return doors


STATUS_SECONDS = 10.0


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """How often systemd wants to hear from this process at least; None for never."""
    asked, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not asked.isdigit() or not int(asked) or (pid and pid != str(os.getpid())):
        return None
    return int(asked) / 1e6


async def tell(
    status: Callable[[], str],
    *,
    watchdog: float | None,
    say: Callable[..., object] = notify,
) -> None:
    """Say that the loop is alive, twice as often as is asked for, and now and then the status,
    until cancelled. Ends at once where nobody listens."""
    if not is_listening():
        return
    pause = min(STATUS_SECONDS, watchdog / 2 if watchdog else STATUS_SECONDS)
    told = trio.current_time()
    while True:
        await trio.sleep(pause)
        words = ["WATCHDOG=1"] if watchdog else []
        if trio.current_time() - told >= STATUS_SECONDS:
            told = trio.current_time()
            words.append(f"STATUS={status()}")
        if words:
            say(*words)
