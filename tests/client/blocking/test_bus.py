"""`BlockingBus` against a real server."""

from __future__ import annotations

import threading
import time

import pytest

import simplebus
from load.ports import free_port
from simplebus import BusConnectionError, LocalProtocolError
from simplebus.client.blocking import subscription
from simplebus.core.limits import Limits
from simplebus.core.protocol import frames
from simplebus.core.settings import Settings
from tests.client.bus_server import BusServer, bus_server, read_until_count, until
from tests.client.faulty_server import fake_server, silent_listener

NUMBERED = [b"message %d" % number for number in range(3000)]


def collect(messages: simplebus.BlockingRawSubscription, count: int) -> list[bytes]:
    """Return the payloads of the next `count` messages.

    The last message counts as processed when the subscription is left.
    """
    payloads: list[bytes] = []
    for message in messages:
        payloads.append(message.payload)
        if len(payloads) == count:
            break
    return payloads


# Publishing and subscribing ----------------------------------------------------------------------


def test_address_is_read_from_the_environment(
    server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMPLEBUS_URL", server.address)
    with simplebus.connect_blocking() as bus:
        bus.publish(b"x", class_id=1)
    assert server.statistics().published == 1


def test_publishes_receives_in_order_and_acknowledges(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        for payload in NUMBERED[:100]:
            bus.publish(payload, class_id=1)
        bus.publish_many(NUMBERED[100:], class_id=1)
        with bus.subscribe(1) as messages:
            assert collect(messages, 3000) == NUMBERED
        statistics = bus.statistics()
    assert (statistics.published, statistics.acknowledged) == (3000, 3000)
    until(lambda: server.statistics().acknowledged == 3000)
    assert server.statistics().redelivered == 0


def test_left_client_is_gone_when_the_next_one_connects(server: BusServer) -> None:
    connect = simplebus.connect_blocking
    with connect(server.address) as first_bus, connect(server.address) as second_bus:
        for bus in (first_bus, second_bus) * 20:
            with bus.subscribe(1, durable="shop"):
                pass  # A second connection at the same time would be refused.


def test_batches_contain_the_published_messages(server: BusServer) -> None:
    payloads: list[bytes] = []
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many(NUMBERED, class_id=1)
        with bus.subscribe(1) as messages:
            for batch in messages.batches():
                assert batch.sequences[0] == len(payloads)
                payloads += batch.payloads
                if len(payloads) == 3000:
                    break
        bus.drain()
        assert server.statistics().acknowledged == 3000
    assert payloads == NUMBERED


def test_publish_writes_at_once(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish(b"x", class_id=1, confirm=False)
        assert bus.statistics().queued_bytes == 0
        bus.flush()
        bus.drain()
        assert server.statistics().published == 1


def test_loop_ends_after_idle_seconds(shared_server: BusServer) -> None:
    with (
        simplebus.connect_blocking(shared_server.address) as bus,
        bus.subscribe(30, idle_seconds=0.05) as messages,
    ):
        assert list(messages) == []
        bus.publish(b"x", class_id=30)
        assert [message.payload for message in read_until_count(messages, 1)] == [b"x"]


def test_publishing_and_subscribing_on_one_connection_does_not_deadlock(server: BusServer) -> None:
    count = 200_000
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        bus.publish_many([b"%d" % number for number in range(count)], class_id=1, confirm=False)
        for expected, message in enumerate(messages):
            assert message.payload == b"%d" % expected
            if expected % 50_000 == 0 and expected < count:
                bus.publish(b"%d" % (count + expected // 50_000), class_id=1)
            if expected == count + 3:
                break
    until(lambda: server.statistics().acknowledged == count + 4)


def test_unread_subscription_does_not_block_another(server: BusServer) -> None:
    with (
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(1, max_in_flight=100) as flooded,
        bus.subscribe(2) as unread,
    ):
        bus.publish_many([b"x" * 1000] * 20_000, class_id=1)
        bus.publish(b"through", class_id=2)
        assert collect(unread, 1) == [b"through"]
        assert bus.statistics().buffered_bytes < 200_000
        assert collect(flooded, 1) == [b"x" * 1000]


# Acknowledging -----------------------------------------------------------------------------------


def test_redelivers_to_the_next_subscription_when_the_block_raises(
    clockless_server: BusServer,
) -> None:
    with simplebus.connect_blocking(clockless_server.address) as bus:
        bus.publish_many([b"good", b"bad", b"later"], class_id=1)
        with pytest.raises(ZeroDivisionError), bus.subscribe(1) as messages:  # noqa: PT012
            for message in messages:
                if message.payload == b"bad":
                    raise ZeroDivisionError
        bus.drain()
        clockless_server.tick()
        with bus.subscribe(1) as messages:
            assert collect(messages, 2) == [b"bad", b"later"]
    until(lambda: clockless_server.statistics().acknowledged == 3)


def test_acks_are_sent_while_a_batch_is_processed(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many(NUMBERED[:10], class_id=1)
        with bus.subscribe(1) as messages:
            for message in messages:
                if message.message_id == 9:
                    break
                threading.Event().wait(0.02)
            until(lambda: server.statistics().acknowledged >= 3)


def test_without_auto_ack_only_manual_acks_count(clockless_server: BusServer) -> None:
    with simplebus.connect_blocking(clockless_server.address) as bus:
        bus.publish_many(NUMBERED[:5], class_id=1)
        with bus.subscribe(1, auto_ack=False) as messages:
            loop = iter(messages)
            received = [next(loop) for _ in range(5)]
            messages.ack(received[3])
            messages.ack(received[0])
            bus.drain()
            clockless_server.tick()
            redelivered = [next(loop) for _ in range(3)]
            assert [(m.message_id, m.attempt) for m in redelivered] == [(1, 2), (2, 2), (4, 2)]
            clockless_server.tick(2)
            for batch in messages.batches():
                messages.ack_batch(batch)
                if 4 in batch.sequences:
                    break
            with (
                bus.subscribe(1) as other_messages,
                pytest.raises(LocalProtocolError, match="another subscription"),
            ):
                other_messages.ack(received[0])
        bus.drain()
    until(lambda: clockless_server.statistics().acknowledged == 5)


def test_redelivered_copies_of_buffered_messages_are_dropped(
    clockless_server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "ACK_SECONDS", 0.0)
    payloads: list[bytes] = []
    with simplebus.connect_blocking(clockless_server.address) as bus:
        bus.publish_many(NUMBERED[:50], class_id=1)
        with bus.subscribe(1, idle_seconds=0.0) as messages:
            until(lambda: clockless_server.statistics().delivered >= 50)
            payloads.append(messages.get().payload)
            clockless_server.tick()
            until(lambda: clockless_server.statistics().redelivered >= 50)
            payloads += read_until_count((message.payload for message in messages), 49)
    assert payloads == NUMBERED[:50]
    assert clockless_server.statistics().redelivered == 50


# Errors and losses -------------------------------------------------------------------------------


def test_invalid_payloads_raise_and_the_bus_continues(
    shared_server: BusServer,
) -> None:
    with simplebus.connect_blocking(shared_server.address) as bus:
        with pytest.raises(LocalProtocolError, match="index 1 has 1048564 bytes"):
            bus.publish_many([b"", b"x" * 1048564], class_id=31)
        with pytest.raises(TypeError, match="a payload is bytes, got str"):
            bus.publish("text", class_id=31)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="got 65536"):
            bus.publish(b"", class_id=65536)
        bus.publish(b"x" * 1048563, class_id=31)
        with bus.subscribe(31) as messages:
            assert len(collect(messages, 1)[0]) == 1048563


def test_a_subscription_must_be_entered_and_only_once(shared_server: BusServer) -> None:
    with simplebus.connect_blocking(shared_server.address) as bus:
        messages = bus.subscribe(32)
        with pytest.raises(LocalProtocolError, match="expected with bus"):
            next(iter(messages))
        with messages:
            pass
        with pytest.raises(LocalProtocolError, match="was closed"):
            next(iter(messages))
        with pytest.raises(LocalProtocolError, match="entered once"), messages:
            pass


def test_connecting_to_a_closed_port_raises() -> None:
    with (
        pytest.raises(BusConnectionError, match=r"cannot connect to simplebus://127.0.0.1:\d+: "),
        simplebus.connect_blocking(f"127.0.0.1:{free_port()}"),
    ):
        pytest.fail("connected to nobody")


def test_connecting_to_an_unknown_host_raises() -> None:
    with (
        pytest.raises(BusConnectionError, match=r"cannot connect to simplebus://nobody.invalid"),
        simplebus.connect_blocking("nobody.invalid"),
    ):
        pytest.fail("connected to nobody")


def test_connecting_to_another_kind_of_server_raises() -> None:
    with (
        silent_listener() as server,
        pytest.raises(BusConnectionError, match=r"no answer to the Connect frame .* 2 s"),
        simplebus.connect_blocking(server.address, timeout=2),
    ):
        pytest.fail("connected to no bus")


def test_leaving_with_unconfirmed_messages_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.client.blocking.connect.CLOSE_SECONDS", 0.1)
    with (
        fake_server(
            lambda kind, *_: frames.encode(frames.HEARTBEAT) if kind == 49 else b""
        ) as server,
        pytest.raises(BusConnectionError, match=r"3,000 messages were not confirmed by the server"),
        simplebus.connect_blocking(server.address) as bus,
    ):
        bus.publish_many(NUMBERED, class_id=1, confirm=False)


def test_flush_with_a_timeout_raises_while_the_class_is_full() -> None:
    settings = Settings(limits=Limits(class_messages=1))
    with bus_server(settings) as server, simplebus.connect_blocking(server.address) as bus:
        bus.publish(b"first", class_id=1)
        bus.publish_nowait(b"second", class_id=1)
        with pytest.raises(TimeoutError, match="1 messages are not confirmed"):
            bus.flush(timeout=0.01)
        bus.purge(1)
        bus.flush(timeout=10)
        assert server.statistics().published == 2


# Handlers and requests ---------------------------------------------------------------------------


def test_handlers_run_only_in_run_and_drain(server: BusServer) -> None:
    received: list[bytes] = []
    with simplebus.connect_blocking(server.address) as bus:
        bus.handle(1, lambda message: received.append(message.payload))
        bus.publish_many(NUMBERED[:10], class_id=1)
        assert received == []
        bus.run(seconds=0.1)
        assert received == NUMBERED[:10]
        bus.drain()
        assert server.statistics().acknowledged == 10


def test_run_ends_although_more_messages_have_arrived(server: BusServer) -> None:
    received: list[bytes] = []

    def handler(message: simplebus.Message[bytes]) -> None:
        received.append(message.payload)
        time.sleep(0.02)

    with simplebus.connect_blocking(server.address) as bus:
        bus.handle(1, handler)
        bus.publish_many(NUMBERED[:10], class_id=1)
        bus.run(seconds=0.01)
        assert received == NUMBERED[:1]
        bus.drain()
        assert received == NUMBERED[:10]


def test_handler_that_flushes_keeps_the_connection() -> None:
    settings = Settings(tick_seconds=0.2, heartbeat_seconds=0.2)
    attempts: list[int] = []

    def handler(message: simplebus.Message[bytes]) -> None:
        attempts.append(message.attempt)
        for _ in range(20):
            time.sleep(0.05)  # A second in total, which is longer than three heartbeats.
            message.working()
            bus.flush()

    with bus_server(settings) as server, simplebus.connect_blocking(server.address) as bus:
        bus.handle(1, handler, group="workers")
        bus.publish(b"x", class_id=1)
        bus.drain()
        assert (attempts, bus.statistics().reconnections) == ([1], 0)


def test_redelivers_when_the_handler_raises(clockless_server: BusServer) -> None:
    received: list[int] = []

    def handler(message: simplebus.Message[bytes]) -> None:
        received.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("not today")

    def main() -> None:
        with simplebus.connect_blocking(clockless_server.address) as bus:
            bus.handle(1, handler)
            bus.publish(b"x", class_id=1)
            bus.run(seconds=0.1)
            bus.drain()
            clockless_server.tick(2)
            bus.run(seconds=0.1)
            assert received == [1, 2]

    with pytest.raises(ExceptionGroup, match="handlers failed 1 time") as caught:
        main()
    assert caught.group_contains(ValueError, match="not today")


def test_request_and_reply_without_event_loop(server: BusServer) -> None:
    def respond() -> None:
        with simplebus.connect_blocking(server.address) as bus:
            bus.handle(1, lambda message: message.payload.upper())
            is_open.set()
            bus.run(seconds=1)

    is_open = threading.Event()
    thread = threading.Thread(target=respond)
    thread.start()
    is_open.wait()
    with simplebus.connect_blocking(server.address) as bus:
        assert bus.request(b"shout", class_id=1).payload == b"SHOUT"
        assert bus.request(b"twice", class_id=1).payload == b"TWICE"
        with pytest.raises(TimeoutError, match=r"no reply to .* class 2 within 0\.05 s"):
            bus.request(b"?", class_id=2, timeout=0.05)
        with bus.subscribe(3) as messages:
            bus.publish(b"x", class_id=3)
            with pytest.raises(LocalProtocolError, match="does not request a reply"):
                bus.reply(messages.get(), b"?")
    thread.join()


def test_leaving_the_bus_acknowledges_the_last_reply(server: BusServer) -> None:
    def respond() -> None:
        with simplebus.connect_blocking(server.address) as bus:
            bus.handle(1, lambda message: message.payload.upper())
            bus.run(seconds=1)

    thread = threading.Thread(target=respond)
    thread.start()
    with simplebus.connect_blocking(server.address) as bus:
        assert bus.request(b"shout", class_id=1).payload == b"SHOUT"
    with simplebus.connect_blocking(server.address) as bus:
        replies = bus.explain("simplebus.replies")
    assert isinstance(replies, simplebus.ClassInfo)
    assert replies.backlog == 0
    thread.join()


def test_using_a_left_bus_raises(shared_server: BusServer) -> None:
    with simplebus.connect_blocking(shared_server.address) as bus:
        pass
    with pytest.raises(BusConnectionError, match="was closed at the end of its block"):
        bus.publish(b"x", class_id=1)


@pytest.mark.parametrize("sends_heartbeats", [True, False])
def test_working_keeps_a_computing_client_connected(sends_heartbeats: bool) -> None:
    """The server's heartbeat is one tick, and three are missed."""
    settings = Settings(ack_timeout=3, tick_seconds=86_400.0, heartbeat_seconds=86_400.0)
    with (
        bus_server(settings) as server,
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(1) as messages,
    ):
        bus.publish(b"job", class_id=1)
        job = messages.get()
        for _ in range(8):
            if sends_heartbeats:
                job.working()
                bus.flush()
            server.tick()
        assert server.ask(lambda thread_server: thread_server.server.disconnect_counts.total()) == (
            0 if sends_heartbeats else 1
        )
        bus.publish(b"done", class_id=2)
        assert bus.statistics().reconnections == (0 if sends_heartbeats else 1)
