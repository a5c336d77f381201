"""A class whose messages are kept by a JetStream cluster.

Rule 1: the class's ring holds only what publishers have said and the cluster has not been handed
yet; whoever subscribes has a ring of its own, which a feed fills.
Rule 2: what the cluster cannot do is refused with a sentence, never left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass, TimeIndex
from simplebus.core.message_class.remote_storage import (
    RemoteCountOutcome,
    RemoteFetchOutcome,
    RemoteFetchResult,
    RemoteFetchResult,
    RemotePurgeOutcome,
)
from simplebus.core.protocol.requests import FetchRequest, Start, SubscribeRequest
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import PositionHandover
from simplebus.core.ring.ring import Ring
from simplebus.core.settings import FullPolicy, Retention
from simplebus.core.store.store import Store
from simplebus.core.store.store import Store
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.selection import Ranges
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream.stream_clock import StreamClock

FEED_MESSAGES_MAX = 128 * 1024
FEED_BYTES_MAX = 64 * 1024 * 1024
"""What one subscription may hold at a door."""


class AcceptanceTimes(Protocol):
    """Acceptance times of the messages that were fetched for a position."""

    def accepted_at(self, number: int) -> float:
        """Return when the stream stored a message: seconds since 1970, 0.0 if unknown."""
        ...


class StoredMessages(Protocol):
    """Access to the messages that are stored in the streams."""

    async def look(self, class_id: int, wish: FetchRequest, frame_bytes: int) -> RemoteFetchResult:
        """Return consecutive messages of a class."""
        ...

    async def strike(self, class_id: int, first: int, last: int | None) -> tuple[int, int, int]:
        """Remove messages. Returns how many were removed and the range first..last-1."""
        ...


class AcceptanceTimes(Protocol):
    """Acceptance times of the messages that were fetched for a position."""

    def accepted_at(self, number: int) -> float:
        """Return when the stream stored a message: seconds since 1970, 0.0 if unknown."""
        ...


class StoredMessages(Protocol):
    """Access to the messages that are stored in the streams."""

    async def look(self, class_id: int, wish: FetchRequest, frame_bytes: int) -> RemoteFetchResult:
        """Return consecutive messages of a class."""
        ...

    async def strike(self, class_id: int, first: int, last: int | None) -> tuple[int, int, int]:
        """Remove messages. Returns how many were removed and the range first..last-1."""
        ...


Begin = Callable[["RemoteClass", BrokerSubscription, "str | Start", bool], None]
"""Called with a position that is new, and where it begins if the cluster does not know it; or in
any case."""
End = Callable[["RemoteClass", BrokerSubscription, bool], None]
"""Called with a position that nobody here has any more, and whether it is to be forgotten."""

Ask = Callable[
    [
        "RemoteClass",
        Callable[[StoredMessages], Awaitable[RemoteFetchOutcome | RemotePurgeOutcome]],
        Callable[[Any], None],
    ],
    None,
]
"""Called with what finds an answer in the class's stream, and with whom to tell it."""


class RemoteClass(MessageClass):
    """See the module's law."""

    is_remote = True

    def __init__(
        self,
        ring: Ring,
        retention: Retention,
        full_policy: FullPolicy = FullPolicy.BLOCK,
        *,
        begin: Begin,
        end: End,
        ask: Ask,
        struck: Callable[[RemoteClass, int, int], None],
        feeds: Mapping[BrokerSubscription, AcceptanceTimes],
        coming: Callable[[RemoteClass, BrokerSubscription, Callable[[], None]], bool],
        buried: Callable[[BrokerSubscription, Ranges, int], None],
        count: Callable[[int, Callable[[RemoteCountOutcome], None]], None],
        refused: Callable[[int], str],
        frame_bytes: int,
    ) -> None:
        """`struck` is called with messages of the stream that are purged, first..last-1;
        `feeds` are those of all positions here; `coming` is what
        `has_come` does, `buried` what `has_buried` does, `count` what `count` does, and
        `refused` says what `refused` is."""
        super().__init__(ring, retention, full_policy)
        self.time_index = _NoTimes()
        self.clock = StreamClock()
        self.remote_storage = self
        self._ask = ask
        self._struck = struck
        self._feeds = feeds
        self._coming = coming
        self._buried = buried
        self._count = count
        self._refused = refused
        self._frame_bytes = frame_bytes
        self._begin = begin
        self._end = end
        self._start: str | Start = "waiting"
        self._seeks = False
        self._forgets = False
        self._messages_max = ring.messages_max
        """How many its ring may have, when it is open."""
        self.touched: Callable[[RemoteClass], None] = lambda cls: None
        """Called when positions of it may have moved."""
        self.begun: dict[BrokerSubscription, bool] = {}
        """The positions that the cluster has, and whether it had them before."""

    @property
    def unavailable_reason(self) -> str:
        return self._refused(self.class_id)

    @property
    def has_lagging_consumer(self) -> bool:
        return False

    def set_retention(self, retention: Retention) -> None:
        """That is the stream's business."""
        self.retention = retention
        self._has_retention = False

    def trim(self, now: float) -> None:
        super().trim(now)
        self.touched(self)

    def accepted_at(self, position: BrokerSubscription, sequence: int) -> float:
        """When the stream took it, by its own clock."""
        feed = self._feeds.get(position)
        return 0.0 if feed is None else feed.accepted_at(sequence)

    def on_dead_lettered(
        self, position: BrokerSubscription, ranges: Ranges, dead_letter_class_id: int
    ) -> None:
        self._buried(position, ranges, dead_letter_class_id)

    def floor(self) -> int:
        """What is to be handed over is copied when it comes."""
        return self.ring.head

    def ring_for_new_position(self) -> Ring:
        ring = Ring(
            class_id=self.class_id,
            messages_max=FEED_MESSAGES_MAX,
            bytes_max=min(FEED_BYTES_MAX, self.ring.bytes_max),
            budget=self.ring.budget,
        )
        self.channels.borrowing_columns[ring.columns] = None
        return ring

    def fetch_messages(
        self, request: FetchRequest, on_fetched: Callable[[RemoteFetchOutcome], None]
    ) -> None:
        """See `Elsewhere`."""

        async def find(stored: StoredMessages) -> RemoteFetchOutcome:
            return await stored.look(self.class_id, request, self._frame_bytes)

        self._ask(self, find, on_fetched)

    def purge_messages(
        self, first: int, last: int | None, on_purged: Callable[[RemotePurgeOutcome], None]
    ) -> None:
        """See `Elsewhere`."""

        async def find(stored: StoredMessages) -> RemotePurgeOutcome:
            count, begin, end = await stored.strike(self.class_id, first, last)
            self._struck(self, begin, end)
            return count

        self._ask(self, find, on_purged)

    def count_messages(self, on_counted: Callable[[RemoteCountOutcome], None]) -> None:
        """See `Elsewhere`."""
        self._count(self.class_id, on_counted)

    def has_caught_up(self, position: BrokerSubscription, on_caught_up: Callable[[], None]) -> bool:
        """See `Elsewhere`."""
        return self._coming(self, position, on_caught_up)

    def check_subscribe_request(self, request: SubscribeRequest) -> None:
        """Raises RemoteProtocolError (bad_request) for what the cluster cannot do."""
        if request.by_key:
            what = "by_key: members at several doors would not know of each other's keys"
        elif request.slow != "block":
            what = f"slow = {request.slow!r}: what waits is not counted at a door"
        elif request.start == "last_values":
            what = "last_values: no door sees them all"
        else:
            self._seeks = request.seek
            return
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, f"a door before a JetStream cluster does not know {what}"
        )

    def create_window(
        self, start: str | Start, channel_filter: ChannelFilter | None = None, now: float = 0.0
    ) -> tuple[AckWindow, PositionHandover]:
        if not (start in ("waiting", "new", "earliest", "last") or isinstance(start, Start)):
            return super().create_window(start, channel_filter, now)  # Which raises.
        self._start = start
        return AckWindow(floor=0), PositionHandover()

    def add_position(self, position: BrokerSubscription) -> None:
        super().add_position(position)
        seeks, self._seeks = self._seeks, False
        self._begin(self, position, self._start, seeks)

    def forget_position(self, position: BrokerSubscription) -> None:
        """The next one to be removed goes for good."""
        self._forgets = True

    def remove_position(self, position: BrokerSubscription) -> None:
        forgets, self._forgets = self._forgets, False
        super().remove_position(position)
        self.channels.borrowing_columns.pop(position.ring.columns, None)
        self.begun.pop(position, None)
        self._end(self, position, forgets)

    def has_remote_position(self, position: BrokerSubscription) -> bool | None:
        """Whether the cluster had it before; None while that is not known."""
        return self.begun.get(position)

    def _add_to_backlog(self, position: BrokerSubscription) -> None:
        pass  # What waits is the stream's.

    def check_invariants(self) -> None:
        pass

    def shut(self) -> None:
        """Have publishers wait for room."""
        if self.ring.messages_max:
            self._messages_max, self.ring.messages_max = self.ring.messages_max, 0

    def open_up(self) -> None:
        """Let them go on."""
        self.ring.messages_max = self.ring.messages_max or self._messages_max


def shut(store: Store, full: set[int], were: set[int]) -> set[int]:
    """Have publishers of these classes wait, and those of others go on that were shut. Returns
    which are."""
    classes = store.classes
    now = {each for each in full if classes[each].full_policy is FullPolicy.BLOCK}
    for class_id in now | were:
        cls = classes[class_id]
        assert isinstance(cls, RemoteClass)
        if class_id in now:
            cls.shut()
        else:
            cls.open_up()
            store.trim_class(cls)
    return now


class _NoTimes(TimeIndex):
    """Sequences here are of many rings: when one was accepted is not known by it."""

    def record(self, now: float, sequence: int) -> None:
        self.next_step_time = float("inf")
