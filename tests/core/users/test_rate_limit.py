"""Publish rates: a limiter against plain sums, and a broker whose publishers wait."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.core.settings import FullPolicy
from simplebus.core.users import rate_limit
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.rate_limit import RateLimit, RateLimiter
from simplebus.core.users.users import User, Users
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer import (
    BrokerHarness,
    WirePeer,
    ack,
    connect,
    create_small_bus,
    numbered,
    publish,
    subscribe,
)
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_version2

SIZES = st.lists(st.integers(13, 5000), min_size=1, max_size=8)
STEPS = st.lists(st.tuples(st.floats(0, 3), SIZES), max_size=12)


@given(st.sampled_from([0.0, 0.5, 3.0, 1000.0]), st.sampled_from([0.0, 20.0, 4000.0]), STEPS)
def test_limiter_admits_burst_and_refill(
    messages: float, size: float, steps: list[tuple[float, list[int]]]
) -> None:
    rate = RateLimit(messages, size)
    meter, now, count, total, longest = RateLimiter(rate, 0.0), 0.0, 0, 0, 0
    for pause, sizes in steps:
        now += pause
        ends = np.cumsum(sizes)
        fits = meter.count_allowed(ends, now)
        taken = int(ends[fits - 1]) if fits else 0
        meter.consume(fits, taken)
        count, total = count + fits, total + taken
        longest = max([longest, *sizes])
        if messages:
            assert count <= max(1, messages) + now * messages + 1e-6
        if size:
            assert total <= max(1, size) + now * size + longest + 1e-6
        if fits == len(sizes):
            continue
        if fits == 0:
            due = meter.next_available(now)
            assert due > now
            assert copy.copy(meter).count_allowed(ends, due + 1e-6) > 0
    if not rate:
        assert count == sum(len(sizes) for _, sizes in steps)


def test_updating_the_limit_keeps_the_rest() -> None:
    meter = RateLimiter(RateLimit(10), 0.0)
    meter.consume(10, 1000)
    assert not meter.is_full(0.0)
    meter.update_limit(RateLimit(100, 50), 0.0)
    assert meter.count_allowed(np.arange(1, 200), 0.0) == 0
    assert meter.count_allowed(np.arange(1, 200), 0.5) == 50
    meter.update_limit(RateLimit(), 0.5)
    assert meter.count_allowed(np.arange(1, 200), 0.5) == 199
    assert meter.next_available(0.5) == 0.5


def test_read_size_follows_the_rate() -> None:
    assert rate_limit.read_bytes([RateLimiter(RateLimit(bytes=10_000_000), 0.0)]) == 500_000
    assert (
        rate_limit.read_bytes(
            [RateLimiter(RateLimit(10), 0.0), RateLimiter(RateLimit(bytes=1e9), 0.0)]
        )
        == 256
    )


# At a broker -------------------------------------------------------------------------------------

ADDRESS = "10.0.0.1"


def build_limited_bus(rate: RateLimit, *names: str) -> BrokerHarness:
    """Build a bus whose users may publish at this rate; each user's token is its name."""
    bus = BrokerHarness()
    bus.broker.user_directory.replace_users(
        Users([User(name, token=hash_token(name), rate=rate) for name in names])
    )
    return bus


def set_time(bus: BrokerHarness, now: float) -> None:
    bus.broker.clock.now = now
    bus.broker.run_due_wakeups()
    bus.broker.end_turn()
    bus.broker.end_turn()
    bus.check_invariants()


def stored_payloads(bus: BrokerHarness) -> int:
    return bus.broker.classes[1].ring.head


def test_messages_above_the_rate_are_stored_and_confirmed_later() -> None:
    bus = build_limited_bus(RateLimit(10), "ada")
    first = connect_version2(bus, classes=[1], auth={"token": "ada"})
    second = connect_version2(bus, classes=[1], auth={"token": "ada"})
    first.send(wire_peer_v2.publish(1, 0, *numbered(8)))
    second.send(wire_peer_v2.publish(1, 0, *numbered(8)))
    assert stored_payloads(bus) == 10
    assert [s.message_id for s in first.receive_replies() if s.kind == "confirm"] == [8]
    assert [s.message_id for s in second.receive_replies() if s.kind == "confirm"] == [2]
    assert not second.session.is_reading_paused  # Its acknowledgements are read all the same.
    due = bus.broker.next_wakeup
    assert 0 < due <= 0.2
    set_time(bus, due - 0.001)
    assert stored_payloads(bus) == 10
    first.send(wire_peer_v2.publish(1, 8, b"behind those of the other one"))
    for seconds in range(1, 11):
        set_time(bus, seconds / 10 + 0.001)
    assert stored_payloads(bus) == 17
    assert [s.message_id for s in second.receive_replies() if s.kind == "confirm"][-1] == 8
    assert [s.message_id for s in first.receive_replies() if s.kind == "confirm"][-1] == 9


def test_other_users_are_not_delayed() -> None:
    bus = build_limited_bus(RateLimit(5), "ada", "bob")
    ada = connect_version2(bus, classes=[1], auth={"token": "ada"})
    bob = connect_version2(bus, classes=[1], auth={"token": "bob"})
    ada.send(wire_peer_v2.publish(1, 0, *numbered(50)))
    bob.send(wire_peer_v2.publish(1, 0, *numbered(5)))
    assert stored_payloads(bus) == 10
    assert [s.message_id for s in bob.receive_replies() if s.kind == "confirm"] == [5]


def test_version_1_publisher_above_the_rate_is_not_read() -> None:
    bus = BrokerHarness()
    bus.broker.rate_limits.set_address_rate(RateLimit(bytes=1000))
    old, reader = (
        WirePeer(bus, bus.broker.open_session(address=ADDRESS)),
        bus.peer(connect(1), subscribe(1)),
    )
    old.send(connect(1), publish(1, *numbered(100, size=87)))  # Frames of 100 bytes.
    assert stored_payloads(bus) == 10
    assert old.session.is_reading_paused
    set_time(bus, 2.0)
    assert stored_payloads(bus) == 20
    old.disconnect()  # Its parked messages keep the limit.
    set_time(bus, 3.0)
    assert stored_payloads(bus) == 30
    bus.broker.rate_limits.remove_limits()
    set_time(bus, 3.0)
    bus.broker.store.publish_queue.handle_wakeup()
    assert stored_payloads(bus) == 100
    assert reader.receive_ids(1) == list(range(100))


def test_publisher_waits_for_full_class_and_rate() -> None:
    bus = BrokerHarness(class_messages=4)
    bus.broker.rate_limits.set_address_rate(RateLimit(3))
    reader = bus.peer(connect(1), subscribe(1))
    old = WirePeer(bus, bus.broker.open_session(address=ADDRESS))
    old.send(connect(1), publish(1, *numbered(9)))
    assert stored_payloads(bus) == 3
    set_time(bus, 1.0)
    assert stored_payloads(bus) == 4
    assert reader.receive_ids(1) == [0, 1, 2, 3]
    reader.send(ack(1, 0, 4))
    set_time(bus, 1.0)
    assert stored_payloads(bus) == 6
    set_time(bus, 2.0)
    assert stored_payloads(bus) == 8
    reader.receive_messages()
    reader.send(ack(1, 0, 8))
    set_time(bus, 3.0)
    assert stored_payloads(bus) == 9
    assert not old.session.is_reading_paused


@pytest.mark.parametrize("policy", [FullPolicy.DROP_OLDEST, FullPolicy.DROP_NEWEST])
def test_full_class_drops_messages_that_waited_for_the_rate(policy: FullPolicy) -> None:
    bus = create_small_bus(policy, class_messages=4)
    bus.broker.rate_limits.set_address_rate(RateLimit(3))
    reader = bus.peer(connect(1), subscribe(1))
    old = WirePeer(bus, bus.broker.open_session(address=ADDRESS))
    old.send(connect(1), publish(1, *numbered(9)))
    for seconds in (1.0, 2.0):
        set_time(bus, seconds)
    assert not old.session.parked_messages
    assert bus.statistics(1).dropped == {Reason(policy.value): 5}
    expected = numbered(9)[-4:] if policy is FullPolicy.DROP_OLDEST else numbered(4)
    assert reader.receive_payloads() == expected


def test_unconfirmed_waiting_messages_are_dropped_on_disconnect() -> None:
    bus = BrokerHarness()
    bus.broker.rate_limits.set_address_rate(RateLimit(2))
    ada = Version2Peer(bus, bus.broker.open_session(address=ADDRESS))
    ada.send(wire_peer_v2.connect_request(1), wire_peer_v2.publish(1, 0, *numbered(5)))
    assert stored_payloads(bus) == 2
    ada.disconnect()
    set_time(bus, 100.0)
    assert stored_payloads(bus) == 2
    assert not bus.broker.store.publish_queue.rate_queue.waiting_sessions


def test_ipv6_addresses_count_as_their_network() -> None:
    bus = BrokerHarness()
    bus.broker.rate_limits.set_address_rate(RateLimit(2))
    for n, address in enumerate(("2001:db8::1", "2001:db8::2", "2001:db8:1::1", "::ffff:9.9.9.9")):
        peer = WirePeer(bus, bus.broker.open_session(address=address))
        peer.send(connect(1), publish(1, b"x", b"y"))
        assert stored_payloads(bus) == (2, 2, 4, 6)[n]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=12), st.data())
def test_waiting_messages_keep_publisher_order(
    published: list[tuple[int, int]], data: st.DataObject
) -> None:
    bus = BrokerHarness()
    bus.broker.rate_limits.set_address_rate(RateLimit(20))
    peers = [Version2Peer(bus, bus.broker.open_session(address=ADDRESS)) for _ in range(3)]
    sent = [0, 0, 0]
    for peer in peers:
        peer.send(wire_peer_v2.connect_request(1, 2))
    reader = bus.peer(connect(1, 2), subscribe(1), subscribe(2))
    for publisher, count in published:
        payloads = [b"%d %d" % (publisher, sent[publisher] + n) for n in range(count)]
        class_id = data.draw(st.sampled_from([1, 2]))
        peers[publisher].send(wire_peer_v2.publish(class_id, sent[publisher], *payloads))
        sent[publisher] += count
        set_time(bus, bus.broker.clock.now + data.draw(st.floats(0, 2)))
    set_time(bus, bus.broker.clock.now + 1.0)
    while bus.broker.next_wakeup < float("inf"):
        set_time(bus, bus.broker.next_wakeup)
    received = [
        (message.class_id, *map(int, message.payload.split()))
        for message in reader.receive_messages()
    ]
    for publisher, count in enumerate(sent):
        assert sorted(n for _, w, n in received if w == publisher) == list(range(count))
        for class_id in (1, 2):
            of_class = [n for c, w, n in received if (c, w) == (class_id, publisher)]
            assert of_class == sorted(of_class)
    assert not any(peer.session.parked_messages for peer in peers)
