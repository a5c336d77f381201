"""Tests of notifications to systemd."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from simplebus.server import systemd
from simplebus.server.systemd import notify, send_notifications, watchdog_seconds


@pytest.fixture
def notify_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Socket that systemd would listen on."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.settimeout(60)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    return sock


def test_watchdog_variables_of_another_process_are_ignored() -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": "3000000"}) == 3
    assert watchdog_seconds({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}) == 3
    assert watchdog_seconds({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}) is None
    for text in ("", "0", "soon"):
        assert watchdog_seconds({"WATCHDOG_USEC": text}) is None


async def test_sends_watchdog_twice_per_interval_and_the_status(
    notify_socket: socket.socket, autojump_clock: MockClock
) -> None:
    notifications: list[tuple[float, tuple[str, ...]]] = []
    start = trio.current_time()

    def send(*lines: str) -> None:
        notifications.append((trio.current_time() - start, lines))

    with trio.move_on_after(16):
        await send_notifications(lambda: "fine", watchdog_interval=6, send=send)
    assert [at for at, _ in notifications] == pytest.approx([3, 6, 9, 12, 15])
    assert [len(lines) for _, lines in notifications] == [1, 1, 1, 2, 1]
    assert notifications[3][1] == ("WATCHDOG=1", "STATUS=fine")
    notify_socket.close()


async def test_without_watchdog_sends_only_the_status(
    notify_socket: socket.socket, autojump_clock: MockClock
) -> None:
    notifications: list[tuple[str, ...]] = []
    with trio.move_on_after(systemd.STATUS_INTERVAL_SECONDS * 2.5):
        await send_notifications(
            lambda: "fine", watchdog_interval=None, send=lambda *lines: notifications.append(lines)
        )
    assert notifications == [("STATUS=fine",)] * 2
    notify_socket.close()


async def test_without_systemd_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with trio.fail_after(240):
        await send_notifications(lambda: "fine", watchdog_interval=1)


def test_full_notify_socket_does_not_block(notify_socket: socket.socket) -> None:
    begin = time.monotonic()
    while notify("STATUS=" + "x" * 1000):
        assert time.monotonic() - begin < 30
    assert notify_socket.recv(2000).startswith(b"STATUS=xxx")
    notify_socket.close()
