"""Simulation of a consumer feed under faults, without a socket.

Messages and acks are late or lost with the connection, a killed server forgets its latest state,
and consumers are deleted. Two invariants hold: a message is acked to the consumer only after its
subscriber has acked it, and the subscriber receives each message exactly once.
"""

from __future__ import annotations

import random
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.jetstream.consume.feed import OpenedConsumer
from simplebus.nats.client import jetstream_codec
from simplebus.nats.limits import NatsLimits
from simplebus.nats.protocol.events import Pub
from simplebus.nats.protocol.line_parser import LineParser
from tests.jetstream.consume.test_feed import FakeServer, message

FAULTY_ROUNDS, FAULTLESS_ROUNDS = 60, 200


@dataclass(slots=True)
class State:
    """State of a simulated JetStream consumer."""

    next: int
    """Stream sequence of the next message to send."""
    floor: int
    """All messages below this sequence are acknowledged."""
    count: int = 0
    """Number of messages sent."""
    floor_count: int = 0
    """Number of deliveries up to the last message below `floor`."""
    pending: dict[int, int] = field(default_factory=dict)
    """Number of deliveries of each unacknowledged message."""
    to_redeliver: deque[int] = field(default_factory=deque)
    """Messages to be redelivered."""


class Consumer:
    """Simulated JetStream consumer with explicit or cumulative acks."""

    def __init__(self, stream: list[int], start: int, *, is_ack_all: bool) -> None:
        self.stream = stream
        self.is_ack_all = is_ack_all
        self.state = State(start, start)
        self.requested_count = 0
        self.saved_state = deepcopy(self.state)
        """State that survives a kill of the server."""

    def send(self, max_count: int) -> list[bytes]:
        """Return up to `most` of the requested messages, as far as the stream has them."""
        state, found = self.state, list[bytes]()
        while len(found) < min(max_count, self.requested_count):
            if state.to_redeliver:
                sequence = state.to_redeliver.popleft()
                if sequence not in state.pending:
                    continue
            else:
                sequence = next((each for each in self.stream if each >= state.next), 0)
                if not sequence:
                    break
                state.next = sequence + 1
            state.pending[sequence] = attempt = state.pending.get(sequence, 0) + 1
            state.count += 1
            found.append(message(sequence, attempt=attempt, count=state.count))
        self.requested_count -= len(found)
        return found

    def process_reply(self, subject: bytes, content: bytes) -> None:
        _, _, _, _, _, sequence, count, *_ = map(bytes, subject.split(b"."))
        self.record_ack(int(sequence), int(count), content)

    def record_ack(self, sequence: int, count: int, content: bytes) -> None:
        state = self.state
        if content not in (jetstream_codec.ACK, jetstream_codec.TERMINATE):
            return
        if not self.is_ack_all:
            state.pending.pop(sequence, None)
            while state.floor < state.next and state.floor not in state.pending:
                state.floor += 1
        elif count > state.floor_count and sequence >= state.floor:
            state.floor_count, state.floor = count, sequence + 1
            for each in [each for each in state.pending if each <= sequence]:
                del state.pending[each]


class FeedWithConsumer(FakeServer):
    """Stateless server whose position has a simulated consumer behind a connection."""

    def __init__(self, rng: random.Random, *, is_ack_all: bool) -> None:
        super().__init__()
        self.rng = rng
        self.is_ack_all = is_ack_all
        self.stream: list[int] = []
        self.last = rng.randrange(5)
        self.start = self.last + 1
        """Start sequence of its consumer."""
        self.consumer: Consumer | None = Consumer(self.stream, self.start, is_ack_all=is_ack_all)
        self.arriving_messages: list[bytes] = []
        """Messages sent by the consumer that have not arrived."""
        self.outgoing_replies: list[bytes] = []
        """Replies to the consumer that have not arrived."""
        self.sent: dict[int, int] = {}
        """Stream sequences of the delivered messages, by message id."""
        self.acked: set[int] = set()
        """Message ids that the subscriber has acknowledged."""
        self.feed.open(OpenedConsumer("c", False, is_ack_all, floor=self.start))

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.last += self.rng.choice([1, 1, 1, 2])
            self.stream.append(self.last)

    def serve(self) -> None:
        """Queue acks and message requests, as a stateless server does at the end of a turn."""
        feed = self.feed
        for messages in feed.pop_acked():
            self.outgoing_replies.append(bytes(jetstream_codec.encode_acks(messages)))
        self.outgoing_replies.append(feed.fill())
        if count := feed.request_size():
            feed.requested_count += count
            self.outgoing_replies.append(
                b"PUB want %d\r\n%b\r\n" % (len(b"%d" % count), b"%d" % count)
            )
        self.broker.subscription_manager.notify_position(feed.position)

    def deliver_replies(self, max_count: int) -> None:
        """Deliver up to `most` replies to the consumer."""
        batch, self.outgoing_replies = (
            self.outgoing_replies[:max_count],
            self.outgoing_replies[max_count:],
        )
        for subject, content in read(b"".join(batch)):
            if self.consumer is None:
                continue
            if subject == b"want":
                self.consumer.requested_count += int(content)
            else:
                self.consumer.process_reply(subject, content)
        if self.consumer is not None:
            state = self.consumer.state
            acked_by_consumer = {each for each in self.stream if each < state.next} - set(
                state.pending
            )
            assert {each for each in acked_by_consumer if each >= self.start} <= self.acked

    def deliver_messages(self, max_count: int) -> None:
        """Deliver up to `most` of the messages that the consumer has sent."""
        batch, self.arriving_messages = (
            self.arriving_messages[:max_count],
            self.arriving_messages[max_count:],
        )
        if batch:
            self.outgoing_replies.append(self.receive_from_consumer(*batch))

    def renew(self) -> None:
        """Create another consumer if needed, as positions do."""
        feed, consumer = self.feed, self.consumer
        if consumer is not None and not feed.is_broken:
            feed.requested_count = 0
            consumer.requested_count = 0
            return
        start_sequence = feed.restart_sequence
        if consumer is not None:
            start_sequence = (
                min(consumer.state.floor, start_sequence)
                if start_sequence
                else consumer.state.floor
            )
        assert start_sequence, "the consumer would start with new messages"
        self.start = start_sequence
        self.consumer = Consumer(self.stream, self.start, is_ack_all=self.is_ack_all)
        self.arriving_messages.clear()
        feed.requested_count = 0
        feed.replace_consumer(OpenedConsumer("c", True, self.is_ack_all))

    def reconnect(self) -> None:
        """Lose the connection and open another one."""
        self.deliver_replies(self.rng.randrange(len(self.outgoing_replies) + 1))
        self.outgoing_replies.clear()
        self.arriving_messages.clear()
        self.feed.requested_count = 0
        if self.consumer is not None:
            self.consumer.requested_count = 0
        if self.feed.ack_all is not None:
            self.feed.ack_all.has_gap = True

    def deliver_to_subscriber(self) -> None:
        """Send the pending messages to the subscriber."""
        for number, payload in self.drain_sent_messages():
            assert number not in self.sent
            assert int(payload) not in self.sent.values(), "twice"
            self.sent[number] = int(payload)

    def acknowledge(self) -> None:
        open_ = [number for number, each in self.sent.items() if each not in self.acked]
        if not open_:
            return
        first = self.rng.choice(open_)
        last = min(max(self.sent) + 1, first + self.rng.choice([1, 2, 9, 100]))
        if self.rng.random() < 0.5:
            first = min(open_)
        self.ack(first, last)
        self.acked |= {self.sent[number] for number in range(first, last) if number in self.sent}


def read(raw: bytes) -> list[tuple[bytes, bytes]]:
    """Return the subject and the content of each reply."""
    reader, offset, found, buffer = LineParser(NatsLimits()), 0, [], bytearray(raw)
    while offset < len(raw):
        offset = reader.parse_command(buffer, offset, len(raw))
        event = reader.pop_event()
        assert isinstance(event, Pub)
        found.append((bytes(event.subject), bytes(event.body)))
        event.body.release()
    return found


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.booleans())
def test_faults_never_lose_or_duplicate_messages(seed: int, is_ack_all: bool) -> None:
    rng = random.Random(seed)
    stateless_server = FeedWithConsumer(rng, is_ack_all=is_ack_all)
    if rng.random() < 0.5:
        stateless_server.feed.position.ring.messages_max = 16
    for round_number in range(FAULTY_ROUNDS + FAULTLESS_ROUNDS):
        is_faulty = round_number < FAULTY_ROUNDS
        if is_faulty and rng.random() < 0.3:
            stateless_server.publish(rng.choice([1, 3, 30]))
        stateless_server.serve()
        stateless_server.deliver_replies(rng.choice([0, 1, 3, 1000]))
        consumer = stateless_server.consumer
        if consumer is not None:
            stateless_server.arriving_messages += consumer.send(rng.choice([0, 1, 7, 1000]))
            if rng.random() < 0.1:  # The ack wait is over.
                expired = [each for each in consumer.state.pending if rng.random() < 0.5]
                consumer.state.to_redeliver.extend(expired)
            if is_faulty and rng.random() < 0.1:
                consumer.saved_state = deepcopy(consumer.state)
            if is_faulty and rng.random() < 0.05:
                consumer.state = deepcopy(consumer.saved_state)
        if not is_ack_all and rng.random() < 0.2:
            rng.shuffle(stateless_server.arriving_messages)
        stateless_server.deliver_messages(rng.choice([0, 1, 7, 1000]))
        stateless_server.deliver_to_subscriber()
        if rng.random() < 0.4 or not is_faulty:
            stateless_server.acknowledge()
        if is_faulty and rng.random() < 0.03:
            stateless_server.reconnect()
        if is_faulty and rng.random() < 0.03:
            stateless_server.consumer = None
        if (
            stateless_server.feed.is_broken or stateless_server.consumer is None or not is_faulty
        ) and rng.random() < 0.3:
            stateless_server.renew()
        stateless_server.feed.position.check_invariants()
        if not is_faulty and stateless_server.acked == set(stateless_server.stream):
            break
    assert stateless_server.acked == set(stateless_server.stream), "no progress"
    assert len(stateless_server.sent) == len(stateless_server.stream)
