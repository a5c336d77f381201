"""Process trees and socket owners, read from /proc only."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from simplebus.testing.server import until

PROC = Path("/proc")


def _stat(pid: int) -> list[str]:
    """Return state, parent, group, session and more; empty for an ended process."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def of_session(session: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            stat = _stat(int(entry.name))
            if stat and stat[0] not in "ZX" and int(stat[3]) == session:
                found.append(int(entry.name))
    return found


def end_session(session: int) -> None:
    """Kill all processes of a session."""
    for pid in of_session(session):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not of_session(session))


def command(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def ancestors(pid: int) -> list[int]:
    """Return a process and its ancestors."""
    found = []
    while pid > 1 and (stat := _stat(pid)):
        found.append(pid)
        pid = int(stat[1])
    return found


def _sockets(session: int) -> dict[str, int]:
    """Return the process that holds each socket of a session, by inode."""
    found = {}
    for pid in of_session(session):
        with contextlib.suppress(OSError):  # The process has ended.
            for file in os.listdir(PROC / str(pid) / "fd"):
                with contextlib.suppress(OSError):  # The file was closed meanwhile.
                    link = os.readlink(PROC / str(pid) / "fd" / file)
                    if link.startswith("socket:["):
                        found[link[8:-1]] = pid
    return found


class _TcpSocket(NamedTuple):
    """Row of `/proc/net/tcp` or `/proc/net/tcp6`."""

    local_address: str
    """In hexadecimal."""
    local_port: int
    remote_port: int
    state: str
    """In hexadecimal: `_LISTEN` for a listener."""
    inode: str


def _tcp_sockets() -> Iterator[_TcpSocket]:
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            address, _, local_port = words[1].rpartition(":")
            _, _, remote_port = words[2].rpartition(":")
            yield _TcpSocket(address, int(local_port, 16), int(remote_port, 16), words[3], words[9])


def find_connected(session: int, local_ports: set[int], remote_port: int) -> set[int]:
    """Return the processes of a session that are connected from `local_ports` to `remote_port`.

    A local port is not enough: connections to different servers may share it.
    """
    process_by_inode = _sockets(session)
    return {
        process_by_inode[row.inode]
        for row in _tcp_sockets()
        if row.local_port in local_ports
        and row.remote_port == remote_port
        and row.inode in process_by_inode
    }


def listening(session: int) -> set[str]:
    """Return the addresses, in hexadecimal, at which processes of a session listen."""
    sockets = _sockets(session)
    return {
        row.local_address for row in _tcp_sockets() if row.state == _LISTEN and row.inode in sockets
    }


_LISTEN = "0A"
