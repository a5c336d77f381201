"""Connections that are lost and replaced, under both event loops and none.

Every test has both clients do the same: what one promises, so does the other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from itertools import count

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
from tests.client.faulty_bus import (
    FalseBus,
    confirm,
    false_bus,
    proxy,
    refuse,
)

NUMBERED = [b"message %d" % number for number in range(50)]


GIVEN_UP = r"closed .* no other connection was made within 0\.3 s: cannot connect"


# What a program does not notice ------------------------------------------------------------------


def test_a_loop_goes_on_over_a_lost_connection(run: Run, server: BusServer) -> None:
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


def test_a_blocking_loop_goes_on_over_a_lost_connection(server: BusServer) -> None:
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


@pytest.mark.parametrize(("lost", "resent"), [("what the bus says", 0), ("what it hears", 50)])
def test_what_was_not_confirmed_is_sent_again_and_stored_once(
    run: Run, server: BusServer, lost: str, resent: int
) -> None:
    """Sent again is what the bus has not got, which it tells."""

    async def main() -> None:
        with proxy(server.address) as way:
            async with simplebus.connect(way.address) as bus:
                await bus.publish(b"first", class_id=1)
                way.loses = lost
                async with anyio.create_task_group() as tasks:
                    for payload in NUMBERED:
                        tasks.start_soon(lambda p=payload: bus.publish(p, class_id=1))
                    await anyio.to_thread.run_sync(until, lambda: way.lost > 0)
                    if not resent:
                        await anyio.to_thread.run_sync(
                            until, lambda: server.statistics().published == 51
                        )
                    assert bus.statistics().unconfirmed == 50
                    way.cut()
                assert bus.statistics().unconfirmed == 0
                assert bus.statistics().resent == resent

    run(main)
    assert server.statistics().published == 51


def test_a_blocking_publisher_s_messages_are_sent_again_and_stored_once(server: BusServer) -> None:
    with proxy(server.address) as way, simplebus.connect_blocking(way.address) as bus:
        bus.publish(b"first", class_id=1)
        way.loses = "what it hears"
        cutting = threading.Thread(target=lambda: (until(lambda: way.lost > 0), way.cut()))
        cutting.start()
        bus.publish_many(NUMBERED, class_id=1)
        cutting.join()
        assert (bus.statistics().unconfirmed, bus.statistics().resent) == (0, 50)
    assert server.statistics().published == 51


def test_a_durable_subscription_goes_on_where_it_was(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(1, durable="shop", auto_ack=False) as messages,
        ):
            await bus.publish_many(NUMBERED, class_id=1)
            taken = [await messages.get() for _ in range(20)]
            for message in taken[:10]:
                message.ack()
            await bus.drain()
            await anyio.to_thread.run_sync(server.hang_up)
            await anyio.to_thread.run_sync(until, lambda: bus.statistics().reconnections == 1)
            taken[10].ack()  # It is still in flight: the bus knows the position.
            await bus.drain()
            assert server.statistics().acknowledged == 11

    run(main)


def test_publishers_wait_while_there_is_no_bus(run: Run, server: BusServer) -> None:
    async def main() -> None:
        with proxy(server.address) as way:
            async with simplebus.connect(way.address) as bus:
                way.is_shut = True
                way.cut()
                with anyio.move_on_after(0.2) as patience:
                    await bus.publish(b"handed over", class_id=1)
                assert patience.cancelled_caught
                while bus.statistics().queued_bytes < WRITE_BUFFER_BYTES:
                    await bus.publish(b"x" * 1000, class_id=1, confirm=False)
                with anyio.move_on_after(0.05) as patience:
                    await bus.publish(b"not handed over", class_id=1, confirm=False)
                assert patience.cancelled_caught
                way.is_shut = False
                await bus.publish(b"waits", class_id=1)
                assert server.statistics().published == bus.statistics().published

    run(main)


def test_an_outage_is_told_to_who_waits_with_a_timeout_and_waits_on(server: BusServer) -> None:
    """Without an event loop, too, a timeout is kept while nobody answers."""
    with (
        false_bus() as false,
        simplebus.connect_blocking(false.address, timeout=PATIENCE_SECONDS) as bus,
        bus.subscribe(1) as messages,
    ):
        false.says_nothing = True
        false.hang_up()
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no message of class 1 came within 0\.1 s"):
            messages.get(timeout=0.1)
        assert time.monotonic() - began < PATIENCE_SECONDS / 2
        false.says_nothing = False
        false.hang_up()
        bus.publish(b"x", class_id=1)
        assert bus.statistics().reconnections == 1


def test_who_never_waits_gets_on_all_the_same(server: BusServer) -> None:
    """Without an event loop, what is there is taken, and a lost connection replaced, by calls that
    do not wait and by those that may not wait long enough for either."""

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


# Where the next connection goes ------------------------------------------------------------------


def test_addresses_are_tried_in_order(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect([f"127.0.0.1:{free_port()}", server.address]) as bus:
            await bus.publish(b"x", class_id=1)

    run(main)
    with simplebus.connect_blocking([f"127.0.0.1:{free_port()}", server.address]) as bus:
        bus.publish(b"x", class_id=1)
    assert server.statistics().published == 2


def test_one_address_that_says_nothing_leaves_time_for_the_next(
    run: Run, server: BusServer
) -> None:
    """Half of what there is for both, which is enough: at last on a busy machine too."""

    async def main(seconds: float) -> None:
        async with simplebus.connect([deaf.address, server.address], timeout=seconds) as bus:
            await bus.publish(b"x", class_id=1)

    def blocking(seconds: float) -> None:
        both = [deaf.address, server.address]
        with simplebus.connect_blocking(both, timeout=seconds) as bus:
            bus.publish(b"x", class_id=1)

    def in_time(connect: Callable[[float], None]) -> None:
        for seconds in (0.5, 5, PATIENCE_SECONDS):
            with contextlib.suppress(BusConnectionError):
                return connect(seconds)
        pytest.fail("the one that says nothing takes all the time")

    with false_bus() as deaf:
        deaf.says_nothing = True
        in_time(lambda seconds: run(lambda: main(seconds)))
        in_time(blocking)


def test_another_address_takes_over(run: Run, server: BusServer) -> None:
    async def main() -> None:
        with false_bus() as first:
            async with simplebus.connect([first.address, server.address]) as bus:
                await bus.publish(b"x", class_id=1)
                await anyio.to_thread.run_sync(first.close)
                await bus.publish(b"y", class_id=1)

    run(main)
    assert server.statistics().published == 1


def test_another_address_takes_over_without_a_loop(server: BusServer) -> None:
    with (
        false_bus() as first,
        simplebus.connect_blocking([first.address, server.address]) as bus,
    ):
        bus.publish(b"x", class_id=1)
        first.close()
        bus.publish(b"y", class_id=1)
    assert server.statistics().published == 1


def test_a_bus_that_hangs_up_at_once_is_asked_ever_more_rarely(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        def answer(kind: int, *_: object) -> bytes | None:
            return None if kind == frames.SUBSCRIBE else b""

        with false_bus(answer) as flapping:
            async with simplebus.connect(flapping.address) as bus:
                began = time.monotonic()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(bus.subscribe(1).__aenter__)
                    await anyio.to_thread.run_sync(until, lambda: flapping.connects >= 5)
                    tasks.cancel_scope.cancel()
            # However busy the machine is: the pauses before the last four are no shorter.
            assert time.monotonic() - began >= (1 + 2 + 4 + 8) * RETRY_DELAY_MIN_SECONDS / 2

    with caplog.at_level(logging.INFO, "simplebus.client"):
        run(main)
    assert "closed the connection; see its log for the reason; trying again" in caplog.text
    assert "connected again, to simplebus://127.0.0.1" in caplog.text


# When there is no other connection ---------------------------------------------------------------


@pytest.mark.parametrize("reconnect", [0.3, 0, None])
def test_who_waits_is_told_when_there_is_no_other_connection(
    run: Run, reconnect: float | None
) -> None:
    expected = GIVEN_UP if reconnect else "closed the connection"

    async def main() -> None:
        with false_bus() as bus_gone:
            async with (
                simplebus.connect(bus_gone.address, reconnect=reconnect) as bus,
                bus.subscribe(1) as messages,
            ):
                await anyio.to_thread.run_sync(bus_gone.close)
                for wait in (
                    lambda: anext(messages),
                    lambda: bus.publish(b"x", class_id=1),
                    lambda: bus.publish(b"x", class_id=1, confirm=False),
                    lambda: bus.publish_many([b"x"], class_id=1),
                    bus.flush,
                    bus.drain,
                    lambda: bus.request(b"x", class_id=1),
                    lambda: bus.fetch(1),
                    messages.get,
                    lambda: messages.take(1),
                ):
                    with pytest.raises(BusConnectionError, match=expected):
                        await wait()
                with pytest.raises(BusConnectionError, match=expected):
                    bus.publish_nowait(b"x", class_id=1)
                with pytest.raises(BusConnectionError, match=expected):
                    bus.handle(1, print)

    run(main)


@pytest.mark.parametrize("reconnect", [0.3, 0, None])
def test_a_blocking_caller_is_told_when_there_is_no_other_connection(
    reconnect: float | None,
) -> None:
    expected = GIVEN_UP if reconnect else "closed the connection"
    with (
        false_bus() as bus_gone,
        simplebus.connect_blocking(bus_gone.address, reconnect=reconnect) as bus,
        bus.subscribe(1) as messages,
    ):
        bus_gone.close()
        for wait in (
            lambda: next(iter(messages)),
            lambda: bus.publish(b"x", class_id=1),
            lambda: bus.publish(b"x", class_id=1, confirm=False),
            lambda: bus.publish_nowait(b"x", class_id=1),
            lambda: bus.publish_many([b"x"], class_id=1),
            bus.flush,
            bus.drain,
            lambda: bus.request(b"x", class_id=1),
            lambda: bus.fetch(1),
            messages.get,
            lambda: messages.take(1),
            lambda: bus.handle(1, print),
        ):
            with pytest.raises(BusConnectionError, match=expected):
                wait()


def test_messages_that_were_not_confirmed_are_counted_at_the_end(run: Run) -> None:
    async def main() -> None:
        with false_bus(lambda kind, *_: None if kind == frames.MESSAGE else b"") as bus_gone:
            async with simplebus.connect(bus_gone.address, reconnect=0) as bus:
                for payload in NUMBERED:
                    await bus.publish(payload, class_id=1, confirm=False)

    expected = "50 messages were not confirmed by the bus: the server at .* closed the connection"
    with pytest.raises(BusConnectionError, match=expected):
        run(main)

    def blocking() -> None:
        with (
            false_bus(lambda kind, *_: None if kind == frames.MESSAGE else b"") as bus_gone,
            simplebus.connect_blocking(bus_gone.address, reconnect=0) as bus,
        ):
            bus.publish_many(NUMBERED, class_id=1, confirm=False)

    with pytest.raises(BusConnectionError, match=expected):
        blocking()


# What trying again would not change --------------------------------------------------------------


def test_a_name_that_is_in_use_is_refused_at_once(run: Run, server: BusServer) -> None:
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
    r"closed the connection.*; no other connection was made: .*class_name_conflict: .*'foo'.*"
    r"class \d+ has the name 'bar\d+'; the bus before gave the class that id.*class_id="
)


def test_a_bus_where_a_name_has_another_id_is_left_alone_and_the_reason_is_told(
    run: Run, server: BusServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The address that may come back is tried to the end; that is not why it failed."""
    with simplebus.connect_blocking(server.address) as other:
        other.publish(b"x", class_id=BAR)

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


def refusing_later(code: str) -> FalseBus:
    """A bus that says something fatal about the first message."""

    def answer(kind: int, class_id: int, number: int, *_: object) -> bytes | None:
        return refuse(kind, number, code, fatal=True) if kind == frames.MESSAGE else b""

    return FalseBus(answer)


@pytest.mark.parametrize("code", ["taken_over", "number_gap", "over_credit", "a_new_word"])
def test_a_fatal_refusal_later_is_not_tried_again_either(run: Run, code: str) -> None:
    async def main() -> None:
        async with simplebus.connect(bus_gone.address) as bus:
            with pytest.raises(BusConnectionError, match=f"{code}: not today"):
                await bus.publish(b"x", class_id=1)

    bus_gone = refusing_later(code)
    try:
        with pytest.raises(BusConnectionError, match="1 message was not confirmed"):
            run(main)
        assert bus_gone.connects == 1
        with (
            pytest.raises(BusConnectionError, match="1 message was not confirmed"),
            simplebus.connect_blocking(bus_gone.address) as bus,
            pytest.raises(BusConnectionError, match=f"{code}: not today"),
        ):
            bus.publish(b"x", class_id=1)
        assert bus_gone.connects == 2
    finally:
        bus_gone.close()


def test_what_was_confirmed_before_the_end_is_confirmed(run: Run) -> None:
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

    with false_bus(answer) as bus_gone:
        run(main)
        with simplebus.connect_blocking(bus_gone.address) as bus:
            bus.publish(b"x", class_id=1)
            with pytest.raises(BusConnectionError, match="taken_over"):
                bus.publish(b"x", class_id=1)


def test_a_bus_of_another_version_is_said_so(run: Run) -> None:
    async def main() -> None:
        async with simplebus.connect(old.address):
            pytest.fail("connected to an old bus")

    def answer(kind: int, *_: object) -> bytes:
        return frames.encode(frames.CONNECT, content=bytes(4))

    with false_bus(answer) as old, pytest.raises(BusConnectionError, match="bad_"):
        run(main)


# Heartbeats --------------------------------------------------------------------------------------


def beating(seconds: float) -> FalseBus:
    """A bus that agrees on heartbeats, and never sends one."""

    def answer(kind: int, class_id: int, number: int, *_: object) -> bytes:
        if kind != frames.CONNECT:
            return b""
        reply = ConnectReply(session=0, credit=1 << 20, bus="false", heartbeat=seconds)
        return frames.encode(frames.CONNECT, message_id=number, content=reply.encode())

    return FalseBus(answer)


def is_alive_and_was_left(silent: FalseBus) -> bool:
    """Whether its client has sent heartbeats, and has noticed that none come."""
    return silent.connects >= 2 and any(kind == frames.HEARTBEAT for kind, *_ in silent.heard)


def test_heartbeats_are_sent_and_their_absence_is_noticed(run: Run) -> None:
    async def main() -> None:
        silent = beating(0.1)
        try:
            async with simplebus.connect(silent.address, heartbeat=0.1) as bus:
                await anyio.to_thread.run_sync(until, lambda: is_alive_and_was_left(silent))
                await bus.publish(b"still there", class_id=1)
        finally:
            silent.close()

    run(main)


def test_without_a_loop_heartbeats_go_while_the_program_waits() -> None:
    silent = beating(0.1)
    try:
        with (
            simplebus.connect_blocking(silent.address, heartbeat=0.1) as bus,
            bus.subscribe(1, idle_seconds=0.2) as messages,
        ):
            until(lambda: list(messages) == [] and is_alive_and_was_left(silent))
    finally:
        silent.close()


def test_leaving_does_not_wait_for_a_bus_that_nothing_is_to_be_told(run: Run) -> None:
    async def main() -> None:
        with false_bus() as bus_gone:
            async with simplebus.connect(bus_gone.address) as bus:
                await bus.publish(b"x", class_id=1)
                await anyio.to_thread.run_sync(bus_gone.close)
                await anyio.sleep(0.1)
                began = anyio.current_time()
            assert anyio.current_time() - began < 30

    run(main)
    with false_bus() as bus_gone:
        with simplebus.connect_blocking(bus_gone.address) as bus:
            bus.publish(b"x", class_id=1)
            bus_gone.close()
            began = time.monotonic()
        assert time.monotonic() - began < 30
