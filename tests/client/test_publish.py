"""Tests of publishing and confirms with every driver."""

from __future__ import annotations

import anyio
import msgspec
import pytest

import simplebus
from simplebus import BusFullError, LocalProtocolError, RefusedError
from simplebus.client.aio.writer import WRITE_BUFFER_BYTES
from simplebus.core.protocol import frames
from tests.client.bus_server import BusServer, until
from tests.client.conftest import Run
from tests.client.faulty_server import CREDIT_BYTES, FakeServer, confirm, fake_server, refuse

PUBLISHED = (frames.MESSAGE, frames.ENVELOPE)
registry = simplebus.Registry()


@registry.message(class_id=84)
class Small(msgspec.Struct):
    number: int


@registry.message(class_id=85)
class Large(msgspec.Struct):
    body: bytes


def create_refusing_server(*numbers: int) -> FakeServer:
    """Return a server that refuses messages with these numbers."""

    def answer(kind: int, class_id: int, number: int, *_: object) -> bytes:
        if kind not in PUBLISHED or number not in numbers:
            return b""
        return refuse(kind, number, "bad_channel", class_id=class_id) + confirm(number + 1)

    return FakeServer(answer)


# Confirms ----------------------------------------------------------------------------------------


def test_publish_returns_after_the_confirm(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            for number in range(10):
                await bus.publish(b"x", class_id=1)
                assert bus.statistics().confirmed == number + 1
            await bus.publish_many([b"x"] * 10, class_id=1)
            assert bus.statistics().confirmed == 20
            await bus.publish_many([], class_id=1)

    run(main)
    with simplebus.connect_blocking(server.address) as bus:
        for number in range(10):
            bus.publish(b"x", class_id=1)
            assert bus.statistics().confirmed == number + 1
        bus.publish_many([b"x"] * 10, class_id=1)
        assert bus.statistics().confirmed == 20
        bus.publish_many([], class_id=1)
    assert server.statistics().published == 40


def test_many_tasks_publish_concurrently(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with (
            simplebus.connect(server.address) as bus,
            bus.subscribe(1) as messages,
            anyio.create_task_group() as tasks,
        ):
            for number in range(1000):
                tasks.start_soon(lambda n=number: bus.publish(b"%d" % n, class_id=1))
            received = {int((await anext(messages)).payload) for _ in range(1000)}
            assert received == set(range(1000))

    run(main)
    assert server.statistics().published == 1000


def test_cancelled_publish_is_still_confirmed(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            for number in range(20):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await bus.publish(b"%d" % number, class_id=1)
                assert scope.cancelled_caught
            await bus.flush()
            assert bus.statistics().confirmed == 20

    run(main)
    assert server.statistics().published == 20


def test_publish_cancelled_while_waiting_for_credit_is_not_published(run: Run) -> None:
    async def main() -> None:
        with fake_server(lambda kind, *_: b"" if kind == frames.CONNECT else confirm(0)) as server:
            async with simplebus.connect(server.address) as bus:
                while bus.statistics().unconfirmed_bytes < CREDIT_BYTES + WRITE_BUFFER_BYTES:
                    await bus.publish(b"x" * 9000, class_id=1, confirm=False)
                published = bus.statistics().published
                async with anyio.create_task_group() as tasks:
                    for _ in range(10):
                        tasks.start_soon(lambda: bus.publish(b"y", class_id=1, confirm=False))
                    await anyio.wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
                assert bus.statistics().published == published
                raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run(main)


# Refusals ----------------------------------------------------------------------------------------


def test_refused_message_raises_from_publish(run: Run) -> None:
    async def main() -> None:
        async with simplebus.connect(bus_.address) as bus:
            await bus.publish(b"x", class_id=1)
            with pytest.raises(RefusedError, match="bad_channel: not today") as caught:
                await bus.publish(b"x", class_id=1)
            assert (caught.value.code, caught.value.sentence) == ("bad_channel", "not today")
            with pytest.raises(
                ExceptionGroup, match="the server refused 2 messages"
            ) as raised_group:
                await bus.publish_many([b"x"] * 5, class_id=1)
            assert raised_group.group_contains(RefusedError, match="bad_channel")
            await bus.flush()

    bus_ = create_refusing_server(1, 3, 5)
    try:
        run(main)
        with simplebus.connect_blocking(bus_.address) as bus:
            bus.publish(b"x", class_id=1)
            with pytest.raises(RefusedError, match="bad_channel: not today"):
                bus.publish(b"x", class_id=1)
            with pytest.raises(ExceptionGroup, match="the server refused 2 messages"):
                bus.publish_many([b"x"] * 5, class_id=1)
            bus.flush()
    finally:
        bus_.close()


def test_unclaimed_refusal_is_raised_by_flush_or_on_exit(run: Run) -> None:
    async def main() -> None:
        async with simplebus.connect(bus_.address) as bus:
            for _ in range(3):
                await bus.publish(b"x", class_id=1, confirm=False)
            with pytest.raises(ExceptionGroup, match="the server refused 1 message"):
                await bus.flush()
            await bus.flush()
            for _ in range(3):
                bus.publish_nowait(b"x", class_id=1)

    def blocking() -> None:
        with simplebus.connect_blocking(bus_.address) as bus:
            bus.publish_many([b"x"] * 3, class_id=1, confirm=False)
            with pytest.raises(ExceptionGroup, match="the server refused 1 message"):
                bus.flush()
            bus.publish_many([b"x"] * 3, class_id=1, confirm=False)

    bus_ = create_refusing_server(1, 4)
    try:
        with pytest.raises(ExceptionGroup, match="the server refused 1 message"):
            run(main)
        with pytest.raises(ExceptionGroup, match="the server refused 1 message"):
            blocking()
    finally:
        bus_.close()


# Without waiting ---------------------------------------------------------------------------------


def test_publish_nowait_returns_the_position_and_raises_without_credit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.client.aio.connect.CLOSE_SECONDS", 0.1)

    async def main() -> None:
        with fake_server(
            lambda kind, *_: b"" if kind == 52 else confirm(0), credit=200_000
        ) as server:
            async with simplebus.connect(server.address) as bus:
                for position in range(9):
                    assert bus.publish_nowait(b"x" * 20_000, class_id=1) == position
                with pytest.raises(BusFullError, match="too many bytes wait"):  # noqa: PT012
                    for _ in range(19):
                        bus.publish_nowait(b"x" * 20_000, class_id=1)
                published = bus.statistics().published
                assert published < 28
                with pytest.raises(BusFullError, match="nothing was published"):
                    bus.publish_nowait(b"x" * 20_000, class_id=1)
                assert bus.statistics().published == published

    with pytest.raises(simplebus.BusConnectionError, match="were not confirmed"):
        run(main)


def test_publish_nowait_works_again_after_confirms() -> None:
    """Also for the blocking driver, which only reads during calls."""

    def has_room() -> bool:
        try:
            bus.publish_nowait(b"x" * 20_000, class_id=1)
        except BusFullError:
            return False
        return True

    with fake_server(credit=200_000) as server, simplebus.connect_blocking(server.address) as bus:
        for _ in range(100):
            until(has_room)
        assert bus.statistics().published == 100


def test_publish_nowait_by_name_works_after_the_class_id_is_known(
    run: Run, server: BusServer
) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus:
            with pytest.raises(BusFullError, match="the bus has not sent the class id yet"):
                bus.publish_nowait(b"x", class_id="tests.later")
            await bus.drain()
            assert bus.publish_nowait(b"x", class_id="tests.later") == 0

    run(main)
    with simplebus.connect_blocking(server.address) as bus:
        assert bus.publish_nowait(b"x", class_id="tests.other") == 0


# Message fields -----------------------------------------------------------------------------------


def test_options_arrive_with_the_message(run: Run, server: BusServer) -> None:
    options = {"channel": "orders.eu", "key": b"7", "headers": [("a", "1"), ("a", "2")]}

    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            await bus.publish(b"x", class_id=1, expires=60, **options)
            message = await anext(messages)
            assert (message.channel, message.key) == ("orders.eu", b"7")
            assert message.headers == (("a", "1"), ("a", "2"))
            assert message.expires_ms == 60_000
            await bus.publish_many([b"<\r\n>"] * 3, class_id=1, **options)
            for _ in range(3):
                message = await anext(messages)
                assert (message.payload, message.channel) == (b"<\r\n>", "orders.eu")

    run(main)
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        bus.publish(b"x", class_id=1, **options)
        assert messages.get().channel == "orders.eu"


def test_any_payload_arrives(run: Run, server: BusServer) -> None:
    payloads = [
        b"<\r\n>",
        b"<\r\n",
        b"\r\n>",
        b"<\r\n\0",
        b"",
        bytes(range(256)),
        b"<\r\n><\r\n>" * 9,
    ]

    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            await bus.publish_many(payloads, class_id=1)
            for payload in payloads:
                await bus.publish(payload, class_id=1)
            assert [
                (await anext(messages)).payload for _ in range(2 * len(payloads))
            ] == payloads * 2

    run(main)


def test_message_that_expires_at_once_is_not_delivered(run: Run, server: BusServer) -> None:
    async def main() -> None:
        async with simplebus.connect(server.address) as bus, bus.subscribe(1) as messages:
            await bus.publish(b"too late", class_id=1, expires=0)
            await bus.publish(b"in time", class_id=1)
            assert (await anext(messages)).payload == b"in time"

    run(main)


@pytest.mark.parametrize(
    ("wrong_options", "error"),
    [
        ({"channel": "a..b"}, ValueError),
        ({"expires": -1}, ValueError),
        ({"delay": float("nan")}, ValueError),
        ({"headers": {"a": 1}}, TypeError),
        ({"colour": "red"}, TypeError),
        ({"key": "text"}, TypeError),
        ({"class_id": 70_000}, ValueError),
    ],
)
def test_invalid_options_are_rejected_and_nothing_is_published(
    run: Run, shared_server: BusServer, wrong_options: dict[str, object], error: type[Exception]
) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address) as bus:
            arguments = {"class_id": 1, **wrong_options}
            with pytest.raises(error):
                await bus.publish(b"x", **arguments)  # type: ignore[arg-type]
            with pytest.raises(error):
                await bus.publish_many([b"x"], **arguments)  # type: ignore[arg-type]
            with pytest.raises(error):
                bus.publish_nowait(b"x", **arguments)  # type: ignore[arg-type]
            assert bus.statistics().published == 0

    run(main)


def test_too_long_payload_is_rejected_by_every_publish_method(
    run: Run, shared_server: BusServer
) -> None:
    async def main() -> None:
        async with simplebus.connect(shared_server.address, frame_bytes=1000) as bus:
            with pytest.raises(LocalProtocolError):
                await bus.publish(b"x" * 1000, class_id=1)
            with pytest.raises(LocalProtocolError):
                await bus.publish_many([b"", b"x" * 1000], class_id=1)
            assert bus.statistics().published == 0

    run(main)


def test_publish_many_with_one_too_long_value_publishes_nothing(
    run: Run, shared_server: BusServer
) -> None:
    values = [Small(1), Large(b"x" * 1000), Small(2)]

    async def main() -> None:
        async with simplebus.connect(
            shared_server.address, registry=registry, frame_bytes=1000
        ) as bus:
            for confirm_ in (True, False):
                with pytest.raises(LocalProtocolError, match="payload at index 1 has"):
                    await bus.publish_many(values, confirm=confirm_)
            assert bus.statistics().published == 0

    run(main)
    with simplebus.connect_blocking(
        shared_server.address, registry=registry, frame_bytes=1000
    ) as bus:
        with pytest.raises(LocalProtocolError, match="payload at index 1 has"):
            bus.publish_many(values)
        assert bus.statistics().published == 0
