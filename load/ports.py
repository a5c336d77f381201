"""Ports for programs that are killed and come back where they were, or whom others know before.

Rule 1: none is given twice while anybody may still want it, whoever asks: the next one is written
in a file that all runs of this user share.
Rule 2: none is of those that the system gives to connections and to who asks for any.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 10_000
"""Those of services lie below."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports of HOST at which nobody listens. Raises OSError where all are somebody's."""
    found: list[int] = []
    candidates = _candidates()
    file = Path(tempfile.gettempdir()) / f"simplebus-ports-{os.getuid()}"
    shared = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(shared, fcntl.LOCK_EX)  # Until it is closed.
        given = int(os.pread(shared, 20, 0) or b"0")
        for number in range(given, given + len(candidates)):
            if len(found) == count:
                break
            port = candidates[number % len(candidates)]
            given = number + 1
            if _is_free(port):
                found.append(port)
        os.pwrite(shared, b"%20d" % given, 0)
    finally:
        os.close(shared)
    if len(found) < count:
        raise OSError(f"{len(found)} of {count} ports were free")
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _candidates() -> range:
    """The longer of what lies below and above those of the system; all, where these are all."""
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
