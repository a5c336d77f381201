"""Checkpoints: finds the changes of a broker's state and encodes them for the next write batch.

Each batch records new classes, producer names, and created or removed durables, so that recovery
finds them for every confirmed message. It also records the cursors and acks that are cheap to
encode. A complete scan records the other cursors and acks; after a crash, messages acked since the
last scan are redelivered. Complete scans become rarer as the state grows. Each scan is divided into
portions, so that it does not occupy the event loop.

A scan also collects the snapshot, if one is due, and the batch of its last portion contains it:

    classes, durables   state at their portion of the scan, plus the changes recorded since
    publishers          state at their portion; recovery adds the message numbers of later batches
    purged messages     all until the last portion, at or above the floor of their class
    message ids         state at the last portion

A checkpoint changes nothing in the broker but its commit log, whose lists of changes it clears.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from simplebus.core.commit_log import CommitLog, WriteBatch
from simplebus.core.limits import (
    CHECKPOINT_PAUSE_SECONDS,
    CHECKPOINT_POSITIONS,
    CHECKPOINT_POSITIONS_PER_TURN,
    CHECKPOINT_PRODUCERS_PER_TURN,
    CHECKPOINT_RANGES_MAX,
    CHECKPOINT_ROWS_PER_TURN,
    CHECKPOINT_SECONDS,
    CHECKPOINT_UNCONFIRMED_COST,
    CHECKPOINT_UNION_MAX,
    PROGRESS_POSITIONS_PER_TURN,
    PROGRESS_ROWS_MAX,
    PROGRESS_SECONDS,
    PROGRESS_WINDOW_MESSAGES,
    SNAPSHOT_CHANGE_BYTES_MIN,
    SNAPSHOT_MESSAGE_BYTES,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.producer_state import ProducerState
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import DelayRanges, PositionHandover, merge_adjacent
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.snapshot import (
    ClassSnapshot,
    EncodedProducers,
    PositionSnapshot,
    ProducerSnapshot,
    ProgressSnapshot,
    RecoveredState,
    RefusalSnapshot,
    RemovedClass,
    StateChanges,
    WindowSnapshot,
)
from simplebus.core.subscription.position import Position

if TYPE_CHECKING:
    from simplebus.core.broker.broker import Broker

_PositionKey = tuple[int, str, str]
_ClassState = tuple[int, tuple[int, object]]
"""Durable floor of a class; its head, and everything else that a snapshot contains."""


class _PositionState(NamedTuple):
    """Values that change with the recorded state of a position."""

    window: object
    """Changes with the ack window."""
    rest: object
    """Changes with everything else."""


class Checkpointer:
    """Finds the state changes of a broker with a commit log."""

    def __init__(self, broker: Broker) -> None:
        assert broker.commit_log is not None
        self._broker = broker
        self._commit_log: CommitLog = broker.commit_log
        self._class_states: dict[int, _ClassState] = {}
        """Recorded state of each class."""
        self._class_floors: dict[int, int] = {}
        """Durable floor of each class in its recorded state."""
        self._empty_class_ids: set[int] = set()
        """Classes without messages in their recorded state."""
        self._class_headers: dict[int, object] = {}
        """Recorded `_class_header` of each class, compared when a durable is created or removed."""
        self._position_states: dict[int, dict[_PositionKey, tuple[Position, _PositionState]]] = {}
        """Recorded state of each durable, by class."""
        self.next_full_scan = float("-inf")
        """Time of the next scan, or of the next portion of the current one, by the broker's clock.
        """
        self._scanned_at = float("-inf")
        """Time of the last portion."""
        self._is_scanning = False
        """True if the current scan is not complete."""
        self._unscanned: list[MessageClass] = []
        """Classes that the current scan has not examined."""
        self._unscanned_durables: list[Position] = []
        """Durables that the current scan has not examined, of the class that it examined last."""
        self._producers = EncodedProducers()
        """Publishers that the current scan has collected for the next snapshot."""
        self._unscanned_producers: list[ProducerState] = []
        """Publishers that the current scan has not collected for the next snapshot."""
        self._range_max: int | None = None
        """Ranges whose attempts and delays the next record of a durable contains; None for all."""
        self._log_position = 0
        """Write batch that contains all changes before the current call of `build_write_batch`."""
        self._numbers_batch = 0
        """Write batch up to which the next snapshot contains the numbers of all publishers."""
        self._scanned_count = 0
        """Classes and durables that the current scan has examined."""
        self._scanned_row_count = 0
        """Rows about single messages that the current scan has read."""
        self._change_bytes = 0
        """Bytes of changes since the last snapshot."""
        self._snapshot_bytes = 0
        self._message_bytes = 0
        """Frame bytes of messages since the last snapshot."""
        self.is_snapshot_due = True
        """True if a snapshot must be written."""
        self._next_snapshot: RecoveredState | None = None
        """The part of the next snapshot that the current scan has collected; None if no snapshot is
        due.
        """
        self._purged_sequences: dict[int, SequenceSet] = {}
        """Purged messages of each class for the next snapshot: those that were purged before the
        portion of the class, and those that were purged since.
        """
        self._progressed = broker.store.position_changes.progressed
        self._next_progress = float("-inf")
        """Time from which on a batch may be written only to record progress, and from which on
        costly progress is recorded.
        """
        self._row_counts: dict[Position, int] = {}
        """Rows of the last complete record of positions that have more than PROGRESS_ROWS_MAX."""

    def build_write_batch(self, *, is_last: bool = False) -> WriteBatch | None:
        """Return the next write batch, or None if there is nothing to write.

        The first batch contains a snapshot, and so does the last batch, for which `is_last` is
        True.
        """
        commit_log, now = self._commit_log, self._broker.clock.now
        has_entries = not commit_log.is_empty
        self._message_bytes += commit_log.next_batch_bytes
        if (
            self._change_bytes > max(SNAPSHOT_CHANGE_BYTES_MIN, 4 * self._snapshot_bytes)
            or self._message_bytes > SNAPSHOT_MESSAGE_BYTES
            or is_last
        ):
            self.is_snapshot_due = True
        # The clock may have been set back.
        is_scan_due = (
            is_last
            or (self.is_snapshot_due and self._next_snapshot is None)
            or not self._scanned_at <= now < self.next_full_scan
        )
        is_progress_due = bool(self._progressed) and not (
            self._next_progress - PROGRESS_SECONDS <= now < self._next_progress
        )
        if not (is_scan_due or has_entries or is_progress_due):
            return None
        self._log_position = commit_log.log_position
        in_portions = bool(self._snapshot_bytes) and not is_last
        self._range_max = CHECKPOINT_RANGES_MAX if in_portions else None
        changes = self._collect_changes(now, is_scan_due=is_scan_due, in_portions=in_portions)
        producer_starts = [
            ProducerSnapshot(name, number, [], instance)
            for name, number, instance in commit_log.pop_producer_starts()
        ]
        refused, purged = commit_log.pop_refusals(), commit_log.pop_purged_ranges()
        if self._next_snapshot is not None:
            self._next_snapshot.apply_changes(changes, batch_number=0)
            self._collect_purges(purged, self._next_snapshot)
            started = [producer_start.name for producer_start in producer_starts]
            for name in dict.fromkeys([*started, *(name for name, _ in refused)]):
                self._collect_producer(name)
        if self._next_snapshot is not None and not self._is_scanning:
            snapshot = self._build_snapshot(self._next_snapshot).encode(self._producers)
            self.is_snapshot_due, self._next_snapshot = False, None
            self._purged_sequences.clear()
            self._change_bytes, self._snapshot_bytes, self._message_bytes = 0, len(snapshot), 0
            return commit_log.pop_write_batch(snapshot=snapshot, numbers_batch=self._numbers_batch)
        changes = StateChanges(
            changes.classes,
            changes.positions,
            changes.removed_positions,
            producer_starts,
            [(name, each.refers_to, each.count) for name, each in refused],
            purged,
            [RefusalSnapshot.from_refusal(each) for _, each in refused],
            progress=changes.progress,
            removed_classes=changes.removed_classes,
        )
        if not any(structs.astuple(changes)):
            return commit_log.pop_write_batch(allow_empty=has_entries)
        encoded = changes.encode()
        self._change_bytes += len(encoded)
        return commit_log.pop_write_batch(encoded)

    def class_floors(self) -> dict[int, int]:
        """Return the durable floor of each class, as recorded in the batches so far."""
        return self._class_floors.copy()

    def empty_class_ids(self) -> set[int]:
        """Return the classes without messages, as recorded in the batches so far."""
        return self._empty_class_ids.copy()

    @property
    def is_snapshot_begun(self) -> bool:
        """True if a part of a snapshot was collected, so that a batch must be built soon."""
        return self._next_snapshot is not None

    def _collect_changes(self, now: float, *, is_scan_due: bool, in_portions: bool) -> StateChanges:
        """Return the changes that the commit log marked as urgent, and the changes that a scan
        finds.

        With `in_portions`, only the next portion of the scan is done.
        """
        commit_log, classes = self._commit_log, self._broker.classes
        class_ids, durables_by_class = (
            [*commit_log.changed_class_ids, *commit_log.changed_durables],
            list(commit_log.changed_durables.items()),
        )
        commit_log.changed_class_ids.clear()
        commit_log.changed_durables.clear()
        is_progress_requested = commit_log.is_progress_requested
        changes = StateChanges([], [], [], progress=[], removed_classes=[])
        for class_id in dict.fromkeys(class_ids):
            if class_id not in classes:
                changes.removed_classes.append(self._record_removed_class(class_id))
        if is_scan_due and self._scan(now, changes, in_portions=in_portions):
            ended_class_ids = dict.fromkeys(position.class_id for position in self._progressed)
            for class_id in ended_class_ids:
                self._record_unnamed_positions(class_id, [], changes)
            self._progressed.clear()
            return changes
        for class_id in dict.fromkeys(class_ids):
            if class_id in classes:
                self._collect_class_header(classes[class_id], changes)
        for class_id, durables in durables_by_class:
            for durable, group in durables:
                self._collect_durable(classes[class_id], durable, group, changes)
        self._collect_progress(now, changes, are_all_requested=is_progress_requested)
        return changes

    def _scan(self, now: float, changes: StateChanges, *, in_portions: bool) -> bool:
        """Collect all changes of the next classes and durables, or begin and end a scan.

        Returns:
            True if all classes and durables were examined by this call.
        """
        is_new = not self._is_scanning or (self.is_snapshot_due and self._next_snapshot is None)
        if is_new or not in_portions:
            self._unscanned = list(reversed(self._broker.classes.values()))
            self._unscanned_durables = []
            self._scanned_count = self._scanned_row_count = 0
            self._row_counts.clear()
            self._next_snapshot = RecoveredState() if self.is_snapshot_due else None
            self._purged_sequences.clear()
            self._unscanned_producers = (
                list(self._broker.subscription_manager.producer_states)
                if self.is_snapshot_due
                else []
            )
            self._producers, self._numbers_batch = EncodedProducers(), self._log_position
        count_before, row_count_before = self._scanned_count, self._scanned_row_count
        while (self._unscanned or self._unscanned_durables) and not (
            in_portions
            and (
                self._scanned_count - count_before >= CHECKPOINT_POSITIONS_PER_TURN
                or self._scanned_row_count - row_count_before >= CHECKPOINT_ROWS_PER_TURN
            )
        ):
            self._scanned_count += 1
            if self._unscanned_durables:
                self._scan_durable(self._unscanned_durables.pop(), changes)
            else:
                self._scan_class(self._unscanned.pop(), changes)
        are_producers_scanned = bool(self._unscanned_producers)
        self._scan_producers(CHECKPOINT_PRODUCERS_PER_TURN if in_portions else None)
        self._scanned_at = now
        is_single_portion = is_new or not in_portions
        # After the last classes, durables or publishers of a scan in portions, the snapshot is
        # encoded in the next portion, because this portion has used its time.
        self._is_scanning = bool(
            self._unscanned or self._unscanned_durables or self._unscanned_producers
        ) or (
            not is_single_portion
            and self._next_snapshot is not None
            and (are_producers_scanned or self._scanned_count > count_before)
        )
        if self._is_scanning:
            self.next_full_scan = now + CHECKPOINT_PAUSE_SECONDS
            return False
        count = self._scanned_count + self._scanned_row_count
        self.next_full_scan = now + CHECKPOINT_SECONDS * max(1.0, count / CHECKPOINT_POSITIONS)
        return is_single_portion

    def _scan_class(self, cls: MessageClass, changes: StateChanges) -> None:
        """Collect the changes of a class, except for those of its durables."""
        if self._broker.classes.get(cls.class_id) is not cls:
            return  # It was removed since the scan began.
        if self._next_snapshot is not None and cls.purged_sequences:
            purged = self._purged_sequences.setdefault(cls.class_id, SequenceSet())
            purged.unite(cls.purged_sequences)
        progressed = [
            position
            for position in cls.positions
            if not position.durable and self._pop_progress(position)
        ]
        state = _class_state(cls, self._commit_log.durable_position)
        if (
            (progressed and not _has_durables(cls))
            or self._class_states.get(cls.class_id) != state
            or self._class_headers[cls.class_id] != _class_header(cls)
        ):
            self._record_class(cls, state, changes)
        elif self._next_snapshot is not None:
            self._next_snapshot.classes[cls.class_id] = self._snapshot_class(cls)
        for _, durable, group in list(self._position_states.get(cls.class_id, ())):
            if _find_durable(cls, durable, group) is None:
                self._collect_durable(cls, durable, group, changes)
        self._unscanned_durables = [
            named_position
            for named_position in cls.named_positions.values()
            if named_position.durable
        ]

    def _scan_durable(self, position: Position, changes: StateChanges) -> None:
        """Collect the changes of a durable."""
        cls = self._broker.classes.get(position.class_id)
        durable, group = position.durable, position.group
        if cls is None or _find_durable(cls, durable, group) is not position:
            return  # It was removed since its class was examined.
        if self._pop_progress(position):
            self._position_states.get(cls.class_id, {}).pop((cls.class_id, durable, group), None)
        is_changed = self._collect_durable(cls, durable, group, changes)
        if self._next_snapshot is not None and not is_changed:
            snapshot = self._snapshot_position(position)
            self._next_snapshot.positions[snapshot.key] = snapshot

    def _scan_producers(self, cost_max: int | None) -> None:
        """Collect the next publishers for the next snapshot."""
        cost = 0
        while self._unscanned_producers and (cost_max is None or cost < cost_max):
            cost += self._collect_producer(self._unscanned_producers.pop().key)

    def _pop_progress(self, position: Position) -> bool:
        """Return True if a position has progressed since its last record, and clear that mark.

        The mark is needed because `_position_state` may be unchanged: the cursor of a group passes
        messages before they are sent.
        """
        return self._progressed.pop(position, self) is None

    def _record_removed_class(self, class_id: int) -> RemovedClass:
        self._class_headers.pop(class_id, None)
        self._position_states.pop(class_id, None)
        registry = self._broker.store.class_registry
        removed = registry.removed_classes.get(class_id) or RemovedClass(class_id, "", 0)
        self._set_class_state(class_id, (removed.head, (removed.head, None)))
        return removed

    def _set_class_state(self, class_id: int, state: _ClassState) -> None:
        self._class_states[class_id] = state
        floor, (head, _) = state
        self._class_floors[class_id] = floor
        if floor == head:
            self._empty_class_ids.add(class_id)
        else:
            self._empty_class_ids.discard(class_id)

    def _collect_progress(
        self, now: float, changes: StateChanges, *, are_all_requested: bool
    ) -> None:
        """Record the cursors and acks of positions.

        Handles the first PROGRESS_POSITIONS_PER_TURN positions of `_progressed`. Those that are
        costly to record stay there until they are due, unless `are_all_requested`.
        """
        is_costly_due = (
            are_all_requested
            or not self._next_progress - PROGRESS_SECONDS <= now < self._next_progress
        )
        if is_costly_due:
            self._next_progress = now + PROGRESS_SECONDS
        unnamed_by_class: defaultdict[int, list[Position]] = defaultdict(list)
        for position in list(islice(self._progressed, PROGRESS_POSITIONS_PER_TURN)):
            cls = self._broker.classes.get(position.class_id)
            key = position.class_id, position.durable, position.group
            recorded_states = self._position_states.get(position.class_id, {})
            _, recorded = recorded_states.get(key, (None, None))
            if cls is None or (
                position.durable and (position not in cls.positions or not recorded)
            ):
                del self._progressed[position]  # It has ended, or is recorded as a new durable.
            elif recorded is not None and _is_window_sufficient(position, recorded):
                del self._progressed[position]
                window = WindowSnapshot.from_window(position.window)
                changes.progress.append(ProgressSnapshot(*key, window))
            elif are_all_requested or (is_costly_due and position not in self._row_counts):
                del self._progressed[position]
                if not position.durable:
                    unnamed_by_class[cls.class_id].append(position)
                    continue
                before = self._scanned_row_count
                recorded_states[key] = position, _position_state(position)
                changes.positions.append(self._snapshot_position(position))
                if self._scanned_row_count - before > PROGRESS_ROWS_MAX:
                    self._row_counts[position] = self._scanned_row_count - before
            else:  # Moved to the end, so that the next batch handles the other positions first.
                self._progressed[position] = self._progressed.pop(position)
        for class_id, positions in unnamed_by_class.items():
            self._record_unnamed_positions(class_id, positions, changes)

    def _record_unnamed_positions(
        self, class_id: int, positions: list[Position], changes: StateChanges
    ) -> None:
        """Record the progress of positions without a durable name, in the record of their class.

        The positions may have ended.
        """
        cls, before = self._broker.classes.get(class_id), self._scanned_row_count
        if cls is None or _has_durables(cls):
            return
        self._record_class(cls, _class_state(cls, self._commit_log.durable_position), changes)
        if self._scanned_row_count - before > PROGRESS_ROWS_MAX:
            self._row_counts.update(dict.fromkeys(positions, self._scanned_row_count - before))

    @property
    def has_unrecorded_progress(self) -> bool:
        """True if messages were sent or acknowledged since the last batch."""
        return bool(self._progressed)

    def _collect_class_header(self, cls: MessageClass, changes: StateChanges) -> None:
        """Record a class if it is new, or if a durable was created or removed in it."""
        if self._class_headers.get(cls.class_id) != _class_header(cls):
            self._record_class(cls, _class_state(cls, self._commit_log.durable_position), changes)

    def _record_class(self, cls: MessageClass, state: _ClassState, changes: StateChanges) -> None:
        self._set_class_state(cls.class_id, state)
        self._class_headers[cls.class_id] = _class_header(cls)
        changes.classes.append(self._snapshot_class(cls))

    def _collect_durable(
        self, cls: MessageClass, durable: str, group: str, changes: StateChanges
    ) -> bool:
        """Record a durable if it was created, changed or removed. Returns True if it was."""
        recorded_states = self._position_states.setdefault(cls.class_id, {})
        key, position = (cls.class_id, durable, group), _find_durable(cls, durable, group)
        if position is None:
            if recorded_states.pop(key, None) is None:
                return False
            changes.removed_positions.append(key)
            return True
        current = position, _position_state(position)
        if recorded_states.get(key) == current:
            return False
        recorded_states[key] = current
        changes.positions.append(self._snapshot_position(position))
        return True

    def _collect_purges(
        self, purged: list[tuple[int, int, int]], collected: RecoveredState
    ) -> None:
        """Add purged ranges, as (class id, first, last exclusive), to the next snapshot.

        Ranges of a class that the scan has not collected yet are skipped: its portion reads the
        class and its durables after the purge.
        """
        for class_id, first, last in purged:
            if (snapshot := collected.classes.get(class_id)) is not None:
                sequences = self._purged_sequences.setdefault(class_id, SequenceSet())
                sequences.add(max(first, snapshot.floor), last)

    def _build_snapshot(self, collected: RecoveredState) -> StateChanges:
        """Return a snapshot with the collected classes and durables, without publishers."""
        broker = self._broker
        return StateChanges(
            [self._with_present_head(cls) for cls in collected.classes.values()],
            list(collected.positions.values()),
            purged_ranges=[
                (class_id, first, last)
                for class_id, purged in self._purged_sequences.items()
                if class_id in collected.classes
                for first, last in purged.ranges_within(
                    collected.classes[class_id].floor, broker.classes[class_id].ring.head
                )
            ],
            boot_id=self._commit_log.boot_id,
            durability=int(self._commit_log.durability),
            message_ids=broker.store.message_ids.snapshot(),
            removed_classes=list(broker.store.class_registry.removed_classes.values()),
        )

    def _with_present_head(self, collected: ClassSnapshot) -> ClassSnapshot:
        """Return the snapshot of a class with its present head.

        Recovery skips a damaged record of an earlier batch only if the head of the snapshot shows
        that messages follow the damaged ones.
        """
        cls = self._broker.classes.get(collected.class_id)
        if cls is None or cls.ring.head == collected.head:
            return collected
        return structs.replace(collected, head=cls.ring.head)

    def _collect_producer(self, key: str) -> int:
        """Collect the present state of a publisher for the next snapshot, unless it was removed.

        Returns:
            The cost. The cost of a disconnected publisher is 1.
        """
        producer = self._broker.subscription_manager.producer_states.get(key)
        if producer is None:
            return 1
        next_number, ahead, cost = producer.next_number, producer.stored_ahead, 1
        if producer.session_id is not None:
            session = self._broker.sessions[producer.session_id]
            decoder = session.version2
            assert decoder is not None
            next_number = decoder.stored_before
            if ahead is not None or next_number != decoder.next_number:
                ahead = decoder.build_unconfirmed_range(
                    next_number, [batch for _, batch in session.parked_messages]
                )
                cost += CHECKPOINT_UNCONFIRMED_COST
        self._producers.append(
            ProducerSnapshot(
                key,
                next_number,
                ahead.ranges() if ahead else [],
                producer.instance,
                [RefusalSnapshot.from_refusal(refusal) for refusal in producer.refusals],
                producer.is_uncertain,
                self._log_position + 1,
            )
        )
        return cost

    def _snapshot_class(self, cls: MessageClass) -> ClassSnapshot:
        window, handover = _handover_if_all_ended(cls)
        handover = handover.restrict_to(window.floor, window.cursor)
        self._scanned_row_count += len(handover.attempts)
        clock, tick_seconds = self._broker.clock, self._broker.settings.tick_seconds
        return ClassSnapshot(
            cls.class_id,
            cls.name,
            cls.compute_durable_floor(self._commit_log.durable_position),
            cls.ring.head,
            WindowSnapshot.from_window(window),
            cls.are_last_values_requested,
            merge_adjacent(handover.attempts, 0),
            self._snapshot_delays(handover.remaining_delays(clock, tick_seconds)),
            clock.now,
            cls.creator,
            cls.creator_address,
        )

    def _snapshot_position(self, position: Position) -> PositionSnapshot:
        policy = position.delivery_policy
        attempts = position.unacked.list_attempts(self._range_max)
        tick_seconds = self._broker.settings.tick_seconds
        pending_dead_letters = position.unacked.pending_dead_letters.to_rows()
        self._scanned_row_count += len(attempts) + len(pending_dead_letters)
        return PositionSnapshot(
            position.class_id,
            position.durable,
            position.group,
            list(position.channel_filter.patterns) if position.channel_filter else [],
            WindowSnapshot.from_window(position.window),
            merge_adjacent(attempts, 0),
            policy.ack_timeout_ticks,
            policy.in_flight_max,
            policy.deliveries_max,
            policy.pending_max,
            policy.slow_policy,
            position.idle_seconds,
            position.is_key_ordered,
            policy.backoff_ticks,
            self._snapshot_delays(position.list_delays(tick_seconds, self._range_max)),
            self._broker.clock.now,
            pending_dead_letters,
            position.owner,
            policy.backoff_seconds,
            position.owner_address,
        )

    def _snapshot_delays(self, delays: DelayRanges) -> DelayRanges:
        """Return ascending redelivery delays in seconds, exact to a tick."""
        self._scanned_row_count += len(delays)
        return merge_adjacent(delays, self._broker.settings.tick_seconds)


def _class_header(cls: MessageClass) -> object:
    """Return a value that changes with the recorded state of a class, except for its progress."""
    backlog = cls.backlog_window
    return (
        cls.name,
        cls.are_last_values_requested,
        backlog.floor,
        backlog.cursor,
        backlog.in_flight_count,
        _has_durables(cls),
    )


def _class_state(cls: MessageClass, durable_position: int) -> _ClassState:
    """Return a value that changes with the recorded state of a class."""
    unnamed = [_position_state(position) for position in cls.positions if not position.durable]
    return cls.compute_durable_floor(durable_position), (
        cls.ring.head,
        (unnamed, cls.backlog_state),
    )


def _is_window_sufficient(position: Position, recorded: _PositionState) -> bool:
    """Return True if it is enough to record the window of a durable.

    Recovery counts an unacked message behind the cursor as sent once, unless the last complete
    record states other attempts. So the window is not enough if messages were redelivered or
    rejected since that record, or if some wait to be sent, now or in that record. The cursor of a
    group passes messages before they are sent.
    """
    return not (
        position.is_shared
        or position.unacked.has_waiting
        or position.window.flagged_span > PROGRESS_WINDOW_MESSAGES
        or _state_except_window(position) != recorded.rest
    )


def _find_durable(cls: MessageClass, durable: str, group: str) -> Position | None:
    """Return the position of a durable, or None if it does not exist."""
    position = cls.named_positions.get(cls.position_key(durable, group))
    return position if position is not None and position.group == group else None


def _has_durables(cls: MessageClass) -> bool:
    return bool(cls.named_positions) and any(durable for durable, _ in cls.named_positions)


def _position_state(position: Position) -> _PositionState:
    window = position.window
    return _PositionState(
        window=(window.floor, window.cursor, window.in_flight_count),
        rest=_state_except_window(position),
    )


def _state_except_window(position: Position) -> object:
    return (
        position.redelivered_count,
        position.nack_count,
        position.delivery_policy,
        position.idle_seconds,
        position.owner,
        position.unacked.has_waiting,
        len(position.unacked.pending_dead_letters),
    )


def _handover_if_all_ended(cls: MessageClass) -> tuple[AckWindow, PositionHandover]:
    """Return the backlog that would remain if all sessions ended now, and its delivery state."""
    if not cls.positions or _has_durables(cls):
        return cls.backlog_window, cls.backlog_handover
    oldest = list(islice(cls.positions, CHECKPOINT_UNION_MAX))
    handover = cls.backlog_handover
    for position in oldest:
        handover = handover.merge(position.build_handover())
    if len(cls.positions) > len(oldest):
        # Approximation: the newer positions count as having sent each message once.
        window = AckWindow(floor=cls.floor())
        window.cursor = max(position.window.cursor for position in cls.positions)
        return window, handover.merge(PositionHandover([(window.floor, window.cursor, 1)]))
    windows = [position.window for position in oldest]
    if cls.backlog_window.floor < cls.backlog_window.cursor:
        windows.append(cls.backlog_window)
    window = windows[0]
    for added_window in windows[1:]:
        window = window.merge_unacked(added_window)
    return window, handover
