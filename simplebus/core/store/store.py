"""What is published and kept: every class, and what happens when one is full.

Rule 1: a message that cannot be kept is counted by reason, and its publisher told if its version
has a word for it.
Rule 2: the store says which feeds have something new; it sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from simplebus.core import commit_log, dead_letters
from simplebus.core.authorization.session_permissions import may_publish, publishes_nothing
from simplebus.core.commit_log import Ledger
from simplebus.core.dead_letters import Dead
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CHANNEL_NAMES_MAX,
    CHANNELS_FORGOTTEN,
    DELIMITER_BYTES,
    EXPIRED_FIRST,
    EXPIRED_MESSAGES_MAX,
    HEADER_BYTES,
    LOOKED_MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    REDELIVERY_MESSAGES,
)
from simplebus.core.message_class.class_registry import ClassTable
from simplebus.core.message_class.message_class import MessageClass, lone_row
from simplebus.core.message_class.spill import Spilling
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.protocol.events import Refused
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.redelivery.delivery_policy import Clock
from simplebus.core.redelivery.failure_reasons import LastErrors
from simplebus.core.ring.columns import AT_ONCE, Rows, Times
from simplebus.core.session import version2
from simplebus.core.session.outbox import Outbox
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.store import compaction
from simplebus.core.store.publish_queue import Room
from simplebus.core.subscription import selection
from simplebus.core.subscription.subscription import Subscription
from simplebus.core.users.permissions import Verdict
from simplebus.core.users.rate_limit import charge, fits_one, is_awaited

Put = Callable[[FrameBatch], int]
"""Puts messages into a ring, as far as there is room. Returns how many it dealt with."""

Tap = Callable[[Session | None, MessageClass, int, int], None]
"""Called with messages first..last-1 of a class when they have just been stored, and with who has
published them; None for the bus itself, whose dead letters they are."""


class Store:
    """Of one broker."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        ready: Callable[[Outbox], None],
        refuse: Callable[[Session, Refused], None],
        end: Callable[[Subscription], None],
        ledger: Ledger | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.ledger = ledger
        """What is stored is noted in it; None where nothing is kept past the process."""
        self.table = ClassTable(settings, ledger)
        self.classes = self.table.classes
        self.names = self.table.names
        self.bound = self.table.bound
        self.budget = self.table.budget
        self.spilling: Spilling | None = None
        """What is on disk only; None where no class may be larger than memory."""
        if ledger is not None and settings.spills:
            self.spilling = Spilling(self, ledger, self.table.spill_budget, ready=ready)
            self.table.spilling = self.spilling
        self.room = Room(self.classes, self.budget, self._append, self.table.dead_budget, clock)
        self.errors = LastErrors()
        """What was said of messages that are to come again."""
        self.timer_index = 0
        self._ready = ready
        """Called with outboxes that have something new."""
        self._refuse = refuse
        """Called with what cannot be stored."""
        self._end = end
        """Called with a subscription that is to be cut off, because it is too slow."""
        self.tap: Tap | None = None
        """Who else is to see what is stored; None while nobody is."""
        self.timed_tap: Tap | None = None
        """Who is to see it then, if it opens later or expires."""
        self.loose: dict[MessageClass, None] = {}
        """Classes whose floor may have moved by itself, or some of whose positions are too slow."""
        self.unburied: dict[MessageClass, dict[Subscription, None]] = {}
        """By class, whose dead letters find no room: which positions have given them up."""

    def adopt(self, settings: Settings) -> None:
        """Behave like this from now on."""
        self.settings = settings
        self.table.adopt(settings)
        for cls in list(self.room.awaited):
            self.room.made(cls)

    def class_of(self, class_id: int) -> MessageClass:
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
            row = lone_row(cls, frame, self.clock.now)
        if (
            session.parked
            or cls.blocked
            or commit_log.failure(self.ledger, session)
            or (row is None and frame[0] != frames.MESSAGE)
            or (session.grants is not None and not may_publish(session, cls, row))
            or (session.meters and not fits_one(session.meters, len(frame), self.clock.now))
            or not cls.ring.append_one(frame, self.timer_index, row)
        ):
            self.publish(session, class_id, FrameBatch.of_one(frame))
            return
        if session.meters:
            charge(session.meters, 1, len(frame))
        if self.clock.now >= cls.times.next_time:
            cls.accepted(self.clock.now, cls.ring.head - 1)
        first = cls.ring.head - 1
        if self.ledger is not None:
            commit_log.note(self.ledger, session, class_id, first, 1, bytes(frame), self.clock.now)
        tap = self.tap or (self.timed_tap if cls.ring.timed_until > first else None)
        if tap is not None:
            tap(session, cls, first, first + 1)
        self.wake(cls)

    def publish(self, session: Session, class_id: int, batch: FrameBatch) -> None:
        cls = self.classes[class_id]
        failure = commit_log.failure(self.ledger, session)
        if failure:
            cls.dropped[failure[0]] += batch.count
            self._refuse_messages(session, batch, *failure)
            return
        if session.grants is not None and not self._may_publish_any(session, cls, batch):
            return
        if session.parked or cls.blocked:
            self.room.park(session, cls, batch)
            return
        if not session.meters:
            self._publish(session, cls, batch)
            return
        fits = 0
        if not is_awaited(session.meters):
            fits = self.room.pacing.fits(session, batch)
        if fits:
            dealt = self._publish(session, cls, batch.slice(0, fits))
            charge(session.meters, dealt, int(batch.bounds[dealt]))
        if fits < batch.count:
            self.room.park(session, cls, batch.slice(fits, batch.count), has_room=True)

    def _publish(self, session: Session, cls: MessageClass, batch: FrameBatch) -> int:
        """Returns how many messages it dealt with; the rest is parked."""
        put = partial(self._put, cls, session)
        taken = self._append_by(put, session, cls, batch)
        if taken == batch.count:
            return taken
        rest = batch.slice(taken, batch.count)
        match cls.policy:
            case FullPolicy.BLOCK | FullPolicy.SPILL:
                self.room.park(session, cls, rest)
                return taken
            case FullPolicy.DROP_NEWEST:
                self._drop_newest(session, cls, rest)
            case FullPolicy.DROP_OLDEST:
                self._append_dropping_oldest(put, session, cls, rest)
        return batch.count

    def _may_publish_any(self, session: Session, cls: MessageClass, batch: FrameBatch) -> bool:
        """Whether a session may publish messages like some of these: without a channel, or with any
        that they may have. What it may not publish at all is refused here.

        Raises RemoteProtocolError (unauthorized) for a peer that has no word for that.
        """
        assert session.grants is not None
        scope = session.grants.publishing(cls.class_id, cls.name)
        if scope.verdict is Verdict.ALL:
            return True
        has_channels = batch.data[0] == frames.ENVELOPE
        if scope.verdict is Verdict.SOME and (has_channels or scope.allows("")):
            return True
        sentence = publishes_nothing(session, cls, "")
        if not isinstance(session.dialect, Version2) and not session.is_inside:
            raise RemoteProtocolError(Reason.UNAUTHORIZED, sentence)
        self._refuse_messages(session, batch, Reason.UNAUTHORIZED, sentence)
        return False

    def _may_publish_all(self, session: Session, cls: MessageClass, names: list[str]) -> bool:
        """Whether a session may publish to all of these channels, which the class knows."""
        if session.grants is None:
            return True
        scope = session.grants.publishing(cls.class_id, cls.name)
        return scope.verdict is Verdict.ALL or cls.channels.all_allowed(scope, names)

    def _refuse_channels(
        self, session: Session, cls: MessageClass, batch: FrameBatch, rows: Rows
    ) -> tuple[int, int]:
        """Of messages with channels, some of which a session may not publish: how many it may, in
        front; or else how many in front it may not, which are refused."""
        assert session.grants is not None
        scope = session.grants.publishing(cls.class_id, cls.name)
        allowed = np.broadcast_to(cls.channels.allowed(scope, rows.channels), batch.count)
        if allowed[0]:
            return int(allowed.argmin()), 0
        numbers = np.broadcast_to(np.atleast_1d(np.asarray(rows.channels)), batch.count)
        number = int(numbers[0])  # One sentence names one channel.
        others = (numbers != number).nonzero()[0]
        count = int(others[0]) if others.size else batch.count
        sentence = publishes_nothing(session, cls, cls.channels.name(number))
        if isinstance(session.dialect, Version2):
            refused = batch.slice(0, count)
            self._refuse_messages(session, refused, Reason.UNAUTHORIZED, sentence)
        else:
            cls.dropped[Reason.UNAUTHORIZED] += count
        return 0, count

    def _append(self, cls: MessageClass, batch: FrameBatch, session: Session) -> int:
        """Store messages of one frame type, as far as there is room. Returns how many it dealt
        with."""
        return self._append_by(partial(self._put, cls, session), session, cls, batch)

    def _append_by(
        self, put: Put, session: Session | None, cls: MessageClass, batch: FrameBatch
    ) -> int:
        """The same, with what puts them into the ring."""
        ring = cls.ring
        first = ring.head
        dealt = put(batch)
        if dealt < batch.count and cls.gives_way:
            way = compaction.MakingWay(self, cls)
            while dealt < batch.count:
                rest = batch.slice(dealt, batch.count)
                if not way.make(rest.data.size):
                    break
                dealt += put(rest)
        if ring.head != first:
            if self.clock.now >= cls.times.next_time:
                cls.accepted(self.clock.now, first)
            tap = self.tap or (self.timed_tap if ring.timed_until > first else None)
            if tap is not None:
                tap(session, cls, first, ring.head)
            self.wake(cls)
        return dealt

    def _put(self, cls: MessageClass, session: Session, batch: FrameBatch) -> int:
        if batch.data[0] == frames.MESSAGE:
            return self.fill(cls, batch, None, session)
        return self._put_envelopes(cls, batch, session)

    def fill(
        self, cls: MessageClass, batch: FrameBatch, rows: Rows | None, session: Session | None
    ) -> int:
        """Put messages into the ring, as far as there is room, and into the ledger."""
        first = cls.ring.head
        taken = cls.ring.append(batch, self.timer_index, rows)
        if taken and self.ledger is not None:
            data = batch.data[: batch.bounds[taken]].tobytes()
            commit_log.note(self.ledger, session, cls.class_id, first, taken, data, self.clock.now)
        return taken

    def _put_envelopes(self, cls: MessageClass, batch: FrameBatch, session: Session) -> int:
        """The same for a run of messages with envelopes. A bad one is refused, and dealt with."""
        dealt, most = 0, batch.count
        while dealt < batch.count:
            some = batch.slice(dealt, min(dealt + most, batch.count))
            read = envelope_batch.scan(some)
            if read.count:
                rows = self.rows_of(cls, read, self.clock.now)
                if rows is None:
                    if some.count == 1:
                        break
                    most = some.count // 2
                    continue
                good = some if read.count == some.count else some.slice(0, read.count)
                if not self._may_publish_all(session, cls, read.names):
                    allowed, refused = self._refuse_channels(session, cls, good, rows)
                    if refused:
                        dealt += refused
                        continue
                    if allowed < good.count:
                        good, rows = good.slice(0, allowed), rows.part(0, allowed)
                        dealt += (taken := self.fill(cls, good, rows, session))
                        if taken < allowed:
                            break
                        continue
                taken = self.fill(cls, good, rows, session)
                dealt += taken
                if taken < read.count:
                    break
            most *= 2
            if read.count < some.count:
                self._refuse_envelope(session, some.slice(read.count, read.count + 1))
                dealt += 1
                most = PLAIN_FRAMES_MAX  # Where one is bad, others may be: look not far ahead.
        return dealt

    def rows_of(
        self, cls: MessageClass, read: envelope_batch.EnvelopeColumns, now: float | Times
    ) -> Rows | None:
        """What is known of messages accepted now, or each at its time; None when there is no memory
        for their channels."""
        numbers = cls.channels.numbers(read.names)
        if numbers is None:
            return None
        if isinstance(read.channels, int):
            channels: int | np.ndarray = numbers[read.channels] if numbers else 0
        else:
            channels = np.array(numbers, np.uint32)[read.channels]
        return Rows(
            read.count,
            channels,
            None if read.expires is None else read.expires + now,
            # Who is put off by nothing is not put off by a clock that is set back, either.
            None
            if read.not_before is None
            else np.where(read.not_before > 0, read.not_before + now, AT_ONCE),
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
        for refused in version2.refused_messages(batch, reason, sentence):
            self._refuse(session, refused)

    def wake(self, cls: MessageClass) -> None:
        """There is something new for everyone subscribed to the class."""
        for subscription in cls.listening:
            if subscription.is_connected:  # One of version 1 may wait for what another one left.
                subscription.outbox.wake(subscription)
                self._ready(subscription.outbox)
        for group in cls.groups:
            for member in group.share():
                self._ready(member.outbox)
        if cls.policed:
            self._police(cls)

    def _police(self, cls: MessageClass) -> None:
        """Have positions obey their own policy about what waits for them."""
        spare = LOOKED_MESSAGES_MAX
        for position in list(cls.policed):
            position.count_on(min(spare, REDELIVERY_MESSAGES))
            if position.terms.slow == "disconnect":
                if not position.is_too_slow and position.has_excess():
                    position.is_too_slow = True
                    self.loose[cls] = None  # It is cut off when nothing else is under way.
            elif position.make_way():
                self.loose[cls] = None
            if position.looked:
                spare = max(0, spare - position.looked)
                del cls.policed[position]  # It comes last the next time.
                cls.policed[position] = None

    # Full ----------------------------------------------------------------------------------------

    def _drop_newest(self, session: Session | None, cls: MessageClass, batch: FrameBatch) -> None:
        cls.dropped[Reason.DROP_NEWEST] += batch.count
        if session is not None and isinstance(session.dialect, Version2):
            why = "it drops the newest" if len(cls.ring) else "other classes hold the memory"
            sentence = f"class {cls.class_id} is full: {why}"
            self._refuse_messages(session, batch, Reason.DROP_NEWEST, sentence)

    def _append_dropping_oldest(
        self, put: Put, session: Session | None, cls: MessageClass, batch: FrameBatch
    ) -> None:
        ring, saving = cls.ring, compaction.Saving(self, cls)
        while True:
            if not len(ring):  # Not even an empty ring takes it: other classes hold the memory.
                self._drop_newest(session, cls, batch)
                return
            too_many = len(ring) + batch.count - ring.messages_max
            if too_many > 0:
                floor = min(ring.floor + too_many, ring.head)
            else:
                floor = ring.after(batch.data.size)
            floor = max(floor, saving.front())
            needed = min(max(cls.first, cls.floor()), floor)
            saved = saving.take_out(floor)
            cls.dropped[Reason.DROP_OLDEST] += floor - needed
            for subscription in cls.subscriptions:
                subscription.skip_to(floor)
            if cls.has_backlog:
                cls.waiting.skip_to(floor)
            cls.let_go(floor if cls.holds_values else max(floor, cls.floor()))
            if saved is not None:
                cls.dropped[Reason.DROP_OLDEST] -= saved.count_from(needed)
                compaction.put_back(self, cls, saved)
            taken = self._append_by(put, session, cls, batch)
            if taken == batch.count:
                return
            batch = batch.slice(taken, batch.count)

    # Dead letters --------------------------------------------------------------------------------

    def bury(
        self,
        cls: MessageClass,
        position: Subscription,
        ranges: selection.Ranges,
        reason: Reason,
        attempts: int,
    ) -> int | None:
        """Keep as dead letters what a position has given up. Returns from which message on there is
        no memory: they stay, and are tried again at the ticks. None when all are dealt with."""
        if dead_letters.are_kept_in(cls.name):
            return None
        of = cls.name or str(cls.class_id)
        try:
            dead = self.table.dead_class(of)
        except RemoteProtocolError:
            self.wait_for_room(cls, position)
            return ranges[0][0]
        death = dead_letters.Death(
            reason=reason,
            class_=of,
            attempts=attempts,
            subscription=position.durable or position.group,
            session=str(position.outbox.session_id) if position.is_connected else "",
            since=self.clock.now,
        )
        ring, until = position.ring, None
        there = [range(max(a, ring.floor), min(b, ring.head)) for a, b in ranges]
        letters = dead_letters.write(
            (
                Dead(
                    sequence,
                    ring.frame(sequence),
                    cls.accepted_at(position, sequence),
                    self.errors.of(position, sequence),
                )
                for each in there
                for sequence in each
            ),
            death,
            class_id=dead.class_id,
            frame_bytes_max=self.settings.limits.frame_bytes,
        )
        lost = letters.lost + selection.total(ranges) - sum(map(len, there))
        if letters.batch is not None:
            before = dead.dropped[Reason.DROP_NEWEST]
            laid = self._lay(dead, letters.batch, letters.columns)
            if laid < letters.batch.count:
                until = letters.sequences[laid]
                ranges = selection.before(ranges, until)
                lost = selection.total(ranges) - laid
                self.wait_for_room(cls, position)
            lost += dead.dropped[Reason.DROP_NEWEST] - before  # One that is too long for them.
        if lost:
            cls.dropped[Reason.NO_DEAD_LETTER] += lost
        cls.has_buried(position, ranges, dead.class_id)
        return until

    def wait_for_room(self, cls: MessageClass, position: Subscription) -> None:
        """A position has given up what found no room among the dead letters."""
        self.unburied.setdefault(cls, {})[position] = None

    def _lay(self, dead: MessageClass, batch: FrameBatch, columns: EnvelopeColumns) -> int:
        """Store dead letters. Nobody has to look at them: they are the bus's own. Where the limits
        of their class leave no room the oldest go, unless it is to block; where all memory is
        spent, none. Returns how many are dealt with."""
        rows = self.rows_of(dead, columns, self.clock.now)
        if rows is None:
            return 0

        def put(rest: FrameBatch) -> int:
            those = rows.part(rows.count - rest.count, rows.count)
            return self.fill(dead, rest, those, None)

        taken = self._append_by(put, None, dead, batch)
        if taken < batch.count:
            rest = batch.slice(taken, batch.count)
            if dead.policy is FullPolicy.BLOCK or dead.ring.may_grow(rest):
                return taken
            self._append_dropping_oldest(put, None, dead, rest)
        return batch.count

    def _bury_on(self) -> None:
        """Some dead letters may find room that found none."""
        for cls, positions in list(self.unburied.items()):
            for position in list(positions):
                if position in cls.subscriptions and not position.bury_on():
                    break  # Nor is there any for the others.
                if position not in cls.subscriptions or not position.unburied:
                    del positions[position]
            if not positions:
                del self.unburied[cls]

    def release(self, cls: MessageClass) -> None:
        """Let go of what nobody needs any longer, and let the blocked ones in."""
        cls.release(self.clock.now)
        if cls.holds_values:
            compaction.tidy(self, cls)
        if cls.blocked:
            self.room.made(cls)

    def loosen(self, cls: MessageClass) -> None:
        """A position has moved by itself; `release_loose` is to be called."""
        self.loose[cls] = None

    def release_loose(self) -> bool:
        """Do what `release` does where positions have moved by themselves."""
        if not self.loose:
            return False
        while self.loose:
            cls, _ = self.loose.popitem()
            for position in [p for p in cls.policed if p.is_too_slow]:
                self._end(position)
            self.release(cls)
        return True

    # Time ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once per tick: memory, times, and what nobody waits for any more."""
        self.errors.forget_done()
        if 4 * self.budget.left < self.budget.limit:
            self._forget_channels()
        spare, names = EXPIRED_MESSAGES_MAX, CHANNELS_FORGOTTEN
        if self.unburied:
            self._bury_on()
        if self.spilling is not None:
            self.spilling.tick()
        for cls in list(self.classes.values()):
            if cls.ring.tick():
                names -= cls.channels.rest(names)
            cls.times.forget(cls.first)
            if cls.purged:
                cls.purged.remove(0, cls.first)
            if cls.ring.floor < cls.ring.timed_until:
                spare = self._expire(cls, spare)
            self._police(cls)  # Some may not have counted all yet.
            if cls.blocked or cls.keep.seconds or cls.holds_values:
                self.release(cls)  # Other classes may have given memory back.

    def _forget_channels(self) -> None:
        """Memory is short: give back what channels take that no stored message carries."""
        most = CHANNEL_NAMES_MAX
        for cls in self.classes.values():
            if most and len(cls.channels):
                most -= cls.channels.forget(most)

    def _expire(self, cls: MessageClass, spare: int) -> int:
        """Drop what waits in front and was not taken in time: `spare` messages, or a few for each
        position. Returns how many are to spare then."""
        count = self._expire_backlog(cls, max(spare, REDELIVERY_MESSAGES))
        spare -= count
        changed = count > 0
        for position in cls.subscriptions:
            changed |= position.expire(max(spare, REDELIVERY_MESSAGES))
            spare -= position.looked
        if changed:
            self.release(cls)
        return spare

    def _expire_backlog(self, cls: MessageClass, most: int) -> int:
        """The same for what no position is there for. Returns how many were dropped."""
        ring, waiting = cls.ring, cls.waiting
        if waiting.floor < ring.floor:
            return 0  # It is on disk.
        first, many = waiting.floor, EXPIRED_FIRST
        end = min(waiting.cursor if cls.subscriptions else ring.head, ring.timed_until)
        end = min(end, first + most)
        while (at := waiting.floor) < end:
            last = min(end, at + many)
            floor = selection.first_in_time(ring, at, last, self.clock.now)
            cls.dropped[Reason.EXPIRED] += waiting.skip_to(floor)
            if waiting.floor < last:
                break
            many = min(4 * many, REDELIVERY_MESSAGES)
        return waiting.floor - first
