"""Tests of reloading the settings of a running server."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import trio

import simplebus
from simplebus.core.limits import Limits
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Retention, Settings
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.rate_limit import RateLimit
from simplebus.core.users.users import User, Users
from simplebus.logs.rate_limit import LogRateLimit
from simplebus.nats import nats_server as nats_server_module
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings
from simplebus.server import nats_listener as nats_listener_module
from simplebus.server import reload as server_reload
from simplebus.server import server as server_module
from simplebus.server.reload import CannotReloadError, apply_settings
from simplebus.server.run import RunningServer, ServeOptions, reload
from tests.behaviour.wire_peer_v2 import CONNECT, connect_request
from tests.support.nats_peer import connect_nats_peer, open_nats_peer
from tests.support.running_server import (
    ack,
    class_statistics,
    connect,
    message,
    serving,
    subscribe,
    wait_until,
)

INITIAL = Settings(Limits(class_messages=100))


def apply(server: RunningServer, settings: Settings = INITIAL, **more: Any) -> None:
    """Apply new settings to a server."""
    arguments = {"nats": NatsSettings(), "classes": (), "classes_before": ()} | more
    for _ in apply_settings(server.server.broker, server.nats_listener, settings, **arguments):
        pass
    server.server.flush_ready()


async def test_blocked_publisher_resumes_when_a_limit_is_raised() -> None:
    async with serving(INITIAL) as server:
        publisher = await connect(server, [1])
        await publisher.send(message(b"x") * 250)
        await wait_until(lambda: class_statistics(server).blocked_sessions == 1)
        apply(server, Settings(Limits(class_messages=200)))
        assert class_statistics(server).published == 200
        apply(server, Settings(Limits(class_messages=1000)))
        await wait_until(lambda: class_statistics(server).published == 250)
        assert class_statistics(server).blocked_sessions == 0


async def test_messages_over_a_lowered_limit_stay_until_acked() -> None:
    async with serving(INITIAL) as server:
        publisher = await connect(server, [1])
        await publisher.send(message(b"x") * 90)
        await wait_until(lambda: class_statistics(server).published == 90)
        apply(server, Settings(Limits(class_messages=10)))
        await publisher.send(message(b"y"))
        await wait_until(lambda: class_statistics(server).blocked_sessions == 1)
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        assert len(await subscriber.read_messages(90)) == 90
        await subscriber.send(ack(0, 85))
        assert await subscriber.read_messages(1) == [(90, b"y")]


async def test_reload_changes_the_memory_budget() -> None:
    small = Settings(Limits(total_bytes=1 << 20, class_bytes=1 << 20, frame_bytes=1 << 16))
    large = replace(small, limits=replace(small.limits, total_bytes=1 << 24, class_bytes=1 << 24))
    async with serving(small) as server, trio.open_nursery() as nursery:
        table = server.server.broker.store.class_registry
        publisher = await connect(server, [1])
        nursery.start_soon(publisher.send, message(bytes(60_000)) * 40)
        await wait_until(lambda: class_statistics(server).blocked_sessions == 1)
        apply(server, large)
        await wait_until(lambda: class_statistics(server).published == 40)
        apply(server, small)
        assert (table.budget.limit_bytes, table.dead_letter_budget.limit_bytes) == (
            1 << 20,
            1 << 18,
        )
        assert table.budget.reserved_bytes == (1 << 20) // 8
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        assert len(await subscriber.read_messages(40)) == 40
        await subscriber.send(ack(0, 40))
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)


async def test_reload_changes_settings_of_one_class() -> None:
    async with serving(INITIAL) as server:
        await connect(server, [1])
        class_settings = ClassSettings(
            keep=Retention(messages=5), full_policy=FullPolicy.DROP_OLDEST
        )
        apply(server, replace(INITIAL, classes={1: class_settings}))
        cls = server.server.broker.classes[1]
        assert (cls.full_policy, cls.ring.messages_max) == (FullPolicy.DROP_OLDEST, 100)
        apply(server, INITIAL)
        assert cls.full_policy is FullPolicy.BLOCK


async def test_handshake_limits_and_tick_survive_a_reload() -> None:
    async with serving(INITIAL) as server:
        requested = Settings(
            Limits(frame_bytes=100, credit_bytes=100), ack_timeout=9, tick_seconds=7
        )
        apply(server, requested)
        broker = server.server.broker
        assert broker.settings.limits.frame_bytes == INITIAL.limits.frame_bytes
        assert broker.settings.limits.credit_bytes == INITIAL.limits.credit_bytes
        assert (broker.settings.ack_timeout, broker.settings.tick_seconds) == (6, 1.0)
        assert broker.settings is broker.store.settings is broker.store.class_registry.settings


@pytest.mark.parametrize(
    ("settings", "classes", "message_pattern"),
    [
        (
            replace(INITIAL, full_policy=FullPolicy.SPILL),
            (),
            "restart the server to enable spilling",
        ),
        (
            Settings(Limits(total_bytes=1 << 20, class_bytes=1 << 20, frame_bytes=13)),
            (),
            "restart the server to apply this: limit frame_bytes must be from 13 to 524288",
        ),
        (
            Settings(Limits(classes=1)),
            [NamedClass(name="a"), NamedClass(name="b")],
            "named 2 new classes",
        ),
    ],
)
async def test_settings_that_need_a_restart_change_nothing(
    settings: Settings, classes: list[NamedClass], message_pattern: str
) -> None:
    async with serving(INITIAL) as server:
        with pytest.raises(CannotReloadError, match=message_pattern):
            apply(server, settings, classes=classes)
        assert server.server.broker.settings is INITIAL
        assert not server.server.broker.classes


async def test_fewer_classes_than_exist_are_refused() -> None:
    async with serving(INITIAL) as server:
        await connect(server, [1, 2, 3])
        with pytest.raises(CannotReloadError, match="max-classes is 2, but 3 classes exist"):
            apply(server, Settings(Limits(classes=2)))


async def test_reload_binds_and_unbinds_subjects() -> None:
    first = [NamedClass(name="orders", subjects=["orders.>"])]
    second = [NamedClass(name="orders", subjects=["shops.>"])]
    async with serving(INITIAL, nats_port=0, classes=tuple(first)) as server:
        broker = server.server.broker
        class_id = broker.store.class_id_by_name["orders"]
        broker.store.subject_bindings.bind(class_id, "by.a.client")
        apply(server, classes=second, classes_before=first)
        assert broker.store.subject_bindings.subjects_of(class_id) == ("by.a.client", "shops.>")
        apply(server, classes=[], classes_before=second)
        assert broker.store.subject_bindings.subjects_of(class_id) == ("by.a.client",)


async def test_reload_ends_last_values_that_are_declared_no_more() -> None:
    first_class, state = (
        NamedClass(id=1, last_values=True),
        NamedClass(name="state", last_values=True),
    )
    async with serving(INITIAL, classes=(first_class, state)) as server:
        registry = server.server.broker.store.class_registry
        state_id = registry.class_id_by_name["state"]
        apply(server, classes=(first_class,), classes_before=(first_class, state))
        assert registry.classes[1].has_last_values
        assert not registry.classes[state_id].has_last_values
        apply(server, classes=(first_class, state), classes_before=(first_class,))
        assert registry.classes[state_id].has_last_values


async def test_reload_disconnects_nats_clients_of_changed_users() -> None:
    def users(*names: str) -> NatsSettings:
        return NatsSettings(users=Users(tuple(User(name, name) for name in names)))

    async with serving(INITIAL, nats_port=0, nats=users("ada", "bob")) as server:
        ada = await connect_nats_peer(server, user="ada", **{"pass": "ada"})
        bob = await connect_nats_peer(server, user="bob", **{"pass": "bob"})
        apply(server, nats=users("ada", "eve"))
        await bob.read_until_closed()
        await ada.send(b"PING\r\n")
        assert await ada.read_line() == b"PONG"
        eve = await connect_nats_peer(server, user="eve", **{"pass": "eve"})
        await eve.send(b"PING\r\n")
        assert await eve.read_line() == b"PONG"
        apply(server, nats=NatsSettings(limits=NatsLimits(max_payload=8)))
        await ada.read_until_closed()
        anybody = await connect_nats_peer(server)
        await anybody.send(b"PUB a 9\r\n123456789\r\n")
        assert b"Maximum Payload" in await anybody.read_line()


async def test_reload_keeps_tls_of_the_nats_listener() -> None:
    async with serving(INITIAL, nats_port=0) as server:
        limits = NatsLimits(max_payload=9, tls_seconds=60.0)
        apply(server, nats=NatsSettings(limits=limits, tls_required=True, tls_verify=True))
        client = await open_nats_peer(server)
        info = await client.read_info()
        assert info["max_payload"] == 9
        assert {"tls_required", "tls_verify"}.isdisjoint(info)
        assert server.nats_listener is not None
        used = server.nats_listener.nats_server.settings.limits
        assert used.tls_seconds == NatsLimits().tls_seconds


async def test_reload_without_nats_users_keeps_authentication(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nats = NatsSettings(users=Users((User("ada", "ada"),)))
    async with serving(INITIAL, nats_port=0, nats=nats) as server:
        await reload(server, ServeOptions(reload=lambda: (INITIAL, ServeOptions(), lambda: None)))
        assert "the new settings have no users of NATS clients" in caplog.text
        client = await open_nats_peer(server)
        assert (await client.read_info())["auth_required"] is True


async def test_all_errors_of_every_reload_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise ValueError("\n".join(f"bus.toml:{line}: wrong" for line in range(100)))

    handler = logging.NullHandler()
    log_filter = LogRateLimit(handler)
    async with serving(INITIAL) as server:
        for _ in range(2):
            await reload(server, ServeOptions(reload=broken))
    rejected = [
        record for record in caplog.records if "settings not reloaded" in record.getMessage()
    ]
    assert len(rejected) == 200
    assert all(map(log_filter.filter, rejected))


async def test_invalid_file_changes_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> Any:
        raise ValueError("bus.toml:1: one\nbus.toml:2: two")

    async with serving(INITIAL) as server:
        before = ServeOptions(reload=broken, drain_seconds=3)
        assert await reload(server, before) is before
        assert [
            record.getMessage() for record in caplog.records if record.levelname == "ERROR"
        ] == [
            "settings not reloaded: bus.toml:1: one",
            "settings not reloaded: bus.toml:2: two",
        ]

        def faulty() -> Any:
            raise RuntimeError("a fault of ours")

        before = replace(before, reload=faulty)
        assert await reload(server, before) is before  # The old configuration stays.
        assert "applying the reloaded settings failed" in caplog.text

        callbacks: list[str] = []
        settings, options = Settings(Limits(class_messages=7)), ServeOptions(drain_seconds=5)
        before = replace(before, reload=lambda: (settings, options, lambda: callbacks.append("x")))
        assert ((await reload(server, before)).drain_seconds, callbacks) == (5, ["x"])
        assert server.server.broker.settings.limits.class_messages == 7


async def test_slow_file_system_does_not_block_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, can_finish = threading.Event(), threading.Event()

    def slow() -> Any:
        started.set()
        can_finish.wait()
        raise ValueError("too late")

    async with serving(INITIAL, nats_port=0) as server, trio.open_nursery() as nursery:
        client = await connect_nats_peer(server)
        nursery.start_soon(reload, server, ServeOptions(reload=slow))
        await wait_until(started.is_set)
        await client.send(b"PING\r\n")
        assert await client.read_line() == b"PONG"
        can_finish.set()
    assert "settings not reloaded: too late" in caplog.text
    can_finish.clear()
    monkeypatch.setattr(server_reload, "READ_SECONDS_MAX", 0.01)
    async with serving(INITIAL) as server:
        await reload(server, ServeOptions(reload=slow))
        assert "settings not reloaded: reading the files took" in caplog.text
        can_finish.set()


async def test_a_reload_under_load_loses_nothing() -> None:
    async with serving(Settings(Limits(class_messages=10_000))) as server:
        subscriber = await connect(server, [1])
        await subscriber.send(subscribe())
        publisher = await connect(server, [1])
        received_count = 0
        async with trio.open_nursery() as nursery:

            async def publish() -> None:
                for _ in range(100):
                    await publisher.send(message(b"0123456789abcdef") * 100)

            nursery.start_soon(publish)
            while received_count < 10_000:
                received_count += len(await subscriber.read_messages(100))
                await subscriber.send(ack(received_count - 100, received_count))
                apply(
                    server,
                    Settings(
                        Limits(
                            class_messages=300 + received_count,
                            total_bytes=(1 << 30) - received_count,
                        )
                    ),
                )
        await wait_until(lambda: class_statistics(server).ring.message_count == 0)
        assert class_statistics(server).redelivered == 0


async def test_users_and_limits_are_applied_in_portions_to_all_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that connect or leave between the portions do not matter."""
    for module in (server_module, nats_listener_module):
        monkeypatch.setattr(module, "CHANGED_SESSIONS_PER_TURN", 1)
    monkeypatch.setattr(nats_server_module, "CHECKED_CLIENTS_PER_TURN", 1)
    stays, leaves = (User(name, token=hash_token(name)) for name in ("stays", "leaves"))
    before, after = Users([stays, leaves]), Users([stays])
    async with serving(users=before, nats_port=0, nats=NatsSettings(users=before)) as server:
        assert server.nats_listener is not None
        peers = [
            await connect_nats_peer(server, auth_token=name)
            for name in ("leaves", "stays", "leaves", "leaves")
        ]
        listener, bus_server = server.nats_listener, server.server
        async with simplebus.connect(server.addresses[0], token="stays") as bus:
            parts = chain(
                listener.apply_settings_in_parts(NatsSettings(users=after)),
                bus_server.replace_users_in_parts(after),
                bus_server.apply_rate_limits_in_parts(RateLimit(1e6)),
                listener.apply_rate_limits_in_parts(),
            )
            next(parts)
            await peers[3].stream.aclose()
            await wait_until(lambda: len(listener.connections) < 4)
            peers.append(await connect_nats_peer(server, auth_token="stays"))
            for _ in parts:
                await trio.lowlevel.checkpoint()
            await wait_until(lambda: len(listener.connections) == 2)
            limits = [session.token_buckets for session in listener.nats_server.sessions.values()]
            assert [len(limit) for limit in limits] == [1, 1]
            await bus.publish(b"x", class_id=1)
            limits = [session.token_buckets for session in bus_server.broker.sessions.values()]
            assert [len(limit) for limit in limits] == [1]


async def test_a_client_that_authenticates_between_the_portions_stays_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CHANGED_SESSIONS_PER_TURN", 1)
    new, stays = (User(name, token=hash_token(name)) for name in ("new", "stays"))
    async with serving(users=Users([stays])) as server:
        connections = server.server.connections
        peers = [await connect(server) for _ in range(2)]
        await peers[0].send(connect_request(1, auth={"token": "stays"}))
        assert (await peers[0].read_frame())[0] == CONNECT
        await wait_until(lambda: len(connections) == 2)
        parts = server.server.replace_users_in_parts(Users([new, stays]))
        next(parts)
        await peers[1].send(connect_request(1, auth={"token": "new"}))
        assert (await peers[1].read_frame())[0] == CONNECT
        for _ in parts:
            await trio.lowlevel.checkpoint()
        for peer in peers:
            await peer.send(connect_request(2))
            assert (await peer.read_frame())[0] == CONNECT
        assert len(connections) == 2
