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
TURNS_MAX = 2 * PUBLISHERS_MAX
"""More rounds than any of these tests needs, with any losses."""


def turns() -> Iterator[None]:
    """For a loop that is left before they are over."""
    for _ in range(TURNS_MAX):
        yield
    raise AssertionError("it hangs")


def encode_publications(raw: bytes) -> list[Pub]:
    """Parse the PUB and HPUB commands that a client has written."""
    reader, buffer = LineParser(NatsLimits()), bytearray(raw)
    reader.accepts_headers = True
    at, found = 0, list[Pub]()
    while at < len(buffer):
        begin, at = at, reader.parse_command(buffer, at, len(buffer))
        assert at > begin
        message = reader.pop_event()
        assert isinstance(message, Pub)
        found.append(replace(message, body=memoryview(bytes(message.body))))
        message.body.release()
    return found


class Stream:
    """Simulated JetStream stream: a list of stored messages, and the message ids it remembers."""

    has_fast_batches = False
    looks_first = False
    """Whether what it knows is never refused."""

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
        """Subject, payload, and whether it has an envelope."""
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
        """Deal with what is published at this time, and what comes behind it, until nothing does,
        each answered so often. Returns the last lot that has reached it."""
        last: int | None = None
        for _ in turns():
            self.publisher.publish_ready(now)
            answers = self.take()
            if not answers:
                break
            for _ in range(times):
                last = self.answer(answers, now) or last
        return last

    def take(self) -> list[bytes]:
        """Deal with what was published. Returns the answers."""
        return [answer for message in self.said() for answer in self.answers_to(message)]

    def answers_to(self, message: Pub) -> list[bytes]:
        """Deal with one. Returns the answers to it as they are sent."""
        head = b"MSG %b %d " % (message.reply, self.sid_of(message))
        return [b"%b%d\r\n%b\r\n" % (head, len(each), each) for each in self.hear(message)]

    def said(self) -> list[Pub]:
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

    def hear(self, message: Pub) -> list[bytes]:
        """Deal with one. Returns the answers to it."""
        body = bytes(message.body)
        block, payload = body[: message.header_bytes], body[message.header_bytes :]
        headers = dict(line.split(": ") for line in block.decode().split("\r\n")[1:-2])
        if self.loses():
            return []
        if "Nats-Rollup" in headers:
            return [self.whether(headers["Nats-Msg-Id"])]
        known = self.ids.get(headers["Nats-Msg-Id"])
        if self.refuses() and not (self.looks_first and known):
            return [FULL]
        if known is None:
            self.stored.append((message.subject.decode(), payload, "Simplebus-Type" in headers))
            known = self.ids[headers["Nats-Msg-Id"]] = len(self.stored)
            answer: dict[str, object] = {"stream": "S", "seq": known}
        else:
            answer = {"stream": "S", "seq": known, "duplicate": True}
        return [json.dumps(answer, separators=(",", ":")).encode()]

    def whether(self, id_: str) -> bytes:
        """Return a duplicate ack if the message id is known, else a rollup error."""
        if id_ in self.ids:
            return b'{"stream":"S","seq":%d,"duplicate": true}' % self.ids[id_]
        return b'{"error":{"code":500,"err_code":10111,"description":"rollup not permitted"}}'

    def answer(self, answers: list[bytes], now: float) -> int | None:
        reached = None
        for event in self.core.receive(b"".join(answers), now):
            assert isinstance(event, RequestReplies)
            reached = self.publisher.handle_pub_acks(event, now) or reached
        return reached


def frame(payload: bytes, number: int, *, has_envelope: bool = False, class_id: int = 7) -> bytes:
    kind = frames.ENVELOPE if has_envelope else frames.MESSAGE
    content = encode(Envelope(channel="a.b"), payload) if has_envelope else payload
    return frames.encode(kind, class_id=class_id, message_id=number, content=content)


def entry(*whole: bytes, name: str = "", class_id: int = 7) -> JournalEntry:
    made = JournalEntry(class_id, 0, 0.0)
    for each in whole:
        made.append_frames(1, each, name)
    return made


def test_write_batch_is_durable_when_all_messages_are() -> None:
    stream = Stream()
    whole = [frame(b"%d" % n, n) for n in range(5)]
    stream.publisher.append_batch(WriteBatch(1, [entry(*whole, name="pub")]))
    assert stream.publisher.publish_ready(0.0) == {7}  # It needs a stream.
    stream.publisher.open_classes.add(7)
    assert stream.publisher.publish_ready(0.0) == set()
    answers = stream.take()
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
    assert stream.answer(stream.take(), 0.0) == 2
    assert list(stream.ids) == [":r:0000000000", "other:r:0000000000", ":r:0000000001"]
    content = encode(Envelope(channel="a.b"), b"c")
    assert stream.stored == [("s.7", b"a", False), ("s.7", content, True), ("s.8", b"b", False)]


def test_escapes_publisher_instance_in_header() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.publisher.append_batch(WriteBatch(1, [entry(frame(b"a", 0), name="odd")]))
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) == 1
    assert list(stream.ids) == ["odd:a%0D%0ANats-Rollup:%20all:0000000000"]


def test_write_batches_become_durable_in_order() -> None:
    stream = Stream()
    stream.publisher.open_classes |= {7, 8}
    stream.publisher.append_batch(WriteBatch(1, [entry(frame(b"a", 0))]))
    stream.publisher.append_batch(WriteBatch(2, [entry(frame(b"b", 0, class_id=8), class_id=8)]))
    stream.publisher.publish_ready(0.0)
    first, second = stream.take()
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
    assert stream.answer(stream.take(), 0.0) is None
    assert [payload for _, payload, _ in stream.stored] == [b"b"]
    assert stream.publisher.pop_durable_positions() == {8: 2}  # Another class waits for none.
    stream.publisher.resume_class(7, hold)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) == 2
    assert [payload for _, payload, _ in stream.stored] == [b"b", b"a", b"c"]
    assert stream.publisher.pop_durable_positions() == {7: 2}


def test_refusal_repeats_only_its_class() -> None:
    stream = Stream()
    stream.publisher.open_classes |= {7, 8}
    for lot in range(1, 4):
        stream.publisher.append_batch(
            WriteBatch(
                lot, [entry(frame(b"a", lot)), entry(frame(b"b", lot, class_id=8), class_id=8)]
            )
        )
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    refused = [row for row, (subject, _, _) in enumerate(stream.stored) if subject == "s.7"]
    for row in refused:
        head, _, _ = answers[row].partition(b"\r\n")
        answers[row] = b"%b %d\r\n%b\r\n" % (head.rsplit(b" ", 1)[0], len(FULL), FULL)
    assert stream.answer(answers[:-1], 0.0) is None
    assert stream.publisher.pop_durable_positions() == {8: 2}
    stream.publisher.publish_ready(PAUSE_SECONDS)
    answers = stream.take()
    assert len(answers) == 3  # The stream is asked what it has of the class that was refused.
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
    big = [frame(bytes(size), 0, class_id=class_id) for class_id in (7, 8)]
    for lot in range(1, 33):
        assert stream.publisher.full == set()
        stream.publisher.append_batch(
            WriteBatch(lot, [entry(big[0]), entry(big[1], class_id=8)][: 1 + lot % 2])
        )
    assert stream.publisher.full == {7}
    stream.publisher.resume_class(7, hold)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) is not None
    assert stream.publisher.full == set()
    for _ in turns():
        if stream.publisher.is_empty:
            break
        stream.publisher.publish_ready(0.0)
        stream.answer(stream.take(), 0.0)
    stream.publisher.pause_class(8)
    for lot in range(PENDING_PUBLICATIONS_MAX):
        assert stream.publisher.full == set()
        stream.publisher.append_batch(
            WriteBatch(33 + lot, [entry(frame(b"b", 0, class_id=8), class_id=8)])
        )
    assert stream.publisher.full == {8}


def test_blocked_classes_leave_memory_for_others() -> None:
    stream = Stream()
    classes = range(1, 11)
    stream.publisher.open_classes.update(classes)
    stream.refuses = lambda: True
    size, waiting, number, now = SHARED_BYTES // 96, dict.fromkeys(classes, 0), 0, 0.0
    for _ in turns():
        if stream.publisher.full == set(classes):
            break
        for class_id in set(classes) - stream.publisher.full:
            number += 1
            some = frame(bytes(size), number, class_id=class_id)
            stream.publisher.append_batch(WriteBatch(number, [entry(some, class_id=class_id)]))
            waiting[class_id] += len(some)
        stream.publisher.publish_ready(now)
        stream.answer(stream.take(), now)
        now += PAUSE_SECONDS
    assert sum(waiting.values()) <= SHARED_BYTES + len(classes) * (CLASS_SHARE_MIN_BYTES + size)
    stream.refuses = lambda: False
    for _ in turns():
        if not stream.publisher.full:
            break
        stream.publisher.publish_ready(now)
        stream.answer(stream.take(), now)
        now += PAUSE_SECONDS


def test_collects_messages_while_crowded() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    for lot in range(1, CROWDED_PUBLICATIONS):
        stream.publisher.append_batch(WriteBatch(lot, [entry(frame(b"a", 0))]))
    stream.publisher.publish_ready(0.0)
    assert not stream.publisher.is_crowded(0.0)
    stream.publisher.append_batch(WriteBatch(CROWDED_PUBLICATIONS, [entry(frame(b"a", 0))]))
    assert stream.publisher.is_crowded(0.0)
    assert not stream.publisher.is_crowded(
        SILENT_SECONDS
    )  # It may be held up: nobody waits for it.


def test_repeats_refused_message_once() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    verdicts = iter([False, True, False])
    stream.refuses = lambda: next(verdicts, False)
    stream.publisher.append_batch(
        WriteBatch(1, [entry(*(frame(b"%d" % n, n) for n in range(3)), name="pub")])
    )
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) is None
    assert stream.publisher.last_error is not None
    stream.publisher.publish_ready(PAUSE_SECONDS / 2)
    assert stream.take() == []
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
    stream.looks_first = True
    room, now = 17, 0.0
    stream.refuses = lambda: len(stream.stored) >= room
    for _ in turns():
        stream.publisher.publish_ready(now)
        if stream.answer(stream.take(), now) == 2:
            break
        assert stream.publisher.refusal(7) is not None
        now += PAUSE_SECONDS
        if now > 4 * PAUSE_SECONDS:  # It has forgotten all ids, each time that it has room for one.
            stream.ids.clear()
            room += 1
    assert sorted(payload for _, payload, _ in stream.stored) == sorted(payloads)
    assert stream.publisher.refusal(7) is None
    assert stream.publisher.statistics().in_flight_count == 0


def test_duplicate_pub_ack_counts_once() -> None:
    """Two servers lead the stream, as each thinks."""
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.publisher.append_batch(
        WriteBatch(1, [entry(*(frame(b"%d" % n, n) for n in range(6)), name="pub")])
    )
    stream.refuses = lambda: len(stream.stored) >= 3
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
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
    first = stream.take()
    assert stream.answer(first[:1], 2.0) is None
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    assert stream.take() == []
    stream.publisher.publish_ready(PATIENCE_SECONDS + 2.0)
    assert stream.answer(stream.take(), 7.0) == 1
    assert stream.answer(first[1:], 7.0) is None  # Nobody waits for that any more.
    assert len(stream.stored) == 2


def test_unanswering_stream_counts_as_refusing() -> None:
    """Report a stream only after repeated timeouts: one timeout may be a leader election."""
    stream = Stream()
    publisher = stream.publisher
    publisher.open_classes.add(7)
    publisher.append_batch(WriteBatch(1, [entry(frame(b"0", 0), name="pub")]))
    stream.loses = lambda: True
    told = []
    for beat in range(5):
        stream.answer_all(beat * PATIENCE_SECONDS)
        told.append(publisher.pop_refusing_classes())
    assert told == [set(), set(), set(), {7}, {7}]
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
    chance = random.Random(seed)
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.refuses = lambda: chance.random() < 0.1
    stream.loses = lambda: chance.random() < 0.1
    expected: list[bytes] = []
    now, lots, reached = 0.0, 0, 0
    for _ in turns():
        if reached == 6:
            break
        if lots < 6 and chance.random() < 0.5:
            lots += 1
            payloads = [b"%d %d" % (lots, n) for n in range(chance.randrange(1, 9))]
            named = chance.choice(["", "pub"])
            whole = [
                frame(p, 100 * lots + n, has_envelope=chance.random() < 0.3)
                for n, p in enumerate(payloads)
            ]
            stream.publisher.append_batch(WriteBatch(lots, [entry(*whole, name=named)]))
            expected += payloads
        stream.publisher.publish_ready(now)
        answers = stream.take()
        reached = stream.answer(answers, now) or reached
        now += chance.choice([0.1, PATIENCE_SECONDS])
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
        next(iter(stream.take()))
