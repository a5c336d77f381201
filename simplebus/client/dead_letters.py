"""Dead letters for who looks after them: read, published again, purged.

Rule 1: everything goes through `simplebus.Bus`; a program of its own could do the same.
Rule 2: what a letter says was perhaps not said by the bus: it goes back to no class but the one
whose letters these are.
Rule 3: a letter is purged when the bus has confirmed its message, and not before. Who is stopped in
between leaves a message that comes twice, never one that is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Self

from simplebus.client.aio.bus import Bus
from simplebus.client.core.messages import Message
from simplebus.core import dead_letters
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError
from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.core.protocol.inquiry import ClassInfo

REQUEUED_FROM_HEADER = "requeued-from"
"""The header of a message that was a dead letter: which one, such as dead.orders#17."""
REQUEUED_COUNT_HEADER = "requeued-count"
"""And how often it was published again."""

_DEATH_HEADERS = frozenset(
    {
        dead_letters.REASON_HEADER,
        dead_letters.CLASS_HEADER,
        dead_letters.SEQUENCE_HEADER,
        dead_letters.ATTEMPTS_HEADER,
        dead_letters.SUBSCRIPTION_HEADER,
        dead_letters.SESSION_HEADER,
        dead_letters.SINCE_HEADER,
        dead_letters.ACCEPTED_HEADER,
        dead_letters.ERROR_HEADER,
    }
)
"""Headers that are about its death."""

_NAME_CHARACTERS_SHOWN = 80
_FETCH_COUNT = 64
"""So many letters are looked at together: so many may come twice."""
_INSPECTED_COUNT_MAX = 10_000
"""In a list, so many of a class are looked at for their reasons."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter."""

    sequence: int
    """Its own, in the class of dead letters."""
    reason: str
    source_class: str
    """The class in which it died: its name, or its id."""
    source_sequence: str
    """Its sequence there."""
    attempts: str
    subscription: str
    session: str
    time: str
    """When it died: seconds since 1970."""
    error: str
    """What its consumer said last; empty for nothing."""
    channel: str
    key: bytes
    headers: tuple[tuple[str, str], ...]
    """The publisher's."""
    payload: bytes

    @classmethod
    def from_message(cls, message: Message[bytes]) -> DeadLetter:
        found = dict(message.headers)  # Of a header that comes twice the last one counts.
        return cls(
            sequence=message.sequence,
            reason=found.get(dead_letters.REASON_HEADER, ""),
            class_=found.get(dead_letters.CLASS_HEADER, ""),
            died_as=found.get(dead_letters.SEQUENCE_HEADER, ""),
            attempts=found.get(dead_letters.ATTEMPTS_HEADER, ""),
            subscription=found.get(dead_letters.SUBSCRIPTION_HEADER, ""),
            session=found.get(dead_letters.SESSION_HEADER, ""),
            since=found.get(dead_letters.SINCE_HEADER, ""),
            error=found.get(dead_letters.ERROR_HEADER, ""),
            channel=message.channel,
            key=message.key,
            headers=tuple(pair for pair in message.headers if pair[0] not in _DEATH_HEADERS),
            payload=message.payload,
        )

    def requeue_headers(self, dead: str) -> tuple[tuple[str, str], ...]:
        """The headers of the message that it becomes again; `dead` is the class where it lies."""
        found = dict(self.headers)
        before = found.get(REQUEUED_COUNT_HEADER, "")
        count = int(before) if before.isascii() and before.isdigit() and len(before) < 10 else 0
        kept = tuple(pair for pair in self.headers if pair[0] not in (REQUEUED_FROM_HEADER, REQUEUED_COUNT_HEADER))
        return (*kept, (REQUEUED_FROM_HEADER, f"{dead}#{self.sequence}"), (REQUEUED_COUNT_HEADER, str(count + 1)))


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which letters are meant: those that fit everything that is said."""

    sequences: Container[int] | None = None
    reason: str | None = None
    subscription: str | None = None

    def matches(self, letter: DeadLetter) -> bool:
        return (
            (self.sequences is None or letter.sequence in self.sequences)
            and (self.reason is None or letter.reason == self.reason)
            and (self.subscription is None or letter.subscription == self.subscription)
        )


@dataclass(slots=True)
class DeadLetterQueue:
    """What lies in one class of dead letters."""

    class_id: int
    name: str
    letter_count: int
    oldest_time: str = ""
    """When the oldest one died: seconds since 1970."""
    count_by_reason: Counter[str] = field(default_factory=Counter)
    inspected_count: int = 0
    """Of how many the reasons are counted."""
    dropped_count: int = 0
    """How many made room for later ones since the bus has run, and are gone."""


async def find_dead_letter_class(bus: Bus, class_: int | str) -> ClassInfo | None:
    """The class of a class's dead letters, by the name or id of either; None when there is none.
    It is not made."""
    if isinstance(class_, str) and dead_letters.is_dead_letter_class(class_):
        return await _inquire_class(bus, class_)
    found = await _inquire_class(bus, class_)
    if found is not None and found.dead_class is not None:
        return await _inquire_class(bus, found.dead_class)
    return await _inquire_class(bus, dead_letters.dead_letter_class_name(str(class_))[:NAME_CHARACTERS_MAX])


async def _inquire_class(bus: Bus, class_: int | str) -> ClassInfo | None:
    try:
        return await bus.explain(class_)
    except RefusedError as error:
        if error.code != Reason.UNKNOWN_CLASS:
            raise
        return None


class DeadLetterReader:
    """Those that lie there now, some at a time. What dies meanwhile is not among them, so that who
    publishes them again comes to an end."""

    def __init__(self, bus: Bus, dead: ClassInfo, choice: DeadLetterFilter) -> None:
        self._bus, self._dead, self._choice = bus, dead, choice
        self._next = dead.floor

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[DeadLetter]:
        dead = self._dead
        while self._next < dead.head:
            most = min(_FETCH_COUNT, dead.head - self._next)
            fetched = await self._bus.fetch(dead.class_id, self._next, most)
            there = [DeadLetter.from_message(message) for message in fetched if message.sequence < dead.head]
            if not there:
                break
            self._next = there[-1].sequence + 1
            chosen = [letter for letter in there if self._choice.matches(letter)]
            if chosen:
                return chosen
        raise StopAsyncIteration


async def list_queues(bus: Bus) -> list[DeadLetterQueue]:
    """All classes of dead letters in which there are some."""
    found = []
    for line in (await bus.explain()).classes:
        if dead_letters.is_dead_letter_class(line.name) and line.stored:
            said = await _inquire_class(bus, line.class_id)
            if said is not None and said.stored > said.purged:
                found.append(await inspect_queue(bus, said))
    return found


async def inspect_queue(bus: Bus, dead: ClassInfo) -> DeadLetterQueue:
    """What lies in one."""
    found = DeadLetterQueue(dead.class_id, dead.name, dead.stored - dead.purged)
    found.dropped_count = dead.dropped.get(Reason.DROP_OLDEST, 0)
    async for some in DeadLetterReader(bus, dead, DeadLetterFilter()):
        found.oldest_time = found.oldest_time or some[0].time
        found.count_by_reason.update(letter.reason for letter in some)
        found.inspected_count += len(some)
        if found.inspected_count >= _INSPECTED_COUNT_MAX:
            break
    return found


async def requeue_letters(
    bus: Bus, dead: ClassInfo, some: list[DeadLetter]
) -> tuple[list[DeadLetter], list[tuple[DeadLetter, Exception]]]:
    """Publish letters again to the class in which each died, and purge those that are confirmed.

    Returns which were, and which were refused, and why: one that is does not hold up the others.
    """
    done: list[DeadLetter] = []
    refused: list[tuple[DeadLetter, Exception]] = []
    for letter in some:
        try:
            await bus.publish(
                letter.payload,
                class_id=await _resolve_source_class(bus, dead, letter.source_class),
                channel=letter.channel,
                key=letter.key,
                headers=letter.requeue_headers(dead.name),
            )
            done.append(letter)
        except (RefusedError, LocalProtocolError, ValueError) as error:
            refused.append((letter, error))
    await purge_letters(bus, dead, done)
    return done, refused


async def purge_letters(bus: Bus, dead: ClassInfo, some: list[DeadLetter]) -> int:
    """Have letters, ascending, be nobody's. Returns how many they were."""
    count, at = 0, 0
    while at < len(some):
        first = last = some[at].sequence
        while at < len(some) and some[at].sequence == last:
            at, last = at + 1, last + 1
        count += await bus.purge(dead.class_id, first, last)
    return count


async def _resolve_source_class(bus: Bus, dead: ClassInfo, class_: str) -> int | str:
    """The class that a letter says it died in: a name, or the id of a class without one. It is one
    whose letters lie here: others may have written it, who may publish here and not there."""
    if not class_:
        raise ValueError("it does not say in which class it died")
    if dead_letters.dead_letter_class_name(class_) != dead.name:
        shown = class_[:_NAME_CHARACTERS_SHOWN]
        raise ValueError(f"it says that it died in class {shown!r}, whose letters are not here")
    if not (class_.isascii() and class_.isdigit()):
        return class_
    named = await _inquire_class(bus, class_)
    return int(class_) if named is None else named.class_id
