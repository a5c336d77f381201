"""What is asked of a class's messages by their sequences, whoever they are for: to see them, to be
rid of them.

Rule 1: to look changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simplebus.core import frames
from simplebus.core.classes import MessageClass
from simplebus.core.events import FetchAsked, PurgeAsked
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_PURGED_MAX, FETCH_TIMES_MAX
from simplebus.core.outbox import Outbox
from simplebus.core.purging import purge
from simplebus.core.requests import FetchReply, PurgeReply
from simplebus.core.rights import Right, check_right
from simplebus.core.session import Session
from simplebus.core.store import Store
from simplebus.core.subscription import Subscription


class Lookups:
    """See the module's law. Raises RemoteProtocolError (unknown_class)."""

    def __init__(
        self, store: Store, ready: Callable[[Outbox], None], wake: Callable[[Subscription], None]
    ) -> None:
        self._store = store
        self._ready = ready
        """Called with outboxes that have something new."""
        self._wake = wake
        """Called with positions that may have something new."""

    def fetch(self, session: Session, asked: FetchAsked) -> None:
        """Many may be asked for at once: each is looked up when the peer has taken those before."""
        cls = self._store.class_of(asked.class_id)
        session.outbox.owe(partial(self._answer_fetch, session, asked, cls))
        self._ready(session.outbox)

    def _answer_fetch(self, session: Session, asked: FetchAsked, cls: MessageClass) -> None:
        ring, wish = cls.ring, asked.asked
        head, ledger = ring.head, self._store.ledger
        if ledger is not None:
            # What may be gone after a crash is shown to nobody who asks: he would not ask again.
            head = max(ledger.safe(cls.class_id, head), ring.floor)
        first = wish.first if wish.time is None else cls.times.find(wish.time, head)
        first = min(max(first, ring.floor), head)
        last = min(first + wish.count, head)
        times: list[tuple[int, float]] = []
        if wish.times:
            times = cls.times.steps(first, last, most=FETCH_TIMES_MAX + 1)
            if len(times) > FETCH_TIMES_MAX:
                last, _ = times.pop()
        purged: list[tuple[int, int]] = []
        if cls.purged:
            purged = cls.purged.within(first, last)
            if len(purged) > FETCH_PURGED_MAX:
                last, _ = purged[FETCH_PURGED_MAX]
        pieces: list[memoryview] = []
        at, space = first, FETCH_BYTES_MAX
        while at < last and space > 0:
            piece, at = ring.piece(at, last, space)
            pieces.append(piece)
            space -= len(piece)
        if pieces:
            session.outbox.answer(asked.class_id, b"".join(pieces))
        while times and times[-1][0] >= at:
            times.pop()
        reply = FetchReply(
            first=first,
            next=at,
            floor=ring.floor,
            head=head,
            times=times,
            purged=[(a, min(b, at)) for a, b in purged if a < at],
        )
        self._reply(
            session,
            frames.encode(
                frames.FETCH,
                class_id=asked.class_id,
                message_id=asked.request,
                content=reply.encode(),
            ),
        )

    def purge(self, session: Session, asked: PurgeAsked) -> None:
        """Have stored messages be nobody's any more."""
        check_right(session, Right.PURGE)
        cls, wish, store = self._store.class_of(asked.class_id), asked.asked, self._store
        last = cls.ring.head if wish.last is None else wish.last
        count = purge(cls, wish.first, last, store.ledger)
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
