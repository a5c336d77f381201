"""Dead-letter administration for programs: list, read, requeue and purge dead letters.

Uses only public methods of `simplebus.Bus`. A dead letter is purged after the server has confirmed
its requeued message; a program that stops in between leaves a duplicate, never a loss.
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
"""Header of a requeued message: its dead letter, for example `dead.orders#17`."""
REQUEUED_COUNT_HEADER = "requeued-count"
"""Header of a requeued message: the number of times it was requeued."""

_DEAD_LETTER_HEADERS = frozenset(
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
"""Headers that the server adds to a dead letter."""

_NAME_CHARACTERS_SHOWN = 80
_FETCH_COUNT = 64
"""Dead letters that are fetched, and requeued, together. At most this many may be duplicated."""
_INSPECTED_COUNT_MAX = 10_000
"""Dead letters of a queue whose reasons `inspect_queue` counts."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter."""

    sequence: int
    """Sequence of the dead letter in the class of dead letters."""
    reason: str
    source_class: str
    """Name, or id, of the class of the original message."""
    source_sequence: str
    """Sequence of the original message."""
    attempts: str
    subscription: str
    session: str
    time: str
    """Time at which the message became a dead letter, in seconds since 1970."""
    error: str
    """Error from the last nack; empty without a nack or an error."""
    channel: str
    key: bytes
    headers: tuple[tuple[str, str], ...]
    """Headers of the publisher."""
    payload: bytes

    @classmethod
    def from_message(cls, message: Message[bytes]) -> DeadLetter:
        """Return the dead letter in `message`."""
        headers = dict(message.headers)  # The last one of equal names counts.
        return cls(
            sequence=message.sequence,
            reason=headers.get(dead_letters.REASON_HEADER, ""),
            source_class=headers.get(dead_letters.CLASS_HEADER, ""),
            source_sequence=headers.get(dead_letters.SEQUENCE_HEADER, ""),
            attempts=headers.get(dead_letters.ATTEMPTS_HEADER, ""),
            subscription=headers.get(dead_letters.SUBSCRIPTION_HEADER, ""),
            session=headers.get(dead_letters.SESSION_HEADER, ""),
            time=headers.get(dead_letters.SINCE_HEADER, ""),
            error=headers.get(dead_letters.ERROR_HEADER, ""),
            channel=message.channel,
            key=message.key,
            headers=tuple(pair for pair in message.headers if pair[0] not in _DEAD_LETTER_HEADERS),
            payload=message.payload,
        )

    def requeue_headers(self, dead_class_name: str) -> tuple[tuple[str, str], ...]:
        """Return the headers of the requeued message. `dead_class_name` stores this dead letter."""
        headers = dict(self.headers)
        previous_count = headers.get(REQUEUED_COUNT_HEADER, "")
        count = (
            int(previous_count)
            if previous_count.isascii() and previous_count.isdigit() and len(previous_count) < 10
            else 0
        )
        kept_headers = tuple(
            pair
            for pair in self.headers
            if pair[0] not in (REQUEUED_FROM_HEADER, REQUEUED_COUNT_HEADER)
        )
        return (
            *kept_headers,
            (REQUEUED_FROM_HEADER, f"{dead_class_name}#{self.sequence}"),
            (REQUEUED_COUNT_HEADER, str(count + 1)),
        )


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Selects the dead letters that match all given criteria."""

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
    """Summary of the dead letters of one class."""

    class_id: int
    name: str
    letter_count: int
    oldest_time: str = ""
    """Time of the oldest dead letter, in seconds since 1970; empty without dead letters."""
    count_by_reason: Counter[str] = field(default_factory=Counter)
    inspected_count: int = 0
    """Number of dead letters in `count_by_reason`."""
    dropped_count: int = 0
    """Dead letters that were dropped to make space for newer ones, since the server started."""


async def find_dead_letter_class(bus: Bus, class_: int | str) -> ClassInfo | None:
    """Return the class with the dead letters of `class_`, or None; it is not created.

    Args:
        bus: The connected bus.
        class_: Name or id of a class, or of a class of dead letters.
    """
    if isinstance(class_, str) and dead_letters.is_dead_letter_class(class_):
        return await _inquire_class(bus, class_)
    class_info = await _inquire_class(bus, class_)
    if class_info is not None and class_info.dead_class is not None:
        return await _inquire_class(bus, class_info.dead_class)
    return await _inquire_class(
        bus, dead_letters.dead_letter_class_name(str(class_))[:NAME_CHARACTERS_MAX]
    )


async def has_class(bus: Bus, class_: int | str) -> bool:
    """Return True if the bus has this class."""
    return await _inquire_class(bus, class_) is not None


async def _inquire_class(bus: Bus, class_: int | str) -> ClassInfo | None:
    try:
        return await bus.explain(class_)
    except RefusedError as error:
        if error.code != Reason.UNKNOWN_CLASS:
            raise
        return None


class DeadLetterReader:
    """Iterator over the dead letters that a class has at the start, in lists of up to 64.

    Later dead letters are not included, so a program that requeues all of them comes to an end.
    """

    def __init__(self, bus: Bus, dead_class: ClassInfo, letter_filter: DeadLetterFilter) -> None:
        self._bus, self._dead_class, self._letter_filter = bus, dead_class, letter_filter
        self._next_sequence = dead_class.floor

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[DeadLetter]:
        dead_class = self._dead_class
        while self._next_sequence < dead_class.head:
            count = min(_FETCH_COUNT, dead_class.head - self._next_sequence)
            messages = await self._bus.fetch(dead_class.class_id, self._next_sequence, count)
            letters = [
                DeadLetter.from_message(message)
                for message in messages
                if message.sequence < dead_class.head
            ]
            if not letters:
                break
            self._next_sequence = letters[-1].sequence + 1
            matching = [letter for letter in letters if self._letter_filter.matches(letter)]
            if matching:
                return matching
        raise StopAsyncIteration


async def list_queues(bus: Bus) -> list[DeadLetterQueue]:
    """Return a summary of each class that has dead letters."""
    queues = []
    for class_line in (await bus.explain()).classes:
        if dead_letters.is_dead_letter_class(class_line.name) and class_line.stored:
            class_info = await _inquire_class(bus, class_line.class_id)
            if class_info is not None and class_info.stored > class_info.purged:
                queues.append(await inspect_queue(bus, class_info))
    return queues


async def inspect_queue(bus: Bus, dead_class: ClassInfo) -> DeadLetterQueue:
    """Return a summary of the class of dead letters `dead_class`."""
    queue = DeadLetterQueue(
        dead_class.class_id, dead_class.name, dead_class.stored - dead_class.purged
    )
    queue.dropped_count = dead_class.dropped.get(Reason.DROP_OLDEST, 0)
    async for letters in DeadLetterReader(bus, dead_class, DeadLetterFilter()):
        queue.oldest_time = queue.oldest_time or letters[0].time
        queue.count_by_reason.update(letter.reason for letter in letters)
        queue.inspected_count += len(letters)
        if queue.inspected_count >= _INSPECTED_COUNT_MAX:
            break
    return queue


async def requeue_letters(
    bus: Bus, dead_class: ClassInfo, letters: list[DeadLetter]
) -> tuple[list[DeadLetter], list[tuple[DeadLetter, Exception]]]:
    """Publish dead letters again to their original classes, and purge each confirmed one.

    Returns:
        The requeued letters, and the refused ones with their errors. A refusal does not stop
        the others.

    Raises:
        RefusedError: The user may not purge the dead letters. Nothing was published.
    """
    if letters:  # An empty range is purged to check the permission.
        await bus.purge(dead_class.class_id, 0, 0)
    requeued: list[DeadLetter] = []
    refused: list[tuple[DeadLetter, Exception]] = []
    for letter in letters:
        try:
            await bus.publish(
                letter.payload,
                class_id=await _resolve_source_class(bus, dead_class, letter.source_class),
                channel=letter.channel,
                key=letter.key,
                headers=letter.requeue_headers(dead_class.name),
            )
            requeued.append(letter)
        except (RefusedError, LocalProtocolError, ValueError) as error:
            refused.append((letter, error))
    await purge_letters(bus, dead_class, requeued)
    return requeued, refused


async def purge_letters(bus: Bus, dead_class: ClassInfo, letters: list[DeadLetter]) -> int:
    """Purge dead letters, given in ascending order. Return the number of purged messages."""
    count, index = 0, 0
    while index < len(letters):
        first = last = letters[index].sequence
        while index < len(letters) and letters[index].sequence == last:
            index, last = index + 1, last + 1
        count += await bus.purge(dead_class.class_id, first, last)
    return count


async def _resolve_source_class(bus: Bus, dead_class: ClassInfo, class_: str) -> int | str:
    """Return the original class of a dead letter, as a name or id.

    Any user who may publish to a class of dead letters can write a letter with any original class.
    So a letter of `dead.orders` is requeued only to `orders`.
    """
    if not class_:
        raise ValueError(
            f"the dead letter has no {dead_letters.CLASS_HEADER} header with its original class"
        )
    if dead_letters.dead_letter_class_name(class_) != dead_class.name:
        shown_name = class_[:_NAME_CHARACTERS_SHOWN]
        raise ValueError(
            f"its original class is {shown_name!r}, whose dead letters are not stored in "
            f"{dead_class.name!r}"
        )
    if not (class_.isascii() and class_.isdigit()):
        return class_
    class_info = await _inquire_class(bus, class_)
    return int(class_) if class_info is None else class_info.class_id
