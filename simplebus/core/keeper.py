"""What has changed in a broker since it was looked at last, to be kept past the process.

Rule 1: nothing here changes the broker. What is found lies in the ledger's next lot.
Rule 2: new classes and names, and durables that come and go, are in the lot of the first message
that is accepted after them; so one that is confirmed finds them again. How far a position is may be
told later: what was acknowledged since comes once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from simplebus.core.acks import AckWindow
from simplebus.core.classes import MessageClass
from simplebus.core.kept import (
    Changes,
    KeptClass,
    KeptPosition,
    KeptPublisher,
    KeptRefusal,
    KeptWindow,
)
from simplebus.core.ledger import Ledger, Lot
from simplebus.core.limits import (
    KEPT_BYTES_MIN,
    KEPT_FRAME_BYTES,
    KEPT_POSITIONS,
    KEPT_SECONDS,
    KEPT_UNION_MAX,
)
from simplebus.core.subscription import Subscription
from simplebus.core.version2 import Version2

if TYPE_CHECKING:
    from simplebus.core.broker import Broker

_Key = tuple[int, str, str]


class Keeper:
    """Of one broker that has a ledger."""

    def __init__(self, broker: Broker) -> None:
        assert broker.ledger is not None
        self._broker = broker
        self._ledger: Ledger = broker.ledger
        self._classes: dict[int, tuple[int, object]] = {}
        """What was seen of each class."""
        self._positions: dict[int, dict[_Key, tuple[Subscription, object]]] = {}
        """And, by class, of each durable."""
        self._due = float("-inf")
        """When all is to be looked at again."""
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
        at_all = self.wants_snapshot or now >= self._due
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

    def _look(self, now: float, *, at_all: bool) -> Changes:
        """What has changed in all classes, or in those that hurry."""
        broker, ledger = self._broker, self._ledger
        looked_at = list(broker.classes) if at_all else list(ledger.hurries)
        ledger.hurries.clear()
        changes = Changes([], [], [])
        looked = 0
        for class_id in looked_at:
            cls = broker.classes[class_id]
            self._look_at(cls, changes)
            looked += 1 + len(cls.subscriptions)
        if at_all:
            self._due = now + KEPT_SECONDS * max(1.0, looked / KEPT_POSITIONS)
        return changes

    def _look_at(self, cls: MessageClass, changes: Changes) -> None:
        seen = _seen(cls, self._ledger.reached)
        if self._classes.get(cls.class_id) != seen:
            self._classes[cls.class_id] = seen
            changes.classes.append(_class(cls, self._ledger.reached))
        known, found = self._positions.get(cls.class_id, {}), {}
        for position in cls.named.values():
            if position.durable:
                key = (cls.class_id, position.durable, position.group)
                found[key] = here = (position, _progress(position))
                if known.pop(key, None) != here:
                    changes.positions.append(_position(position, self._broker))
        changes.gone.extend(known)
        self._positions[cls.class_id] = found

    def _everything(self) -> Changes:
        broker = self._broker
        return Changes(
            [_class(cls, self._ledger.reached) for cls in broker.classes.values()],
            [
                _position(position, broker)
                for positions in self._positions.values()
                for position, _ in positions.values()
            ],
            publishers=self._publishers(),
            purged=[
                (class_id, first, last)
                for class_id, cls in broker.classes.items()
                for first, last in cls.purged.within(cls.first, cls.ring.head)
            ],
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
                    publisher.name,
                    following,
                    ahead.ranges() if ahead else [],
                    publisher.instance,
                    [KeptRefusal.of(each) for each in publisher.refusals],
                )
            )
        return kept


def _seen(cls: MessageClass, reached: int) -> tuple[int, object]:
    """Another value when something has changed that is kept of a class; the first part is from
    where on it is."""
    waiting, ring = cls.waiting, cls.ring
    plain = [_progress(each) for each in cls.subscriptions if not each.durable]
    return cls.safe_floor(reached), (
        cls.name,
        cls.is_asked_for_values,
        ring.head,
        waiting.floor,
        waiting.cursor,
        waiting.in_flight,
        plain,
    )


def _progress(position: Subscription) -> object:
    """The same of a position."""
    window = position.window
    return (
        window.floor,
        window.cursor,
        position.acknowledged,
        position.redelivered,
        position.refused,
        position.terms,
        position.idle_seconds,
    )


def _class(cls: MessageClass, reached: int) -> KeptClass:
    waiting = KeptWindow.of(_left_behind(cls))
    floor, asked = cls.safe_floor(reached), cls.is_asked_for_values
    return KeptClass(cls.class_id, cls.name, floor, cls.ring.head, waiting, asked)


def _left_behind(cls: MessageClass) -> AckWindow:
    """What would wait in a class if every session ended now."""
    if not cls.subscriptions or any(durable for durable, _ in cls.named):
        return cls.waiting
    windows = [position.window for position in cls.subscriptions]
    if len(windows) > KEPT_UNION_MAX:
        window = AckWindow(floor=cls.floor())
        window.cursor = max(each.cursor for each in windows)
        return window
    if cls.waiting.floor < cls.waiting.cursor:
        windows.append(cls.waiting)
    window = windows[0]
    for other in windows[1:]:
        window = window.union(other)
    return window


def _position(position: Subscription, broker: Broker) -> KeptPosition:
    terms = position.terms
    return KeptPosition(
        position.class_id,
        position.durable,
        position.group,
        list(position.wanted.patterns) if position.wanted else [],
        KeptWindow.of(position.window),
        position.attempts(),
        terms.ack_ticks,
        terms.in_flight_max,
        terms.deliveries_max,
        terms.pending_max,
        terms.slow,
        position.idle_seconds,
        position.by_key,
        terms.backoff_ticks,
        position.pauses(broker.settings.tick_seconds),
        broker.clock.now,
    )
