"""Handles Inquire requests: reports on the bus, a class, a session or a channel.

A report changes nothing and reads no messages. Its size is bounded, and omitted entries are
counted. Figures are those of `statistics`, sentences are made by `wait_reasons`. Messages in remote
storage are counted there; if that fails, the report contains the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import islice
from operator import itemgetter

import msgspec

from simplebus.core import dead_letters
from simplebus.core.authorization.session_permissions import can_inquire
from simplebus.core.broker.class_warnings import count_backlog, find_class_warning
from simplebus.core.broker.inquire_channels import (
    ChannelListenerSource,
    report_channel_in_steps,
)
from simplebus.core.broker.inquire_positions import (
    PositionReporter,
    nonzero_counts,
    producer_name,
    truncate_text,
)
from simplebus.core.broker.wait_reasons import (
    complete_sentence,
    format_bytes,
    format_duration,
    format_message_count,
    format_waiting_count,
)
from simplebus.core.errors import DEAD_LETTER_REASONS, Reason, RemoteProtocolError
from simplebus.core.limits import (
    INQUIRY_CLASSES_MAX,
    INQUIRY_MEMBERS_MAX,
    INQUIRY_PATTERNS_MAX,
    INQUIRY_POSITIONS_MAX,
    INQUIRY_SESSIONS_MAX,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.remote_storage import (
    RemoteCountOutcome,
    RemoteInquiry,
    RemoteInventory,
    RemoteStorage,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.events import InquireRequested
from simplebus.core.protocol.inquiry import (
    AcksInquiry,
    BusInfo,
    BusInquiry,
    ChannelInfo,
    ChannelInquiry,
    ClassInfo,
    ClassInquiry,
    ClassOverview,
    InquireReply,
    Inquiry,
    PositionInfo,
    PublisherInfo,
    SessionInfo,
    SessionOverview,
)
from simplebus.core.session.session import Session
from simplebus.core.settings import Retention
from simplebus.core.steps import drain_list, run_to_end
from simplebus.core.store.store import Store
from simplebus.core.subscription.position import Position
from simplebus.core.users.permissions import Grants, has_private_channels

_CLASSES_PER_STEP = _POSITIONS_PER_STEP = 256


@dataclass(slots=True)
class _PositionTotals:
    """Counts of all positions of a class, the ended ones included."""

    delivered_count: int
    redelivered_count: int
    acknowledged_count: int
    undelivered_counts: Counter[Reason]
    """Messages that were dropped or not delivered to some position, by reason."""
    lowest: list[Position] = field(default_factory=list)
    """Positions that hold the oldest messages, the oldest first."""


def _count_positions(cls: MessageClass) -> Generator[None, None, _PositionTotals]:
    """Count the positions of a class in steps. A position that ends meanwhile is counted once."""
    totals = _PositionTotals(
        cls.deliveries.count,
        cls.redelivered_count,
        cls.acknowledged_count,
        Counter(cls.dropped_counts),
    )
    positions = drain_list(list(cls.positions))
    while part := list(islice(positions, _POSITIONS_PER_STEP)):
        for position in part:
            totals.redelivered_count += position.redelivered_count
            totals.acknowledged_count += position.acknowledged_count
            if position.undelivered_counts:
                totals.undelivered_counts.update(position.undelivered_counts)
        totals.lowest = nsmallest(
            INQUIRY_POSITIONS_MAX, [*totals.lowest, *part], key=_position_floor
        )
        if len(part) == _POSITIONS_PER_STEP:
            yield
    return totals


def _run_next_step(session: Session, steps: Iterator[None]) -> bool:
    """Run the next step of a deferred reply. Returns True if the reply is complete.

    Without a connection, all steps run at once.
    """
    for _ in steps:
        if session.can_split_reads:
            session.outbox.resume_replies()
            return False
    return True


class InquiryHandler:
    """Builds the reports of one broker."""

    def __init__(
        self,
        store: Store,
        sessions: Mapping[int, Session],
        refusal_counts: Counter[Reason],
        *,
        identity: str,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._refusal_counts = refusal_counts
        self.identity = identity
        """Id of the bus."""
        self._position_reporter = PositionReporter(store, sessions)
        self.listener_sources: list[ChannelListenerSource] = []
        """Other servers in this process whose clients listen to channels, such as the NATS server.
        """

    def handle_inquiry(
        self,
        session: Session,
        event: InquireRequested,
        on_refused: Callable[[RemoteProtocolError], None],
    ) -> None:
        """Queue an Inquire request of a session. `on_refused` is called if it fails."""
        inquiry = event.body
        assert not isinstance(inquiry, AcksInquiry)
        remote_counts: dict[int, RemoteCountOutcome] = {}
        steps = self._send_report(session, inquiry, event.request_number, remote_counts, on_refused)

        def send_next_part(counted: dict[int, RemoteCountOutcome]) -> bool:
            remote_counts.update(counted)
            return _run_next_step(session, steps)

        remote_classes = partial(self._remote_classes, inquiry)
        session.outbox.defer_reply(RemoteInquiry(session, remote_classes, send_next_part).try_reply)

    def _send_report(
        self,
        session: Session,
        inquiry: Inquiry,
        request_number: int,
        remote_counts: Mapping[int, RemoteCountOutcome],
        on_refused: Callable[[RemoteProtocolError], None],
    ) -> Iterator[None]:
        """Send a report in steps, because there may be many classes and positions."""
        try:
            report = yield from self._build_report(inquiry, remote_counts, session.grants)
        except RemoteProtocolError as error:
            on_refused(error)
            return
        yield
        content = msgspec.json.encode(report)
        session.outbox.queue_reply(
            frames.encode(frames.INQUIRE, message_id=request_number, content=content)
        )

    def build_report(
        self,
        inquiry: Inquiry,
        remote_counts: Mapping[int, RemoteCountOutcome] | None = None,
        *,
        grants: Grants | None = None,
    ) -> InquireReply:
        """Return the report for an inquiry.

        Args:
            inquiry: The question.
            remote_counts: Counts of remote storage by class id, or descriptions of their failures.
            grants: Permissions of the user who asks; None for everything.

        Raises:
            RemoteProtocolError: (unknown_class, unknown_session)
        """
        return run_to_end(self._build_report(inquiry, remote_counts or {}, grants))

    def _build_report(
        self,
        inquiry: Inquiry,
        remote_counts: Mapping[int, RemoteCountOutcome],
        grants: Grants | None,
    ) -> Generator[None, None, InquireReply]:
        """Build a report in steps. Raises RemoteProtocolError."""
        match inquiry:
            case BusInquiry():
                return (yield from self._report_bus(grants))
            case ClassInquiry(class_=name_or_id):
                cls = self._require_class(name_or_id, grants)
                return (yield from self._report_class(cls, remote_counts, grants))
            case ChannelInquiry():
                return (yield from self._report_channel(inquiry, grants))
        session = self._sessions.get(inquiry.session)
        if session is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_SESSION,
                f"session {inquiry.session} is not open; open sessions: {len(self._sessions)}",
            )
        return (yield from self._report_session(session, grants))

    @property
    def _now(self) -> float:
        return self._store.clock.now

    @property
    def _durability_name(self) -> str:
        commit_log = self._store.commit_log
        return (Durability.MEMORY if commit_log is None else commit_log.durability).name.lower()

    def _remote_classes(self, inquiry: Inquiry) -> list[RemoteStorage]:
        """Return the remote storage that must be asked before the report can be built."""
        if not isinstance(inquiry, ClassInquiry):
            return []
        store, name_or_id = self._store, inquiry.class_
        class_id = (
            store.class_id_by_name.get(name_or_id) if isinstance(name_or_id, str) else name_or_id
        )
        cls = store.classes.get(class_id) if class_id is not None else None
        if cls is None or cls.remote_storage is None:
            return []
        dead_class_id = self._dead_letter_class_id(cls)
        storages: list[RemoteStorage | None] = [cls.remote_storage]
        if dead_class_id is not None:
            storages.append(store.classes[dead_class_id].remote_storage)
        return [storage for storage in storages if storage is not None]

    def _dead_letter_class_id(self, cls: MessageClass) -> int | None:
        return self._store.class_id_by_name.get(dead_letters.dead_letter_class_name(cls.label))

    def _require_class(self, name_or_id: int | str, grants: Grants | None) -> MessageClass:
        """Return a class that the user may inspect. Raises RemoteProtocolError."""
        store = self._store
        class_id = (
            store.class_id_by_name.get(name_or_id) if isinstance(name_or_id, str) else name_or_id
        )
        cls = None if class_id is None else store.classes.get(class_id)
        if cls is None or not can_inquire(grants, cls):  # A denied class must not be revealed.
            raise RemoteProtocolError(Reason.UNKNOWN_CLASS, f"there is no class {name_or_id!r}")
        return cls

    def _describe_position(
        self, cls: MessageClass, position: Position, grants: Grants | None
    ) -> Generator[None, None, PositionInfo]:
        """Build the report on a position in steps, without channels of replies to other users."""
        report = yield from self._position_reporter.describe_position(cls, position)
        if grants is None or not has_private_channels(cls.name):
            return report
        left_out = len(report.patterns) + report.patterns_left_out
        return msgspec.structs.replace(report, patterns=[], patterns_left_out=left_out)

    # The bus -------------------------------------------------------------------------------------

    def _report_bus(self, grants: Grants | None) -> Generator[None, None, BusInfo]:
        """Build the report on the bus in steps. The state of a class is read at the step of the
        class.
        """
        store, sessions = self._store, self._sessions
        failure = store.commit_log.write_error if store.commit_log is not None else None
        first_classes: list[tuple[tuple[bool, bool, int, int], ClassOverview]] = []
        visible_count, all_classes = 0, list(store.classes.values())
        for first in range(0, len(all_classes), _CLASSES_PER_STEP):
            if first:
                yield
            visible = [
                cls
                for cls in all_classes[first : first + _CLASSES_PER_STEP]
                if can_inquire(grants, cls) and store.classes.get(cls.class_id) is cls
            ]
            visible_count += len(visible)
            first_classes = nsmallest(
                INQUIRY_CLASSES_MAX,
                [*first_classes, *(self._describe_class(cls) for cls in visible)],
                key=itemgetter(0),
            )
        classes = [overview for _, overview in first_classes]
        lines = [
            SessionOverview(
                session.session_id,
                producer_name(session),
                truncate_text(session.peer),
                protocol_version(session),
                session.user,
            )
            for session in islice(sessions.values(), INQUIRY_SESSIONS_MAX)
        ]
        return BusInfo(
            bus=self.identity,
            now=self._now,
            memory_bytes=store.budget.used_bytes,
            memory_max=store.budget.limit_bytes,
            level=self._durability_name,
            failure="" if failure is None else f"{failure[0]}: {failure[1]}",
            refused=nonzero_counts(self._refusal_counts),
            classes=classes,
            classes_left_out=visible_count - len(classes),
            sessions=lines,
            sessions_left_out=len(sessions) - len(lines),
        )

    def _describe_class(
        self, cls: MessageClass
    ) -> tuple[tuple[bool, bool, int, int], ClassOverview]:
        """Return the sort key of a class in the report on the bus, and its entry there."""
        warning = find_class_warning(cls, self._now)
        overview = ClassOverview(
            class_id=cls.class_id,
            name=cls.name,
            stored=cls.ring.head - cls.first_sequence,
            positions=len(cls.positions),
            publishers=len(cls.blocked_sessions),
            dropped=sum(cls.dropped_counts.values())
            - sum(cls.dropped_counts.get(reason, 0) for reason in DEAD_LETTER_REASONS),
            is_remote=cls.is_remote,
            warning="" if warning is None else warning.sentence,
        )
        is_growing = warning is not None and warning.is_growing
        return (
            (not is_growing, not cls.blocked_sessions, -len(cls.ring), cls.class_id),
            overview,
        )

    # A channel -----------------------------------------------------------------------------------

    def _report_channel(
        self, inquiry: ChannelInquiry, grants: Grants | None
    ) -> Generator[None, None, ChannelInfo]:
        """Build the report on a channel in steps. Raises RemoteProtocolError (unknown_class)."""
        bound_ids, classes = self._store.subject_bindings.class_ids(), list[MessageClass]()
        name_or_id, all_classes = inquiry.class_, list(self._store.classes.values())
        if name_or_id is not None:
            all_classes = [self._require_class(name_or_id, grants)]
        for first in range(0, len(all_classes), _CLASSES_PER_STEP):
            if first:
                yield
            classes += [
                cls
                for cls in all_classes[first : first + _CLASSES_PER_STEP]
                if (cls.positions or len(cls.channels) or cls.class_id in bound_ids)
                and can_inquire(grants, cls)
                and not (grants is not None and has_private_channels(cls.name))
            ]
        while unindexed := [cls for cls in classes if cls.channels.has_unindexed_patterns]:
            unindexed[0].channels.update_some_patterns()
            yield
        return (
            yield from report_channel_in_steps(
                inquiry.channel,
                [cls for cls in classes if self._store.classes.get(cls.class_id) is cls],
                subject_bindings=self._store.subject_bindings,
                now=self._now,
                describe_consumer=self._position_reporter.describe_consumer,
                listener_sources=self.listener_sources,
            )
        )

    # A class -------------------------------------------------------------------------------------

    def _report_class(
        self,
        cls: MessageClass,
        remote_counts: Mapping[int, RemoteCountOutcome],
        grants: Grants | None,
    ) -> Generator[None, None, ClassInfo]:
        """Build the report on a class in steps. Each position is counted at its step."""
        totals = yield from _count_positions(cls)
        positions = []
        for position in totals.lowest:
            if position in cls.positions:
                positions.append((yield from self._describe_position(cls, position, grants)))
        store, ring = self._store, cls.ring
        statistics, commit_log = ring.statistics(), store.commit_log
        blocked = list(islice(cls.blocked_sessions, INQUIRY_MEMBERS_MAX))
        dead_class_id = self._dead_letter_class_id(cls)
        if dead_class_id is not None and not can_inquire(grants, store.classes[dead_class_id]):
            dead_class_id = None
        stored, spill = ring.head - cls.first_sequence, cls.spill
        report = ClassInfo(
            class_id=cls.class_id,
            name=cls.name,
            now=self._now,
            floor=cls.first_sequence,
            head=ring.head,
            stored=stored,
            stored_max=ring.messages_max,
            stored_bytes=statistics.frame_bytes + (spill.frame_bytes if spill is not None else 0),
            memory_bytes=statistics.memory_bytes,
            memory_max=ring.bytes_max,
            newest_seconds=self._position_reporter.message_age_seconds(cls, ring.head - 1)
            if stored
            else None,
            oldest_seconds=self._position_reporter.message_age_seconds(cls, cls.first_sequence)
            if stored
            else None,
            policy=cls.full_policy.value,
            retention=_describe_retention(cls.retention),
            subjects=[
                truncate_text(subject)
                for subject in store.subject_bindings.subjects_of(cls.class_id)
            ][:INQUIRY_PATTERNS_MAX],
            level=self._durability_name,
            durable_before=ring.head
            if commit_log is None
            else commit_log.durable_head(cls.class_id, ring.head),
            backlog=count_backlog(cls),
            purged=stored - _count_unpurged(cls),
            channels=len(cls.channels),
            delivered=totals.delivered_count,
            redelivered=totals.redelivered_count,
            acknowledged=totals.acknowledged_count,
            dropped=nonzero_counts(totals.undelivered_counts),
            dead_class=dead_class_id,
            dead_letters=0
            if dead_class_id is None
            else _count_unpurged(store.classes[dead_class_id]),
            positions=positions,
            positions_left_out=len(cls.positions) - len(positions),
            publishers=[self._describe_publisher(session) for session in blocked],
            publishers_left_out=len(cls.blocked_sessions) - len(blocked),
            waits_for="" if cls.is_remote else self._explain_class_wait(cls, positions),
        )
        if not cls.is_remote:
            return report
        return (yield from self._add_remote_counts(cls, report, remote_counts))

    def _add_remote_counts(
        self, cls: MessageClass, report: ClassInfo, remote_counts: Mapping[int, RemoteCountOutcome]
    ) -> Generator[None, None, ClassInfo]:
        """Replace the local counts of a class by those of its remote storage."""
        found = remote_counts.get(cls.class_id, "it was not counted for this")
        dead = remote_counts.get(report.dead_class) if report.dead_class is not None else None
        counts = dict.fromkeys(
            ("floor", "head", "durable_before", "stored", "stored_max", "stored_bytes"), 0
        )
        counts |= dict.fromkeys(("memory_max", "backlog", "purged"), 0)
        if isinstance(found, RemoteInventory):
            unknown_reason = ""
            waits_for = yield from self._explain_remote_floor(cls, found)
            counts |= {
                "floor": found.floor,
                "head": found.head,
                "durable_before": found.head,
                "stored": found.message_count,
                "stored_max": found.messages_max,
                "stored_bytes": found.stored_bytes,
                "memory_max": found.bytes_max,
                "backlog": found.backlog_count,
            }
        else:
            unknown_reason = found
            waits_for = f"the messages in the cluster are unknown: {found}"
        return msgspec.structs.replace(
            report,
            **counts,
            unknown=unknown_reason,
            on_way=cls.ring.head - report.durable_before,
            newest_seconds=None,
            oldest_seconds=None,
            dead_letters=dead.message_count if isinstance(dead, RemoteInventory) else 0,
            waits_for=self._prepend_blocked_publishers(cls, waits_for),
        )

    def _explain_remote_floor(
        self, cls: MessageClass, inventory: RemoteInventory
    ) -> Generator[None, None, str]:
        """Explain why the oldest message in remote storage is kept."""
        if not inventory.message_count:
            return "nothing is stored"
        if inventory.is_oldest_in_backlog:
            return f"{format_waiting_count(inventory.backlog_count)} for a first subscription"
        holder = inventory.floor_holder
        if not holder:
            return "the stored messages are kept by retention"
        floor_reason = "the oldest stored message is held by"
        if isinstance(holder, str):
            return f"{floor_reason} {holder}"
        position = yield from self._position_reporter.describe_position(cls, holder)
        return (
            f"{floor_reason} {_position_label(position)}; "
            f"{complete_sentence(position.waits, position.waits_for)}"
        )

    def _describe_publisher(self, session: Session) -> PublisherInfo:
        return PublisherInfo(
            session=session.session_id,
            name=producer_name(session),
            peer=truncate_text(session.peer),
            messages=sum(batch.count for _, batch in session.parked_messages),
            bytes=session.parked_bytes,
            seconds=self._position_reporter.ticks_to_seconds(session.parked_ticks),
            is_gone=session.is_closed,
        )

    def _explain_class_wait(self, cls: MessageClass, positions: list[PositionInfo]) -> str:
        """Explain why the oldest message is kept, and if publishers wait, why the class is full."""
        if cls.first_sequence == cls.ring.head:
            floor_reason = "nothing is stored"
        elif not cls.positions and (backlog_count := count_backlog(cls)):
            floor_reason = f"{format_waiting_count(backlog_count)} for a first subscription"
        else:
            holders = [position for position in positions if position.floor == cls.first_sequence]
            if holders:
                first = holders[0]
                floor_reason = f"the oldest stored message is held by {_position_label(first)}"
                if len(holders) > 1:
                    floor_reason += f" and {len(holders) - 1} more"
                floor_reason += f"; {complete_sentence(first.waits, first.waits_for)}"
            elif cls.backlog_window.floor == cls.first_sequence < cls.backlog_window.cursor:
                floor_reason = (
                    f"{format_waiting_count(cls.backlog_window.in_flight_count)} for a "
                    "subscription with start 'waiting'"
                )
            elif cls.has_last_values and not _describe_retention(cls.retention):
                floor_reason = "the stored messages are kept as last values"
            else:
                floor_reason = "the stored messages are kept by retention"
        return self._prepend_blocked_publishers(cls, floor_reason)

    def _prepend_blocked_publishers(self, cls: MessageClass, floor_reason: str) -> str:
        """Return `floor_reason`, after an explanation of blocked publishers if there are any."""
        if not cls.blocked_sessions and cls.unavailable_reason:
            return f"publishing waits: {self._explain_full(cls)}; {floor_reason}"
        if not cls.blocked_sessions:
            return floor_reason
        count = len(cls.blocked_sessions)
        publishers = format_waiting_count(count, "publisher")
        return f"{publishers} for space: {self._explain_full(cls)}; {floor_reason}"

    def _explain_full(self, cls: MessageClass) -> str:
        ring, budget, spill = cls.ring, cls.ring.budget, cls.spill
        if spill is not None and spill.bytes_max and spill.frame_bytes >= spill.bytes_max:
            return (
                f"{format_bytes(spill.frame_bytes)} of {format_bytes(spill.bytes_max)} are on "
                "disk only"
            )
        if spill is not None and len(ring):
            return "the messages in memory are not written to disk yet"
        if cls.unavailable_reason:
            return f"its stream accepts no messages: {cls.unavailable_reason}"
        if cls.is_remote:
            return "accepted messages are not stored in the cluster yet"
        if len(ring) >= ring.messages_max:
            return f"{len(ring):,} of {ring.messages_max:,} messages are stored"
        memory = ring.statistics().memory_bytes
        if 2 * memory > ring.bytes_max:
            return f"{format_bytes(memory)} of {format_bytes(ring.bytes_max)} are used"
        used, limit = format_bytes(budget.used_bytes), format_bytes(budget.limit_bytes)
        return f"all classes together use {used} of {limit}"

    # A session -----------------------------------------------------------------------------------

    def _report_session(
        self, session: Session, grants: Grants | None
    ) -> Generator[None, None, SessionInfo]:
        """Build the report on a session in steps."""
        classes = self._store.classes
        subscriptions = {
            number: subscription
            for number, subscription in session.subscriptions.items()
            if can_inquire(grants, classes[subscription.class_id])
        }
        # A session may have several subscriptions of one group, which share a position.
        distinct_positions: dict[Position, None] = {}
        for subscription in islice(subscriptions.values(), INQUIRY_POSITIONS_MAX):
            distinct_positions[subscription.position] = None
        positions = []
        for position in distinct_positions:
            cls = classes.get(position.class_id)
            if cls is not None and position in cls.positions:  # It may have ended meanwhile.
                positions.append((yield from self._describe_position(cls, position, grants)))
        parked = sum(batch.count for _, batch in session.parked_messages)
        unconfirmed = 0
        if session.version2 is not None:
            unconfirmed = max(0, session.version2.count_received_since(session.confirmed_number))
        parked_class = session.parked_messages[0][0] if session.parked_messages else None
        if parked_class is not None and not can_inquire(grants, classes[parked_class]):
            parked_class = None
        return SessionInfo(
            session=session.session_id,
            now=self._now,
            version=protocol_version(session),
            name=producer_name(session),
            peer=truncate_text(session.peer),
            user=session.user,
            level=self._durability_name,
            unconfirmed=unconfirmed,
            leaves_out=session.version2 is not None and session.version2.can_skip_numbers,
            parked=parked,
            parked_bytes=session.parked_bytes,
            parked_class=parked_class,
            parked_seconds=self._position_reporter.ticks_to_seconds(session.parked_ticks),
            pending_bytes=session.pending_bytes,
            full_seconds=self._position_reporter.ticks_to_seconds(session.send_blocked_ticks),
            heartbeat=session.heartbeat_seconds,
            refused=nonzero_counts(session.refusal_counts),
            positions=positions,
            positions_left_out=max(0, len(subscriptions) - INQUIRY_POSITIONS_MAX),
            is_read=not session.is_reading_paused,
            waits_for=self._explain_session_wait(session, parked, parked_class),
        )

    def _explain_session_wait(
        self, session: Session, parked_count: int, class_id: int | None
    ) -> str:
        reasons = []
        commit_log = self._store.commit_log
        if class_id is not None:
            cls = self._store.classes[class_id]
            name = repr(cls.name) if cls.name else str(class_id)
            waited = format_duration(self._position_reporter.ticks_to_seconds(session.parked_ticks))
            have = "has" if parked_count == 1 else "have"
            parked_messages = f"{format_message_count(parked_count)} {have}"
            if session in self._store.publish_queue.rate_queue.waiting_sessions:
                reasons.append(
                    f"{parked_messages} waited for {waited}: the rate limit of its user or "
                    "address is exceeded"
                )
            else:
                reasons.append(
                    f"{parked_messages} waited for {waited} for space in class {name}: "
                    f"{self._explain_full(cls)}"
                )
        if session.has_write_backlog and commit_log is not None:
            cause = (
                commit_log.write_error[1]
                if commit_log.write_error
                else f"{format_bytes(commit_log.unwritten_bytes)} are unwritten"
            )
            reasons.append(f"the journal is behind: {cause}")
        if session.send_blocked_ticks:
            reasons.append(
                f"it has read nothing for "
                f"{format_duration(self._position_reporter.ticks_to_seconds(session.send_blocked_ticks))}"
            )
        if session.pending_confirms:
            state = "stored in the cluster" if self._store.class_registry.is_remote else "written"
            reasons.append(f"its published messages are not {state} yet")
        if session.is_reading_paused:
            reasons.append("its connection is not read until then")
        return "; ".join(reasons)


def protocol_version(session: Session) -> int:
    """Return the protocol version of a session: 0 if unknown yet, -1 for a local session."""
    if session.is_local:
        return -1
    if session.decoder is None:
        return 0
    return 2 if session.has_confirms else 1


def _count_unpurged(cls: MessageClass) -> int:
    """Count the stored messages that are not purged."""
    first, head = cls.first_sequence, cls.ring.head
    return head - first - sum(b - a for a, b in cls.purged_sequences.ranges_within(first, head))


def _position_floor(position: Position) -> int:
    return position.window.floor


def _position_label(position: PositionInfo) -> str:
    if position.durable:
        return f"the durable {position.durable!r}"
    if position.group:
        return f"the group {position.group!r}"
    return f"session {position.session} ({position.peer})"


def _describe_retention(keep: Retention) -> str:
    kinds = (
        format_message_count(keep.messages) if keep.messages else "",
        format_bytes(keep.bytes) if keep.bytes else "",
        format_duration(keep.seconds) if keep.seconds else "",
    )
    return ", ".join(filter(None, kinds))
