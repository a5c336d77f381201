"""Requests for messages of classes that another system stores.

A remote storage calls back when it has the result. Until then the request's reply is deferred, and
with it later replies to the same session; other sessions are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_TIMES_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import FetchRequested, PurgeRequested
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import FetchReply, FetchRequest, PurgeReply
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from simplebus.core.session.session import Session
from simplebus.core.subscription.position import Position


@dataclass(frozen=True, slots=True)
class RemoteFetchResult:
    """Consecutive messages fetched from a remote storage."""

    first_sequence: int
    """Sequence of the first message; without messages, the sequence to continue with."""
    batches: list[FrameBatch]
    accepted_times: list[float]
    """Unix time in seconds of each message."""
    floor: int
    head: int
    read_at: float
    """Unix time of the fetch, by the clock of `accepted_times`."""


@dataclass(frozen=True, slots=True)
class RemoteInventory:
    """Counts and limits of the messages of a remote class."""

    message_count: int
    stored_bytes: int
    floor: int
    """Lowest stored sequence."""
    head: int
    """Next sequence to be assigned."""
    messages_max: int
    """Limit on stored messages; 0 for no limit."""
    bytes_max: int
    """Limit on stored bytes; 0 for no limit."""
    backlog_count: int
    """Messages without a position."""
    is_oldest_in_backlog: bool
    """True if the oldest message is one of them."""
    floor_holder: Position | str
    """Position that has not acknowledged the oldest message; empty if all have. A position of
    another server is given by its name.
    """


RemoteFetchOutcome = RemoteFetchResult | RemoteProtocolError
RemotePurgeOutcome = int | RemoteProtocolError
RemoteCountOutcome = RemoteInventory | str
"""The inventory, or the reason why it is unknown."""


class RemoteStorage(Protocol):
    """Storage of one class in another system. Each callback is called once, possibly at once."""

    class_id: int

    def fetch_messages(
        self, request: FetchRequest, on_fetched: Callable[[RemoteFetchOutcome], None]
    ) -> None:
        """Fetch messages."""

    def purge_messages(
        self, first: int, last: int | None, on_purged: Callable[[RemotePurgeOutcome], None]
    ) -> None:
        """Purge messages `first` to `last - 1`, or all from `first` on if `last` is None.

        `on_purged` receives the number of purged messages.
        """

    def count_messages(self, on_counted: Callable[[RemoteCountOutcome], None]) -> None:
        """Count the stored messages."""

    def has_caught_up(self, position: Position, on_caught_up: Callable[[], None]) -> bool:
        """Return True if all stored messages of a position were fetched, within its limits.

        Otherwise `on_caught_up` is called when they have been fetched or the storage has failed.
        """


class CatchUpBarrier:
    """Deferred reply that waits until all stored messages of a session's positions were fetched."""

    def __init__(
        self,
        session: Session,
        list_remote_positions: Callable[[], list[tuple[RemoteStorage, Position]]],
        reply: bytes,
    ) -> None:
        """Create a barrier. `list_remote_positions` is called when earlier replies were sent."""
        self._session = session
        self._list_remote_positions = list_remote_positions
        self._reply = reply
        self._is_started = False
        self._missing_count = 0

    def try_reply(self) -> bool:
        """Send the reply if all positions have caught up, else return False."""
        if not self._is_started:
            self._is_started = True
            for cls, position in self._list_remote_positions():
                self._missing_count += not cls.has_caught_up(position, self._on_caught_up)
        if self._missing_count:
            return self._session.is_closed
        self._session.outbox.queue_reply(self._reply)
        return True

    def _on_caught_up(self) -> None:
        self._missing_count -= 1
        self._session.outbox.resume_replies()


class RemoteInquiry:
    """Deferred reply to an inquiry that needs the inventories of remote classes."""

    def __init__(
        self,
        session: Session,
        list_remote_classes: Callable[[], list[RemoteStorage]],
        send_reply: Callable[[dict[int, RemoteCountOutcome]], bool],
    ) -> None:
        """Create an inquiry.

        Args:
            session: The session that asks.
            list_remote_classes: Called when earlier replies were sent.
            send_reply: Called with the counts until it returns True. If it returns False, it calls
                `resume_replies`.
        """
        self._session = session
        self._list_remote_classes = list_remote_classes
        self._send_reply = send_reply
        self._outcome_by_class: dict[int, RemoteCountOutcome] = {}
        self._missing_class_ids: set[int] | None = None

    def try_reply(self) -> bool:
        """Send the reply if all classes are counted, else return False."""
        if self._missing_class_ids is None:
            classes = self._list_remote_classes()
            self._missing_class_ids = {cls.class_id for cls in classes}
            for cls in classes:
                cls.count_messages(partial(self._on_counted, cls.class_id))
        if self._missing_class_ids:
            return self._session.is_closed
        return self._send_reply(self._outcome_by_class)

    def _on_counted(self, class_id: int, outcome: RemoteCountOutcome) -> None:
        assert self._missing_class_ids is not None, "a count arrived that was not requested"
        self._outcome_by_class[class_id] = outcome
        self._missing_class_ids.discard(class_id)
        self._session.outbox.resume_replies()


class RemoteQuery:
    """Deferred reply to a fetch or purge request for a remote class."""

    def __init__(
        self,
        remote_class: RemoteStorage,
        session: Session,
        event: FetchRequested | PurgeRequested,
        on_refused: Callable[[RemoteProtocolError], None],
    ) -> None:
        self._remote_class = remote_class
        self._session = session
        self._event = event
        self._on_refused = on_refused
        self._is_query_sent = False
        self._outcome: RemoteFetchOutcome | int | None = None

    def try_reply(self) -> bool:
        """Send the reply if the outcome is known, else return False."""
        if not self._is_query_sent:
            self._is_query_sent = True
            self._send_query()
        match self._outcome:
            case None:
                return self._session.is_closed
            case RemoteProtocolError() as error:
                self._on_refused(error)
            case RemoteFetchResult() as fetch_result:
                self._send_fetch_reply(fetch_result)
            case int(count):
                self._session.outbox.queue_reply(
                    frames.encode(
                        frames.PURGE,
                        class_id=self._remote_class.class_id,
                        message_id=self._event.request_number,
                        content=PurgeReply(purged=count).encode(),
                    )
                )
        return True

    def _send_query(self) -> None:
        request = self._event.body
        if isinstance(request, FetchRequest):
            self._remote_class.fetch_messages(request, self._on_outcome)
        else:
            self._remote_class.purge_messages(request.first, request.last, self._on_outcome)

    def _on_outcome(self, outcome: RemoteFetchOutcome | int) -> None:
        self._outcome = outcome
        self._session.outbox.resume_replies()

    def _send_fetch_reply(self, fetch_result: RemoteFetchResult) -> None:
        request = self._event.body
        assert isinstance(request, FetchRequest)
        ring = Ring(
            class_id=self._remote_class.class_id,
            messages_max=1 << 30,
            bytes_max=1 << 40,
            budget=MemoryBudget(1 << 40),  # The ring lives only until the reply is queued.
        )
        ring.set_next_sequence(fetch_result.first_sequence)
        for batch in fetch_result.batches:
            ring.append(batch, 0)
        first = fetch_result.first_sequence
        last = min(ring.head, first + request.count)
        if request.times:
            last = min(last, first + FETCH_TIMES_MAX)
        pieces: list[memoryview] = []
        next_sequence, free_bytes = first, FETCH_BYTES_MAX
        while next_sequence < last and free_bytes > 0:
            piece, next_sequence = ring.view_frames(next_sequence, last, free_bytes)
            pieces.append(piece)
            free_bytes -= len(piece)
        times: list[tuple[int, float]] = []
        if request.times:
            times = list(enumerate(fetch_result.accepted_times[: next_sequence - first], first))
        reply = FetchReply(
            first=first,
            next=next_sequence,
            floor=fetch_result.floor,
            head=fetch_result.head,
            times=times,
            now=fetch_result.read_at if request.times else 0,
        )
        frame = frames.encode(
            frames.FETCH,
            class_id=self._remote_class.class_id,
            message_id=self._event.request_number,
            content=reply.encode(),
        )
        self._session.outbox.queue_fetch_reply(self._remote_class.class_id, pieces, frame)
