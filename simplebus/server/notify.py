"""Tell systemd how the service is doing: sd_notify(3), without its library.

Rule 1: without NOTIFY_SOCKET in the environment nothing happens; a failed datagram harms nobody.
"""

from __future__ import annotations

import logging
import os
import socket

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
