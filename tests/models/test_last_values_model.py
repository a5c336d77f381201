"""Random scenarios of a class that retains last values, against a model.

The model has no sequences and no compaction. It only determines the values that each reader must
receive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.channel.pattern import matches
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.message_class import last_values
from simplebus.core.settings import FullPolicy, Settings
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    nack,
    subscribe,
    unsubscribe,
)
from tests.models.last_value_model import CHANNELS, LastValueWriter, payload, read_last_values

IN_MEMORY = [policy for policy in FullPolicy if policy is not FullPolicy.SPILL]
PATTERNS = st.sampled_from([[], ["a"], ["b", "c.*"], ["#"]])
PUBLISH = st.tuples(
    st.just("publish"), st.sampled_from(CHANNELS), st.sampled_from([0, 1, 1, 1, 40]), st.booleans()
)
READ = st.tuples(st.just("read"), st.integers(0, 3), st.integers(0, 3))
JOIN = st.tuples(st.just("join"), PATTERNS, st.sampled_from(["new", "last_values"]), st.booleans())
ACTIONS = st.lists(
    st.one_of(
        PUBLISH,
        PUBLISH,
        PUBLISH,
        READ,
        READ,
        st.tuples(
            st.just("join"), PATTERNS, st.sampled_from(["new", "last_values"]), st.booleans()
        ),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("tick"), st.integers(1, 4)),
    ),
    max_size=80,
)


@dataclass
class LastValueReader:
    """A subscription and the messages that it must still receive."""

    peer: Version2Peer
    patterns: list[str]
    undelivered: set[bytes]
    delivered: list[bytes] = field(default_factory=list)
    first: set[bytes] = field(default_factory=set)
    """Messages that the reader must receive from the start, in an order that is not modelled."""
    unacked: list[int] = field(default_factory=list)
    """Message ids that it has not acknowledged."""

    def is_match(self, channel: str) -> bool:
        if not channel:
            return not self.patterns or "#" in self.patterns
        return not self.patterns or any(matches(pattern, channel) for pattern in self.patterns)


class LastValueScenario:
    """One bus and its readers."""

    def __init__(self, bus: BrokerHarness) -> None:
        self.bus = bus
        self.writer = LastValueWriter(bus)
        self.readers: list[LastValueReader] = []
        self.expiry_times: dict[bytes, float] = {}
        """Expiry time of each payload."""
        self.channel_of: dict[bytes, str] = {}
        self.count = 0

    def publish(self, channel: str, size: int, is_timed: bool) -> None:
        self.count += 1
        text = b"%d." % self.count * size
        self.writer.publish_value(channel, text, 3000 if is_timed else None)
        if text:
            now = self.bus.broker.clock.now
            self.expiry_times[text] = now + 3 if is_timed else float("inf")
            self.channel_of[text] = channel
            for reader in self.readers:
                if reader.is_match(channel):
                    reader.undelivered.add(text)

    def join(self, patterns: list[str], start: str, is_limited: bool) -> None:
        if len(self.readers) == 4:
            return
        options = {"max_in_flight": 2} if is_limited else {}
        peer = connect_version2(
            self.bus, subscribe(1, 4, channels=patterns, start=start, **options)
        )
        reader = LastValueReader(peer, patterns, set())
        if start == "last_values":
            values = self.writer.live_values()
            reader.undelivered = {text for text in values if reader.is_match(self.channel_of[text])}
            reader.first = set(reader.undelivered)
        self.readers.append(reader)

    def read(self, index: int, arguments: int) -> None:
        """Receive all messages, and acknowledge all, some or none, or reject some."""
        if index >= len(self.readers):
            return
        reader = self.readers[index]
        for delivery in reader.peer.receive_deliveries():
            text = payload(delivery.content, delivery.kind)
            reader.unacked.append(delivery.message_id)
            if text and delivery.attempt == 1:
                assert text not in reader.delivered, "first delivery repeated"
                assert text in reader.undelivered
                reader.delivered.append(text)
        reader.unacked = sorted(set(reader.unacked))
        if arguments == 0:
            return
        chosen = reader.unacked if arguments == 1 else reader.unacked[::2]
        encode_reply = nack if arguments == 3 else ack
        for number in chosen:
            reader.peer.send(encode_reply(4, number, number + 1))
        if arguments != 3:
            reader.unacked = [number for number in reader.unacked if number not in chosen]

    def leave(self, index: int) -> None:
        """Receive and acknowledge all, and disconnect."""
        if index < len(self.readers):
            self.end(self.readers.pop(index))

    def end(self, reader: LastValueReader) -> None:
        self.readers.append(reader)
        while reader.peer.session.outbox.peek(self.bus.broker.tick_number) or reader.unacked:
            self.read(len(self.readers) - 1, 1)
        self.readers.pop()
        now = self.bus.broker.clock.now
        missing = reader.undelivered - set(reader.delivered)
        assert all(self.expiry_times[text] <= now for text in missing), missing
        new_numbers = [
            int(text.split(b".")[0]) for text in reader.delivered if text not in reader.first
        ]
        assert new_numbers == sorted(new_numbers)
        reader.peer.send(unsubscribe(4))
        reader.peer.disconnect()

    def tick(self, seconds: int) -> None:
        for _ in range(seconds):
            self.bus.broker.clock.now += 1
            self.bus.tick()

    def live(self, actions: list[tuple[object, ...]]) -> None:
        for action, *arguments in actions:
            getattr(self, str(action))(*arguments)


@pytest.fixture(autouse=True)
def compact_early() -> object:
    """Compact values as soon as some bytes between them can be released."""
    with mock.patch.object(last_values, "COMPACTION_BYTES_MIN", 60):
        yield


@settings(max_examples=2 * settings().max_examples)
@given(ACTIONS)
def test_readers_get_each_message_once_and_in_order(actions: list[tuple[object, ...]]) -> None:
    bus = BrokerHarness()
    scenario = LastValueScenario(bus)
    scenario.join([], "new", False)  # Without any subscription, messages wait for the first one.
    scenario.live(actions)
    last_values_ = read_last_values(bus)
    assert sorted(last_values_) == sorted(scenario.writer.live_values())
    for reader in list(scenario.readers):
        scenario.leave(scenario.readers.index(reader))
    assert sorted(read_last_values(bus)) == sorted(last_values_)


@settings(max_examples=2 * settings().max_examples)
@given(ACTIONS, st.sampled_from(IN_MEMORY))
def test_full_class_keeps_last_values_and_counts_dropped_ones(
    actions: list[tuple[object, ...]], policy: FullPolicy
) -> None:
    bus = BrokerHarness(Settings(limits=Limits(class_messages=9), full_policy=policy))
    writer, reader = LastValueWriter(bus), connect_version2(bus, subscribe(1, 4))
    for action, *arguments in actions:
        if action == "publish" and not writer.peer.session.parked_messages:
            channel, size, is_timed = arguments
            text = b"%d." % writer.number * int(str(size))
            values_before = dict(writer.values)
            writer.publish_value(str(channel), text, 3000 if is_timed else None)
            if "drop_newest" in writer.peer.receive_error_codes():
                writer.values = values_before
        elif action == "read":
            delivery = [delivery.message_id for delivery in reader.receive_deliveries()]
            if delivery:
                reader.send(ack(4, min(delivery), max(delivery) + 1))
        elif action == "tick":
            bus.broker.clock.now += 1
            bus.tick()
    while delivery := [delivery.message_id for delivery in reader.receive_deliveries()]:
        reader.send(ack(4, min(delivery), max(delivery) + 1))
    assert not writer.peer.session.parked_messages
    last_values_, dropped = read_last_values(bus), bus.statistics(1).dropped
    assert len(set(last_values_)) == len(last_values_)
    assert set(last_values_) <= writer.live_values()
    assert dropped.get(Reason.LAST_VALUE_DROPPED, 0) >= len(writer.live_values()) - len(
        last_values_
    )
