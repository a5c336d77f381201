"""Two network namespaces with a faulty link between them: delay, reordering, loss and cuts.

The link carries packets, so the kernel's TCP reacts as in reality. Namespaces and devices end with
the program.

    source 10.77.0.1 ── tun ──► FaultyLink (a thread) ──► tun ── 10.77.0.2 target
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from load.processes import LoadError

SOURCE_ADDRESS, TARGET_ADDRESS = "10.77.0.1", "10.77.0.2"
_DEVICE = "line"
_PACKET_BYTES = 65_536
_QUEUE_PACKETS_MAX = 10_000  # Packets on the link; further ones are lost.
_READ_PACKETS_MAX = 64  # Packets that are read before due ones are delivered.
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_DEVICE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x1001  # IFF_TUN, IFF_NO_PI
_libc = ctypes.CDLL(None, use_errno=True)


def missing_requirement() -> str:
    """Return the missing requirement of network namespaces; empty if all are met."""
    if os.geteuid() != 0:
        return "to be root"
    absent = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} (iproute2, util-linux)"
    return "" if os.path.exists("/dev/net/tun") else "/dev/net/tun"


class Network:
    """Network namespace with one device. This process reads and writes its packets."""

    def __init__(self, address: str, peer: str) -> None:
        """Raises LoadError if the system does not allow it."""
        self.address = address
        self._namespace = self.packets = -1
        thread = threading.Thread(target=self._create_namespace)
        thread.start()
        thread.join()
        if self.packets < 0:
            raise LoadError(f"a network namespace needs {missing_requirement() or 'more rights'}")
        self._ip("link", "set", "lo", "up")
        self._ip("address", "add", address, "peer", peer, "dev", _DEVICE)
        self._ip("link", "set", _DEVICE, "up")

    def _create_namespace(self) -> None:
        """Create the namespace. The thread stays in it and must not be reused."""
        with suppress(OSError):
            _check(_libc.unshare(_NEW_NETWORK))
            self._namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            packets = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", _DEVICE.encode(), _TUN_WITHOUT_HEADER)
            fcntl.ioctl(packets, _SET_DEVICE, request)
            self.packets = packets

    def _ip(self, *words: str) -> None:
        subprocess.run(self.command(["ip", *words]), check=True)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` in the namespace."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}", *words]

    def enter(self) -> None:
        """Move this thread into the namespace. It cannot leave it."""
        _check(_libc.setns(self._namespace, _NEW_NETWORK))

    def thread(self, work: Callable[[], object]) -> threading.Thread:
        """Start a thread in the namespace."""

        def run() -> None:
            self.enter()
            work()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        for each in (self.packets, self._namespace):
            os.close(each)


class FaultyLink:
    """Carries packets between two networks in a `with` block."""

    def __init__(self, source: Network, target: Network, *, seed: int = 0) -> None:
        self.delay_s = self.jitter_s = 0.0
        """One-way delay and its random addition, which reorders packets."""
        self.loss = 0.0
        """Fraction of lost packets."""
        self.is_cut = False
        """True to drop all packets silently."""
        self.carried = self.lost = 0
        self._to = {source.packets: target.packets, target.packets: source.packets}
        self._chance = random.Random(seed)
        self._scheduled: list[tuple[float, int, int, bytes]] = []
        """Heap of arrival time, packet number, destination and packet."""
        self._is_over = False
        self._thread = threading.Thread(target=self._forward_packets, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join()

    def _forward_packets(self) -> None:
        while not self._is_over:
            wait = 0.05
            if self._scheduled:
                wait = min(wait, max(0.0, self._scheduled[0][0] - time.monotonic()))
            for source in select.select(list(self._to), [], [], wait)[0]:
                for _ in range(_READ_PACKETS_MAX):
                    try:
                        packet = os.read(source, _PACKET_BYTES)
                    except BlockingIOError:
                        break
                    self._schedule(self._to[source], packet)
            self._deliver_due()

    def _schedule(self, to: int, packet: bytes) -> None:
        is_lost = self.is_cut or self._chance.random() < self.loss
        if is_lost or len(self._scheduled) >= _QUEUE_PACKETS_MAX:
            self.lost += 1
            return
        self.carried += 1
        at = time.monotonic() + self.delay_s + self._chance.random() * self.jitter_s
        heapq.heappush(self._scheduled, (at, self.carried, to, packet))

    def _deliver_due(self) -> None:
        now = time.monotonic()
        while self._scheduled and self._scheduled[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._scheduled)
            if not self.is_cut:
                with suppress(OSError):  # The device's queue is full: the packet is lost, too.
                    os.write(to, packet)


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
