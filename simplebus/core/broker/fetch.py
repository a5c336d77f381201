"""Handles Fetch and Purge requests.

Fetch reads stored messages by sequence, from memory or from disk, and moves no position. The Fetch
requests of a session are answered one by one: each after the reply to the previous one was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from simplebus.core.authorization.session_permissions import check_fetch, check_right, is_visible
from simplebus.core.clock import BrokerClock
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import (
    FETCH_BYTES_MAX,
    FETCH_PURGED_MAX,
    FETCH_TIMES_MAX,
    PURGED_POSITIONS_PER_TURN,
    SCAN_MESSAGES_MAX,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.purge import check_range_limit, purge_in_parts
from simplebus.core.message_class.remote_storage import RemoteQuery, RemoteStorage
from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import FetchRequested, PurgeRequested
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import FetchReply, FetchRequest, PurgeReply
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from simplebus.core.session.session import Session
from simplebus.core.store.store import Store
from simplebus.core.subscription.delayed_wakeups import NEVER, DelayedWakeups
from simplebus.core.users.permissions import AdminRight

PieceT = TypeVar("PieceT")


class StoredMessageReader:
    """Reads stored messages for Fetch requests of one broker."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def fetch(self, session: Session, event: FetchRequested, cls: MessageClass) -> None:
        """Queue a Fetch request of a session."""
        session.outbox.defer_reply(_PendingFetch(self, session, event, cls).try_reply)

    def fetch_from_memory(
        self, cls: MessageClass, request: FetchRequest
    ) -> tuple[FetchReply, list[FrameBatch]] | None:
        """Return stored messages, for another part of the server. None if they must be read from
        disk.

        The frames are views, valid until the ring changes.
        """
        head = self.visible_head(cls)
        first, last = _requested_range(cls, request, head)
        if first < min(cls.ring.floor, last):
            return None

        def read_piece(sequence: int, last: int, space_bytes: int) -> tuple[FrameBatch, int, int]:
            batch, next_sequence = cls.ring.view_batch(sequence, last, space_bytes)
            return batch, next_sequence, batch.data.size

        return _build_reply(cls, first, last, head, read_piece, self.now if request.times else None)

    @property
    def now(self) -> float:
        """The broker's clock, in seconds since 1970."""
        return self._store.clock.now

    def visible_head(self, cls: MessageClass) -> int:
        """Return the end of the messages that a Fetch may return.

        Messages that are not durable may be lost by a crash, and readers would not fetch them
        again.
        """
        head, commit_log = cls.ring.head, self._store.commit_log
        return (
            head
            if commit_log is None
            else max(commit_log.durable_head(cls.class_id, head), cls.first_sequence)
        )

    def read_spilled(self, spill_read: SpillRead) -> None:
        """Start a read from disk."""
        assert self._store.spill_manager is not None
        self._store.spill_manager.request_read(spill_read)

    def build_rings(self, spilled_ranges: Sequence[SpilledRange], cls: MessageClass) -> list[Ring]:
        """Return messages read from disk as rings, one for each range without a gap."""
        spilling = self._store.spill_manager
        assert spilling is not None
        rings: list[Ring] = []
        for spilled_range in spilled_ranges:
            if not spilled_range.frames:
                continue
            if not rings or rings[-1].head != spilled_range.first:
                budget = MemoryBudget(1 << 40)  # Not the broker's: the ring lives for one reply.
                rings.append(
                    Ring(
                        class_id=cls.class_id,
                        messages_max=1 << 30,
                        bytes_max=1 << 40,
                        budget=budget,
                    )
                )
                rings[-1].set_next_sequence(spilled_range.first)
            for batch in spilling.split_range(spilled_range):
                rings[-1].append(batch, 0)
        return rings


class _PendingFetch:
    """Fetch request that is not answered yet."""

    def __init__(
        self,
        fetcher: StoredMessageReader,
        session: Session,
        event: FetchRequested,
        cls: MessageClass,
    ) -> None:
        self._fetcher = fetcher
        self._session = session
        self._event = event
        self._cls = cls
        self._spilled_rings: list[Ring] | None = None
        """Messages that were read from disk."""
        self._spilled_end = 0
        """End of the sequences that were read from disk."""

    def try_reply(self) -> bool:
        """Send the reply. Returns False if the messages must be read from disk first."""
        cls, event, request = self._cls, self._event, self._event.body
        head = self._fetcher.visible_head(cls)
        first, last = _requested_range(cls, request, head)
        ring = cls.ring
        if first < min(ring.floor, last):
            if self._spilled_rings is None:
                until = min(last, ring.floor)
                read = SpillRead(
                    cls.class_id, cls.label, first, until, FETCH_BYTES_MAX, self._on_read
                )
                self._fetcher.read_spilled(read)
                return False
            # Damaged messages are skipped; a reply contains no gap.
            ring = next(
                (spilled_ring for spilled_ring in self._spilled_rings if spilled_ring.head > first),
                ring,
            )
            if ring is cls.ring:
                first = last = max(first, min(self._spilled_end, ring.floor))
            else:
                first = max(first, ring.floor)
                last = max(first, min(last, ring.head))

        def read_piece(sequence: int, last: int, space_bytes: int) -> tuple[memoryview, int, int]:
            piece, next_sequence = ring.view_frames(sequence, last, space_bytes)
            return piece, next_sequence, len(piece)

        now = self._fetcher.now if request.times else None
        reply, pieces = _build_reply(cls, first, last, head, read_piece, now)
        frame = frames.encode(
            frames.FETCH,
            class_id=cls.class_id,
            message_id=event.request_number,
            content=reply.encode(),
        )
        self._session.outbox.queue_fetch_reply(cls.class_id, pieces, frame)
        return True

    def _on_read(self, spilled_ranges: Sequence[SpilledRange]) -> None:
        if spilled_ranges:
            self._spilled_end = spilled_ranges[-1].first + spilled_ranges[-1].message_count
            self._spilled_rings = self._fetcher.build_rings(spilled_ranges, self._cls)
        self._session.outbox.resume_replies()


class PendingPurge:
    """Purge request that is not answered yet.

    It is a `WakeupTarget`, so that a purge that has begun is completed without its session.
    """

    scanned_count = SCAN_MESSAGES_MAX // 4
    """Limits how many purges continue in one turn."""

    def __init__(
        self,
        session: Session,
        parts: Iterator[None],
        delayed_wakeups: DelayedWakeups,
        clock: BrokerClock,
    ) -> None:
        """Create a request. `parts` purge the messages and queue the reply."""
        self._session = session
        self._parts = parts
        self._delayed_wakeups = delayed_wakeups
        self._clock = clock
        self._is_begun = self._is_complete = False

    def try_reply(self) -> bool:
        """Begin to purge. Returns False if the reply is not queued yet."""
        if not self._is_begun:
            self._is_begun = True
            self._process_part()
        return self._is_complete

    @property
    def next_wakeup(self) -> float:
        return NEVER if self._is_complete else self._clock.now

    def handle_wakeup(self) -> bool:
        self._process_part()
        if self._is_complete and not self._session.is_closed:
            self._session.outbox.resume_replies()
        return True

    def _process_part(self) -> None:
        """Process the next part; without a connection, all parts."""
        for _ in self._parts:
            if self._session.can_split_reads:
                self._delayed_wakeups.schedule_wakeup(self._clock.now, self)
                return
        self._is_complete = True


def _requested_range(cls: MessageClass, request: FetchRequest, head: int) -> tuple[int, int]:
    """Return the requested sequences, limited to stored messages."""
    first = (
        request.first if request.time is None else cls.time_index.find_sequence(request.time, head)
    )
    first = min(max(first, cls.first_sequence), head)
    return first, min(first + request.count, head)


def _build_reply(
    cls: MessageClass,
    first: int,
    last: int,
    head: int,
    read_piece: Callable[[int, int, int], tuple[PieceT, int, int]],
    now: float | None,
) -> tuple[FetchReply, list[PieceT]]:
    """Return the reply and its frames, as many as one reply may have.

    Args:
        cls: The class.
        first: First sequence.
        last: Last sequence, exclusive.
        head: End of the messages that a Fetch may return.
        read_piece: Returns frames from a sequence on, the next sequence, and their size in bytes.
        now: Current time, if times were requested, else None.
    """
    time_steps: list[tuple[int, float]] = []
    if now is not None:
        time_steps = cls.time_index.list_steps(first, last, max_count=FETCH_TIMES_MAX + 1)
        if len(time_steps) > FETCH_TIMES_MAX:
            last, _ = time_steps.pop()
    purged: list[tuple[int, int]] = []
    if cls.purged_sequences:
        purged = cls.purged_sequences.ranges_within(first, last)
        if len(purged) > FETCH_PURGED_MAX:
            last, _ = purged[FETCH_PURGED_MAX]
    pieces: list[PieceT] = []
    sequence, space_bytes = first, FETCH_BYTES_MAX
    while sequence < last and space_bytes > 0:
        piece, sequence, size = read_piece(sequence, last, space_bytes)
        pieces.append(piece)
        space_bytes -= size
    while time_steps and time_steps[-1][0] >= sequence:
        time_steps.pop()
    reply = FetchReply(
        first=first,
        next=sequence,
        floor=cls.first_sequence,
        head=head,
        times=time_steps,
        now=now or 0,
        purged=[(a, min(b, sequence)) for a, b in purged if a < sequence],
    )
    return reply, pieces


class FetchHandler:
    """Handles Fetch and Purge requests. Raises RemoteProtocolError (unknown_class)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._fetcher = StoredMessageReader(store)

    def fetch(
        self,
        session: Session,
        event: FetchRequested,
        on_refused: Callable[[RemoteProtocolError], None],
    ) -> None:
        """Queue a Fetch request. `on_refused` is called if it fails later."""
        cls = self._require_visible_class(session, event.class_id)
        check_fetch(session, cls)
        if cls.remote_storage is None:
            self._fetcher.fetch(session, event, cls)
        else:
            self._request_remote(cls.remote_storage, session, event, on_refused)

    def fetch_from_memory(
        self, class_id: int, request: FetchRequest
    ) -> tuple[FetchReply, list[FrameBatch]] | None:
        """Return stored messages, or None if they are on disk or in remote storage."""
        cls = self._store.require_class(class_id)
        return self._fetcher.fetch_from_memory(cls, request) if cls.remote_storage is None else None

    def _request_remote(
        self,
        remote_class: RemoteStorage,
        session: Session,
        event: FetchRequested | PurgeRequested,
        on_refused: Callable[[RemoteProtocolError], None],
    ) -> None:
        session.outbox.defer_reply(RemoteQuery(remote_class, session, event, on_refused).try_reply)

    def purge_if_remote(
        self,
        session: Session,
        event: PurgeRequested,
        on_refused: Callable[[RemoteProtocolError], None],
    ) -> bool:
        """Forward a Purge request to remote storage. Returns False if the class is stored here."""
        cls = self._require_visible_class(session, event.class_id)
        if cls.remote_storage is None:
            return False
        check_right(session, AdminRight.PURGE, cls)
        self._request_remote(cls.remote_storage, session, event, on_refused)
        return True

    def check_purge(self, session: Session, event: PurgeRequested) -> int:
        """Check the permission to purge. Returns the end of the requested range."""
        cls = self._require_visible_class(session, event.class_id)
        check_right(session, AdminRight.PURGE, cls)
        head, last = cls.ring.head, event.body.last
        return head if last is None else min(last, head)

    def purge(self, session: Session, event: PurgeRequested, end: int) -> Iterator[None]:
        """Purge stored messages up to `end`, for every position, in parts.

        Raises:
            RemoteProtocolError: (unknown_class, memory_limit).
        """
        store, cls = self._store, self._store.require_class(event.class_id)
        check_range_limit(cls, event.body.first, end)
        count = yield from purge_in_parts(cls, event.body.first, end, store.commit_log)
        store.trim_class(cls)
        for number, position in enumerate(list(cls.positions), 1):
            cls.enqueue_position(position)
            if number % PURGED_POSITIONS_PER_TURN == 0:
                yield
        reply = PurgeReply(purged=count)
        self._send_reply(
            session,
            frames.encode(
                frames.PURGE,
                class_id=event.class_id,
                message_id=event.request_number,
                content=reply.encode(),
            ),
        )

    def _require_visible_class(self, session: Session, class_id: int) -> MessageClass:
        """Return a class that may be revealed to the session. Raises RemoteProtocolError."""
        cls = self._store.require_class(class_id)
        if not is_visible(session, cls):
            raise self._store.unknown_class_error(class_id)
        return cls

    def _send_reply(self, session: Session, frame: bytes) -> None:
        session.outbox.queue_reply(frame)
