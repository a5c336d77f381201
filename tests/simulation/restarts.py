"""What is promised for the end of a process, however it came, and checked when the next one begins.

Rule 1: what a crash may take depends on the level and on how the process ended. What it did take is
taken out of the history.

    log        of each class, what was accepted, by sequence
    places     who is entitled to what, was sent what, has acknowledged what
    confirmed  what publishers were told is stored
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from simplebus.core.broker.broker import Broker
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.durability import Durability
from tests.simulation.history import (
    Place,
    Talk,
    content_of,
    is_timed,
    pending_of,
    token_of,
)
from tests.simulation.messages import dead_letter
from tests.simulation.world import World


class BrokenError(AssertionError):
    """A promise was broken."""


class Outliving:
    """What is known of one bus, and what of it must outlive a process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker: Broker
        self.log: dict[int, list[bytes]] = {}
        """By class, the contents of all messages, by sequence; empty for one that is not known."""
        self.at: dict[bytes, tuple[int, int]] = {}
        """By token: class and sequence."""
        self.confirmed: set[bytes] = set()
        self.taken: set[bytes] = set()
        """What was stored as safely as is promised, and a crash was free to take."""
        self.refused_tokens: set[bytes] = set()
        self.may_be_twice: set[bytes] = set()
        """Of publishers that the bus does not remember, or has forgotten."""
        self.numbers: dict[tuple[str, int], bytes] = {}
        self.places: dict[tuple[int, tuple[str, str]], Place] = {}
        """Durables and groups."""
        self.talks: dict[int, Talk] = {}
        self.dead: dict[tuple[int, str], set[int]] = {}
        """By class and name: the sequences of dead letters."""
        self.purged: dict[int, set[int]] = {}
        """By class: what is purged, or perhaps is."""
        self.unread: dict[int, set[int]] = {}
        """By class: what a power cut took from the disk, and was found to be gone when it was read.
        """
        self.copies: dict[int, set[int]] = {}
        """By class: last values that were stored anew, as they were and as they are."""
        self.times: dict[tuple[int, int], float] = {}
        """By class and sequence: what the bus's clock said when it was stored."""
        self.counts: dict[str, int] = {}
        """What was seen, for people."""
        self._lossy = False
        """Whether the process before may have taken with it what was confirmed."""
        self._safe: dict[int, int] = {}
        """Below these, all was as safe as is promised."""
        self._ended = ""
        self._floors: dict[int, int] = {}
        """Below these, everybody had had everything."""
        self._gone: list[tuple[int, int]] = []
        self.ever_lossy = False
        """Whether some process has."""
        self.latest_clock = 0.0
        """The highest reading of the clock of the process that is there."""

    def count(self, what: str, many: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + many

    def demand(self, holds: bool, promise: str, *what: object) -> None:
        if not holds:
            raise BrokenError(f"{promise}: " + " ".join(map(str, what)))

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

    def _end(self, broker: Broker, how: str) -> None:
        self._ended = how
        self._floors = {class_id: cls.ring.floor for class_id, cls in broker.classes.items()}
        heads = {class_id: cls.ring.head for class_id, cls in broker.classes.items()}
        commit_log = broker.commit_log
        self._safe = (
            heads
            if commit_log is None
            else {k: commit_log.durable_head(k, n) for k, n in heads.items()}
        )

    def begin(self, broker: Broker, said: Collection[str]) -> None:
        """A process has begun, and has said this: what was confirmed is there, and for whom."""
        self.broker = broker
        self.said = said
        self.latest_clock = now = broker.clock.now
        self.clock_set(now)
        self.ever_lossy |= self._lossy
        self.count(f"lives {self._ended or 'first'}")
        self.talks.clear()
        lossy, self._lossy = self._lossy, False
        for class_id in sorted(self.log):
            self._recovered(class_id, lossy)
        for key, place in list(self.places.items()):
            self._place_recovered(key, place, lossy)
        self._find_dead()
        self._ended = ""

    def clock_set(self, now: float) -> None:
        """From when on the times count of what was stored later is the bus's affair: it is another
        one when they are read back."""
        self.times = {message: time for message, time in self.times.items() if time <= now}

    def _is_another(self, class_id: int, sequence: int, there: bytes) -> None:
        """A message that was gone is back instead of the one that had its sequence since."""
        log = self.log[class_id]
        if not log[sequence]:
            return
        token = token_of(log[sequence])
        if self.at.get(token) == (class_id, sequence):
            del self.at[token]
            self.taken.add(token)
            self.confirmed.discard(token)
            self.may_be_twice.add(token)
        log[sequence] = there
        self.times.pop((class_id, sequence), None)

    def _recovered(self, class_id: int, lossy: bool) -> None:
        log = self.log[class_id]
        cls = self.broker.classes.get(class_id)
        head = cls.ring.head if cls is not None else 0
        if lossy and cls is not None:  # What was given up before may be back.
            log += [
                content_of(cls, sequence) if sequence >= cls.ring.floor else b""
                for sequence in range(len(log), head)
            ]
        if cls is not None and self.ever_lossy:  # What is gone may still be known to be needed by
            log += [b""] * (cls.ring.floor - len(log))  # nobody: sequences go on behind it.
        self.demand(head <= len(log), "nothing is made up", f"class {class_id}: {head}")
        if cls is not None:
            for sequence in range(cls.ring.floor, head):
                there = content_of(cls, sequence)
                self.demand(
                    lossy or not log[sequence] or there == log[sequence],
                    "messages keep their sequences",
                    f"class {class_id}, {sequence}: {there!r}, was {log[sequence]!r}",
                )
                if there != log[sequence]:
                    self._is_another(class_id, sequence, there)
            if lossy:  # What is on disk alone may be such a one, too: nobody has looked.
                for sequence in range(min(cls.first_sequence, len(log)), cls.ring.floor):
                    self._is_another(class_id, sequence, b"")
        floor = self._floors.get(class_id, 0)
        for sequence in range(head, len(log)):
            if not log[sequence]:
                continue
            token = token_of(log[sequence])
            is_here = self.at.get(token) == (class_id, sequence)
            if is_here:
                del self.at[token]
                if sequence < max(floor, self._safe.get(class_id, 0)):
                    self.taken.add(token)
                if lossy:
                    self.confirmed.discard(token)
                    self.may_be_twice.add(token)
            self.demand(
                not (is_here and token in self.confirmed) or sequence < floor,
                "what is confirmed outlives the process",
                f"{token!r} of class {class_id}, {sequence}, after {self._ended}; head {head}",
            )
        for sequence in range(head, len(log)):
            self.times.pop((class_id, sequence), None)
        del log[head:]
        for known in (self.purged, self.unread, self.copies):
            if class_id in known:
                known[class_id] = {each for each in known[class_id] if each < head}
        if lossy:
            self.may_be_twice.update(self.numbers.values())

    def _place_recovered(self, key: tuple[int, tuple[str, str]], place: Place, lossy: bool) -> None:
        cls = self.broker.classes.get(place.class_id)
        position = (
            cls.named_positions.get(MessageClass.position_key(*place.key))
            if cls is not None
            else None
        )
        was_stopped = self._ended == "stopped"
        head = len(self.log.get(place.class_id, []))
        if position is None or not place.durable:
            needed = [] if lossy or not place.durable else list(self._needed(place, head))
            if all(sequence < place.granted for sequence in needed):
                needed = []  # Nothing was confirmed since: that it is there is not safe, either.
            self.demand(
                not needed,
                "durables outlive the process",
                f"{place.key} of class {place.class_id} is gone, and had {needed[:5]} to come",
            )
            del self.places[key]
            return
        assert cls is not None
        pending = pending_of(position, head)
        if not lossy:
            for sequence in self._needed(place, head):
                self.demand(
                    sequence in pending,
                    "what a durable has not acknowledged outlives the process",
                    f"{place.key} of class {place.class_id}: {sequence} after {self._ended}",
                )
        place.acked = {s for s in place.acked if was_stopped and s < head}
        self.demand(
            not place.acked & pending,
            "acks outlive a stop",
            f"{place.key} of class {place.class_id}: {sorted(place.acked & pending)[:5]}",
        )
        place.ever_acked = {s for s in place.ever_acked if s < head}
        place.ever_sent = {s for s in place.ever_sent if s < head}
        place.dropped = {s for s in place.dropped if s < head}
        place.attempts = {s: n for s, n in place.attempts.items() if was_stopped and s < head}
        place.sent.clear()
        place.excused.clear()
        place.first = position.window.cursor
        place.delivered = place.redelivered = place.lost = 0
        if lossy:
            place.since = head  # Dead letters may be gone, too.

    def _needed(self, place: Place, head: int) -> Iterator[int]:
        """What is confirmed and for a durable, and was not acknowledged for it."""
        log = self.log.get(place.class_id, [])
        dead = self.dead.get((place.class_id, place.durable or place.key[1]), set())
        for sequence in range(place.since, head):
            if sequence in place.ever_acked or sequence in dead or not log[sequence]:
                continue
            if self.is_gone(place, sequence):
                continue
            token = token_of(log[sequence])
            if token in self.confirmed and not is_timed(token) and self.is_for(place, token):
                yield sequence

    def is_gone(self, place: Place, sequence: int) -> bool:
        """Whether a position need not be sent it, as nobody is, or as there was no room for it."""
        class_id = place.class_id
        return (
            sequence in place.dropped
            or sequence in self.purged.get(class_id, ())
            or sequence in self.unread.get(class_id, ())
            or sequence in self.copies.get(class_id, ())
        )

    def is_for(self, place: Place, token: bytes) -> bool:
        """Whether its patterns match: the channel is part of the token."""
        if not place.channels:
            return True
        return any(b"c" in token.rsplit(b".", 1)[1] for _ in place.channels)

    def _find_dead(self) -> None:
        """The dead letters that there are after a crash."""
        self.dead.clear()
        for content in (content for log in self.log.values() for content in log if content):
            letter = dead_letter(content)
            if letter is not None:
                self.dead.setdefault(letter[:2], set()).add(letter[2])
