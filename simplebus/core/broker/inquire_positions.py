"""Reports on a position, and on the members of a group.

A report changes nothing and reads no messages; its size is bounded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from simplebus.core import dead_letters
from simplebus.core.broker.wait_reasons import WaitFacts, explain_wait
from simplebus.core.errors import DEAD_LETTER_REASONS, Reason
from simplebus.core.group.group import GroupMember
from simplebus.core.limits import (
    COUNTED_MEMBERS_PER_STEP,
    IN_FLIGHT_BYTES,
    INQUIRY_MEMBERS_MAX,
    INQUIRY_PATTERNS_MAX,
    INQUIRY_TEXT_CHARACTERS_MAX,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.inquiry import InFlightInfo, MemberInfo, PositionInfo
from simplebus.core.redelivery import delivery_state
from simplebus.core.session.session import Session
from simplebus.core.store.store import Store
from simplebus.core.subscription.position import Position


class _MembersSummary(NamedTuple):
    """Counts of the members of a group."""

    in_flight_count: int = 0
    in_flight_bytes: int = 0
    in_flight_max: int = 0
    can_accept: bool = False
    """True if a member may be assigned more messages."""
    send_blocked_ticks: int = 0
    """Longest time for which a member has read nothing."""
    busiest: Sequence[GroupMember] = ()
    """The members that may be assigned the fewest messages."""


class PositionReporter:
    """Builds the reports on positions of one broker."""

    def __init__(self, store: Store, sessions: Mapping[int, Session]) -> None:
        self._store = store
        self._sessions = sessions

    def ticks_to_seconds(self, ticks: int) -> float:
        return ticks * self._store.settings.tick_seconds

    def message_age_seconds(self, cls: MessageClass, sequence: int) -> float | None:
        """Return the time since a stored message was accepted; None if unknown."""
        time = cls.time_index.time_of(sequence)
        return max(0.0, self._store.clock.now - time) if time else None

    def describe_position(
        self, cls: MessageClass, position: Position
    ) -> Generator[None, None, PositionInfo]:
        """Build the report on a position of a class. A group with many members takes steps."""
        group = cls.groups.get(position)
        members = list(group.members) if group is not None else []
        summary = yield from self._summarize_members(members)
        window, ring, policy = position.window, position.class_ring, position.delivery_policy
        state = cls.group_or_position(position).build_delivery_state()
        delayed = delivery_state.count_delayed(state, window)
        member_reports: list[MemberInfo] = []
        if group is not None:
            in_flight, in_flight_bytes = summary.in_flight_count, summary.in_flight_bytes
            limit, is_full = summary.in_flight_max, not summary.can_accept
            full_seconds = self.ticks_to_seconds(summary.send_blocked_ticks)
            redelivery_count = max(
                0,
                window.in_flight_count
                - in_flight
                - delayed
                - state.blocked_by_key_count
                - state.pending_dead_letter_count,
            )
            member_reports = [self._describe_member(member) for member in summary.busiest]
            oldest, holder = _find_oldest(member_reports)
        else:
            redelivery_count = delivery_state.count_redeliveries(state, window)
            in_flight = state.in_flight_count
            if policy.in_flight_max is None:  # Redeliveries are not counted otherwise.
                in_flight = (
                    window.in_flight_count
                    - redelivery_count
                    - delayed
                    - state.pending_dead_letter_count
                )
            sent_span = max(1, window.cursor - window.floor)
            # The ring of a position that reads spilled messages may not have all sent messages.
            position_ring = position.ring
            sent_end = min(window.cursor, position_ring.head)
            sent_bytes = position_ring.range_bytes(window.floor, sent_end)
            in_flight_bytes = sent_bytes * in_flight // sent_span
            limit = policy.in_flight_max or 0
            oldest = self._describe_in_flight(
                cls,
                delivery_state.find_oldest_in_flight(
                    state.ack_timer_sets, window, policy.redelivery_delay_ticks
                ),
            )
            holder = self.describe_session(position.session_id)
            is_full = bool(ring.head > window.cursor or redelivery_count) and not position.has_work
            full_seconds = self._send_blocked_seconds(position.session_id)
        delays = [
            self.ticks_to_seconds(due - self._store.clock.tick)
            for due, _, _ in state.nack_timer_sets
        ]
        if state.delayed_spans:
            delays.append(state.delayed_spans[0][0] - self._store.clock.now)
        patterns = position.channel_filter.patterns if position.channel_filter is not None else ()
        unsent = ring.head - window.cursor
        is_served = position.has_consumer or position.session_id >= 0
        unattended_seconds = (
            0.0 if is_served else max(0.0, self._store.clock.now - position.unattended_since)
        )
        delayed_seconds = max(0.0, min(delays, default=0.0))
        ready, delayed_new_count = unsent + redelivery_count, 0
        if position.inherited_delays:  # Everything waits for the longest delay.
            delayed, redelivery_count, ready = delayed + redelivery_count, 0, 0
            delayed_new_count = unsent
            last_due = max(due for _, _, due in position.inherited_delays)
            delayed_seconds = max(0.0, self.ticks_to_seconds(last_due - self._store.clock.tick))
        wait_reason, wait_sentence = explain_wait(
            WaitFacts(
                holder_label=holder,
                ready_count=ready,
                in_flight_count=in_flight,
                in_flight_max=limit,
                in_flight_bytes=in_flight_bytes,
                in_flight_bytes_max=IN_FLIGHT_BYTES * max(1, len(members)),
                oldest=oldest,
                is_at_in_flight_limit=is_full,
                key_blocked_count=state.blocked_by_key_count,
                delayed_count=delayed + delayed_new_count,
                next_delay_seconds=delayed_seconds,
                has_consumer=is_served,
                unattended_seconds=unattended_seconds,
                send_blocked_seconds=full_seconds,
                has_matched=not patterns or position.delivered_count > 0 or not is_served,
                pending_dead_letter_count=state.pending_dead_letter_count,
                dead_letter_class=truncate_text(dead_letters.dead_letter_class_name(cls.label)),
            )
        )
        session = self._sessions.get(position.session_id)
        return PositionInfo(
            class_id=position.class_id,
            session=position.session_id,
            number=position.subscription_number,
            name=producer_name(session),
            peer=truncate_text(session.peer) if session is not None else "",
            durable=position.durable,
            owner=position.owner,
            group=position.group,
            patterns=[truncate_text(pattern) for pattern in patterns[:INQUIRY_PATTERNS_MAX]],
            patterns_left_out=max(0, len(patterns) - INQUIRY_PATTERNS_MAX),
            cursor=window.cursor,
            floor=window.floor,
            lag=ring.head - window.floor,
            unsent=unsent,
            to_redeliver=redelivery_count,
            blocked_by_key=state.blocked_by_key_count,
            in_flight=in_flight,
            in_flight_max=limit,
            in_flight_bytes=in_flight_bytes,
            oldest=oldest,
            delayed=delayed,
            delayed_seconds=delayed_seconds,
            delivered=position.delivered_count,
            redelivered=position.redelivered_count,
            acknowledged=position.acknowledged_count,
            dropped=position.dropped_count,
            undelivered=nonzero_counts(position.undelivered_counts),
            dead_letters=sum(
                position.undelivered_counts.get(reason, 0) for reason in DEAD_LETTER_REASONS
            )
            - state.pending_dead_letter_count,
            idle_seconds=unattended_seconds,
            members=member_reports,
            members_left_out=len(members) - len(member_reports),
            waits=wait_reason,
            waits_for=wait_sentence,
            waiting_dead_letters=state.pending_dead_letter_count,
        )

    def _summarize_members(
        self, members: list[GroupMember]
    ) -> Generator[None, None, _MembersSummary]:
        """Add up the members of a group in steps."""
        total = _MembersSummary()
        for first in range(0, len(members), COUNTED_MEMBERS_PER_STEP):
            if first:
                yield
            part = members[first : first + COUNTED_MEMBERS_PER_STEP]
            sessions = [self._sessions.get(member.outbox.session_id) for member in part]
            total = _MembersSummary(
                in_flight_count=total.in_flight_count + sum(m.assigned_count for m in part),
                in_flight_bytes=total.in_flight_bytes + sum(m.assigned_bytes for m in part),
                in_flight_max=total.in_flight_max + sum(m.in_flight_max for m in part),
                can_accept=total.can_accept or any(m.free_count for m in part),
                send_blocked_ticks=max(
                    [
                        total.send_blocked_ticks,
                        *(each.send_blocked_ticks for each in sessions if each is not None),
                    ]
                ),
                busiest=nsmallest(
                    INQUIRY_MEMBERS_MAX,
                    [*total.busiest, *part],
                    key=lambda member: (member.free_count, -member.assigned_count),
                ),
            )
        return total

    def _describe_member(self, member: GroupMember) -> MemberInfo:
        cls, policy = self._store.classes[member.class_id], member.position.delivery_policy
        sets = member.in_flight_sets()
        oldest = self._describe_in_flight(
            cls,
            delivery_state.find_oldest_in_flight(
                sets, member.window, policy.redelivery_delay_ticks
            ),
        )
        session_id = member.outbox.session_id
        unsent = member.unsent_count
        wait_reason, wait_sentence = explain_wait(
            WaitFacts(
                holder_label=self.describe_session(session_id),
                ready_count=unsent,
                in_flight_count=member.assigned_count,
                in_flight_max=member.in_flight_max,
                in_flight_bytes=member.assigned_bytes,
                in_flight_bytes_max=IN_FLIGHT_BYTES,
                oldest=oldest,
                is_at_in_flight_limit=not member.free_count and not unsent,
                send_blocked_seconds=self._send_blocked_seconds(session_id),
                other_members_count=member.window.in_flight_count - member.assigned_count,
            )
        )
        session = self._sessions.get(session_id)
        return MemberInfo(
            session=session_id,
            number=member.subscription_number,
            name=producer_name(session),
            peer=truncate_text(session.peer) if session is not None else "",
            in_flight=member.assigned_count,
            in_flight_max=member.in_flight_max,
            in_flight_bytes=member.assigned_bytes,
            oldest=oldest,
            waits=wait_reason,
            waits_for=wait_sentence,
        )

    def _describe_in_flight(
        self, cls: MessageClass, oldest: delivery_state.OldestInFlight | None
    ) -> InFlightInfo | None:
        if oldest is None:
            return None
        tick = self._store.clock.tick
        first = self.ticks_to_seconds(tick - oldest.first_sent_tick)
        age = self.message_age_seconds(cls, oldest.sequence)
        return InFlightInfo(
            sequence=oldest.sequence,
            attempt=max(0, oldest.attempts),
            sent_seconds=max(0.0, self.ticks_to_seconds(tick - oldest.last_sent_tick)),
            first_seconds=max(0.0, first if age is None else min(first, age)),
            due_seconds=max(0.0, self.ticks_to_seconds(oldest.due_tick - tick)),
        )

    def _send_blocked_seconds(self, session_id: int) -> float:
        session = self._sessions.get(session_id)
        return 0.0 if session is None else self.ticks_to_seconds(session.send_blocked_ticks)

    def describe_session(self, session_id: int) -> str:
        """Return a short description of a session; empty if the session does not exist."""
        session = self._sessions.get(session_id)
        return "" if session is None else describe_session(session)

    def describe_consumer(self, position: Position) -> str:
        """Return a short description of a position and its session."""
        if position.durable or position.group:
            names = [f"durable {position.durable!r}"] if position.durable else []
            names += [f"group {position.group!r}"] if position.group else []
            label = ", ".join(names)
            group = self._store.classes[position.class_id].groups.get(position)
            if group is not None:
                count = len(group.members)
                return f"{label}, {count} member{'' if count == 1 else 's'}"
            if not position.has_consumer:
                return f"{label}, not connected"
            return f"{label}, {self.describe_session(position.session_id)}"
        return self.describe_session(position.session_id)


def describe_session(session: Session, name: str = "") -> str:
    """Return a short description of a session, with the publisher name that it will have."""
    name = name or producer_name(session)
    called = f" {truncate_text(name)!r}" if name else ""
    owner = f" of user {truncate_text(session.user)!r}" if session.user else ""
    return f"session {session.session_id}{called}{owner} ({truncate_text(session.peer)})"


def producer_name(session: Session | None) -> str:
    """Return the publisher name of a session; empty if it has none."""
    producer = session.producer if session is not None else None
    return "" if producer is None else producer.name


def _find_oldest(members: Iterable[MemberInfo]) -> tuple[InFlightInfo | None, str]:
    """Return the message that has been in flight longest, and a description of its member."""
    holding = [(member.oldest, member) for member in members if member.oldest is not None]
    if not holding:
        return None, ""
    oldest, member = max(holding, key=lambda pair: pair[0].first_seconds)
    return oldest, f"session {member.session} ({member.peer})"


def nonzero_counts(counts: Mapping[Reason, int]) -> dict[str, int]:
    return {reason.value: count for reason, count in counts.items() if count}


def truncate_text(text: str) -> str:
    limit = INQUIRY_TEXT_CHARACTERS_MAX
    return text if len(text) <= limit else text[: limit - 1] + "…"
