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

ENOUGH = 300
"""Messages between two reloads."""


def users(*tables: str) -> str:
    return "".join(f"[[users]]\n{table}\n" for table in tables)


def user(name: str, rights: str = "", secret: str = "") -> str:
    return f'name = "{name}"\ntoken = "{hash_token(secret or name)}"\n{rights}'


def rights(what: str, *, admin: str = "[]") -> str:
    return (
        f'[users.permissions]\npublish = ["{what}"]\nadmin = {admin}\n'
        f'[users.nats]\npublish = ["{what}.>"]\n'
    )


STAYS, GOES = user("stays"), user("goes")
BEFORE = users(STAYS, GOES, user("changes", rights("orders", admin='["monitor"]')))
AFTER = users(STAYS, user("changes", rights("audit")))


class UnchangedUser:
    """A user that is not touched: what it publishes at two doors arrives, once and in order, and
    its connections stay."""

    def __init__(self) -> None:
        self.received_count = 0
        self.nats_count = 0
        self.is_stopping = False
        self.published_count: int | None = None
        """How many in the end."""
        self.progress = trio.Event()

    async def wait_more(self) -> None:
        """Until messages have come that were published from now on, at both doors."""
        got, heard = self.received_count + ENOUGH, self.nats_count + ENOUGH
        with trio.fail_after(PATIENCE_SECONDS):
            while self.received_count < got or self.nats_count < heard:
                await self.progress.wait()

    async def stop(self) -> None:
        """No more is published, and all that was has come."""
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

    async def publish_over_nats(self, at: str) -> None:
        async with nats_peer(at, "stays") as peer:
            await peer.send(b"SUB free.* 1\r\n")
            while not self.is_stopping:
                await peer.send(b"PUB free.load 0\r\n\r\n" * 20)
                for _ in range(20):
                    assert await peer.read_line() == b"MSG free.load 1 0"
                    assert await peer.read_line() == b""
                self.nats_count += 20
                self._notify_progress()


@asynccontextmanager
async def nats_peer(at: str, token: str) -> AsyncIterator[NatsPeer]:
    host, _, port = at.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        peer = NatsPeer(stream)
        await peer.handshake(auth_token=token)
        yield peer


async def status(at: str, token: str) -> int:
    """What the HTTP door answers this user."""

    def asked() -> int:
        connection = http.client.HTTPConnection(at, timeout=PATIENCE_SECONDS)
        with closing(connection):
            connection.request("GET", "/varz", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    return await trio.to_thread.run_sync(asked)


async def is_cut_off(
    url: str, token: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Publishes until its connection is over, and hears why."""

    async def publish() -> None:
        async with simplebus.connect(url, token=token, reconnect=None) as bus:
            await bus.publish(b"x", class_id="orders")
            task_status.started()
            while True:
                await bus.publish(b"x", class_id="orders")

    with pytest.raises(simplebus.BusError, match="was removed or changed"):
        await publish()


async def hung_up(peer: NatsPeer) -> None:
    while await peer.read_line():
        pass


async def test_reload_disconnects_only_changed_users(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    file.write_text(BEFORE)
    file.chmod(0o600)
    # However late somebody is: what comes again by itself is not looked at here.
    with run_server("--users", str(file), "--ack-timeout", "600") as (it, url):
        stays = UnchangedUser()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stays.publish, url)
            nursery.start_soon(stays.subscribe, url)
            nursery.start_soon(stays.publish_over_nats, it.nats_address)
            await stays.wait_more()
            await change(it, url, file, stays)
            for text in (BEFORE, AFTER) * 3:  # As often as an operator likes.
                reload(it, file, text)
                await stays.wait_more()
            await stays.stop()
            nursery.cancel_scope.cancel()
        it.signal(signal.SIGTERM)
        assert it.wait()[0] == 0


def reload(it: Program, file: Path, text: str) -> None:
    """The file is whole at any time: the server may still be about to read it for the last one."""
    new = file.with_suffix(".new")
    new.touch(0o600)
    new.write_text(text)
    new.replace(file)
    it.signal(signal.SIGHUP)


async def change(it: Program, url: str, file: Path, stays: UnchangedUser) -> None:
    """One user is taken out, and another one may do something else."""
    once = partial(simplebus.connect, url, reconnect=None)
    async with (
        nats_peer(it.nats_address, "goes") as gone_there,
        nats_peer(it.nats_address, "changes") as changed_there,
        trio.open_nursery() as nursery,
    ):
        await changed_there.send(b"PUB audit.x 0\r\n\r\n")
        assert b"Permissions Violation for Publish" in await changed_there.read_line()
        await changed_there.send(b"PUB orders.x 0\r\n\r\n")
        await changed_there.flush()
        assert (
            await status(it.http_address, "goes") == await status(it.http_address, "changes") == 200
        )
        for token in ("goes", "changes"):
            await nursery.start(is_cut_off, url, token)
        reload(it, file, AFTER)
        await hung_up(gone_there)
        await hung_up(changed_there)
    await stays.wait_more()
    assert await status(it.http_address, "goes") == 401
    assert await status(it.http_address, "changes") == 403
    with pytest.raises(simplebus.BusConnectionError, match="wrong user, password or token"):
        async with once(token="goes"):
            pass
    async with once(token="changes") as changed:
        await changed.publish(b"x", class_id="audit")
        with pytest.raises(simplebus.RefusedError, match="unauthorized"):
            await changed.publish(b"x", class_id="orders")
    async with nats_peer(it.nats_address, "changes") as changed_there:
        await changed_there.send(b"PUB audit.x 0\r\n\r\nPUB orders.x 0\r\n\r\n")
        assert b'Publish to "orders.x"' in await changed_there.read_line()
