"""What is published and kept: every class, and what happens when one is full.

Rule 1: a message that cannot be kept is counted by reason, and its publisher told if its version
has a word for it.
Rule 2: the store says which feeds have something new; it sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from simplebus.core import dead_letters
from simplebus.core.authorization.session_permissions import can_publish, publish_denied_text
from simplebus.core.clock import BrokerClock
from simplebus.core.commit_log import CommitLog, log_stored_messages, publish_error
from simplebus.core.dead_letters import DeadMessage
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CHANNEL_NAMES_MAX,
    DELIMITER_BYTES,
    EXPIRY_SCAN_INITIAL_MESSAGES,
    EXPIRY_SCAN_MESSAGES_MAX,
    FORGET_CHANNELS_MIN,
    HEADER_BYTES,
    PLAIN_FRAMES_MAX,
    REDELIVERY_MESSAGES,
    SCAN_MESSAGES_MAX,
)
from simplebus.core.message_class.class_registry import ClassRegistry
from simplebus.core.message_class.message_class import MessageClass, build_row
from simplebus.core.message_class.spill import SpillManager
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.redelivery.failure_reasons import FailureReasons
from simplebus.core.ring.columns import NO_DELAY, MessageRows, Times
from simplebus.core.session import version2
from simplebus.core.session.outbox import Outbox
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2Decoder
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.store import compaction
from simplebus.core.store.publish_queue import PublishQueue
from simplebus.core.subscription import selection
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.core.users.permissions import ClassAccess
from simplebus.core.users.rate_limit import consume, has_waiting_sessions, is_one_allowed

AppendFrames = Callable[[FrameBatch], int]
"""Puts messages into a ring, as far as there is room. Returns how many it dealt with."""

OnStored = Callable[[Session | None, MessageClass, int, int], None]
"""Called with messages first..last-1 of a class when they have just been stored, and with who has
published them; None for the bus itself, whose dead letters they are."""


class Store:
    """Of one broker."""

    def __init__(
        self,
        settings: Settings,
        clock: BrokerClock,
        *,
        mark_ready: Callable[[Outbox], None],
        on_refused: Callable[[Session, FrameRefused], None],
        on_slow_consumer: Callable[[BrokerSubscription], None],
        commit_log: CommitLog | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.commit_log = commit_log
        """What is stored is noted in it; None where nothing is kept past the process."""
        self.class_registry = ClassRegistry(settings, commit_log)
        self.classes = self.class_registry.classes
        self.class_id_by_name = self.class_registry.class_id_by_name
        self.subject_bindings = self.class_registry.subject_bindings
        self.budget = self.class_registry.budget
        self.spill_manager: SpillManager | None = None
        """What is on disk only; None where no class may be larger than memory."""
        if commit_log is not None and settings.has_spilling_class:
            self.spill_manager = SpillManager(
                self, commit_log, self.class_registry.spill_budget, mark_ready=mark_ready
            )
            self.class_registry.spill_manager = self.spill_manager
        self.publish_queue = PublishQueue(
            self.classes,
            self.budget,
            self._append_batch,
            self.class_registry.dead_letter_budget,
            clock,
        )
        self.failure_reasons = FailureReasons()
        """What was said of messages that are to come again."""
        self.timer_index = 0
        self._mark_ready = mark_ready
        """Called with outboxes that have something new."""
        self._on_refused = on_refused
        """Called with what cannot be stored."""
        self._on_slow_consumer = on_slow_consumer
        """Called with a subscription that is to be cut off, because it is too slow."""
        self.on_stored: OnStored | None = None
        """Who else is to see what is stored; None while nobody is."""
        self.on_timed_stored: OnStored | None = None
        """Who is to see it then, if it opens later or expires."""
        self.classes_to_trim: dict[MessageClass, None] = {}
        """Classes whose floor may have moved by itself, or some of whose positions are too slow."""
        self.positions_with_pending_dead_letters: dict[
            MessageClass, dict[BrokerSubscription, None]
        ] = {}
        """By class, whose dead letters find no room: which positions have given them up."""

    def apply_settings(self, settings: Settings) -> None:
        """Behave like this from now on."""
        self.settings = settings
        self.class_registry.apply_settings(settings)
        for cls in list(self.publish_queue.blocked_classes):
            self.publish_queue.retry(cls)

    def require_class(self, class_id: int) -> MessageClass:
        """The class with this id. Raises RemoteProtocolError (unknown_class)."""
        cls = self.classes.get(class_id)
        if cls is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_CLASS, f"no Connect has named class {class_id}"
            )
        return cls

    # Publishing ----------------------------------------------------------------------------------

    def publish_one(self, session: Session, class_id: int, frame: memoryview) -> None:
        """What `publish` does, for a single message."""
        cls = self.classes[class_id]
        row = None
        if frame[0] == frames.ENVELOPE:
            row = build_row(cls, frame, self.clock.now)
        if (
            session.parked_messages
            or cls.blocked_sessions
            or publish_error(self.commit_log, session)
            or (row is None and frame[0] != frames.MESSAGE)
            or (session.grants is not None and not can_publish(session, cls, row))
            or (
                session.token_buckets
                and not is_one_allowed(session.token_buckets, len(frame), self.clock.now)
            )
            or not cls.ring.append_one(frame, self.timer_index, row)
        ):
            self.publish(session, class_id, FrameBatch.from_frame(frame))
            return
        if session.token_buckets:
            consume(session.token_buckets, 1, len(frame))
        if self.clock.now >= cls.time_index.next_step_time:
            cls.record_accepted(self.clock.now, cls.ring.head - 1)
        first = cls.ring.head - 1
        if self.commit_log is not None:
            log_stored_messages(
                self.commit_log, session, class_id, first, 1, bytes(frame), self.clock.now
            )
        tap = self.on_stored or (self.on_timed_stored if cls.ring.timed_until > first else None)
        if tap is not None:
            tap(session, cls, first, first + 1)
        self.notify_subscribers(cls)

    def publish(self, session: Session, class_id: int, batch: FrameBatch) -> None:
        cls = self.classes[class_id]
        failure = publish_error(self.commit_log, session)
        if failure:
            cls.dropped_counts[failure[0]] += batch.count
            self._refuse_messages(session, batch, *failure)
            return
        if session.grants is not None and not self._check_can_publish(session, cls, batch):
            return
        if session.parked_messages or cls.blocked_sessions:
            self.publish_queue.enqueue(session, cls, batch)
            return
        if not session.token_buckets:
            self._append_or_enqueue(session, cls, batch)
            return
        fits = 0
        if not has_waiting_sessions(session.token_buckets):
            fits = self.publish_queue.rate_queue.count_allowed(session, batch)
        if fits:
            dealt = self._append_or_enqueue(session, cls, batch.slice(0, fits))
            consume(session.token_buckets, dealt, int(batch.bounds[dealt]))
        if fits < batch.count:
            self.publish_queue.enqueue(
                session, cls, batch.slice(fits, batch.count), is_rate_limited=True
            )

    def _append_or_enqueue(self, session: Session, cls: MessageClass, batch: FrameBatch) -> int:
        """Returns how many messages it dealt with; the rest is parked."""
        put = partial(self._append_to_ring, cls, session)
        taken = self._append_with(put, session, cls, batch)
        if taken == batch.count:
            return taken
        rest = batch.slice(taken, batch.count)
        match cls.full_policy:
            case FullPolicy.BLOCK | FullPolicy.SPILL:
                self.publish_queue.enqueue(session, cls, rest)
                return taken
            case FullPolicy.DROP_NEWEST:
                self._drop_newest(session, cls, rest)
            case FullPolicy.DROP_OLDEST:
                self._append_evicting_oldest(put, session, cls, rest)
        return batch.count

    def _check_can_publish(self, session: Session, cls: MessageClass, batch: FrameBatch) -> bool:
        """Whether a session may publish messages like some of these: without a channel, or with any
        that they may have. What it may not publish at all is refused here.

        Raises RemoteProtocolError (unauthorized) for a peer that has no word for that.
        """
        assert session.grants is not None
        scope = session.grants.publish_permissions(cls.class_id, cls.name)
        if scope.access is ClassAccess.ALL:
            return True
        has_channels = batch.data[0] == frames.ENVELOPE
        if scope.access is ClassAccess.SOME and (has_channels or scope.is_allowed("")):
            return True
        sentence = publish_denied_text(session, cls, "")
        if not isinstance(session.decoder, Version2Decoder) and not session.is_local:
            raise RemoteProtocolError(Reason.UNAUTHORIZED, sentence)
        self._refuse_messages(session, batch, Reason.UNAUTHORIZED, sentence)
        return False

    def _can_publish_to_all(self, session: Session, cls: MessageClass, channels: list[str]) -> bool:
        """Whether a session may publish to all of these channels, which the class knows."""
        if session.grants is None:
            return True
        scope = session.grants.publish_permissions(cls.class_id, cls.name)
        return scope.access is ClassAccess.ALL or cls.channels.are_all_allowed(scope, channels)

    def _refuse_denied_channels(
        self, session: Session, cls: MessageClass, batch: FrameBatch, rows: MessageRows
    ) -> tuple[int, int]:
        """Of messages with channels, some of which a session may not publish: how many it may, in
        front; or else how many in front it may not, which are refused."""
        assert session.grants is not None
        scope = session.grants.publish_permissions(cls.class_id, cls.name)
        allowed = np.broadcast_to(cls.channels.allowed_flags(scope, rows.channels), batch.count)
        if allowed[0]:
            return int(allowed.argmin()), 0
        numbers = np.broadcast_to(np.atleast_1d(np.asarray(rows.channels)), batch.count)
        number = int(numbers[0])  # One sentence names one channel.
        others = (numbers != number).nonzero()[0]
        count = int(others[0]) if others.size else batch.count
        sentence = publish_denied_text(session, cls, cls.channels.name_of(number))
        if isinstance(session.decoder, Version2Decoder):
            refused = batch.slice(0, count)
            self._refuse_messages(session, refused, Reason.UNAUTHORIZED, sentence)
        else:
            cls.dropped_counts[Reason.UNAUTHORIZED] += count
        return 0, count

    def _append_batch(self, cls: MessageClass, batch: FrameBatch, session: Session) -> int:
        """Store messages of one frame type, as far as there is room. Returns how many it dealt
        with."""
        return self._append_with(partial(self._append_to_ring, cls, session), session, cls, batch)

    def _append_with(
        self, append: AppendFrames, session: Session | None, cls: MessageClass, batch: FrameBatch
    ) -> int:
        """The same, with what puts them into the ring."""
        ring = cls.ring
        first = ring.head
        dealt = append(batch)
        if dealt < batch.count and cls.can_evict:
            way = compaction.Compactor(self, cls)
            while dealt < batch.count:
                rest = batch.slice(dealt, batch.count)
                if not way.make_room(rest.data.size):
                    break
                dealt += append(rest)
        if ring.head != first:
            if self.clock.now >= cls.time_index.next_step_time:
                cls.record_accepted(self.clock.now, first)
            tap = self.on_stored or (self.on_timed_stored if ring.timed_until > first else None)
            if tap is not None:
                tap(session, cls, first, ring.head)
            self.notify_subscribers(cls)
        return dealt

    def _append_to_ring(self, cls: MessageClass, session: Session, batch: FrameBatch) -> int:
        if batch.data[0] == frames.MESSAGE:
            return self.append_and_log(cls, batch, None, session)
        return self._append_envelopes(cls, batch, session)

    def append_and_log(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        rows: MessageRows | None,
        session: Session | None,
    ) -> int:
        """Put messages into the ring, as far as there is room, and into the commit_log."""
        first = cls.ring.head
        taken = cls.ring.append(batch, self.timer_index, rows)
        if taken and self.commit_log is not None:
            data = batch.data[: batch.bounds[taken]].tobytes()
            log_stored_messages(
                self.commit_log, session, cls.class_id, first, taken, data, self.clock.now
            )
        return taken

    def _append_envelopes(self, cls: MessageClass, batch: FrameBatch, session: Session) -> int:
        """The same for a run of messages with envelopes. A bad one is refused, and dealt with."""
        dealt, most = 0, batch.count
        while dealt < batch.count:
            some = batch.slice(dealt, min(dealt + most, batch.count))
            read = envelope_batch.scan_envelopes(some)
            if read.count:
                rows = self.build_rows(cls, read, self.clock.now)
                if rows is None:
                    if some.count == 1:
                        break
                    most = some.count // 2
                    continue
                good = some if read.count == some.count else some.slice(0, read.count)
                if not self._can_publish_to_all(session, cls, read.names):
                    allowed, refused = self._refuse_denied_channels(session, cls, good, rows)
                    if refused:
                        dealt += refused
                        continue
                    if allowed < good.count:
                        good, rows = good.slice(0, allowed), rows.slice(0, allowed)
                        dealt += (taken := self.append_and_log(cls, good, rows, session))
                        if taken < allowed:
                            break
                        continue
                taken = self.append_and_log(cls, good, rows, session)
                dealt += taken
                if taken < read.count:
                    break
            most *= 2
            if read.count < some.count:
                self._refuse_envelope(session, some.slice(read.count, read.count + 1))
                dealt += 1
                most = PLAIN_FRAMES_MAX  # Where one is bad, others may be: look not far ahead.
        return dealt

    def build_rows(
        self, cls: MessageClass, columns: envelope_batch.EnvelopeColumns, accepted_at: float | Times
    ) -> MessageRows | None:
        """What is known of messages accepted now, or each at its time; None when there is no memory
        for their channels."""
        numbers = cls.channels.intern_names(columns.names)
        if numbers is None:
            return None
        if isinstance(columns.channels, int):
            channels: int | np.ndarray = numbers[columns.channels] if numbers else 0
        else:
            channels = np.array(numbers, np.uint32)[columns.channels]
        return MessageRows(
            columns.count,
            channels,
            None if columns.expires is None else columns.expires + accepted_at,
            # Who is put off by nothing is not put off by a clock that is set back, either.
            None
            if columns.not_before is None
            else np.where(columns.not_before > 0, columns.not_before + accepted_at, NO_DELAY),
        )

    def _refuse_envelope(self, session: Session, frame: FrameBatch) -> None:
        try:
            envelope_batch.decode(frame.data[HEADER_BYTES:-DELIMITER_BYTES].tobytes())
        except RemoteProtocolError as error:
            self._refuse_messages(session, frame, error.reason, error.sentence)
            return
        raise AssertionError("an envelope that one parser refused was taken by the other")

    def _refuse_messages(
        self, session: Session, batch: FrameBatch, reason: Reason, sentence: str
    ) -> None:
        for refused in version2.build_refusals(batch, reason, sentence):
            self._on_refused(session, refused)

    def notify_subscribers(self, cls: MessageClass) -> None:
        """There is something new for everyone subscribed to the class."""
        for subscription in cls.connected_positions:
            if subscription.is_connected:  # One of version 1 may wait for what another one left.
                subscription.outbox.enqueue(subscription)
                self._mark_ready(subscription.outbox)
        for group in cls.groups:
            for member in group.distribute_messages():
                self._mark_ready(member.outbox)
        if cls.limited_positions:
            self._enforce_pending_limits(cls)

    def _enforce_pending_limits(self, cls: MessageClass) -> None:
        """Have positions obey their own policy about what waits for them."""
        spare = SCAN_MESSAGES_MAX
        for position in list(cls.limited_positions):
            position.count_backlog(min(spare, REDELIVERY_MESSAGES))
            if position.delivery_policy.slow_policy == "disconnect":
                if not position.is_too_slow and position.is_over_pending_limit():
                    position.is_too_slow = True
                    self.classes_to_trim[cls] = (
                        None  # It is cut off when nothing else is under way.
                    )
            elif position.enforce_pending_limit():
                self.classes_to_trim[cls] = None
            if position.scanned_count:
                spare = max(0, spare - position.scanned_count)
                del cls.limited_positions[position]  # It comes last the next time.
                cls.limited_positions[position] = None

    # Full ----------------------------------------------------------------------------------------

    def _drop_newest(self, session: Session | None, cls: MessageClass, batch: FrameBatch) -> None:
        cls.dropped_counts[Reason.DROP_NEWEST] += batch.count
        if session is not None and isinstance(session.decoder, Version2Decoder):
            why = "it drops the newest" if len(cls.ring) else "other classes hold the memory"
            sentence = f"class {cls.class_id} is full: {why}"
            self._refuse_messages(session, batch, Reason.DROP_NEWEST, sentence)

    def _append_evicting_oldest(
        self, append: AppendFrames, session: Session | None, cls: MessageClass, batch: FrameBatch
    ) -> None:
        ring, saving = cls.ring, compaction.EvictionCompactor(self, cls)
        while True:
            if not len(ring):  # Not even an empty ring takes it: other classes hold the memory.
                self._drop_newest(session, cls, batch)
                return
            too_many = len(ring) + batch.count - ring.messages_max
            if too_many > 0:
                floor = min(ring.floor + too_many, ring.head)
            else:
                floor = ring.sequence_after_bytes(batch.data.size)
            floor = max(floor, saving.leading_values_end())
            needed = min(max(cls.first_sequence, cls.floor()), floor)
            saved = saving.copy_evicted(floor)
            cls.dropped_counts[Reason.DROP_OLDEST] += floor - needed
            for subscription in cls.subscriptions:
                subscription.skip_to(floor)
            if cls.has_backlog:
                cls.backlog_window.skip_to(floor)
            cls.release_below(floor if cls.has_last_values else max(floor, cls.floor()))
            if saved is not None:
                cls.dropped_counts[Reason.DROP_OLDEST] -= saved.count_from(needed)
                compaction.append_copy(self, cls, saved)
            taken = self._append_with(append, session, cls, batch)
            if taken == batch.count:
                return
            batch = batch.slice(taken, batch.count)

    # Dead letters --------------------------------------------------------------------------------

    def dead_letter(
        self,
        cls: MessageClass,
        position: BrokerSubscription,
        ranges: selection.Ranges,
        reason: Reason,
        attempts: int,
    ) -> int | None:
        """Keep as dead letters what a position has given up. Returns from which message on there is
        no memory: they stay, and are tried again at the ticks. None when all are dealt with."""
        if dead_letters.is_dead_letter_class(cls.name):
            return None
        of = cls.name or str(cls.class_id)
        try:
            dead = self.class_registry.open_dead_letter_class(of)
        except RemoteProtocolError:
            self.defer_dead_letters(cls, position)
            return ranges[0][0]
        death = dead_letters.DeadLetterCause(
            reason=reason,
            class_=of,
            attempts=attempts,
            subscription=position.durable or position.group,
            session=str(position.outbox.session_id) if position.is_connected else "",
            since=self.clock.now,
        )
        ring, until = position.ring, None
        there = [range(max(a, ring.floor), min(b, ring.head)) for a, b in ranges]
        letters = dead_letters.build_dead_letters(
            (
                DeadMessage(
                    sequence,
                    ring.copy_frame(sequence),
                    cls.accepted_at(position, sequence),
                    self.failure_reasons.get(position, sequence),
                )
                for each in there
                for sequence in each
            ),
            death,
            class_id=dead.class_id,
            frame_bytes_max=self.settings.limits.frame_bytes,
        )
        lost = letters.lost_count + selection.count_sequences(ranges) - sum(map(len, there))
        if letters.frames is not None:
            before = dead.dropped_counts[Reason.DROP_NEWEST]
            laid = self._append_dead_letters(dead, letters.frames, letters.columns)
            if laid < letters.frames.count:
                until = letters.sequences[laid]
                ranges = selection.ranges_before(ranges, until)
                lost = selection.count_sequences(ranges) - laid
                self.defer_dead_letters(cls, position)
            lost += (
                dead.dropped_counts[Reason.DROP_NEWEST] - before
            )  # One that is too long for them.
        if lost:
            cls.dropped_counts[Reason.NO_DEAD_LETTER] += lost
        cls.on_dead_lettered(position, ranges, dead.class_id)
        return until

    def defer_dead_letters(self, cls: MessageClass, position: BrokerSubscription) -> None:
        """A position has given up what found no room among the dead letters."""
        self.positions_with_pending_dead_letters.setdefault(cls, {})[position] = None

    def _append_dead_letters(
        self, dead_letter_class: MessageClass, batch: FrameBatch, columns: EnvelopeColumns
    ) -> int:
        """Store dead letters. Nobody has to look at them: they are the bus's own. Where the limits
        of their class leave no room the oldest go, unless it is to block; where all memory is
        spent, none. Returns how many are dealt with."""
        rows = self.build_rows(dead_letter_class, columns, self.clock.now)
        if rows is None:
            return 0

        def put(rest: FrameBatch) -> int:
            those = rows.slice(rows.count - rest.count, rows.count)
            return self.append_and_log(dead_letter_class, rest, those, None)

        taken = self._append_with(put, None, dead_letter_class, batch)
        if taken < batch.count:
            rest = batch.slice(taken, batch.count)
            if dead_letter_class.full_policy is FullPolicy.BLOCK or dead_letter_class.ring.can_grow(
                rest
            ):
                return taken
            self._append_evicting_oldest(put, None, dead_letter_class, rest)
        return batch.count

    def _retry_dead_letters(self) -> None:
        """Some dead letters may find room that found none."""
        for cls, positions in list(self.positions_with_pending_dead_letters.items()):
            for position in list(positions):
                if position in cls.subscriptions and not position.retry_dead_letters():
                    break  # Nor is there any for the others.
                if position not in cls.subscriptions or not position.pending_dead_letters:
                    del positions[position]
            if not positions:
                del self.positions_with_pending_dead_letters[cls]

    def trim_class(self, cls: MessageClass) -> None:
        """Let go of what nobody needs any longer, and let the blocked ones in."""
        cls.trim(self.clock.now)
        if cls.has_last_values:
            compaction.compact_if_cluttered(self, cls)
        if cls.blocked_sessions:
            self.publish_queue.retry(cls)

    def schedule_trim(self, cls: MessageClass) -> None:
        """A position has moved by itself; `release_loose` is to be called."""
        self.classes_to_trim[cls] = None

    def trim_scheduled(self) -> bool:
        """Do what `release` does where positions have moved by themselves."""
        if not self.classes_to_trim:
            return False
        while self.classes_to_trim:
            cls, _ = self.classes_to_trim.popitem()
            for position in [p for p in cls.limited_positions if p.is_too_slow]:
                self._on_slow_consumer(position)
            self.trim_class(cls)
        return True

    # Time ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once per tick: memory, times, and what nobody waits for any more."""
        self.failure_reasons.forget_acked()
        if 4 * self.budget.available_bytes < self.budget.limit_bytes:
            self._forget_unused_channels()
        spare, names = EXPIRY_SCAN_MESSAGES_MAX, FORGET_CHANNELS_MIN
        if self.positions_with_pending_dead_letters:
            self._retry_dead_letters()
        if self.spill_manager is not None:
            self.spill_manager.tick()
        for cls in list(self.classes.values()):
            if cls.ring.tick():
                names -= cls.channels.shrink_idle(names)
            cls.time_index.trim(cls.first_sequence)
            if cls.purged_sequences:
                cls.purged_sequences.remove(0, cls.first_sequence)
            if cls.ring.floor < cls.ring.timed_until:
                spare = self._expire_messages(cls, spare)
            self._enforce_pending_limits(cls)  # Some may not have counted all yet.
            if cls.blocked_sessions or cls.retention.seconds or cls.has_last_values:
                self.trim_class(cls)  # Other classes may have given memory back.

    def _forget_unused_channels(self) -> None:
        """Memory is short: give back what channels take that no stored message carries."""
        most = CHANNEL_NAMES_MAX
        for cls in self.classes.values():
            if most and len(cls.channels):
                most -= cls.channels.forget_unused(most)

    def _expire_messages(self, cls: MessageClass, message_budget: int) -> int:
        """Drop what waits in front and was not taken in time: `spare` messages, or a few for each
        position. Returns how many are to spare then."""
        count = self._expire_backlog(cls, max(message_budget, REDELIVERY_MESSAGES))
        message_budget -= count
        changed = count > 0
        for position in cls.subscriptions:
            changed |= position.drop_expired(max(message_budget, REDELIVERY_MESSAGES))
            message_budget -= position.scanned_count
        if changed:
            self.trim_class(cls)
        return message_budget

    def _expire_backlog(self, cls: MessageClass, max_count: int) -> int:
        """The same for what no position is there for. Returns how many were dropped."""
        ring, waiting = cls.ring, cls.backlog_window
        if waiting.floor < ring.floor:
            return 0  # It is on disk.
        first, many = waiting.floor, EXPIRY_SCAN_INITIAL_MESSAGES
        end = min(waiting.cursor if cls.subscriptions else ring.head, ring.timed_until)
        end = min(end, first + max_count)
        while (at := waiting.floor) < end:
            last = min(end, at + many)
            floor = selection.first_unexpired(ring, at, last, self.clock.now)
            cls.dropped_counts[Reason.EXPIRED] += waiting.skip_to(floor)
            if waiting.floor < last:
                break
            many = min(4 * many, REDELIVERY_MESSAGES)
        return waiting.floor - first
