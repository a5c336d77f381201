"""Simulation of publishing into streams whose leader changes, without a socket.

Messages in transit are lost, or stored after the change. Answers are late, lost, repeated or
reordered. A leader stores accepted messages later and in order, then acks them; no other leader
knows their ids before that. A deposed leader may lose the messages that it accepted last. When
the faults stop, all messages get stored and no publisher keeps waiting.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.commit_log import WriteBatch
from simplebus.jetstream.publish.stream_publisher import PATIENCE_SECONDS, PAUSE_SECONDS
from simplebus.nats.protocol.events import Pub
from tests.jetstream.publish.test_batched_publish import (
    FAST_BATCH_SID,
    IN_FLIGHT,
    UNKNOWN,
    FastBatchStream,
)
from tests.jetstream.publish.test_stream_publisher import FULL, entry, frame

CLASSES = 7, 8
FAULTY_ROUNDS, FAULTLESS_ROUNDS = 80, 2000
NO_LEADER = b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}'


@dataclass(slots=True)
class AcceptedMessage:
    """A message that a leader has accepted but not stored yet."""

    payload: bytes
    id: str
    reply: bytes
    chain: bytes = b""
    position: int = 0
    """Number of the message in its fast batch, from 1."""
    is_end: bool = False
    is_known: bool = False
    """True if the message is stored or accepted already; a fast batch skips it then."""


class ReplicatedStreams(FastBatchStream):
    """Streams of two classes, and the messages in flight to and from their leaders."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.publisher.open_classes |= set(CLASSES)
        self.rng = rng
        self.fault_factor = 1.0
        self.loses_some, self.refuses_some, self.repeats_some = (
            rng.choice([0.0, 0.005, 0.08]) for _ in range(3)
        )
        """Probability of each fault per message or answer."""
        self.leader_loss_probability = rng.choice([0.0, 0.02])
        self.written: deque[Pub] = deque()
        self.answers: list[bytes] = []
        self.accepted: dict[str, deque[AcceptedMessage]] = {
            f"s.{class_id}": deque() for class_id in CLASSES
        }
        self.open: dict[tuple[str, bytes], int] = {}
        """Number of the last message of each open fast batch."""
        self.accepted_ids = set[tuple[str, str]]()
        """Subject and message id of each message that is accepted and not stored."""
        self.absent: set[str] = set()
        """Subjects of streams without a leader."""
        self.log: dict[str, list[int]] = {subject: [] for subject in self.accepted}
        """Stored messages of each stream."""
        self.sequence = 0

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability * self.fault_factor

    def read(self) -> None:
        """Put published messages in transit to the leaders."""
        self.written += self.drain_publications()

    def send_reply(self, reply: bytes, answer: bytes) -> None:
        """Put an answer in transit, or lose or repeat it."""
        sid = FAST_BATCH_SID if reply.endswith(b".$FI") else 1
        head = b"MSG %b %d %d\r\n" % (reply, sid, len(answer))
        if answer.startswith(b"NATS/1.0"):
            head = b"HMSG %b %d %d %d\r\n" % (reply, sid, len(answer), len(answer))
        message = head + answer + b"\r\n"
        if self.happens(self.loses_some):
            return
        self.answers.append(message)
        if self.happens(self.repeats_some):
            self.answers.insert(self.rng.randrange(len(self.answers)), message)

    def process_some(self, max_count: int) -> None:
        """Let the leaders accept up to `max_count` messages and store some of them."""
        for _ in range(min(max_count, len(self.written))):
            self._process_message(self.written.popleft())
        for subject, accepted_messages in self.accepted.items():
            numbers = (
                len(accepted_messages)
                if not self.fault_factor
                else self.rng.choice([0, 1, 5, 40, 1000])
            )
            for _ in range(
                min(numbers, len(accepted_messages)) if subject not in self.absent else 0
            ):
                self._store(subject, accepted_messages.popleft())

    def _process_message(self, message: Pub) -> None:
        subject, body = message.subject.decode(), bytes(message.body)
        if subject in self.absent:
            if self.happens(0.5):
                no_responders = b"NATS/1.0 503\r\n\r\n"
                self.send_reply(message.reply, self.rng.choice([no_responders, NO_LEADER]))
            return
        if self.happens(self.loses_some):
            return
        block = body[: message.header_bytes].decode()
        headers = dict(line.split(": ") for line in block.split("\r\n")[1:-2])
        id_, payload = headers.get("Nats-Msg-Id", ""), body[message.header_bytes :]
        accepted_messages = self.accepted[subject]
        is_taken = (subject, id_) in self.accepted_ids
        if self.sid_of(message) == FAST_BATCH_SID:
            self._accept_fast_batch_message(
                message, AcceptedMessage(payload, id_, message.reply), is_taken=is_taken
            )
        elif is_taken:
            self.send_reply(message.reply, IN_FLIGHT)
        elif id_ in self.ids or "Nats-Rollup" in headers:
            self.send_reply(message.reply, self.check_reply(id_))
        elif self.happens(self.refuses_some):
            self.send_reply(message.reply, FULL)
        else:
            self.accepted_ids.add((subject, id_))
            accepted_messages.append(AcceptedMessage(payload, id_, message.reply))

    def _accept_fast_batch_message(
        self, message: Pub, accepted: AcceptedMessage, *, is_taken: bool
    ) -> None:
        subject = message.subject.decode()
        _, name, _, _, step, kind, _ = message.reply[len(b"_INBOX.") :].split(b".")
        number, chain = int(step), (subject, name)
        if chain not in self.open:
            if number != 1 or self.happens(self.refuses_some):
                self.send_reply(message.reply, FULL if number == 1 else UNKNOWN)
                return
            self.open[chain] = 0
            self.send_reply(message.reply, b'{"type":"ack","seq":0,"msgs":500}')
        last_number = self.open[chain]
        accepted.chain, accepted.position, accepted.is_end = name, number, kind == b"2"
        accepted.is_known = is_taken or (bool(accepted.id) and accepted.id in self.ids)
        # The batch ends after its last message.
        if number != last_number + 1 or self.happens(0.002):
            self.send_reply(message.reply, b'{"type":"gap","last_seq":%d,"seq":1}' % last_number)
            accepted.position, accepted.is_end, accepted.is_known, accepted.id = (
                last_number,
                True,
                True,
                "",
            )
        elif accepted.is_end and accepted.is_known:  # Answered at once.
            self._send_final_ack(accepted, 0)
            accepted.is_end = False
            del self.open[chain]
        if accepted.is_end:
            del self.open[chain]
        elif chain in self.open:
            self.open[chain] = number
        if accepted.id and not accepted.is_known:
            self.accepted_ids.add((subject, accepted.id))
        self.accepted[subject].append(accepted)

    def _send_final_ack(self, accepted: AcceptedMessage, sequence: int) -> None:
        template = b'{"stream":"S","seq":%d,"batch":"%b","count":%d}'
        self.send_reply(accepted.reply, template % (sequence, accepted.chain, accepted.position))

    def _store(self, subject: str, accepted: AcceptedMessage) -> None:
        is_known = accepted.is_known or (bool(accepted.id) and accepted.id in self.ids)
        self.accepted_ids.discard((subject, accepted.id))
        if not is_known:
            self.sequence += 1
            self.log[subject].append(int(accepted.payload))
            if accepted.id:
                self.ids[accepted.id] = self.sequence
        if not accepted.chain:
            is_new = b'{"stream":"S","seq":%d}' % self.sequence
            self.send_reply(accepted.reply, self.check_reply(accepted.id) if is_known else is_new)
        elif accepted.is_end:
            self._send_final_ack(accepted, self.sequence)
        elif accepted.position % 7 == 0:
            self.send_reply(accepted.reply, b'{"type":"ack","seq":%d,"msgs":7}' % accepted.position)

    def lose_leader(self, subject: str) -> None:
        """Remove the leader. The next leader stores the remaining messages that it has."""
        accepted_messages, self.open = (
            self.accepted[subject],
            {c: n for c, n in self.open.items() if c[0] != subject},
        )
        kept_count = self.rng.choice([0, len(accepted_messages) // 2, len(accepted_messages)])
        while len(accepted_messages) > kept_count:
            accepted_messages.pop()
        self.accepted_ids = {
            accepted_id for accepted_id in self.accepted_ids if accepted_id[0] != subject
        }
        self.absent.add(subject)

    def deliver_replies(self, max_count: int, now: float) -> int | None:
        """Deliver up to `most` answers, maybe reordered. Return the number of the last stored
        batch.
        """
        if self.happens(0.1):
            self.rng.shuffle(self.answers)
        numbers, self.answers = self.answers[:max_count], self.answers[max_count:]
        return self.answer(numbers, now) if numbers else None

    def cut(self, now: float) -> None:
        """Lose the connection and open another one, which gets the pending replies."""
        self.core.end_connection()
        self.process_some(self.rng.randrange(len(self.written) + 1))
        self.written.clear()
        if self.happens(0.7):
            self.answers.clear()
        self.connect(now)
        self.core.drain_output()
        self.publisher.handle_reconnect(now)


class Publishers:
    """Publishers of both classes. Named publishers repeat unconfirmed messages."""

    def __init__(self, stream: ReplicatedStreams) -> None:
        self.stream = stream
        self.count = self.batch_count = self.durable_batch = 0
        self.published: dict[int, list[tuple[int, set[int]]]] = {
            class_id: [] for class_id in CLASSES
        }
        """By class: the batches and their message numbers."""
        self.named: dict[int, list[int]] = {class_id: [] for class_id in CLASSES}
        """By class: unconfirmed messages of named publishers."""
        self.of_names: set[int] = set()

    def publish(self) -> None:
        rng, entries = self.stream.rng, []
        self.batch_count += 1
        for class_id in rng.choice([CLASSES, CLASSES[:1], CLASSES[1:]]):
            journal_entry, confirmed_numbers = entry(class_id=class_id), set[int]()
            for _ in range(rng.choice([1, 1, 2])):
                name = rng.choice(["", "pub"])
                count = rng.choice([1, 3, 10, 40, 64, 100])
                numbers = list(range(self.count, self.count + count))
                self.count += count
                if name:
                    self.of_names.update(numbers)
                    repeated = self.named[class_id] if rng.random() < 0.1 else []
                    repeated = repeated[rng.randrange(len(repeated) + 1) :]
                    self.named[class_id] += numbers
                    numbers = [*repeated, *numbers]
                confirmed_numbers.update(numbers)
                for number in numbers:
                    journal_entry.append_frames(
                        1, frame(b"%d" % number, number, class_id=class_id), name
                    )
            self.published[class_id].append((self.batch_count, confirmed_numbers))
            entries.append(journal_entry)
        self.stream.publisher.append_batch(WriteBatch(self.batch_count, entries))

    def confirm(self, batch_number: int | None) -> None:
        """Check that the messages reported as stored are stored. Stop tracking them."""
        positions = dict(self.stream.publisher.pop_durable_positions())
        if batch_number is not None:
            assert self.durable_batch < batch_number <= self.batch_count
            self.durable_batch = batch_number
            for class_id in CLASSES:
                positions[class_id] = max(batch_number, positions.get(class_id, 0))
        for class_id, last in positions.items():
            confirmed_numbers = [
                each for number, each in self.published[class_id] if number <= last
            ]
            self.published[class_id] = self.published[class_id][len(confirmed_numbers) :]
            confirmed = set[int]().union(*confirmed_numbers)
            assert confirmed <= set(self.stored(class_id))
            self.named[class_id] = [n for n in self.named[class_id] if n not in confirmed]

    def stored(self, class_id: int) -> list[int]:
        return self.stream.log[f"s.{class_id}"]


@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_leader_changes_never_lose_confirmed_messages(seed: int) -> None:
    rng = random.Random(seed)
    stream = ReplicatedStreams(rng)
    publishers, publisher, now = Publishers(stream), stream.publisher, 0.0
    holds: list[tuple[int, int]] = []
    for round_number in range(FAULTY_ROUNDS + FAULTLESS_ROUNDS):
        if round_number == FAULTY_ROUNDS:
            stream.fault_factor = 0.0
            stream.absent.clear()
            for hold in holds:
                publisher.resume_class(*hold)
            holds.clear()
        if round_number < FAULTY_ROUNDS and rng.random() < 0.15:
            publishers.publish()
        if stream.happens(0.02):
            class_id = rng.choice(CLASSES)
            holds.append((class_id, publisher.pause_class(class_id)))
        if holds and rng.random() < 0.1:
            publisher.resume_class(*holds.pop(rng.randrange(len(holds))))
        publisher.publish_ready(now)
        stream.read()
        stream.process_some(rng.choice([0, 1, 5, 40, 1000]))
        publishers.confirm(stream.deliver_replies(rng.choice([0, 1, 5, 40, 1000]), now))
        if rng.random() < 0.5:
            publisher.open_classes |= publisher.pop_classes_without_stream()
        for subject in stream.accepted:
            if stream.happens(stream.leader_loss_probability):
                stream.lose_leader(subject)
            elif stream.happens(0.3):
                stream.absent.discard(subject)
        if stream.happens(stream.leader_loss_probability):
            stream.cut(now)
        now += rng.choice([0.0, 0.02, 0.1, PAUSE_SECONDS, PATIENCE_SECONDS / 8])
        now += PATIENCE_SECONDS * (rng.random() < 0.05)
        if round_number > FAULTY_ROUNDS and publisher.is_empty:
            break
    assert publisher.is_empty, "no progress"
    stored = [number for class_id in CLASSES for number in publishers.stored(class_id)]
    assert set(stored) == set(range(publishers.count))
    named_numbers = [number for number in stored if number in publishers.of_names]
    assert len(named_numbers) == len(set(named_numbers))
    assert (publisher.full, publisher._queues, publisher._queue_by_request) == (set(), {}, {})
