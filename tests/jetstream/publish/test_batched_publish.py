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
    turns,
)
from tests.net.test_nats_connection import linked

CHAIN_SID = 2
UNKNOWN = b'{"error":{"code":400,"err_code":10208,"description":"batch publish ID unknown"}}'


class ChainStream(Stream):
    """One that takes chains, as a server does."""

    has_fast_batches = True

    def __init__(self) -> None:
        super().__init__()
        assert self.core.subscribe(self.publisher.inbox) == CHAIN_SID
        self.core.drain_output()
        self.chains: dict[bytes, int] = {}
        """How far each has come that has not ended."""

    def sid_of(self, message: Pub) -> int:
        return CHAIN_SID if message.reply.endswith(b".$FI") else 1

    def hear(self, message: Pub) -> list[bytes]:
        body = bytes(message.body)
        block = body[: message.header_bytes].decode()
        headers = dict(line.split(": ") for line in block.split("\r\n")[1:-2])
        id_ = headers.get("Nats-Msg-Id", "")
        if self.sid_of(message) != CHAIN_SID:
            return super().hear(message)
        if self.loses():
            return []
        inbox, name, flow, mode, step, kind, _ = message.reply[len(b"_INBOX.") :].split(b".")
        assert (inbox, flow, mode, name[:1]) == (b"r", b"500", b"fail", b"r")
        said: list[bytes] = []
        if name not in self.chains:
            if int(step) != 1:
                return [UNKNOWN]
            if self.refuses():
                return [FULL]
            self.chains[name] = 0
            said = [b'{"type":"ack","seq":0,"msgs":500}']
        far = self.chains[name]
        if int(step) != far + 1:
            return [b'{"type":"gap","last_seq":%d,"seq":1}' % far, self._end(name)]
        if far and self.refuses():
            return [b'{"type":"err","seq":%d,"error":%b}' % (far, FULL[9:-1]), self._end(name)]
        is_known = bool(id_) and id_ in self.ids
        if not is_known:
            kept = message.subject.decode(), body[message.header_bytes :]
            self.stored.append((*kept, "Simplebus-Type" in headers))
            self.ids[id_] = len(self.stored)
        self.chains[name] = far + 1
        if kind == b"2":
            return [self._end(name, is_reported_stored=not is_known)]
        return said + [b'{"type":"ack","seq":%d,"msgs":7}' % (far + 1)] * (far % 7 == 6)

    def _end(self, name: bytes, *, is_reported_stored: bool = True) -> bytes:
        """Return the final ack of a batch. Its sequence is 0 if its last message is a duplicate."""
        said = b'{"stream":"S","seq":%d,"batch":"%b","count":%d}'
        return said % (len(self.stored) * is_reported_stored, name, self.chains.pop(name))

    def answer(self, answers: list[bytes], now: float) -> int | None:
        reached = None
        for event in self.core.receive(b"".join(answers), now):
            if isinstance(event, RequestReplies):
                reached = self.publisher.handle_pub_acks(event, now) or reached
            else:
                assert isinstance(event, ReceivedMessages)
                assert set(event.sids.tolist()) == {CHAIN_SID}
                reached = self.publisher.handle_fast_batch_acks(event, now) or reached
        return reached

    def put(self, lot: int, count: int, name: str = "") -> list[bytes]:
        """Have so many messages published. Returns what they say."""
        payloads = [b"%d %d" % (lot, 1000 + number) for number in range(count)]
        whole = [frame(payload, 1000 * lot + n) for n, payload in enumerate(payloads)]
        self.publisher.append_batch(WriteBatch(lot, [entry(*whole, name=name)]))
        return payloads

    def payloads(self) -> list[bytes]:
        return [payload for _, payload, _ in self.stored]


def opened() -> ChainStream:
    stream = ChainStream()
    stream.publisher.open_classes.add(7)
    return stream


def test_anonymous_fast_batch_has_ids_on_milestones() -> None:
    stream = opened()
    expected = stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    assert stream.payloads() == expected
    milestone_rows = [31, 63, 95, 99]
    assert list(stream.ids) == ["", *(f":r:{number:010}" for number in milestone_rows)]
    assert stream.answer(answers[:-1], 0.0) is None
    assert stream.publisher.statistics().in_flight_count == 100 - 98
    assert stream.answer(answers[-1:], 0.0) == 1
    assert stream.publisher.statistics().stored == 100
    assert stream.publisher.is_empty


def test_few_messages_are_published_singly() -> None:
    stream = opened()
    stream.put(1, FAST_BATCH_MIN_MESSAGES - 1)
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    assert len(answers) == len(stream.ids) == FAST_BATCH_MIN_MESSAGES - 1
    assert stream.answer(answers, 0.0) == 1


def test_named_fast_batch_has_ids_on_all_messages() -> None:
    stream = opened()
    expected = stream.put(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    assert len(answers) < 20
    assert list(stream.ids) == [f"pub:p1:{1000 + number:010}" for number in range(100)]
    assert stream.answer(answers, 0.0) is None
    assert stream.answer(stream.take(), 0.0) == 1  # The last one is stored, says the stream.
    assert stream.payloads() == expected
    assert stream.publisher.statistics().duplicates == 0  # It was only asked for the last one.


def test_waits_for_slow_named_fast_batch() -> None:
    stream = opened()
    expected = stream.put(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    now = 0.0
    for answer in answers[1:-1]:
        now += 0.9 * PATIENCE_SECONDS
        assert stream.answer([answer], now) is None
        stream.publisher.publish_ready(now)
        assert stream.take() == []
    assert stream.answer(answers[-1:], now) is None
    assert stream.answer(stream.take(), now) == 1
    assert stream.payloads() == expected


@pytest.mark.parametrize("heard", [0, 1, 5])
def test_named_messages_are_stored_once_after_reconnect(heard: int) -> None:
    stream = opened()
    expected = stream.put(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.take()[:heard], 0.0)
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
    stream = opened()
    stream.put(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    stream.take()
    begun = b"MSG %b %d %d\r\n%b\r\n"
    for said in (b'{"type":"ack","seq":100}', b'{"stream":"S","seq":0,"batch":"b","count":100}'):
        stream.core.drain_output()
        (number,) = stream.publisher._queue_by_request
        subject = b"_INBOX.r.r%012d.500.fail.0100.2.$FI" % number
        assert stream.answer([begun % (subject, CHAIN_SID, len(said), said)], 0.0) is None
        assert stream.publisher.statistics().in_flight_count == 100
    stream.publisher.publish_ready(PAUSE_SECONDS)
    assert len(stream.take()) == 100  # It is asked for one by one.
    assert stream.publisher.statistics().in_flight_count == 0
    stream.publisher.handle_reconnect(1.0)
    stream.publisher.publish_ready(1.0)
    assert stream.answer(stream.take(), 1.0) == 1


IN_FLIGHT = (
    b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id in process"}}'
)
UNASKED = b'{"stream":"S","seq":100}'


@pytest.mark.parametrize("said", [IN_FLIGHT, UNASKED])
def test_verifies_last_message_of_fast_batch(said: bytes) -> None:
    """Half of it was stored by itself, so it has a sequence; the rest is of another chain, which is
    under way still."""
    stream = opened()
    expected = stream.put(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    assert stream.answer(answers, 0.0) is None
    number = max(stream.publisher._queue_by_request)
    stream.core.drain_output()
    head = b"MSG %b 1 %d\r\n" % (stream.core.reply_subject(number), len(said))
    assert stream.answer([head + said + b"\r\n"], 0.0) is None
    assert stream.publisher.statistics().in_flight_count == 0
    assert stream.publisher.statistics().refused == 100
    stream.publisher.publish_ready(PAUSE_SECONDS)
    asked = stream.take()
    assert len(asked) == 100  # One by one.
    assert stream.answer(asked, PAUSE_SECONDS) == 1
    assert stream.payloads() == expected


@pytest.mark.parametrize("name", ["", "pub"])
def test_accepts_repeated_check_answers(name: str) -> None:
    """Two servers may both lead a stream for a while: one is cut off from the rest."""
    stream = opened()
    expected = stream.put(1, 100, name)
    stream.publisher.publish_ready(0.0)
    begun = stream.take()
    if name:
        assert stream.answer(begun, 0.0) is None
    else:
        stream.publisher.handle_reconnect(0.0)
        stream.publisher.publish_ready(0.0)
    answers = stream.take()
    assert stream.answer([each for each in answers for _ in range(2)], 0.0) == 1
    assert stream.payloads() == expected


def test_verifies_all_messages_without_completion_answer() -> None:
    stream = opened()
    expected = stream.put(1, 100, "pub")
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) is None
    stream.core.drain_output()
    stream.publisher.publish_ready(PATIENCE_SECONDS / 2)
    assert stream.take() == []
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    assert stream.answer(stream.take(), PATIENCE_SECONDS) == 1
    assert stream.payloads() == expected


@pytest.mark.parametrize("lost", range(3))
def test_lost_milestone_answer_costs_no_extra_wait(
    lost: int,
) -> None:
    stream = opened()
    expected = stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.take()
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    answers = stream.take()
    assert len(answers) == 4
    del answers[lost]
    assert stream.answer(answers, PATIENCE_SECONDS) == 1
    assert stream.payloads() == expected
    assert stream.publisher.is_empty


def test_late_completion_answer_counts() -> None:
    stream = opened()
    stream.put(1, 100, "pub")
    stream.put(2, 100, "pub2")
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.take(), 0.0)
    proof = stream.take()[0]  # Of the first one.
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    asked = stream.take()
    assert len(asked) == 200
    assert stream.answer([proof, *asked[1:]], PATIENCE_SECONDS) == 2
    assert stream.publisher.is_empty


@pytest.mark.parametrize("name", ["", "pub"])
def test_named_messages_are_repeated_singly(name: str) -> None:
    stream = opened()
    expected = stream.put(1, 100, name)
    stream.loses = lambda: True
    now = 3 * PATIENCE_SECONDS
    stream.publisher.publish_ready(0.0)
    assert stream.take() == []
    stream.loses = lambda: False
    stream.publisher.publish_ready(now)
    asked = stream.take()
    assert len(asked) == (100 if name else 4)  # Of nobody, milestone_rows are asked for.
    assert stream.answer(asked, now) is None
    stream.publisher.publish_ready(now)
    again = stream.take()
    assert len(again) == 100 if name else len(again) < 20
    assert stream.answer(again, now) == 1
    assert stream.payloads() == expected


def test_publishes_singly_without_fast_batches() -> None:
    stream = opened()
    stream.has_fast_batches = False
    stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) == 1
    assert len(stream.ids) == 100


def test_repeats_messages_after_gap_once() -> None:
    stream = opened()
    expected = stream.put(1, 100)
    lost = iter([False] * 40 + [True])
    stream.loses = lambda: next(lost, False)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) is None
    assert stream.payloads() == expected[:40]
    stream.publisher.publish_ready(PAUSE_SECONDS / 2)
    assert stream.take() == []
    assert stream.answer_all(PAUSE_SECONDS) == 1
    assert stream.payloads() == expected
    assert stream.publisher.statistics().refused == 60


@pytest.mark.parametrize("taken", [0, 1, 40])
def test_retries_full_stream(taken: int) -> None:
    stream = opened()
    expected = stream.put(1, 100)
    room = iter([False] * taken)
    stream.refuses = lambda: next(room, True)
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.take(), 0.0) is None
    assert str(stream.publisher.last_error) == "JetStream: full (10077)"
    stream.refuses = lambda: False
    assert stream.answer_all(PAUSE_SECONDS) == 1
    assert stream.payloads() == expected
    assert stream.publisher.last_error is None


def test_late_ack_does_not_confirm_rewritten_batch() -> None:
    stream = opened()
    stream.refuses = lambda: True
    expected = stream.put(1, 64) + stream.put(2, 1)
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    stream.answer(answers[-1:], 0.0)
    stream.publisher.publish_ready(PAUSE_SECONDS)
    asked = stream.take()
    assert len(asked) == 3
    stream.answer(answers[:-1], PAUSE_SECONDS)  # All that was written is refused, once more.
    stream.answer(asked, PAUSE_SECONDS)
    stream.refuses = lambda: False
    stream.publisher.publish_ready(PAUSE_SECONDS)
    since = stream.take()
    assert len(stream.stored) == 1
    assert stream.answer(answers[:-1] + asked, PAUSE_SECONDS) is None
    stream.publisher.publish_ready(PAUSE_SECONDS)
    assert stream.take() == []
    stream.answer(since, PAUSE_SECONDS)
    assert stream.answer_all(PAUSE_SECONDS) == 2
    assert stream.payloads() == expected
    assert stream.publisher.is_empty


@given(seed=st.integers(0, 10**6), refused=st.integers(0, 40))
def test_few_messages_overtake_in_full_stream(seed: int, refused: int) -> None:
    """Chains of a program with a name, of which the first is not taken at all; then there is room
    now and then."""
    chance = random.Random(seed)
    stream = opened()
    expected = [*stream.put(1, 300, "pub"), *stream.put(2, 100, "pub")]
    rooms = iter([False] * refused)
    stream.refuses = lambda: not next(rooms, False)
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.take(), 0.0)
    stream.refuses = lambda: chance.random() < 0.1
    now = PAUSE_SECONDS
    for _ in turns():
        stream.publisher.publish_ready(now)
        if stream.answer(stream.take(), now) == 2:
            break
        now += chance.choice([0.0, PAUSE_SECONDS])
    stored = [expected.index(payload) for payload in stream.payloads()]
    assert sorted(stored) == list(range(400))
    furthest = 0
    for number in stored:
        furthest = max(furthest, number)
        assert furthest - number < WINDOW_MAX
    assert stream.publisher.is_empty


@pytest.mark.parametrize(("taken", "known"), [(0, 0), (31, 0), (40, 32), (99, 96), (100, 100)])
def test_verifies_fast_batch_after_reconnect(taken: int, known: int) -> None:
    stream = opened()
    expected = stream.put(1, 100)
    lost = iter([False] * taken)
    stream.loses = lambda: next(lost, True)
    stream.publisher.publish_ready(0.0)
    stream.take()  # Nobody hears the answers.
    stream.core.end_connection()
    stream.loses = lambda: False
    stream.connect(1.0)
    stream.publisher.handle_reconnect(1.0)
    stream.put(2, 1)
    stream.publisher.publish_ready(1.0)
    asked = stream.take()
    assert stream.payloads() == expected[:taken]  # To ask stores nothing, and nothing overtakes.
    reached = stream.answer(asked, 1.0)
    stream.publisher.publish_ready(1.0)
    assert (stream.answer(stream.take(), 1.0), reached) == (2, 1 if taken == 100 else None)
    assert stream.payloads() == [*expected[:taken], *expected[known:], b"2 1000"]


def test_repeats_unanswered_checks() -> None:
    stream = opened()
    expected = stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.take()
    stream.publisher.publish_ready(PATIENCE_SECONDS)  # Nobody has said anything.
    asked = stream.take()
    assert (
        stream.answer([asked[0].replace(b'"duplicate": true', b'"duplicate":false')], 5.0) is None
    )
    stream.publisher.publish_ready(5.0 + PAUSE_SECONDS)
    assert len(stream.take()) == len(asked)
    stream.publisher.publish_ready(5.0 + PAUSE_SECONDS + 2 * PATIENCE_SECONDS)
    assert stream.answer(stream.take(), 15.0) == 1
    assert stream.payloads() == expected


def test_does_not_repeat_unsent_checks() -> None:
    """A connection too slow for its messages would otherwise send queries without end."""
    stream = opened()
    expected = stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    for times in range(2, 20):
        stream.publisher.publish_ready(times * PATIENCE_SECONDS)
    raw = stream.core.drain_output()
    assert b"".join(raw).count(b"Nats-Rollup") == codec.milestone_rows(100).size
    stream.connect(100.0)  # All of it is lost.
    stream.publisher.handle_reconnect(100.0)
    stream.publisher.publish_ready(100.0)
    assert stream.answer_all(100.0) == 1
    assert stream.payloads() == expected


def test_missing_stream_is_looked_up() -> None:
    stream = opened()
    stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    stream.take()
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    reply = stream.take()[0].split()[1]
    nobody = b"NATS/1.0 503\r\n\r\n"
    stream.answer([b"HMSG %b 1 %d %d\r\n%b\r\n" % (reply, *[len(nobody)] * 2, nobody)], 5.0)
    assert stream.publisher.pop_classes_without_stream() == {7}
    assert stream.publisher.open_classes == set()


@given(st.integers(0, 10**6))
def test_faults_never_lose_fast_batch_messages(seed: int) -> None:
    chance = random.Random(seed)
    stream = opened()
    stream.refuses = lambda: chance.random() < 0.003
    stream.loses = lambda: chance.random() < 0.003
    expected: list[bytes] = []
    named: set[bytes] = set()
    now, lots, reached, troubles = 0.0, 0, 0, 0
    for _ in turns():
        if reached == 4:
            break
        if lots < 4 and chance.random() < 0.5:
            lots += 1
            name = chance.choice(["", "pub"])
            named |= {b"%d" % lots} if name else set()
            expected += stream.put(lots, chance.randrange(FAST_BATCH_MIN_MESSAGES, 300), name)
        stream.publisher.publish_ready(now)
        answers = stream.take()
        if chance.random() < 0.2:
            troubles += 1
            answers = answers[: chance.randrange(len(answers) + 1)]
        reached = stream.answer(answers, now) or reached
        if chance.random() < 0.1:
            stream.core.end_connection()
            stream.connect(now)
            stream.publisher.handle_reconnect(now)
            troubles += 1
        now += chance.choice([0.1, PAUSE_SECONDS, 2 * PATIENCE_SECONDS])
    stored = stream.payloads()
    once = list(dict.fromkeys(stored))
    assert sorted(once) == sorted(expected)
    known = [payload for payload in stored if payload.split()[0] in named]
    assert len(known) == len(set(known))
    # In order, but that one lot may be before another one; and of a name, what is published again.
    for lot in (lot for lot in range(1, lots + 1) if b"%d" % lot not in named):
        assert [p for p in once if p.startswith(b"%d " % lot)] == [
            p for p in expected if p.startswith(b"%d " % lot)
        ]
    # A lot is several chains at most: of each, what is stored twice is less than a milestone apart.
    assert len(stored) - len(once) < (troubles + stream.publisher.refused) * MILESTONE_MESSAGES + 1
    assert stream.publisher.is_empty
    assert stream.publisher.statistics().in_flight_count == 0


@given(st.integers(1, 3 * MILESTONE_MESSAGES), st.integers(0, 9), st.booleans(), st.booleans())
def test_fast_batch_encoding_equals_single_messages(
    count: int, size: int, is_alike: bool, has_envelope: bool
) -> None:
    lengths = [size if is_alike else (size + row) % 5 for row in range(count)]
    payloads = [bytes([97 + row % 26]) * length for row, length in enumerate(lengths)]
    whole = [frame(payload, 0, has_envelope=has_envelope) for payload in payloads]
    (batch,) = codec.split_batches(whole)
    assert bool(batch.stride) == (len(set(lengths)) == 1) or count == 1
    replies = jetstream_codec.fast_batch_reply_subjects(b"_INBOX.r", b"r9", count)
    written = codec.encode_fast_batch(
        b"s.7", batch, ids=(b":r:", np.arange(5, 5 + count)), replies=replies
    )
    kind = "\r\nSimplebus-Type: 5" if has_envelope else ""
    found = encode_publications(bytes(written))
    for row, (message, each) in enumerate(zip(found, whole, strict=True)):
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
    told = jetstream_codec.parse_fast_batch_reply(b"", payload)
    assert (told.stored, told.is_last) == (stored, is_last)
    assert (told.error and told.error.code) == code


async def test_server_stores_fast_batch_and_knows_milestones(
    jetstream_server: NatsServer,
) -> None:
    count = 10 * MILESTONE_MESSAGES + 3
    async with linked(jetstream_server.url) as (link, heard):
        config = {"name": "CHAIN", "subjects": ["chain"], "storage": "memory"}
        made = await link.api_request("STREAM.CREATE.CHAIN", {**config, "allow_batched": True})
        assert made["config"]["allow_batched"] is True
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
        # What it says of the chain is not listened to; then it is asked.
        last = b"%04d.2.$FI" % count
        await heard.until(
            lambda: any(
                e.subject(-1).endswith(last) for e in heard.all(ReceivedMessages) if e.count
            )
        )
        publisher.handle_reconnect(1.0)
        publisher.publish_ready(1.0)
        link.flush()
        await heard.until(lambda: sum(e.messages.count for e in heard.all(RequestReplies)) == 11)
        assert [publisher.handle_pub_acks(each, 1.0) for each in heard.all(RequestReplies)][-1] == 1
        info = await link.api_request("STREAM.INFO.CHAIN")
        assert info["state"]["messages"] == count  # To ask stores nothing.
        unknown = jetstream_codec.encode_stored_check(
            b"chain", 1, [b":r:none"], [link.core.reply_subject(10**9)]
        )
        link.core.write(unknown)
        link.flush()
        await heard.until(lambda: sum(e.messages.count for e in heard.all(RequestReplies)) == 12)
        said = heard.all(RequestReplies)[-1].messages
        assert jetstream_codec.parse_pub_acks(said).errors[0].code == jetstream_codec.NO_ROLLUP


async def test_server_stores_repeated_named_batch_once(
    jetstream_server: NatsServer,
) -> None:
    both = [range(100), range(50, 150)]
    async with linked(jetstream_server.url) as (link, heard):
        config = {"name": "TWICE", "subjects": ["twice"], "storage": "memory"}
        await link.api_request("STREAM.CREATE.TWICE", {**config, "allow_batched": True})
        publishers: dict[int, StreamPublisher] = {}
        for run, some in zip("rs", both, strict=True):  # As two stateless servers have them.
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
                WriteBatch(1, [entry(*(frame(b"%d" % n, n) for n in some), name="pub")])
            )
            publisher.publish_ready(0.0)
        link.flush()

        def ends() -> int:
            payloads = [p for e in heard.all(ReceivedMessages) for p in e.all_payloads()]
            return sum(b'"count":' in payload for payload in payloads)

        await heard.until(lambda: ends() == len(both))
        for each in heard.all(ReceivedMessages):
            for sid, some_answers in each.split_by_sid().items():
                assert publishers[sid].handle_fast_batch_acks(some_answers, 0.0) is None
        before = len(heard.all(RequestReplies))
        link.flush()
        await heard.until(
            lambda: sum(len(e.numbers) for e in heard.all(RequestReplies)[before:]) == 2
        )
        for replies in heard.all(RequestReplies)[before:]:
            for publisher in publishers.values():
                publisher.handle_pub_acks(replies, 0.0)
        assert [publisher.is_empty for publisher in publishers.values()] == [True, True]
        info = await link.api_request("STREAM.INFO.TWICE")
        assert info["state"]["messages"] == 150


def test_ignores_oversized_request_number() -> None:
    stream = opened()
    stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    odd = b"MSG _INBOX.r.r%b.500.fail.1.1.$FI %d 2\r\n{}\r\n" % (b"1" * 5000, CHAIN_SID)
    assert stream.answer([odd], 0.0) is None
    assert stream.answer(answers, 0.0) == 1
