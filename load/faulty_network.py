"""Two networks of their own and a bad line between them: what it carries comes late, is lost, is
overtaken, or does not come at all.

Rule 1: packets, not bytes: each goes its own way, and the kernel's TCP does what it does out there.
Rule 2: nothing outlives the program: networks and devices are gone with the last who uses them.

    network "near" 10.77.0.1 ── tun ──► Line (a thread) ──► tun ── 10.77.0.2 network "far"
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

NEAR, FAR = "10.77.0.1", "10.77.0.2"
_DEVICE = "line"
_PACKET_BYTES = 65_536
_WAITING_MAX = 10_000  # Packets that are under way; the next one is lost.
_TURN = 64  # Packets that are read before others are let go.
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_DEVICE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x1001  # IFF_TUN, IFF_NO_PI
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """What is lacking here for networks of one's own; empty for nothing."""
    if os.geteuid() != 0:
        return "to be root"
    absent = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} (iproute2, util-linux)"
    return "" if os.path.exists("/dev/net/tun") else "/dev/net/tun"


class Network:
    """A network namespace with one device in it, whose packets are read and written here."""

    def __init__(self, address: str, peer: str) -> None:
        """Raises LoadError where the system does not let one have it."""
        self.address = address
        self._space = self.packets = -1
        thread = threading.Thread(target=self._make)
        thread.start()
        thread.join()
        if self.packets < 0:
            raise LoadError(f"a network of one's own needs {missing() or 'more rights'}")
        self._ip("link", "set", "lo", "up")
        self._ip("address", "add", address, "peer", peer, "dev", _DEVICE)
        self._ip("link", "set", _DEVICE, "up")

    def _make(self) -> None:
        """In a thread that is never used again: it is in the new network."""
        with suppress(OSError):
            _check(_libc.unshare(_NEW_NETWORK))
            self._space = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            packets = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            wanted = struct.pack("16sH22x", _DEVICE.encode(), _TUN_WITHOUT_HEADER)
            fcntl.ioctl(packets, _SET_DEVICE, wanted)
            self.packets = packets

    def _ip(self, *words: str) -> None:
        subprocess.run(self.command(["ip", *words]), check=True)

    def command(self, words: Sequence[str]) -> list[str]:
        """The same command, run in there."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._space}", *words]

    def enter(self) -> None:
        """Take this thread there, for good."""
        _check(_libc.setns(self._space, _NEW_NETWORK))

    def thread(self, work: Callable[[], object]) -> threading.Thread:
        """A running thread that does this in there."""

        def run() -> None:
            self.enter()
            work()

        found = threading.Thread(target=run, daemon=True)
        found.start()
        return found

    def close(self) -> None:
        for each in (self.packets, self._space):
            os.close(each)


class Line:
    """Carries packets between two networks as long as its `with` block lasts."""

    def __init__(self, near: Network, far: Network, *, seed: int = 0) -> None:
        self.delay_s = self.jitter_s = 0.0
        """How long each packet takes one way: that, and up to so much more. What takes longer is
        overtaken by what comes behind."""
        self.loss = 0.0
        """Which part of them is lost."""
        self.is_cut = False
        """Whether nothing comes through. Nobody is told."""
        self.carried = self.lost = 0
        self._to = {near.packets: far.packets, far.packets: near.packets}
        self._chance = random.Random(seed)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        """When they arrive, in order; their numbers; where; and what."""
        self._is_over = False
        self._thread = threading.Thread(target=self._carry, daemon=True)

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

    def _carry(self) -> None:
        while not self._is_over:
            wait = 0.05
            if self._under_way:
                wait = min(wait, max(0.0, self._under_way[0][0] - time.monotonic()))
            for source in select.select(list(self._to), [], [], wait)[0]:
                for _ in range(_TURN):
                    try:
                        packet = os.read(source, _PACKET_BYTES)
                    except BlockingIOError:
                        break
                    self._take(self._to[source], packet)
            self._let_go()

    def _take(self, to: int, packet: bytes) -> None:
        is_lost = self.is_cut or self._chance.random() < self.loss
        if is_lost or len(self._under_way) >= _WAITING_MAX:
            self.lost += 1
            return
        self.carried += 1
        at = time.monotonic() + self.delay_s + self._chance.random() * self.jitter_s
        heapq.heappush(self._under_way, (at, self.carried, to, packet))

    def _let_go(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._under_way)
            if not self.is_cut:
                with suppress(OSError):  # Its queue is full: that packet is lost, too.
                    os.write(to, packet)


def _check(status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
