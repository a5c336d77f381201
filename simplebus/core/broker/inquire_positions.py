"""What a broker says of one position, and of each member of a group.

Rule 1: nothing changes, no message is looked at, and of everything else so much and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nsmallest

from simplebus.core import dead_letters
from simplebus.core.broker.wait_reasons import Facts, waits
from simplebus.core.errors import Reason
from simplebus.core.group.group import Group, Member
from simplebus.core.limits import (
    EXPLAINED_CHARACTERS,
    EXPLAINED_MEMBERS,
    EXPLAINED_PATTERNS,
    IN_FLIGHT_BYTES,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.inquiry import Flight, Position
from simplebus.core.protocol.inquiry import Member as MemberSaid
from simplebus.core.redelivery import delivery_state
from simplebus.core.session.outbox import Outbox
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2
from simplebus.core.store.store import Store
from simplebus.core.subscription.subscription import Subscription

_BURIED = (Reason.MAX_DELIVERIES, Reason.TERMINATED, Reason.UNCARRIABLE)
"""What positions give up for these reasons becomes dead letters."""


class ExplainingPositions:
    """Of one broker."""

    def __init__(self, store: Store, sessions: Mapping[int, Session]) -> None:
        self._store = store
        self._sessions = sessions

    def seconds(self, ticks: int) -> float:
        return ticks * self._store.settings.tick_seconds

    def age(self, cls: MessageClass, sequence: int) -> float | None:
        """How long ago a stored message was accepted."""
        time = cls.times.at(sequence)
        return max(0.0, self._store.clock.now - time) if time else None

    def position(self, cls: MessageClass, position: Subscription) -> Position:
        """One of a class."""
        window, ring, terms = position.window, position.class_ring, position.terms
        stands = position.standing()
        outbox = position.promised or position.outbox
        members = list(position.members) if isinstance(position, Group) else []
        put_off = delivery_state.put_off(stands, window)
        said: list[MemberSaid] = []
        if isinstance(position, Group):
            in_flight = sum(member.held for member in members)
            size_ = sum(member.held_bytes for member in members)
            most = sum(member.in_flight_max for member in members)
            again = window.in_flight - in_flight - put_off - stands.behind - stands.unburied
            busiest = nsmallest(
                EXPLAINED_MEMBERS, members, key=lambda member: (member.room, -member.held)
            )
            said = [self._member(member) for member in busiest]
            oldest, holder = _oldest_of(said)
            is_full = not any(member.room for member in members)
            full_seconds = max((self._full_seconds(m.outbox) for m in members), default=0.0)
        else:
            again = delivery_state.to_be_sent(stands, window)
            in_flight = stands.in_flight
            if terms.in_flight_max is None:  # What waits to be sent again is not known otherwise.
                in_flight = window.in_flight - again - put_off - stands.unburied
            covered = max(1, window.cursor - window.floor)
            read = position.ring  # Not all that it was sent may be read back yet.
            size_ = read.size(window.floor, min(window.cursor, read.head)) * in_flight // covered
            most = terms.in_flight_max or 0
            oldest = self._flight(cls, delivery_state.oldest(stands.sent, window, terms.pause))
            holder = self.holder(outbox)
            is_full = bool(ring.head > window.cursor or again) and not position.has_work
            full_seconds = self._full_seconds(outbox)
        later = stands.later[0][0] - self._store.clock.now if stands.later else 0.0
        pauses = [self.seconds(due - self._store.clock.tick) for due, _, _ in stands.pauses]
        patterns = position.wanted.patterns if position.wanted is not None else ()
        unsent = ring.head - window.cursor
        is_served = position.is_served or position.promised is not None
        alone = 0.0 if is_served else max(0.0, self._store.clock.now - position.alone_since)
        put_off_seconds = max(0.0, min([*([later] if stands.later else []), *pauses], default=0.0))
        ready, kept_back = unsent + again, 0
        if position.held_back:  # All of it waits for the longest pause.
            put_off, again, kept_back, ready = put_off + again, 0, unsent, 0
            last = max(due for _, _, due in position.held_back)
            put_off_seconds = max(0.0, self.seconds(last - self._store.clock.tick))
        word, sentence = waits(
            Facts(
                holder=holder,
                ready=ready,
                in_flight=in_flight,
                in_flight_max=most,
                in_flight_bytes=size_,
                bytes_max=IN_FLIGHT_BYTES * max(1, len(members)),
                oldest=oldest,
                is_full=is_full,
                behind=stands.behind,
                put_off=put_off + kept_back,
                put_off_seconds=put_off_seconds,
                is_served=is_served,
                alone_seconds=alone,
                full_seconds=full_seconds,
                has_matched=not patterns or position.delivered > 0 or not is_served,
                unburied=stands.unburied,
                dead=short(dead_letters.class_name(cls.name or str(cls.class_id))),
            )
        )
        session = self._sessions.get(outbox.session_id)
        return Position(
            class_id=position.class_id,
            session=outbox.session_id,
            number=position.number,
            name=name_of(session),
            peer=short(session.peer) if session is not None else "",
            durable=position.durable,
            owner=position.owner,
            group=position.group,
            patterns=[short(pattern) for pattern in patterns[:EXPLAINED_PATTERNS]],
            patterns_left_out=max(0, len(patterns) - EXPLAINED_PATTERNS),
            cursor=window.cursor,
            floor=window.floor,
            lag=ring.head - window.floor,
            unsent=unsent,
            again=again,
            behind=stands.behind,
            in_flight=in_flight,
            in_flight_max=most,
            in_flight_bytes=size_,
            oldest=oldest,
            put_off=put_off,
            put_off_seconds=put_off_seconds,
            delivered=position.delivered,
            redelivered=position.redelivered,
            acknowledged=position.acknowledged,
            dropped=position.dropped,
            undelivered=words(position.undelivered),
            dead_letters=sum(position.undelivered.get(reason, 0) for reason in _BURIED)
            - stands.unburied,
            alone_seconds=alone,
            members=said,
            members_left_out=len(members) - len(said),
            waits=word,
            waits_for=sentence,
            unburied=stands.unburied,
        )

    def _member(self, member: Member) -> MemberSaid:
        group = member.group
        cls = self._store.classes[group.class_id]
        sets = member.sets()
        oldest = self._flight(cls, delivery_state.oldest(sets, group.window, group.terms.pause))
        holder = self.holder(member.outbox)
        unsent = member.unsent
        word, sentence = waits(
            Facts(
                holder=holder,
                ready=unsent,
                in_flight=member.held,
                in_flight_max=member.in_flight_max,
                in_flight_bytes=member.held_bytes,
                bytes_max=IN_FLIGHT_BYTES,
                oldest=oldest,
                is_full=not member.room and not unsent,
                full_seconds=self._full_seconds(member.outbox),
                elsewhere=group.window.in_flight - member.held,
            )
        )
        session = self._sessions.get(member.outbox.session_id)
        return MemberSaid(
            session=member.outbox.session_id,
            number=member.number,
            name=name_of(session),
            peer=short(session.peer) if session is not None else "",
            in_flight=member.held,
            in_flight_max=member.in_flight_max,
            in_flight_bytes=member.held_bytes,
            oldest=oldest,
            waits=word,
            waits_for=sentence,
        )

    def _flight(self, cls: MessageClass, oldest: delivery_state.Oldest | None) -> Flight | None:
        if oldest is None:
            return None
        tick = self._store.clock.tick
        first = self.seconds(tick - oldest.first_tick)
        age = self.age(cls, oldest.sequence)
        return Flight(
            sequence=oldest.sequence,
            attempt=max(0, oldest.attempts),
            sent_seconds=max(0.0, self.seconds(tick - oldest.sent_tick)),
            first_seconds=max(0.0, first if age is None else min(first, age)),
            due_seconds=max(0.0, self.seconds(oldest.due_tick - tick)),
        )

    def _full_seconds(self, outbox: Outbox) -> float:
        session = self._sessions.get(outbox.session_id)
        return 0.0 if session is None else self.seconds(session.full_ticks)

    def holder(self, outbox: Outbox) -> str:
        """Whose an outbox is, in a few words."""
        session = self._sessions.get(outbox.session_id)
        if session is None:
            return ""
        name = name_of(session)
        called = f" {short(name)!r}" if name else ""
        return f"session {session.session_id}{called} ({short(session.peer)})"

    def who(self, position: Subscription) -> str:
        """Whose a position is, in a few words."""
        if position.durable or position.group:
            named = [f"durable {position.durable!r}"] if position.durable else []
            named += [f"group {position.group!r}"] if position.group else []
            said = ", ".join(named)
            if isinstance(position, Group):
                count = len(position.members)
                return f"{said}, {count} member{'' if count == 1 else 's'}"
            if not position.is_served:
                return f"{said}, nobody connected"
            return f"{said}, {self.holder(position.outbox)}"
        return self.holder(position.promised or position.outbox)


def name_of(session: Session | None) -> str:
    """What a program calls itself; empty where it does not."""
    dialect = session.dialect if session is not None else None
    return dialect.publisher.name if isinstance(dialect, Version2) else ""


def _oldest_of(members: Iterable[MemberSaid]) -> tuple[Flight | None, str]:
    """What was sent first of what these have, and who has it."""
    holding = [(member.oldest, member) for member in members if member.oldest is not None]
    if not holding:
        return None, ""
    oldest, member = max(holding, key=lambda pair: pair[0].first_seconds)
    return oldest, f"session {member.session} ({member.peer})"


def words(counts: Mapping[Reason, int]) -> dict[str, int]:
    return {reason.value: count for reason, count in counts.items() if count}


def short(text: str) -> str:
    most = EXPLAINED_CHARACTERS
    return text if len(text) <= most else text[: most - 1] + "…"
