"""The client without an event loop, against a real server: the same promises."""

from __future__ import annotations

import socket
import threading

import pytest

import simplebus
from client.bus_server import BusServer, deaf_listener, until
from simplebus import BusConnectionError, LocalProtocolError
from simplebus.core import client as client_core

NUMBERED = [b"message %d" % number for number in range(3000)]


def collect(messages: simplebus.BlockingSubscription, count: int) -> list[bytes]:
    """So many payloads. The last message counts as processed when the subscription is left."""
    payloads: list[bytes] = []
    for message in messages:
        payloads.append(message.payload)
        if len(payloads) == count:
            break
    return payloads


# Publishing and subscribing ----------------------------------------------------------------------


def test_what_is_published_is_received_in_order_and_acknowledged(server: BusServer) -> None:
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


def test_batches_hold_what_was_published(server: BusServer) -> None:
    payloads: list[bytes] = []
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many(NUMBERED, class_id=1)
        with bus.subscribe(1, idle_seconds=0.2) as messages:
            for batch in messages.batches():
                assert batch.first_id == len(payloads)
                payloads += batch.payloads
        bus.drain()
        assert server.statistics().acknowledged == 3000
    assert payloads == NUMBERED


def test_what_is_published_is_written_at_once(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish(b"x", class_id=1)
        assert bus.statistics().queued_bytes == 0
        bus.flush()
        bus.drain()
        assert server.statistics().published == 1


def test_a_loop_ends_when_nothing_comes_for_so_long(shared_server: BusServer) -> None:
    with (
        simplebus.connect_blocking(shared_server.address) as bus,
        bus.subscribe(30, idle_seconds=0.05) as messages,
    ):
        assert list(messages) == []
        bus.publish(b"x", class_id=30)
        assert [message.payload for message in messages] == [b"x"]


def test_one_connection_publishes_and_subscribes_without_getting_stuck(
    server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with buffers far smaller than what is on the way."""
    monkeypatch.setattr(client_core, "BUFFERED_BYTES_MAX", 64 * 1024)
    count = 200_000
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        bus.publish_many([b"%d" % number for number in range(count)], class_id=1)
        for expected, message in enumerate(messages):
            assert message.payload == b"%d" % expected
            if expected % 50_000 == 0 and expected < count:
                bus.publish(b"%d" % (count + expected // 50_000), class_id=1)
            if expected == count + 3:
                break
    until(lambda: server.statistics().acknowledged == count + 4)


def test_writing_reads_meanwhile(server: BusServer) -> None:
    """So that a bus that reads no further until it is read from is no dead end."""
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        bus.publish_many([b"x" * 1000] * 20_000, class_id=1)
        assert bus.statistics().received > 0
        assert len(collect(messages, 20_000)) == 20_000


def test_a_subscription_that_nobody_reads_does_not_starve_another(
    server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_core, "BUFFERED_BYTES_MAX", 64 * 1024)
    with (
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(1) as flooded,
        bus.subscribe(2) as quiet,
    ):
        bus.publish_many([b"x" * 1000] * 20_000, class_id=1)
        bus.publish(b"through", class_id=2)
        assert collect(quiet, 1) == [b"through"]
        assert bus.statistics().buffered_bytes < 1_000_000
        assert collect(flooded, 1) == [b"x" * 1000]


# Acknowledging -----------------------------------------------------------------------------------


def test_a_message_whose_body_raises_comes_again_to_the_next_subscription(
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
            assert collect(messages, 2) == [b"later", b"bad"]
    until(lambda: clockless_server.statistics().acknowledged == 3)


def test_acks_leave_while_a_batch_is_worked_off(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many(NUMBERED[:10], class_id=1)
        with bus.subscribe(1) as messages:
            for message in messages:
                if message.message_id == 9:
                    break
                threading.Event().wait(0.02)
            until(lambda: server.statistics().acknowledged >= 3)


def test_manual_acks_count_and_nothing_else_does(clockless_server: BusServer) -> None:
    with simplebus.connect_blocking(clockless_server.address) as bus:
        bus.publish_many(NUMBERED[:5], class_id=1)
        with bus.subscribe(1, auto_ack=False) as messages:
            loop = iter(messages)
            taken = [next(loop) for _ in range(5)]
            messages.ack(taken[3])
            messages.ack(taken[0])
            bus.drain()
            clockless_server.tick()
            again = [next(loop) for _ in range(3)]
            assert [(m.message_id, m.redelivered) for m in again] == [
                (1, True),
                (2, True),
                (4, True),
            ]
            clockless_server.tick(2)
            for batch in messages.batches():
                messages.ack_batch(batch)
                if 4 in batch.message_ids:
                    break
            with (
                bus.subscribe(1) as others,
                pytest.raises(LocalProtocolError, match="another subscription"),
            ):
                others.ack(taken[0])
        bus.drain()
    until(lambda: clockless_server.statistics().acknowledged == 5)


# Mistakes and losses -----------------------------------------------------------------------------


def test_payloads_that_cannot_travel_are_refused_and_the_bus_goes_on(
    shared_server: BusServer,
) -> None:
    with simplebus.connect_blocking(shared_server.address) as bus:
        with pytest.raises(LocalProtocolError, match="holds the delimiter"):
            bus.publish(b"a<\r\n>b", class_id=31)
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
        with pytest.raises(LocalProtocolError, match="begins with its block"):
            next(iter(messages))
        with messages:
            pass
        with pytest.raises(LocalProtocolError, match="was left"):
            next(iter(messages))
        with pytest.raises(LocalProtocolError, match="entered once"), messages:
            pass


def test_a_port_where_nobody_listens_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        pytest.raises(BusConnectionError, match=r"cannot connect to simplebus://127.0.0.1:\d+: "),
        simplebus.connect_blocking(f"127.0.0.1:{port}"),
    ):
        pytest.fail("connected to nobody")


def test_a_host_that_does_not_exist_is_said_so() -> None:
    with (
        pytest.raises(BusConnectionError, match=r"cannot connect to simplebus://nobody.invalid"),
        simplebus.connect_blocking("nobody.invalid"),
    ):
        pytest.fail("connected to nobody")


def test_a_listener_that_is_no_bus_is_said_so() -> None:
    with (
        deaf_listener(answers=False) as (address, _),
        pytest.raises(BusConnectionError, match=r"no answer to the Connect frame .* 0\.1 s"),
        simplebus.connect_blocking(address, timeout=0.1),
    ):
        pytest.fail("connected to no bus")


def test_leaving_with_bytes_that_nobody_takes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.client.blocking.CLOSE_SECONDS", 0.1)
    with (
        deaf_listener() as (address, _),
        pytest.raises(BusConnectionError, match=r"\d+ bytes for the bus could not be written"),
        simplebus.connect_blocking(address) as bus,
    ):
        bus._core.publish_many([b"x" * 1000] * 20_000, 1)  # As if interrupted before writing.


def test_a_server_that_goes_away_ends_everything_that_waits(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        hanging_up = threading.Timer(0.05, server.hang_up)
        hanging_up.start()
        with pytest.raises(BusConnectionError, match="closed the connection"):
            next(iter(messages))
        hanging_up.join()
        for use in (
            lambda: bus.publish(b"x", class_id=1),
            lambda: bus.publish_many([b"x"], class_id=1),
            bus.flush,
            bus.drain,
            lambda: next(iter(messages)),
        ):
            with pytest.raises(BusConnectionError, match="closed the connection"):
                use()


def test_a_bus_that_was_left_says_so(shared_server: BusServer) -> None:
    with simplebus.connect_blocking(shared_server.address) as bus:
        pass
    with pytest.raises(BusConnectionError, match="was left"):
        bus.publish(b"x", class_id=1)
