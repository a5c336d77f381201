"""Publication of write batches, with a simulated stream that refuses and loses messages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.commit_log import JournalEntry, WriteBatch
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.jetstream.publish.class_queue import (
    CLASS_SHARE_MIN_BYTES,
    CROWDED_PUBLICATIONS,
    PENDING_BYTES_MAX,
    PENDING_PUBLICATIONS_MAX,
    PUBLISHERS_MAX,
    SHARED_BYTES,
    SILENT_SECONDS,
)
from simplebus.jetstream.publish.stream_publisher import (
    PATIENCE_SECONDS,
    PAUSE_SECONDS,
    StreamPublisher,
)
from simplebus.nats.client.client import NatsClientCore, RequestReplies
from simplebus.nats.client.encode import PING
from simplebus.nats.limits import NatsLimits
from simplebus.nats.protocol.events import Pub
from simplebus.nats.protocol.line_parser import LineParser

FULL = b'{"error":{"code":503,"err_code":10077,"description":"full"}}'
ROUNDS_MAX = 2 * PUBLISHERS_MAX
"""More rounds than any test needs, with any losses."""


def rounds() -> Iterator[None]:
    """Yield until a limit at which a loop without progress fails."""
    for _ in range(ROUNDS_MAX):
        yield
    raise AssertionError("no progress")


def encode_publications(raw: bytes) -> list[Pub]:
    """Parse the PUB and HPUB commands that a client has written."""
    reader, buffer = LineParser(NatsLimits()), bytearray(raw)
    reader.accepts_headers = True
    offset, found = 0, list[Pub]()
    while offset < len(buffer):
        start, offset = offset, reader.parse_command(buffer, offset, len(buffer))
        assert offset > start
        message = reader.pop_event()
        assert isinstance(message, Pub)
        found.append(replace(message, body=memoryview(bytes(message.body))))
        message.body.release()
    return found


class Stream:
    """Simulated JetStream stream: a list of stored messages, and the message ids it remembers."""

    has_fast_batches = False
    never_refuses_duplicates = False
    """True if duplicates are never refused."""

    def __init__(self) -> None:
        self.core = NatsClientCore(inbox="_INBOX.x")
        self.connect(0.0)
        self.publisher = StreamPublisher(
            self.core,
            subject=lambda class_id: f"s.{class_id}",
            get_instance=lambda name: {"pub": "p1", "odd": "a\r\nNats-Rollup: all"}.get(name, ""),
            run_id="r",
            has_fast_batches=lambda class_id: self.has_fast_batches,
        )
        self.stored: list[tuple[str, bytes, bool]] = []
        """Subject, payload, and True if the message has an envelope."""
        self.ids: dict[str, int] = {}
        self.refuses: Callable[[], bool] = lambda: False
        self.loses: Callable[[], bool] = lambda: False

    def connect(self, now: float) -> None:
        self.core.start_connection(now)
        list(self.core.receive(b"INFO {}\r\n", now))
        self.core.send_connect()
        self.core.drain_output()
        list(self.core.receive(b"PONG\r\n", now))

    def answer_all(self, now: float, times: int = 1) -> int | None:
        """Publish and answer until nothing is left, each message `times` times.

        Returns:
            Number of the last durable batch, if any.
        """
        last: int | None = None
        for _ in rounds():
            self.publisher.publish_ready(now)
            answers = self.process_publications()
            if not answers:
                break
            for _ in range(times):
                last = self.answer(answers, now) or last
        return last

    def process_publications(self) -> list[bytes]:
        """Process all published messages. Returns the encoded answers."""
        return [
            answer for message in self.drain_publications() for answer in self.answers_to(message)
        ]

    def answers_to(self, message: Pub) -> list[bytes]:
        """Process a message. Returns its encoded answers."""
        head = b"MSG %b %d " % (message.reply, self.sid_of(message))
        return [
            b"%b%d\r\n%b\r\n" % (head, len(each), each) for each in self.process_message(message)
        ]

    def drain_publications(self) -> list[Pub]:
        """Return the published messages. Answer each PING at once, since all before it is
        processed.
        """
        output = self.core.drain_output()
        for _ in range(output.count(PING)):
            list(self.core.receive(b"PONG\r\n", 0.0))
        return encode_publications(b"".join(each for each in output if each != PING))

    def sid_of(self, message: Pub) -> int:
        """Return the id of the subscription that receives the answer to `message`."""
        return 1

    def process_message(self, message: Pub) -> list[bytes]:
        """Process a message. Returns its answers."""
        body = bytes(message.body)
        block, payload = body[: message.header_bytes], body[message.header_bytes :]
        headers = dict(line.split(": ") for line in block.decode().split("\r\n")[1:-2])
        if self.loses():
            return []
        if "Nats-Rollup" in headers:
            return [self.check_reply(headers["Nats-Msg-Id"])]
        sequence = self.ids.get(headers["Nats-Msg-Id"])
        if self.refuses() and not (self.never_refuses_duplicates and sequence):
            return [FULL]
        if sequence is None:
            self.stored.append((message.subject.decode(), payload, "Simplebus-Type" in headers))
            sequence = self.ids[headers["Nats-Msg-Id"]] = len(self.stored)
            answer: dict[str, object] = {"stream": "S", "seq": sequence}
        else:
            answer = {"stream": "S", "seq": sequence, "duplicate": True}
        return [json.dumps(answer, separators=(",", ":")).encode()]

    def check_reply(self, id_: str) -> bytes:
        """Return a duplicate ack if the message id is known, else a rollup error."""
        if id_ in self.ids:
            return b'{"stream":"S","seq":%d,"duplicate": true}' % self.ids[id_]
        return b'{"error":{"code":500,"err_code":10111,"description":"rollup not permitted"}}'

    def answer(self, answers: list[bytes], now: float) -> int | None:
        durable_batch = None
        for event in self.core.receive(b"".join(answers), now):
            assert isinstance(event, RequestReplies)
            durable_batch = self.publisher.handle_pub_acks(event, now) or durable_batch
        return durable_batch


def frame(payload: bytes, number: int, *, has_envelope: bool = False, class_id: int = 7) -> bytes:
    kind = frames.ENVELOPE if has_envelope else frames.MESSAGE
    content = encode(Envelope(channel="a.b"), payload) if has_envelope else payload
    return frames.encode(kind, class_id=class_id, message_id=number, content=content)


def entry(*frames_: bytes, name: str = "", class_id: int = 7) -> JournalEntry:
    journal_entry = JournalEntry(class_id, 0, 0.0)
    for each in frames_:
        journal_entry.append_frames(1, each, name)
    return journal_entry


def test_write_batch_is_durable_when_all_messages_are() -> None:
    stream = Stream()
    frames_ = [frame(b"%d" % n, n) for n in range(5)]
    stream.publisher.append_batch(WriteBatch(1, [entry(*frames_, name="pub")]))
    assert stream.publisher.publish_ready(0.0) == {7}  # The class has no stream yet.
    stream.publisher.open_classes.add(7)
    assert stream.publisher.publish_ready(0.0) == set()
    answers = stream.process_publications()
    assert stream.answer(answers[:4], 0.1) is None
    assert stream.answer(answers[4:], 0.1) == 1
    assert stream.stored == [("s.7", b"%d" % n, False) for n in range(5)]
    assert list(stream.ids) == [f"pub:p1:{n:010}" for n in range(5)]
    assert stream.publisher.is_empty
    assert stream.publisher.statistics().stored == 5


def test_anonymous_messages_use_run_id() -> None:
    stream = Stream()
    stream.publisher.open_classes |= {7, 8}
    stream.publisher.append_batch(
        WriteBatch(1, [entry(frame(b"a", 0)), entry(frame(b"b", 0, class_id=8), class_id=8)])
    )
    stream.publisher.append_batch(
        WriteBatch(2, [entry(frame(b"c", 0, has_envelope=True), name="other")])
    )
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) == 2
    assert list(stream.ids) == [":r:0000000000", "other:r:0000000000", ":r:0000000001"]
    content = encode(Envelope(channel="a.b"), b"c")
    assert stream.stored == [("s.7", b"a", False), ("s.7", content, True), ("s.8", b"b", False)]


def test_escapes_publisher_instance_in_header() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.publisher.append_batch(WriteBatch(1, [entry(frame(b"a", 0), name="odd")]))
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) == 1
    assert list(stream.ids) == ["odd:a%0D%0ANats-Rollup:%20all:0000000000"]


def test_write_batches_become_durable_in_order() -> None:
    stream = Stream()
    stream.publisher.open_classes |= {7, 8}
    stream.publisher.append_batch(WriteBatch(1, [entry(frame(b"a", 0))]))
    stream.publisher.append_batch(WriteBatch(2, [entry(frame(b"b", 0, class_id=8), class_id=8)]))
    stream.publisher.publish_ready(0.0)
    first, second = stream.process_publications()
    assert stream.answer([second], 0.0) is None
    assert stream.answer([first], 0.0) == 2


def test_paused_class_waits_in_order() -> None:
    stream = Stream()
    stream.publisher.open_classes |= {7, 8}
    hold = stream.publisher.pause_class(7)
    stream.publisher.append_batch(
        WriteBatch(1, [entry(frame(b"a", 0)), entry(frame(b"b", 0, class_id=8), class_id=8)])
    )
    stream.publisher.append_batch(WriteBatch(2, [entry(frame(b"c", 1))]))
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) is None
    assert [payload for _, payload, _ in stream.stored] == [b"b"]
    assert stream.publisher.pop_durable_positions() == {8: 2}  # Other classes do not wait.
    stream.publisher.resume_class(7, hold)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) == 2
    assert [payload for _, payload, _ in stream.stored] == [b"b", b"a", b"c"]
    assert stream.publisher.pop_durable_positions() == {7: 2}


def test_refusal_repeats_only_its_class() -> None:
    stream = Stream()
    stream.publisher.open_classes |= {7, 8}
    for batch_number in range(1, 4):
        stream.publisher.append_batch(
            WriteBatch(
                batch_number,
                [
                    entry(frame(b"a", batch_number)),
                    entry(frame(b"b", batch_number, class_id=8), class_id=8),
                ],
            )
        )
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    refused = [row for row, (subject, _, _) in enumerate(stream.stored) if subject == "s.7"]
    for row in refused:
        head, _, _ = answers[row].partition(b"\r\n")
        answers[row] = b"%b %d\r\n%b\r\n" % (head.rsplit(b" ", 1)[0], len(FULL), FULL)
    assert stream.answer(answers[:-1], 0.0) is None
    assert stream.publisher.pop_durable_positions() == {8: 2}
    stream.publisher.publish_ready(PAUSE_SECONDS)
    answers = stream.process_publications()
    assert len(answers) == 3  # The refused messages of the class are checked at the stream.
    stream.answer(answers[:2], PAUSE_SECONDS)
    assert stream.publisher.pop_durable_positions() == {}
    stream.answer(answers[2:], PAUSE_SECONDS)
    assert stream.publisher.pop_durable_positions() == {7: 3}
    assert stream.publisher.statistics().refused == 3


def test_class_with_long_queue_is_full() -> None:
    stream = Stream()
    stream.publisher.open_classes |= {7, 8}
    hold = stream.publisher.pause_class(7)
    size = PENDING_BYTES_MAX // 32
    big_frames = [frame(bytes(size), 0, class_id=class_id) for class_id in (7, 8)]
    for batch_number in range(1, 33):
        assert stream.publisher.full == set()
        stream.publisher.append_batch(
            WriteBatch(
                batch_number,
                [entry(big_frames[0]), entry(big_frames[1], class_id=8)][: 1 + batch_number % 2],
            )
        )
    assert stream.publisher.full == {7}
    stream.publisher.resume_class(7, hold)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) is not None
    assert stream.publisher.full == set()
    for _ in rounds():
        if stream.publisher.is_empty:
            break
        stream.publisher.publish_ready(0.0)
        stream.answer(stream.process_publications(), 0.0)
    stream.publisher.pause_class(8)
    for batch_number in range(PENDING_PUBLICATIONS_MAX):
        assert stream.publisher.full == set()
        stream.publisher.append_batch(
            WriteBatch(33 + batch_number, [entry(frame(b"b", 0, class_id=8), class_id=8)])
        )
    assert stream.publisher.full == {8}


def test_blocked_classes_leave_memory_for_others() -> None:
    stream = Stream()
    classes = range(1, 11)
    stream.publisher.open_classes.update(classes)
    stream.refuses = lambda: True
    size, waiting, number, now = SHARED_BYTES // 96, dict.fromkeys(classes, 0), 0, 0.0
    for _ in rounds():
        if stream.publisher.full == set(classes):
            break
        for class_id in set(classes) - stream.publisher.full:
            number += 1
            large_frame = frame(bytes(size), number, class_id=class_id)
            stream.publisher.append_batch(
                WriteBatch(number, [entry(large_frame, class_id=class_id)])
            )
            waiting[class_id] += len(large_frame)
        stream.publisher.publish_ready(now)
        stream.answer(stream.process_publications(), now)
        now += PAUSE_SECONDS
    assert sum(waiting.values()) <= SHARED_BYTES + len(classes) * (CLASS_SHARE_MIN_BYTES + size)
    stream.refuses = lambda: False
    for _ in rounds():
        if not stream.publisher.full:
            break
        stream.publisher.publish_ready(now)
        stream.answer(stream.process_publications(), now)
        now += PAUSE_SECONDS


def test_collects_messages_while_crowded() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    for batch_number in range(1, CROWDED_PUBLICATIONS):
        stream.publisher.append_batch(WriteBatch(batch_number, [entry(frame(b"a", 0))]))
    stream.publisher.publish_ready(0.0)
    assert not stream.publisher.is_crowded(0.0)
    stream.publisher.append_batch(WriteBatch(CROWDED_PUBLICATIONS, [entry(frame(b"a", 0))]))
    assert stream.publisher.is_crowded(0.0)
    assert not stream.publisher.is_crowded(SILENT_SECONDS)  # A delay affects no other class.


def test_repeats_refused_message_once() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    verdicts = iter([False, True, False])
    stream.refuses = lambda: next(verdicts, False)
    stream.publisher.append_batch(
        WriteBatch(1, [entry(*(frame(b"%d" % n, n) for n in range(3)), name="pub")])
    )
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) is None
    assert stream.publisher.last_error is not None
    stream.publisher.publish_ready(PAUSE_SECONDS / 2)
    assert stream.process_publications() == []
    assert stream.answer_all(PAUSE_SECONDS) == 1
    assert [payload for _, payload, _ in stream.stored] == [b"0", b"2", b"1"]
    assert stream.publisher.statistics().refused == 1


@pytest.mark.parametrize("name", ["", "pub"])
def test_long_full_stream_stores_forgotten_ids_once(name: str) -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    payloads = [b"%d" % n * (1 + n % 2) for n in range(50)]
    stream.publisher.append_batch(
        WriteBatch(1, [entry(*(frame(p, n) for n, p in enumerate(payloads[:20])), name=name)])
    )
    stream.publisher.append_batch(
        WriteBatch(2, [entry(*(frame(p, 20 + n) for n, p in enumerate(payloads[20:])), name=name)])
    )
    stream.never_refuses_duplicates = True
    free_count, now = 17, 0.0
    stream.refuses = lambda: len(stream.stored) >= free_count
    for _ in rounds():
        stream.publisher.publish_ready(now)
        if stream.answer(stream.process_publications(), now) == 2:
            break
        assert stream.publisher.refusal(7) is not None
        now += PAUSE_SECONDS
        # All ids have expired each time that there is space for a message.
        if now > 4 * PAUSE_SECONDS:
            stream.ids.clear()
            free_count += 1
    assert sorted(payload for _, payload, _ in stream.stored) == sorted(payloads)
    assert stream.publisher.refusal(7) is None
    assert stream.publisher.statistics().in_flight_count == 0


def test_duplicate_pub_ack_counts_once() -> None:
    """Two servers both act as the leader of the stream."""
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.publisher.append_batch(
        WriteBatch(1, [entry(*(frame(b"%d" % n, n) for n in range(6)), name="pub")])
    )
    stream.refuses = lambda: len(stream.stored) >= 3
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    assert stream.answer(answers + answers[:3], 0.0) is None
    stream.refuses = lambda: False
    assert stream.answer_all(PAUSE_SECONDS, times=2) == 1
    assert len(stream.stored) == 6


def test_verifies_only_without_progress() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.publisher.append_batch(
        WriteBatch(1, [entry(*(frame(b"%d" % n, n) for n in range(2)), name="pub")])
    )
    stream.publisher.publish_ready(0.0)
    first = stream.process_publications()
    assert stream.answer(first[:1], 2.0) is None
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    assert stream.process_publications() == []
    stream.publisher.publish_ready(PATIENCE_SECONDS + 2.0)
    assert stream.answer(stream.process_publications(), 7.0) == 1
    assert stream.answer(first[1:], 7.0) is None  # The answer is not expected any more.
    assert len(stream.stored) == 2


def test_unanswering_stream_counts_as_refusing() -> None:
    """Report a stream only after repeated timeouts: one timeout may be a leader election."""
    stream = Stream()
    publisher = stream.publisher
    publisher.open_classes.add(7)
    publisher.append_batch(WriteBatch(1, [entry(frame(b"0", 0), name="pub")]))
    stream.loses = lambda: True
    refusals = []
    for tick in range(5):
        stream.answer_all(tick * PATIENCE_SECONDS)
        refusals.append(publisher.pop_refusing_classes())
    assert refusals == [set(), set(), set(), {7}, {7}]
    refusal = publisher.refusal(7)
    assert refusal is not None
    assert "no answer from the stream of 's.7'" in refusal.sentence
    stream.loses = lambda: False
    assert stream.answer_all(5 * PATIENCE_SECONDS) == 1
    assert publisher.refusal(7) is None


def test_reconnect_verifies_unconfirmed_messages() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.publisher.append_batch(WriteBatch(1, [entry(frame(b"a", 0))]))
    stream.publisher.publish_ready(0.0)
    stream.core.end_connection()
    stream.publisher.append_batch(WriteBatch(2, [entry(frame(b"b", 0))]))
    stream.publisher.publish_ready(1.0)
    stream.connect(1.0)
    stream.publisher.handle_reconnect(1.0)
    assert stream.answer_all(1.0) == 2
    assert [payload for _, payload, _ in stream.stored] == [b"a", b"b"]


@given(st.integers(0, 10**6))
def test_faults_never_lose_or_duplicate_publications(seed: int) -> None:
    rng = random.Random(seed)
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.refuses = lambda: rng.random() < 0.1
    stream.loses = lambda: rng.random() < 0.1
    expected: list[bytes] = []
    now, batch_count, durable_batch = 0.0, 0, 0
    for _ in rounds():
        if durable_batch == 6:
            break
        if batch_count < 6 and rng.random() < 0.5:
            batch_count += 1
            payloads = [b"%d %d" % (batch_count, n) for n in range(rng.randrange(1, 9))]
            publisher_name = rng.choice(["", "pub"])
            frames_ = [
                frame(p, 100 * batch_count + n, has_envelope=rng.random() < 0.3)
                for n, p in enumerate(payloads)
            ]
            stream.publisher.append_batch(
                WriteBatch(batch_count, [entry(*frames_, name=publisher_name)])
            )
            expected += payloads
        stream.publisher.publish_ready(now)
        answers = stream.process_publications()
        durable_batch = stream.answer(answers, now) or durable_batch
        now += rng.choice([0.1, PATIENCE_SECONDS])
    stored = [p[-len(p.split(b"b")[-1]) :] if e else p for _, p, e in stream.stored]
    assert sorted(stored) == sorted(expected)
    assert stream.publisher.is_empty
    assert stream.publisher.statistics().in_flight_count == 0


def test_writes_nothing_without_connection() -> None:
    stream = Stream()
    stream.core.end_connection()
    stream.publisher.append_batch(WriteBatch(1, [entry(frame(b"a", 0))]))
    assert stream.publisher.publish_ready(0.0) == set()
    with pytest.raises(StopIteration):
        next(iter(stream.process_publications()))
