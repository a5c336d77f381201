"""Several programs under one name, one after the other: none takes another's messages for its own.

Rule 1: numbers that another program has used are refused ones here: it leaves nothing behind that
        could be taken for the messages that are looked for.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason
from simplebus.core.limits import FRAME_BYTES_MIN, PUBLISHER_STEP, Limits
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import Version2Peer, connect, publish
from tests.client.core.client_and_broker import Pair
from tests.support.oracles import ID_COUNT, parse_frame

UNKNOWN = 9
"""A class that nobody has named: what is published there uses up its number, and is not stored."""
UNDER_WAY = [b"5", b"6", b"7", b"8", b"9"]


def come(broker: Broker, name: str, instance: str | None, *, user: str = "") -> tuple[Version2Peer, int]:
    """A program, and the number that it is to begin with."""
    bus = BrokerHarness()
    bus.broker = broker
    peer = Version2Peer(bus, broker.open_session())
    peer.session.user = user
    peer.send(connect(1, name=name, instance=instance))
    return peer, peer.receive_replies()[0].content["next"]


def pass_by(broker: Broker, name: str, instance: str | None, count: int) -> None:
    """One comes, uses so many numbers, and goes."""
    peer, first = come(broker, name, instance)
    peer.send(publish(UNKNOWN, first, *[b"x"] * count))
    peer.disconnect()


def stored(broker: Broker) -> list[bytes]:
    ring = broker.classes[1].ring
    return [parse_frame(ring.frame(s))[4] for s in range(ring.floor, ring.head)]


def confirmed_five() -> Pair:
    """A program of which five messages are confirmed and five are under way, when its connection
    is lost."""
    pair = Pair()
    pair.core.publish_many([b"0", b"1", b"2", b"3", b"4"], 1)
    pair.exchange()
    assert pair.core.confirmed_position == 5
    pair.core.publish_many(UNDER_WAY, 1)
    return pair


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("count", [0, 3, 5, 7])
@pytest.mark.parametrize("another", ["another", None])
def test_what_was_under_way_is_stored_whoever_had_the_name_meanwhile(
    another: str | None, count: int, heard: bool
) -> None:
    """It may be there twice: nobody knows any longer whether the bus had it already."""
    pair = confirmed_five()
    while pair.say() if heard else pair.core.send_queue.peek():
        if not heard:
            pair.core.send_queue.mark_sent(len(pair.core.send_queue.peek()))
    pair.lose()
    pass_by(pair.broker, "tester", another, count)
    pair.connect()
    pair.exchange()
    found = stored(pair.broker)
    assert found == [b"0", b"1", b"2", b"3", b"4", *UNDER_WAY, *(UNDER_WAY if heard else [])]
    statistics = pair.core.statistics()
    assert (statistics.confirmed, statistics.unconfirmed, statistics.forgotten) == (10, 0, 0)
    assert statistics.resent == 5


def test_without_anybody_in_between_it_is_there_once() -> None:
    pair = confirmed_five()
    while pair.say():
        pass
    pair.lose()
    pair.connect()
    pair.exchange()
    assert stored(pair.broker) == [b"0", b"1", b"2", b"3", b"4", *UNDER_WAY]


def test_two_that_take_turns_lose_nothing_and_never_meet() -> None:
    broker = Broker()
    pairs = [Pair(broker=broker, instance=instance) for instance in ("one", "two")]
    for pair in pairs:
        pair.lose()
    for turn in range(20):
        for pair in pairs:
            pair.connect()
            pair.exchange()
            pair.core.publish(b"%d" % turn, 1)
            pair.core.send_queue.mark_sent(len(pair.core.send_queue.peek()))  # It gets lost.
            pair.lose()
    for pair in pairs:
        pair.connect()
        pair.exchange()
        pair.lose()
    assert Counter(stored(broker)) == dict.fromkeys((b"%d" % turn for turn in range(20)), 2)


@pytest.mark.parametrize("unconfirmed", [0, 5, ID_COUNT - 1])
def test_a_number_that_another_program_is_told_is_none_that_it_can_have_sent(
    unconfirmed: int,
) -> None:
    bus = BrokerHarness()
    known = {"unconfirmed": unconfirmed, "bus": bus.broker.connection_requests.identity}
    told = []
    for instance in ("one", "two", None, "one"):
        peer = Version2Peer(bus, bus.broker.open_session())
        peer.send(connect(1, name="a", instance=instance, **known))
        reply = peer.receive_replies()[0].content
        told.append((reply["next"] - unconfirmed) % ID_COUNT)
        assert reply["lost"] == 0
        peer.disconnect()
    assert told == [0, *[PUBLISHER_STEP] * 3]  # The first one is nobody else.


def test_steps_are_longer_than_all_that_can_be_under_way_and_come_round_late() -> None:
    most = Limits().pending_bytes // FRAME_BYTES_MIN
    assert most < PUBLISHER_STEP < ID_COUNT // 2
    met = sorted(n * PUBLISHER_STEP % ID_COUNT for n in range(200))
    assert min(b - a for a, b in pairwise(met)) > most


def test_a_program_that_was_let_go_of_is_believed_and_loses_nothing() -> None:
    pair = confirmed_five()
    pair.lose()
    pair.broker.connection_requests.producer_states.forget(1e9)
    assert len(pair.broker.connection_requests.producer_states) == 0
    pair.connect()
    pair.exchange()
    assert stored(pair.broker) == [b"0", b"1", b"2", b"3", b"4", *UNDER_WAY]
    assert pair.core.statistics().forgotten == 0


def test_users_have_nothing_to_do_with_one_another_s_names() -> None:
    broker = Broker()
    ann, first = come(broker, "till", "1", user="ann")
    ann.send(publish(1, first, b"a", b"b"))
    bob, first = come(broker, "till", "2", user="bob")
    assert first == 0
    bob.send(publish(1, first, b"c"))
    bus = BrokerHarness()
    bus.broker = broker
    again = Version2Peer(bus, broker.open_session())
    again.session.user = "bob"
    assert again.send_refused(connect(1, name="till", instance="3")) is Reason.NAME_IN_USE
    ann.disconnect()
    bob.disconnect()
    for user, following in (("ann", 2), ("bob", 1), ("", 0)):
        assert come(broker, "till", "1" if user == "ann" else "2", user=user)[1] == following
