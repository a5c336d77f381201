"""Message class whose messages are stored in a JetStream stream.

The ring of the class holds only accepted messages that were not passed to the publisher yet. Every
position has a separate ring, which a feed fills. Requests that a cluster cannot satisfy are
refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import AnyGroup
from simplebus.core.message_class.message_class import MessageClass, TimeIndex
from simplebus.core.message_class.remote_storage import (
    RemoteCountOutcome,
    RemoteFetchOutcome,
    RemoteFetchResult,
    RemotePurgeOutcome,
)
from simplebus.core.protocol.requests import FetchRequest, Start, SubscribeRequest
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import PositionHandover
from simplebus.core.ring.ring import Ring
from simplebus.core.settings import FullPolicy, Retention
from simplebus.core.store.store import Store
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import Ranges
from simplebus.jetstream.stream_clock import StreamClock

FEED_MESSAGES_MAX = 128 * 1024
FEED_BYTES_MAX = 64 * 1024 * 1024
"""Limits of the messages that a position may hold on this server."""


class AcceptanceTimes(Protocol):
    """Acceptance times of the messages that were fetched for a position."""

    def accepted_at(self, number: int) -> float:
        """Return when the stream stored a message: seconds since 1970, 0.0 if unknown."""
        ...


class StoredMessages(Protocol):
    """Access to the messages that are stored in the streams."""

    async def fetch(
        self, class_id: int, request: FetchRequest, frame_bytes: int
    ) -> RemoteFetchResult:
        """Return consecutive messages of a class."""
        ...

    async def purge(self, class_id: int, first: int, last: int | None) -> tuple[int, int, int]:
        """Remove messages. Returns how many were removed and the range first..last-1."""
        ...


OpenPosition = Callable[["RemoteClass", Position, "str | Start", bool], None]
"""Called with a new position, its start, and True if it must start there even if it exists."""
ClosePosition = Callable[["RemoteClass", Position, bool], None]
"""Called with a position without subscriptions on this server, and True if it is to be deleted."""

QueryStream = Callable[
    [
        "RemoteClass",
        Callable[[StoredMessages], Awaitable[RemoteFetchOutcome | RemotePurgeOutcome]],
        Callable[[Any], None],
    ],
    None,
]
"""Called with a query of the class's stream and the receiver of its result."""


class RemoteClass(MessageClass):
    """Message class of a stateless server."""

    is_remote = True

    def __init__(
        self,
        ring: Ring,
        retention: Retention,
        full_policy: FullPolicy = FullPolicy.BLOCK,
        *,
        open_position: OpenPosition,
        close_position: ClosePosition,
        query_stream: QueryStream,
        on_purged: Callable[[RemoteClass, int, int], None],
        feeds: Mapping[Position, AcceptanceTimes],
        check_caught_up: Callable[[RemoteClass, Position, Callable[[], None]], bool],
        on_dead_lettered: Callable[[Position, Ranges, int], None],
        count_messages: Callable[[int, Callable[[RemoteCountOutcome], None]], None],
        get_refusal: Callable[[int], str],
        frame_bytes: int,
    ) -> None:
        """Create a class that delegates storage to the backend.

        Args:
            on_purged: Called with a purged range of the stream, first..last-1.
            feeds: Feeds of all positions of this server.
            check_caught_up: Implementation of `has_caught_up`.
            get_refusal: Returns why the stream refuses messages; empty if it does not.
            frame_bytes: Largest frame that this server sends.
        """
        super().__init__(ring, retention, full_policy)
        self.time_index = _NoTimes()
        self.clock = StreamClock()
        self.remote_storage = self
        self._query_stream = query_stream
        self._on_purged = on_purged
        self._feeds = feeds
        self._check_caught_up = check_caught_up
        self._on_dead_lettered = on_dead_lettered
        self._count_messages = count_messages
        self._get_refusal = get_refusal
        self._frame_bytes = frame_bytes
        self._open_position = open_position
        self._close_position = close_position
        self._start: str | Start = "waiting"
        self._is_seek = False
        self._is_forgotten = False
        self._messages_max = ring.messages_max
        """Capacity of the ring while publishing is not paused."""
        self.on_positions_changed: Callable[[RemoteClass], None] = lambda cls: None
        """Called when positions of the class may have advanced."""
        self.existed_before: dict[Position, bool] = {}
        """Positions with a consumer, and True if the consumer existed before they were opened."""

    @property
    def unavailable_reason(self) -> str:
        return self._get_refusal(self.class_id)

    @property
    def has_lagging_consumer(self) -> bool:
        return False

    def set_retention(self, retention: Retention) -> None:
        """Ignore retention: the stream decides."""
        self.retention = retention
        self._has_retention = False

    def trim(self, now: float) -> None:
        super().trim(now)
        self.on_positions_changed(self)

    def accepted_at(self, position: Position, sequence: int) -> float:
        """Return when the stream stored a message, by the clock of its server."""
        feed = self._feeds.get(position)
        return 0.0 if feed is None else feed.accepted_at(sequence)

    def on_dead_lettered(
        self, position: Position, ranges: Ranges, dead_letter_class_id: int
    ) -> None:
        self._on_dead_lettered(position, ranges, dead_letter_class_id)

    def floor(self) -> int:
        """Return the head: messages in the ring are copied when they are published."""
        return self.ring.head

    def ring_for_new_position(self) -> Ring:
        ring = Ring(
            class_id=self.class_id,
            messages_max=FEED_MESSAGES_MAX,
            bytes_max=min(FEED_BYTES_MAX, self.ring.bytes_max),
            budget=self.ring.budget,
        )
        self.channels.borrowing_counts[ring.channel_counts] = None
        return ring

    def fetch_messages(
        self, request: FetchRequest, on_fetched: Callable[[RemoteFetchOutcome], None]
    ) -> None:

        async def query(reader: StoredMessages) -> RemoteFetchOutcome:
            return await reader.fetch(self.class_id, request, self._frame_bytes)

        self._query_stream(self, query, on_fetched)

    def purge_messages(
        self, first: int, last: int | None, on_purged: Callable[[RemotePurgeOutcome], None]
    ) -> None:

        async def query(reader: StoredMessages) -> RemotePurgeOutcome:
            count, begin, end = await reader.purge(self.class_id, first, last)
            self._on_purged(self, begin, end)
            return count

        self._query_stream(self, query, on_purged)

    def count_messages(self, on_counted: Callable[[RemoteCountOutcome], None]) -> None:
        self._count_messages(self.class_id, on_counted)

    def has_caught_up(self, position: Position, on_caught_up: Callable[[], None]) -> bool:
        return self._check_caught_up(self, position, on_caught_up)

    def check_subscribe_request(self, request: SubscribeRequest) -> None:
        """Raise RemoteProtocolError (bad_request) if the cluster cannot satisfy the request."""
        if request.by_key:
            option = "by_key: members at other servers may receive the same key"
        elif request.slow != "block":
            option = f"slow = {request.slow!r}: the server does not count the backlog"
        elif request.start == "last_values":
            option = "last_values: no server sees every message"
        else:
            self._is_seek = request.seek
            return
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, f"a server with --engine does not support {option}"
        )

    def create_window(
        self, start: str | Start, channel_filter: ChannelFilter | None = None, now: float = 0.0
    ) -> tuple[AckWindow, Position | PositionHandover]:
        if not (start in ("waiting", "new", "earliest", "last") or isinstance(start, Start)):
            return super().create_window(start, channel_filter, now)  # Raises.
        self._start = start
        return AckWindow(floor=0), PositionHandover()

    def add_position(self, position: Position, group: AnyGroup | None = None) -> None:
        super().add_position(position, group)
        is_seek, self._is_seek = self._is_seek, False
        self._open_position(self, position, self._start, is_seek)

    def forget_position(self, position: Position) -> None:
        """Delete the next removed position in the cluster, too."""
        self._is_forgotten = True

    def remove_position(self, position: Position) -> None:
        is_forgotten, self._is_forgotten = self._is_forgotten, False
        super().remove_position(position)
        self.channels.borrowing_counts.pop(position.ring.channel_counts, None)
        self.existed_before.pop(position, None)
        self._close_position(self, position, is_forgotten)

    def has_remote_position(self, position: Position) -> bool | None:
        """Return True if the position's consumer existed before; None if that is not known yet."""
        return self.existed_before.get(position)

    def _add_to_backlog(self, position: Position) -> None:
        pass  # The backlog is in the stream.

    def check_invariants(self) -> None:
        pass

    def pause_publishing(self) -> None:
        """Make publishers wait for space."""
        if self.ring.messages_max:
            self._messages_max, self.ring.messages_max = self.ring.messages_max, 0

    def resume_publishing(self) -> None:
        """Accept messages again."""
        self.ring.messages_max = self.ring.messages_max or self._messages_max


def pause_full_classes(store: Store, full: set[int], paused: set[int]) -> set[int]:
    """Pause publishing to the full classes and resume the paused classes that have space again.

    Returns:
        The classes that are paused now.
    """
    classes = store.classes
    now_paused = {
        class_id for class_id in full if classes[class_id].full_policy is FullPolicy.BLOCK
    }
    for class_id in now_paused | paused:
        cls = classes[class_id]
        assert isinstance(cls, RemoteClass)
        if class_id in now_paused:
            cls.pause_publishing()
        else:
            cls.resume_publishing()
            store.trim_class(cls)
    return now_paused


class _NoTimes(TimeIndex):
    """Time index without entries: the positions' rings number messages independently."""

    def record(self, now: float, sequence: int) -> None:
        self.next_step_time = float("inf")
