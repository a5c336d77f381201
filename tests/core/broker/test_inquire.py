"""Inquire: reports on constructed situations, and on random ones."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from simplebus.core.broker import inquire_positions
from simplebus.core.broker.broker import Broker
from simplebus.core.broker.class_warnings import GROWTH_SECONDS
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import INQUIRY_MEMBERS_MAX, INQUIRY_POSITIONS_MAX, PATTERNS_PER_TURN
from simplebus.core.protocol import frames
from simplebus.core.protocol.inquiry import (
    BusInfo,
    BusInquiry,
    ChannelInfo,
    ChannelInquiry,
    ClassInfo,
    ClassInquiry,
    PositionInfo,
    SessionInfo,
    SessionInquiry,
    decode_reply,
)
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, Retention, Settings
from simplebus.core.steps import run_to_end
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    INQUIRE,
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
    unsubscribe,
)
from tests.models.test_version2_model import Version2Machine


def class_report(bus: BrokerHarness, class_: int | str = 1) -> ClassInfo:
    report = bus.broker.inquiry_handler.build_report(ClassInquiry(class_))
    assert isinstance(report, ClassInfo)
    return report


def position_report(bus: BrokerHarness) -> PositionInfo:
    """Return the report on the only position of class 1."""
    [report] = class_report(bus).positions
    return report


def session_report(bus: BrokerHarness, peer: wire_peer.WirePeer) -> SessionInfo:
    report = bus.broker.inquiry_handler.build_report(SessionInquiry(peer.session.session_id))
    assert isinstance(report, SessionInfo)
    return report


def channel_report(
    bus: BrokerHarness, channel: str, class_: int | str | None = None
) -> ChannelInfo:
    report = bus.broker.inquiry_handler.build_report(ChannelInquiry(channel, class_))
    assert isinstance(report, ChannelInfo)
    return report


def tick(bus: BrokerHarness, count: int) -> None:
    """Advance the clock by `count` ticks of one second."""
    for _ in range(count):
        bus.broker.clock.now += 1
        bus.tick()
        bus.broker.run_due_wakeups()


# A position --------------------------------------------------------------------------------------


def test_full_window_waits_for_acks() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, max_in_flight=4), name="till")
    connect_version2(bus, publish(1, 0, *[b"x"] * 6))
    assert reader.receive_message_ids() == [0, 1, 2, 3]
    tick(bus, 3)
    report = position_report(bus)
    assert (report.in_flight, report.in_flight_max, report.unsent, report.lag) == (4, 4, 2, 6)
    assert report.waits == "acks"
    assert report.waits_for == (
        "its acknowledgements: 4 of 4 in flight, the oldest for 3.0 s, session 0 'till' (session 0)"
    )
    assert report.oldest is not None
    assert (report.oldest.sequence, report.oldest.attempt, report.oldest.due_seconds) == (0, 1, 3)
    reader.send(ack(5, 0, 1))
    assert reader.receive_message_ids() == [4]
    assert position_report(bus).oldest is not None
    assert position_report(bus).waits == "acks"


def test_age_in_flight_counts_from_the_first_delivery() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5))
    connect_version2(bus, publish(1, 0, b"a", b"b"))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 1))
    for seconds, attempt, first in ((6, 2, 6), (12, 3, 18), (1, 3, 19)):
        tick(bus, seconds)
        assert reader.receive_message_ids() == ([1] if seconds > 1 else [])
        oldest = position_report(bus).oldest
        assert oldest is not None
        assert (oldest.sequence, oldest.attempt, oldest.first_seconds) == (1, attempt, first)
    assert "for 19 s (sent 3 times)" in position_report(bus).waits_for


def test_stalled_connection_is_reported() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5))
    reader.receive_replies()
    connect_version2(bus, publish(1, 0, b"a", b"b"))
    assert position_report(bus).waits == "turn"
    tick(bus, 4)
    report = position_report(bus)
    assert report.waits == "bytes"
    assert "read nothing for 3.0 s: session 0" in report.waits_for
    assert "it has read nothing for 3.0 s" in session_report(bus, reader).waits_for
    assert reader.receive_message_ids() == [0, 1]
    tick(bus, 1)
    assert position_report(bus).waits == "acks"
    assert session_report(bus, reader).waits_for == ""


def test_idle_durable_is_reported_with_its_duration() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    connect_version2(bus, publish(1, 0, b"a", b"b"))
    reader.receive_message_ids()
    tick(bus, 2)
    reader.disconnect()
    tick(bus, 200)
    report = position_report(bus)
    assert (report.session, report.durable, report.idle_seconds) == (-1, "billing", 200)
    assert report.waits_for == "no subscription has been connected for 3 min; 2 messages wait"
    assert class_report(bus).waits_for == (
        "the oldest stored message is held by the durable 'billing'; " + report.waits_for
    )


def test_delayed_messages_are_not_in_flight() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5))
    connect_version2(
        bus,
        publish(1, 0, b"a"),
        publish_envelopes(1, 1, timed_envelope(b"later", not_before_ms=9000)),
    )
    assert reader.receive_message_ids() == [0]
    reader.send(nack(5, 0, 1, 4000))
    report = position_report(bus)
    assert (report.in_flight, report.delayed, report.delayed_seconds) == (0, 2, 4)
    assert report.waits_for == "a delay: 2 messages are delayed, the first for another 4.0 s"


def test_patterns_without_matches_are_reported() -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5, channels=["b"]), subscribe(1, 6))
    writer = connect_version2(bus, publish_envelopes(1, 0, channel_envelope("a", b"x")))
    reader = bus.broker.sessions[0]
    wire_peer.WirePeer(bus, reader).receive_frames()
    filtered, unfiltered = class_report(bus).positions[::-1]
    assert (filtered.patterns, filtered.waits) == (["b"], "match")
    assert unfiltered.waits == "acks"
    writer.send(publish_envelopes(1, 1, channel_envelope("b", b"x")))
    assert "match" not in [position.waits for position in class_report(bus).positions]


def test_group_report_lists_members() -> None:
    bus = BrokerHarness()
    first, second = (
        connect_version2(bus, subscribe(1, 5, group="g", max_in_flight=2)) for _ in range(2)
    )
    third = connect_version2(bus, subscribe(1, 9, group="g", max_in_flight=0x1000))
    third.disconnect()
    connect_version2(bus, publish(1, 0, *[b"x"] * 6))
    assert len(first.receive_message_ids()) == len(second.receive_message_ids()) == 2
    tick(bus, 2)
    report = position_report(bus)
    assert (report.in_flight, report.in_flight_max, report.unsent) == (4, 4, 2)
    assert report.waits_for.startswith("its acknowledgements: 4 of 4 in flight, the oldest for 2.0")
    assert [(member.session, member.in_flight) for member in report.members] == [(0, 2), (1, 2)]
    assert {member.waits for member in report.members} == {"acks"}
    second.disconnect()
    first.send(ack(5, 0, 6))
    first.receive_message_ids()
    third = connect_version2(bus, subscribe(1, 5, group="g"))
    third.receive_message_ids()
    first.send(ack(5, 0, 6))
    waits = {member.session: member.waits for member in position_report(bus).members}
    assert waits[0] in ("others", "nothing", "acks")


def test_key_ordered_group_reports_messages_blocked_by_their_key() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, group="g", by_key=True))
    connect_version2(bus, publish_envelopes(1, 0, *[b"\x10\0\1kx"] * 4))
    assert reader.receive_message_ids() == [0]
    tick(bus, 2)
    report = position_report(bus)
    assert (report.in_flight, report.blocked_by_key, report.to_redeliver, report.waits) == (
        1,
        3,
        0,
        "acks",
    )
    assert report.waits_for.endswith("; 3 messages wait for earlier messages with the same key")
    assert report.oldest is not None
    assert (report.oldest.sequence, report.oldest.sent_seconds) == (0, 2)
    check_reports(bus.broker)


def test_group_without_members_waits_for_one() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, group="g", durable="d"))
    connect_version2(bus, publish(1, 0, b"a"))
    reader.disconnect()
    assert position_report(bus).waits == "nobody"


def test_nacked_message_of_a_group_is_delayed() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, group="g"))
    connect_version2(bus, publish(1, 0, b"a"))
    reader.receive_message_ids()
    reader.send(nack(5, 0, 1))
    report = position_report(bus)
    assert (report.in_flight, report.delayed, report.waits) == (0, 1, "time")
    assert report.delayed_seconds == 6


def test_undelivered_messages_are_counted_by_reason() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 5, max_deliveries=1))
    connect_version2(
        bus, publish(1, 0, b"a"), publish_envelopes(1, 1, timed_envelope(b"late", expires_ms=500))
    )
    tick(bus, 1)
    reader.receive_message_ids()
    tick(bus, 8)
    reader.receive_message_ids()
    report = class_report(bus)
    [position] = report.positions
    assert (position.undelivered, position.dead_letters) == (
        {"max_deliveries": 1, "expired": 1},
        1,
    )
    assert report.dropped == position.undelivered
    assert report.dead_class is not None
    assert report.dead_letters == 1


# A class -----------------------------------------------------------------------------------------


def test_blocked_publishers_are_reported_with_the_cause() -> None:
    bus = BrokerHarness(class_messages=3)
    connect_version2(bus, subscribe(1, 5, durable="billing")).disconnect()
    old = bus.peer(wire_peer.connect(1), wire_peer.publish(1, *[b"x"] * 5))
    new = connect_version2(bus, publish(1, 0, b"y"), name="till")
    tick(bus, 5)
    report = class_report(bus)
    assert [
        (publisher.session, publisher.name, publisher.messages) for publisher in report.publishers
    ] == [
        (old.session.session_id, "", 2),
        (new.session.session_id, "till", 1),
    ]
    assert {publisher.seconds for publisher in report.publishers} == {5}
    assert report.waits_for == (
        "2 publishers wait for space: 3 of 3 messages are stored; the oldest stored message is "
        "held by the durable 'billing'; no subscription has been connected for 5.0 s; 3 messages "
        "wait"
    )
    old.receive_frames()
    tick(bus, 1)
    old_report = session_report(bus, old)
    assert (old_report.is_read, old_report.parked, old_report.parked_class, old_report.version) == (
        False,
        2,
        1,
        1,
    )
    assert old_report.waits_for == (
        "2 messages have waited for 6.0 s for space in class 1: 3 of 3 messages are stored; "
        "its connection is not read until then"
    )
    new_report = session_report(bus, new)
    assert (new_report.is_read, new_report.parked, new_report.unconfirmed, new_report.version) == (
        True,
        1,
        1,
        2,
    )


def test_class_without_subscriptions_reports_its_backlog() -> None:
    bus = BrokerHarness(Settings(keep=Retention(messages=2, seconds=60)))
    connect_version2(bus, publish(1, 0, *[b"x"] * 4), classes=[{"id": 1, "name": "orders"}])
    report = class_report(bus, "orders")
    assert (report.class_id, report.name, report.backlog, report.stored) == (1, "orders", 4, 4)
    assert report.waits_for == "4 messages wait for a first subscription"
    assert report.retention == "2 messages, 60 s"
    reader = connect_version2(bus, subscribe(1, 5))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 4))
    assert class_report(bus).waits_for == "the stored messages are kept by retention"
    assert class_report(bus).stored == 2
    reader.disconnect()
    assert class_report(bus).waits_for == "the stored messages are kept by retention"


def test_last_values_are_reported_as_the_reason_of_stored_messages() -> None:
    bus = BrokerHarness(Settings(classes={1: ClassSettings(last_values=True)}))
    envelope = channel_envelope("lamp", b"20")
    connect_version2(bus, publish_envelopes(1, 0, envelope))
    assert class_report(bus).waits_for == "1 message waits for a first subscription"
    reader = connect_version2(bus, subscribe(1, 5))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 1))
    reader.disconnect()
    assert class_report(bus).waits_for == "the stored messages are kept as last values"


def test_members_of_a_group_are_counted_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = BrokerHarness()
    members = [connect_version2(bus, subscribe(1, 1, group="g")) for _ in range(10)]
    connect_version2(bus, publish(1, 0, *[b"x"] * 25))
    members[3].receive_deliveries()
    [position] = bus.broker.classes[1].positions
    reporter = bus.broker.inquiry_handler._position_reporter
    at_once = run_to_end(reporter.describe_position(bus.broker.classes[1], position))
    monkeypatch.setattr(inquire_positions, "COUNTED_MEMBERS_PER_STEP", 3)
    steps = reporter.describe_position(bus.broker.classes[1], position)
    assert [next(steps) for _ in range(3)] == [None] * 3
    assert run_to_end(steps) == at_once
    assert at_once.in_flight == 25


def test_report_lists_the_positions_furthest_behind() -> None:
    bus = BrokerHarness()
    count = INQUIRY_POSITIONS_MAX + 10
    reader = connect_version2(bus, *[subscribe(1, n + 1) for n in range(count)])
    members = INQUIRY_MEMBERS_MAX + 5
    connect_version2(bus, *[subscribe(1, n + 1, group="g") for n in range(members)])
    connect_version2(bus, publish(1, 0, b"x"))
    reader.receive_deliveries()
    reader.send(ack(count, 0, 1))
    report = class_report(bus)
    assert len(report.positions) == INQUIRY_POSITIONS_MAX
    assert report.positions_left_out == 11
    assert count not in [position.number for position in report.positions]
    [group] = bus.broker.classes[1].groups
    reporter = bus.broker.inquiry_handler._position_reporter
    found = run_to_end(reporter.describe_position(bus.broker.classes[1], group))
    assert (len(found.members), found.members_left_out) == (INQUIRY_MEMBERS_MAX, 5)
    reader_report = session_report(bus, reader)
    assert (len(reader_report.positions), reader_report.positions_left_out) == (
        INQUIRY_POSITIONS_MAX,
        10,
    )


def test_bus_report() -> None:
    bus = BrokerHarness()
    connect_version2(bus, publish(1, 0, b"x"), classes=[1, "orders"], name="till")
    bus.peer(wire_peer.connect(7))
    report = bus.broker.inquiry_handler.build_report(BusInquiry())
    assert isinstance(report, BusInfo)
    assert [(line.name, line.stored) for line in report.classes] == [
        ("", 1),
        ("", 0),
        ("orders", 0),
    ]
    assert [(line.session, line.name, line.version) for line in report.sessions] == [
        (0, "till", 2),
        (1, "", 1),
    ]


def test_bus_report_counts_no_dead_letters_as_dropped() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, group="g"), publish(1, 0, b"a"))
    assert peer.receive_message_ids() == [0]
    peer.send(nack(5, 0, 1, "terminate"), unsubscribe(5))
    report = bus.broker.inquiry_handler.build_report(BusInquiry())
    assert isinstance(report, BusInfo)
    assert [cls.dropped for cls in report.classes] == [0, 0]  # Also of the class of dead letters.
    assert bus.broker.classes[1].dropped_counts == {Reason.TERMINATED: 1}


@pytest.mark.parametrize("inquiry", [BusInquiry(), ChannelInquiry("orders.new")])
@pytest.mark.parametrize("class_count", [1, 256, 257, 1100])
def test_report_on_all_classes_is_built_in_steps(
    class_count: int, inquiry: BusInquiry | ChannelInquiry
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    publisher = connect_version2(bus, classes=[f"class {n}" for n in range(class_count)])
    used_id = min(bus.broker.classes)
    publisher.send(publish(used_id, 0, b"x"), subscribe(used_id, 1, channels=["orders.*"]))
    peer = connect_version2(bus, classes=[used_id])
    peer.session.allow_split_reads()
    expected = bus.broker.inquiry_handler.build_report(inquiry)
    content = msgspec.json.encode(inquiry)
    peer.send(frames.encode(frames.INQUIRE, message_id=3, content=content))
    step_count = 0
    while not (replies := peer.receive_replies()):
        assert not peer.session.outbox.is_idle
        step_count += 1
    assert step_count == -(-class_count // 256)
    [reply] = replies
    assert decode_reply(json.dumps(reply.content).encode()) == expected


@pytest.mark.parametrize("position_count", [100, 600])
def test_report_on_a_class_counts_its_positions_in_steps(position_count: int) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    subscribes = [subscribe(1, number) for number in range(1, position_count + 1)]
    subscriber = connect_version2(bus, *subscribes, publish(1, 0, b"x"), classes=[1])
    subscriber.receive_replies()
    peer = connect_version2(bus, classes=[1])
    peer.session.allow_split_reads()
    inquiry = ClassInquiry(1)
    expected = bus.broker.inquiry_handler.build_report(inquiry)
    assert isinstance(expected, ClassInfo)
    assert expected.delivered == position_count
    peer.send(frames.encode(frames.INQUIRE, message_id=3, content=msgspec.json.encode(inquiry)))
    step_count = 0
    while not (replies := peer.receive_replies()):
        if step_count == 1:  # Both positions are counted once, whichever step counts them.
            subscriber.send(unsubscribe(1), unsubscribe(position_count))
        step_count += 1
    assert step_count == 1 + position_count // 256
    report = decode_reply(json.dumps(replies[0].content).encode())
    assert isinstance(report, ClassInfo)
    assert report.delivered == expected.delivered
    assert len(report.positions) == len(expected.positions) - (1 if step_count > 1 else 0)


# A channel ---------------------------------------------------------------------------------------


def test_channel_report_examines_positions_in_steps() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    subscribes = [subscribe(1, number, channels=["a.*"]) for number in range(1, 601)]
    subscriber = connect_version2(bus, *subscribes, classes=[1])
    peer = connect_version2(bus, classes=[1])
    peer.session.allow_split_reads()
    while bus.broker.store.update_some_patterns():
        pass
    inquiry = ChannelInquiry("a.x")
    peer.send(frames.encode(frames.INQUIRE, message_id=3, content=msgspec.json.encode(inquiry)))
    step_count = 0
    while not (replies := peer.receive_replies()):
        if step_count == 1:
            subscriber.send(unsubscribe(600))
        step_count += 1
    assert step_count == 1 + 600 // 256
    expected = bus.broker.inquiry_handler.build_report(inquiry)
    assert decode_reply(json.dumps(replies[0].content).encode()) == expected


def test_channel_report_first_indexes_new_patterns_in_steps() -> None:
    bus = BrokerHarness()
    subscriber = connect_version2(bus, classes=[1, 2])
    for number in range(1, 7):
        patterns = [f"orders.{number}.{n}.*" for n in range(PATTERNS_PER_TURN)]
        subscriber.send(subscribe(1 + number % 2, number, channels=patterns))
    peer = connect_version2(bus, classes=[1])
    peer.session.allow_split_reads()
    inquiry = ChannelInquiry("orders.3.5.x")
    peer.send(frames.encode(frames.INQUIRE, message_id=3, content=msgspec.json.encode(inquiry)))
    step_count = 0
    while not (replies := peer.receive_replies()):
        step_count += 1
    assert step_count == 7, "one step for the patterns of each subscription, and one to reply"
    assert not any(cls.channels.has_unindexed_patterns for cls in bus.broker.classes.values())
    expected = bus.broker.inquiry_handler.build_report(inquiry)
    assert decode_reply(json.dumps(replies[0].content).encode()) == expected
    assert isinstance(expected, ChannelInfo)
    assert [match.number for cls in expected.classes for match in cls.matches] == [3]


def test_channel_report_lists_matches_and_near_misses() -> None:
    bus = BrokerHarness()
    connect_version2(
        bus,
        subscribe(1, 1, channels=["x", "orders.*"]),
        subscribe(1, 2, channels=["orders.us"]),
        subscribe(1, 3, channels=["shops.#"]),
        subscribe(1, 4, durable="all"),
        subscribe(2, 5, group="g", channels=["#"]),
        publish_envelopes(1, 0, channel_envelope("orders.eu", b"x")),
        classes=[1, 2, 3],
    )
    first, second = channel_report(bus, "orders.eu").classes
    assert (first.class_id, first.stored, second.class_id, second.stored) == (1, 1, 2, 0)
    assert [(m.number, m.durable, m.pattern) for m in first.matches] == [
        (1, "", "orders.*"),
        (4, "all", ""),
    ]
    assert [(m.number, m.pattern, m.why_not) for m in first.near] == [
        (2, "orders.us", "segment 2 is 'eu', not 'us'")
    ]
    assert [(m.who, m.pattern) for m in second.matches] == [("group 'g', 1 member", "#")]
    assert [cls.class_id for cls in channel_report(bus, "orders.eu", 2).classes] == [2]
    assert [cls.class_id for cls in channel_report(bus, "elsewhere").classes] == [2]


def test_channel_report_lists_subject_bindings() -> None:
    bus = BrokerHarness()
    connect_version2(bus, classes=[{"id": 7, "subjects": ["orders.>", "shops"]}])
    [class_info] = channel_report(bus, "orders.eu").classes
    assert (class_info.class_id, class_info.subjects) == (7, ["orders.>"])


# Asking ------------------------------------------------------------------------------------------


def inquire(peer: Version2Peer, **fields: object) -> dict[str, object]:
    peer.send(json_request(INQUIRE, 0, 8, **fields))
    [reply] = peer.receive_replies()
    assert (reply.kind, reply.class_id, reply.message_id, reply.last_field) == (
        "inquire",
        0,
        8,
        0,
    )
    found: dict[str, object] = reply.content
    return found


def test_session_receives_the_report() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    for question in (
        {"about": "bus"},
        {"about": "class", "class": 1},
        {"about": "channel", "channel": "a.b", "class": None},
        {"about": "session", "session": 0},
    ):
        assert inquire(peer, **question)["about"] == question["about"]
    assert inquire(peer, about="bus", more="that nobody knows")["about"] == "bus"


@pytest.mark.parametrize(
    ("question", "code", "says"),
    [
        ({}, "bad_request", "about"),
        ({"about": "weather"}, "bad_request", "weather"),
        ({"about": "class"}, "bad_request", "class"),
        ({"about": "class", "class": 70_000}, "bad_request", "65535"),
        ({"about": "class", "class": 9}, "unknown_class", "no class 9"),
        ({"about": "class", "class": "orders"}, "unknown_class", "no class 'orders'"),
        ({"about": "channel", "channel": "a..b"}, "bad_channel", "segment 2 of 3 is empty"),
        ({"about": "channel", "channel": "a.*"}, "bad_channel", "wildcard"),
        (
            {"about": "session", "session": 9},
            "unknown_session",
            "session 9 is not open; open sessions: 1",
        ),
    ],
)
def test_unknown_objects_are_refused(question: dict[str, object], code: str, says: str) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    peer.send(json_request(INQUIRE, 0, 8, **question))
    [reply] = peer.receive_replies()
    assert (reply.kind, reply.message_id, reply.last_field) == ("error", 8, INQUIRE)
    assert reply.content["code"] == code
    assert says in reply.content["message"]
    assert set(bus.broker.classes) == {1}
    assert session_report(bus, peer).refused == {code: 1}


def test_report_fits_into_a_frame() -> None:
    bus = BrokerHarness()
    patterns = ["€" * 800 + f".{n}" for n in range(10)]
    wishes = [
        subscribe(1, n + 1, channels=patterns, durable=f"{n}".rjust(200, "€"))
        for n in range(INQUIRY_POSITIONS_MAX + 1)
    ]
    connect_version2(bus, *wishes)
    connect_version2(
        bus, json_request(INQUIRE, 0, 8, about="class", **{"class": 1})
    ).receive_frames()
    [report_bytes] = [len(encode_report(class_report(bus)))]
    assert report_bytes < bus.broker.settings.limits.frame_bytes // 2


def test_session_that_reads_no_reports_is_closed() -> None:
    bus = BrokerHarness(pending_bytes=4 << 20)
    assert connect_version2(bus).send_refused(
        json_request(INQUIRE, 0, 8, about="bus") * 20_000
    ) is (Reason.PENDING_LIMIT)


# Everything together -----------------------------------------------------------------------------


def check_reports(broker: Broker) -> None:
    """Check that all reports can be built and agree with `statistics`."""
    explain = broker.inquiry_handler.build_report
    for cls in broker.classes.values():
        report, statistics = explain(ClassInquiry(cls.class_id)), cls.statistics()
        assert isinstance(report, ClassInfo)
        assert report.dropped == {reason.value: n for reason, n in statistics.dropped.items() if n}
        for name in ("delivered", "redelivered", "acknowledged"):
            assert getattr(report, name) == getattr(statistics, name), name
        assert (report.stored, report.head) == (statistics.ring.message_count, statistics.published)
        expected_positions = {
            (
                subscription.session_id,
                subscription.number,
                subscription.durable,
                subscription.group,
            ): subscription
            for subscription in statistics.subscriptions
        }
        for position in report.positions:
            key = (position.session, position.number, position.durable, position.group)
            expected = expected_positions[key]
            assert position.cursor == expected.cursor
            assert position.unsent + position.blocked_by_key == expected.waiting
            assert position.in_flight >= 0
            assert (
                position.in_flight + position.to_redeliver + position.delayed == expected.in_flight
            )
            lost = {reason.value: n for reason, n in expected.undelivered.items() if n}
            assert position.undelivered == lost
            assert position.waits_for
            if position.in_flight and not position.group:
                assert position.oldest is not None
    for question in (BusInquiry(), ChannelInquiry("a.x"), *map(SessionInquiry, broker.sessions)):
        report = explain(question)
        assert decode_reply(encode_report(report)) == report


def encode_report(report: object) -> bytes:
    import msgspec

    return msgspec.json.encode(report)


class InquiryMachine(Version2Machine):
    """Random test of the broker, with reports after each step."""

    trusting = True

    @invariant()
    def is_explained(self) -> None:
        if hasattr(self, "world"):
            check_reports(self.world.bus.broker)


InquiryMachine.TestCase.settings = settings(stateful_step_count=30, max_examples=12)
TestExplained = InquiryMachine.TestCase


def test_an_error_is_none_of_ours() -> None:
    with pytest.raises(RemoteProtocolError, match="bad_request"):
        decode_reply(b'{"about":"weather"}')


# Classes with publishers only --------------------------------------------------------------------


def test_growing_class_without_a_subscription_comes_first() -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5))
    connect_version2(bus, publish(1, 0, *[b"x"] * 9) + publish(2, 9, b"x"), classes=(1, 2))

    def warnings() -> list[tuple[int, str]]:
        report = bus.broker.inquiry_handler.build_report(BusInquiry())
        assert isinstance(report, BusInfo)
        return [(cls.class_id, cls.warning) for cls in report.classes if cls.class_id < 3]

    created = "session 1 (session 1) has created it"
    assert warnings() == [
        (
            2,
            "nobody subscribes to it, and it grows: 1 message waits for a first subscription; "
            + created,
        ),
        (1, ""),
    ]
    tick(bus, int(2 * GROWTH_SECONDS))
    assert warnings() == [(1, ""), (2, f"nobody has subscribed to it; {created}")]
    connect_version2(bus, publish(2, 0, b"x"), classes=(2,))
    assert warnings()[0][0] == 2
    connect_version2(bus, subscribe(2, 5), classes=(2,))
    assert warnings() == [(1, ""), (2, "")]


def test_class_with_subscribers_only_names_its_creator() -> None:
    bus = BrokerHarness()
    bus.broker.store.class_registry.declare_classes([NamedClass(name="declared")])
    connect_version2(bus, subscribe(3, 5), classes=(3, "declared"), name="till")
    connect_version2(bus, classes=(4,))  # Neither publishes nor subscribes.
    report = bus.broker.inquiry_handler.build_report(BusInquiry())
    assert isinstance(report, BusInfo)
    assert {cls.class_id: cls.warning for cls in report.classes if cls.warning} == {
        3: "nobody has published to it; session 0 'till' (session 0) has created it"
    }
    connect_version2(bus, publish(3, 0, b"x"), classes=(3,))
    report = bus.broker.inquiry_handler.build_report(BusInquiry())
    assert isinstance(report, BusInfo)
    assert not any(cls.warning for cls in report.classes)
