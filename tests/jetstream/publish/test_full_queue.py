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
from tests.jetstream.publish.test_batched_publish import ChainStream, opened
from tests.jetstream.publish.test_stream_publisher import entry, frame, turns

FORGETS_SECONDS = 120.0


class SlowStream(ChainStream):
    """One that has room for so many."""

    looks_first = True

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.publisher.open_classes.add(7)
        self.room = chance.choice([0, 5, 40, 100])
        self.refuses = lambda: self.room <= 0
        self.written: deque[Pub] = deque()
        self.answers: deque[bytes] = deque()
        self.known_at: dict[str, float] = {}

    def read(self) -> None:
        """Put published messages in transit to the stream."""
        self.written += self.said()

    def work(self, most: int, now: float) -> None:
        """Deal with so many, and forget ids of long ago."""
        for id_ in [i for i, at in self.known_at.items() if at < now - FORGETS_SECONDS]:
            del self.known_at[id_], self.ids[id_]
        for _ in range(min(most, len(self.written))):
            message = self.written.popleft()
            before = len(self.stored)
            self.answers += self.answers_to(message)
            self.room -= len(self.stored) - before
        self.known_at |= dict.fromkeys(self.ids.keys() - self.known_at.keys(), now)

    def tell(self, most: int, now: float) -> int | None:
        """Deliver up to `most` answers. Return the number of the last stored batch, if any."""
        some = [self.answers.popleft() for _ in range(min(most, len(self.answers)))]
        return self.answer(some, now) if some else None

    @property
    def waits_for_room(self) -> bool:
        """True if nothing is in flight because the stream is full."""
        lanes = self.publisher._queues.values()
        is_quiet = all(lane.window and not (lane.in_flight or lane.unverified) for lane in lanes)
        return is_quiet and not (self.written or self.answers)

    def cut(self, chance: random.Random, now: float) -> None:
        """Lose the connection and open another one."""
        self.core.end_connection()
        self.work(chance.randrange(len(self.written) + 1), now)
        self.written.clear()
        self.answers.clear()
        self.chains.clear()
        self.connect(now)
        self.core.drain_output()
        self.publisher.handle_reconnect(now)


def numbers(stream: ChainStream) -> list[int]:
    return [int(payload) for payload in stream.payloads()]


@given(seed=st.integers(0, 10**6), name=st.sampled_from(["", "pub"]), cuts=st.booleans())
def test_late_answers_never_block_publishing(seed: int, name: str, cuts: bool) -> None:
    chance = random.Random(seed)
    stream, now = SlowStream(chance), 0.0
    publisher, total, put, lost = stream.publisher, chance.choice([50, 300]), 0, 0
    ends, confirmed = [0], 0
    """Up to which message each lot tells all, and how many were confirmed."""
    for _ in turns():
        is_said_again = bool(name) and put > confirmed and chance.random() < 0.05
        if is_said_again or (put < total and chance.random() < 0.4):
            first, count = confirmed if is_said_again else put, chance.choice([1, 3, 10, 64, 200])
            last = min(total, max(put, first + count))
            whole = [frame(b"%d" % number, number) for number in range(first, last)]
            publisher.append_batch(WriteBatch(len(ends), [entry(*whole, name=name)]))
            ends.append(last)
            put = last
        publisher.publish_ready(now)
        stream.read()
        stream.work(chance.choice([0, 1, 5, 40, 1000]), now)
        if chance.random() < 0.15:
            stream.room = chance.choice([1, 3, 20, 50, 200])
        reached = stream.tell(chance.choice([0, 1, 5, 40, 1000]), now)
        confirmed = ends[reached] if reached else confirmed
        assert set(range(confirmed)) <= set(numbers(stream))
        now += chance.choice([0.0, 0.02, 0.1, PAUSE_SECONDS, 2 * PATIENCE_SECONDS / 100])
        now += PATIENCE_SECONDS * (chance.random() < 0.005)
        now += 2 * FORGETS_SECONDS * (stream.waits_for_room and chance.random() < 0.2)
        if cuts and chance.random() < 0.01:
            stream.cut(chance, now)
            lost += 1
        if put == total and publisher.is_empty:
            break
    stored = numbers(stream)
    assert sorted(set(stored)) == list(range(total))
    assert len(stored) - total <= (0 if name else lost * MILESTONE_MESSAGES)
    assert publisher.is_empty
    assert (publisher.full, publisher._queues, publisher._queue_by_request) == (set(), {}, {})


def test_full_stream_is_verified_per_message() -> None:
    stream = opened()
    stream.put(1, 40, "pub")
    rooms = iter([True] * 10)
    stream.refuses = lambda: not next(rooms, False)
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.take(), 0.0)
    stream.publisher.publish_ready(PAUSE_SECONDS)
    answers = stream.take()
    assert (len(answers), len(stream.stored)) == (40, 10)
    stream.answer(answers, PAUSE_SECONDS)
    rooms = iter([False] * 3)  # Somebody makes room while it is tried.
    stream.refuses = lambda: not next(rooms, True)
    now = PAUSE_SECONDS
    for _ in turns():
        if stream.publisher.is_empty:
            break
        stream.publisher.publish_ready(now)
        stream.answer(stream.take(), now)
        now += PAUSE_SECONDS
    assert [int(payload.split()[1]) - 1000 for payload in stream.payloads()] == list(range(40))


def test_writes_nothing_after_refusal() -> None:
    stream = opened()
    stream.put(1, 10, "pub")
    stream.refuses = lambda: True
    stream.publisher.publish_ready(0.0)
    answers = stream.take()
    stream.answer(answers[:1], 0.0)
    stream.put(2, 10, "pub")
    stream.refuses = lambda: False
    stream.publisher.publish_ready(0.0)
    assert stream.take() == []
    stream.answer(answers[1:], PAUSE_SECONDS / 2)
    stream.publisher.publish_ready(PAUSE_SECONDS)  # That was answered later: it is not late yet.
    assert stream.take() == []
    assert stream.answer_all(2 * PAUSE_SECONDS) == 2
    assert [payload.split()[0] for payload in stream.payloads()] == [b"1"] * 10 + [b"2"] * 10


def open_refusing_stream() -> tuple[ChainStream, list[bytes], list[bytes]]:
    """Return a stream that refused a batch of 100 messages, their payloads and their frames."""
    stream = opened()
    expected = stream.put(1, 100, "pub")
    stream.refuses = lambda: True
    stream.publisher.publish_ready(0.0)
    stream.answer(stream.take(), 0.0)
    frames = [frame(payload, 1000 + number) for number, payload in enumerate(expected)]
    return stream, expected, frames


def test_duplicates_in_full_stream_do_not_wait() -> None:
    stream, expected, whole = open_refusing_stream()
    for lot in range(2, 10):  # A publisher that came back some times says all again.
        stream.publisher.append_batch(WriteBatch(lot, [entry(*whole, name="pub")]))
    stream.refuses = lambda: False
    assert stream.answer_all(PAUSE_SECONDS) == 9
    assert stream.payloads() == expected


def test_repeated_waiting_message_is_stored_once() -> None:
    stream, expected, whole = open_refusing_stream()
    waiting = stream.publisher._queues[7].pending_bytes
    for lot in (2, 3):
        stream.publisher.append_batch(WriteBatch(lot, [entry(*whole, name="pub")]))
    assert stream.publisher._queues[7].pending_bytes == waiting
    more = [frame(b"more", 1100)]
    stream.publisher.append_batch(WriteBatch(4, [entry(*whole[90:], *more, name="pub")]))
    stream.publisher.append_batch(WriteBatch(5, [entry(*whole[:1], name="other")]))
    rooms = iter([True] * 20)
    stream.refuses = lambda: not next(rooms, False)
    now = PAUSE_SECONDS
    for _ in turns():
        if stream.publisher.unstored_batch_count <= 4:
            break
        rooms = iter([True] * 20)
        assert stream.answer_all(now) in (None, 3)
        stream.ids.clear()
        now += PAUSE_SECONDS
    stream.refuses = lambda: False
    for _ in turns():
        if stream.publisher.is_empty:
            break
        stream.answer_all(now)
        now += PAUSE_SECONDS
    assert stream.payloads() == [*expected, b"more", expected[0]]


def test_stored_unconfirmed_message_is_not_repeated() -> None:
    stream = opened()
    stream.looks_first = True
    expected = stream.put(1, 5000, "pub")  # Two pieces of one lot, the first is stored as a whole.
    rooms = iter([True] * 4500)
    stream.refuses = lambda: not next(rooms, False)
    assert stream.answer_all(0.0) is None
    assert stream.answer_all(PAUSE_SECONDS) is None
    assert len(stream.stored) == 4500
    whole = [frame(payload, 1000 + number) for number, payload in enumerate(expected)]
    stream.publisher.append_batch(WriteBatch(2, [entry(*whole, name="pub")]))
    stream.ids.clear()
    stream.refuses = lambda: False
    now = PAUSE_SECONDS
    for _ in turns():
        if stream.publisher.is_empty:
            break
        now += PAUSE_SECONDS
        stream.answer_all(now)
    assert stream.payloads() == expected


NO_LEADER = b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}'


@pytest.mark.parametrize("name", ["", "pub"])
@pytest.mark.parametrize("how", ["cut", "silent", "without a leader"])
def test_repeats_partial_verification(monkeypatch: pytest.MonkeyPatch, how: str, name: str) -> None:
    """All of the first piece is stored, and some of the second."""
    stream = opened()
    publisher = stream.publisher
    for lot in (1, 2):
        whole = [frame(b"%d" % number, number) for number in range(10 * lot, 10 * lot + 10)]
        publisher.append_batch(WriteBatch(lot, [entry(*whole, name=name)]))
    stream.refuses = lambda: len(stream.stored) >= 15
    publisher.publish_ready(0.0)
    answers = stream.take()
    stream.answer(answers[:5] + answers[10:], 0.0)  # The others are late.
    now = PAUSE_SECONDS
    publisher.publish_ready(now)
    with monkeypatch.context() as patch:
        if how == "without a leader":
            asked = iter(range(20))
            honest = stream.whether
            patch.setattr(
                stream, "whether", lambda id_: honest(id_) if next(asked) < 10 else NO_LEADER
            )
        answers = stream.take()
    assert len(answers) == 20
    stream.answer(answers if how == "without a leader" else answers[:10], now)
    if how == "cut":
        stream.core.end_connection()
        stream.connect(now)
        stream.core.drain_output()
        publisher.handle_reconnect(now)
    stream.refuses = lambda: False
    for _ in range(100):
        now += PAUSE_SECONDS
        publisher.publish_ready(now)
        stream.answer(stream.take(), now)
    assert publisher.is_empty
    assert numbers(stream) == list(range(10, 30))


def test_long_full_class_uses_bounded_memory() -> None:
    stream = opened()
    for lot in range(1, 4):
        stream.put(lot, 10, "pub")
    rooms = iter([True] * 5)
    stream.refuses = lambda: not next(rooms, False)
    for turn in range(1000):
        if turn == 500:
            rooms = iter([True] * 2)
        stream.answer_all(turn * PAUSE_SECONDS)
    assert len(stream.stored) == 7
    kept = [
        ids
        for _, piece in stream.publisher._queues[7].publications
        for ids in piece.removed_numbers
    ]
    assert len(kept) <= len(stream.stored)


@pytest.mark.parametrize("is_told_by", ["its own answers", "what was asked"])
def test_finished_verification_ignores_open_checks(is_told_by: str) -> None:
    stream = opened()
    stream.put(1, 100)
    stream.publisher.publish_ready(0.0)
    late = stream.take()
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    asked = stream.take()
    assert len(asked) == 4
    stream.put(2, 5)
    stream.answer(late if is_told_by == "its own answers" else asked, PATIENCE_SECONDS)
    stream.publisher.publish_ready(PATIENCE_SECONDS)
    answers = stream.take()
    assert len(stream.stored) == 105
    stream.publisher.publish_ready(PATIENCE_SECONDS + 0.01)
    assert stream.take() == []  # Nor is anything written again at once.
    stream.answer(answers, PATIENCE_SECONDS + 0.01)
    assert stream.publisher.is_empty


def test_message_repeated_in_one_batch_is_stored_once() -> None:
    stream = opened()
    whole = [frame(b"%d" % number, number) for number in range(10)]
    stream.publisher.append_batch(WriteBatch(1, [entry(*whole, *whole[2:], name="pub")]))
    assert stream.answer_all(0.0) == 1
    assert numbers(stream) == list(range(10))


def test_remembers_queued_numbers_of_many_publishers() -> None:
    stream = opened()
    stream.has_fast_batches = False
    whole = [frame(b"%d" % number, number) for number in range(20)]
    other = [frame(b"%d" % number, number) for number in range(100, 110)]
    lot = entry(*whole[:10], name="pub")
    for each in other:
        lot.append_frames(1, each, "other")
    stream.publisher.append_batch(WriteBatch(1, [lot]))
    stream.refuses = lambda: len(stream.stored) >= 10
    stream.answer_all(0.0)
    assert numbers(stream) == list(range(10))  # They are stored, and not confirmed.
    for number in range(PUBLISHERS_MAX):
        stream.publisher.append_batch(
            WriteBatch(2 + number, [entry(frame(b"999", number), name=f"p{number}")])
        )
    stream.publisher.append_batch(WriteBatch(2 + PUBLISHERS_MAX, [entry(*whole, name="pub")]))
    stream.ids.clear()
    stream.refuses = lambda: False
    now = PAUSE_SECONDS
    for _ in turns():
        if stream.publisher.is_empty:
            break
        stream.answer_all(now)
        now += PAUSE_SECONDS
    assert sorted(n for n in numbers(stream) if n < 20) == list(range(20))
