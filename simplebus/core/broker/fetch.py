"""What a Fetch is answered: stored messages by sequence, from memory or from disk.

Rule 1: nobody's position moves.
Rule 2: many may be asked for at once: each is looked up when the peer has taken those before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from simplebus.core.authorization.session_permissions import Right, check_fetch, check_right
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_PURGED_MAX, FETCH_TIMES_MAX
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.purge import purge
from simplebus.core.message_class.remote_storage import Asking, Elsewhere
from simplebus.core.message_class.spill import Read, Stretch
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import FetchAsked, PurgeAsked
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import FetchReply, FetchRequest, PurgeReply
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from simplebus.core.session.outbox import Outbox
from simplebus.core.session.session import Session
from simplebus.core.store.store import Store
from simplebus.core.subscription.subscription import Subscription

T = TypeVar("T")


class Fetching:
    """Of one broker."""

    def __init__(self, store: Store, ready: Callable[[Outbox], None]) -> None:
        self._store = store
        self.make_ready = ready

    def fetch(self, session: Session, asked: FetchAsked, cls: MessageClass) -> None:
        """A peer asks for messages of a class."""
        session.outbox.owe(_Fetch(self, session, asked, cls).answer)
        self.make_ready(session.outbox)

    def see(
        self, cls: MessageClass, wish: FetchRequest
    ) -> tuple[FetchReply, list[FrameBatch]] | None:
        """The same for a part of the server: the frames are views that are valid until the ring
        changes. None where it must be read from disk."""
        head = self.head(cls)
        first, last = _range(cls, wish, head)
        if first < min(cls.ring.floor, last):
            return None

        def take(at: int, last: int, space: int) -> tuple[FrameBatch, int, int]:
            batch, next = cls.ring.batch(at, last, space)
            return batch, next, batch.data.size

        return _found(cls, first, last, head, take, self.now if wish.times else None)

    @property
    def now(self) -> float:
        """Seconds since 1970, by the clock by which messages are accepted."""
        return self._store.clock.now

    def head(self, cls: MessageClass) -> int:
        """What may be gone after a crash is shown to nobody who asks: he would not ask again."""
        head, ledger = cls.ring.head, self._store.ledger
        return head if ledger is None else max(ledger.safe(cls.class_id, head), cls.first)

    def ask(self, read: Read) -> None:
        """Have something read from disk."""
        assert self._store.spilling is not None
        self._store.spilling.ask(read)

    def pieces(self, stretches: Sequence[Stretch], cls: MessageClass) -> list[Ring]:
        """What was read, as it is in a ring: each a run without a gap."""
        spilling = self._store.spilling
        assert spilling is not None
        rings: list[Ring] = []
        for stretch in stretches:
            if not stretch.frames:
                continue
            if not rings or rings[-1].head != stretch.first:
                budget = MemoryBudget(1 << 40)  # It is gone when it is answered.
                rings.append(
                    Ring(
                        class_id=cls.class_id,
                        messages_max=1 << 30,
                        bytes_max=1 << 40,
                        budget=budget,
                    )
                )
                rings[-1].begin(stretch.first)
            for batch in spilling.split(stretch):
                rings[-1].append(batch, 0)
        return rings


class _Fetch:
    """One that is to be answered."""

    def __init__(
        self, fetching: Fetching, session: Session, asked: FetchAsked, cls: MessageClass
    ) -> None:
        self._fetching = fetching
        self._session = session
        self._asked = asked
        self._cls = cls
        self._found: list[Ring] | None = None
        """What was on disk."""
        self._end = 0
        """Up to where it was read."""

    def answer(self) -> bool:
        """Say it. Returns False when it must be read first."""
        cls, asked, wish = self._cls, self._asked, self._asked.asked
        head = self._fetching.head(cls)
        first, last = _range(cls, wish, head)
        ring = cls.ring
        if first < min(ring.floor, last):
            if self._found is None:
                until = min(last, ring.floor)
                read = Read(cls.class_id, first, until, FETCH_BYTES_MAX, self._has_read)
                self._fetching.ask(read)
                return False
            # Messages that are damaged are left out, and the answer is without a gap.
            ring = next((each for each in self._found if each.head > first), ring)
            if ring is cls.ring:
                first = last = max(first, min(self._end, ring.floor))
            else:
                first = max(first, ring.floor)
                last = max(first, min(last, ring.head))

        def take(at: int, last: int, space: int) -> tuple[memoryview, int, int]:
            piece, next = ring.piece(at, last, space)
            return piece, next, len(piece)

        now = self._fetching.now if wish.times else None
        reply, pieces = _found(cls, first, last, head, take, now)
        frame = frames.encode(
            frames.FETCH, class_id=cls.class_id, message_id=asked.request, content=reply.encode()
        )
        self._session.outbox.answer(cls.class_id, pieces, frame)
        return True

    def _has_read(self, stretches: Sequence[Stretch]) -> None:
        if stretches:
            self._end = stretches[-1].first + stretches[-1].messages
            self._found = self._fetching.pieces(stretches, self._cls)
        self._session.outbox.go_on()
        if not self._session.closed:
            self._fetching.make_ready(self._session.outbox)


def _range(cls: MessageClass, wish: FetchRequest, head: int) -> tuple[int, int]:
    """The sequences that are wished for, as far as there are any."""
    first = wish.first if wish.time is None else cls.times.find(wish.time, head)
    first = min(max(first, cls.first), head)
    return first, min(first + wish.count, head)


def _found(
    cls: MessageClass,
    first: int,
    last: int,
    head: int,
    take: Callable[[int, int, int], tuple[T, int, int]],
    now: float | None,
) -> tuple[FetchReply, list[T]]:
    """What there is of first..last-1, as much as an answer may have, and what is said of it.
    `take` gives a piece of it, what follows, and its size. `now` is said where times are wanted;
    None where not."""
    steps: list[tuple[int, float]] = []
    if now is not None:
        steps = cls.times.steps(first, last, most=FETCH_TIMES_MAX + 1)
        if len(steps) > FETCH_TIMES_MAX:
            last, _ = steps.pop()
    purged: list[tuple[int, int]] = []
    if cls.purged:
        purged = cls.purged.within(first, last)
        if len(purged) > FETCH_PURGED_MAX:
            last, _ = purged[FETCH_PURGED_MAX]
    pieces: list[T] = []
    at, space = first, FETCH_BYTES_MAX
    while at < last and space > 0:
        piece, at, size = take(at, last, space)
        pieces.append(piece)
        space -= size
    while steps and steps[-1][0] >= at:
        steps.pop()
    reply = FetchReply(
        first=first,
        next=at,
        floor=cls.first,
        head=head,
        times=steps,
        now=now or 0,
        purged=[(a, min(b, at)) for a, b in purged if a < at],
    )
    return reply, pieces


class Lookups:
    """See the module's law. Raises RemoteProtocolError (unknown_class)."""

    def __init__(
        self, store: Store, ready: Callable[[Outbox], None], wake: Callable[[Subscription], None]
    ) -> None:
        self._store = store
        self._fetching = Fetching(store, ready)
        self._ready = ready
        """Called with outboxes that have something new."""
        self._wake = wake
        """Called with positions that may have something new."""

    def fetch(
        self, session: Session, asked: FetchAsked, refuse: Callable[[RemoteProtocolError], None]
    ) -> None:
        """See `Fetching`. `refuse` says why it cannot be answered, if that is known later."""
        cls = self._store.class_of(asked.class_id)
        check_fetch(session, cls)
        if cls.elsewhere is None:
            self._fetching.fetch(session, asked, cls)
        else:
            self._ask(cls.elsewhere, session, asked, refuse)

    def see(self, class_id: int, wish: FetchRequest) -> tuple[FetchReply, list[FrameBatch]] | None:
        """See `Fetching`. None, too, where it is not here."""
        cls = self._store.class_of(class_id)
        return self._fetching.see(cls, wish) if cls.elsewhere is None else None

    def _ask(
        self,
        cls: Elsewhere,
        session: Session,
        asked: FetchAsked | PurgeAsked,
        refuse: Callable[[RemoteProtocolError], None],
    ) -> None:
        session.outbox.owe(Asking(cls, session, asked, self._ready, refuse).answer)
        self._ready(session.outbox)

    def purge_elsewhere(
        self, session: Session, asked: PurgeAsked, refuse: Callable[[RemoteProtocolError], None]
    ) -> bool:
        """Whether the messages of a class are not here; then they are purged where they are."""
        cls = self._store.class_of(asked.class_id)
        if cls.elsewhere is None:
            return False
        check_right(session, Right.PURGE, cls)
        self._ask(cls.elsewhere, session, asked, refuse)
        return True

    def check_purge(self, session: Session, asked: PurgeAsked) -> int:
        """Whether a session may have messages purged. Returns where those end that it means."""
        cls = self._store.class_of(asked.class_id)
        check_right(session, Right.PURGE, cls)
        head, last = cls.ring.head, asked.asked.last
        return head if last is None else min(last, head)

    def purge(self, session: Session, asked: PurgeAsked, last: int) -> None:
        """Have stored messages up to `last` be nobody's any more."""
        store, cls = self._store, self._store.class_of(asked.class_id)
        count = purge(cls, asked.asked.first, last, store.ledger)
        store.release(cls)
        for position in cls.subscriptions:
            self._wake(position)
        reply = PurgeReply(purged=count)
        self._reply(
            session,
            frames.encode(
                frames.PURGE,
                class_id=asked.class_id,
                message_id=asked.request,
                content=reply.encode(),
            ),
        )

    def _reply(self, session: Session, frame: bytes) -> None:
        session.outbox.reply(frame)
        self._ready(session.outbox)
