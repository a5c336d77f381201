"""What is asked of a class's messages by their sequences, whoever they are for: to see them, to be
rid of them.

Rule 1: to look changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core import frames
from simplebus.core.classes import MessageClass
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.events import FetchAsked, PurgeAsked
from simplebus.core.fetching import Fetching
from simplebus.core.outbox import Outbox
from simplebus.core.purging import purge
from simplebus.core.requests import PurgeReply
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

    def fetch(self, session: Session, asked: FetchAsked) -> None:
        """See `Fetching`."""
        cls = self._here(asked.class_id, "shows")
        check_fetch(session, cls)
        self._fetching.fetch(session, asked, cls)

    def _here(self, class_id: int, verb: str) -> MessageClass:
        """A class whose messages are stored here."""
        cls = self._store.class_of(class_id)
        if cls.is_remote:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"a door before a JetStream cluster {verb} no messages of class {class_id}: they "
                "are in its stream",
            )
        return cls

    def check_purge(self, session: Session, asked: PurgeAsked) -> int:
        """Whether a session may have messages purged. Returns where those end that it means."""
        cls = self._here(asked.class_id, "purges")
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
