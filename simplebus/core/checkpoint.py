"""What has changed in a broker since it was looked at last, to be kept past the process.

Rule 1: nothing here changes the broker. What is found lies in the ledger's next lot.
Rule 2: new classes and names, and durables that come and go, are in the next lot; so a message that
is confirmed finds them again. How far a position is may be told later: what was acknowledged since
comes once more.
Rule 3: when a durable comes or goes, it is looked at, and its class; not the others.
Rule 4: the more there is to tell, the more rarely all is looked at: what many messages wait for
singly stops nobody for long.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from msgspec import structs

from simplebus.core.commit_log import Ledger, Lot
from simplebus.core.limits import (
    KEPT_BYTES_MIN,
    KEPT_FRAME_BYTES,
    KEPT_POSITIONS,
    KEPT_SECONDS,
    KEPT_UNION_MAX,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import Left, Pauses, merged
from simplebus.core.session.version2 import Version2
from simplebus.core.snapshot import (
    Changes,
    KeptClass,
    KeptPosition,
    KeptPublisher,
    KeptRefusal,
    KeptWindow,
)
from simplebus.core.subscription.subscription import Subscription

if TYPE_CHECKING:
    from simplebus.core.broker.broker import Broker

_Key = tuple[int, str, str]
_Seen = tuple[int, tuple[int, object]]
"""From where on a class is kept; up to where, and what else there is to see of it."""


class Keeper:
    """Of one broker that has a ledger."""

    def __init__(self, broker: Broker) -> None:
        assert broker.ledger is not None
        self._broker = broker
        self._ledger: Ledger = broker.ledger
        self._classes: dict[int, _Seen] = {}
        """What was seen of each class."""
        self._fronts: dict[int, object] = {}
        """The part of it that is looked at when a durable comes or goes."""
        self._positions: dict[int, dict[_Key, tuple[Subscription, object]]] = {}
        """And, by class, of each durable."""
        self.due = float("-inf")
        """When all is to be looked at again, by the broker's clock."""
        self._rows = 0
        """How many rows about single messages were gone through."""
        self._bytes = 0
        """Of changes since the last snapshot."""
        self._snapshot_bytes = 0
        self._frame_bytes = 0
        """Of messages since the last snapshot."""
        self.wants_snapshot = True
        """Whether the next lot is to hold everything."""

    def take(self) -> Lot | None:
        """What is to be written next, if anything is."""
        ledger, now = self._ledger, self._broker.clock.now
        is_owed = not ledger.is_empty
        self._frame_bytes += ledger.noted_bytes
        if (
            self._bytes > max(KEPT_BYTES_MIN, 4 * self._snapshot_bytes)
            or self._frame_bytes > KEPT_FRAME_BYTES
        ):
            self.wants_snapshot = True
        at_all = self.wants_snapshot or now >= self.due
        if not at_all and not is_owed:
            return None
        changes = self._look(now, at_all=at_all)
        begun = [KeptPublisher(name, at, [], which) for name, at, which in ledger.take_begun()]
        refused, purged = ledger.take_refused(), ledger.take_purged()
        if self.wants_snapshot:
            self.wants_snapshot = False
            snapshot = self._everything().encode()
            self._bytes, self._snapshot_bytes, self._frame_bytes = 0, len(snapshot), 0
            return ledger.take(snapshot=snapshot)
        changes = Changes(
            changes.classes,
            changes.positions,
            changes.gone,
            begun,
            [(name, each.refers_to, each.count) for name, each in refused],
            purged,
            [KeptRefusal.of(each) for _, each in refused],
        )
        if not any(structs.astuple(changes)):
            return ledger.take(is_owed=is_owed)
        encoded = changes.encode()
        self._bytes += len(encoded)
        return ledger.take(encoded)

    def floors(self) -> dict[int, int]:
        """By class, from where on it is kept, as the lots that were taken say."""
        return {class_id: floor for class_id, (floor, _) in self._classes.items()}

    def empty(self) -> set[int]:
        """Classes of which nothing is kept, as they say, too."""
        return {class_id for class_id, (floor, (head, _)) in self._classes.items() if floor == head}

    def _look(self, now: float, *, at_all: bool) -> Changes:
        """What has changed: of everything, or of what hurries."""
        ledger, classes = self._ledger, self._broker.classes
        hurries, changed = [*ledger.hurries, *ledger.changed], list(ledger.changed.items())
        ledger.hurries.clear()
        ledger.changed.clear()
        changes = Changes([], [], [])
        if at_all:
            looked, self._rows = 0, 0
            for cls in classes.values():
                self._look_at(cls, changes)
                looked += 1 + len(cls.subscriptions)
            looked += self._rows
            self.due = now + KEPT_SECONDS * max(1.0, looked / KEPT_POSITIONS)
            return changes
        for class_id in dict.fromkeys(hurries):
            self._look_at_front(classes[class_id], changes)
        for class_id, names in changed:
            for durable, group in names:
                self._look_at_one(classes[class_id], durable, group, changes)
        return changes

    def _look_at_front(self, cls: MessageClass, changes: Changes) -> None:
        """At what may be news of a class for which a durable came or went, or that is new."""
        if self._fronts.get(cls.class_id) != _front(cls):
            self._tell(cls, _seen(cls, self._ledger.reached), changes)

    def _tell(self, cls: MessageClass, seen: _Seen, changes: Changes) -> None:
        self._classes[cls.class_id], self._fronts[cls.class_id] = seen, _front(cls)
        changes.classes.append(self._class(cls))

    def _look_at_one(self, cls: MessageClass, durable: str, group: str, changes: Changes) -> None:
        """At a durable that may have come, or gone."""
        known = self._positions.setdefault(cls.class_id, {})
        key, position = (cls.class_id, durable, group), cls.named.get(cls.key(durable, group))
        if position is None or position.group != group:
            if known.pop(key, None) is not None:
                changes.gone.append(key)
            return
        here = position, _progress(position)
        if known.get(key) != here:
            known[key] = here
            changes.positions.append(self._position(position))

    def _look_at(self, cls: MessageClass, changes: Changes) -> None:
        seen = _seen(cls, self._ledger.reached)
        if self._classes.get(cls.class_id) != seen or self._fronts[cls.class_id] != _front(cls):
            self._tell(cls, seen, changes)
        known, found = self._positions.get(cls.class_id, {}), {}
        for position in cls.named.values():
            if position.durable:
                key = (cls.class_id, position.durable, position.group)
                found[key] = here = (position, _progress(position))
                if known.pop(key, None) != here:
                    changes.positions.append(self._position(position))
        changes.gone.extend(known)
        self._positions[cls.class_id] = found

    def _everything(self) -> Changes:
        broker = self._broker
        return Changes(
            [self._class(cls) for cls in broker.classes.values()],
            [
                self._position(position)
                for positions in self._positions.values()
                for position, _ in positions.values()
            ],
            publishers=self._publishers(),
            purged=[
                (class_id, first, last)
                for class_id, cls in broker.classes.items()
                for first, last in cls.purged.within(cls.first, cls.ring.head)
            ],
            boot=self._ledger.boot,
            level=int(self._ledger.level),
        )

    def _publishers(self) -> list[KeptPublisher]:
        kept = []
        for publisher in self._broker.answers.publishers:
            following, ahead = publisher.next, publisher.ahead
            if publisher.session_id is not None:
                session = self._broker.sessions[publisher.session_id]
                dialect = session.dialect
                assert isinstance(dialect, Version2)
                following = dialect.stored
                ahead = dialect.stored_ahead(following, [batch for _, batch in session.parked])
            kept.append(
                KeptPublisher(
                    publisher.key,
                    following,
                    ahead.ranges() if ahead else [],
                    publisher.instance,
                    [KeptRefusal.of(each) for each in publisher.refusals],
                    publisher.is_doubted,
                )
            )
        return kept

    def _class(self, cls: MessageClass) -> KeptClass:
        window, left = _left_behind(cls)
        left = left.within(window.floor, window.cursor)
        return KeptClass(
            cls.class_id,
            cls.name,
            cls.safe_floor(self._ledger.reached),
            cls.ring.head,
            KeptWindow.of(window),
            cls.is_asked_for_values,
            merged(left.sent, 0),
            self._pauses(left),
            self._broker.clock.now,
            cls.maker,
        )

    def _position(self, position: Subscription) -> KeptPosition:
        terms, attempts = position.terms, position.attempts()
        unburied = position.unburied.rows()
        self._rows += len(attempts) + len(unburied)
        return KeptPosition(
            position.class_id,
            position.durable,
            position.group,
            list(position.wanted.patterns) if position.wanted else [],
            KeptWindow.of(position.window),
            merged(attempts, 0),
            terms.ack_ticks,
            terms.in_flight_max,
            terms.deliveries_max,
            terms.pending_max,
            terms.slow,
            position.idle_seconds,
            position.by_key,
            terms.backoff_ticks,
            self._pauses(position.left()),
            self._broker.clock.now,
            unburied,
            position.owner,
        )

    def _pauses(self, left: Left) -> Pauses:
        """For how long what is left is not to be sent: known to within a tick."""
        seconds = self._broker.settings.tick_seconds
        self._rows += len(left.sent) + len(left.ticks) + len(left.times)
        return merged(left.pauses(self._broker.clock, seconds), seconds)


def _front(cls: MessageClass) -> object:
    """Another value when something has changed that is kept of a class, but for how far it is."""
    waiting = cls.waiting
    return (
        cls.name,
        cls.is_asked_for_values,
        waiting.floor,
        waiting.cursor,
        waiting.in_flight,
        _has_durables(cls),
    )


def _seen(cls: MessageClass, reached: int) -> _Seen:
    """Another value when that has changed."""
    plain = [_progress(each) for each in cls.subscriptions if not each.durable]
    return cls.safe_floor(reached), (cls.ring.head, (plain, cls.left))


def _has_durables(cls: MessageClass) -> bool:
    return any(durable for durable, _ in cls.named)


def _progress(position: Subscription) -> object:
    """The same of a position."""
    window = position.window
    return (
        window.floor,
        window.cursor,
        window.in_flight,
        position.redelivered,
        position.refused,
        position.terms,
        position.idle_seconds,
        position.owner,
        len(position.unburied),
    )


def _left_behind(cls: MessageClass) -> tuple[AckWindow, Left]:
    """What would wait in a class if every session ended now, and what is known of it."""
    if not cls.subscriptions or _has_durables(cls):
        return cls.waiting, cls.left
    oldest = list(islice(cls.subscriptions, KEPT_UNION_MAX))
    left = cls.left
    for position in oldest:
        left = left.joined(position.left())
    if len(cls.subscriptions) > len(oldest):  # The oldest ones were sent it as often as any.
        window = AckWindow(floor=cls.floor())
        window.cursor = max(each.window.cursor for each in cls.subscriptions)
        return window, left.joined(Left([(window.floor, window.cursor, 1)]))
    windows = [position.window for position in oldest]
    if cls.waiting.floor < cls.waiting.cursor:
        windows.append(cls.waiting)
    window = windows[0]
    for other in windows[1:]:
        window = window.union(other)
    return window, left
