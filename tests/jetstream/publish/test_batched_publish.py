"""Fast batches, with a simulated stream and with a real server."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.commit_log import WriteBatch
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.jetstream.publish import codec
from simplebus.jetstream.publish.class_queue import WINDOW_MAX
from simplebus.jetstream.publish.codec import MILESTONE_MESSAGES
from simplebus.jetstream.publish.stream_publisher import (
    FAST_BATCH_MIN_MESSAGES,
    PATIENCE_SECONDS,
    PAUSE_SECONDS,
    StreamPublisher,
)
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import RequestReplies
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.protocol.events import Pub
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.publish.test_stream_publisher import (
    FULL,
    Stream,
    encode_publications,
    entry,
    frame,
    rounds,
)
from tests.net.test_nats_connection import linked

FAST_BATCH_SID = 2
UNKNOWN = b'{"error":{"code":400,"err_code":10208,"description":"batch publish ID unknown"}}'


class FastBatchStream(Stream):
    """Simulated stream that accepts fast batches, as a server does."""

    has_fast_batches = True

    def __init__(self) -> None:
        super().__init__()
        assert self.core.subscribe(self.publisher.inbox) == FAST_BATCH_SID
        self.core.drain_output()
        self.fast_batches: dict[bytes, int] = {}
        """Number of the last message of each open batch."""

    def sid_of(self, message: Pub) -> int:
        return FAST_BATCH_SID if message.reply.endswith(b".$FI") else 1

    def process_message(self, message: Pub) -> list[bytes]:
        body = bytes(message.body)
        block = body[: message.header_bytes].decode()
        headers = dict(line.split(": ") for line in block.split("\r\n")[1:-2])
        id_ = headers.get("Nats-Msg-Id", "")
        if self.sid_of(message) != FAST_BATCH_SID:
            return super().process_message(message)
        if self.loses():
            return []
        inbox, name, flow, mode, step, kind, _ = message.reply[len(b"_INBOX.") :].split(b".")
        assert (inbox, flow, mode, name[:1]) == (b"r", b"500", b"fail", b"r")
        replies: list[bytes] = []
        if name not in self.fast_batches:
            if int(step) != 1:
                return [UNKNOWN]
            if self.refuses():
                return [FULL]
            self.fast_batches[name] = 0
            replies = [b'{"type":"ack","seq":0,"msgs":500}']
        last_number = self.fast_batches[name]
        if int(step) != last_number + 1:
            return [b'{"type":"gap","last_seq":%d,"seq":1}' % last_number, self._end(name)]
        if last_number and self.refuses():
            return [
                b'{"type":"err","seq":%d,"error":%b}' % (last_number, FULL[9:-1]),
                self._end(name),
            ]
        is_known = bool(id_) and id_ in self.ids
        if not is_known:
            stored_message = message.subject.decode(), body[message.header_bytes :]
            self.stored.append((*stored_message, "Simplebus-Type" in headers))
            self.ids[id_] = len(self.stored)
        self.fast_batches[name] = last_number + 1
        if kind == b"2":
            return [self._end(name, is_reported_stored=not is_known)]
        return replies + [b'{"type":"ack","seq":%d,"msgs":7}' % (last_number + 1)] * (
            last_number % 7 == 6
        )

    def _end(self, name: bytes, *, is_reported_stored: bool = True) -> bytes:
        """Return the final ack of a batch. Its sequence is 0 if its last message is a duplicate."""
        template = b'{"stream":"S","seq":%d,"batch":"%b","count":%d}'
        return template % (len(self.stored) * is_reported_stored, name, self.fast_batches.pop(name))

    def answer(self, answers: list[bytes], now: float) -> int | None:
        durable_batch = None
        for event in self.core.receive(b"".join(answers), now):
            if isinstance(event, RequestReplies):
                durable_batch = self.publisher.handle_pub_acks(event, now) or durable_batch
            else:
                assert isinstance(event, ReceivedMessages)
                assert set(event.sids.tolist()) == {FAST_BATCH_SID}
                durable_batch = self.publisher.handle_fast_batch_acks(event, now) or durable_batch
        return durable_batch

    def publish_numbered(self, batch_number: int, count: int, name: str = "") -> list[bytes]:
        """Publish `count` messages. Returns their payloads."""
        payloads = [b"%d %d" % (batch_number, 1000 + number) for number in range(count)]
        frames_ = [frame(payload, 1000 * batch_number + n) for n, payload in enumerate(payloads)]
        self.publisher.append_batch(WriteBatch(batch_number, [entry(*frames_, name=name)]))
        return payloads

    def payloads(self) -> list[bytes]:
        return [payload for _, payload, _ in self.stored]


def create_open_stream() -> FastBatchStream:
    stream = FastBatchStream()
    stream.publisher.open_classes.add(7)
    return stream


def test_anonymous_fast_batch_has_ids_on_milestones() -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    assert stream.payloads() == expected
    milestone_rows = [31, 63, 95, 99]
    assert list(stream.ids) == ["", *(f":r:{number:010}" for number in milestone_rows)]
    assert stream.answer(answers[:-1], 0.0) is None
    assert stream.publisher.statistics().in_flight_count == 100 - 98
    assert stream.answer(answers[-1:], 0.0) == 1
    assert stream.publisher.statistics().stored == 100
    assert stream.publisher.is_empty


def test_few_messages_are_published_singly() -> None:
    stream = create_open_stream()
    stream.publish_numbered(1, FAST_BATCH_MIN_MESSAGES - 1)
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    assert len(answers) == len(stream.ids) == FAST_BATCH_MIN_MESSAGES - 1
    assert stream.answer(answers, 0.0) == 1


def test_named_fast_batch_has_ids_on_all_messages() -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    assert len(answers) < 20
    assert list(stream.ids) == [f"pub:p1:{1000 + number:010}" for number in range(100)]
    assert stream.answer(answers, 0.0) is None
    # The stream confirms the last message.
    assert stream.answer(stream.process_publications(), 0.0) == 1
    assert stream.payloads() == expected
    assert stream.publisher.statistics().duplicates == 0  # Only the last message was checked.


def test_waits_for_slow_named_fast_batch() -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    now = 0.0
    for answer in answers[1:-1]:
        now += 0.9 * PATIENCE_SECONDS
        assert stream.answer([answer], now) is None
        stream.publisher.publish_ready(now)
        assert stream.process_publications() == []
    assert stream.answer(answers[-1:], now) is None
    assert stream.answer(stream.process_publications(), now) == 1
    assert stream.payloads() == expected


@pytest.mark.parametrize("processed_count", [0, 1, 5])
def test_named_messages_are_stored_once_after_reconnect(processed_count: int) -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.process_publications()[:processed_count], 0.0)
    stream.core.end_connection()
    stream.connect(1.0)
    stream.publisher.handle_reconnect(1.0)
    assert stream.answer_all(1.0) == 1
    assert stream.payloads() == expected


def test_duplicate_of_inflight_message_is_not_yet_stored() -> None:
    """Repeat the messages of a batch one by one if its final ack has no sequence.

    A server sends that ack at once for duplicates of messages in flight. It acks a single duplicate
    only after the message is stored.
    """
    stream = create_open_stream()
    stream.publish_numbered(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    stream.process_publications()
    message_ = b"MSG %b %d %d\r\n%b\r\n"
    for reply in (b'{"type":"ack","seq":100}', b'{"stream":"S","seq":0,"batch":"b","count":100}'):
        stream.core.drain_output()
        (number,) = stream.publisher._queue_by_request
        subject = b"_INBOX.r.r%012d.500.fail.0100.2.$FI" % number
        assert stream.answer([message_ % (subject, FAST_BATCH_SID, len(reply), reply)], 0.0) is None
        assert stream.publisher.statistics().in_flight_count == 100
    stream.publisher.publish_ready(PAUSE_SECONDS)
    assert len(stream.process_publications()) == 100  # The messages are checked one by one.
    assert stream.publisher.statistics().in_flight_count == 0
    stream.publisher.handle_reconnect(1.0)
    stream.publisher.publish_ready(1.0)
    assert stream.answer(stream.process_publications(), 1.0) == 1


IN_FLIGHT = (
    b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id in process"}}'
)
UNASKED = b'{"stream":"S","seq":100}'


@pytest.mark.parametrize("reply", [IN_FLIGHT, UNASKED])
def test_verifies_last_message_of_fast_batch(reply: bytes) -> None:
    """Half of the messages are stored; the others belong to another batch, still in flight."""
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    assert stream.answer(answers, 0.0) is None
    number = max(stream.publisher._queue_by_request)
    stream.core.drain_output()
    head = b"MSG %b 1 %d\r\n" % (stream.core.reply_subject(number), len(reply))
    assert stream.answer([head + reply + b"\r\n"], 0.0) is None
    assert stream.publisher.statistics().in_flight_count == 0
    assert stream.publisher.statistics().refused == 100
    stream.publisher.publish_ready(PAUSE_SECONDS)
    requests = stream.process_publications()
    assert len(requests) == 100  # Checked one by one.
    assert stream.answer(requests, PAUSE_SECONDS) == 1
    assert stream.payloads() == expected


@pytest.mark.parametrize("name", ["", "pub"])
def test_accepts_repeated_check_answers(name: str) -> None:
    """Two servers may both lead a stream for a while if one is cut off from the others."""
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, name)
    stream.publisher.publish_ready(0.0)
    message_ = stream.process_publications()
    if name:
        assert stream.answer(message_, 0.0) is None
    else:
        stream.publisher.handle_reconnect(0.0)
        stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    assert stream.answer([answer for answer in answers for _ in range(2)], 0.0) == 1
    assert stream.payloads() == expected


def test_verifies_all_messages_without_completion_answer() -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) is None
    stream.core.drain_output()
    stream.publisher.publish_ready(PATIENCE_SECONDS / 2)
    assert stream.process_publications() == []
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    assert stream.answer(stream.process_publications(), PATIENCE_SECONDS) == 1
    assert stream.payloads() == expected


@pytest.mark.parametrize("lost_count", range(3))
def test_lost_milestone_answer_costs_no_extra_wait(
    lost_count: int,
) -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.process_publications()
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    answers = stream.process_publications()
    assert len(answers) == 4
    del answers[lost_count]
    assert stream.answer(answers, PATIENCE_SECONDS) == 1
    assert stream.payloads() == expected
    assert stream.publisher.is_empty


def test_late_completion_answer_counts() -> None:
    stream = create_open_stream()
    stream.publish_numbered(1, 100, "pub")
    stream.publish_numbered(2, 100, "pub2")
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.process_publications(), 0.0)
    proof = stream.process_publications()[0]  # The ack of the first batch.
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    requests = stream.process_publications()
    assert len(requests) == 200
    assert stream.answer([proof, *requests[1:]], PATIENCE_SECONDS) == 2
    assert stream.publisher.is_empty


@pytest.mark.parametrize("name", ["", "pub"])
def test_named_messages_are_repeated_singly(name: str) -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, name)
    stream.loses = lambda: True
    now = 3 * PATIENCE_SECONDS
    stream.publisher.publish_ready(0.0)
    assert stream.process_publications() == []
    stream.loses = lambda: False
    stream.publisher.publish_ready(now)
    requests = stream.process_publications()
    # Without a publisher name, milestones are checked.
    assert len(requests) == (100 if name else 4)
    assert stream.answer(requests, now) is None
    stream.publisher.publish_ready(now)
    repeated = stream.process_publications()
    assert len(repeated) == 100 if name else len(repeated) < 20
    assert stream.answer(repeated, now) == 1
    assert stream.payloads() == expected


def test_publishes_singly_without_fast_batches() -> None:
    stream = create_open_stream()
    stream.has_fast_batches = False
    stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) == 1
    assert len(stream.ids) == 100


def test_repeats_messages_after_gap_once() -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100)
    lost_count = iter([False] * 40 + [True])
    stream.loses = lambda: next(lost_count, False)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) is None
    assert stream.payloads() == expected[:40]
    stream.publisher.publish_ready(PAUSE_SECONDS / 2)
    assert stream.process_publications() == []
    assert stream.answer_all(PAUSE_SECONDS) == 1
    assert stream.payloads() == expected
    assert stream.publisher.statistics().refused == 60


@pytest.mark.parametrize("accepted_count", [0, 1, 40])
def test_retries_full_stream(accepted_count: int) -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100)
    room = iter([False] * accepted_count)
    stream.refuses = lambda: next(room, True)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) is None
    assert str(stream.publisher.last_error) == "JetStream: full (10077)"
    stream.refuses = lambda: False
    assert stream.answer_all(PAUSE_SECONDS) == 1
    assert stream.payloads() == expected
    assert stream.publisher.last_error is None


def test_late_ack_does_not_confirm_rewritten_batch() -> None:
    stream = create_open_stream()
    stream.refuses = lambda: True
    expected = stream.publish_numbered(1, 64) + stream.publish_numbered(2, 1)
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    stream.answer(answers[-1:], 0.0)
    stream.publisher.publish_ready(PAUSE_SECONDS)
    requests = stream.process_publications()
    assert len(requests) == 3
    stream.answer(answers[:-1], PAUSE_SECONDS)  # The stream refuses everything again.
    stream.answer(requests, PAUSE_SECONDS)
    stream.refuses = lambda: False
    stream.publisher.publish_ready(PAUSE_SECONDS)
    later_answers = stream.process_publications()
    assert len(stream.stored) == 1
    assert stream.answer(answers[:-1] + requests, PAUSE_SECONDS) is None
    stream.publisher.publish_ready(PAUSE_SECONDS)
    assert stream.process_publications() == []
    stream.answer(later_answers, PAUSE_SECONDS)
    assert stream.answer_all(PAUSE_SECONDS) == 2
    assert stream.payloads() == expected
    assert stream.publisher.is_empty


@given(seed=st.integers(0, 10**6), refused=st.integers(0, 40))
def test_few_messages_overtake_in_full_stream(seed: int, refused: int) -> None:
    """Batches of a named publisher, of which the first is refused; later, the stream has room at
    times.
    """
    rng = random.Random(seed)
    stream = create_open_stream()
    expected = [*stream.publish_numbered(1, 300, "pub"), *stream.publish_numbered(2, 100, "pub")]
    rooms = iter([False] * refused)
    stream.refuses = lambda: not next(rooms, False)
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.process_publications(), 0.0)
    stream.refuses = lambda: rng.random() < 0.1
    now = PAUSE_SECONDS
    for _ in rounds():
        stream.publisher.publish_ready(now)
        if stream.answer(stream.process_publications(), now) == 2:
            break
        now += rng.choice([0.0, PAUSE_SECONDS])
    stored = [expected.index(payload) for payload in stream.payloads()]
    assert sorted(stored) == list(range(400))
    furthest = 0
    for number in stored:
        furthest = max(furthest, number)
        assert furthest - number < WINDOW_MAX
    assert stream.publisher.is_empty


@pytest.mark.parametrize(
    ("accepted_count", "known_count"), [(0, 0), (31, 0), (40, 32), (99, 96), (100, 100)]
)
def test_verifies_fast_batch_after_reconnect(accepted_count: int, known_count: int) -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100)
    lost_count = iter([False] * accepted_count)
    stream.loses = lambda: next(lost_count, True)
    stream.publisher.publish_ready(0.0)
    stream.process_publications()  # The answers are lost.
    stream.core.end_connection()
    stream.loses = lambda: False
    stream.connect(1.0)
    stream.publisher.handle_reconnect(1.0)
    stream.publish_numbered(2, 1)
    stream.publisher.publish_ready(1.0)
    requests = stream.process_publications()
    # A check stores nothing, and no message overtakes another one.
    assert stream.payloads() == expected[:accepted_count]
    durable_batch = stream.answer(requests, 1.0)
    stream.publisher.publish_ready(1.0)
    assert (stream.answer(stream.process_publications(), 1.0), durable_batch) == (
        2,
        1 if accepted_count == 100 else None,
    )
    assert stream.payloads() == [*expected[:accepted_count], *expected[known_count:], b"2 1000"]


def test_repeats_unanswered_checks() -> None:
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.process_publications()
    stream.publisher.publish_ready(PATIENCE_SECONDS)  # No answer has arrived.
    requests = stream.process_publications()
    assert (
        stream.answer([requests[0].replace(b'"duplicate": true', b'"duplicate":false')], 5.0)
        is None
    )
    stream.publisher.publish_ready(5.0 + PAUSE_SECONDS)
    assert len(stream.process_publications()) == len(requests)
    stream.publisher.publish_ready(5.0 + PAUSE_SECONDS + 2 * PATIENCE_SECONDS)
    assert stream.answer(stream.process_publications(), 15.0) == 1
    assert stream.payloads() == expected


def test_does_not_repeat_unsent_checks() -> None:
    """A connection too slow for its messages would otherwise send queries without end."""
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    for times in range(2, 20):
        stream.publisher.publish_ready(times * PATIENCE_SECONDS)
    raw = stream.core.drain_output()
    assert b"".join(raw).count(b"Nats-Rollup") == codec.milestone_rows(100).size
    stream.connect(100.0)  # All messages are lost.
    stream.publisher.handle_reconnect(100.0)
    stream.publisher.publish_ready(100.0)
    assert stream.answer_all(100.0) == 1
    assert stream.payloads() == expected


def test_missing_stream_is_looked_up() -> None:
    stream = create_open_stream()
    stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.process_publications()
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    reply = stream.process_publications()[0].split()[1]
    no_responders = b"NATS/1.0 503\r\n\r\n"
    stream.answer(
        [b"HMSG %b 1 %d %d\r\n%b\r\n" % (reply, *[len(no_responders)] * 2, no_responders)], 5.0
    )
    assert stream.publisher.pop_classes_without_stream() == {7}
    assert stream.publisher.open_classes == set()


@given(st.integers(0, 10**6))
def test_faults_never_lose_fast_batch_messages(seed: int) -> None:
    rng = random.Random(seed)
    stream = create_open_stream()
    stream.refuses = lambda: rng.random() < 0.003
    stream.loses = lambda: rng.random() < 0.003
    expected: list[bytes] = []
    named_batches: set[bytes] = set()
    now, batch_count, durable_batch, fault_count = 0.0, 0, 0, 0
    for _ in rounds():
        if durable_batch == 4:
            break
        if batch_count < 4 and rng.random() < 0.5:
            batch_count += 1
            name = rng.choice(["", "pub"])
            named_batches |= {b"%d" % batch_count} if name else set()
            expected += stream.publish_numbered(
                batch_count, rng.randrange(FAST_BATCH_MIN_MESSAGES, 300), name
            )
        stream.publisher.publish_ready(now)
        answers = stream.process_publications()
        if rng.random() < 0.2:
            fault_count += 1
            answers = answers[: rng.randrange(len(answers) + 1)]
        durable_batch = stream.answer(answers, now) or durable_batch
        if rng.random() < 0.1:
            stream.core.end_connection()
            stream.connect(now)
            stream.publisher.handle_reconnect(now)
            fault_count += 1
        now += rng.choice([0.1, PAUSE_SECONDS, 2 * PATIENCE_SECONDS])
    stored = stream.payloads()
    unique = list(dict.fromkeys(stored))
    assert sorted(unique) == sorted(expected)
    known_count = [payload for payload in stored if payload.split()[0] in named_batches]
    assert len(known_count) == len(set(known_count))
    # Batches may be reordered, and named publishers repeat messages; otherwise in order.
    for batch_number in (
        batch_number
        for batch_number in range(1, batch_count + 1)
        if b"%d" % batch_number not in named_batches
    ):
        assert [p for p in unique if p.startswith(b"%d " % batch_number)] == [
            p for p in expected if p.startswith(b"%d " % batch_number)
        ]
    # A write batch is several fast batches at most. Each repeats less than a milestone.
    assert (
        len(stored) - len(unique)
        < (fault_count + stream.publisher.refused) * MILESTONE_MESSAGES + 1
    )
    assert stream.publisher.is_empty
    assert stream.publisher.statistics().in_flight_count == 0


@given(st.integers(1, 3 * MILESTONE_MESSAGES), st.integers(0, 9), st.booleans(), st.booleans())
def test_fast_batch_encoding_equals_single_messages(
    count: int, size: int, is_alike: bool, has_envelope: bool
) -> None:
    lengths = [size if is_alike else (size + row) % 5 for row in range(count)]
    payloads = [bytes([97 + row % 26]) * length for row, length in enumerate(lengths)]
    frames_ = [frame(payload, 0, has_envelope=has_envelope) for payload in payloads]
    (batch,) = codec.split_batches(frames_)
    assert bool(batch.stride) == (len(set(lengths)) == 1) or count == 1
    replies = jetstream_codec.fast_batch_reply_subjects(b"_INBOX.r", b"r9", count)
    written = codec.encode_fast_batch(
        b"s.7", batch, ids=(b":r:", np.arange(5, 5 + count)), replies=replies
    )
    kind = "\r\nSimplebus-Type: 5" if has_envelope else ""
    found = encode_publications(bytes(written))
    for row, (message, each) in enumerate(zip(found, frames_, strict=True)):
        step = "2" if row == count - 1 else "0" if row == 0 else "1"
        milestone = row % MILESTONE_MESSAGES == MILESTONE_MESSAGES - 1 or row == count - 1
        block = f"\r\nNats-Msg-Id: :r:{5 + row:010}{kind}" if milestone else kind
        block = f"NATS/1.0{block}\r\n\r\n" if block else ""
        reply = f"_INBOX.r.r9.500.fail.{row + 1:04}.{step}.$FI"
        inner = each[HEADER_BYTES:-DELIMITER_BYTES]
        assert (message.subject, message.reply) == (b"s.7", reply.encode())
        assert message.body == block.encode() + inner


@pytest.mark.parametrize(
    ("payload", "stored", "is_last", "code"),
    [
        (b'{"type":"ack","seq":12,"msgs":500}', 12, False, None),
        (b'{"type":"gap","last_seq":4,"seq":5}', -1, False, None),
        (b'{"type":"err","seq":4,"error":{"err_code":10077}}', -1, False, 10077),
        (b'{"stream":"S","seq":11,"batch":"a","count":3}', 3, True, None),
        (b'{"error":{"code":400,"err_code":10208},"stream":"S","seq":0}', -1, True, 10208),
        (b'{"stream":"S","seq":11}', -1, True, 0),
        (b'{"stream":"S","seq":0,"batch":"b","count":100}', -1, True, 0),
        (b'{"stream":"S","seq":0,"batch":"b","count":0}', 0, True, None),
        (b'{"type":"ack","seq":-1}', -1, False, 0),
        (b"", -1, False, 0),
        (b"[" * 5000, -1, False, 0),
    ],
)
def test_parses_fast_batch_replies(
    payload: bytes, stored: int, is_last: bool, code: int | None
) -> None:
    parsed = jetstream_codec.parse_fast_batch_reply(b"", payload)
    assert (parsed.stored, parsed.is_last) == (stored, is_last)
    assert (parsed.error and parsed.error.code) == code


async def test_server_stores_fast_batch_and_knows_milestones(
    jetstream_server: NatsServer,
) -> None:
    count = 10 * MILESTONE_MESSAGES + 3
    async with linked(jetstream_server.url) as (link, processed_count):
        config = {"name": "CHAIN", "subjects": ["chain"], "storage": "memory"}
        stream_info = await link.api_request(
            "STREAM.CREATE.CHAIN", {**config, "allow_batched": True}
        )
        assert stream_info["config"]["allow_batched"] is True
        publisher = StreamPublisher(
            link.core,
            subject=lambda class_id: "chain",
            get_instance=lambda name: "",
            run_id="r",
            has_fast_batches=lambda class_id: True,
        )
        link.core.subscribe(publisher.inbox)
        publisher.open_classes.add(7)
        publisher.append_batch(WriteBatch(1, [entry(*(frame(b"%d" % n, 0) for n in range(count)))]))
        publisher.publish_ready(0.0)
        link.flush()
        # The batch's answers are ignored, and the messages are checked.
        last = b"%04d.2.$FI" % count
        await processed_count.until(
            lambda: any(
                e.subject(-1).endswith(last)
                for e in processed_count.all(ReceivedMessages)
                if e.count
            )
        )
        publisher.handle_reconnect(1.0)
        publisher.publish_ready(1.0)
        link.flush()
        await processed_count.until(
            lambda: sum(e.messages.count for e in processed_count.all(RequestReplies)) == 11
        )
        assert [
            publisher.handle_pub_acks(each, 1.0) for each in processed_count.all(RequestReplies)
        ][-1] == 1
        info = await link.api_request("STREAM.INFO.CHAIN")
        assert info["state"]["messages"] == count  # A check stores nothing.
        unknown_batch_check = jetstream_codec.encode_stored_check(
            b"chain", 1, [b":r:none"], [link.core.reply_subject(10**9)]
        )
        link.core.write(unknown_batch_check)
        link.flush()
        await processed_count.until(
            lambda: sum(e.messages.count for e in processed_count.all(RequestReplies)) == 12
        )
        messages = processed_count.all(RequestReplies)[-1].messages
        assert jetstream_codec.parse_pub_acks(messages).errors[0].code == jetstream_codec.NO_ROLLUP


async def test_server_stores_repeated_named_batch_once(
    jetstream_server: NatsServer,
) -> None:
    ranges = [range(100), range(50, 150)]
    async with linked(jetstream_server.url) as (link, processed_count):
        config = {"name": "TWICE", "subjects": ["twice"], "storage": "memory"}
        await link.api_request("STREAM.CREATE.TWICE", {**config, "allow_batched": True})
        publishers: dict[int, StreamPublisher] = {}
        for run, run_range in zip("rs", ranges, strict=True):  # As from two stateless servers.
            publisher = StreamPublisher(
                link.core,
                subject=lambda class_id: "twice",
                get_instance=lambda name: "one",
                run_id=run,
                has_fast_batches=lambda class_id: True,
            )
            publishers[link.core.subscribe(publisher.inbox)] = publisher
            publisher.open_classes.add(7)
            publisher.append_batch(
                WriteBatch(1, [entry(*(frame(b"%d" % n, n) for n in run_range), name="pub")])
            )
            publisher.publish_ready(0.0)
        link.flush()

        def ends() -> int:
            payloads = [p for e in processed_count.all(ReceivedMessages) for p in e.all_payloads()]
            return sum(b'"count":' in payload for payload in payloads)

        await processed_count.until(lambda: ends() == len(ranges))
        for each in processed_count.all(ReceivedMessages):
            for sid, some_answers in each.split_by_sid().items():
                assert publishers[sid].handle_fast_batch_acks(some_answers, 0.0) is None
        replies_before = len(processed_count.all(RequestReplies))
        link.flush()
        await processed_count.until(
            lambda: (
                sum(len(e.numbers) for e in processed_count.all(RequestReplies)[replies_before:])
                == 2
            )
        )
        for replies in processed_count.all(RequestReplies)[replies_before:]:
            for publisher in publishers.values():
                publisher.handle_pub_acks(replies, 0.0)
        assert [publisher.is_empty for publisher in publishers.values()] == [True, True]
        info = await link.api_request("STREAM.INFO.TWICE")
        assert info["state"]["messages"] == 150


def test_ignores_oversized_request_number() -> None:
    stream = create_open_stream()
    stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    oversized = b"MSG _INBOX.r.r%b.500.fail.1.1.$FI %d 2\r\n{}\r\n" % (b"1" * 5000, FAST_BATCH_SID)
    assert stream.answer([oversized], 0.0) is None
    assert stream.answer(answers, 0.0) == 1
