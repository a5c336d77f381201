"""What a door is about to leave, and who takes it over meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.engine.going import LEFT, TAKING_SECONDS, WAIT, Going

from .doors import PATIENCE_SECONDS, address, door, options
from .meddling import asked_in_vain
from .nats_servers import NatsServer
from .test_doors import cluster_of, until

PAYLOADS = [b"%d" % number for number in range(20)]


def test_what_waits_to_be_left_is_told_and_then_left_alone_for_a_while() -> None:
    one: Any = object()
    two: Any = object()
    goes_on = {one: ""}
    going = Going(lambda position: goes_on.get(position, ""))
    assert going.answer(b"7", 0.0) == b""
    going.put(one, 7, "p-one")
    going.put(two, 8, "p-two")
    assert not going.is_being_taken(one, 0.0)
    assert going.answer(b"7", 0.0) == LEFT + b" p-one"
    assert going.is_being_taken(one, TAKING_SECONDS - 0.1)
    assert not going.is_being_taken(one, TAKING_SECONDS)
    assert not going.is_being_taken(two, 0.0)
    goes_on[one] = "p-more"
    assert going.answer(b"7", 5.0) == LEFT + b" p-more p-one"
    going.remove(one)
    assert going.answer(b"7", 5.0) == b""
    assert not going.is_being_taken(one, 5.0)


def test_while_it_is_being_left_who_asks_is_to_wait() -> None:
    one: Any = object()
    going = Going(lambda position: "")
    going.put(one, 7, "p-one")
    with going.leaving(one):
        assert going.answer(b"7", 0.0) == WAIT
        assert going.answer(b"8", 0.0) == b""
        assert going.answer(b"", 0.0) == b""  # Whether this door is there.
    assert not going.is_being_taken(one, 0.0)
    assert going.answer(b"7", 0.0) == LEFT + b" p-one"


@pytest.mark.parametrize("asked", [b"", b"x", b"-1", b"123456", b"\xff", b"7 "])
def test_whatever_is_asked_otherwise_is_answered_with_nothing(asked: bytes) -> None:
    one: Any = object()
    going = Going(lambda position: "")
    going.put(one, 7, "p-one")
    assert going.answer(asked, 0.0) == b""


@pytest.mark.parametrize("at_which", ["another", "the same"])
async def test_what_could_not_be_left_yet_goes_to_who_comes_meanwhile(
    jetstream_server: NatsServer, at_which: str
) -> None:
    """The cluster answers nothing about what is to be left, and the door tries on."""
    cluster = options(jetstream_server.url)
    async with door(cluster) as one, door(cluster) as other:
        left = cluster_of(one)
        names: set[str] = set()

        def fails(subject: str) -> BusConnectionError | None:
            is_meant = subject.startswith("CONSUMER") and subject.split(".")[-1] in names
            return BusConnectionError("no answer") if is_meant else None

        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                simplebus.connect(address(one)) as bus,
                bus.subscribe(1, auto_ack=False) as messages,
            ):
                await bus.publish_many(PAYLOADS, class_id=1)
                (await messages.get()).ack()
                names.update(left.listening.consumers.values())
            with asked_in_vain(left.link, fails) as failed:
                await until(lambda: failed.total() > 1)
                up = other if at_which == "another" else one
                if at_which == "the same":
                    names.clear()  # It is tried again in a moment, but not before this.
                async with simplebus.connect(address(up)) as bus, bus.subscribe(1) as messages:
                    again = [await messages.get() for _ in PAYLOADS[1:]]
                    assert [message.payload for message in again] == PAYLOADS[1:]
                    await bus.publish(b"more", class_id=1)
                    assert (await messages.get()).payload == b"more"
