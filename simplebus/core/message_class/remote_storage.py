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
from simplebus.core.subscription.subscription import BrokerSubscription


@dataclass(frozen=True, slots=True)
class RemoteFetchResult:
    """Messages in a row, as they are stored elsewhere."""

    first_sequence: int
    """Sequence of the first one; where to ask on if there is none."""
    batches: list[FrameBatch]
    accepted_times: list[float]
    """When each was accepted, in seconds since 1970."""
    floor: int
    head: int
    read_at: float
    """When it was looked at, by the same clock."""


@dataclass(frozen=True, slots=True)
class RemoteInventory:
    """What lies elsewhere of a class, in figures."""

    message_count: int
    stored_bytes: int
    floor: int
    """The lowest sequence that is there."""
    head: int
    """The next one to be given out there."""
    messages_max: int
    """How many may be there; 0 for any number."""
    bytes_max: int
    """And how many bytes."""
    backlog_count: int
    """Messages that wait for a first subscription."""
    is_oldest_in_backlog: bool
    """Whether the oldest one is among them."""
    floor_holder: BrokerSubscription | str
    """Who else has not acknowledged the oldest one: a position that is here, or what to call
    another one; empty for nobody."""


RemoteFetchOutcome = RemoteFetchResult | RemoteProtocolError
RemotePurgeOutcome = int | RemoteProtocolError
RemoteCountOutcome = RemoteInventory | str
"""Or why it is not known what is there."""


class RemoteStorage(Protocol):
    """A class that is not here. Each calls back once, perhaps at once."""

    class_id: int

    def fetch_messages(
        self, request: FetchRequest, on_fetched: Callable[[RemoteFetchOutcome], None]
    ) -> None:
        """Which messages there are, from where on `wish` says."""

    def purge_messages(
        self, first: int, last: int | None, on_purged: Callable[[RemotePurgeOutcome], None]
    ) -> None:
        """Have messages first..last-1 be nobody's any more; None for all from `first` on. How many
        there were."""

    def count_messages(self, on_counted: Callable[[RemoteCountOutcome], None]) -> None:
        """How much there is, and for whom."""

    def has_caught_up(self, position: BrokerSubscription, on_caught_up: Callable[[], None]) -> bool:
        """Whether all that is stored for a position has come to here, as far as it may. If not,
        `tell` is called, later: it has then, or nobody knows."""


class CatchUpBarrier:
    """What a session is told when all that is stored for its subscriptions has come."""

    def __init__(
        self,
        session: Session,
        list_remote_positions: Callable[[], list[tuple[RemoteStorage, BrokerSubscription]]],
        send_reply: Callable[[], None],
        mark_ready: Callable[[Outbox], None],
    ) -> None:
        """`held` tells the session's positions; they are looked at when what it asked before is
        answered."""
        self._session = session
        self._list_remote_positions = list_remote_positions
        self._send_reply = send_reply
        self._mark_ready = mark_ready
        self._is_started = False
        self._missing_count = 0

    def try_reply(self) -> bool:
        """Say it. Returns False while something has not come."""
        if not self._is_started:
            self._is_started = True
            for cls, position in self._list_remote_positions():
                self._missing_count += not cls.has_caught_up(position, self._on_caught_up)
        if self._missing_count:
            return self._session.is_closed
        self._send_reply()
        return True

    def _on_caught_up(self) -> None:
        self._missing_count -= 1
        self._session.outbox.go_on()
        if not self._session.is_closed:
            self._mark_ready(self._session.outbox)


class RemoteInquiry:
    """A question about classes of which some may be elsewhere, and how much of each lies there."""

    def __init__(
        self,
        session: Session,
        list_remote_classes: Callable[[], list[RemoteStorage]],
        send_reply: Callable[[dict[int, RemoteCountOutcome]], None],
        mark_ready: Callable[[Outbox], None],
    ) -> None:
        """`classes` tells those that are elsewhere; they are counted when what the session asked
        before is answered."""
        self._session = session
        self._list_remote_classes = list_remote_classes
        self._send_reply = send_reply
        self._mark_ready = mark_ready
        self._outcome_by_class: dict[int, RemoteCountOutcome] = {}
        self._missing_class_ids: set[int] | None = None

    def try_reply(self) -> bool:
        """Say it. Returns False while it is not known."""
        if self._missing_class_ids is None:
            classes = self._list_remote_classes()
            self._missing_class_ids = {cls.class_id for cls in classes}
            for cls in classes:
                cls.count_messages(partial(self._on_counted, cls.class_id))
        if self._missing_class_ids:
            return self._session.is_closed
        self._send_reply(self._outcome_by_class)
        return True

    def _on_counted(self, class_id: int, outcome: RemoteCountOutcome) -> None:
        assert self._missing_class_ids is not None, "nobody tells what was not asked"
        self._outcome_by_class[class_id] = outcome
        self._missing_class_ids.discard(class_id)
        self._session.outbox.go_on()
        if not self._session.is_closed:
            self._mark_ready(self._session.outbox)


class RemoteQuery:
    """One question that is to be answered."""

    def __init__(
        self,
        remote_class: RemoteStorage,
        session: Session,
        event: FetchAsked | PurgeAsked,
        mark_ready: Callable[[Outbox], None],
        on_refused: Callable[[RemoteProtocolError], None],
    ) -> None:
        self._remote_class = remote_class
        self._session = session
        self._event = event
        self._mark_ready = mark_ready
        self._on_refused = on_refused
        self._is_query_sent = False
        self._outcome: RemoteFetchOutcome | int | None = None

    def try_reply(self) -> bool:
        """Say it. Returns False while it is not known."""
        if not self._is_query_sent:
            self._is_query_sent = True
            self._send_query()
        match self._outcome:
            case None:
                return self._session.is_closed
            case RemoteProtocolError() as error:
                self._on_refused(error)
            case RemoteFetchResult() as found:
                self._send_fetch_reply(found)
            case int(count):
                self._session.outbox.reply(
                    frames.encode(
                        frames.PURGE,
                        class_id=self._remote_class.class_id,
                        message_id=self._event.request,
                        content=PurgeReply(purged=count).encode(),
                    )
                )
        return True

    def _send_query(self) -> None:
        wish = self._event.asked
        if isinstance(wish, FetchRequest):
            self._remote_class.fetch_messages(wish, self._on_outcome)
        else:
            self._remote_class.purge_messages(wish.first, wish.last, self._on_outcome)

    def _on_outcome(self, outcome: RemoteFetchOutcome | int) -> None:
        self._outcome = outcome
        self._session.outbox.go_on()
        if not self._session.is_closed:
            self._mark_ready(self._session.outbox)

    def _send_fetch_reply(self, fetch_result: RemoteFetchResult) -> None:
        wish = self._event.asked
        assert isinstance(wish, FetchRequest)
        ring = Ring(
            class_id=self._remote_class.class_id,
            messages_max=1 << 30,
            bytes_max=1 << 40,
            budget=MemoryBudget(1 << 40),  # It is gone when it is answered.
        )
        ring.begin(fetch_result.first_sequence)
        for batch in fetch_result.batches:
            ring.append(batch, 0)
        last = min(ring.head, fetch_result.first_sequence + wish.count)
        if wish.times:
            last = min(last, fetch_result.first_sequence + FETCH_TIMES_MAX)
        pieces: list[memoryview] = []
        at, space = fetch_result.first_sequence, FETCH_BYTES_MAX
        while at < last and space > 0:
            piece, at = ring.piece(at, last, space)
            pieces.append(piece)
            space -= len(piece)
        times = (
            enumerate(
                fetch_result.accepted_times[: at - fetch_result.first_sequence],
                fetch_result.first_sequence,
            )
            if wish.times
            else ()
        )
        reply = FetchReply(
            first=fetch_result.first_sequence,
            next=at,
            floor=fetch_result.floor,
            head=fetch_result.head,
            times=list(times),
            now=fetch_result.read_at if wish.times else 0,
        )
        frame = frames.encode(
            frames.FETCH,
            class_id=self._remote_class.class_id,
            message_id=self._event.request,
            content=reply.encode(),
        )
        self._session.outbox.answer(self._remote_class.class_id, pieces, frame)
