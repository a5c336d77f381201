"""Two stateless servers and one real nats-server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
import trio.testing

import simplebus
from simplebus.core.errors import RefusedError
from simplebus.core.protocol import frames
from simplebus.jetstream.consume.feed import ConsumerFeed
from simplebus.server.run import RunningServer
from tests.behaviour.wire_peer_v2 import connect_request, subscribe, unsubscribe
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    two_servers,
    until,
)
from tests.support import running_server
from tests.support.nats_peer import connect_nats_peer


def feeds_of(server: RunningServer) -> list[ConsumerFeed]:
    """Return the feeds that have an open consumer."""
    return [feed for feed in cluster_of(server).feeds.values() if feed.is_open]


async def test_confirms_when_cluster_has_stored_in_memory(
    jetstream_server: NatsServer,
) -> None:
    cluster, confirmed = options(jetstream_server.url), trio.Event()
    assert cluster.storage == "memory"
    async with stateless_server(cluster) as server, simplebus.connect(address(server)) as bus:
        await bus.publish(b"the stream is there", class_id=7)

        async def publish() -> None:
            await bus.publish(b"", class_id=7)
            confirmed.set()

        publisher = cluster_of(server).publisher
        hold = publisher.pause_class(7)
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish)
                await until(lambda: publisher.unstored_batch_count == 1)
                await bus.explain()  # Earlier requests have been answered,
                # and their senders have received the replies.
                await trio.testing.wait_all_tasks_blocked()
                assert not confirmed.is_set()
                publisher.resume_class(7, hold)


async def test_confirmed_message_is_delivered_at_another_server(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (first_server, second_server, publisher, bus):
        await publisher.publish(b"before", class_id=7)
        async with bus.subscribe(7, durable="d") as messages:
            with trio.fail_after(PATIENCE_SECONDS):
                assert (await messages.get()).payload == b"before"
                await publisher.publish(
                    b"<\r\n>", class_id=7, channel="a.b", key=b"k", headers={"x": "y"}
                )
                message = await messages.get()
                assert (message.payload, message.channel, message.key) == (b"<\r\n>", "a.b", b"k")
                assert dict(message.headers) == {"x": "y"}
                await publisher.publish_many([b"%d" % n for n in range(3000)], class_id=7)
                received = [(await messages.get()).payload for _ in range(3000)]
                assert received == [b"%d" % n for n in range(3000)]
        await until(
            lambda: not (cluster_of(second_server).feeds or cluster_of(second_server).is_busy)
        )
        name = f"CONSUMER.INFO.{cluster.names.stream_name(7)}.d-d"
        info = await cluster_of(first_server).link.api_request(name)
        assert (info["ack_floor"]["stream_seq"], info["num_ack_pending"]) == (3002, 0)


async def test_cut_connection_keeps_order_without_duplicates(
    jetstream_server: NatsServer,
) -> None:
    """The sequences start again, so its subscriber may receive messages twice."""
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
        bus.subscribe(1) as messages,
    ):
        expected = [b"%d %s" % (n, suffix) for n in range(3) for suffix in (b"before", b"behind")]
        for number in range(3):
            await bus.publish(b"%d before" % number, class_id=1)
            for connection in server.server.connections.values():
                connection.disconnect()
            await bus.publish(b"%d behind" % number, class_id=1)
        with trio.fail_after(PATIENCE_SECONDS):
            assert [message.payload for message in await bus.fetch(1)] == expected
            received = dict[bytes, None]()
            while len(received) < len(expected):
                received[(await messages.get()).payload] = None
        assert list(received) == expected


async def test_version_1_receives_backlog_and_returns_unacked(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster) as first_server,
        stateless_server(cluster) as second_server,
    ):
        first, second = (
            await running_server.connect(first_server, [3]),
            await running_server.connect(second_server, [3]),
        )
        for number in range(3):
            content = b"%d" % number
            await first.send(frames.encode(frames.MESSAGE, class_id=3, content=content))
        await second.send(frames.encode(frames.SUBSCRIBE, class_id=3))
        assert await second.read_messages(3) == [(0, b"0"), (1, b"1"), (2, b"2")]
        await second.send(frames.encode_ack(class_id=3, timer_index=0, first=0, last=2))
        await second.stream.aclose()
        await until(
            lambda: not (second_server.server.broker.sessions or cluster_of(second_server).is_busy)
        )
        await first.send(frames.encode(frames.SUBSCRIBE, class_id=3))
        assert await first.read_messages(1) == [(0, b"2")]


async def test_seek_starts_durable_at_requested_position(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    keeps: dict[str, Any] = {"durable": "keeps all", "auto_ack": False}
    async with (
        stateless_server(cluster) as first_server,
        stateless_server(cluster) as second_server,
        simplebus.connect(address(first_server)) as bus,
        bus.subscribe(7, **keeps) as messages,
    ):
        await bus.publish_many([b"0", b"1", b"2"], class_id=7)
        await messages.get(PATIENCE_SECONDS)
        peer = await running_server.connect(second_server)
        await peer.send(connect_request(7))
        assert (await peer.read_frame())[0] == frames.CONNECT

        async def subscribe_and_read(number: int, **start_options: object) -> bytes:
            """Subscribe. Return the first payload, or the frame that rejects the subscription."""
            await peer.send(subscribe(7, number, durable="d", **start_options))
            reply = await peer.read_frame()
            if reply[0] == frames.SUBSCRIBE:
                assert (await peer.read_frame())[0] == frames.DELIVER
                return (await peer.read_frame())[9:-4]
            return reply

        async def ended(number: int) -> None:
            await peer.send(unsubscribe(number))
            while (await peer.read_frame())[0] != frames.UNSUBSCRIBE:
                pass
            await until(lambda: not cluster_of(second_server).is_busy)

        assert await subscribe_and_read(1, start="earliest") == b"0"
        await ended(1)
        assert await subscribe_and_read(2, start="last", seek=True) == b"2"
        await ended(2)
        assert await subscribe_and_read(3, start={"sequence": 1}, seek=True) == b"1"
        await ended(3)
        async with bus.subscribe(7, durable="d", auto_ack=False):
            reply = await subscribe_and_read(4, start="earliest", seek=True)
            assert reply[0] == frames.ERROR
            assert b"another server uses it" in reply


async def test_group_members_at_two_servers_share_messages(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    received: list[list[int]] = [[], []]
    async with (
        two_servers(cluster) as (_, _, bus, second_bus),
        bus.subscribe(9, durable="d", group="g") as near_messages,
        second_bus.subscribe(9, durable="d", group="g") as far_messages,
        trio.open_nursery() as nursery,
    ):

        async def collect(member_index: int, messages: simplebus.Subscription) -> None:
            async for message in messages:
                received[member_index].append(int(message.payload))
                if len(received[0]) + len(received[1]) == 2000:
                    nursery.cancel_scope.cancel()

        nursery.start_soon(collect, 0, near_messages)
        nursery.start_soon(collect, 1, far_messages)
        await bus.publish_many([b"%d" % n for n in range(2000)], class_id=9)
        with trio.fail_after(PATIENCE_SECONDS):
            await trio.sleep_forever()
    assert sorted(received[0] + received[1]) == list(range(2000))
    assert all(received)


async def test_redelivers_messages_of_closed_session_at_another_server(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster) as first_server,
        stateless_server(cluster) as second_server,
    ):
        async with simplebus.connect(address(first_server)) as bus:
            await bus.publish_many([b"0", b"1", b"2"], class_id=7)
            async with bus.subscribe(7, durable="d", auto_ack=False) as messages:
                received = [await messages.get(PATIENCE_SECONDS) for _ in range(3)]
                assert [m.attempt for m in received] == [1, 1, 1]
                received[0].ack()
        async with (
            simplebus.connect(address(second_server)) as bus,
            bus.subscribe(7, durable="d") as messages,
        ):
            redelivered = [await messages.get(PATIENCE_SECONDS) for _ in range(2)]
            assert [(m.payload, m.attempt) for m in redelivered] == [(b"1", 2), (b"2", 2)]


async def test_held_messages_stay_with_their_server(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, ack_wait_seconds=1.0)
    group = {"durable": "d", "group": "g", "ack_seconds": 60, "auto_ack": False}
    async with (
        two_servers(cluster) as (first_server, second_server, bus, second_bus),
        bus.subscribe(7, **group) as messages,  # type: ignore[call-overload]
        second_bus.subscribe(7, **group) as far_messages,  # type: ignore[call-overload]
    ):
        await bus.publish_many([b"0", b"1"], class_id=7)
        received = await messages.take(2, 0.5) + await far_messages.take(2, 0.5)
        assert sorted(message.payload for message in received) == [b"0", b"1"]
        # The cluster waits for a second, then redelivers unless the server extended the time.
        redelivered = await messages.take(1, 0.7) + await far_messages.take(1, 0.7)
        assert redelivered == []
        assert (
            sum(
                f.statistics().fetched_count
                for f in feeds_of(first_server) + feeds_of(second_server)
            )
            == 2
        )


def publish_in_one_life(url: str, payload: bytes) -> None:
    with simplebus.connect_blocking(url, name="source", instance="fixed") as bus:
        bus.publish(payload, class_id=7)


async def test_fixed_instance_never_reuses_message_numbers(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    payloads = [b"%d" % life for life in range(6)]
    async with (
        stateless_server(cluster) as first_server,
        stateless_server(cluster) as second_server,
    ):
        for life, payload in enumerate(payloads):
            url = address(second_server) if life % 2 else address(first_server)
            await trio.to_thread.run_sync(publish_in_one_life, url, payload)
        async with (
            simplebus.connect(address(first_server)) as bus,
            bus.subscribe(7, durable="d") as messages,
        ):
            received = [(await messages.get(PATIENCE_SECONDS)).payload for _ in payloads]
            assert received == payloads
        for server in (first_server, second_server):
            assert cluster_of(server).publisher.statistics().duplicates == 0


async def test_dead_letter_is_readable_at_another_server(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    async with (
        two_servers(cluster) as (first_server, _, bus, second_bus),
        bus.subscribe("orders", durable="d") as messages,
    ):
        await bus.publish(
            b"bad", class_id=first_server.server.broker.store.class_id_by_name["orders"]
        )
        (await messages.get(PATIENCE_SECONDS)).terminate("no such customer")
        async with second_bus.subscribe("dead.orders") as letters:
            letter = await letters.get(PATIENCE_SECONDS)
            assert letter.payload == b"bad"
            assert dict(letter.headers)["dead-error"] == "no such customer"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
async def test_message_expires_by_stream_clock(jetstream_server: NatsServer, step: float) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
    ):
        server.server._clock_offset += step  # One of the two clocks is changed.
        async with bus.subscribe(7, durable="d") as messages:
            for payload, seconds in ((b"at once", 0.0), (b"soon", 30.0), (b"later", 4000.0)):
                await bus.publish(payload, class_id=7, expires=seconds)
            for payload in (b"soon", b"later"):
                message = await messages.get(PATIENCE_SECONDS)
                assert message.payload == payload
                message.ack()


async def test_class_names_are_known_at_every_server(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster) as first_server,
        stateless_server(cluster) as second_server,
    ):
        first_server.server.broker.store.class_registry.declare_classes(
            [simplebus_class("orders", 12)]
        )
        await until(lambda: second_server.server.broker.store.class_id_by_name.get("orders") == 12)
        async with simplebus.connect(address(first_server)) as bus:
            await bus.publish(b"x", class_id=12)
        async with stateless_server(cluster) as late:
            assert late.server.broker.store.class_id_by_name == {"orders": 12}


def simplebus_class(name: str, class_id: int) -> object:
    from simplebus.core.protocol.requests import NamedClass

    return msgspec.convert({"name": name, "id": class_id}, NamedClass)


async def test_nats_clients_publish_and_ack_at_stateless_server(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster, nats_port=0) as first_server,
        stateless_server(cluster) as second_server,
    ):
        first_server.server.broker.store.class_registry.bind_subject("orders.>", 5)
        peer = await connect_nats_peer(first_server, headers=True)
        await peer.send(b"PUB orders.eu 5\r\nhello\r\n")
        async with (
            simplebus.connect(address(second_server)) as bus,
            bus.subscribe(5, durable="d") as messages,
        ):
            message = await messages.get(PATIENCE_SECONDS)
            assert (message.channel, message.payload) == ("orders.eu", b"hello")
            await peer.send(b"SUB $SB.SUB.5.mine 1\r\n")
            await peer.flush()
            await until(lambda: len(feeds_of(first_server)) == 1)
            await bus.publish(b"back", class_id=5, channel="orders.us")
        line = await peer.read_line()
        assert line.startswith(b"MSG orders.us 1 $JS.ACK.5.mine.1.")
        assert await peer.read_line() == b"back"
        await peer.send(b"PUB " + line.split(b" ")[3] + b" 4\r\n+ACK\r\n")
        await peer.flush()


@pytest.mark.parametrize(
    ("subscribe_options", "reason"),
    [
        ({"group": "g", "by_key": True}, "by_key"),
        ({"start": "last_values"}, "last_values"),
        ({"max_pending": 5, "slow": "drop_oldest"}, "slow"),
    ],
)
async def test_refuses_unsupported_requests(
    jetstream_server: NatsServer, subscribe_options: dict[str, object], reason: str
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
    ):
        with pytest.raises(RefusedError, match=f"--engine does not support {reason}"):
            async with bus.subscribe(7, **subscribe_options):  # type: ignore[arg-type]
                pass
        await bus.publish(b"it goes on", class_id=7)


async def test_refuses_durable_with_other_channels(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    async with (
        two_servers(cluster) as (_, _, bus, second_bus),
        bus.subscribe(7, "a.*", durable="d", group="g") as messages,
    ):
        with pytest.raises(RefusedError, match="exists for the channels"):
            async with second_bus.subscribe(7, "b.*", durable="d", group="g"):
                pass
        await bus.publish(b"no", class_id=7, channel="b.x")
        await bus.publish(b"yes", class_id=7, channel="a.x")
        assert (await messages.get(PATIENCE_SECONDS)).payload == b"yes"


async def test_skips_foreign_messages_in_stream(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster) as server,
        simplebus.connect(address(server)) as bus,
        bus.subscribe(7, durable="d") as messages,
    ):
        link = cluster_of(server).link
        subject = cluster.names.class_subject(7)
        head = b"NATS/1.0\r\nSimplebus-Type: 5\r\n\r\n"
        for payload, headers in (
            (b"plain, from elsewhere", b""),
            (b"holds <\r\n> it", b""),
            (b"\xff no envelope", head),
            (b"", head),
            (b"x" * (2 << 20), b""),
            (b"", b""),
            (b"last", b"NATS/1.0\r\nOther: 1\r\n\r\n"),
        ):
            link.core.publish(subject, payload[: 1 << 20], headers=headers)
        link.flush()
        await bus.publish(b"ours", class_id=7)
        received = [(await messages.get(PATIENCE_SECONDS)).payload for _ in range(4)]
        assert received == [b"plain, from elsewhere", b"", b"last", b"ours"]
        (feed,) = feeds_of(server)
        assert feed.statistics().invalid_count == 4
