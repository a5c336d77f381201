"""A class whose messages are kept by a JetStream cluster.

Rule 1: the class's ring holds only what publishers have said and the cluster has not been handed
yet; whoever subscribes has a ring of its own, which a feed fills.
Rule 2: what the cluster cannot do is refused with a sentence, never left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass, TimeIndex
from simplebus.core.message_class.remote_storage import Counted, Found, Purged
from simplebus.core.protocol.requests import FetchRequest, Start, SubscribeRequest
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import Left
from simplebus.core.ring.ring import Ring
from simplebus.core.settings import FullPolicy, Keep
from simplebus.core.subscription.channel_filter import Wanted
from simplebus.core.subscription.selection import Ranges
from simplebus.core.subscription.subscription import Subscription
from simplebus.jetstream.stream_clock import StreamClock

if TYPE_CHECKING:
    from simplebus.core.store.store import Store
    from simplebus.jetstream.consume.feed import Feed
    from simplebus.jetstream.fetch import Stored

FEED_MESSAGES_MAX = 128 * 1024
FEED_BYTES_MAX = 64 * 1024 * 1024
"""What one subscription may hold at a door."""

Begin = Callable[["RemoteClass", Subscription, "str | Start", bool], None]
"""Called with a position that is new, and where it begins if the cluster does not know it; or in
any case."""
End = Callable[["RemoteClass", Subscription, bool], None]
"""Called with a position that nobody here has any more, and whether it is to be forgotten."""

Ask = Callable[
    ["RemoteClass", Callable[["Stored"], Awaitable[Found | Purged]], Callable[[Any], None]], None
]
"""Called with what finds an answer in the class's stream, and with whom to tell it."""


class RemoteClass(MessageClass):
    """See the module's law."""

    is_remote = True

    def __init__(
        self,
        ring: Ring,
        keep: Keep,
        policy: FullPolicy = FullPolicy.BLOCK,
        *,
        begin: Begin,
        end: End,
        ask: Ask,
        struck: Callable[[RemoteClass, int, int], None],
        feeds: Mapping[Subscription, Feed],
        coming: Callable[[RemoteClass, Subscription, Callable[[], None]], bool],
        buried: Callable[[Subscription, Ranges, int], None],
        count: Callable[[int, Callable[[Counted], None]], None],
        refused: Callable[[int], str],
        frame_bytes: int,
    ) -> None:
        """`struck` is called with messages of the stream that are purged, first..last-1;
        `feeds` are those of all positions here; `coming` is what
        `has_come` does, `buried` what `has_buried` does, `count` what `count` does, and
        `refused` says what `refused` is."""
        super().__init__(ring, keep, policy)
        self.times = _NoTimes()
        self.clock = StreamClock()
        self.elsewhere = self
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
        self.begun: dict[Subscription, bool] = {}
        """The positions that the cluster has, and whether it had them before."""

    @property
    def refused(self) -> str:
        return self._refused(self.class_id)

    @property
    def is_awaited(self) -> bool:
        return False

    def is_to_keep(self, keep: Keep) -> None:
        """That is the stream's business."""
        self.keep = keep
        self._keeps = False

    def release(self, now: float) -> None:
        super().release(now)
        self.touched(self)

    def accepted_at(self, position: Subscription, sequence: int) -> float:
        """When the stream took it, by its own clock."""
        feed = self._feeds.get(position)
        return 0.0 if feed is None else feed.accepted_at(sequence)

    def has_buried(self, position: Subscription, ranges: Ranges, dead: int) -> None:
        self._buried(position, ranges, dead)

    def floor(self) -> int:
        """What is to be handed over is copied when it comes."""
        return self.ring.head

    def new_ring(self) -> Ring:
        ring = Ring(
            class_id=self.class_id,
            messages_max=FEED_MESSAGES_MAX,
            bytes_max=min(FEED_BYTES_MAX, self.ring.bytes_max),
            budget=self.ring.budget,
        )
        self.channels.lends[ring.columns] = None
        return ring

    def look(self, wish: FetchRequest, tell: Callable[[Found], None]) -> None:
        """See `Elsewhere`."""

        async def find(stored: Stored) -> Found:
            return await stored.look(self.class_id, wish, self._frame_bytes)

        self._ask(self, find, tell)

    def strike(self, first: int, last: int | None, tell: Callable[[Purged], None]) -> None:
        """See `Elsewhere`."""

        async def find(stored: Stored) -> Purged:
            count, begin, end = await stored.strike(self.class_id, first, last)
            self._struck(self, begin, end)
            return count

        self._ask(self, find, tell)

    def count(self, tell: Callable[[Counted], None]) -> None:
        """See `Elsewhere`."""
        self._count(self.class_id, tell)

    def has_come(self, position: Subscription, tell: Callable[[], None]) -> bool:
        """See `Elsewhere`."""
        return self._coming(self, position, tell)

    def check_wish(self, asked: SubscribeRequest) -> None:
        """Raises RemoteProtocolError (bad_request) for what the cluster cannot do."""
        if asked.by_key:
            what = "by_key: members at several doors would not know of each other's keys"
        elif asked.slow != "block":
            what = f"slow = {asked.slow!r}: what waits is not counted at a door"
        elif asked.start == "last_values":
            what = "last_values: no door sees them all"
        else:
            self._seeks = asked.seek
            return
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, f"a door before a JetStream cluster does not know {what}"
        )

    def start(
        self, start: str | Start, wanted: Wanted | None = None, now: float = 0.0
    ) -> tuple[AckWindow, Left]:
        if not (start in ("waiting", "new", "earliest", "last") or isinstance(start, Start)):
            return super().start(start, wanted, now)  # Which raises.
        self._start = start
        return AckWindow(floor=0), Left()

    def add(self, position: Subscription) -> None:
        super().add(position)
        seeks, self._seeks = self._seeks, False
        self._begin(self, position, self._start, seeks)

    def forget(self, position: Subscription) -> None:
        """The next one to be removed goes for good."""
        self._forgets = True

    def remove(self, position: Subscription) -> None:
        forgets, self._forgets = self._forgets, False
        super().remove(position)
        self.channels.lends.pop(position.ring.columns, None)
        self.begun.pop(position, None)
        self._end(self, position, forgets)

    def has_begun(self, position: Subscription) -> bool | None:
        """Whether the cluster had it before; None while that is not known."""
        return self.begun.get(position)

    def _leave(self, position: Subscription) -> None:
        pass  # What waits is the stream's.

    def check(self) -> None:
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
    now = {each for each in full if classes[each].policy is FullPolicy.BLOCK}
    for class_id in now | were:
        cls = classes[class_id]
        assert isinstance(cls, RemoteClass)
        if class_id in now:
            cls.shut()
        else:
            cls.open_up()
            store.release(cls)
    return now


class _NoTimes(TimeIndex):
    """Sequences here are of many rings: when one was accepted is not known by it."""

    def note(self, now: float, sequence: int) -> None:
        self.next_time = float("inf")
