"""Several programs that use one publisher name, one after the other.

Numbers that another instance has used are refused here, so its messages are never stored and cannot
be confused with the expected ones.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason
from simplebus.core.limits import FRAME_BYTES_MIN, PRODUCER_TAKEOVER_STEP, Limits
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_request, publish
from tests.client.core.client_and_broker import ClientAndBroker
from tests.support.oracles import ID_COUNT, parse_frame

UNKNOWN_CLASS = 9
"""Class that no Connect has named. Its messages use their numbers but are not stored."""
UNDER_WAY = [b"5", b"6", b"7", b"8", b"9"]


def connect_instance(
    broker: Broker, name: str, instance: str | None, *, user: str = ""
) -> tuple[Version2Peer, int]:
    """Connect an instance. Returns the peer and its first number."""
    bus = BrokerHarness()
    bus.broker = broker
    peer = Version2Peer(bus, broker.open_session())
    peer.session.user = user
    peer.send(connect_request(1, name=name, instance=instance))
    return peer, peer.receive_replies()[0].content["next"]


def use_numbers(broker: Broker, name: str, instance: str | None, count: int) -> None:
    """Connect an instance that uses some numbers, and disconnect it."""
    peer, first = connect_instance(broker, name, instance)
    peer.send(publish(UNKNOWN_CLASS, first, *[b"x"] * count))
    peer.disconnect()


def stored_payloads(broker: Broker) -> list[bytes]:
    ring = broker.classes[1].ring
    return [parse_frame(ring.copy_frame(s))[4] for s in range(ring.floor, ring.head)]


def connect_with_five_confirmed() -> ClientAndBroker:
    """Return a publisher with five confirmed and five unconfirmed messages."""
    pair = ClientAndBroker()
    pair.core.publish_many([b"0", b"1", b"2", b"3", b"4"], 1)
    pair.exchange()
    assert pair.core.confirmed_position == 5
    pair.core.publish_many(UNDER_WAY, 1)
    return pair


@pytest.mark.parametrize("is_received", [False, True])
@pytest.mark.parametrize("count", [0, 3, 5, 7])
@pytest.mark.parametrize("another", ["another", None])
def test_unconfirmed_messages_are_stored_after_other_instance(
    another: str | None, count: int, is_received: bool
) -> None:
    """A message may be stored twice, because it is unknown whether it was stored before."""
    pair = connect_with_five_confirmed()
    while pair.send_chunk() if is_received else pair.core.send_queue.peek():
        if not is_received:
            pair.core.send_queue.mark_sent(len(pair.core.send_queue.peek()))
    pair.disconnect()
    use_numbers(pair.broker, "tester", another, count)
    pair.connect()
    pair.exchange()
    found = stored_payloads(pair.broker)
    assert found == [b"0", b"1", b"2", b"3", b"4", *UNDER_WAY, *(UNDER_WAY if is_received else [])]
    statistics = pair.core.statistics()
    assert (statistics.confirmed, statistics.unconfirmed, statistics.forgotten) == (10, 0, 0)
    assert statistics.resent == 5


def test_unconfirmed_messages_are_stored_once_without_other_instance() -> None:
    pair = connect_with_five_confirmed()
    while pair.send_chunk():
        pass
    pair.disconnect()
    pair.connect()
    pair.exchange()
    assert stored_payloads(pair.broker) == [b"0", b"1", b"2", b"3", b"4", *UNDER_WAY]


def test_alternating_instances_lose_nothing() -> None:
    broker = Broker()
    pairs = [ClientAndBroker(broker=broker, instance=instance) for instance in ("one", "two")]
    for pair in pairs:
        pair.disconnect()
    for turn in range(20):
        for pair in pairs:
            pair.connect()
            pair.exchange()
            pair.core.publish(b"%d" % turn, 1)
            pair.core.send_queue.mark_sent(len(pair.core.send_queue.peek()))  # The bytes are lost.
            pair.disconnect()
    for pair in pairs:
        pair.connect()
        pair.exchange()
        pair.disconnect()
    assert Counter(stored_payloads(broker)) == dict.fromkeys(
        (b"%d" % turn for turn in range(20)), 2
    )


@pytest.mark.parametrize("unconfirmed", [0, 5, ID_COUNT - 1])
def test_new_instance_gets_unused_number(
    unconfirmed: int,
) -> None:
    bus = BrokerHarness()
    options = {"unconfirmed": unconfirmed, "bus": bus.broker.subscription_manager.identity}
    next_numbers = []
    for instance in ("one", "two", None, "one"):
        peer = Version2Peer(bus, bus.broker.open_session())
        peer.send(connect_request(1, name="a", instance=instance, **options))
        reply = peer.receive_replies()[0].content
        next_numbers.append((reply["next"] - unconfirmed) % ID_COUNT)
        assert reply["lost"] == 0
        peer.disconnect()
    # The first instance has no predecessor.
    assert next_numbers == [0, *[PRODUCER_TAKEOVER_STEP] * 3]


def test_number_step_exceeds_credit_and_wraps_late() -> None:
    most = Limits().pending_bytes // FRAME_BYTES_MIN
    assert most < PRODUCER_TAKEOVER_STEP < ID_COUNT // 2
    met = sorted(n * PRODUCER_TAKEOVER_STEP % ID_COUNT for n in range(200))
    assert min(b - a for a, b in pairwise(met)) > most


def test_forgotten_publisher_is_trusted_and_loses_nothing() -> None:
    pair = connect_with_five_confirmed()
    pair.disconnect()
    pair.broker.subscription_manager.producer_states.expire(1e9)
    assert len(pair.broker.subscription_manager.producer_states) == 0
    pair.connect()
    pair.exchange()
    assert stored_payloads(pair.broker) == [b"0", b"1", b"2", b"3", b"4", *UNDER_WAY]
    assert pair.core.statistics().forgotten == 0


def test_publisher_names_are_per_user() -> None:
    broker = Broker()
    ann, first = connect_instance(broker, "till", "1", user="ann")
    ann.send(publish(1, first, b"a", b"b"))
    bob, first = connect_instance(broker, "till", "2", user="bob")
    assert first == 0
    bob.send(publish(1, first, b"c"))
    bus = BrokerHarness()
    bus.broker = broker
    successor = Version2Peer(bus, broker.open_session())
    successor.session.user = "bob"
    assert (
        successor.send_refused(connect_request(1, name="till", instance="3")) is Reason.NAME_IN_USE
    )
    ann.disconnect()
    bob.disconnect()
    for user, following in (("ann", 2), ("bob", 1), ("", 0)):
        assert (
            connect_instance(broker, "till", "1" if user == "ann" else "2", user=user)[1]
            == following
        )
