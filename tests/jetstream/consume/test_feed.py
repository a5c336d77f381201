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
            count_messages=lambda class_id, tell: None,
            get_refusal=lambda class_id: "",
            frame_bytes=1 << 20,
        )
        table.create_classes([(7, "")])
        self.session = self.broker.open_session()
        self._buffer = ReceiveBuffer()
        self.say(frames.encode(frames.CONNECT, content=b"[7]"))
        self.say(frames.encode(frames.SUBSCRIBE, class_id=7))
        self.taken()
        (self.feed,) = self.feeds

    def _open_position(self, cls: RemoteClass, position: Position, *start: object) -> None:
        self.feeds.append(ConsumerFeed(cls, position, self.broker.store))

    def _close_position(self, cls: RemoteClass, position: Position, forget: bool) -> None:
        self.ended.append(forget)

    def say(self, data: bytes) -> None:
        self._buffer.writable[: len(data)] = data
        self.broker.receive(self.session, self._buffer, len(data))

    def take(self, *messages: bytes) -> bytes:
        """Receive messages from the consumer. Returns the immediate replies."""
        said = self.feed.receive(arrived(*messages))
        self.broker.subscription_manager.notify_position(self.feed.position)
        return said

    def taken(self) -> list[tuple[int, bytes]]:
        """Return the message ids and payloads that are sent to the subscriber."""
        got, outbox, tick = [], self.session.outbox, self.broker.tick_number
        while piece := outbox.peek(tick):
            data = bytes(piece)
            outbox.mark_sent(len(data), tick)
            for frame in data.split(frames.DELIMITER)[:-1]:
                kind, _, number, _ = frames.HEADER.unpack_from(frame)
                if kind == frames.MESSAGE:
                    got.append((number, frame[frames.HEADER.size :]))
        self.broker.apply_position_changes()
        return got

    def store(self) -> None:
        """Store all accepted messages in the cluster."""
        lot = self.commit_log.pop_write_batch()
        assert lot is not None
        self.commit_log.mark_durable(lot.number)

    def ack(self, first: int, last: int) -> None:
        self.say(frames.encode_ack(class_id=7, timer_index=0, first=first, last=last))

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
    told = attempt, sequence, count or sequence, stored, tail.encode()
    reply = b"$JS.ACK.S.c.%d.%d.%d.%d.%b" % told
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
    assert server.take(*(message(n) for n in (5, 6, 9))) == b""
    assert server.taken() == [(0, b"5"), (1, b"6"), (2, b"9")]
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
    server.take(message(5), message(6))
    server.taken()
    assert server.take(message(6, attempt=2, tail="7")) == b""
    assert server.taken() == []
    assert server.feed.statistics().repeated_count == 1
    server.ack(0, 2)
    replies = [m.reply(row) for m in server.feed.pop_acked() for row in range(m.count)]
    assert replies[0].endswith(b".5.5.1000000000.0")
    assert replies[1].startswith(b"$JS.ACK.S.c.2.6.")  # By its latest subject.


def test_drops_many_redeliveries_with_one_copy() -> None:
    server, count = FakeServer(), 500
    server.take(*(message(n, bytes(1000)) for n in range(1, count + 1)))
    server.taken()
    before = sum(len(messages.raw) for messages in server.feed.unacked_messages())
    numbers = random.Random(1).sample(range(1, count + 1), count)
    server.take(*(message(n, b"x", attempt=2, tail="7") for n in numbers))
    [messages] = server.feed.unacked_messages()
    replies = [messages.reply(row) for row in range(count)]
    assert [int(reply.split(b".")[5]) for reply in replies] == list(range(1, count + 1))
    assert all(reply.startswith(b"$JS.ACK.S.c.2.") for reply in replies)
    assert len(messages.raw) < before + sum(map(len, replies)) + 100
    assert server.feed.statistics().repeated_count == count


def test_acks_redelivery_of_acked_message_again() -> None:
    server = FakeServer()
    server.take(message(5), message(6))
    server.taken()
    server.ack(0, 2)
    assert server.acked() == [5, 6]
    said = server.take(message(5, attempt=2), message(7))
    assert said.startswith(b"PUB $JS.ACK.S.c.2.5.5.")
    assert said.endswith(b" 4\r\n+ACK\r\n")
    assert server.taken() == [(2, b"7")]


def test_drops_repeats_that_a_server_reports_as_new() -> None:
    server = FakeServer()
    server.take(*(message(n) for n in (5, 6, 7)))
    server.taken()
    server.ack(0, 2)
    assert server.acked() == [5, 6]
    said = server.take(*(message(n, tail="9") for n in (5, 6, 7, 8)))
    assert said.count(b"+ACK") == 2
    assert server.taken() == [(3, b"8")]
    server.feed.acked_sequences.raise_floor(
        8
    )  # So the consumer says: nothing else is acked_sequences of it.
    assert server.take(message(7, tail="10")).startswith(b"PUB $JS.ACK.S.c.1.7.7.")
    assert server.taken() == []


@pytest.mark.parametrize("attempt", [1, 2])
def test_drops_repeats_within_one_read(attempt: int) -> None:
    """A server that was blocked for longer than the ack wait reads both deliveries together."""
    server = FakeServer()
    again = (message(n, attempt=attempt, tail="9") for n in (5, 6))
    server.take(*(message(n) for n in (5, 6, 7)), *again)
    assert [payload for _, payload in server.taken()][:2] == [b"5", b"6"]
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert server.feed.position.ring.head == 3
    assert server.feed.statistics().repeated_count == 2
    server.ack(0, 3)
    replies = [m.reply(row) for m in server.feed.pop_acked() for row in range(m.count)]
    assert [reply.endswith(b".9") for reply in replies] == [True, True, False]  # By its latest.


def test_marks_late_message_as_redelivered() -> None:
    server = FakeServer()
    server.take(message(8))
    server.taken()
    server.take(message(5))
    assert server.taken() == [(1, b"5")]
    assert server.feed.position.list_attempts() == [(1, 2, 2)]


def test_recreated_consumer_starts_at_first_unacked_message() -> None:
    server = FakeServer()
    server.feed.acked_sequences.raise_floor(3)
    server.take(message(5), message(6))
    server.taken()
    server.ack(0, 2)
    assert server.acked() == [5, 6]
    assert server.feed.restart_sequence == 3
    server.feed.replace_consumer(OpenedConsumer("d", True))
    server.take(*(message(n) for n in (3, 4, 5, 6, 7)))
    assert server.taken() == [(2, b"3"), (3, b"4"), (4, b"7")]


@pytest.mark.parametrize("is_ack_all", [False, True])
def test_forgets_sequences_of_rolled_back_stream(
    is_ack_all: bool,
) -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer() if is_ack_all else None
    server.take(*(message(n) for n in (1, 2, 3, 4)))
    server.taken()
    server.ack(0, 4)
    assert 4 in server.acked()
    anew = [message(n, b"other %d" % n, stored=9_000_000_000) for n in (1, 2, 3)]
    if is_ack_all:
        server.feed.ack_all = AckAllConsumer()
    assert server.take(*anew) == b""
    assert (server.taken(), server.feed.is_broken) == ([], True)
    assert server.take(*anew) == b""
    server.feed.replace_consumer(OpenedConsumer("d", True, is_ack_all, is_new_stream=True))
    assert not server.feed.is_broken
    server.take(*anew)
    assert server.taken() == [(n + 3, b"other %d" % n) for n in (1, 2, 3)]


def test_message_of_another_server_counts_as_redelivery() -> None:
    server = FakeServer()
    server.take(message(8), message(5, attempt=3), message(6, attempt=3))
    position = server.feed.position
    assert server.taken() == [(0, b"5"), (1, b"6"), (2, b"8")]
    assert position.redelivered_count == 2
    assert position.list_attempts() == [(0, 2, 3)]
    server.ack(0, 3)
    assert server.acked() == [5, 6, 8]


def test_message_with_max_deliveries_is_dead_lettered_and_acked() -> None:
    server = FakeServer()
    server.take(message(5, attempt=17))
    assert server.taken() == []
    assert server.broker.classes[server.broker.store.class_id_by_name["dead.7"]].ring.head == 1
    assert server.acked() == []  # It is not stored yet.
    server.store()
    assert server.burials.write_stored_acks() == {server.feed}
    assert server.acked() == [5]
    assert server.burials.write_stored_acks() == set()


def test_only_dead_lettered_messages_wait_for_their_letter() -> None:
    server = FakeServer()
    server.take(message(5), message(6, attempt=17), message(7))
    assert [payload for _, payload in server.taken()] == [b"5"]
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert [payload for _, payload in server.taken()] == [b"7"]
    server.ack(0, 3)
    assert server.acked() == [5, 7]
    assert [sequence_of(m, 0) for m in server.feed.unacked_messages()] == [
        6
    ]  # It is said to be in work.
    assert server.take(message(6, attempt=18, tail="7")) == b""  # Nor is it acknowledged now.
    assert server.taken() == []
    server.store()
    server.burials.update_feed(server.feed)
    (said,) = server.feed.pop_acked()
    assert said.reply(0).startswith(b"$JS.ACK.S.c.18.6.")  # By its latest subject.
    assert server.feed.unacked_messages() == []


def test_ack_all_waits_at_pending_dead_letter() -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.take(message(1), message(2), message(3, attempt=17), message(4))
    assert [payload for _, payload in server.taken()] == [b"1", b"2"]
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert [payload for _, payload in server.taken()] == [b"4"]
    server.ack(0, 4)
    assert server.acked() == [2]
    assert server.feed.restart_sequence == 3  # From there on another consumer is to send it again.
    server.store()
    assert server.acked() == [4]
    assert server.feed.restart_sequence == 5


@pytest.mark.parametrize("is_stored", [False, True])
def test_closing_keeps_pending_dead_letters_unacked(is_stored: bool) -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.take(message(1), message(2, attempt=17), message(3), message(4))
    server.taken()
    server.broker.subscription_manager.notify_position(server.feed.position)
    server.taken()
    server.ack(0, 1)
    server.ack(2, 3)
    assert server.acked() == [1]
    owed = server.feed.unacked_on_exit([(3, 4, 2.0)])
    assert owed is not None
    owed = owed.resolve_dead_letters(is_stored)
    assert owed is not None
    assert owed.sequences.tolist() == [2, 3, 4]
    assert owed.delays.tolist() == [-1.0 if is_stored else 0.0, -1.0, 2.0]


def test_closing_returns_undelivered_messages() -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.take(message(1), message(2), message(3))
    server.taken()
    server.ack(0, 1)
    assert server.acked() == [1]
    server.take(message(4), message(5))  # Nobody asks the outbox for these any more.
    assert server.feed.position.window.cursor < server.feed.position.ring.head
    owed = server.feed.unacked_on_exit([])
    assert owed is not None
    assert owed.sequences.tolist() == [2, 3, 4, 5]
    assert owed.delays.tolist() == [0.0] * 4


def test_closing_returns_nothing_if_all_is_dead_lettered() -> None:
    server = FakeServer()
    server.feed.ack_all = AckAllConsumer()
    server.take(message(1, attempt=17))
    server.taken()
    owed = server.feed.unacked_on_exit([])
    assert owed is not None
    assert owed.resolve_dead_letters(is_stored=True) is None


def test_closed_feed_acks_when_dead_letter_is_stored() -> None:
    server = FakeServer()
    server.take(message(5), message(6, attempt=17))
    server.taken()
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
    chance = random.Random(seed)
    dead_letters, owed, lot, at = FeedDeadLetters(), dict[int, int](), 0, 0
    for _ in range(30):
        if chance.random() < 0.6:
            first = at + chance.randrange(3)
            at = first + chance.randrange(1, 5)
            lot += chance.randrange(2)
            dead_letters.add([(first, at)], (lot, 9))
            owed |= dict.fromkeys(range(first, at), lot)
        else:
            reached = chance.randrange(lot + 1)
            dead_letters.remove_stored(lambda mark, reached=reached: mark[0] <= reached)  # type: ignore[misc]
            owed = {number: mark for number, mark in owed.items() if mark > reached}
        begin, end = sorted(chance.choices(range(at + 2), k=2))
        assert dead_letters.pending_flags(begin, end).tolist() == [
            n in owed for n in range(begin, end)
        ]
        assert dead_letters.limit_floor(end) == min([end, *owed])
        assert bool(dead_letters) == bool(owed)


def test_terminates_invalid_messages() -> None:
    server = FakeServer()
    good = encode(Envelope(channel="a"), b"x")
    said = server.take(
        message(1, b"a<\r\n>b"),
        message(2, b"\xff", head=ENVELOPE),
        message(3, good, head=ENVELOPE),
        message(4, b"x" * (1 << 20)),
        message(5),
        b"MSG s 2 elsewhere 1\r\nx\r\n",
    )
    assert said.count(b" 5\r\n+TERM\r\n") == 3
    assert [payload for _, payload in server.taken()] == [b"x", b"5"]
    assert server.feed.statistics().invalid_count == 4


def test_returns_messages_with_their_backoff() -> None:
    server = FakeServer()
    server.take(*(message(n) for n in range(1, 5)))
    server.taken()
    server.ack(1, 2)
    server.acked()
    given = server.feed.messages_to_return([(2, 3, 1.5)])
    found = {sequence_of(m, row): pause for m, pause in given for row in range(m.count)}
    assert found == {1: 0.0, 3: 1.5, 4: 0.0}
    server.broker.close_session(server.session)
    assert server.ended == [False]


def test_requests_only_what_fits() -> None:
    server = FakeServer()
    feed = server.feed
    assert feed.request_size() == FETCH_MESSAGES_MAX
    feed.requested_count = feed.request_size()
    assert feed.request_size() == 0
    server.take(*(message(n) for n in range(1, 101)))
    assert feed.requested_count == FETCH_MESSAGES_MAX - 100
    assert feed.request_size() == 0  # These are not acknowledged.
    server.taken()
    server.ack(0, 100)
    feed.requested_count = 0
    assert feed.request_size() == FETCH_MESSAGES_MAX


@given(st.integers(0, 10**6))
def test_each_message_is_delivered_and_acked_once(seed: int) -> None:
    """Compare with a set of acknowledged messages, for any order and repetition."""
    chance = random.Random(seed)
    server = FakeServer()
    following, sent, done, said = 1, dict[int, int](), set[int](), set[int]()
    attempts = dict[int, int]()
    for _ in range(30):
        match chance.randrange(4):
            case 0:
                some = range(following, following + chance.randrange(1, 40))
                following = some.stop
                server.take(*(message(n) for n in some))
                attempts.update(dict.fromkeys(some, 1))
            case 1 if following > 1:
                again = sorted({chance.randrange(1, following) for _ in range(3)})
                for sequence in again:
                    attempts[sequence] += 1
                server.take(*(message(n, attempt=attempts[n]) for n in again))
            case 2:
                for number, payload in server.taken():
                    assert number not in sent
                    sent[number] = int(payload)
            case _ if sent:
                first = chance.randrange(0, max(sent) + 1)
                last = min(max(sent) + 1, first + chance.randrange(1, 9))
                server.ack(first, last)
                done |= {sent[number] for number in range(first, last) if number in sent}
        fresh = server.acked()
        assert not said & set(fresh)
        said |= set(fresh)
        assert said == done
        assert not server.feed.position.check_invariants()
    assert len(set(sent.values())) == len(sent)
    left = {sequence_of(m, row) for m in server.feed.unacked_messages() for row in range(m.count)}
    assert left == set(range(1, following)) - done


@pytest.mark.parametrize("count", [1, 40])
def test_full_ring_accepts_the_rest_later(count: int) -> None:
    server = FakeServer()
    server.feed.position.ring.messages_max = 16
    server.take(*(message(n) for n in range(1, count + 1)))
    assert len(server.taken()) == min(count, 16)
    assert server.feed.request_size() == (0 if count > 16 else 16 - count + FETCH_MESSAGES_MAX - 16)
    server.ack(0, 16)
    assert server.acked() == list(range(1, min(count, 16) + 1))
    assert server.feed.fill() == b""
    server.broker.subscription_manager.notify_position(server.feed.position)
    assert len(server.taken()) == max(0, min(count - 16, 16))
