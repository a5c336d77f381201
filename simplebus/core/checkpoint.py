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

from simplebus.core.commit_log import CommitLog, WriteBatch
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
from simplebus.core.session.version2 import Version2Decoder
from simplebus.core.snapshot import (
    StateChanges,
    ClassSnapshot,
    PositionSnapshot,
    ProducerSnapshot,
    RefusalSnapshot,
    WindowSnapshot,
)
from simplebus.core.subscription.subscription import BrokerSubscription

if TYPE_CHECKING:
    from simplebus.core.broker.broker import Broker

_PositionKey = tuple[int, str, str]
_ClassState = tuple[int, tuple[int, object]]
"""From where on a class is kept; up to where, and what else there is to see of it."""


class Checkpointer:
    """Of one broker that has a ledger."""

    def __init__(self, broker: Broker) -> None:
        assert broker.commit_log is not None
        self._broker = broker
        self._commit_log: CommitLog = broker.commit_log
        self._class_states: dict[int, _ClassState] = {}
        """What was seen of each class."""
        self._class_headers: dict[int, object] = {}
        """The part of it that is looked at when a durable comes or goes."""
        self._position_states: dict[int, dict[_PositionKey, tuple[BrokerSubscription, object]]] = {}
        """And, by class, of each durable."""
        self.next_full_scan = float("-inf")
        """When all is to be looked at again, by the broker's clock."""
        self._scanned_row_count = 0
        """How many rows about single messages were gone through."""
        self._change_bytes = 0
        """Of changes since the last snapshot."""
        self._snapshot_bytes = 0
        self._message_bytes = 0
        """Of messages since the last snapshot."""
        self.is_snapshot_due = True
        """Whether the next lot is to hold everything."""

    def build_write_batch(self) -> WriteBatch | None:
        """What is to be written next, if anything is."""
        ledger, now = self._commit_log, self._broker.clock.now
        is_owed = not ledger.is_empty
        self._message_bytes += ledger.noted_bytes
        if (
            self._change_bytes > max(KEPT_BYTES_MIN, 4 * self._snapshot_bytes)
            or self._message_bytes > KEPT_FRAME_BYTES
        ):
            self.is_snapshot_due = True
        at_all = self.is_snapshot_due or now >= self.next_full_scan
        if not at_all and not is_owed:
            return None
        changes = self._collect_changes(now, is_full_scan=at_all)
        begun = [ProducerSnapshot(name, at, [], which) for name, at, which in ledger.take_begun()]
        refused, purged = ledger.take_refused(), ledger.take_purged()
        if self.is_snapshot_due:
            self.is_snapshot_due = False
            snapshot = self._build_snapshot().encode()
            self._change_bytes, self._snapshot_bytes, self._message_bytes = 0, len(snapshot), 0
            return ledger.take(snapshot=snapshot)
        changes = StateChanges(
            changes.classes,
            changes.positions,
            changes.gone,
            begun,
            [(name, each.refers_to, each.count) for name, each in refused],
            purged,
            [RefusalSnapshot.of(each) for _, each in refused],
        )
        if not any(structs.astuple(changes)):
            return ledger.take(is_owed=is_owed)
        encoded = changes.encode()
        self._change_bytes += len(encoded)
        return ledger.take(encoded)

    def class_floors(self) -> dict[int, int]:
        """By class, from where on it is kept, as the lots that were taken say."""
        return {class_id: floor for class_id, (floor, _) in self._class_states.items()}

    def empty_class_ids(self) -> set[int]:
        """Classes of which nothing is kept, as they say, too."""
        return {
            class_id for class_id, (floor, (head, _)) in self._class_states.items() if floor == head
        }

    def _collect_changes(self, now: float, *, is_full_scan: bool) -> StateChanges:
        """What has changed: of everything, or of what hurries."""
        ledger, classes = self._commit_log, self._broker.classes
        hurries, changed = [*ledger.hurries, *ledger.changed], list(ledger.changed.items())
        ledger.hurries.clear()
        ledger.changed.clear()
        changes = StateChanges([], [], [])
        if is_full_scan:
            looked, self._scanned_row_count = 0, 0
            for cls in classes.values():
                self._collect_class(cls, changes)
                looked += 1 + len(cls.subscriptions)
            looked += self._scanned_row_count
            self.next_full_scan = now + KEPT_SECONDS * max(1.0, looked / KEPT_POSITIONS)
            return changes
        for class_id in dict.fromkeys(hurries):
            self._collect_class_header(classes[class_id], changes)
        for class_id, names in changed:
            for durable, group in names:
                self._collect_durable(classes[class_id], durable, group, changes)
        return changes

    def _collect_class_header(self, cls: MessageClass, changes: StateChanges) -> None:
        """At what may be news of a class for which a durable came or went, or that is new."""
        if self._class_headers.get(cls.class_id) != _class_header(cls):
            self._record_class(cls, _class_state(cls, self._commit_log.reached), changes)

    def _record_class(self, cls: MessageClass, state: _ClassState, changes: StateChanges) -> None:
        self._class_states[cls.class_id], self._class_headers[cls.class_id] = (
            state,
            _class_header(cls),
        )
        changes.classes.append(self._snapshot_class(cls))

    def _collect_durable(
        self, cls: MessageClass, durable: str, group: str, changes: StateChanges
    ) -> None:
        """At a durable that may have come, or gone."""
        known = self._position_states.setdefault(cls.class_id, {})
        key, position = (
            (cls.class_id, durable, group),
            cls.named_positions.get(cls.position_key(durable, group)),
        )
        if position is None or position.group != group:
            if known.pop(key, None) is not None:
                changes.gone.append(key)
            return
        here = position, _position_state(position)
        if known.get(key) != here:
            known[key] = here
            changes.positions.append(self._snapshot_position(position))

    def _collect_class(self, cls: MessageClass, changes: StateChanges) -> None:
        seen = _class_state(cls, self._commit_log.reached)
        if self._class_states.get(cls.class_id) != seen or self._class_headers[
            cls.class_id
        ] != _class_header(cls):
            self._record_class(cls, seen, changes)
        known, found = self._position_states.get(cls.class_id, {}), {}
        for position in cls.named_positions.values():
            if position.durable:
                key = (cls.class_id, position.durable, position.group)
                found[key] = here = (position, _position_state(position))
                if known.pop(key, None) != here:
                    changes.positions.append(self._snapshot_position(position))
        changes.gone.extend(known)
        self._position_states[cls.class_id] = found

    def _build_snapshot(self) -> StateChanges:
        broker = self._broker
        return StateChanges(
            [self._snapshot_class(cls) for cls in broker.classes.values()],
            [
                self._snapshot_position(position)
                for positions in self._position_states.values()
                for position, _ in positions.values()
            ],
            publishers=self._snapshot_producers(),
            purged=[
                (class_id, first, last)
                for class_id, cls in broker.classes.items()
                for first, last in cls.purged_sequences.within(cls.first_sequence, cls.ring.head)
            ],
            boot=self._commit_log.boot,
            level=int(self._commit_log.level),
        )

    def _snapshot_producers(self) -> list[ProducerSnapshot]:
        kept = []
        for publisher in self._broker.connection_requests.producer_states:
            following, ahead = publisher.next, publisher.ahead
            if publisher.session_id is not None:
                session = self._broker.sessions[publisher.session_id]
                dialect = session.decoder
                assert isinstance(dialect, Version2Decoder)
                following = dialect.stored_before
                ahead = dialect.build_unconfirmed_range(
                    following, [batch for _, batch in session.parked_messages]
                )
            kept.append(
                ProducerSnapshot(
                    publisher.key,
                    following,
                    ahead.ranges() if ahead else [],
                    publisher.instance,
                    [RefusalSnapshot.of(each) for each in publisher.refusals],
                    publisher.is_doubted,
                )
            )
        return kept

    def _snapshot_class(self, cls: MessageClass) -> ClassSnapshot:
        window, left = _handover_if_all_ended(cls)
        left = left.within(window.floor, window.cursor)
        return ClassSnapshot(
            cls.class_id,
            cls.name,
            cls.compute_durable_floor(self._commit_log.reached),
            cls.ring.head,
            WindowSnapshot.of(window),
            cls.are_last_values_requested,
            merged(left.sent, 0),
            self._snapshot_delays(left),
            self._broker.clock.now,
            cls.creator,
        )

    def _snapshot_position(self, position: BrokerSubscription) -> PositionSnapshot:
        terms, attempts = position.delivery_policy, position.list_attempts()
        unburied = position.pending_dead_letters.to_rows()
        self._scanned_row_count += len(attempts) + len(unburied)
        return PositionSnapshot(
            position.class_id,
            position.durable,
            position.group,
            list(position.channel_filter.patterns) if position.channel_filter else [],
            WindowSnapshot.of(position.window),
            merged(attempts, 0),
            terms.ack_timeout_ticks,
            terms.in_flight_max,
            terms.deliveries_max,
            terms.pending_max,
            terms.slow_policy,
            position.idle_seconds,
            position.is_key_ordered,
            terms.backoff_ticks,
            self._snapshot_delays(position.build_handover()),
            self._broker.clock.now,
            unburied,
            position.owner,
        )

    def _snapshot_delays(self, handover: Left) -> Pauses:
        """For how long what is left is not to be sent: known to within a tick."""
        seconds = self._broker.settings.tick_seconds
        self._scanned_row_count += len(handover.sent) + len(handover.ticks) + len(handover.times)
        return merged(handover.pauses(self._broker.clock, seconds), seconds)


def _class_header(cls: MessageClass) -> object:
    """Another value when something has changed that is kept of a class, but for how far it is."""
    waiting = cls.backlog_window
    return (
        cls.name,
        cls.are_last_values_requested,
        waiting.floor,
        waiting.cursor,
        waiting.in_flight,
        _has_durables(cls),
    )


def _class_state(cls: MessageClass, durable_position: int) -> _ClassState:
    """Another value when that has changed."""
    plain = [_position_state(each) for each in cls.subscriptions if not each.durable]
    return cls.compute_durable_floor(durable_position), (
        cls.ring.head,
        (plain, cls.backlog_handover),
    )


def _has_durables(cls: MessageClass) -> bool:
    return any(durable for durable, _ in cls.named_positions)


def _position_state(position: BrokerSubscription) -> object:
    """The same of a position."""
    window = position.window
    return (
        window.floor,
        window.cursor,
        window.in_flight,
        position.redelivered,
        position.nack_count,
        position.delivery_policy,
        position.idle_seconds,
        position.owner,
        len(position.pending_dead_letters),
    )


def _handover_if_all_ended(cls: MessageClass) -> tuple[AckWindow, Left]:
    """What would wait in a class if every session ended now, and what is known of it."""
    if not cls.subscriptions or _has_durables(cls):
        return cls.backlog_window, cls.backlog_handover
    oldest = list(islice(cls.subscriptions, KEPT_UNION_MAX))
    left = cls.backlog_handover
    for position in oldest:
        left = left.joined(position.build_handover())
    if len(cls.subscriptions) > len(oldest):  # The oldest ones were sent it as often as any.
        window = AckWindow(floor=cls.floor())
        window.cursor = max(each.window.cursor for each in cls.subscriptions)
        return window, left.joined(Left([(window.floor, window.cursor, 1)]))
    windows = [position.window for position in oldest]
    if cls.backlog_window.floor < cls.backlog_window.cursor:
        windows.append(cls.backlog_window)
    window = windows[0]
    for other in windows[1:]:
        window = window.union(other)
    return window, left
