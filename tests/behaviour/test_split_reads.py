"""Reads with many slow requests are processed in several turns, with the same results."""

from __future__ import annotations

import itertools
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    BINDINGS_MAX,
    CLASSES_PER_TURN,
    EXPENSIVE_EVENTS_READ_BYTES,
    FRAMES_AFTER_REFUSALS,
    FRAMES_PER_TURN,
    HEADERS_BYTES_PER_TURN,
    INTERLEAVED_ACKS_PER_TURN,
    MIXED_ENVELOPES_PER_TURN,
    PATTERNS_PER_TURN,
    REFUSALS_MAX,
    REFUSED_RUNS_PER_TURN,
    RETURNED_PER_TURN,
    RING_IDLE_TICKS,
    RING_SEGMENT_BYTES_MAX,
    SLOW_ACK_BYTES,
    SLOW_KEYS_PER_TURN,
    SLOW_REQUEST_BYTES,
    SLOW_REQUESTS_BYTES_MAX,
    SUBSCRIPTIONS_ENDED_PER_TURN,
    TICKED_CLASSES_PER_TURN,
    TICKED_SESSIONS_PER_TURN,
    TYPE_CHANGES_PER_TURN,
    Limits,
)
from simplebus.core.message_class import last_values
from simplebus.core.protocol import envelope
from simplebus.core.protocol.envelope import Envelope
from simplebus.core.session import session as session_module
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.store import store as store_module
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.users import User, Users
from tests.behaviour.wire_peer import BrokerHarness, WirePeer, connect, run_turn
from tests.behaviour.wire_peer_v2 import (
    PURGE,
    Version2Peer,
    ack,
    channel_envelope,
    connect_request,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
    working,
)
from tests.support.call_counter import count_calls
from tests.support.oracles import DELIMITER

CONNECT, CONFIRM = b"4", b"6"
PATTERN_COUNT = BINDINGS_MAX


def patterns(number: int) -> list[str]:
    return [f"site.*.meter.{number}.{n}.*" for n in range(PATTERN_COUNT)]


def run_wakeups(bus: BrokerHarness) -> None:
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        bus.broker.run_due_wakeups()


def split_reader(bus: BrokerHarness) -> Version2Peer:
    peer = connect_version2(bus, classes=[1, 2])
    peer.session.allow_split_reads()
    return peer


def test_one_subscription_with_many_patterns_is_created_in_one_turn() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    peer.send(b"".join(subscribe(1, n, channels=patterns(n)) for n in range(1, 31)))
    counts = [len(peer.session.subscriptions)]
    while run_turn(peer):
        counts.append(len(peer.session.subscriptions))
    assert counts == list(range(1, 31))


def test_few_short_requests_are_processed_in_one_turn() -> None:
    bus = BrokerHarness()
    peer = split_reader(bus)
    peer.send(b"".join(subscribe(1, n) for n in range(1, 101)))
    counts = [len(peer.session.subscriptions)]
    while run_turn(peer):
        counts.append(len(peer.session.subscriptions) - sum(counts))
    assert max(counts) <= SLOW_REQUESTS_BYTES_MAX // SLOW_REQUEST_BYTES
    assert sum(counts) == 100


@pytest.mark.parametrize("frame", [nack(1, 0, 1), nack(1, 0, 1, "60000"), working(1, 0, 1)])
def test_nacks_of_one_read_are_processed_in_portions(frame: bytes) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    counts = [peer.session.receiver.frame_count]
    peer.send(frame * 2000)
    counts.append(peer.session.receiver.frame_count)
    while run_turn(peer):
        counts.append(peer.session.receiver.frame_count)
    processed = [b - a for a, b in pairwise(counts)]
    assert max(processed) <= SLOW_REQUESTS_BYTES_MAX // (SLOW_ACK_BYTES + len(frame))
    assert sum(processed) == 2000


def test_messages_are_not_split() -> None:
    bus = BrokerHarness()
    peer = split_reader(bus)
    peer.send(publish(1, 0, *[b"x" * 100] * 1000))
    assert not peer.session.unprocessed
    assert bus.statistics(1).ring.message_count == 1000


@pytest.mark.parametrize("class_count", [1, 2])
def test_messages_with_many_channels_are_stored_in_portions(class_count: int) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    frames = [
        publish_envelopes(1 + n % class_count, n, channel_envelope(f"a.{n // 2}.b", b"%d" % n))
        for n in range(8000)
    ]
    peer.send(b"".join(frames))
    counts = [bus.broker.store.new_channel_count]
    while run_turn(peer):
        counts.append(bus.broker.store.new_channel_count - sum(counts))
    assert max(counts) <= MIXED_ENVELOPES_PER_TURN
    assert sum(bus.statistics(each).ring.message_count for each in (1, 2)) == 8000


def test_messages_with_few_channels_are_stored_in_portions() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    contents = [channel_envelope(f"a.{n % 5}", b"") for n in range(10_000)]
    peer.send(publish_envelopes(1, 0, *contents))
    counts = [bus.statistics(1).ring.message_count]
    while run_turn(peer):
        counts.append(bus.statistics(1).ring.message_count - sum(counts))
    assert max(counts) <= MIXED_ENVELOPES_PER_TURN * 5 / 4  # Those with the first channel are free.
    assert sum(counts) == 10_000


def test_messages_with_different_headers_are_stored_in_portions() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    headers = [((f"{n}", "x" * 200),) * 10 for n in range(1000)]
    contents = [envelope.encode(Envelope(headers=each), b"") for each in headers]
    peer.send(publish_envelopes(1, 0, *contents))
    counts = [bus.statistics(1).ring.message_count]
    while run_turn(peer):
        counts.append(bus.statistics(1).ring.message_count - sum(counts))
    assert max(counts) <= HEADERS_BYTES_PER_TURN // 2000
    assert sum(counts) == len(contents)


def test_messages_with_equal_headers_are_not_split() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    content = envelope.encode(Envelope(headers=(("name", "x" * 200),)), b"")
    peer.send(publish_envelopes(1, 0, *[content] * 1000))
    assert not peer.session.unprocessed


def test_long_headers_are_stored_one_by_one() -> None:
    bus = BrokerHarness()
    peer = split_reader(bus)
    headers = (("name", "x" * HEADERS_BYTES_PER_TURN),)
    content = envelope.encode(Envelope(headers=headers), b"")
    peer.send(publish_envelopes(1, 0, *[content] * 5))
    counts = [bus.statistics(1).ring.message_count]
    while run_turn(peer):
        counts.append(bus.statistics(1).ring.message_count)
    assert counts == [1, 2, 3, 4, 5]


def test_messages_with_delays_are_stored_in_portions() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    contents = [envelope.encode(Envelope(not_before_ms=n + 1), b"") for n in range(5000)]
    peer.send(publish_envelopes(1, 0, *contents))
    counts = [bus.statistics(1).ring.message_count]
    while run_turn(peer):
        counts.append(bus.statistics(1).ring.message_count - sum(counts))
    assert max(counts) <= MIXED_ENVELOPES_PER_TURN
    assert sum(counts) == 5000


def test_messages_of_different_lengths_are_stored_in_portions() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    peer.send(publish(1, 0, *[b"x" * (n % 3) for n in range(FRAMES_PER_TURN + 1)]))
    assert bus.statistics(1).ring.message_count == FRAMES_PER_TURN
    assert run_turn(peer)
    assert bus.statistics(1).ring.message_count == FRAMES_PER_TURN + 1


@pytest.mark.parametrize(
    ("other_class", "frames_max"), [(2, FRAMES_PER_TURN), (3, REFUSED_RUNS_PER_TURN + 1)]
)
def test_messages_of_two_classes_in_turn_are_processed_in_portions(
    other_class: int, frames_max: int
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    count = 3 * (frames_max // 2)
    classes = itertools.cycle([1, other_class])
    peer.send(b"".join(publish(next(classes), n, b"x") for n in range(count)))
    assert bus.statistics(1).ring.message_count == (frames_max + 1) // 2
    while run_turn(peer):
        pass
    assert bus.statistics(1).ring.message_count == count // 2
    assert bus.broker.refusal_counts[Reason.UNKNOWN_CLASS] == (other_class == 3) * count // 2


def test_messages_for_a_denied_class_are_refused_in_portions() -> None:
    permissions = Permissions(PermissionRules((PermissionRule("1"),)), PermissionRules())
    user = User("ada", token=hash_token("t"), permissions=permissions)
    bus = BrokerHarness()
    bus.skips_checks = True
    connect_version2(bus, classes=[2])
    bus.broker.user_directory.replace_users(Users([user]))
    peer = connect_version2(bus, classes=[1], auth={"token": "t"})
    peer.session.allow_split_reads()
    classes = itertools.cycle([1, 2])
    count = 3 * REFUSED_RUNS_PER_TURN // 2
    peer.send(b"".join(publish(next(classes), n, b"x") for n in range(count)))
    counts = [bus.broker.refusal_counts[Reason.UNAUTHORIZED]]
    while run_turn(peer):
        counts.append(bus.broker.refusal_counts[Reason.UNAUTHORIZED])
    assert max(b - a for a, b in pairwise([0, *counts])) <= REFUSED_RUNS_PER_TURN // 2 + 1
    assert counts[-1] == bus.statistics(1).ring.message_count == count // 2


@given(
    class_ids=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    version=st.sampled_from([1, 2]),
)
def test_messages_of_many_classes_are_stored_in_several_turns(
    class_ids: list[int], version: int
) -> None:
    results = []
    for is_split in (True, False):
        bus = BrokerHarness()
        if version == 2:
            peer: WirePeer = connect_version2(bus, classes=list(range(1, 7)))
        else:
            peer = bus.peer(connect(*range(1, 7)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session_module, "CLASSES_PER_TURN", 2)
            patch.setattr(store_module, "CLASSES_PER_TURN", 2)
            if is_split:
                peer.session.allow_split_reads()
                bus.broker.store.limit_turns(100)
            peer.send(b"".join(publish(each, n, b"%d" % n) for n, each in enumerate(class_ids)))
            assert bool(peer.session.parked_messages) == (is_split and len(set(class_ids)) > 2)
            while bus.broker.store.has_deferred_work:
                bus.broker.store.continue_deferred_work()
                bus.check_invariants()
        bus.broker.end_turn()
        assert not peer.session.parked_messages
        rings = [bus.broker.classes[class_id].ring for class_id in range(1, 7)]
        stored = [len(ring) and bytes(ring.view_frames(0, len(ring), 9999)[0]) for ring in rings]
        results.append((stored, peer.session.confirmed_number))
    assert results[0] == results[1]


def test_single_messages_to_many_classes_are_stored_in_portions_without_waiting() -> None:
    class_ids = range(1, 3 * SLOW_KEYS_PER_TURN)
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus, classes=list(class_ids))
    for number, class_id in enumerate(class_ids):  # The first message of a class creates its ring.
        peer.send(publish(class_id, number, b"x"))
    peer.session.allow_split_reads()
    bus.broker.store.limit_turns(100)
    peer.send(
        b"".join(
            publish(each, number, b"y") for number, each in enumerate(class_ids, len(class_ids))
        )
    )
    stored_counts = []
    while True:
        stored_counts.append(sum(len(bus.broker.classes[each].ring) for each in class_ids))
        assert not peer.session.parked_messages
        if not run_turn(peer):
            break
    portions = np.diff([len(class_ids), *stored_counts]).tolist()
    assert portions == [SLOW_KEYS_PER_TURN, SLOW_KEYS_PER_TURN, SLOW_KEYS_PER_TURN - 1]


def test_a_subscriber_does_not_block_messages_that_wait_for_a_later_turn() -> None:
    bus = BrokerHarness()
    bus.broker.store.limit_turns(100)
    class_ids = range(1, CLASSES_PER_TURN + 3)
    reader = connect_version2(bus, *[subscribe(each, each) for each in class_ids])
    writer = connect_version2(bus, classes=list(class_ids))
    writer.session.allow_split_reads()
    frames_ = [publish(each, n, b"x") for n, each in enumerate([*class_ids, *class_ids])]
    writer.send(b"".join(frames_))
    assert writer.session.parked_messages
    assert not bus.broker.is_blocking_publishers(reader.session)


def test_a_message_that_must_not_wait_follows_those_that_wait_for_a_later_turn() -> None:
    bus = BrokerHarness()
    bus.broker.store.limit_turns(100)
    class_ids = range(1, CLASSES_PER_TURN + 3)
    writer = connect_version2(bus, classes=list(class_ids))
    writer.session.allow_split_reads()
    frames_ = [publish(each, n, b"x") for n, each in enumerate([*class_ids, *class_ids])]
    writer.send(b"".join(frames_))
    class_id = writer.session.parked_messages[0][0]
    local = bus.broker.open_local_session("local")
    frame = memoryview(publish_envelopes(class_id, 0, channel_envelope("a", b"at once")))
    assert bus.broker.publish_or_refuse(local, class_id, "a", frame).sequence == 1


def test_messages_are_processed_in_smaller_portions_after_refusals() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    contents = [b"\0valid", b"\xffinvalid"] * 2 * REFUSALS_MAX
    peer.send(publish_envelopes(1, 0, *contents))
    while run_turn(peer):
        pass
    peer.send(publish(1, len(contents), *[b"x"] * 3 * FRAMES_AFTER_REFUSALS))
    turn_count = 0
    while run_turn(peer):
        turn_count += 1
    assert turn_count == 2
    messages, replies = peer.receive_all()
    assert not messages
    assert [each.kind for each in replies].count("error") == 2 * REFUSALS_MAX


def test_many_invalid_envelopes_are_refused_in_several_turns() -> None:
    results = []
    for is_limited in (True, False):
        bus = BrokerHarness()
        if is_limited:
            bus.broker.store.limit_turns(1)
        peer = connect_version2(bus)
        contents = [b"\0%d" % n if n % 3 else b"\xff" for n in range(9 * REFUSALS_MAX)]
        peer.send(publish_envelopes(1, 0, *contents))
        assert bool(peer.session.parked_messages) == is_limited
        while bus.broker.store.has_deferred_work:
            bus.broker.store.continue_deferred_work()
            bus.check_invariants()
        bus.broker.end_turn()
        assert not peer.session.parked_messages
        _, replies = peer.receive_all()
        errors = [reply.message_id for reply in replies if reply.kind == "error"]
        confirms = [reply.message_id for reply in replies if reply.kind == "confirm"]
        results.append((errors, confirms[-1], bus.statistics(1).ring.message_count))
    assert results[0] == results[1]
    assert results[0][1:] == (9 * REFUSALS_MAX, 6 * REFUSALS_MAX)


def test_a_full_class_with_drop_newest_refuses_few_runs_of_messages_per_turn() -> None:
    results = []
    for is_limited in (True, False):
        limits = Limits(class_messages=64)
        bus = BrokerHarness(Settings(full_policy=FullPolicy.DROP_NEWEST, limits=limits))
        if is_limited:
            bus.broker.store.limit_turns(1)
        peer = connect_version2(bus, publish(1, 0, *[b"x"] * 64), classes=[1, 2])
        peer.receive_all()
        classes = itertools.cycle([1, 1, 2])
        count = 12 * REFUSALS_MAX
        peer.send(b"".join(publish(next(classes), 64 + n, b"x") for n in range(count)))
        counts = [peer.session.refusal_counts[Reason.DROP_NEWEST]]
        while bus.broker.store.has_deferred_work:
            bus.broker.store.continue_deferred_work()
            bus.check_invariants()
            counts.append(peer.session.refusal_counts[Reason.DROP_NEWEST])
        assert counts[0] == 2 * REFUSALS_MAX or not is_limited
        bus.broker.end_turn()
        assert not peer.session.parked_messages
        _, replies = peer.receive_all()
        refused = [
            (each.message_id, each.content["count"]) for each in replies if each.kind == "error"
        ]
        results.append((counts[-1], sorted(refused), replies[-1].message_id))
    assert results[0] == results[1]


def test_many_invalid_acks_are_refused_in_portions() -> None:
    bus = BrokerHarness()
    peer = split_reader(bus)
    peer.send(subscribe(1, 1), subscribe(1, 2))
    publisher = connect_version2(bus)
    publisher.send(publish(1, 0, *[b"x"] * 10))
    peer.receive_all()
    bad = [ack(number, 0, 1).replace(b"0-1", b"0-x") for number in (1, 2)]
    peer.send(ack(1, 0, 10) + bad[0] * 3 * REFUSALS_MAX)
    counts = [len(peer.receive_error_codes())]
    while run_turn(peer):
        counts.append(len(peer.receive_error_codes()))
    assert counts == [REFUSALS_MAX] * 3
    peer.send(b"".join(bad) * 2 * INTERLEAVED_ACKS_PER_TURN)
    counts = [len(peer.receive_error_codes())]
    while run_turn(peer):
        counts.append(len(peer.receive_error_codes()))
    assert max(counts) <= INTERLEAVED_ACKS_PER_TURN
    assert sum(counts) == 4 * INTERLEAVED_ACKS_PER_TURN
    assert bus.statistics(1).acknowledged == 10


@pytest.mark.parametrize("field", ["key", "headers"])
def test_stuffed_messages_are_stored_in_portions(field: str) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    about = Envelope(key=DELIMITER) if field == "key" else Envelope(headers=(("a", "<\r\nb"),))
    content = envelope.encode(about, b"")
    peer.send(publish_envelopes(1, 0, *[content] * 5000))
    counts = [bus.statistics(1).ring.message_count]
    while run_turn(peer):
        counts.append(bus.statistics(1).ring.message_count - sum(counts))
    assert max(counts) <= MIXED_ENVELOPES_PER_TURN
    assert sum(counts) == 5000


def test_reads_fit_the_messages_with_many_channels_of_a_turn() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    contents = [channel_envelope(f"a.{n % 1000:03}", b"") for n in range(60_000)]
    data = publish_envelopes(1, 0, *contents)
    unprocessed_bytes = []
    while data:
        size = peer.session.next_read_bytes
        read, data = data[:size], data[size:]
        peer.send(read)
        unprocessed_bytes.append(len(peer.session.unprocessed))
        while run_turn(peer):
            pass
    assert bus.statistics(1).ring.message_count == 60_000
    assert len(unprocessed_bytes) < 1.25 * 60_000 / MIXED_ENVELOPES_PER_TURN
    assert not any(unprocessed_bytes[10:])


@pytest.mark.parametrize("other_count", [0, 63])
def test_messages_with_nearly_the_same_channel_are_not_split(other_count: int) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = split_reader(bus)
    names = ["a.b"] * 10_000 + [f"a.{n}" for n in range(other_count)]
    peer.send(publish_envelopes(1, 0, *(channel_envelope(name, b"xy") for name in names)))
    assert not peer.session.unprocessed
    assert bus.statistics(1).ring.message_count == len(names)


@settings(max_examples=30, deadline=None)
@given(
    channel_counts=st.lists(st.sampled_from([1, 3, 700, 6000]), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_split_envelopes_are_stored_as_in_one_piece(channel_counts: list[int], seed: int) -> None:
    random = Random(seed)
    contents = [
        envelope.encode(
            Envelope(channel=f"c{random.randrange(count)}" if random.random() < 0.9 else ""),
            b"%d" % random.randrange(1000),
        )
        for count in channel_counts
        for _ in range(random.choice([10, 2000]))
    ]
    results = []
    for is_split in (False, True):
        bus = BrokerHarness()
        bus.skips_checks = True
        peer = connect_version2(bus, subscribe(1, 1, channels=["c1", "c2", "c60"]), classes=[1])
        if is_split:
            peer.session.allow_split_reads()
        peer.send(publish_envelopes(1, 0, *contents))
        while run_turn(peer):
            pass
        bus.broker.check_invariants()
        cls = bus.broker.classes[1]
        numbers = cls.ring.read_rows(0, cls.ring.head).channels
        names = [cls.channels.name_of(n) for n in np.broadcast_to(numbers, len(contents)).tolist()]
        results.append((names, peer.receive_deliveries(), bus.statistics(1).ring.message_count))
    assert results[0] == results[1]


@pytest.mark.parametrize("start", ["last_values", "last\\u005fvalues"])
def test_last_values_are_found_in_portions(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_values, "LAST_VALUES_SCANNED_PER_TURN", 10)
    bus = BrokerHarness()
    contents = [channel_envelope(f"a.{n % 5}", b"%d" % n) for n in range(100)]
    peer = split_reader(bus)
    peer.send(publish_envelopes(1, 0, *contents))
    peer.receive_replies()
    request = subscribe(1, 1, start="last_values").replace(b"last_values", start.encode())
    peer.send(request + subscribe(1, 2, start="new"))
    turns = 0
    while peer.session.is_request_pending:
        turns += 1
        assert not peer.session.subscriptions
        run_turn(peer)
    assert turns == 9
    while run_turn(peer):
        pass
    assert list(peer.session.subscriptions) == [1, 2]
    assert [delivery.content for delivery in peer.receive_deliveries()] == contents[-5:]


def test_connect_enables_last_values_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_values, "LAST_VALUES_SCANNED_PER_TURN", 10)
    bus = BrokerHarness()
    contents = [channel_envelope(f"a.{n % 5}", b"%d" % n) for n in range(100)]
    peer = split_reader(bus)
    peer.send(publish_envelopes(1, 0, *contents))
    peer.receive_replies()
    peer.send(connect_request({"id": 1, "last_values": True}) + subscribe(1, 2))
    turns = 0
    while peer.session.is_request_pending:
        turns += 1
        assert not bus.broker.classes[1].has_last_values
        run_turn(peer)
    assert turns == 9
    while run_turn(peer):
        pass
    assert [each.kind for each in peer.receive_all()[1]] == ["connect", "subscribe"]
    peer.send(ack(2, 0, 100))
    bus.tick()
    assert bus.broker.classes[1].ring.floor == 95
    reader = connect_version2(bus, subscribe(1, 1, start="last_values"))
    assert [delivery.content for delivery in reader.receive_deliveries()] == contents[-5:]


REQUESTS = st.one_of(
    st.just(connect_request({"id": 1, "last_values": True})),
    st.builds(lambda n: subscribe(1, n % 3 + 1), st.integers(0, 9)),
    st.builds(lambda n: subscribe(1, n % 3 + 1, start="last_values"), st.integers(0, 9)),
    st.builds(lambda n: subscribe(2, n % 3 + 4, channels=["a.*"]), st.integers(0, 9)),
    st.builds(lambda n: unsubscribe(n % 6 + 1), st.integers(0, 9)),
    st.just(ack(1, 0, 1)),
    st.builds(lambda n: nack(1, n, n + 1) * 200, st.integers(0, 9)),
    st.just(b""),
)


@settings(max_examples=3 * settings().max_examples)
@given(
    st.lists(st.tuples(REQUESTS, st.integers(0, 3)), min_size=1, max_size=60),
    st.lists(st.integers(0, 5000), max_size=3),
)
def test_split_reads_have_the_same_results(
    requests: list[tuple[bytes, int]], cuts: list[int]
) -> None:
    stream, number = b"", 0
    for request, count in requests:
        stream += request + publish(1, number, *[b"%d" % n for n in range(count)])
        number += count
    places = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    reads = [stream[a:b] for a, b in pairwise(places)]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_values, "LAST_VALUES_SCANNED_PER_TURN", 2)
        for is_split in (False, True):
            bus = BrokerHarness()
            peer = connect_version2(bus, classes=[1, 2])
            if is_split:
                peer.session.allow_split_reads()
            for read in reads:
                peer.send(read)
                while run_turn(peer):
                    pass
            receiver = peer.session.receiver
            counters = receiver.frame_count, receiver.received_bytes, len(receiver.tail)
            peer.session.outbox.release_confirm()
            received = sorted(peer.receive_frames())
            # Each read has a Confirm of its own; the last one confirms everything.
            confirms = [frame for frame in received if frame[:1] == CONFIRM]
            # A reply to a Connect contains the next number, which depends on the reads.
            other_frames = [frame for frame in received if frame[:1] not in (CONFIRM, CONNECT)]
            subscriptions = list(peer.session.subscriptions)
            results.append(
                (other_frames, confirms[-1:], counters, subscriptions, bus.statistics(1))
            )
    assert results[0] == results[1]


def test_classes_with_removed_patterns_are_searched_in_portions() -> None:
    counts = []
    for class_count in (600, 1000):
        bus = BrokerHarness()
        bus.skips_checks = True
        connect_version2(bus, classes=list(range(1, class_count + 1)))
        counts.append(count_calls(bus.broker.store.update_some_patterns))
        assert bus.broker.store.update_some_patterns()
    assert counts[0] == counts[1]


def test_patterns_of_ended_subscriptions_are_removed_in_portions() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, classes=[1])
    before = bus.broker.budget.used_bytes
    peer.send(subscribe(1, 1, channels=patterns(1)))
    used = bus.broker.budget.used_bytes
    while bus.broker.store.update_some_patterns():
        bus.check_invariants()
    peer.disconnect()
    steps = 0
    while bus.broker.store.update_some_patterns():
        steps += 1
        bus.check_invariants()
    assert steps == PATTERN_COUNT // PATTERNS_PER_TURN
    assert bus.broker.budget.used_bytes == before < used


def test_ticks_visit_a_bounded_number_of_sessions_at_once() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = 2 * TICKED_SESSIONS_PER_TURN + 1
    for _ in range(count):
        bus.broker.open_session()
    limits = bus.broker.settings.limits
    parts: list[int] = []
    while not any(parts):
        parts = [len(part) for part in bus.broker.tick_in_parts()]
        assert bus.broker.tick_number < 2 * limits.hello_seconds
    assert parts == [TICKED_SESSIONS_PER_TURN, TICKED_SESSIONS_PER_TURN, 1]


def test_ticks_visit_a_bounded_number_of_classes_and_positions_at_once() -> None:
    bus = BrokerHarness(durables=2 * TICKED_CLASSES_PER_TURN)
    bus.skips_checks = True
    peer = connect_version2(bus, classes=list(range(2 * TICKED_CLASSES_PER_TURN)), heartbeat=0)
    # Two parts for the positions, two for the classes, and one for the session.
    assert len(list(bus.broker.tick_in_parts())) == 5
    for number in range(1, 2 * TICKED_CLASSES_PER_TURN):
        peer.send(subscribe(1, number, durable=f"d{number}"))
    assert len(list(bus.broker.tick_in_parts())) == 6


def test_a_part_of_a_tick_frees_the_memory_of_few_classes() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    classes = [1, 2, 3]
    peer = connect_version2(bus, classes=classes, heartbeat=0)
    for number, class_id in enumerate(class_id for class_id in classes for _ in range(4)):
        peer.send(publish(class_id, number, bytes(1_000_000)))
    for class_id in classes:
        peer.send(json_request(PURGE, class_id))
        peer.receive_replies()  # The deferred reply purges.
    largest = max(cls.ring.statistics().memory_bytes for cls in bus.broker.classes.values())
    assert largest > RING_SEGMENT_BYTES_MAX
    used_bytes = bus.broker.budget.used_bytes
    for _ in range(2 * RING_IDLE_TICKS + 4):
        for _ in bus.broker.tick_in_parts():
            assert used_bytes - bus.broker.budget.used_bytes <= largest
            used_bytes = bus.broker.budget.used_bytes
    assert used_bytes < largest


def test_a_part_of_a_tick_frees_few_ranges_of_ended_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "FREED_SPANS_PER_TURN", 2)
    bus = BrokerHarness()
    other, ending = connect_version2(bus, subscribe(1, 1)), connect_version2(bus, subscribe(1, 1))
    connect_version2(bus, publish(1, 0, *[b"x"] * 10))
    assert len(ending.receive_deliveries()) == 10
    for sequence in range(0, 10, 2):
        ending.send(nack(1, sequence, sequence + 1, 60_000))
    part_count = len(list(bus.broker.tick_in_parts()))
    ending.disconnect()
    assert len(list(bus.broker.tick_in_parts())) == part_count + 3
    assert len(list(bus.broker.tick_in_parts())) == part_count
    assert len(other.receive_deliveries()) == 10


def test_positions_that_end_between_the_parts_of_a_tick_are_skipped() -> None:
    bus = BrokerHarness(durables=2 * TICKED_CLASSES_PER_TURN)
    bus.skips_checks = True
    peer = connect_version2(bus, classes=[1])
    count = 2 * TICKED_CLASSES_PER_TURN
    for number in range(1, count):
        peer.send(subscribe(1, number, durable=f"d{number}"))
    parts = bus.broker.tick_in_parts()
    next(parts)
    for number in range(1, count):
        peer.send(unsubscribe(number, forget=True))
    assert not any(parts)
    bus.broker.check_invariants()


@pytest.mark.parametrize(
    ("content", "most"),
    [
        (b"".join(nack(5, n, n + 1) for n in range(500)), 32),
        (b"".join(ack(5, n, n + 1) for n in range(40_000)), 16_384),
        (
            b"".join(publish_envelopes(1, n, channel_envelope(f"a.{n}", b"")) for n in range(5000)),
            1024,
        ),
    ],
    ids=["nacks", "acks", "channels"],
)
def test_reads_bring_a_bounded_number_of_slow_frames(content: bytes, most: int) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus, subscribe(1, 5))
    frame_bytes = len(content) // content.count(DELIMITER)
    while content:
        size = peer.session.next_read_bytes
        peer.send(content[:size])
        content = content[size:]
    assert peer.session.next_read_bytes <= max(2 * most * frame_bytes, EXPENSIVE_EVENTS_READ_BYTES)


@pytest.mark.parametrize("by_key", [False, True])
def test_members_of_a_closed_session_leave_in_portions(by_key: bool) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    members = [subscribe(1, n, group="g", by_key=by_key) for n in range(1, 101)]
    staying, leaving = (connect_version2(bus, *members, classes=[1]) for _ in range(2))
    message_count = 4000 if by_key else 20_000
    connect_version2(bus, publish(1, 0, *[b"%d" % n for n in range(message_count)]), classes=[1])
    run_wakeups(bus)
    received = [message.content for message in staying.receive_deliveries()]
    leaving.receive_deliveries()
    (group,) = bus.broker.classes[1].groups.values()
    counts = [len(group.members)]
    while bus.broker.end_some_subscriptions(leaving.session):
        counts.append(len(group.members))
        bus.broker.check_invariants()
        staying.send(publish(1, len(counts) - 2, b"x"))
        assert not staying.receive_deliveries()
    leaving_counts = [before - after for before, after in pairwise(counts)]
    assert max(leaving_counts) <= RETURNED_PER_TURN / (message_count / 200) + 1
    leaving.disconnect()
    run_wakeups(bus)
    bus.broker.check_invariants()
    received += [message.content for message in staying.receive_deliveries()]
    assert {b"%d" % n for n in range(message_count)} <= set(received)


def test_returned_messages_of_a_group_are_assigned_in_portions() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus, subscribe(1, 1, group="g", max_in_flight=3000), classes=[1])
    peer.send(publish(1, 0, *[b"x"] * 3000))
    run_wakeups(bus)
    peer.receive_deliveries()
    connect_version2(bus, subscribe(1, 1, group="g", max_in_flight=3000), classes=[1])
    peer.send(b"".join(nack(1, n, n + 1, 1000) for n in range(0, 3000, 2)))
    bus.broker.clock.now += 2
    (group,) = bus.broker.classes[1].groups.values()
    counts = [sum(member.unsent_count for member in group.members)]
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        bus.broker.run_due_wakeups()
        counts.append(sum(member.unsent_count for member in group.members))
    assert max(after - before for before, after in pairwise(counts)) <= 200
    assert counts[-1] == 1500


@given(
    options=st.lists(
        st.sampled_from(
            [
                {},
                {"durable": "d"},
                {"group": "g"},
                {"group": "g", "durable": "g"},
                {"channels": ["#"]},
            ]
        ),
        min_size=1,
        max_size=200,
    ),
    is_sent=st.booleans(),
)
def test_subscriptions_that_end_in_portions_end_as_at_once(
    options: list[dict[str, object]], is_sent: bool
) -> None:
    states = []
    for in_portions in (False, True):
        bus = BrokerHarness()
        bus.skips_checks = True
        watcher = connect_version2(bus, subscribe(1, 1, group="g"), classes=[1])
        peer = connect_version2(bus, classes=[1])
        for number, each in enumerate(options, 1):
            request = {**each, "durable": f"d{number}"} if each.get("durable") == "d" else each
            peer.send(subscribe(1, number, **request))
        peer.send(publish(1, 0, b"first", b"second"))
        if is_sent:
            peer.receive_deliveries()
        watcher.receive_deliveries()
        turns = 0
        while in_portions and bus.broker.end_some_subscriptions(peer.session):
            turns += 1
        assert turns <= len(options) // SUBSCRIPTIONS_ENDED_PER_TURN
        peer.disconnect()
        bus.check_invariants()
        watcher.receive_deliveries()
        cls = bus.broker.classes[1]
        states.append((len(cls.positions), len(cls.subscriptions), bus.statistics(1)))
    assert states[0] == states[1]


def test_one_turn_processes_few_changes_of_the_frame_type() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus)
    peer.session.allow_split_reads()
    count = 5 * TYPE_CHANGES_PER_TURN
    frames_ = [
        publish_envelopes(1, number, channel_envelope("a", b"x"))
        if number % 2
        else publish(1, number, b"x")
        for number in range(count)
    ]
    peer.send(b"".join(frames_))
    stored_counts = [len(bus.broker.classes[1].ring)]
    while run_turn(peer):
        stored_counts.append(len(bus.broker.classes[1].ring))
    assert stored_counts[-1] == count
    assert max(b - a for a, b in pairwise([0, *stored_counts])) <= TYPE_CHANGES_PER_TURN + 1
