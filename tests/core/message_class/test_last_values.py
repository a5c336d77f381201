"""Last values: delivery to late subscribers, class settings, and the index of values."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.message_class import last_values
from simplebus.core.message_class.last_values import (
    LastValues,
    empty_payload_flags,
    has_empty_payload,
)
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.settings import ClassSettings, Retention, Settings
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    PURGE,
    ack,
    channel_envelope,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.models.last_value_model import (
    KEEPS,
    LastValueWriter,
    drain_class,
    open_late_reader,
    payloads,
    read_last_values,
)
from tests.support.call_counter import count_calls
from tests.support.oracles import build_frame

# Delivery to late subscribers ---------------------------------------------------------------------


def test_last_values_start_sends_newest_message_per_channel() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for channel, text in (("a", b"1"), ("b", b"2"), ("", b"3"), ("a", b"4"), ("", b"5")):
        writer.publish_value(channel, text)
    drain_class(bus)
    assert len(bus.broker.classes[1].ring) == 4
    reader = open_late_reader(bus)
    assert payloads(reader) == [b"2", b"4", b"5"]
    writer.publish_value("a", b"6")
    assert payloads(reader) == [b"6"]
    assert payloads(open_late_reader(bus, channels=["a", "x"])) == [b"6"]
    assert payloads(connect_version2(bus, subscribe(1, 9, start="new"))) == []


def test_request_scans_few_messages_for_any_number_of_them() -> None:
    counts = []
    for batch_count in (10, 40):
        bus = BrokerHarness()
        bus.skips_checks = True
        peer = connect_version2(bus, classes=[{"id": 1, "last_values": True}])
        for number in range(batch_count):
            contents = [channel_envelope("a", b"x")] * 4000
            peer.send(publish_envelopes(1, 4000 * number, *contents))
        values = bus.broker.classes[1].last_values
        counts.append(count_calls(partial(values.count_values, 0.0)))
    assert counts[1] <= 1.5 * counts[0]


def test_last_values_start_without_retention_uses_stored_messages() -> None:
    bus = BrokerHarness()
    first = connect_version2(bus, classes=[1])
    for number, channel in enumerate("abab"):
        first.send(publish_envelopes(1, number, channel_envelope(channel, b"%d" % number)))
    assert payloads(open_late_reader(bus)) == [b"2", b"3"]
    second_bus = BrokerHarness()
    assert payloads(connect_version2(second_bus, subscribe(1, 9, start="last_values"))) == []
    drain_class(bus)
    assert len(bus.broker.classes[1].ring) == 2, "the late one has not acknowledged them"


def test_last_values_start_leaves_backlog_to_first_subscription() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for text in (b"1", b"2"):
        writer.publish_value("a", text)
    assert payloads(open_late_reader(bus)) == [b"2"]
    writer.publish_value("a", b"3")
    assert payloads(connect_version2(bus, subscribe(1, 4))) == [b"1", b"2"]


def test_last_values_are_redelivered_and_acknowledged() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for channel in ("a", "b", "a", "c"):
        writer.publish_value(channel, channel.encode())
    drain_class(bus)
    reader = open_late_reader(bus, durable="d")
    assert [(got.message_id, got.attempt) for got in reader.receive_deliveries()] == [
        (1, 1),
        (2, 1),
        (3, 1),
    ]
    reader.send(ack(9, 1, 2), nack(9, 2, 3, 0))
    assert [(got.message_id, got.attempt) for got in reader.receive_deliveries()] == [(2, 2)]
    reader.disconnect()
    successor = open_late_reader(bus, durable="d")
    assert [(got.message_id, got.attempt) for got in successor.receive_deliveries()] == [(3, 2)]
    successor.send(ack(9, 3, 4))
    bus.tick(12)
    assert [(got.message_id, got.attempt) for got in successor.receive_deliveries()] == [(2, 3)]
    successor.send(ack(9, 2, 3))
    bus.tick(70)
    assert successor.receive_deliveries() == []
    assert bus.broker.classes[1].ring.floor == 1
    statistics = bus.statistics(1)
    assert (statistics.last_values, statistics.in_flight) == (3, 0)


def test_group_shares_last_values_among_members() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for number in range(8):
        writer.publish_value("abcd"[number % 4], b"%d" % number)
    drain_class(bus)
    first = open_late_reader(bus, group="g", max_in_flight=2)
    second = open_late_reader(bus, group="g", max_in_flight=2)
    assert sorted(payloads(first) + payloads(second)) == [b"4", b"5", b"6", b"7"]


def test_last_values_respect_max_in_flight_and_order() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for number in range(6):
        writer.publish_value("abc"[number % 3], b"%d" % number)
    drain_class(bus)
    reader = open_late_reader(bus, max_in_flight=1)
    writer.publish_value("b", b"6")
    seen = []
    while got := reader.receive_deliveries():
        (message,) = got
        seen.append(message.message_id)
        reader.send(ack(9, message.message_id, message.message_id + 1))
    assert seen == [3, 4, 5, 6]


def test_seek_to_last_values() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    reader = connect_version2(bus, subscribe(1, 9, durable="d"))
    for number in range(4):
        writer.publish_value("ab"[number % 2], b"%d" % number)
    assert len(reader.receive_deliveries()) == 4
    reader.send(ack(9, 0, 4))
    reader.disconnect()
    assert payloads(open_late_reader(bus, durable="d", seek=True)) == [b"2", b"3"]


def test_empty_payload_removes_last_value_and_is_delivered() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    reader = connect_version2(bus, subscribe(1, 4))
    for channel in ("a", "b", ""):
        writer.publish_value(channel, b"x")
        writer.publish_value(channel, b"")
        writer.publish_value(channel + "2", b"y")
    assert len(payloads(reader)) == 9
    reader.send(ack(4, 0, 9))
    assert payloads(open_late_reader(bus)) == [b"y"] * 3
    assert bus.broker.classes[1].last_values.count_values(0.0) == 3


def test_expired_last_value_is_released_by_tick() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    bus.broker.clock.now = 100.0
    writer.publish_value("a", b"short", expires_ms=5000)
    writer.publish_value("b", b"long")
    drain_class(bus)
    assert read_last_values(bus) == [b"short", b"long"]
    bus.broker.clock.now = 105.0
    bus.tick()
    assert bus.broker.classes[1].ring.floor == 1
    assert read_last_values(bus) == [b"long"]


def test_delayed_last_value_is_sent_when_due() -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    about = Envelope("a", not_before_ms=10_000)
    writer.peer.send(publish_envelopes(1, 0, envelope_batch.encode(about, b"later")))
    reader = open_late_reader(bus)
    assert reader.receive_deliveries() == []
    bus.broker.clock.now = 10.0
    bus.broker.run_due_wakeups()
    assert payloads(reader) == [b"later"]


def test_invalid_start_is_refused_with_valid_starts() -> None:
    bus = BrokerHarness()
    reader = connect_version2(bus, subscribe(1, 4, start="lastvalues"))
    (reply,) = reader.receive_replies()
    assert '"last_values"' in reply.content["message"]


def test_purged_message_is_no_last_value() -> None:
    for keeps in (False, True):
        bus = BrokerHarness()
        writer = LastValueWriter(bus)
        bus.broker.classes[1].has_last_values = keeps
        bus.broker.classes[1].are_last_values_requested = keeps
        for number in range(6):
            writer.publish_value("abc"[number % 3], b"%d" % number)
        holder = connect_version2(bus, subscribe(1, 4))
        writer.peer.send(json_request(PURGE, 1, 4, first=3, last=5))
        writer.peer.receive_replies()
        assert read_last_values(bus) == [b"5"]
        writer.peer.send(json_request(ord("4"), classes=[KEEPS]))
        assert read_last_values(bus) == [b"5"]
        assert len(holder.receive_deliveries()) == 4
        holder.send(ack(4, 0, 3), ack(4, 5, 6))
        assert read_last_values(bus) == [b"5"]
        assert bus.broker.classes[1].ring.floor == 5


# Classes that keep last values --------------------------------------------------------------------


def test_settings_override_requested_last_values() -> None:
    settings = {"yes": ClassSettings(last_values=True), "no": ClassSettings(last_values=False)}
    bus = BrokerHarness(Settings(classes=settings))
    classes: list[object] = [
        {"id": 1, "name": "yes"},
        {"id": 2, "name": "no", "last_values": True},
        {"id": 3, "last_values": True},
        {"id": 4},
        {"id": 5, "name": "dead.x", "last_values": True},
    ]
    peer = connect_version2(bus, classes=classes)
    keeps = [bus.broker.classes[number].has_last_values for number in range(1, 6)]
    assert keeps == [True, False, True, False, False]
    peer.send(json_request(ord("4"), classes=[{"id": 4, "last_values": True}, {"id": 3}]))
    assert bus.broker.classes[4].has_last_values
    assert bus.broker.classes[3].has_last_values, "who does not ask takes nothing away"


def test_retention_and_last_values_combine() -> None:
    class_settings = {1: ClassSettings(last_values=True, keep=Retention(messages=2))}
    bus = BrokerHarness(Settings(classes=class_settings))
    writer = LastValueWriter(bus)
    for number in range(9):
        writer.publish_value("abcc"[min(number, 3)], b"%d" % number)
    drain_class(bus)
    assert bus.broker.classes[1].ring.floor == 0
    assert read_last_values(bus) == [b"0", b"1", b"8"]
    writer.publish_value("a", b"")
    writer.publish_value("b", b"")
    drain_class(bus)
    assert bus.broker.classes[1].ring.floor == 8
    writer.publish_value("d", b"9")
    drain_class(bus)
    assert bus.broker.classes[1].ring.floor == 8, "the value of c"
    writer.publish_value("c", b"10")
    drain_class(bus)
    assert bus.broker.classes[1].ring.floor == 11, "the two that are kept, one of them a value"


def test_timed_retention_releases_messages_by_tick() -> None:
    class_settings = {
        1: ClassSettings(keep=Retention(seconds=10)),
        2: ClassSettings(keep=Retention(seconds=30)),
    }
    bus = BrokerHarness(Settings(classes=class_settings, keep=Retention(messages=1)))
    bus.broker.clock.now = 100.0
    writer = connect_version2(bus, classes=[1, 2, 3])
    for class_id in (1, 2, 3):
        reader = connect_version2(bus, subscribe(class_id, 4), classes=[class_id])
        writer.send(publish(class_id, 2 * class_id - 2, b"x", b"y"))
        assert reader.receive_message_ids() == [0, 1]
        reader.send(ack(4, 0, 2))
    for now, message_counts in ((100.0, [2, 2, 1]), (111.0, [0, 2, 1]), (131.0, [0, 0, 1])):
        bus.broker.clock.now = now
        bus.tick()
        assert [len(bus.broker.classes[each].ring) for each in (1, 2, 3)] == message_counts


# Index of last values -----------------------------------------------------------------------------

ABOUT = st.builds(
    Envelope,
    st.sampled_from(["", "a", "b.c"]),
    st.sampled_from([b"", b"k", b"<\r\n>", b"<\r\n"]),
    st.sampled_from([(), (("n", "v"),), (("", ""), ("<\r\n", "<\r\n>"))]),
    st.sampled_from([None, 0, 0x3C0D0A3E]),
    st.sampled_from([None, 0, 0x3C0D0A003E000000]),
    st.sampled_from([None, 7]),
)


@given(st.lists(st.tuples(st.none() | ABOUT, st.sampled_from([b"", b"x", b"<\r\n", b"\0"]))))
def test_empty_payload_flags_match_single_frame_check(
    messages: list[tuple[Envelope | None, bytes]],
) -> None:
    whole = []
    for about, text in messages:
        kind, content = (
            (b"1", text) if about is None else (b"5", envelope_batch.encode(about, text))
        )
        whole.append(build_frame(kind[0], content=content))
    if not whole:
        return
    bounds = np.cumsum([0, *map(len, whole)], dtype=np.int64)
    found = empty_payload_flags(
        FrameBatch(np.frombuffer(b"".join(whole), np.uint8), bounds, 0)
    ).tolist()
    assert found == [not text for _, text in messages]
    assert found == [has_empty_payload(memoryview(frame)) for frame in whole]


@pytest.mark.parametrize("flags_per_value_max", [0, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_find_sequences_matches_model(
    seed: int, flags_per_value_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_values, "_FLAGS_PER_VALUE_MAX", flags_per_value_max)
    dice = np.random.default_rng(seed)
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus, classes=[1])
    channels = [f"c{number}" for number in range(1 << (2 * seed))]
    model: dict[str, int] = {}
    data = []
    for number in range(2000):
        channel = channels[dice.integers(len(channels))]
        text = b"x" * int(dice.integers(4))
        data.append(publish_envelopes(1, number, channel_envelope(channel, text)))
        model.pop(channel, None)
        if text:
            model[channel] = number
    peer.send(b"".join(data))
    ring = bus.broker.classes[1].ring
    values = LastValues(ring)
    expected = sorted(model.values())
    assert values.find_sequences(0, 2000, 0.0).tolist() == expected
    assert values.find_sequences(1000, 1500, 0.0).tolist() == [
        n for n in expected if 1000 <= n < 1500
    ]
    assert values.lowest_value(2000, 0.0) == min(expected)
    assert values.lowest_value(1, 0.0) == min(1, *expected)
    ring.release(1500)
    assert values.find_sequences(0, 2000, 0.0).tolist() == [n for n in expected if n >= 1500]
    later = LastValues(ring)
    assert later.find_sequences(0, 2000, 0.0).tolist() == [n for n in expected if n >= 1500]


@pytest.mark.parametrize("channels", [1, 40])
def test_expired_messages_are_no_last_values(channels: int) -> None:
    bus = BrokerHarness()
    writer = LastValueWriter(bus)
    for number in range(channels):
        writer.publish_value(f"c{number}", b"x", expires_ms=1000 * (number % 2 + 1))
    values = bus.broker.classes[1].last_values
    for first, last in ((0, channels), (0, 20), (channels - 1, channels)):
        for now in (0.0, 1.0, 2.0):
            expected = [n for n in range(first, min(last, channels)) if n % 2 + 1 > now]
            assert values.find_sequences(first, min(last, channels), now).tolist() == expected
            assert values.count_values(now) == sum(n % 2 + 1 > now for n in range(channels))
    for _ in range(64):
        writer.publish_value("", b"")  # With more messages than channels the search is by channel.
    head = bus.broker.classes[1].ring.head
    assert values.find_sequences(0, head, 1.0).tolist() == list(range(1, channels, 2))
