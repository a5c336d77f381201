"""Checks of the state that must survive the end of a process.

A crash may lose some messages, depending on durability and on how the process ended. Lost messages
are removed from the history.

    messages     accepted messages of each class, by sequence
    positions    what each position is entitled to, was sent, and has acked
    confirmed    messages that publishers know to be stored
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from simplebus.core.broker.broker import Broker
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.durability import Durability
from simplebus.storage.segments import describe_range
from tests.simulation.history import (
    PositionHistory,
    SessionHistory,
    is_timed,
    message_token,
    pending_sequences,
    stored_content,
)
from tests.simulation.messages import parse_dead_letter
from tests.simulation.world import World


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


_Attempts = dict[PositionHistory, dict[int, int]]
"""Number of deliveries, by durable and sequence."""


class RestartChecks:
    """History of one bus, and the checks after each restart."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker: Broker
        self.messages: dict[int, list[bytes]] = {}
        """Contents of all messages of a class, by sequence; empty if unknown."""
        self.location_by_token: dict[bytes, tuple[int, int]] = {}
        """Class and sequence of each message."""
        self.confirmed: set[bytes] = set()
        self.lost_tokens: set[bytes] = set()
        """Messages that were durable, and that a crash was still allowed to take."""
        self.refused_tokens: set[bytes] = set()
        self.possible_duplicates: set[bytes] = set()
        """Messages of publishers without a name, or with a forgotten state."""
        self.numbers: dict[tuple[str, int], bytes] = {}
        self.position_histories: dict[tuple[int, tuple[str, str]], PositionHistory] = {}
        """Durables and groups."""
        self.session_histories: dict[int, SessionHistory] = {}
        self.dead_letters: dict[tuple[int, str], set[int]] = {}
        """By class and durable: sequences of dead letters."""
        self.purged: dict[int, set[int]] = {}
        """By class: purged messages, including those that may be."""
        self.unreadable_sequences: dict[int, set[int]] = {}
        """By class: messages that a power cut took from the disk, found missing by a read."""
        self.copies: dict[int, set[int]] = {}
        """By class: last values that compaction copied, and their copies."""
        self.unseen_count = 0
        """Messages of classes with last values that were stored and dropped in one turn."""
        self.times: dict[tuple[int, int], float] = {}
        """By class and sequence: the bus's clock when the message was stored."""
        self.counts: dict[str, int] = {}
        """Counters that are printed."""
        self._lossy = False
        """True if the last process may have lost confirmed messages."""
        self._safe: dict[int, int] = {}
        """Messages below these sequences were durable."""
        self._ended = ""
        self._floors: dict[int, int] = {}
        """Messages below these sequences were not needed any more."""
        self._drop_floors: dict[int, int] = {}
        """Sequences below which classes were dropping messages when a process ended."""
        self._recorded_attempts: list[tuple[int, _Attempts]] = []
        """Numbers of write batches, ascending, and the deliveries that batches up to them contain.
        """
        self._durable_attempts: _Attempts = {}
        """Deliveries that the next process must know."""
        self.was_ever_lossy = False
        """True if any process may have lost confirmed messages."""
        self._damaged: tuple[int, range] | None = None
        """Class and sequences that the medium has damaged since the last process."""
        self._damaged_contents: list[bytes] = []
        """Contents of all messages that the medium has damaged."""
        self.latest_clock = 0.0
        """The highest clock reading of the current process."""

    def count(self, event: str, amount: int = 1) -> None:
        self.counts[event] = self.counts.get(event, 0) + amount

    def check(self, holds: bool, promise: str, *detail: object) -> None:
        if not holds:
            raise BrokenPromiseError(f"{promise}: " + " ".join(map(str, detail)))

    # Processes -----------------------------------------------------------------------------------

    def killed(self, broker: Broker, level: Durability | None) -> None:
        self._end(broker, "killed")
        self._lossy = level is None or level is Durability.MEMORY

    def power_cut(self, broker: Broker, level: Durability | None) -> None:
        self._end(broker, "cut")
        self._lossy = level is not Durability.DISK

    def stopped(self, broker: Broker, level: Durability | None) -> None:
        self._end(broker, "stopped")
        self._lossy = level is None

    def _end(self, broker: Broker, ending: str) -> None:
        self._ended = ending
        self._floors = {class_id: cls.ring.floor for class_id, cls in broker.classes.items()}
        self._drop_floors |= {class_id: self._drop_floor(class_id) for class_id in broker.classes}
        heads = {class_id: cls.ring.head for class_id, cls in broker.classes.items()}
        commit_log = broker.commit_log
        self._safe = (
            heads
            if commit_log is None
            else {k: commit_log.durable_head(k, n) for k, n in heads.items()}
        )
        self._durable_attempts = {}
        if ending == "stopped":
            self._durable_attempts = self._copy_attempts()
        elif commit_log is not None:
            for batch_number, attempts in self._recorded_attempts:
                if batch_number <= commit_log.durable_position:
                    self._durable_attempts = attempts

    def deliveries_recorded(self, batch_number: int) -> None:
        """Record that write batches up to this one contain all deliveries so far."""
        self._recorded_attempts.append((batch_number, self._copy_attempts()))

    def _copy_attempts(self) -> _Attempts:
        return {
            position_history: position_history.attempts.copy()
            for position_history in self.position_histories.values()
            if position_history.durable
        }

    def record_damage(self, class_id: int, sequences: range, *, may_end_class: bool) -> None:
        """Record that the medium has damaged stored messages.

        With `may_end_class`, the class may lose the messages after them as well.
        """
        self.count("damaged", len(sequences))
        log = self.messages[class_id]
        if may_end_class:
            sequences = range(sequences.start, len(log))
        for sequence in sequences:
            if log[sequence]:
                self._damaged_contents.append(log[sequence])
                token = message_token(log[sequence])
                if self.location_by_token.get(token) == (class_id, sequence):
                    del self.location_by_token[token]
                self.lost_tokens.add(token)
                self.confirmed.discard(token)
                self.possible_duplicates.add(token)
                log[sequence] = b""
        self.unreadable_sequences.setdefault(class_id, set()).update(sequences)
        self.was_ever_lossy = True
        if not may_end_class:
            self._damaged = class_id, sequences

    def _check_damage_report(self, class_id: int, sequences: range) -> None:
        cls = self.broker.classes.get(class_id)
        if cls is None or cls.spill is not None or sequences.stop <= self._floors[class_id]:
            return  # Nothing reads the record at the start.
        expected = describe_range(cls.name or str(class_id), sequences.start, sequences.stop)
        self.check(
            any(expected in sentence for sentence in self.warnings),
            "damaged records are reported",
            expected,
        )

    def process_started(self, broker: Broker, warnings: Collection[str]) -> None:
        """Check what a new process has recovered. `warnings` are its log messages."""
        self.broker = broker
        self.warnings = warnings
        self.latest_clock = now = broker.clock.now
        self.clock_set(now)
        self.was_ever_lossy |= self._lossy
        self.count(f"processes after {self._ended or 'first'}")
        self.session_histories.clear()
        lossy, self._lossy = self._lossy, False
        for class_id in sorted(self.messages):
            self._recovered(class_id, lossy)
        if lossy or self._damaged is not None:
            self._durable_attempts = {}
        for key, position_history in list(self.position_histories.items()):
            self._place_recovered(key, position_history, lossy)
        self._recorded_attempts.clear()
        if broker.commit_log is not None:
            self.deliveries_recorded(broker.commit_log.last_batch_number)
        self._find_dead_letters()
        if self._damaged is not None:
            self._check_damage_report(*self._damaged)
            self._damaged = None
        self._ended = ""

    def clock_set(self, now: float) -> None:
        """Forget the times that are later by the new clock.

        Messages stored later are relative to another clock when read back. A session may have
        selected messages for sending since its outbox was last empty, also now.
        """
        self.times = {message: time for message, time in self.times.items() if time <= now}
        for session_history in self.session_histories.values():
            session_history.clean_clock = min(session_history.clean_clock, now)

    def _replace_message(self, class_id: int, sequence: int, stored: bytes) -> None:
        """Record that an older message is stored again instead of the message that reused its
        sequence.
        """
        log = self.messages[class_id]
        if not log[sequence]:
            return
        token = message_token(log[sequence])
        if self.location_by_token.get(token) == (class_id, sequence):
            del self.location_by_token[token]
            self.lost_tokens.add(token)
            self.confirmed.discard(token)
            self.possible_duplicates.add(token)
        log[sequence] = stored
        self.times.pop((class_id, sequence), None)

    def _recovered(self, class_id: int, lossy: bool) -> None:
        log = self.messages[class_id]
        cls = self.broker.classes.get(class_id)
        head = cls.ring.head if cls is not None else 0
        if lossy and cls is not None:  # Dead-lettered or purged messages may be stored again.
            log += [
                stored_content(cls, sequence) if sequence >= cls.ring.floor else b""
                for sequence in range(len(log), head)
            ]
        if cls is not None and self.was_ever_lossy:
            # Lost messages leave a gap: sequences continue after it.
            log += [b""] * (cls.ring.floor - len(log))
        self.check(head <= len(log), "no messages are made up", f"class {class_id}: {head}")
        if cls is not None:
            for sequence in range(cls.ring.floor, head):
                stored = stored_content(cls, sequence)
                self.check(
                    lossy or not log[sequence] or stored == log[sequence],
                    "messages keep their sequences",
                    f"class {class_id}, {sequence}: {stored!r}, was {log[sequence]!r}",
                )
                if stored != log[sequence]:
                    self._replace_message(class_id, sequence, stored)
            if lossy:  # Messages that are only on disk may be unreadable as well.
                for sequence in range(min(cls.first_sequence, len(log)), cls.ring.floor):
                    self._replace_message(class_id, sequence, b"")
        floor = self._floors.get(class_id, 0)
        for sequence in range(head, len(log)):
            if not log[sequence]:
                continue
            token = message_token(log[sequence])
            is_here = self.location_by_token.get(token) == (class_id, sequence)
            if is_here:
                del self.location_by_token[token]
                if sequence < max(floor, self._safe.get(class_id, 0)):
                    self.lost_tokens.add(token)
                if lossy:
                    self.confirmed.discard(token)
                    self.possible_duplicates.add(token)
            self.check(
                not (is_here and token in self.confirmed) or sequence < floor,
                "confirmed messages survive restarts",
                f"{token!r} of class {class_id}, {sequence}, after {self._ended}; head {head}",
            )
        for sequence in range(head, len(log)):
            self.times.pop((class_id, sequence), None)
        del log[head:]
        self._drop_floors[class_id] = min(head, self._drop_floors.get(class_id, 0))
        for sequences_by_class in (self.purged, self.unreadable_sequences, self.copies):
            if class_id in sequences_by_class:
                sequences_by_class[class_id] = {
                    each for each in sequences_by_class[class_id] if each < head
                }
        if lossy:
            self.possible_duplicates.update(self.numbers.values())

    def _place_recovered(
        self, key: tuple[int, tuple[str, str]], position_history: PositionHistory, lossy: bool
    ) -> None:
        cls = self.broker.classes.get(position_history.class_id)
        position = (
            cls.named_positions.get(MessageClass.position_key(*position_history.key))
            if cls is not None
            else None
        )
        was_stopped = self._ended == "stopped"
        head = len(self.messages.get(position_history.class_id, []))
        if position is None or not position_history.durable:
            required = (
                []
                if lossy or not position_history.durable
                else list(self._needed(position_history, head))
            )
            if all(sequence < position_history.granted for sequence in required):
                required = []  # Nothing was confirmed since, so it may be lost, too.
            self.check(
                not required,
                "durables survive restarts",
                f"{position_history.label} is gone, and had {required[:5]} to come",
            )
            del self.position_histories[key]
            return
        assert cls is not None
        pending = pending_sequences(position, head)
        if not lossy:
            for sequence in self._needed(position_history, head):
                self.check(
                    sequence in pending,
                    "unacked messages of durables survive restarts",
                    f"{position_history.label}: {sequence} after {self._ended}",
                )
        position_history.acked = {s for s in position_history.acked if was_stopped and s < head}
        self.check(
            not position_history.acked & pending,
            "acks survive a graceful stop",
            f"{position_history.label}: {sorted(position_history.acked & pending)[:5]}",
        )
        position_history.ever_acked = {s for s in position_history.ever_acked if s < head}
        position_history.ever_sent = {s for s in position_history.ever_sent if s < head}
        position_history.dropped = {s for s in position_history.dropped if s < head}
        attempts = self._durable_attempts.get(position_history, {})
        position_history.attempts = {s: n for s, n in attempts.items() if s < head}
        position_history.sent.clear()
        position_history.excused.clear()
        position_history.rejected.clear()
        position_history.first = position.window.cursor
        position_history.delivered = position_history.redelivered = position_history.lost = 0
        if lossy:
            position_history.since = head  # Dead letters may be gone, too.

    def _needed(self, position_history: PositionHistory, head: int) -> Iterator[int]:
        """Yield confirmed messages for a durable that it has not acked."""
        log = self.messages.get(position_history.class_id, [])
        dead = self.dead_letters.get(
            (position_history.class_id, position_history.durable or position_history.key[1]), set()
        )
        for sequence in range(position_history.since, head):
            if sequence in position_history.ever_acked or sequence in dead or not log[sequence]:
                continue
            if self.is_gone(position_history, sequence):
                continue
            token = message_token(log[sequence])
            if (
                token in self.confirmed
                and not is_timed(token)
                and self.is_for(position_history, token)
            ):
                yield sequence

    def is_gone(self, position_history: PositionHistory, sequence: int) -> bool:
        """Return True if a position need not receive a message: purged, dropped or lost."""
        class_id = position_history.class_id
        return (
            sequence in position_history.dropped
            or sequence in self.purged.get(class_id, ())
            or sequence in self.unreadable_sequences.get(class_id, ())
            or sequence in self.copies.get(class_id, ())
            or sequence < self._drop_floor(class_id)
        )

    def _drop_floor(self, class_id: int) -> int:
        """Return the sequence below which the class is dropping its oldest messages."""
        cls = self.broker.classes.get(class_id)
        floor = 0 if cls is None else self.broker.store.oldest_dropper.drop_floor(cls)
        return max(floor, self._drop_floors.get(class_id, 0))

    def is_for(self, position_history: PositionHistory, token: bytes) -> bool:
        """Return True if the patterns match. The token contains the channel."""
        if not position_history.channels:
            return True
        return any(b"c" in token.rsplit(b".", 1)[1] for _ in position_history.channels)

    def _find_dead_letters(self) -> None:
        """Find the dead letters that exist after a crash, or that the medium has damaged."""
        self.dead_letters.clear()
        stored = (content for log in self.messages.values() for content in log if content)
        for content in (*stored, *self._damaged_contents):
            letter = parse_dead_letter(content)
            if letter is not None:
                self.dead_letters.setdefault(letter[:2], set()).add(letter[2])
