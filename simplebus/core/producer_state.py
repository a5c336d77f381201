"""Who publishes under a name, and how far its messages are stored.

Rule 1: a number is stored once. What is known of a name outlives its sessions, for a time and for a
number of names that are bounded.
Rule 2: a name is its user's: two users may use one name, and have nothing to do with one another.
It belongs to one running program at a time; the same program may come again before its former
connection is known to be dead.
Rule 3: what is too much to remember of one name is forgotten of that one, never of others.
Rule 4: a number means one message. Numbers that another program has used, or that were confirmed,
are never waited for again, whatever has become of their messages.
Rule 5: where what is known may be too much, or is another program's, the program is believed:
better a message is stored twice than never.

    its numbers:   confirmed │ sent, and nobody has heard what became of them │ to come
                             5  6  7  8  9                                    10
    another one came under the name meanwhile, used 5 to 9, and has gone: so this one is told
    neither 5 nor 10, but a number that it has not used, and sends all five under new numbers
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    PUBLISHER_REFUSALS_MAX,
    PUBLISHER_RESENT_MAX,
    PUBLISHER_SECONDS,
    PUBLISHER_STEP,
    PUBLISHERS_AHEAD_BYTES_MAX,
    PUBLISHERS_MAX,
    PUBLISHERS_REFUSALS_MAX,
)
from simplebus.core.protocol.events import Refused
from simplebus.core.protocol.frames import Flags, Integers, ranges_of

_HALF = 1 << (MESSAGE_ID_BITS - 1)


def key_of(user: str, name: str) -> str:
    """What a publisher is called by those who keep what is known of it: its name, where nobody is
    asked who he is. No user's name holds a NUL, so no two have the same key."""
    return f"{user}\0{name}" if user or "\0" in name else name


def distance(first: int, last: int) -> int:
    """How far the second number is ahead of the first one; below 0 when it is behind it."""
    return ((last - first + _HALF) & MESSAGE_ID_MASK) - _HALF


class NumberBitmap:
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
    def of(cls, first: int, flags: Flags) -> NumberBitmap | None:
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
        return [((self.first + a) & MESSAGE_ID_MASK, b - a) for a, b in ranges_of(self.flags())]

    def flags(self) -> Flags:
        """Of each number from `first` to before `end`, whether it is stored."""
        flags: Flags = np.unpackbits(self._bits)[: self._count].view(np.bool_)
        return flags

    def holds(self, numbers: Integers) -> Flags:
        """Which of these numbers are stored."""
        offsets = (numbers - self.first) & MESSAGE_ID_MASK
        inside = offsets < self._count
        found = np.zeros(numbers.size, np.bool_)
        at = offsets[inside]
        found[inside] = self._bits[at >> 3] >> (7 - (at & 7)) & 1
        return found


@dataclass(slots=True)
class ProducerState:
    """One name."""

    key: str = ""
    """The name, and whose it is: see `key_of`. Empty for who has none."""
    name: str = ""
    instance: str = ""
    next: int = 0
    """Every number before it is stored, or was refused."""
    ahead: NumberBitmap | None = None
    """Numbers behind `next` that are stored too, if there are any."""
    refusals: list[Refused] = field(default_factory=list)
    """Which of those were refused, as far as its program may not have heard of it."""
    is_doubted: bool = False
    """Whether some of the messages before `next` may be gone, and nobody knows which; until the
    program comes again and says what it knows to be confirmed."""
    session_id: int | None = None
    """Who uses it now."""
    gone_at: float = 0.0
    owed: dict[int, int] = field(default_factory=dict)
    """Where messages are kept elsewhere: in which classes some of its own may not be there yet, and
    the last lot of the ledger in which there are any."""

    @property
    def user(self) -> str:
        """Whose name it is; empty where nobody is asked."""
        return self.key.partition("\0")[0] if "\0" in self.key else ""

    @property
    def end(self) -> int:
        """The number behind all of which anything is known."""
        if self.ahead is None or distance(self.next, self.ahead.end) < 0:
            return self.next
        return self.ahead.end


class NameClaim(NamedTuple):
    """A name that a session has got."""

    publisher: ProducerState
    former: int | None
    """The session from which it is taken over."""
    is_known: bool
    """Whether anything was known of it."""
    is_another: bool
    """Whether another program had it before."""


class ProducerStates:
    """All names. Whatever is kept by name is kept by `Publisher.key`."""

    def __init__(self) -> None:
        self.may_have_lost = False
        """Whether names may be gone of which something was known: since a power cut."""
        self._names: dict[str, ProducerState] = {}
        self._gone: dict[str, ProducerState] = {}
        """Those that nobody uses, in the order of their going."""
        self._gone_of: dict[str, dict[str, ProducerState]] = {}
        """The same by user."""
        self._ahead: dict[str, int] = {}
        """Who had numbers ahead when it was asked last, in this order, and how many bytes these
        take."""
        self._ahead_bytes = 0
        self._refusals: dict[str, int] = {}
        """Who has had messages refused, the one of the last refusal last, and how many refusals are
        remembered of it."""
        self._refusals_count = 0

    def __len__(self) -> int:
        return len(self._names)

    def claim(self, name: str, instance: str, session_id: int, *, user: str = "") -> NameClaim:
        """A session wants a name. `begin` says where it goes on, as soon as the session from which
        the name is taken over has ended.

        Raises RemoteProtocolError (name_in_use) when another program has it.
        """
        key = key_of(user, name)
        publisher = self._names.get(key)
        is_known = publisher is not None
        if publisher is None:
            publisher = self._names[key] = ProducerState(key, name)
        former = publisher.session_id
        is_another = is_known and instance != publisher.instance
        if former is not None and (is_another or not instance):
            raise RemoteProtocolError(
                Reason.NAME_IN_USE,
                f"the name {name!r} is used by session {former}, which is another program's",
            )
        self._is_back(publisher)
        publisher.instance = instance
        publisher.session_id = session_id
        return NameClaim(publisher, former, is_known, is_another)

    def begin(self, claim: NameClaim, unconfirmed: int | None, *, is_elsewheres: bool) -> int:
        """Say at which number the program goes on. Every number below `unconfirmed` it knows to be
        confirmed; None where it says nothing of that. `is_elsewheres`: that are another bus's
        numbers. Returns how many confirmed messages are not stored, as far as that is known."""
        publisher = claim.publisher
        if is_elsewheres or (claim.is_another and unconfirmed is None):
            self.begin_anew(publisher)
        elif unconfirmed is None:
            self.come_again(publisher)
        elif claim.is_another and not publisher.is_doubted:
            # What is known are the numbers of another one's messages. What this one has sent may
            # be stored or not: it goes on where it can take nothing of it for stored.
            self.begin_at(publisher, (unconfirmed + PUBLISHER_STEP) & MESSAGE_ID_MASK)
        elif claim.is_known or self.may_have_lost:
            return self.go_on(publisher, unconfirmed)
        else:  # What was confirmed to it was stored: that is long ago.
            self.begin_at(publisher, unconfirmed)
        return 0

    def program(self, key: str) -> str | None:
        """Which program used a name last; "" when that is not known, None for a new name."""
        publisher = self._names.get(key)
        return None if publisher is None else publisher.instance

    def __iter__(self) -> Iterator[ProducerState]:
        return iter(self._names.values())

    def begin_anew(self, publisher: ProducerState) -> None:
        """None of the numbers of which anything is known comes again."""
        self.begin_at(publisher, publisher.end)

    def come_again(self, publisher: ProducerState) -> None:
        """The program does not say what it knows to be confirmed, and may be the one before. Of
        one that is doubted nothing is known then."""
        if publisher.is_doubted:
            self.begin_at(publisher, 0)

    def begin_at(self, publisher: ProducerState, following: int) -> None:
        """It goes on with this number, and of those behind it nothing is known."""
        publisher.is_doubted = False
        self.note(publisher, following, None)
        self._keep_refusals(publisher, [])

    def go_on(self, publisher: ProducerState, unconfirmed: int) -> int:
        """The program that it is knows every number below this one to be confirmed, and sends all
        from there on again that are not told to be stored. So it is told no more than up to the
        first refusal of which it has not heard. Returns how many confirmed messages are not stored,
        as far as that is known."""
        missing = 0
        if publisher.is_doubted:
            missing = max(0, distance(publisher.next, unconfirmed))
            self.begin_at(publisher, unconfirmed)
            return missing
        if distance(publisher.next, unconfirmed) > 0:
            missing = distance(publisher.next, unconfirmed)
            ahead = publisher.ahead
            if ahead is not None:
                at = distance(ahead.first, unconfirmed)
                flags = ahead.flags()
                missing -= int(np.count_nonzero(flags[: max(0, at)]))
                ahead = NumberBitmap.of(unconfirmed, flags[at:]) if 0 <= at < flags.size else None
            self.note(publisher, unconfirmed, ahead)
        since = unconfirmed
        if distance(since, publisher.next) > PUBLISHER_RESENT_MAX:
            since = (publisher.next - PUBLISHER_RESENT_MAX) & MESSAGE_ID_MASK
        unheard = [
            each for each in publisher.refusals if distance(since, each.refers_to + each.count) > 0
        ]
        self._keep_refusals(publisher, unheard)
        starts = (max(0, distance(since, each.refers_to)) for each in unheard)
        first = (since + min(starts, default=_HALF)) & MESSAGE_ID_MASK
        back = distance(first, publisher.next)
        if unheard and back > 0:
            flags = np.ones(back + max(0, distance(publisher.next, publisher.end)), np.bool_)
            if publisher.ahead is not None:
                behind = np.arange(publisher.next, publisher.next + flags.size - back)
                flags[back:] = publisher.ahead.holds(behind & MESSAGE_ID_MASK)
            self.note(publisher, first, NumberBitmap.of(first, flags))
        return missing

    def refuse(self, publisher: ProducerState, refused: Refused) -> None:
        """Some of its messages were refused: their numbers are used up."""
        known = publisher.refusals
        joined = known[-1].joined(refused) if known else None
        if joined is not None:
            known[-1] = joined
        else:
            known = [*known[1 - PUBLISHER_REFUSALS_MAX :], refused]
        self._keep_refusals(publisher, known)

    def _keep_refusals(self, publisher: ProducerState, refusals: list[Refused]) -> None:
        """These are remembered. When all are too many, those are forgotten of whom nothing was
        refused for the longest time."""
        publisher.refusals = refusals
        self._refusals_count -= self._refusals.pop(publisher.key, 0)
        if refusals:
            self._refusals[publisher.key] = len(refusals)
            self._refusals_count += len(refusals)
        while self._refusals_count > PUBLISHERS_REFUSALS_MAX:
            self._keep_refusals(self._names[next(iter(self._refusals))], [])

    def restore(
        self,
        key: str,
        following: int,
        ahead: NumberBitmap | None,
        now: float,
        *,
        instance: str = "",
        refusals: list[Refused] | None = None,
        is_doubted: bool = False,
    ) -> None:
        """A name is known from before: so far its messages are stored."""
        name = key.partition("\0")[2] or key
        publisher = self._names[key] = ProducerState(key, name, instance, is_doubted=is_doubted)
        self.note(publisher, following, ahead)
        self._keep_refusals(publisher, refusals or [])
        self.leave(publisher, now)

    def note(self, publisher: ProducerState, following: int, ahead: NumberBitmap | None) -> None:
        """So far its messages are stored. When all that are ahead take too much memory, those of
        whom this was said longest ago are forgotten."""
        publisher.next, publisher.ahead = following, ahead
        self._ahead_bytes -= self._ahead.pop(publisher.key, 0)
        if ahead is not None:
            self._ahead[publisher.key] = ahead.size
            self._ahead_bytes += ahead.size
        while self._ahead_bytes > PUBLISHERS_AHEAD_BYTES_MAX:
            self._forget_ahead(next(iter(self._ahead)))

    def leave(self, publisher: ProducerState, now: float) -> None:
        """Its session is gone."""
        publisher.session_id = None
        publisher.gone_at = now
        self._gone[publisher.key] = publisher
        self._gone_of.setdefault(publisher.user, {})[publisher.key] = publisher

    def _is_back(self, publisher: ProducerState) -> None:
        """Nobody has to look for it any more among those that are gone."""
        if self._gone.pop(publisher.key, None) is not None:
            others = self._gone_of[publisher.user]
            del others[publisher.key]
            if not others:
                del self._gone_of[publisher.user]

    def forget(self, now: float) -> None:
        """Once per tick: drop what is long gone, and what is too much: of the user who has left
        the most names."""
        while self._gone:
            longest = next(iter(self._gone.values()))
            if longest.gone_at + PUBLISHER_SECONDS > now:
                break
            self._forget_one(longest)
        excess = len(self._names) - PUBLISHERS_MAX
        while excess > 0 and self._gone:
            most, *second = heapq.nlargest(2, self._gone_of.values(), key=len)
            count = min(excess, max(1, len(most) - len(second[0]) if second else excess))
            for longest in list(islice(most.values(), count)):
                self._forget_one(longest)
                excess -= 1

    def _forget_one(self, publisher: ProducerState) -> None:
        self._forget_ahead(publisher.key)
        self._keep_refusals(publisher, [])
        self._is_back(publisher)
        del self._names[publisher.key]

    def _forget_ahead(self, key: str) -> None:
        publisher = self._names[key]
        if publisher.ahead is not None:  # What was refused behind `next` is to be dealt with anew.
            self._keep_refusals(publisher, [])
        publisher.ahead = None
        self._ahead_bytes -= self._ahead.pop(key, 0)
