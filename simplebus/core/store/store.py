"""Store: the classes of a broker, and the handling of published messages.

The store appends messages, applies full-class policies, appends dead letters, and expires messages.
A message that cannot be stored is counted by reason and refused if the session speaks version 2.
The store marks outboxes that have something new; it sends nothing.

Full-class policies and the code that applies them:

    block         `Store.append_or_drop`: the messages are parked until the class has space
    drop_oldest   `Store.append_or_drop` → `OldestMessageDropper.append`
    drop_newest   `Store.append_or_drop` → `Store.drop_newest`
    spill         `Compactor.make_room` → `MessageClass.evict` → `ClassSpill.evict_spilled`;
                  messages are parked while the journal has not written enough to evict

A new policy is a member of `settings.FullPolicy` and of `config.parse.FullPolicyChoice`, a line in
the help of `serve --full` and in `config.sample`, a case in `append_or_drop`, and an
`errors.Reason` if it drops. A policy that refuses messages is also named where clients react to
refusals: `bridge.copier` and `gateway.modules.bus_writer`. The slow policies of subscriptions and
`gateway.mailbox.FullQueuePolicy` are independent of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import assert_never

import numpy as np

from simplebus.core import dead_letters
from simplebus.core.authorization.session_permissions import can_publish, publish_denied_text
from simplebus.core.clock import BrokerClock
from simplebus.core.commit_log import CommitLog, log_stored_messages, publish_error
from simplebus.core.dead_letters import DeadMessage
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CHANNEL_NAMES_MAX,
    CLASSES_PER_TURN,
    DELIMITER_BYTES,
    EXPIRY_SCAN_INITIAL_MESSAGES,
    EXPIRY_SCAN_MESSAGES_MAX,
    EXPIRY_SCANNED_PER_TURN,
    FORGET_CHANNELS_MIN,
    FREED_SPANS_PER_TURN,
    HEADER_BYTES,
    PLAIN_FRAMES_MAX,
    REDELIVERY_MESSAGES,
    REFUSALS_MAX,
    RING_SEGMENT_BYTES_MAX,
    TICKED_CLASSES_PER_TURN,
)
from simplebus.core.message_class.class_registry import ClassRegistry
from simplebus.core.message_class.message_class import MessageClass, build_row
from simplebus.core.message_class.spill import SpillManager
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.redelivery.failure_reasons import FailureReasons
from simplebus.core.redelivery.timer_wheel import Span
from simplebus.core.ring.columns import NO_DELAY, MessageRow, MessageRows
from simplebus.core.session import version2
from simplebus.core.session.session import Session
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.store import compaction
from simplebus.core.store.drop_oldest import OldestMessageDropper
from simplebus.core.store.message_ids import MessageIds
from simplebus.core.store.notifier import Notifier
from simplebus.core.store.publish_queue import PublishQueue
from simplebus.core.store.refusal_sender import RefusalSender
from simplebus.core.subscription import selection
from simplebus.core.subscription.delayed_wakeups import DelayedWakeups
from simplebus.core.subscription.position import Position, PositionChanges
from simplebus.core.users.permissions import ClassAccess
from simplebus.core.users.rate_limit import consume, has_waiting_sessions, is_one_allowed

OnStored = Callable[[Session | None, MessageClass, int, int], None]
"""Called after messages first..last-1 of a class were stored: (session, class, first, last).

The session is None for dead letters, which the broker itself publishes.
"""


class Store:
    """All classes of one broker."""

    def __init__(
        self,
        settings: Settings,
        clock: BrokerClock,
        refusal_sender: RefusalSender,
        delayed_wakeups: DelayedWakeups,
        commit_log: CommitLog | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.commit_log = commit_log
        """Receives everything that is stored; None without a journal."""
        self.class_registry = ClassRegistry(settings, commit_log)
        self.classes = self.class_registry.classes
        self.class_id_by_name = self.class_registry.class_id_by_name
        self.subject_bindings = self.class_registry.subject_bindings
        self.budget = self.class_registry.budget
        self.spill_manager: SpillManager | None = None
        """Messages that are on disk only; None if no class may spill."""
        if commit_log is not None and settings.has_spilling_class:
            self.spill_manager = SpillManager(
                self.clock, commit_log, self.class_registry.spill_budget
            )
            self.class_registry.spill_manager = self.spill_manager
        self.publish_queue = PublishQueue(self, self.class_registry, clock, delayed_wakeups)
        self.message_ids = MessageIds()
        """Ids of the latest messages of NATS publishers, for deduplication."""
        self.failure_reasons = FailureReasons()
        """Reasons of nacks, for messages that will be redelivered."""
        self.timer_index = 0
        self.new_channel_count = 0
        """Channels that batches have added so far, as far as no others were forgotten meanwhile."""
        self._refusal_sender = refusal_sender
        self.on_stored: OnStored | None = None
        """Called with all stored messages, if set."""
        self.on_timed_stored: OnStored | None = None
        """Called with stored messages that are delayed or expire, if set and `on_stored` is not."""
        self._classes_to_search: list[MessageClass] = []
        """Classes that `update_some_patterns` has not searched yet."""
        self.position_changes = PositionChanges(
            has_journal=commit_log is not None
            and commit_log.requires_durability
            and not commit_log.is_remote
        )
        """Classes to trim, positions with messages to dead-letter, and progress to write."""
        self.notifier = Notifier(self.position_changes)
        self.oldest_dropper = OldestMessageDropper(self)
        self.is_refusing_paused = False
        """True if the last call refused so many envelopes that the next ones must wait."""
        self._has_limited_turns = False
        self._refusals_max = sys.maxsize
        """Refusals of envelopes at once."""
        """Classes with parked messages that waited only because many others were refused."""
        self._classes_to_trim: dict[MessageClass, None] = {}
        """Classes with so many positions that the lowest floor was not found at once."""
        self.ended_spans: list[tuple[float, int, Span]] = []
        """Delayed messages of ended positions. Some are freed in each turn of a tick: a position
        may have very many.
        """
        self.positions_with_pending_dead_letters: dict[MessageClass, dict[Position, None]] = {}
        """Positions, by class, whose dead letters found no space."""

    def apply_settings(self, settings: Settings) -> Iterator[None]:
        """Replace the settings: for existing classes while the result is iterated.

        Then blocked publishers are retried, because limits may have grown.
        """
        self.settings = settings
        return self._retry_blocked_after(self.class_registry.apply_settings(settings))

    def _retry_blocked_after(self, parts: Iterator[None]) -> Iterator[None]:
        yield from parts
        for cls in list(self.publish_queue.blocked_classes):
            self.publish_queue.retry(cls)

    def require_class(self, class_id: int) -> MessageClass:
        """Return the class with this id. Raises RemoteProtocolError (unknown_class)."""
        cls = self.classes.get(class_id)
        if cls is None:
            raise self.unknown_class_error(class_id)
        return cls

    def unknown_class_error(self, class_id: int) -> RemoteProtocolError:
        """Return the error for a class that does not exist, or that the user must not see."""
        hint = ", and --declare-only is on" if self.settings.declare_only else ""
        return RemoteProtocolError(
            Reason.UNKNOWN_CLASS, f"no Connect has named class {class_id}{hint}"
        )

    # Publishing ----------------------------------------------------------------------------------

    def publish_one(
        self, session: Session, class_id: int, frame: memoryview, channel: str | None = None
    ) -> bool:
        """Publish a single message: a fast path of `publish`.

        Args:
            session: Publisher.
            class_id: Class of the message.
            frame: The message.
            channel: Channel of a valid envelope that has no times, if it is known; else None.

        Returns:
            True if the message was stored at once; False if `publish` handled it.
        """
        cls = self.classes[class_id]
        row = None
        if channel is not None:
            number = cls.channels.intern_name(channel)
            row = None if number is None else MessageRow(number)
        elif frame[0] == frames.ENVELOPE:
            row = build_row(cls, frame, self.clock.now)
        if (
            session.parked_messages
            or cls.blocked_sessions
            or (self.commit_log is not None and publish_error(self.commit_log, session))
            or (row is None and frame[0] != frames.MESSAGE)
            or (session.grants is not None and not can_publish(session, cls, row))
            or (
                session.token_buckets
                and not is_one_allowed(session.token_buckets, len(frame), self.clock.now)
            )
            or not cls.ring.append_one(frame, self.timer_index, row)
        ):
            self.publish(session, class_id, FrameBatch.from_frame(frame))
            return False
        if session.token_buckets:
            consume(session.token_buckets, 1, len(frame))
        if self.clock.now >= cls.time_index.next_step_time:
            cls.record_accepted(self.clock.now, cls.ring.head - 1)
        first = cls.ring.head - 1
        if self.commit_log is not None:
            log_stored_messages(
                self.commit_log, session, class_id, first, 1, bytes(frame), self.clock.now
            )
        on_stored = self.on_stored or (
            self.on_timed_stored if row is not None and row.not_before != NO_DELAY else None
        )
        if on_stored is not None:
            on_stored(session, cls, first, first + 1)
        self.notify_subscribers(cls)
        return True

    def publish(
        self,
        session: Session,
        class_id: int,
        batch: FrameBatch,
        columns: EnvelopeColumns | None = None,
    ) -> None:
        """Store messages of one class, park them, or apply the full-class policy.

        Args:
            session: Publisher.
            class_id: Class of the messages.
            batch: Messages of one frame type.
            columns: Columns of valid envelopes, if they are known; else the envelopes are scanned.
        """
        cls = self.classes[class_id]
        failure = None if self.commit_log is None else publish_error(self.commit_log, session)
        if failure:
            cls.dropped_counts[failure[0]] += batch.count
            self._refuse_messages(session, batch, *failure)
            return
        if session.grants is not None and not self._check_can_publish(session, cls, batch):
            return
        if session.parked_messages or cls.blocked_sessions:
            self.publish_queue.park(session, cls, batch)
            return
        if not session.can_publish_in_turn(class_id):
            self.publish_queue.park(session, cls, batch)
            self.publish_queue.retry_later(cls)
            return
        if not session.token_buckets:
            self._append_or_park(session, cls, batch, columns)
            return
        allowed = 0
        if not has_waiting_sessions(session.token_buckets):
            allowed = self.publish_queue.rate_queue.count_allowed(session, batch)
        if allowed:
            first_columns = None if columns is None else columns.slice(0, allowed)
            handled = self._append_or_park(session, cls, batch.slice(0, allowed), first_columns)
            consume(session.token_buckets, handled, int(batch.bounds[handled]))
        if allowed < batch.count:
            self.publish_queue.park(
                session, cls, batch.slice(allowed, batch.count), is_rate_limited=True
            )

    def publish_or_refuse(
        self, session: Session, class_id: int, frame: memoryview, channel: str
    ) -> int:
        """Publish a single message that must be stored at once or not at all.

        Args:
            session: Publisher, a local session.
            class_id: Class of the message.
            frame: A valid Envelope frame without times.
            channel: Channel of the envelope.

        Returns:
            The sequence of the message.

        Raises:
            RemoteProtocolError: (unauthorized, drop_newest, disk_full or disk_failed) if the
                message is not stored.
        """
        cls, batch = self.classes[class_id], FrameBatch.from_frame(frame)
        if self.commit_log is not None and self.commit_log.write_error is not None:
            raise RemoteProtocolError(*self.commit_log.write_error)
        if not self._can_publish_to_all(session, cls, [channel]):
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED, publish_denied_text(session, cls, channel)
            )
        columns, stored = EnvelopeColumns(1, [channel], 0), 0
        self.oldest_dropper.complete_drop(cls)
        if cls in self.publish_queue.classes_to_retry:
            self.publish_queue.retry(cls)
        if not (session.parked_messages or cls.blocked_sessions):
            stored = self.append_batch(cls, batch, session, columns)
            if not stored and cls.full_policy is FullPolicy.DROP_OLDEST:
                dropped_before = cls.dropped_counts[Reason.DROP_NEWEST]
                stored = self.oldest_dropper.append(cls, batch, session, columns, can_wait=False)
                stored -= cls.dropped_counts[Reason.DROP_NEWEST] - dropped_before
        if not stored:
            raise RemoteProtocolError(
                Reason.DROP_NEWEST, f"class {cls.name or cls.class_id} is full"
            )
        return cls.ring.head - 1

    def _append_or_park(
        self,
        session: Session,
        cls: MessageClass,
        batch: FrameBatch,
        columns: EnvelopeColumns | None,
    ) -> int:
        """Append messages, apply the full-class policy, or park them in the publish queue.

        Returns:
            The number of messages that were handled: stored, refused or dropped. The rest is
            parked.
        """
        handled = self.append_or_drop(cls, batch, session, columns)
        if handled < batch.count:
            self.publish_queue.park(session, cls, batch.slice(handled, batch.count))
        return handled

    def append_or_drop(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        session: Session,
        columns: EnvelopeColumns | None = None,
    ) -> int:
        """Append messages. A full class drops them or older ones, if that is its policy.

        Parameters as `append_batch`.

        Returns:
            The number of messages that were handled: stored, refused or dropped. The rest must
            wait.
        """
        self.is_refusing_paused = False
        handled = self.append_batch(cls, batch, session, columns)
        if handled == batch.count:
            return handled
        if not self.is_refusing_paused:
            remaining_frames = batch.slice(handled, batch.count)
            match cls.full_policy:
                case FullPolicy.BLOCK | FullPolicy.SPILL:
                    pass
                case FullPolicy.DROP_NEWEST:
                    handled += self.drop_newest(session, cls, remaining_frames)
                case FullPolicy.DROP_OLDEST:
                    handled += self.oldest_dropper.append(cls, remaining_frames, session, columns)
                case _:
                    assert_never(cls.full_policy)
        if self.is_refusing_paused:
            self.publish_queue.retry_later(cls)
        return handled

    def _check_can_publish(self, session: Session, cls: MessageClass, batch: FrameBatch) -> bool:
        """Return True if the session may publish some messages of this kind to the class.

        Messages with channels are checked one by one later. If the session may publish none of
        them, they are refused here.

        Raises:
            RemoteProtocolError: (unauthorized) for a version 1 session, which cannot receive a
                refusal.
        """
        assert session.grants is not None
        scope = session.grants.publish_permissions(cls.class_id, cls.name)
        if scope.access is ClassAccess.ALL:
            return True
        has_channels = batch.data[0] == frames.ENVELOPE
        if scope.access is ClassAccess.SOME and (has_channels or scope.is_allowed("")):
            return True
        detail = publish_denied_text(session, cls, "")
        if not session.has_confirms and not session.is_local:
            raise RemoteProtocolError(Reason.UNAUTHORIZED, detail)
        self._refuse_messages(session, batch, Reason.UNAUTHORIZED, detail)
        return False

    def _can_publish_to_all(self, session: Session, cls: MessageClass, channels: list[str]) -> bool:
        """Return True if the session may publish to all of these channels."""
        if session.grants is None:
            return True
        scope = session.grants.publish_permissions(cls.class_id, cls.name)
        return scope.access is ClassAccess.ALL or cls.channels.are_all_allowed(scope, channels)

    def _refuse_denied_channels(
        self, session: Session, cls: MessageClass, batch: FrameBatch, rows: MessageRows
    ) -> tuple[int, int]:
        """Refuse the leading messages whose channel the session may not publish to.

        Returns:
            (allowed, refused): the number of leading messages that are allowed, or that were
            refused. One of them is 0.
        """
        assert session.grants is not None
        scope = session.grants.publish_permissions(cls.class_id, cls.name)
        allowed = np.broadcast_to(cls.channels.allowed_flags(scope, rows.channels), batch.count)
        if allowed[0]:
            return int(allowed.argmin()), 0
        numbers = np.broadcast_to(np.atleast_1d(np.asarray(rows.channels)), batch.count)
        number = int(numbers[0])  # A refusal names one channel.
        other_channel_indexes = (numbers != number).nonzero()[0]
        count = int(other_channel_indexes[0]) if other_channel_indexes.size else batch.count
        detail = publish_denied_text(session, cls, cls.channels.name_of(number))
        if session.has_confirms:
            refused = batch.slice(0, count)
            self._refuse_messages(session, refused, Reason.UNAUTHORIZED, detail)
        else:
            cls.dropped_counts[Reason.UNAUTHORIZED] += count
        return 0, count

    def append_batch(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        session: Session | None,
        columns: EnvelopeColumns | None = None,
    ) -> int:
        """Append messages as far as there is space, without the class's policy.

        Makes space if the class can evict messages.

        Args:
            cls: The class.
            batch: Messages of one frame type.
            session: Publisher; None for the broker itself.
            columns: Columns of valid envelopes of which the batch contains the last ones; None to
                scan the envelopes.

        Returns:
            The number of messages that were handled: stored, or refused for a reason that waiting
            does not remove.
        """
        ring, compactor = cls.ring, None
        first, handled = ring.head, 0
        while True:
            remaining_frames = batch.slice(handled, batch.count) if handled else batch
            if batch.data[0] == frames.MESSAGE:
                handled += self.append_and_log(cls, remaining_frames, None, session)
            else:
                handled += self._append_envelopes(cls, remaining_frames, session, columns)
            if handled == batch.count or not cls.can_evict or self.is_refusing_paused:
                break
            compactor = compactor or compaction.Compactor(self, cls)
            if not compactor.make_room(batch.data.size - int(batch.bounds[handled])):
                break
        if ring.head != first:
            if self.clock.now >= cls.time_index.next_step_time:
                cls.record_accepted(self.clock.now, first)
            if cls.has_last_values:
                cls.last_values.scan_if_many()
            on_stored = self.on_stored or (
                self.on_timed_stored if ring.timed_until > first else None
            )
            if on_stored is not None:
                on_stored(session, cls, first, ring.head)
            self.notify_subscribers(cls)
        return handled

    def append_and_log(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        rows: MessageRows | None,
        session: Session | None,
    ) -> int:
        """Append messages to the ring as far as there is space, and to the commit log."""
        first = cls.ring.head
        stored = cls.ring.append(batch, self.timer_index, rows)
        if stored and self.commit_log is not None:
            data = batch.data[: batch.bounds[stored]].tobytes()
            log_stored_messages(
                self.commit_log, session, cls.class_id, first, stored, data, self.clock.now
            )
        return stored

    def _append_envelopes(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        session: Session | None,
        known_columns: EnvelopeColumns | None,
    ) -> int:
        """Append messages with envelopes as far as there is space. Parameters as `append_batch`.

        A message with an invalid envelope is refused.
        """
        if known_columns is not None:
            known_columns = known_columns.slice(
                known_columns.count - batch.count, known_columns.count
            )
        handled, scan_count, refusal_count = 0, batch.count, 0
        while handled < batch.count:
            if refusal_count == self._refusals_max:
                self.is_refusing_paused = True
                break
            piece = batch.slice(handled, min(handled + scan_count, batch.count))
            columns = (
                envelope_batch.scan_envelopes(piece)
                if known_columns is None
                else known_columns.slice(handled, handled + piece.count)
            )
            if columns.count:
                known_count = len(cls.channels)
                rows = cls.channels.build_rows(columns, self.clock.now)
                self.new_channel_count += max(0, len(cls.channels) - known_count)
                if rows is None:
                    if piece.count == 1:
                        break
                    scan_count = piece.count // 2
                    continue
                good = piece if columns.count == piece.count else piece.slice(0, columns.count)
                if session is not None and not self._can_publish_to_all(
                    session, cls, columns.names
                ):
                    allowed, refused = self._refuse_denied_channels(session, cls, good, rows)
                    if refused:
                        handled += refused
                        refusal_count += 1
                        continue
                    if allowed < good.count:
                        good, rows = good.slice(0, allowed), rows.slice(0, allowed)
                        handled += (stored := self.append_and_log(cls, good, rows, session))
                        if stored < allowed:
                            break
                        continue
                stored = self.append_and_log(cls, good, rows, session)
                handled += stored
                if stored < columns.count:
                    break
            scan_count *= 2
            if columns.count < piece.count:
                assert session is not None, "the broker published an invalid envelope"
                self._refuse_envelope(session, piece.slice(columns.count, columns.count + 1))
                handled += 1
                refusal_count += 1
                scan_count = PLAIN_FRAMES_MAX  # More may be invalid: scan only a few at a time.
        return handled

    def _refuse_envelope(self, session: Session, frame: FrameBatch) -> None:
        try:
            content = frame.data[HEADER_BYTES:-DELIMITER_BYTES].tobytes()
            envelope_batch.decode_stored_fields(content)
        except RemoteProtocolError as error:
            self._refuse_messages(session, frame, error.reason, error.sentence)
            return
        raise AssertionError("the batch parser rejected an envelope that the decoder accepts")

    def _refuse_messages(
        self,
        session: Session,
        batch: FrameBatch,
        reason: Reason,
        detail: str,
        *,
        max_count: int = sys.maxsize,
    ) -> int:
        """Refuse messages in at most `max_count` Errors. Returns the number of refused messages."""
        refusals = islice(version2.build_refusals(batch, reason, detail), max_count)
        refused_count = 0
        for refused in refusals:
            self._refusal_sender.send_refusal(session, refused)
            refused_count += refused.count
        return refused_count

    def notify_subscribers(self, cls: MessageClass) -> None:
        """Mark the subscriptions of a class as having something to send."""
        self.notifier.notify(cls)

    # Work for very many subscriptions ------------------------------------------------------------

    def limit_turns(self, positions_per_turn: int) -> None:
        """Divide work for very many positions of a class, and for many refusals and dead letters,
        into turns.

        The caller calls `continue_deferred_work` while `has_deferred_work` is True.
        """
        self.notifier.per_turn = self.oldest_dropper.cost_per_turn = positions_per_turn
        self._has_limited_turns = True
        self._refusals_max = REFUSALS_MAX
        self.publish_queue.batches_per_turn = CLASSES_PER_TURN

    @property
    def has_deferred_work(self) -> bool:
        """True if `continue_deferred_work` has work to do."""
        return bool(
            self.notifier.has_waiting
            or self.oldest_dropper.has_waiting
            or self._classes_to_trim
            or self.publish_queue.classes_to_retry
            or self.position_changes.given_up
        )

    def continue_deferred_work(self) -> None:
        """Notify some waiting positions, drop the oldest messages of a class for some, release
        messages of a class, retry parked messages of a class, and append some dead letters.
        """
        if self.notifier.has_waiting:
            self.notifier.notify_waiting()
        if self.oldest_dropper.has_waiting:
            self.oldest_dropper.continue_drops()
        if self._classes_to_trim:
            cls, _ = self._classes_to_trim.popitem()
            if self.classes.get(cls.class_id) is cls:
                self.trim_class(cls)
        if self.publish_queue.classes_to_retry:
            cls, _ = self.publish_queue.classes_to_retry.popitem()
            self.publish_queue.retry(cls)
        if self.position_changes.given_up:
            self._append_some_given_up()

    # Full ----------------------------------------------------------------------------------------

    def drop_newest(self, session: Session | None, cls: MessageClass, batch: FrameBatch) -> int:
        """Drop new messages, and refuse them if the session expects confirms.

        Returns:
            The number of dropped messages. The rest must wait, because many refusals are divided
            into turns.
        """
        dropped_count = batch.count
        if session is not None and session.has_confirms:
            cause = "its policy is drop_newest" if len(cls.ring) else "other classes use all memory"
            dropped_count = self._refuse_messages(
                session,
                batch,
                Reason.DROP_NEWEST,
                f"class {cls.class_id} is full: {cause}",
                max_count=self._refusals_max,
            )
            self.is_refusing_paused = dropped_count < batch.count
        cls.dropped_counts[Reason.DROP_NEWEST] += dropped_count
        return dropped_count

    # Dead letters --------------------------------------------------------------------------------

    def dead_letter(
        self,
        cls: MessageClass,
        position: Position,
        ranges: selection.Ranges,
        reason: Reason,
        attempts: int,
    ) -> int | None:
        """Append dead letters for messages that a position has given up.

        Args:
            cls: Class of the messages.
            position: The position.
            ranges: Sequences of the messages.
            reason: Reason for giving up.
            attempts: Deliveries of each message.

        Returns:
            The first sequence that found no space; it and later ones are retried at ticks. None if
            all messages were handled.
        """
        if dead_letters.is_dead_letter_class(cls.name):
            return None
        class_name = cls.label
        try:
            dead = self.class_registry.open_dead_letter_class(class_name)
        except RemoteProtocolError:
            self.defer_dead_letters(cls, position)
            return ranges[0][0]
        cause = dead_letters.DeadLetterCause(
            reason=reason,
            class_=class_name,
            attempts=attempts,
            subscription=position.durable or position.group,
            session=str(position.session_id) if position.session_id >= 0 else "",
            since=self.clock.now,
        )
        ring, until = position.ring, None
        stored = [range(max(a, ring.floor), min(b, ring.head)) for a, b in ranges]
        batch = dead_letters.build_dead_letters(
            (
                DeadMessage(
                    sequence,
                    ring.copy_frame(sequence),
                    cls.accepted_at(position, sequence),
                    self.failure_reasons.get(position, sequence),
                )
                for stored_range in stored
                for sequence in stored_range
            ),
            cause,
            class_id=dead.class_id,
            frame_bytes_max=self.settings.limits.frame_bytes,
        )
        lost_count = batch.lost_count + selection.count_sequences(ranges) - sum(map(len, stored))
        if batch.frames is not None:
            before = dead.dropped_counts[Reason.DROP_NEWEST]
            appended = self._append_dead_letters(dead, batch.frames, batch.columns)
            if appended < batch.frames.count:
                until = batch.sequences[appended]
                ranges = selection.ranges_before(ranges, until)
                lost_count = selection.count_sequences(ranges) - appended
                self.defer_dead_letters(cls, position)
            lost_count += (
                dead.dropped_counts[Reason.DROP_NEWEST] - before
            )  # One that is too long for them.
        if lost_count:
            cls.dropped_counts[Reason.NO_DEAD_LETTER] += lost_count
        cls.on_dead_lettered(position, ranges, dead.class_id)
        return until

    def defer_dead_letters(self, cls: MessageClass, position: Position) -> None:
        """Schedule the dead letters of a position to be retried at ticks."""
        self.positions_with_pending_dead_letters.setdefault(cls, {})[position] = None

    def _append_dead_letters(
        self, dead_letter_class: MessageClass, batch: FrameBatch, columns: EnvelopeColumns
    ) -> int:
        """Append dead letters; no permission or rate limit applies to them.

        If their class is full, its oldest dead letters are dropped, unless its policy is `block` or
        the memory of all classes is used up. Returns how many dead letters were handled.
        """
        if dead_letter_class.channels.build_rows(columns, self.clock.now) is None:
            return 0  # No memory for the channel names.
        stored = self.append_batch(dead_letter_class, batch, None, columns)
        if stored < batch.count:
            remaining_frames = batch.slice(stored, batch.count)
            if dead_letter_class.full_policy is FullPolicy.BLOCK or dead_letter_class.ring.can_grow(
                remaining_frames
            ):
                return stored
            stored += self.oldest_dropper.append(dead_letter_class, remaining_frames, None, columns)
            return stored
        return batch.count

    def append_dead_letters_of(self, position: Position) -> bool:
        """Append some dead letters of messages that a position gave up.

        Returns:
            True if there are more of them, and space.
        """
        waiting = self.position_changes.given_up.get(position.class_id, {})
        cls = self.classes.get(position.class_id)
        if position not in waiting:
            return False
        has_more = False
        if cls is not None and position in cls.positions:
            has_more = self._append_next_dead_letters(cls, position)
        waiting.pop(position, None)
        if has_more:
            waiting[position] = None  # The other positions of the class are next.
        if not waiting:
            self.position_changes.given_up.pop(position.class_id, None)
        if position in self.notifier.slow_positions and not has_more:
            self.position_changes.record_moved(position)  # It can end now.
        return has_more

    def has_dead_letters_to_append(self, position: Position) -> bool:
        """Return True if dead letters of a position are to be appended, and may have space."""
        return position in self.position_changes.given_up.get(position.class_id, {})

    def append_last_dead_letters(self, position: Position) -> None:
        """Append the dead letters of a position that ends or loses its session, which they name, as
        far as there is space.
        """
        while self.append_dead_letters_of(position):
            pass

    def _append_given_up(self) -> None:
        """Append all dead letters for which there is space."""
        while self.position_changes.given_up:
            self._append_some_given_up()

    def _append_some_given_up(self) -> None:
        """Append some dead letters of one position. Afterwards another class is next."""
        given_up = self.position_changes.given_up
        class_id, waiting = next(iter(given_up.items()))
        del given_up[class_id]
        given_up[class_id] = waiting
        self.append_dead_letters_of(next(iter(waiting)))

    def _append_next_dead_letters(self, cls: MessageClass, position: Position) -> bool:
        """Append a batch of the pending dead letters of a position. Returns as
        `append_dead_letters_of`.
        """
        batch = position.next_dead_letters()
        if batch is None:
            if position.unacked.pending_dead_letters:
                self.defer_dead_letters(cls, position)
            return False
        ranges, reason, attempts = batch
        refused_from = self.dead_letter(cls, position, ranges, reason, attempts)
        if refused_from is None:
            position.mark_dead_lettered(ranges)
            return bool(position.unacked.pending_dead_letters)
        position.mark_dead_lettered(selection.ranges_before(ranges, refused_from))
        waiting = self.position_changes.given_up[cls.class_id]
        self.positions_with_pending_dead_letters[cls].update(waiting)  # Nor for the others.
        waiting.clear()
        return False

    def _retry_dead_letters(self) -> None:
        """Retry dead letters that found no space before."""
        given_up = self.position_changes.given_up
        for cls, positions in self.positions_with_pending_dead_letters.items():
            given_up.setdefault(cls.class_id, {}).update(positions)
        self.positions_with_pending_dead_letters.clear()
        if not self._has_limited_turns:
            self._append_given_up()

    def trim_class(self, cls: MessageClass) -> None:
        """Release messages that no position needs, and retry blocked publishers."""
        cls.trim(self.clock.now)
        if not cls.is_floor_exact:
            self._classes_to_trim[cls] = None
        if cls.has_last_values:
            compaction.compact_if_cluttered(self, cls)
        if cls.blocked_sessions:
            self.publish_queue.retry(cls)

    def apply_position_changes(self) -> list[Position]:
        """Append dead letters, unless turns are limited (then `continue_deferred_work` does), and
        trim changed classes, until a position exceeds its limit.

        Returns:
            Positions that the caller must end before it calls again: their consumers are too slow.
            Empty if all changes are applied.
        """
        changes = self.position_changes
        while changes.class_ids:
            if not self._has_limited_turns:
                self._append_given_up()
            class_id, _ = changes.class_ids.popitem()
            cls = self.classes[class_id]
            if self.notifier.slow_positions and (slow := self._pop_slow_positions(cls)):
                changes.class_ids[class_id] = None  # Trimmed when the positions have ended.
                return slow
            self.trim_class(cls)
        return []

    def _pop_slow_positions(self, cls: MessageClass) -> list[Position]:
        """Return the positions of a class that exceed their limit and can end, each once.
        Positions with dead letters to append stay marked as slow.
        """
        slow: list[Position] = []
        for position in self.notifier.pop_slow_positions(cls):
            if self.has_dead_letters_to_append(position):
                self.notifier.slow_positions[position] = None
            elif position.count_excess():  # It may have had to wait for its dead letters.
                slow.append(position)
        return slow

    # Time ----------------------------------------------------------------------------------------

    def tick_in_parts(self) -> Iterator[None]:
        """Retry dead letters, shrink rings, and expire messages. Called once per tick.

        Other calls are allowed at each yield.
        """
        self.failure_reasons.forget_acked()
        self.message_ids.tick(self.clock.now)
        while self.ended_spans:
            del self.ended_spans[-FREED_SPANS_PER_TURN:]
            yield
        self.update_some_patterns()
        if 4 * self.budget.available_bytes < self.budget.limit_bytes:
            self._forget_unused_channels()
        scan_budget, channel_budget = EXPIRY_SCAN_MESSAGES_MAX, FORGET_CHANNELS_MIN
        if self.positions_with_pending_dead_letters:
            self._retry_dead_letters()
        if self.spill_manager is not None:
            self.spill_manager.tick()
        used_bytes = self.budget.used_bytes
        for number, cls in enumerate(list(self.classes.values())):
            freed_bytes = used_bytes - self.budget.used_bytes
            if number % TICKED_CLASSES_PER_TURN == 0 or freed_bytes >= RING_SEGMENT_BYTES_MAX:
                yield
                used_bytes = self.budget.used_bytes
            if cls.ring.tick():
                channel_budget -= cls.channels.shrink_idle(channel_budget)
            cls.time_index.trim(cls.first_sequence)
            if cls.purged_sequences:
                cls.purged_sequences.remove(0, cls.first_sequence)
            if cls.ring.floor < cls.ring.timed_until:
                scan_budget = yield from self._expire_messages(cls, scan_budget)
            limited = list(cls.limited_positions)
            for first in range(0, len(limited), TICKED_CLASSES_PER_TURN):
                if first:
                    yield
                # A backlog may not be counted completely yet.
                part = limited[first : first + TICKED_CLASSES_PER_TURN]
                self.notifier.enforce_pending_limits(
                    cls, [position for position in part if position in cls.limited_positions]
                )
            if cls.blocked_sessions or cls.retention.seconds or cls.has_last_values:
                self.trim_class(cls)  # Other classes may have given memory back.

    def update_some_patterns(self) -> bool:
        """Index some patterns of new subscriptions, and remove some of ended ones.

        One call per tick suffices, but more of them free the memory sooner.

        Returns:
            False if all classes were searched.
        """
        if not self._classes_to_search:
            self._classes_to_search = list(self.classes.values())
        for _ in range(min(TICKED_CLASSES_PER_TURN, len(self._classes_to_search))):
            cls = self._classes_to_search[-1]
            if cls.channels.has_pattern_changes and self.classes.get(cls.class_id) is cls:
                cls.channels.update_some_patterns()
                return True
            self._classes_to_search.pop()
        return bool(self._classes_to_search)

    def _forget_unused_channels(self) -> None:
        """Release the memory of channels without stored messages, because memory is short."""
        budget = CHANNEL_NAMES_MAX
        for cls in self.classes.values():
            if budget and len(cls.channels):
                budget -= cls.channels.forget_unused(budget)

    def _expire_messages(
        self, cls: MessageClass, message_budget: int
    ) -> Generator[None, None, int]:
        """Drop expired messages at the floors of positions, in parts.

        Scans at most `message_budget` messages, but a few for each position. Returns the remaining
        budget.
        """
        count = self._expire_backlog(cls, max(message_budget, REDELIVERY_MESSAGES))
        message_budget -= count
        changed = count > 0
        scanned_count = 0  # Messages scanned in this part.
        for number, position in enumerate(list(cls.positions), 1):
            if position in cls.positions:  # It may have ended between the parts.
                messages_max = max(message_budget, REDELIVERY_MESSAGES)
                changed |= cls.group_or_position(position).drop_expired(messages_max)
                message_budget -= position.scanned_count
                scanned_count += position.scanned_count
            if number % TICKED_CLASSES_PER_TURN == 0 or scanned_count > EXPIRY_SCANNED_PER_TURN:
                scanned_count = 0
                yield
        if changed:
            self.trim_class(cls)
        return message_budget

    def _expire_backlog(self, cls: MessageClass, max_count: int) -> int:
        """Drop expired messages of the backlog. Returns how many messages were scanned."""
        ring, waiting = cls.ring, cls.backlog_window
        if waiting.floor < ring.floor:
            return 0  # The first messages are on disk.
        first, scan_count = waiting.floor, EXPIRY_SCAN_INITIAL_MESSAGES
        end = min(waiting.cursor if cls.positions else ring.head, ring.timed_until)
        end = min(end, first + max_count)
        while (at := waiting.floor) < end:
            last = min(end, at + scan_count)
            floor = selection.first_unexpired(ring, at, last, self.clock.now)
            cls.dropped_counts[Reason.EXPIRED] += waiting.skip_to(floor)
            if waiting.floor < last:
                break
            scan_count = min(4 * scan_count, REDELIVERY_MESSAGES)
        return waiting.floor - first
