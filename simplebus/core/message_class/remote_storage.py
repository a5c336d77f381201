"""What is asked of messages that a class keeps elsewhere: the same answers as of those that are
here, when what was asked is known.

Rule 1: who asks waits, and whoever asks behind him on the same connection; nobody else does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_TIMES_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import FetchAsked, PurgeAsked
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import FetchReply, FetchRequest, PurgeReply
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from simplebus.core.session.outbox import Outbox
from simplebus.core.session.session import Session
from simplebus.core.subscription.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Looked:
    """Messages in a row, as they are stored elsewhere."""

    first: int
    """Sequence of the first one; where to ask on if there is none."""
    batches: list[FrameBatch]
    times: list[float]
    """When each was accepted, in seconds since 1970."""
    floor: int
    head: int
    now: float
    """When it was looked at, by the same clock."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What lies elsewhere of a class, in figures."""

    messages: int
    bytes: int
    floor: int
    """The lowest sequence that is there."""
    head: int
    """The next one to be given out there."""
    messages_max: int
    """How many may be there; 0 for any number."""
    bytes_max: int
    """And how many bytes."""
    backlog: int
    """Messages that wait for a first subscription."""
    is_backlog_first: bool
    """Whether the oldest one is among them."""
    held_by: Subscription | str
    """Who else has not acknowledged the oldest one: a position that is here, or what to call
    another one; empty for nobody."""


Found = Looked | RemoteProtocolError
Purged = int | RemoteProtocolError
Counted = Inventory | str
"""Or why it is not known what is there."""


class Elsewhere(Protocol):
    """A class that is not here. Each calls back once, perhaps at once."""

    class_id: int

    def look(self, wish: FetchRequest, tell: Callable[[Found], None]) -> None:
        """Which messages there are, from where on `wish` says."""

    def strike(self, first: int, last: int | None, tell: Callable[[Purged], None]) -> None:
        """Have messages first..last-1 be nobody's any more; None for all from `first` on. How many
        there were."""

    def count(self, tell: Callable[[Counted], None]) -> None:
        """How much there is, and for whom."""

    def has_come(self, position: Subscription, tell: Callable[[], None]) -> bool:
        """Whether all that is stored for a position has come to here, as far as it may. If not,
        `tell` is called, later: it has then, or nobody knows."""


class Coming:
    """What a session is told when all that is stored for its subscriptions has come."""

    def __init__(
        self,
        session: Session,
        held: Callable[[], list[tuple[Elsewhere, Subscription]]],
        say: Callable[[], None],
        ready: Callable[[Outbox], None],
    ) -> None:
        """`held` tells the session's positions; they are looked at when what it asked before is
        answered."""
        self._session = session
        self._held = held
        self._say = say
        self._ready = ready
        self._is_looked_at = False
        self._missing = 0

    def answer(self) -> bool:
        """Say it. Returns False while something has not come."""
        if not self._is_looked_at:
            self._is_looked_at = True
            for cls, position in self._held():
                self._missing += not cls.has_come(position, self._hear)
        if self._missing:
            return self._session.closed
        self._say()
        return True

    def _hear(self) -> None:
        self._missing -= 1
        self._session.outbox.go_on()
        if not self._session.closed:
            self._ready(self._session.outbox)


class Inquiry:
    """A question about classes of which some may be elsewhere, and how much of each lies there."""

    def __init__(
        self,
        session: Session,
        classes: Callable[[], list[Elsewhere]],
        say: Callable[[dict[int, Counted]], None],
        ready: Callable[[Outbox], None],
    ) -> None:
        """`classes` tells those that are elsewhere; they are counted when what the session asked
        before is answered."""
        self._session = session
        self._classes = classes
        self._say = say
        self._ready = ready
        self._counted: dict[int, Counted] = {}
        self._missing: set[int] | None = None

    def answer(self) -> bool:
        """Say it. Returns False while it is not known."""
        if self._missing is None:
            classes = self._classes()
            self._missing = {cls.class_id for cls in classes}
            for cls in classes:
                cls.count(partial(self._hear, cls.class_id))
        if self._missing:
            return self._session.closed
        self._say(self._counted)
        return True

    def _hear(self, class_id: int, counted: Counted) -> None:
        assert self._missing is not None, "nobody tells what was not asked"
        self._counted[class_id] = counted
        self._missing.discard(class_id)
        self._session.outbox.go_on()
        if not self._session.closed:
            self._ready(self._session.outbox)


class Asking:
    """One question that is to be answered."""

    def __init__(
        self,
        cls: Elsewhere,
        session: Session,
        asked: FetchAsked | PurgeAsked,
        ready: Callable[[Outbox], None],
        refuse: Callable[[RemoteProtocolError], None],
    ) -> None:
        self._cls = cls
        self._session = session
        self._asked = asked
        self._ready = ready
        self._refuse = refuse
        self._is_asked = False
        self._found: Found | int | None = None

    def answer(self) -> bool:
        """Say it. Returns False while it is not known."""
        if not self._is_asked:
            self._is_asked = True
            self._ask()
        match self._found:
            case None:
                return self._session.closed
            case RemoteProtocolError() as error:
                self._refuse(error)
            case Looked() as found:
                self._say(found)
            case int(count):
                self._session.outbox.reply(
                    frames.encode(
                        frames.PURGE,
                        class_id=self._cls.class_id,
                        message_id=self._asked.request,
                        content=PurgeReply(purged=count).encode(),
                    )
                )
        return True

    def _ask(self) -> None:
        wish = self._asked.asked
        if isinstance(wish, FetchRequest):
            self._cls.look(wish, self._hear)
        else:
            self._cls.strike(wish.first, wish.last, self._hear)

    def _hear(self, found: Found | int) -> None:
        self._found = found
        self._session.outbox.go_on()
        if not self._session.closed:
            self._ready(self._session.outbox)

    def _say(self, found: Looked) -> None:
        wish = self._asked.asked
        assert isinstance(wish, FetchRequest)
        ring = Ring(
            class_id=self._cls.class_id,
            messages_max=1 << 30,
            bytes_max=1 << 40,
            budget=MemoryBudget(1 << 40),  # It is gone when it is answered.
        )
        ring.begin(found.first)
        for batch in found.batches:
            ring.append(batch, 0)
        last = min(ring.head, found.first + wish.count)
        if wish.times:
            last = min(last, found.first + FETCH_TIMES_MAX)
        pieces: list[memoryview] = []
        at, space = found.first, FETCH_BYTES_MAX
        while at < last and space > 0:
            piece, at = ring.piece(at, last, space)
            pieces.append(piece)
            space -= len(piece)
        times = enumerate(found.times[: at - found.first], found.first) if wish.times else ()
        reply = FetchReply(
            first=found.first,
            next=at,
            floor=found.floor,
            head=found.head,
            times=list(times),
            now=found.now if wish.times else 0,
        )
        frame = frames.encode(
            frames.FETCH,
            class_id=self._cls.class_id,
            message_id=self._asked.request,
            content=reply.encode(),
        )
        self._session.outbox.answer(self._cls.class_id, pieces, frame)
