"""Free ports, for programs that restart at the same port or need it in advance.

Ports are handed out in turn through a file shared by all runs of this user, so that no port is
reused soon. They are outside the range of ephemeral ports.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 10_000
"""Ports below are used by services."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return free ports of HOST. Raises OSError if there are too few."""
    found: list[int] = []
    candidates = _candidates()
    file = Path(tempfile.gettempdir()) / f"simplebus-ports-{os.getuid()}"
    shared = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(shared, fcntl.LOCK_EX)  # Until `shared` is closed.
        next_number = int(os.pread(shared, 20, 0) or b"0")
        for number in range(next_number, next_number + len(candidates)):
            if len(found) == count:
                break
            port = candidates[number % len(candidates)]
            next_number = number + 1
            if _is_free(port):
                found.append(port)
        os.pwrite(shared, b"%20d" % next_number, 0)
    finally:
        os.close(shared)
    if len(found) < count:
        raise OSError(f"{len(found)} of {count} ports were free")
    return found


def free_port() -> int:
    """Return one free port."""
    return free_ports(1)[0]


def _candidates() -> range:
    """Return the longer range below or above the ephemeral ports; all ports if both are empty."""
    first, last = map(int, _RANGE.read_text().split())
    below, above = range(_LOWEST, first), range(last + 1, 1 << 16)
    return max(below, above, key=len) or range(_LOWEST, 1 << 16)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
