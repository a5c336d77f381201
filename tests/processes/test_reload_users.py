"""Tests of SIGHUP with changed users while clients are connected to every listener.

Clients that are not affected never reconnect, so a lost connection fails the test.
"""

from __future__ import annotations

import http.client
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.core.users.passwords import hash_token
from tests.support.nats_peer import NatsPeer
from tests.support.programs import PATIENCE_SECONDS, Program, run_server

MESSAGES_BETWEEN_RELOADS = 300
"""Messages received between two reloads."""


def users(*tables: str) -> str:
    return "".join(f"[[users]]\n{table}\n" for table in tables)


def user(name: str, rights: str = "", secret: str = "") -> str:
    return f'name = "{name}"\ntoken = "{hash_token(secret or name)}"\n{rights}'


def rights(permissions: str, *, admin: str = "[]") -> str:
    return (
        f'[users.permissions]\npublish = ["{permissions}"]\nadmin = {admin}\n'
        f'[users.nats]\npublish = ["{permissions}.>"]\n'
    )


UNCHANGED, REMOVED = user("stays"), user("goes")
BEFORE = users(UNCHANGED, REMOVED, user("changes", rights("orders", admin='["monitor"]')))
AFTER = users(UNCHANGED, user("changes", rights("audit")))


class UnchangedUser:
    """A user that no reload changes.

    Its messages on two listeners must arrive once and in order, and its connections must stay open.
    """

    def __init__(self) -> None:
        self.received_count = 0
        self.nats_count = 0
        self.is_stopping = False
        self.published_count: int | None = None
        """Total of published messages, known at the end."""
        self.progress = trio.Event()

    async def wait_more(self) -> None:
        """Wait until messages published from now on have arrived on both listeners."""
        received, nats_received = (
            self.received_count + MESSAGES_BETWEEN_RELOADS,
            self.nats_count + MESSAGES_BETWEEN_RELOADS,
        )
        with trio.fail_after(PATIENCE_SECONDS):
            while self.received_count < received or self.nats_count < nats_received:
                await self.progress.wait()

    async def stop(self) -> None:
        """Stop publishing and wait until everything has arrived."""
        self.is_stopping = True
        with trio.fail_after(PATIENCE_SECONDS):
            while self.published_count is None or self.received_count < self.published_count:
                await self.progress.wait()

    def _notify_progress(self) -> None:
        self.progress.set()
        self.progress = trio.Event()

    async def publish(self, url: str) -> None:
        async with simplebus.connect(url, token="stays", reconnect=None) as bus:
            sent = 0
            while not self.is_stopping:
                await bus.publish_many([b"%d" % (sent + n) for n in range(20)], class_id="load")
                sent += 20
        self.published_count = sent
        self._notify_progress()

    async def subscribe(self, url: str) -> None:
        async with (
            simplebus.connect(url, token="stays", reconnect=None) as bus,
            bus.subscribe("load") as messages,
        ):
            async for message in messages:
                assert int(message.payload) == self.received_count
                assert message.attempt == 1
                self.received_count += 1
                self._notify_progress()

    async def publish_over_nats(self, address: str) -> None:
        async with nats_peer(address, "stays") as peer:
            await peer.send(b"SUB free.* 1\r\n")
            while not self.is_stopping:
                await peer.send(b"PUB free.load 0\r\n\r\n" * 20)
                for _ in range(20):
                    assert await peer.read_line() == b"MSG free.load 1 0"
                    assert await peer.read_line() == b""
                self.nats_count += 20
                self._notify_progress()


@asynccontextmanager
async def nats_peer(address: str, token: str) -> AsyncIterator[NatsPeer]:
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        peer = NatsPeer(stream)
        await peer.handshake(auth_token=token)
        yield peer


async def http_status(address: str, token: str) -> int:
    """Return the status of a request of this user to the HTTP listener."""

    def request() -> int:
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_SECONDS)
        with closing(connection):
            connection.request("GET", "/varz", headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            response.read()
            return response.status

    return await trio.to_thread.run_sync(request)


async def publish_until_disconnected(
    url: str, token: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Publish until the server disconnects the user with the expected reason."""

    async def publish() -> None:
        async with simplebus.connect(url, token=token, reconnect=None) as bus:
            await bus.publish(b"x", class_id="orders")
            task_status.started()
            while True:
                await bus.publish(b"x", class_id="orders")

    with pytest.raises(simplebus.BusError, match="was removed or changed"):
        await publish()


async def wait_closed(peer: NatsPeer) -> None:
    while await peer.read_line():
        pass


async def test_reload_disconnects_only_changed_users(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    file.write_text(BEFORE)
    file.chmod(0o600)
    # The long ack timeout avoids redeliveries on a slow machine.
    with run_server("--users", str(file), "--ack-timeout", "600") as (program, url):
        unchanged = UnchangedUser()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(unchanged.publish, url)
            nursery.start_soon(unchanged.subscribe, url)
            nursery.start_soon(unchanged.publish_over_nats, program.nats_address)
            await unchanged.wait_more()
            await change_users(program, url, file, unchanged)
            for text in (BEFORE, AFTER) * 3:
                reload(program, file, text)
                await unchanged.wait_more()
            await unchanged.stop()
            nursery.cancel_scope.cancel()
        program.signal(signal.SIGTERM)
        assert program.wait()[0] == 0


def reload(program: Program, file: Path, text: str) -> None:
    """Replace the file atomically and reload: the server may still read the previous version."""
    new_file = file.with_suffix(".new")
    new_file.touch(0o600)
    new_file.write_text(text)
    new_file.replace(file)
    program.signal(signal.SIGHUP)


async def change_users(program: Program, url: str, file: Path, unchanged: UnchangedUser) -> None:
    """Remove one user and change the permissions of another."""
    connect = partial(simplebus.connect, url, reconnect=None)
    async with (
        nats_peer(program.nats_address, "goes") as removed_peer,
        nats_peer(program.nats_address, "changes") as changed_peer,
        trio.open_nursery() as nursery,
    ):
        await changed_peer.send(b"PUB audit.x 0\r\n\r\n")
        assert b"Permissions Violation for Publish" in await changed_peer.read_line()
        await changed_peer.send(b"PUB orders.x 0\r\n\r\n")
        await changed_peer.flush()
        assert (
            await http_status(program.http_address, "goes")
            == await http_status(program.http_address, "changes")
            == 200
        )
        for token in ("goes", "changes"):
            await nursery.start(publish_until_disconnected, url, token)
        reload(program, file, AFTER)
        await wait_closed(removed_peer)
        await wait_closed(changed_peer)
    await unchanged.wait_more()
    assert await http_status(program.http_address, "goes") == 401
    assert await http_status(program.http_address, "changes") == 403
    with pytest.raises(simplebus.BusConnectionError, match="wrong user, password or token"):
        async with connect(token="goes"):
            pass
    async with connect(token="changes") as changed:
        await changed.publish(b"x", class_id="audit")
        with pytest.raises(simplebus.RefusedError, match="unauthorized"):
            await changed.publish(b"x", class_id="orders")
    async with nats_peer(program.nats_address, "changes") as changed_peer:
        await changed_peer.send(b"PUB audit.x 0\r\n\r\nPUB orders.x 0\r\n\r\n")
        assert b'Publish to "orders.x"' in await changed_peer.read_line()
