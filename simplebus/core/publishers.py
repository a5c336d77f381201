"""Who publishes under a name, and how far its messages are stored.

Rule 1: a number is stored once. What is known of a name outlives its sessions, for a time and for a
number of names that are bounded.
Rule 2: a name belongs to one running program at a time; the same program may come again before its
former connection is known to be dead.
Rule 3: what is too much to remember of one name is forgotten of that one, never of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.frames import Flags, Integers, ranges_of
from simplebus.core.limits import (
    MESSAGE_ID_MASK,
    PUBLISHER_SECONDS,
    PUBLISHERS_AHEAD_BYTES_MAX,
    PUBLISHERS_MAX,
)


class Ahead:
    """Numbers that are stored though some before them are not. One bit for each number from
    `first` to before `end`: a single read may leave a hundred thousand.

        first              end
          0  1  1  0  1  1
    """

    __slots__ = ("_bits", "_count", "first")

    def __init__(self, first: int, flags: Flags) -> None:
        """`flags` say of the numbers from `first` on which are stored; the last one is."""
        self.first = first
        self._count = flags.size
        self._bits = np.packbits(flags)

    @classmethod
    def of(cls, first: int, flags: Flags) -> Ahead | None:
        """What the flags say of the numbers from `first` on; None when none of them is stored."""
        stored = np.flatnonzero(flags)
        return cls(first, flags[: stored[-1] + 1]) if stored.size else None

    @property
    def end(self) -> int:
        """The number behind the last one that is stored."""
        return (self.first + self._count) & MESSAGE_ID_MASK

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return self._bits.size

    def ranges(self) -> list[tuple[int, int]]:
        """The numbers that are stored: the first of each row of them, and how many there are."""
        flags = np.unpackbits(self._bits)[: self._count].view(np.bool_)
        return [((self.first + a) & MESSAGE_ID_MASK, b - a) for a, b in ranges_of(flags)]

    def holds(self, numbers: Integers) -> Flags:
        """Which of these numbers are stored."""
        offsets = (numbers - self.first) & MESSAGE_ID_MASK
        inside = offsets < self._count
        found = np.zeros(numbers.size, np.bool_)
        at = offsets[inside]
        found[inside] = self._bits[at >> 3] >> (7 - (at & 7)) & 1
        return found


@dataclass(slots=True)
class Publisher:
    """One name."""

    name: str = ""
    instance: str = ""
    next: int = 0
    """Every number before it is stored, or was refused."""
    ahead: Ahead | None = None
    """Numbers behind `next` that are stored too, if there are any."""
    session_id: int | None = None
    """Who uses it now."""
    gone_at: float = 0.0


class Publishers:
    """All names."""

    def __init__(self) -> None:
        self._names: dict[str, Publisher] = {}
        self._gone: dict[str, Publisher] = {}
        """Those that nobody uses, in the order of their going."""
        self._ahead: dict[str, int] = {}
        """Who had numbers ahead when it was asked last, in this order, and how many bytes these
        take."""
        self._ahead_bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def claim(self, name: str, instance: str, session_id: int) -> tuple[Publisher, int | None]:
        """A session wants a name. Returns its state, and the session from which it is taken over.

        Raises RemoteProtocolError (name_in_use) when another program has it.
        """
        publisher = self._names.get(name)
        if publisher is None:
            publisher = self._names[name] = Publisher(name)
        former = publisher.session_id
        if former is not None and (not instance or instance != publisher.instance):
            raise RemoteProtocolError(
                Reason.NAME_IN_USE,
                f"the name {name!r} is used by session {former}, which is another program's",
            )
        self._gone.pop(name, None)
        publisher.instance = instance
        publisher.session_id = session_id
        return publisher, former

    def __iter__(self) -> Iterator[Publisher]:
        return iter(self._names.values())

    def restore(self, name: str, following: int, ahead: Ahead | None, now: float) -> None:
        """A name is known from before: so far its messages are stored."""
        publisher = self._names[name] = Publisher(name)
        self.note(publisher, following, ahead)
        self.leave(publisher, now)

    def note(self, publisher: Publisher, following: int, ahead: Ahead | None) -> None:
        """So far its messages are stored. When all that are ahead take too much memory, those of
        whom this was said longest ago are forgotten."""
        publisher.next, publisher.ahead = following, ahead
        self._ahead_bytes -= self._ahead.pop(publisher.name, 0)
        if ahead is not None:
            self._ahead[publisher.name] = ahead.size
            self._ahead_bytes += ahead.size
        while self._ahead_bytes > PUBLISHERS_AHEAD_BYTES_MAX:
            self._forget_ahead(next(iter(self._ahead)))

    def leave(self, publisher: Publisher, now: float) -> None:
        """Its session is gone."""
        publisher.session_id = None
        publisher.gone_at = now
        self._gone[publisher.name] = publisher

    def forget(self, now: float) -> None:
        """Once per tick: drop what is long gone, and what is too much."""
        while self._gone:
            name, longest = next(iter(self._gone.items()))
            if longest.gone_at + PUBLISHER_SECONDS > now and len(self._names) <= PUBLISHERS_MAX:
                break
            self._forget_ahead(name)
            del self._gone[name], self._names[name]

    def _forget_ahead(self, name: str) -> None:
        self._names[name].ahead = None
        self._ahead_bytes -= self._ahead.pop(name, 0)
