"""Tests of lost and replaced connections with every driver."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import anyio
import pytest

import simplebus
from load.ports import free_port
from simplebus import BusConnectionError, Reason, RemoteProtocolError
from simplebus.client.aio.writer import WRITE_BUFFER_BYTES
from simplebus.client.reconnect import RETRY_DELAY_MIN_SECONDS
from simplebus.core.message_class.class_ids import candidate_ids
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ConnectReply
from tests.client.bus_server import PATIENCE_SECONDS, BusServer, until
from tests.client.conftest import Run
from tests.client.faulty_server import FakeServer, confirm, fake_server, faulty_proxy, refuse

NUMBERED = [b"message %d" % number for number in range(50)]


GIVEN_UP = r"closed .* reconnecting failed within 0\.3 s: cannot connect"


# Recovery without an error in the program --------------------------------------------------------


def test_loop_continues_after_reconnect(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            for _ in range(5):
                await bus.publish_many(NUMBERED[:10], class_id=1)
                for payload in NUMBERED[:10]:
                    assert (await anext(messages)).payload == payload
                with anyio.move_on_after(0.01):
                    await anext(messages)
                await bus.drain()
                await anyio.to_thread.run_sync(server.hang_up)
            await bus.drain()
            assert bus.statistics().reconnections == 5

    run(main)
    assert server.statistics().published == 50


def test_blocking_loop_continues_after_reconnect(server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        for _ in range(5):
            bus.publish_many(NUMBERED[:10], class_id=1)
            assert [messages.get().payload for _ in range(10)] == NUMBERED[:10]
            assert messages.take(1, timeout=0.01) == []
            bus.drain()
            server.hang_up()
        bus.drain()
        assert bus.statistics().reconnections == 5
    assert server.statistics().published == 50


@pytest.mark.parametrize(("lost_direction", "resent"), [("to_client", 0), ("to_server", 50)])
def test_unconfirmed_messages_are_resent_and_stored_once(
    run: Run, server: BusServer, lost_direction: str, resent: int
) -> None:
    """Only messages that the server has not stored are resent."""

    async def main() -> None:
        with faulty_proxy(server.address) as proxy:
            async with simplebus.connect(proxy.address) as bus:
                await bus.publish(b"first", class_id=1)
                proxy.dropped_direction = lost_direction
                async with anyio.create_task_group() as tasks:
                    for payload in NUMBERED:
                        tasks.start_soon(lambda p=payload: bus.publish(p, class_id=1))
                    await anyio.to_thread.run_sync(until, lambda: proxy.dropped_bytes > 0)
                    if not resent:
                        await anyio.to_thread.run_sync(
                            until, lambda: server.statistics().published == 51
                        )
                    assert bus.statistics().unconfirmed == 50
                    proxy.disconnect_all()
                assert bus.statistics().unconfirmed == 0
                assert bus.statistics().resent == resent

    run(main)
    assert server.statistics().published == 51


def test_blocking_publisher_resends_messages_that_are_stored_once(server: BusServer) -> None:
    with faulty_proxy(server.address) as proxy, simplebus.connect_blocking(proxy.address) as bus:
        bus.publish(b"first", class_id=1)
        proxy.dropped_direction = "to_server"
        cutting = threading.Thread(
            target=lambda: (until(lambda: proxy.dropped_bytes > 0), proxy.disconnect_all())
        )
        cutting.start()
        bus.publish_many(NUMBERED, class_id=1)
        cutting.join()
        assert (bus.statistics().unconfirmed, bus.statistics().resent) == (0, 50)
    assert server.statistics().published == 51


def test_durable_subscription_resumes_after_reconnect(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(1, durable="shop", auto_ack=False) as messages,
        ):
            await bus.publish_many(NUMBERED, class_id=1)
            received = [await messages.get() for _ in range(20)]
            for message in received[:10]:
                message.ack()
            await bus.drain()
            await anyio.to_thread.run_sync(server.hang_up)
            await anyio.to_thread.run_sync(until, lambda: bus.statistics().reconnections == 1)
            received[10].ack()  # It is still in flight: the server has kept the position.
            await bus.drain()
            assert server.statistics().acknowledged == 11

    run(main)


def test_publishers_wait_while_disconnected(run: Run, server: BusServer) -> None:
    async def main() -> None:
        with faulty_proxy(server.address) as proxy:
            async with simplebus.connect(proxy.address) as bus:
                proxy.is_refusing = True
                proxy.disconnect_all()
                with anyio.move_on_after(0.2) as patience:
                    await bus.publish(b"handed over", class_id=1)
                assert patience.cancelled_caught
                while bus.statistics().queued_bytes < WRITE_BUFFER_BYTES:
                    await bus.publish(b"x" * 1000, class_id=1, confirm=False)
                with anyio.move_on_after(0.05) as patience:
                    await bus.publish(b"not handed over", class_id=1, confirm=False)
                assert patience.cancelled_caught
                proxy.is_refusing = False
                await bus.publish(b"waits", class_id=1)
                assert server.statistics().published == bus.statistics().published

    run(main)


def test_timeout_expires_during_an_outage(server: BusServer) -> None:
    """Also for the blocking driver while no server answers."""
    with (
        fake_server() as false,
        simplebus.connect_blocking(false.address, timeout=PATIENCE_SECONDS) as bus,
        bus.subscribe(1) as messages,
    ):
        false.is_silent = True
        false.hang_up()
        started_at = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no message of class 1 within 0\.1 s"):
            messages.get(timeout=0.1)
        assert time.monotonic() - started_at < PATIENCE_SECONDS / 2
        false.is_silent = False
        false.hang_up()
        bus.publish(b"x", class_id=1)
        assert bus.statistics().reconnections == 1


def test_calls_that_do_not_wait_receive_and_reconnect(server: BusServer) -> None:
    """The blocking driver receives and reconnects in calls that do not wait, or not long enough."""

    def published_now() -> bool:
        bus.publish_nowait(b"x", class_id=1)
        return server.statistics().published > 0

    with (
        simplebus.connect_blocking(server.address) as bus,
        bus.subscribe(1, auto_ack=False) as messages,
    ):
        server.hang_up()
        until(published_now)
        assert bus.statistics().reconnections == 1
        until(lambda: bool(messages.take(1, timeout=0)))
        server.hang_up()
        bus.publish_nowait(b"x", class_id=2)
        until(lambda: bool(messages.take(1, timeout=0) and bus.statistics().reconnections == 2))


# Address of the next connection ------------------------------------------------------------------


def test_tries_addresses_in_order(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect([f"127.0.0.1:{free_port()}", server.address]) as bus:
            await bus.publish(b"x", class_id=1)

    run(main)
    with simplebus.connect_blocking([f"127.0.0.1:{free_port()}", server.address]) as bus:
        bus.publish(b"x", class_id=1)
    assert server.statistics().published == 2


def test_silent_address_leaves_time_for_the_next(run: Run, server: BusServer) -> None:
    """Half of the timeout is enough for each of two addresses."""

    async def main(seconds: float) -> None:
        async with simplebus.connect(
            [unresponsive.address, server.address], timeout=seconds
        ) as bus:
            await bus.publish(b"x", class_id=1)

    def blocking(seconds: float) -> None:
        addresses = [unresponsive.address, server.address]
        with simplebus.connect_blocking(addresses, timeout=seconds) as bus:
            bus.publish(b"x", class_id=1)

    def in_time(connect: Callable[[float], None]) -> None:
        for seconds in (0.5, 5, PATIENCE_SECONDS):
            with contextlib.suppress(BusConnectionError):
                return connect(seconds)
        pytest.fail("the one that says nothing takes all the time")

    with fake_server() as unresponsive:
        unresponsive.is_silent = True
        in_time(lambda seconds: run(lambda: main(seconds)))
        in_time(blocking)


def test_reconnects_to_another_address(run: Run, server: BusServer) -> None:
    async def main() -> None:
        with fake_server() as first:
            async with simplebus.connect([first.address, server.address]) as bus:
                await bus.publish(b"x", class_id=1)
                await anyio.to_thread.run_sync(first.close)
                await bus.publish(b"y", class_id=1)

    run(main)
    assert server.statistics().published == 1


def test_blocking_bus_reconnects_to_another_address(server: BusServer) -> None:
    with (
        fake_server() as first,
        simplebus.connect_blocking([first.address, server.address]) as bus,
    ):
        bus.publish(b"x", class_id=1)
        first.close()
        bus.publish(b"y", class_id=1)
    assert server.statistics().published == 1


def test_backoff_grows_if_the_server_disconnects_at_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        def answer(kind: int, *_: object) -> bytes | None:
            return None if kind == frames.SUBSCRIBE else b""

        with fake_server(answer) as flapping:
            async with simplebus.connect(flapping.address) as bus:
                started_at = time.monotonic()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(bus.subscribe(1).__aenter__)
                    await anyio.to_thread.run_sync(until, lambda: flapping.connection_count >= 5)
                    tasks.cancel_scope.cancel()
            # A busy machine can only lengthen the delays before the last four attempts.
            assert time.monotonic() - started_at >= (1 + 2 + 4 + 8) * RETRY_DELAY_MIN_SECONDS / 2

    with caplog.at_level(logging.INFO, "simplebus.client"):
        run(main)
    assert "closed the connection; see its log for the reason; retrying" in caplog.text
    assert "reconnected to simplebus://127.0.0.1" in caplog.text


# Without another connection ----------------------------------------------------------------------


def waiting_calls(bus: Any, messages: Any) -> list[Callable[[], Any]]:
    """Return the calls of a bus and a subscription that wait for the server, of either driver."""
    return [
        lambda: bus.publish(b"x", class_id=1),
        lambda: bus.publish(b"x", class_id=1, confirm=False),
        lambda: bus.publish_many([b"x"], class_id=1),
        bus.flush,
        bus.drain,
        lambda: bus.request(b"x", class_id=1),
        lambda: bus.fetch(1),
        messages.get,
        lambda: messages.take(1),
    ]


@pytest.mark.parametrize("reconnect", [0.3, 0, None])
def test_waiting_calls_raise_when_reconnecting_fails(run: Run, reconnect: float | None) -> None:
    expected = GIVEN_UP if reconnect else "closed the connection"

    async def main() -> None:
        with fake_server() as bus_gone:
            async with (
                simplebus.connect(bus_gone.address, reconnect=reconnect) as bus,
                bus.subscribe(1) as messages,
            ):
                await anyio.to_thread.run_sync(bus_gone.close)
                for wait in (lambda: anext(messages), *waiting_calls(bus, messages)):
                    with pytest.raises(BusConnectionError, match=expected):
                        await wait()
                with pytest.raises(BusConnectionError, match=expected):
                    bus.publish_nowait(b"x", class_id=1)
                with pytest.raises(BusConnectionError, match=expected):
                    bus.handle(1, print)

    run(main)


@pytest.mark.parametrize("reconnect", [0.3, 0, None])
def test_blocking_calls_raise_when_reconnecting_fails(
    reconnect: float | None,
) -> None:
    expected = GIVEN_UP if reconnect else "closed the connection"
    with (
        fake_server() as bus_gone,
        simplebus.connect_blocking(bus_gone.address, reconnect=reconnect) as bus,
        bus.subscribe(1) as messages,
    ):
        bus_gone.close()
        for wait in (
            lambda: next(iter(messages)),
            lambda: bus.publish_nowait(b"x", class_id=1),
            lambda: bus.handle(1, print),
            *waiting_calls(bus, messages),
        ):
            with pytest.raises(BusConnectionError, match=expected):
                wait()


def test_leaving_reports_the_number_of_unconfirmed_messages(run: Run) -> None:
    async def main() -> None:
        with fake_server(lambda kind, *_: None if kind == frames.MESSAGE else b"") as bus_gone:
            async with simplebus.connect(bus_gone.address, reconnect=0) as bus:
                for payload in NUMBERED:
                    await bus.publish(payload, class_id=1, confirm=False)

    expected = (
        "50 messages were not confirmed by the server: the server at .* closed the connection"
    )
    with pytest.raises(BusConnectionError, match=expected):
        run(main)

    def blocking() -> None:
        with (
            fake_server(lambda kind, *_: None if kind == frames.MESSAGE else b"") as bus_gone,
            simplebus.connect_blocking(bus_gone.address, reconnect=0) as bus,
        ):
            bus.publish_many(NUMBERED, class_id=1, confirm=False)

    with pytest.raises(BusConnectionError, match=expected):
        blocking()


# Errors without retry ----------------------------------------------------------------------------


def test_name_in_use_is_refused_without_retry(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address, name="only one"):
            with pytest.raises(BusConnectionError, match="name_in_use") as caught:
                async with simplebus.connect(server.address, name="only one"):
                    pytest.fail("it was in use")
            assert isinstance(caught.value.__cause__, RemoteProtocolError)
            assert caught.value.__cause__.reason == Reason.NAME_IN_USE
            with (
                pytest.raises(BusConnectionError, match="name_in_use"),
                simplebus.connect_blocking(server.address, name="only one"),
            ):
                pytest.fail("it was in use")

    run(main)


BAR = next(
    name
    for name in map("bar{}".format, count())
    if next(candidate_ids(name)) == next(candidate_ids("foo"))
)
"""A name that gets the id which another bus gives to "foo"."""
CONFLICT = (
    r"closed the connection.*; reconnecting failed: .*class_name_conflict: .*'foo'.*"
    r"class \d+ has the name 'bar\d+'; the previous server assigned that id.*class_id="
)


def test_server_with_conflicting_class_id_is_skipped_and_reported(
    run: Run, server: BusServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The client retries the address that may recover, and finally reports the conflict."""
    with simplebus.connect_blocking(server.address) as other_bus:
        other_bus.publish(b"x", class_id=BAR)

    async def main() -> None:
        first = BusServer()
        async with simplebus.connect([first.address, server.address], reconnect=2) as bus:
            await bus.publish(b"x", class_id="foo")
            await anyio.to_thread.run_sync(first.stop)
            with pytest.raises(BusConnectionError, match=CONFLICT):
                await bus.fetch("foo")

    run(main)
    first = BusServer()
    addresses = [first.address, server.address]
    with simplebus.connect_blocking(addresses, reconnect=2) as bus:
        bus.publish(b"x", class_id="foo")
        first.stop()
        with pytest.raises(BusConnectionError, match=CONFLICT):
            bus.fetch("foo")
    assert caplog.text.count("that address is not tried again") == 2


def create_failing_server(code: str) -> FakeServer:
    """Return a server that sends a fatal error for the first message."""

    def answer(kind: int, class_id: int, number: int, *_: object) -> bytes | None:
        return refuse(kind, number, code, fatal=True) if kind == frames.MESSAGE else b""

    return FakeServer(answer)


@pytest.mark.parametrize("code", ["taken_over", "number_gap", "over_credit", "a_new_word"])
def test_later_fatal_error_is_not_retried(run: Run, code: str) -> None:
    async def main() -> None:
        async with simplebus.connect(bus_gone.address) as bus:
            with pytest.raises(BusConnectionError, match=f"{code}: not today"):
                await bus.publish(b"x", class_id=1)

    bus_gone = create_failing_server(code)
    try:
        with pytest.raises(BusConnectionError, match="1 message was not confirmed"):
            run(main)
        assert bus_gone.connection_count == 1
        with (
            pytest.raises(BusConnectionError, match="1 message was not confirmed"),
            simplebus.connect_blocking(bus_gone.address) as bus,
            pytest.raises(BusConnectionError, match=f"{code}: not today"),
        ):
            bus.publish(b"x", class_id=1)
        assert bus_gone.connection_count == 2
    finally:
        bus_gone.close()


def test_confirm_before_the_disconnect_counts(run: Run) -> None:
    def answer(kind: int, class_id: int, number: int, *_: object) -> bytes:
        if kind != frames.MESSAGE:
            return b""
        return confirm(number + 1) + refuse(kind, number, "taken_over", fatal=True)

    async def main() -> None:
        async with simplebus.connect(bus_gone.address) as bus:
            await bus.publish(b"x", class_id=1)
            with pytest.raises(BusConnectionError, match="taken_over"):
                await bus.publish(b"x", class_id=1)
            assert (bus.statistics().published, bus.statistics().confirmed) == (1, 1)

    with fake_server(answer) as bus_gone:
        run(main)
        with simplebus.connect_blocking(bus_gone.address) as bus:
            bus.publish(b"x", class_id=1)
            with pytest.raises(BusConnectionError, match="taken_over"):
                bus.publish(b"x", class_id=1)


def test_server_of_another_version_is_reported(run: Run) -> None:
    async def main() -> None:
        async with simplebus.connect(old_server.address):
            pytest.fail("connected to an old bus")

    def answer(kind: int, *_: object) -> bytes:
        return frames.encode(frames.CONNECT, content=bytes(4))

    with fake_server(answer) as old_server, pytest.raises(BusConnectionError, match="bad_"):
        run(main)


# Heartbeats --------------------------------------------------------------------------------------


def create_server_without_heartbeats(seconds: float) -> FakeServer:
    """Return a server that agrees on heartbeats and never sends one."""

    def answer(kind: int, class_id: int, number: int, *_: object) -> bytes:
        if kind != frames.CONNECT:
            return b""
        reply = ConnectReply(session=0, credit=1 << 20, bus="false", heartbeat=seconds)
        return frames.encode(frames.CONNECT, message_id=number, content=reply.encode())

    return FakeServer(answer)


def has_detected_missing_heartbeats(server: FakeServer) -> bool:
    """Return True if the client has sent heartbeats and reconnected because none arrived."""
    return server.connection_count >= 2 and any(
        kind == frames.HEARTBEAT for kind, *_ in server.received_frames
    )


def test_sends_heartbeats_and_detects_missing_ones(run: Run) -> None:
    async def main() -> None:
        server = create_server_without_heartbeats(0.1)
        try:
            async with simplebus.connect(server.address, heartbeat=0.1) as bus:
                await anyio.to_thread.run_sync(
                    until, lambda: has_detected_missing_heartbeats(server)
                )
                await bus.publish(b"still there", class_id=1)
        finally:
            server.close()

    run(main)


def test_blocking_bus_sends_heartbeats_while_waiting() -> None:
    server = create_server_without_heartbeats(0.1)
    try:
        with (
            simplebus.connect_blocking(server.address, heartbeat=0.1) as bus,
            bus.subscribe(1, idle_seconds=0.2) as messages,
        ):
            until(lambda: list(messages) == [] and has_detected_missing_heartbeats(server))
    finally:
        server.close()


def test_leaving_does_not_wait_for_a_silent_server(run: Run) -> None:
    async def main() -> None:
        with fake_server() as bus_gone:
            async with simplebus.connect(bus_gone.address) as bus:
                await bus.publish(b"x", class_id=1)
                await anyio.to_thread.run_sync(bus_gone.close)
                await anyio.sleep(0.1)
                started_at = anyio.current_time()
            assert anyio.current_time() - started_at < 30

    run(main)
    with fake_server() as bus_gone:
        with simplebus.connect_blocking(bus_gone.address) as bus:
            bus.publish(b"x", class_id=1)
            bus_gone.close()
            started_at = time.monotonic()
        assert time.monotonic() - started_at < 30
