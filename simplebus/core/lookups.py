"""What is asked of a class's messages by their sequences, whoever they are for: to see them, to be
rid of them.

Rule 1: to look changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core import frames
from simplebus.core.elsewhere import Asking, Elsewhere
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.events import FetchAsked, PurgeAsked
from simplebus.core.fetching import Fetching
from simplebus.core.frames import FrameBatch
from simplebus.core.outbox import Outbox
from simplebus.core.purging import purge
from simplebus.core.requests import FetchReply, FetchRequest, PurgeReply
from simplebus.core.rights import Right, check_fetch, check_right
from simplebus.core.session import Session
from simplebus.core.store import Store
from simplebus.core.subscription import Subscription


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
