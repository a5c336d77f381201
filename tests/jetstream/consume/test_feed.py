"""Feed of a position without a socket: received, delivered and acknowledged messages."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.subscription.position import Position
from simplebus.jetstream.consume.ack_all import AckAllConsumer
from simplebus.jetstream.consume.dead_letters import DeadLetterTracker, FeedDeadLetters
from simplebus.jetstream.consume.feed import FETCH_MESSAGES_MAX, ConsumerFeed, OpenedConsumer
from simplebus.jetstream.remote_class import RemoteClass
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.parser import ClientParser

ENVELOPE = b"NATS/1.0\r\nSimplebus-Type: 5\r\n\r\n"


class FakeServer:
    """Broker with one class, a subscribed version 1 session, and its consumer feed."""

    def __init__(self) -> None:
        self.broker = Broker(Settings(), commit_log=CommitLog(Durability.OS))
        self.feeds: list[ConsumerFeed] = []
        self.ended: list[bool] = []
        self.written: list[bytes] = []
        """Replies for messages whose subscription had ended."""
        assert self.broker.commit_log is not None
        self.commit_log = self.broker.commit_log
        self.burials: DeadLetterTracker[ConsumerFeed] = DeadLetterTracker(
            self.commit_log, self.written.append
        )
        table = self.broker.store.class_registry
        table.class_factory = partial(
            RemoteClass,
            open_position=self._open_position,
            close_position=self._close_position,
            query_stream=lambda *_: None,
            on_purged=lambda *_: None,
            feeds={},
            check_caught_up=lambda *_: True,
            on_dead_lettered=lambda _, *given_up: self.burials.add(self.feed, *given_up),
            count_messages=lambda class_id, notify: None,
            get_refusal=lambda class_id: "",
            frame_bytes=1 << 20,
        )
        table.create_classes([(7, "")])
        self.session = self.broker.open_session()
        self._buffer = ReceiveBuffer()
        self.receive_from_subscriber(frames.encode(frames.CONNECT, content=b"[7]"))
        self.receive_from_subscriber(frames.encode(frames.SUBSCRIBE, class_id=7))
        self.drain_sent_messages()
        (self.feed,) = self.feeds

    def _open_position(self, cls: RemoteClass, position: Position, *start: object) -> None:
        self.feeds.append(ConsumerFeed(cls, position, self.broker.store))

    def _close_position(self, cls: RemoteClass, position: Position, forget: bool) -> None:
        self.ended.append(forget)

    def receive_from_subscriber(self, data: bytes) -> None:
        self._buffer.writable[: len(data)] = data
        self.broker.receive(self.session, self._buffer, len(data))

    def receive_from_consumer(self, *messages: bytes) -> bytes:
        """Receive messages from the consumer. Returns the immediate replies."""
        replies = self.feed.receive(arrived(*messages))
        self.broker.subscription_manager.notify_position(self.feed.position)
        return replies

    def drain_sent_messages(self) -> list[tuple[int, bytes]]:
        """Return the message ids and payloads that are sent to the subscriber."""
        sent, outbox, tick_number = [], self.session.outbox, self.broker.tick_number
        while chunk := outbox.peek(tick_number):
            data = bytes(chunk)
            outbox.mark_sent(len(data), tick_number)
            for frame in data.split(frames.DELIMITER)[:-1]:
                kind, _, number, _ = frames.HEADER.unpack_from(frame)
                if kind == frames.MESSAGE:
                    sent.append((number, frame[frames.HEADER.size :]))
        self.broker.apply_position_changes()
        return sent

    def store(self) -> None:
        """Store all accepted messages in the cluster."""
        write_batch = self.commit_log.pop_write_batch()
        assert write_batch is not None
        self.commit_log.mark_durable(write_batch.number)

    def ack(self, first: int, last: int) -> None:
        self.receive_from_subscriber(
            frames.encode_ack(class_id=7, timer_index=0, first=first, last=last)
        )

    def acked(self) -> list[int]:
        """Pop the stream sequences that are due to be acknowledged."""
        self.burials.update_feed(self.feed)
        return sorted(sequence_of(m, row) for m in self.feed.pop_acked() for row in range(m.count))


def message(
    sequence: int,
    payload: bytes = b"",
    *,
    attempt: int = 1,
    head: bytes = b"",
    tail: str = "0",
    stored: int = 1_000_000_000,
    count: int = 0,
) -> bytes:
    fields = attempt, sequence, count or sequence, stored, tail.encode()
    reply = b"$JS.ACK.S.c.%d.%d.%d.%d.%b" % fields
    payload = payload or b"%d" % sequence
    sizes = b"%d %d" % (len(head), len(head) + len(payload)) if head else b"%d" % len(payload)
    verb = b"HMSG" if head else b"MSG"
    return b"%b s 2 %b %b\r\n%b%b\r\n" % (verb, reply, sizes, head, payload)


def arrived(*messages: bytes) -> ReceivedMessages:
    (event,) = ClientParser().receive(b"".join(messages))
    assert isinstance(event, ReceivedMessages)
    return event


def sequence_of(messages: ReceivedMessages, row: int) -> int:
    return int(messages.reply(row).split(b".")[5])


def test_delivers_received_messages_and_returns_acks() -> None:
    server = FakeServer()
    assert server.receive_from_consumer(*(message(n) for n in (5, 6, 9))) == b""
    assert server.drain_sent_messages() == [(0, b"5"), (1, b"6"), (2, b"9")]
    assert server.acked() == []
    server.ack(1, 2)
    assert server.acked() == [6]
    assert server.acked() == []
    server.ack(0, 1)
    assert server.acked() == [5]
    assert server.feed.position.ring.floor == 2
    assert [sequence_of(m, 0) for m in server.feed.unacked_messages()] == [9]


def test_drops_redelivery_of_message_in_ring() -> None:
    server = FakeServer()
    server.receive_from_consumer(message(5), message(6))
    server.drain_sent_messages()
    assert server.receive_from_consumer(message(6, attempt=2, tail="7")) == b""
    assert server.drain_sent_messages() == []
    assert server.feed.statistics().repeated_count == 1
    server.ack(0, 2)
    replies = [m.reply(row) for m in server.feed.pop_acked() for row in range(m.count)]
    assert replies[0].endswith(b".5.5.1000000000.0")
    assert replies[1].startswith(b"$JS.ACK.S.c.2.6.")  # Acknowledged by its latest subject.


def test_drops_many_redeliveries_with_one_copy() -> None:
    server, count = FakeServer(), 500
    server.receive_from_consumer(*(message(n, bytes(1000)) for n in range(1, count + 1)))
    server.drain_sent_messages()
    bytes_before = sum(len(messages.raw) for messages in server.feed.unacked_messages())
    numbers = random.Random(1).sample(range(1, count + 1), count)
    server.receive_from_consumer(*(message(n, b"x", attempt=2, tail="7") for n in numbers))
    [messages] = server.feed.unacked_messages()
    replies = [messages.reply(row) for row in range(count)]
    assert [int(reply.split(b".")[5]) for reply in replies] == list(range(1, count + 1))
    assert all(reply.startswith(b"$JS.ACK.S.c.2.") for reply in replies)
    assert len(messages.raw) < bytes_before + sum(map(len, replies)) + 100
    assert server.feed.statistics().repeated_count == count


def test_acks_redelivery_of_acked_message_again() -> None:
    server = FakeServer()
    server.receive_from_consumer(message(5), message(6))
    server.drain_sent_messages()
    server.ack(0, 2)
    assert server.acked() == [5, 6]
    replies = server.receive_from_consumer(message(5, attempt=2), message(7))
    assert replies.startswith(b"PUB $JS.ACK.S.c.2.5.5.")
    assert replies.endswith(b" 4\r\n+ACK\r\n")
    assert server.drain_sent_messages() == [(2, b"7")]


def test_drops_repeats_that_a_server_reports_as_new() -> None:
    server = FakeServer()
    server.receive_from_consumer(*(message(n) for n in (5, 6, 7)))
    server.drain_sent_messages()
    server.ack(0, 2)
    assert server.acked() == [5, 6]
    replies = server.receive_from_consumer(*(message(n, tail="9") for n in (5, 6, 7, 8)))
    assert replies.count(b"+ACK") == 2
    assert server.drain_sent_messages() == [(3, b"8")]
    # The consumer reports no other acknowledged sequence.
    server.feed.acked_sequences.raise_floor(8)
    assert server.receive_from_consumer(message(7, tail="10")).startswith(b"PUB $JS.ACK.S.c.1.7.7.")
    assert server.drain_sent_messages() == []


@pytest.mark.parametrize("attempt", [1, 2])
def test_drops_repeats_within_one_read(attempt: int) -> None:
    """A server that was blocked for longer than the ack wait reads both deliveries together."""
    server = FakeServer()
    repeated = (message(n, attempt=attempt, tail="9") for n in (5, 6))
    server.receive_from_consumer(*(message(n) for n in (5, 6, 7)), *repeated)
    assert [payload for _, payload in server.drain_sent_messages()][:2] == [b"5", b"6"]
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert server.feed.position.ring.head == 3
    assert server.feed.statistics().repeated_count == 2
    server.ack(0, 3)
    replies = [m.reply(row) for m in server.feed.pop_acked() for row in range(m.count)]
    # Acknowledged by its latest subject.
    assert [reply.endswith(b".9") for reply in replies] == [
        True,
        True,
        False,
    ]


def test_marks_late_message_as_redelivered() -> None:
    server = FakeServer()
    server.receive_from_consumer(message(8))
    server.drain_sent_messages()
    server.receive_from_consumer(message(5))
    assert server.drain_sent_messages() == [(1, b"5")]
    assert server.feed.position.unacked.list_attempts() == [(1, 2, 2)]


def test_recreated_consumer_starts_at_first_unacked_message() -> None:
    server = FakeServer()
    server.feed.acked_sequences.raise_floor(3)
    server.receive_from_consumer(message(5), message(6))
    server.drain_sent_messages()
    server.ack(0, 2)
    assert server.acked() == [5, 6]
    assert server.feed.restart_sequence == 3
    server.feed.replace_consumer(OpenedConsumer("d", True))
    server.receive_from_consumer(*(message(n) for n in (3, 4, 5, 6, 7)))
    assert server.drain_sent_messages() == [(2, b"3"), (3, b"4"), (4, b"7")]


@pytest.mark.parametrize("is_ack_all", [False, True])
def test_forgets_sequences_of_rolled_back_stream(
    is_ack_all: bool,
) -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer() if is_ack_all else None
    server.receive_from_consumer(*(message(n) for n in (1, 2, 3, 4)))
    server.drain_sent_messages()
    server.ack(0, 4)
    assert 4 in server.acked()
    new_messages = [message(n, b"other %d" % n, stored=9_000_000_000) for n in (1, 2, 3)]
    if is_ack_all:
        server.feed.ack_all = AckAllConsumer()
    assert server.receive_from_consumer(*new_messages) == b""
    assert (server.drain_sent_messages(), server.feed.is_broken) == ([], True)
    assert server.receive_from_consumer(*new_messages) == b""
    server.feed.replace_consumer(OpenedConsumer("d", True, is_ack_all, is_new_stream=True))
    assert not server.feed.is_broken
    server.receive_from_consumer(*new_messages)
    assert server.drain_sent_messages() == [(n + 3, b"other %d" % n) for n in (1, 2, 3)]


def test_message_of_another_server_counts_as_redelivery() -> None:
    server = FakeServer()
    server.receive_from_consumer(message(8), message(5, attempt=3), message(6, attempt=3))
    position = server.feed.position
    assert server.drain_sent_messages() == [(0, b"5"), (1, b"6"), (2, b"8")]
    assert position.redelivered_count == 2
    assert position.unacked.list_attempts() == [(0, 2, 3)]
    server.ack(0, 3)
    assert server.acked() == [5, 6, 8]


def test_message_with_max_deliveries_is_dead_lettered_and_acked() -> None:
    server = FakeServer()
    server.receive_from_consumer(message(5, attempt=17))
    assert server.drain_sent_messages() == []
    assert server.broker.classes[server.broker.store.class_id_by_name["dead.7"]].ring.head == 1
    assert server.acked() == []  # The message is not stored yet.
    server.store()
    assert server.burials.write_stored_acks() == {server.feed}
    assert server.acked() == [5]
    assert server.burials.write_stored_acks() == set()


def test_only_dead_lettered_messages_wait_for_their_letter() -> None:
    server = FakeServer()
    server.receive_from_consumer(message(5), message(6, attempt=17), message(7))
    assert [payload for _, payload in server.drain_sent_messages()] == [b"5"]
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert [payload for _, payload in server.drain_sent_messages()] == [b"7"]
    server.ack(0, 3)
    assert server.acked() == [5, 7]
    # A progress notice is sent for it.
    assert [sequence_of(m, 0) for m in server.feed.unacked_messages()] == [6]
    # The message is not acknowledged yet.
    assert server.receive_from_consumer(message(6, attempt=18, tail="7")) == b""
    assert server.drain_sent_messages() == []
    server.store()
    server.burials.update_feed(server.feed)
    (acked_messages,) = server.feed.pop_acked()
    # Acknowledged by its latest subject.
    assert acked_messages.reply(0).startswith(b"$JS.ACK.S.c.18.6.")
    assert server.feed.unacked_messages() == []


def test_ack_all_waits_at_pending_dead_letter() -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.receive_from_consumer(message(1), message(2), message(3, attempt=17), message(4))
    assert [payload for _, payload in server.drain_sent_messages()] == [b"1", b"2"]
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert [payload for _, payload in server.drain_sent_messages()] == [b"4"]
    server.ack(0, 4)
    assert server.acked() == [2]
    # Another consumer redelivers the messages from there on.
    assert server.feed.restart_sequence == 3
    server.store()
    assert server.acked() == [4]
    assert server.feed.restart_sequence == 5


@pytest.mark.parametrize("is_stored", [False, True])
def test_closing_keeps_pending_dead_letters_unacked(is_stored: bool) -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.receive_from_consumer(message(1), message(2, attempt=17), message(3), message(4))
    server.drain_sent_messages()
    server.broker.subscription_manager.notify_position(server.feed.position)
    server.drain_sent_messages()
    server.ack(0, 1)
    server.ack(2, 3)
    assert server.acked() == [1]
    unacked = server.feed.unacked_on_exit([(3, 4, 2.0)])
    assert unacked is not None
    unacked = unacked.resolve_dead_letters(is_stored)
    assert unacked is not None
    assert unacked.sequences.tolist() == [2, 3, 4]
    assert unacked.delays.tolist() == [-1.0 if is_stored else 0.0, -1.0, 2.0]


def test_closing_returns_undelivered_messages() -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.receive_from_consumer(message(1), message(2), message(3))
    server.drain_sent_messages()
    server.ack(0, 1)
    assert server.acked() == [1]
    # The outbox of the closed session is not read any more.
    server.receive_from_consumer(message(4), message(5))
    assert server.feed.position.window.cursor < server.feed.position.ring.head
    unacked = server.feed.unacked_on_exit([])
    assert unacked is not None
    assert unacked.sequences.tolist() == [2, 3, 4, 5]
    assert unacked.delays.tolist() == [0.0] * 4


def test_closing_returns_nothing_if_all_is_dead_lettered() -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.receive_from_consumer(message(1, attempt=17))
    server.drain_sent_messages()
    unacked = server.feed.unacked_on_exit([])
    assert unacked is not None
    assert unacked.resolve_dead_letters(is_stored=True) is None


def test_closed_feed_acks_when_dead_letter_is_stored() -> None:
    server = FakeServer()
    server.receive_from_consumer(message(5), message(6, attempt=17))
    server.drain_sent_messages()
    server.ack(0, 1)
    assert server.acked() == [5]
    server.burials.end_feed(server.feed)
    assert server.feed.messages_to_return([]) == []
    assert server.burials.write_stored_acks() == set()
    assert server.written == []
    server.store()
    server.burials.write_stored_acks()
    assert server.written == [b"PUB $JS.ACK.S.c.17.6.6.1000000000.0 4\r\n+ACK\r\n"]


@given(st.integers(0, 10**6))
def test_pending_dead_letters_match_model(seed: int) -> None:
    rng = random.Random(seed)
    dead_letters, unacked, batch_number, head = FeedDeadLetters(), dict[int, int](), 0, 0
    for _ in range(30):
        if rng.random() < 0.6:
            first = head + rng.randrange(3)
            head = first + rng.randrange(1, 5)
            batch_number += rng.randrange(2)
            dead_letters.add([(first, head)], (batch_number, 9))
            unacked |= dict.fromkeys(range(first, head), batch_number)
        else:
            durable_batch = rng.randrange(batch_number + 1)
            dead_letters.remove_stored(
                lambda mark, durable_batch=durable_batch: mark[0] <= durable_batch
            )  # type: ignore[misc]
            unacked = {number: mark for number, mark in unacked.items() if mark > durable_batch}
        start, end = sorted(rng.choices(range(head + 2), k=2))
        assert dead_letters.pending_flags(start, end).tolist() == [
            n in unacked for n in range(start, end)
        ]
        assert dead_letters.limit_floor(end) == min([end, *unacked])
        assert bool(dead_letters) == bool(unacked)


def test_terminates_invalid_messages() -> None:
    server = FakeServer()
    valid = encode(Envelope(channel="a"), b"x")
    replies = server.receive_from_consumer(
        message(1, b"a<\r\n>b"),
        message(2, b"\xff", head=ENVELOPE),
        message(3, valid, head=ENVELOPE),
        message(4, b"x" * (1 << 20)),
        message(5),
        b"MSG s 2 elsewhere 1\r\nx\r\n",
    )
    assert replies.count(b" 5\r\n+TERM\r\n") == 3
    assert [payload for _, payload in server.drain_sent_messages()] == [b"x", b"5"]
    assert server.feed.statistics().invalid_count == 4


def test_returns_messages_with_their_backoff() -> None:
    server = FakeServer()
    server.receive_from_consumer(*(message(n) for n in range(1, 5)))
    server.drain_sent_messages()
    server.ack(1, 2)
    server.acked()
    returned = server.feed.messages_to_return([(2, 3, 1.5)])
    found = {sequence_of(m, row): pause for m, pause in returned for row in range(m.count)}
    assert found == {1: 0.0, 3: 1.5, 4: 0.0}
    server.broker.close_session(server.session)
    assert server.ended == [False]


def test_requests_only_what_fits() -> None:
    server = FakeServer()
    feed = server.feed
    assert feed.request_size() == FETCH_MESSAGES_MAX
    feed.requested_count = feed.request_size()
    assert feed.request_size() == 0
    server.receive_from_consumer(*(message(n) for n in range(1, 101)))
    assert feed.requested_count == FETCH_MESSAGES_MAX - 100
    assert feed.request_size() == 0  # These are not acknowledged.
    server.drain_sent_messages()
    server.ack(0, 100)
    feed.requested_count = 0
    assert feed.request_size() == FETCH_MESSAGES_MAX


@given(st.integers(0, 10**6))
def test_each_message_is_delivered_and_acked_once(seed: int) -> None:
    """Compare with a set of acknowledged messages, for any order and repetition."""
    rng = random.Random(seed)
    server = FakeServer()
    next_sequence, sent, acked, reported = 1, dict[int, int](), set[int](), set[int]()
    attempts = dict[int, int]()
    for _ in range(30):
        match rng.randrange(4):
            case 0:
                new_sequences = range(next_sequence, next_sequence + rng.randrange(1, 40))
                next_sequence = new_sequences.stop
                server.receive_from_consumer(*(message(n) for n in new_sequences))
                attempts.update(dict.fromkeys(new_sequences, 1))
            case 1 if next_sequence > 1:
                repeated = sorted({rng.randrange(1, next_sequence) for _ in range(3)})
                for sequence in repeated:
                    attempts[sequence] += 1
                server.receive_from_consumer(*(message(n, attempt=attempts[n]) for n in repeated))
            case 2:
                for number, payload in server.drain_sent_messages():
                    assert number not in sent
                    sent[number] = int(payload)
            case _ if sent:
                first = rng.randrange(0, max(sent) + 1)
                last = min(max(sent) + 1, first + rng.randrange(1, 9))
                server.ack(first, last)
                acked |= {sent[number] for number in range(first, last) if number in sent}
        newly_acked = server.acked()
        assert not reported & set(newly_acked)
        reported |= set(newly_acked)
        assert reported == acked
        assert not server.feed.position.check_invariants()
    assert len(set(sent.values())) == len(sent)
    unacked_sequences = {
        sequence_of(m, row) for m in server.feed.unacked_messages() for row in range(m.count)
    }
    assert unacked_sequences == set(range(1, next_sequence)) - acked


@pytest.mark.parametrize("count", [1, 40])
def test_full_ring_accepts_the_rest_later(count: int) -> None:
    server = FakeServer()
    server.feed.position.ring.messages_max = 16
    server.receive_from_consumer(*(message(n) for n in range(1, count + 1)))
    assert len(server.drain_sent_messages()) == min(count, 16)
    assert server.feed.request_size() == (0 if count > 16 else 16 - count + FETCH_MESSAGES_MAX - 16)
    server.ack(0, 16)
    assert server.acked() == list(range(1, min(count, 16) + 1))
    assert server.feed.fill() == b""
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert len(server.drain_sent_messages()) == max(0, min(count - 16, 16))
