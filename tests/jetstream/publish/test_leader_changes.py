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
from tests.jetstream.publish.test_batched_publish import CHAIN_SID, IN_FLIGHT, UNKNOWN, ChainStream
from tests.jetstream.publish.test_stream_publisher import FULL, entry, frame

CLASSES = 7, 8
WILD_TURNS, CALM_TURNS = 80, 2000
NO_LEADER = b'{"error":{"code":503,"err_code":10008,"description":"temporarily unavailable"}}'


@dataclass(slots=True)
class Taken:
    """A message that a leader has taken, and that is not stored yet."""

    payload: bytes
    id: str
    reply: bytes
    chain: bytes = b""
    far: int = 0
    """Which one of its chain it is, from 1."""
    is_end: bool = False
    is_known: bool = False
    """Whether it is there, or on its way, already: one of a chain is passed over."""


class Led(ChainStream):
    """Streams of two classes, and the messages in flight to and from their leaders."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.publisher.open_classes |= set(CLASSES)
        self.chance = chance
        self.trouble = 1.0
        self.loses_some, self.refuses_some, self.twice = (
            chance.choice([0.0, 0.005, 0.08]) for _ in range(3)
        )
        """How often that becomes of a message, or of an answer."""
        self.unrest = chance.choice([0.0, 0.02])
        self.written: deque[Pub] = deque()
        self.answers: list[bytes] = []
        self.taken: dict[str, deque[Taken]] = {f"s.{each}": deque() for each in CLASSES}
        self.open: dict[tuple[str, bytes], int] = {}
        """How far chains have come that have not ended."""
        self.known = set[tuple[str, str]]()
        """By subject: the ids of what the leader has taken; and not stored."""
        self.absent: set[str] = set()
        """Subjects of streams without a leader."""
        self.log: dict[str, list[int]] = {subject: [] for subject in self.taken}
        """Stored messages of each stream."""
        self.sequence = 0

    def happens(self, chance: float) -> bool:
        return self.chance.random() < chance * self.trouble

    def read(self) -> None:
        """Put published messages in transit to the leaders."""
        self.written += self.said()

    def say(self, reply: bytes, answer: bytes) -> None:
        """An answer is on its way."""
        sid = CHAIN_SID if reply.endswith(b".$FI") else 1
        head = b"MSG %b %d %d\r\n" % (reply, sid, len(answer))
        if answer.startswith(b"NATS/1.0"):
            head = b"HMSG %b %d %d %d\r\n" % (reply, sid, len(answer), len(answer))
        said = head + answer + b"\r\n"
        if self.happens(self.loses_some):
            return
        self.answers.append(said)
        if self.happens(self.twice):
            self.answers.insert(self.chance.randrange(len(self.answers)), said)

    def work(self, most: int) -> None:
        """Leaders take so many, and store some of what they have."""
        for _ in range(min(most, len(self.written))):
            self._deal_with(self.written.popleft())
        for subject, taken in self.taken.items():
            some = len(taken) if not self.trouble else self.chance.choice([0, 1, 5, 40, 1000])
            for _ in range(min(some, len(taken)) if subject not in self.absent else 0):
                self._store(subject, taken.popleft())

    def _deal_with(self, message: Pub) -> None:
        subject, body = message.subject.decode(), bytes(message.body)
        if subject in self.absent:
            if self.happens(0.5):
                nobody = b"NATS/1.0 503\r\n\r\n"
                self.say(message.reply, self.chance.choice([nobody, NO_LEADER]))
            return
        if self.happens(self.loses_some):
            return
        block = body[: message.header_bytes].decode()
        headers = dict(line.split(": ") for line in block.split("\r\n")[1:-2])
        id_, payload = headers.get("Nats-Msg-Id", ""), body[message.header_bytes :]
        taken = self.taken[subject]
        is_taken = (subject, id_) in self.known
        if self.sid_of(message) == CHAIN_SID:
            self._take_of_chain(message, Taken(payload, id_, message.reply), is_taken=is_taken)
        elif is_taken:
            self.say(message.reply, IN_FLIGHT)
        elif id_ in self.ids or "Nats-Rollup" in headers:
            self.say(message.reply, self.whether(id_))
        elif self.happens(self.refuses_some):
            self.say(message.reply, FULL)
        else:
            self.known.add((subject, id_))
            taken.append(Taken(payload, id_, message.reply))

    def _take_of_chain(self, message: Pub, one: Taken, *, is_taken: bool) -> None:
        subject = message.subject.decode()
        _, name, _, _, step, kind, _ = message.reply[len(b"_INBOX.") :].split(b".")
        number, chain = int(step), (subject, name)
        if chain not in self.open:
            if number != 1 or self.happens(self.refuses_some):
                self.say(message.reply, FULL if number == 1 else UNKNOWN)
                return
            self.open[chain] = 0
            self.say(message.reply, b'{"type":"ack","seq":0,"msgs":500}')
        far = self.open[chain]
        one.chain, one.far, one.is_end = name, number, kind == b"2"
        one.is_known = is_taken or (bool(one.id) and one.id in self.ids)
        if number != far + 1 or self.happens(0.002):  # It ends behind what there is of it.
            self.say(message.reply, b'{"type":"gap","last_seq":%d,"seq":1}' % far)
            one.far, one.is_end, one.is_known, one.id = far, True, True, ""
        elif one.is_end and one.is_known:  # So it is said at once.
            self._say_end(one, 0)
            one.is_end = False
            del self.open[chain]
        if one.is_end:
            del self.open[chain]
        elif chain in self.open:
            self.open[chain] = number
        if one.id and not one.is_known:
            self.known.add((subject, one.id))
        self.taken[subject].append(one)

    def _say_end(self, one: Taken, sequence: int) -> None:
        said = b'{"stream":"S","seq":%d,"batch":"%b","count":%d}'
        self.say(one.reply, said % (sequence, one.chain, one.far))

    def _store(self, subject: str, one: Taken) -> None:
        is_known = one.is_known or (bool(one.id) and one.id in self.ids)
        self.known.discard((subject, one.id))
        if not is_known:
            self.sequence += 1
            self.log[subject].append(int(one.payload))
            if one.id:
                self.ids[one.id] = self.sequence
        if not one.chain:
            is_new = b'{"stream":"S","seq":%d}' % self.sequence
            self.say(one.reply, self.whether(one.id) if is_known else is_new)
        elif one.is_end:
            self._say_end(one, self.sequence)
        elif one.far % 7 == 0:
            self.say(one.reply, b'{"type":"ack","seq":%d,"msgs":7}' % one.far)

    def lose_leader(self, subject: str) -> None:
        """Remove the leader. The next leader stores the remaining messages that it has."""
        taken, self.open = (
            self.taken[subject],
            {c: n for c, n in self.open.items() if c[0] != subject},
        )
        kept = self.chance.choice([0, len(taken) // 2, len(taken)])
        while len(taken) > kept:
            taken.pop()
        self.known = {each for each in self.known if each[0] != subject}
        self.absent.add(subject)

    def tell(self, most: int, now: float) -> int | None:
        """Deliver up to `most` answers, maybe reordered. Return the number of the last stored
        batch.
        """
        if self.happens(0.1):
            self.chance.shuffle(self.answers)
        some, self.answers = self.answers[:most], self.answers[most:]
        return self.answer(some, now) if some else None

    def cut(self, now: float) -> None:
        """Lose the connection and open another one, which gets the pending replies."""
        self.core.end_connection()
        self.work(self.chance.randrange(len(self.written) + 1))
        self.written.clear()
        if self.happens(0.7):
            self.answers.clear()
        self.connect(now)
        self.core.drain_output()
        self.publisher.handle_reconnect(now)


class Publishers:
    """Publishers of both classes. Named publishers repeat unconfirmed messages."""

    def __init__(self, stream: Led) -> None:
        self.stream = stream
        self.count = self.lots = self.reached = 0
        self.put: dict[int, list[tuple[int, set[int]]]] = {each: [] for each in CLASSES}
        """By class: each lot, and which messages it tells."""
        self.named: dict[int, list[int]] = {each: [] for each in CLASSES}
        """By class: what was published under a name and is not confirmed."""
        self.of_names: set[int] = set()

    def publish(self) -> None:
        chance, entries = self.stream.chance, []
        self.lots += 1
        for class_id in chance.choice([CLASSES, CLASSES[:1], CLASSES[1:]]):
            made, told = entry(class_id=class_id), set[int]()
            for _ in range(chance.choice([1, 1, 2])):
                name = chance.choice(["", "pub"])
                count = chance.choice([1, 3, 10, 40, 64, 100])
                some = list(range(self.count, self.count + count))
                self.count += count
                if name:
                    self.of_names.update(some)
                    again = self.named[class_id] if chance.random() < 0.1 else []
                    again = again[chance.randrange(len(again) + 1) :]
                    self.named[class_id] += some
                    some = [*again, *some]
                told.update(some)
                for number in some:
                    made.append_frames(1, frame(b"%d" % number, number, class_id=class_id), name)
            self.put[class_id].append((self.lots, told))
            entries.append(made)
        self.stream.publisher.append_batch(WriteBatch(self.lots, entries))

    def confirm(self, lot: int | None) -> None:
        """Check that the messages reported as stored are stored. Stop tracking them."""
        reached = dict(self.stream.publisher.pop_durable_positions())
        if lot is not None:
            assert self.reached < lot <= self.lots
            self.reached = lot
            for class_id in CLASSES:
                reached[class_id] = max(lot, reached.get(class_id, 0))
        for class_id, last in reached.items():
            told = [each for number, each in self.put[class_id] if number <= last]
            self.put[class_id] = self.put[class_id][len(told) :]
            confirmed = set[int]().union(*told)
            assert confirmed <= set(self.stored(class_id))
            self.named[class_id] = [n for n in self.named[class_id] if n not in confirmed]

    def stored(self, class_id: int) -> list[int]:
        return self.stream.log[f"s.{class_id}"]


@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_leader_changes_never_lose_confirmed_messages(seed: int) -> None:
    chance = random.Random(seed)
    stream = Led(chance)
    publishers, publisher, now = Publishers(stream), stream.publisher, 0.0
    holds: list[tuple[int, int]] = []
    for turn in range(WILD_TURNS + CALM_TURNS):
        if turn == WILD_TURNS:
            stream.trouble = 0.0
            stream.absent.clear()
            for hold in holds:
                publisher.resume_class(*hold)
            holds.clear()
        if turn < WILD_TURNS and chance.random() < 0.15:
            publishers.publish()
        if stream.happens(0.02):
            class_id = chance.choice(CLASSES)
            holds.append((class_id, publisher.pause_class(class_id)))
        if holds and chance.random() < 0.1:
            publisher.resume_class(*holds.pop(chance.randrange(len(holds))))
        publisher.publish_ready(now)
        stream.read()
        stream.work(chance.choice([0, 1, 5, 40, 1000]))
        publishers.confirm(stream.tell(chance.choice([0, 1, 5, 40, 1000]), now))
        if chance.random() < 0.5:
            publisher.open_classes |= publisher.pop_classes_without_stream()
        for subject in stream.taken:
            if stream.happens(stream.unrest):
                stream.lose_leader(subject)
            elif stream.happens(0.3):
                stream.absent.discard(subject)
        if stream.happens(stream.unrest):
            stream.cut(now)
        now += chance.choice([0.0, 0.02, 0.1, PAUSE_SECONDS, PATIENCE_SECONDS / 8])
        now += PATIENCE_SECONDS * (chance.random() < 0.05)
        if turn > WILD_TURNS and publisher.is_empty:
            break
    assert publisher.is_empty, "it hangs"
    stored = [number for class_id in CLASSES for number in publishers.stored(class_id)]
    assert set(stored) == set(range(publishers.count))
    known = [number for number in stored if number in publishers.of_names]
    assert len(known) == len(set(known))
    assert (publisher.full, publisher._queues, publisher._queue_by_request) == (set(), {}, {})
