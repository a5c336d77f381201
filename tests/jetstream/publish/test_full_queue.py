"""Publishing into a stream that repeatedly fills up and is read, without a socket.

The stream processes messages late and a part at a time. Its answers arrive in the same way.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.commit_log import WriteBatch
from simplebus.jetstream.publish.class_queue import PUBLISHERS_MAX
from simplebus.jetstream.publish.codec import MILESTONE_MESSAGES
from simplebus.jetstream.publish.stream_publisher import PATIENCE_SECONDS, PAUSE_SECONDS
from simplebus.nats.protocol.events import Pub
from tests.jetstream.publish.test_batched_publish import FastBatchStream, create_open_stream
from tests.jetstream.publish.test_stream_publisher import entry, frame, rounds

FORGETS_SECONDS = 120.0


class SlowStream(FastBatchStream):
    """Stream with limited free space, which processes messages late."""

    never_refuses_duplicates = True

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.publisher.open_classes.add(7)
        self.room = rng.choice([0, 5, 40, 100])
        self.refuses = lambda: self.room <= 0
        self.written: deque[Pub] = deque()
        self.answers: deque[bytes] = deque()
        self.known_since: dict[str, float] = {}

    def read(self) -> None:
        """Put published messages in transit to the stream."""
        self.written += self.drain_publications()

    def process_some(self, max_count: int, now: float) -> None:
        """Process up to `max_count` messages, and drop expired message ids."""
        for id_ in [i for i, since in self.known_since.items() if since < now - FORGETS_SECONDS]:
            del self.known_since[id_], self.ids[id_]
        for _ in range(min(max_count, len(self.written))):
            message = self.written.popleft()
            stored_before = len(self.stored)
            self.answers += self.answers_to(message)
            self.room -= len(self.stored) - stored_before
        self.known_since |= dict.fromkeys(self.ids.keys() - self.known_since.keys(), now)

    def deliver_replies(self, max_count: int, now: float) -> int | None:
        """Deliver up to `most` answers. Return the number of the last stored batch, if any."""
        replies = [self.answers.popleft() for _ in range(min(max_count, len(self.answers)))]
        return self.answer(replies, now) if replies else None

    @property
    def waits_for_room(self) -> bool:
        """True if nothing is in flight because the stream is full."""
        lanes = self.publisher._queues.values()
        is_quiet = all(lane.window and not (lane.in_flight or lane.unverified) for lane in lanes)
        return is_quiet and not (self.written or self.answers)

    def cut(self, rng: random.Random, now: float) -> None:
        """Lose the connection and open another one."""
        self.core.end_connection()
        self.process_some(rng.randrange(len(self.written) + 1), now)
        self.written.clear()
        self.answers.clear()
        self.fast_batches.clear()
        self.connect(now)
        self.core.drain_output()
        self.publisher.handle_reconnect(now)


def numbers(stream: FastBatchStream) -> list[int]:
    return [int(payload) for payload in stream.payloads()]


@given(seed=st.integers(0, 10**6), name=st.sampled_from(["", "pub"]), cuts=st.booleans())
def test_late_answers_never_block_publishing(seed: int, name: str, cuts: bool) -> None:
    rng = random.Random(seed)
    stream, now = SlowStream(rng), 0.0
    publisher, total, published_count, cut_count = stream.publisher, rng.choice([50, 300]), 0, 0
    ends, confirmed = [0], 0
    """End of each batch, and the number of confirmed messages."""
    for _ in rounds():
        is_repeated = bool(name) and published_count > confirmed and rng.random() < 0.05
        if is_repeated or (published_count < total and rng.random() < 0.4):
            first, count = (
                confirmed if is_repeated else published_count,
                rng.choice([1, 3, 10, 64, 200]),
            )
            last = min(total, max(published_count, first + count))
            frames_ = [frame(b"%d" % number, number) for number in range(first, last)]
            publisher.append_batch(WriteBatch(len(ends), [entry(*frames_, name=name)]))
            ends.append(last)
            published_count = last
        publisher.publish_ready(now)
        stream.read()
        stream.process_some(rng.choice([0, 1, 5, 40, 1000]), now)
        if rng.random() < 0.15:
            stream.room = rng.choice([1, 3, 20, 50, 200])
        durable_batch = stream.deliver_replies(rng.choice([0, 1, 5, 40, 1000]), now)
        confirmed = ends[durable_batch] if durable_batch else confirmed
        assert set(range(confirmed)) <= set(numbers(stream))
        now += rng.choice([0.0, 0.02, 0.1, PAUSE_SECONDS, 2 * PATIENCE_SECONDS / 100])
        now += PATIENCE_SECONDS * (rng.random() < 0.005)
        now += 2 * FORGETS_SECONDS * (stream.waits_for_room and rng.random() < 0.2)
        if cuts and rng.random() < 0.01:
            stream.cut(rng, now)
            cut_count += 1
        if published_count == total and publisher.is_empty:
            break
    stored = numbers(stream)
    assert sorted(set(stored)) == list(range(total))
    assert len(stored) - total <= (0 if name else cut_count * MILESTONE_MESSAGES)
    assert publisher.is_empty
    assert (publisher.full, publisher._queues, publisher._queue_by_request) == (set(), {}, {})


def test_full_stream_is_verified_per_message() -> None:
    stream = create_open_stream()
    stream.publish_numbered(1, 40, "pub")
    rooms = iter([True] * 10)
    stream.refuses = lambda: not next(rooms, False)
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.process_publications(), 0.0)
    stream.publisher.publish_ready(PAUSE_SECONDS)
    answers = stream.process_publications()
    assert (len(answers), len(stream.stored)) == (40, 10)
    stream.answer(answers, PAUSE_SECONDS)
    rooms = iter([False] * 3)  # Space becomes free during the retries.
    stream.refuses = lambda: not next(rooms, True)
    now = PAUSE_SECONDS
    for _ in rounds():
        if stream.publisher.is_empty:
            break
        stream.publisher.publish_ready(now)
        stream.answer(stream.process_publications(), now)
        now += PAUSE_SECONDS
    assert [int(payload.split()[1]) - 1000 for payload in stream.payloads()] == list(range(40))


def test_writes_nothing_after_refusal() -> None:
    stream = create_open_stream()
    stream.publish_numbered(1, 10, "pub")
    stream.refuses = lambda: True
    stream.publisher.publish_ready(0.0)
    answers = stream.process_publications()
    stream.answer(answers[:1], 0.0)
    stream.publish_numbered(2, 10, "pub")
    stream.refuses = lambda: False
    stream.publisher.publish_ready(0.0)
    assert stream.process_publications() == []
    stream.answer(answers[1:], PAUSE_SECONDS / 2)
    # Its answer arrived later, so it is not late yet.
    stream.publisher.publish_ready(PAUSE_SECONDS)
    assert stream.process_publications() == []
    assert stream.answer_all(2 * PAUSE_SECONDS) == 2
    assert [payload.split()[0] for payload in stream.payloads()] == [b"1"] * 10 + [b"2"] * 10


def open_refusing_stream() -> tuple[FastBatchStream, list[bytes], list[bytes]]:
    """Return a stream that refused a batch of 100 messages, their payloads and their frames."""
    stream = create_open_stream()
    expected = stream.publish_numbered(1, 100, "pub")
    stream.refuses = lambda: True
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.process_publications(), 0.0)
    frames = [frame(payload, 1000 + number) for number, payload in enumerate(expected)]
    return stream, expected, frames


def test_duplicates_in_full_stream_do_not_wait() -> None:
    stream, expected, frames_ = open_refusing_stream()
    # A publisher that reconnected several times repeats everything.
    for batch_number in range(2, 10):
        stream.publisher.append_batch(WriteBatch(batch_number, [entry(*frames_, name="pub")]))
    stream.refuses = lambda: False
    assert stream.answer_all(PAUSE_SECONDS) == 9
    assert stream.payloads() == expected


def test_repeated_waiting_message_is_stored_once() -> None:
    stream, expected, frames_ = open_refusing_stream()
    waiting = stream.publisher._queues[7].pending_bytes
    for batch_number in (2, 3):
        stream.publisher.append_batch(WriteBatch(batch_number, [entry(*frames_, name="pub")]))
    assert stream.publisher._queues[7].pending_bytes == waiting
    more_frames = [frame(b"more", 1100)]
    stream.publisher.append_batch(WriteBatch(4, [entry(*frames_[90:], *more_frames, name="pub")]))
    stream.publisher.append_batch(WriteBatch(5, [entry(*frames_[:1], name="other")]))
    rooms = iter([True] * 20)
    stream.refuses = lambda: not next(rooms, False)
    now = PAUSE_SECONDS
    for _ in rounds():
        if stream.publisher.unstored_batch_count <= 4:
            break
        rooms = iter([True] * 20)
        assert stream.answer_all(now) in (None, 3)
        stream.ids.clear()
        now += PAUSE_SECONDS
    stream.refuses = lambda: False
    for _ in rounds():
        if stream.publisher.is_empty:
            break
        stream.answer_all(now)
        now += PAUSE_SECONDS
    assert stream.payloads() == [*expected, b"more", expected[0]]


def test_stored_unconfirmed_message_is_not_repeated() -> None:
    stream = create_open_stream()
    stream.never_refuses_duplicates = True
    # Two parts of one batch; the first one is stored completely.
    expected = stream.publish_numbered(1, 5000, "pub")
    rooms = iter([True] * 4500)
    stream.refuses = lambda: not next(rooms, False)
    assert stream.answer_all(0.0) is None
    assert stream.answer_all(PAUSE_SECONDS) is None
    assert len(stream.stored) == 4500
    frames_ = [frame(payload, 1000 + number) for number, payload in enumerate(expected)]
    stream.publisher.append_batch(WriteBatch(2, [entry(*frames_, name="pub")]))
    stream.ids.clear()
    stream.refuses = lambda: False
    now = PAUSE_SECONDS
    for _ in rounds():
        if stream.publisher.is_empty:
            break
        now += PAUSE_SECONDS
        stream.answer_all(now)
    assert stream.payloads() == expected


NO_LEADER = b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}'


@pytest.mark.parametrize("name", ["", "pub"])
@pytest.mark.parametrize("partial_kind", ["cut", "silent", "without a leader"])
def test_repeats_partial_verification(
    monkeypatch: pytest.MonkeyPatch, partial_kind: str, name: str
) -> None:
    """The first part is stored completely, and the second one in part."""
    stream = create_open_stream()
    publisher = stream.publisher
    for batch_number in (1, 2):
        frames_ = [
            frame(b"%d" % number, number)
            for number in range(10 * batch_number, 10 * batch_number + 10)
        ]
        publisher.append_batch(WriteBatch(batch_number, [entry(*frames_, name=name)]))
    stream.refuses = lambda: len(stream.stored) >= 15
    publisher.publish_ready(0.0)
    answers = stream.process_publications()
    stream.answer(answers[:5] + answers[10:], 0.0)  # The other answers are late.
    now = PAUSE_SECONDS
    publisher.publish_ready(now)
    with monkeypatch.context() as patch:
        if partial_kind == "without a leader":
            check_replies = iter(range(20))
            honest = stream.check_reply
            patch.setattr(
                stream,
                "check_reply",
                lambda id_: honest(id_) if next(check_replies) < 10 else NO_LEADER,
            )
        answers = stream.process_publications()
    assert len(answers) == 20
    stream.answer(answers if partial_kind == "without a leader" else answers[:10], now)
    if partial_kind == "cut":
        stream.core.end_connection()
        stream.connect(now)
        stream.core.drain_output()
        publisher.handle_reconnect(now)
    stream.refuses = lambda: False
    for _ in range(100):
        now += PAUSE_SECONDS
        publisher.publish_ready(now)
        stream.answer(stream.process_publications(), now)
    assert publisher.is_empty
    assert numbers(stream) == list(range(10, 30))


def test_long_full_class_uses_bounded_memory() -> None:
    stream = create_open_stream()
    for batch_number in range(1, 4):
        stream.publish_numbered(batch_number, 10, "pub")
    rooms = iter([True] * 5)
    stream.refuses = lambda: not next(rooms, False)
    for turn in range(1000):
        if turn == 500:
            rooms = iter([True] * 2)
        stream.answer_all(turn * PAUSE_SECONDS)
    assert len(stream.stored) == 7
    publications_ = [
        ids
        for _, publication in stream.publisher._queues[7].publications
        for ids in publication.removed_numbers
    ]
    assert len(publications_) <= len(stream.stored)


@pytest.mark.parametrize("is_told_by", ["its own answers", "what was asked"])
def test_finished_verification_ignores_open_checks(is_told_by: str) -> None:
    stream = create_open_stream()
    stream.publish_numbered(1, 100)
    stream.publisher.publish_ready(0.0)
    late_replies = stream.process_publications()
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    check_replies = stream.process_publications()
    assert len(check_replies) == 4
    stream.publish_numbered(2, 5)
    stream.answer(
        late_replies if is_told_by == "its own answers" else check_replies, PATIENCE_SECONDS
    )
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    answers = stream.process_publications()
    assert len(stream.stored) == 105
    stream.publisher.publish_ready(PATIENCE_SECONDS + 0.01)
    assert stream.process_publications() == []  # Nothing is written again at once.
    stream.answer(answers, PATIENCE_SECONDS + 0.01)
    assert stream.publisher.is_empty


def test_message_repeated_in_one_batch_is_stored_once() -> None:
    stream = create_open_stream()
    frames_ = [frame(b"%d" % number, number) for number in range(10)]
    stream.publisher.append_batch(WriteBatch(1, [entry(*frames_, *frames_[2:], name="pub")]))
    assert stream.answer_all(0.0) == 1
    assert numbers(stream) == list(range(10))


def test_remembers_queued_numbers_of_many_publishers() -> None:
    stream = create_open_stream()
    stream.has_fast_batches = False
    frames_ = [frame(b"%d" % number, number) for number in range(20)]
    other_frames = [frame(b"%d" % number, number) for number in range(100, 110)]
    batch_number = entry(*frames_[:10], name="pub")
    for other_frame in other_frames:
        batch_number.append_frames(1, other_frame, "other")
    stream.publisher.append_batch(WriteBatch(1, [batch_number]))
    stream.refuses = lambda: len(stream.stored) >= 10
    stream.answer_all(0.0)
    assert numbers(stream) == list(range(10))  # They are stored but not confirmed.
    for number in range(PUBLISHERS_MAX):
        stream.publisher.append_batch(
            WriteBatch(2 + number, [entry(frame(b"999", number), name=f"p{number}")])
        )
    stream.publisher.append_batch(WriteBatch(2 + PUBLISHERS_MAX, [entry(*frames_, name="pub")]))
    stream.ids.clear()
    stream.refuses = lambda: False
    now = PAUSE_SECONDS
    for _ in rounds():
        if stream.publisher.is_empty:
            break
        stream.answer_all(now)
        now += PAUSE_SECONDS
    assert sorted(n for n in numbers(stream) if n < 20) == list(range(20))
