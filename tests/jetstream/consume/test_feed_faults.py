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

WILD_TURNS, CALM_TURNS = 60, 200


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
    again: deque[int] = field(default_factory=deque)
    """Messages to be redelivered."""


class Consumer:
    """Simulated JetStream consumer with explicit or cumulative acks."""

    def __init__(self, stream: list[int], start: int, *, is_ack_all: bool) -> None:
        self.stream = stream
        self.is_ack_all = is_ack_all
        self.state = State(start, start)
        self.wanted = 0
        self.kept = deepcopy(self.state)
        """State that survives a kill of the server."""

    def send(self, most: int) -> list[bytes]:
        """Return up to `most` of the requested messages, as far as the stream has them."""
        state, found = self.state, list[bytes]()
        while len(found) < min(most, self.wanted):
            if state.again:
                sequence = state.again.popleft()
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
        self.wanted -= len(found)
        return found

    def hear(self, subject: bytes, word: bytes) -> None:
        _, _, _, _, _, sequence, count, *_ = map(bytes, subject.split(b"."))
        self.learn(int(sequence), int(count), word)

    def learn(self, sequence: int, count: int, word: bytes) -> None:
        state = self.state
        if word not in (jetstream_codec.ACK, jetstream_codec.TERMINATE):
            return
        if not self.is_ack_all:
            state.pending.pop(sequence, None)
            while state.floor < state.next and state.floor not in state.pending:
                state.floor += 1
        elif count > state.floor_count and sequence >= state.floor:
            state.floor_count, state.floor = count, sequence + 1
            for each in [each for each in state.pending if each <= sequence]:
                del state.pending[each]


class Fed(FakeServer):
    """Stateless server whose position has a simulated consumer behind a connection."""

    def __init__(self, chance: random.Random, *, is_ack_all: bool) -> None:
        super().__init__()
        self.chance = chance
        self.is_ack_all = is_ack_all
        self.stream: list[int] = []
        self.last = chance.randrange(5)
        self.start = self.last + 1
        """Start sequence of its consumer."""
        self.consumer: Consumer | None = Consumer(self.stream, self.start, is_ack_all=is_ack_all)
        self.coming: list[bytes] = []
        """Messages sent by the consumer that have not arrived."""
        self.releasing: list[bytes] = []
        """Replies to the consumer that have not arrived."""
        self.sent: dict[int, int] = {}
        """Stream sequences of the delivered messages, by message id."""
        self.done: set[int] = set()
        """Message ids that the subscriber has acknowledged."""
        self.feed.open(OpenedConsumer("c", False, is_ack_all, floor=self.start))

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.last += self.chance.choice([1, 1, 1, 2])
            self.stream.append(self.last)

    def serve(self) -> None:
        """Queue acks and message requests, as a stateless server does at the end of a turn."""
        feed = self.feed
        for messages in feed.pop_acked():
            self.releasing.append(bytes(jetstream_codec.encode_acks(messages)))
        self.releasing.append(feed.fill())
        if count := feed.request_size():
            feed.requested_count += count
            self.releasing.append(b"PUB want %d\r\n%b\r\n" % (len(b"%d" % count), b"%d" % count))
        self.broker.subscription_manager.notify_position(feed.position)

    def hear(self, most: int) -> None:
        """Deliver up to `most` replies to the consumer."""
        some, self.releasing = self.releasing[:most], self.releasing[most:]
        for subject, word in read(b"".join(some)):
            if self.consumer is None:
                continue
            if subject == b"want":
                self.consumer.wanted += int(word)
            else:
                self.consumer.hear(subject, word)
        if self.consumer is not None:
            state = self.consumer.state
            told = {each for each in self.stream if each < state.next} - set(state.pending)
            assert {each for each in told if each >= self.start} <= self.done

    def come(self, most: int) -> None:
        """Deliver up to `most` of the messages that the consumer has sent."""
        some, self.coming = self.coming[:most], self.coming[most:]
        if some:
            self.releasing.append(self.take(*some))

    def renew(self) -> None:
        """Create another consumer if needed, as positions do."""
        feed, consumer = self.feed, self.consumer
        if consumer is not None and not feed.is_broken:
            feed.requested_count = 0
            consumer.wanted = 0
            return
        needed = feed.restart_sequence
        if consumer is not None:
            needed = min(consumer.state.floor, needed) if needed else consumer.state.floor
        assert needed, "it would begin with what is new"
        self.start = needed
        self.consumer = Consumer(self.stream, self.start, is_ack_all=self.is_ack_all)
        self.coming.clear()
        feed.requested_count = 0
        feed.replace_consumer(OpenedConsumer("c", True, self.is_ack_all))

    def lose(self) -> None:
        """Lose the connection and open another one."""
        self.hear(self.chance.randrange(len(self.releasing) + 1))
        self.releasing.clear()
        self.coming.clear()
        self.feed.requested_count = 0
        if self.consumer is not None:
            self.consumer.wanted = 0
        if self.feed.ack_all is not None:
            self.feed.ack_all.has_gap = True

    def subscriber(self) -> None:
        """Send the pending messages to the subscriber."""
        for number, payload in self.taken():
            assert number not in self.sent
            assert int(payload) not in self.sent.values(), "twice"
            self.sent[number] = int(payload)

    def acknowledge(self) -> None:
        open_ = [number for number, each in self.sent.items() if each not in self.done]
        if not open_:
            return
        first = self.chance.choice(open_)
        last = min(max(self.sent) + 1, first + self.chance.choice([1, 2, 9, 100]))
        if self.chance.random() < 0.5:
            first = min(open_)
        self.ack(first, last)
        self.done |= {self.sent[number] for number in range(first, last) if number in self.sent}


def read(raw: bytes) -> list[tuple[bytes, bytes]]:
    """Return the subject and the content of each reply."""
    reader, at, found, buffer = LineParser(NatsLimits()), 0, [], bytearray(raw)
    while at < len(raw):
        at = reader.parse_command(buffer, at, len(raw))
        one = reader.pop_event()
        assert isinstance(one, Pub)
        found.append((bytes(one.subject), bytes(one.body)))
        one.body.release()
    return found


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.booleans())
def test_faults_never_lose_or_duplicate_messages(seed: int, is_ack_all: bool) -> None:
    chance = random.Random(seed)
    stateless_server = Fed(chance, is_ack_all=is_ack_all)
    if chance.random() < 0.5:
        stateless_server.feed.position.ring.messages_max = 16
    for turn in range(WILD_TURNS + CALM_TURNS):
        is_wild = turn < WILD_TURNS
        if is_wild and chance.random() < 0.3:
            stateless_server.publish(chance.choice([1, 3, 30]))
        stateless_server.serve()
        stateless_server.hear(chance.choice([0, 1, 3, 1000]))
        consumer = stateless_server.consumer
        if consumer is not None:
            stateless_server.coming += consumer.send(chance.choice([0, 1, 7, 1000]))
            if chance.random() < 0.1:  # The ack wait is over.
                late = [each for each in consumer.state.pending if chance.random() < 0.5]
                consumer.state.again.extend(late)
            if is_wild and chance.random() < 0.1:
                consumer.kept = deepcopy(consumer.state)
            if is_wild and chance.random() < 0.05:
                consumer.state = deepcopy(consumer.kept)
        if not is_ack_all and chance.random() < 0.2:
            chance.shuffle(stateless_server.coming)
        stateless_server.come(chance.choice([0, 1, 7, 1000]))
        stateless_server.subscriber()
        if chance.random() < 0.4 or not is_wild:
            stateless_server.acknowledge()
        if is_wild and chance.random() < 0.03:
            stateless_server.lose()
        if is_wild and chance.random() < 0.03:
            stateless_server.consumer = None
        if (
            stateless_server.feed.is_broken or stateless_server.consumer is None or not is_wild
        ) and chance.random() < 0.3:
            stateless_server.renew()
        stateless_server.feed.position.check_invariants()
        if not is_wild and stateless_server.done == set(stateless_server.stream):
            break
    assert stateless_server.done == set(stateless_server.stream), "it hangs"
    assert len(stateless_server.sent) == len(stateless_server.stream)
