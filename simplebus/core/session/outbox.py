"""Everything that waits to be sent to one session, in the order in which it is to go.

Rule 1: bytes are pulled by whoever can send them. A cursor moves when bytes were taken, not before,
so a slow peer costs the ring's memory and nothing else.
Rule 2: a version 2 peer is told whose messages follow whenever that changes, directly before them.
Rule 3: one look shows bytes or takes only so long. An outbox that shows none and is not idle has
more to look at: it is to be asked again when others have had their turn.

    rest    what is begun or copied: goes first
    replies answers
    owed    answers that are long, each made when those before it are taken
    queue   feeds with something to send, in turn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from simplebus.core.limits import LOOKED_MESSAGES_MAX, OWED_BYTES
from simplebus.core.protocol import frames


class Feed(Protocol):
    """Something whose messages an outbox sends."""

    class_id: int
    subscription_number: int
    """What the peer calls it."""
    is_queued: bool
    """Whether the outbox has it in its queue."""
    attempt: int
    """Which attempt to deliver what `take` returned, or `peek` showed, is."""
    scanned_count: int
    """How many messages the last `take` looked at; from LOOKED_MESSAGES_MAX on it gives up, even
    if there may be more to be sent."""

    @property
    def has_frames_to_copy(self) -> bool:
        """Whether `take` is to be asked before `peek`."""

    @property
    def has_work(self) -> bool:
        """Whether something may be there to be sent."""

    def copy_frames(self, tick: int) -> bytes:
        """Copies of frames that go next; they count as sent. Empty if there are none."""

    def peek_frames(self, tick: int) -> memoryview:
        """The next frames in one piece, empty if there are none. `sent` says what was taken."""

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        """The first `count` bytes of the peeked piece were taken. Returns the rest of a cut frame,
        which counts as sent."""


class Outbox:
    """`peek` and `sent` alternate: what peek showed is valid until the next change to the bus."""

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        self.sent_bytes = 0
        """Bytes taken so far; a peer that takes none while some wait is stalled."""
        self.names_feeds = False
        """Whether the peer is told whose messages follow: version 2."""
        self._named: tuple[int, int, int] | None = None
        """What it was told last: class, number, attempt."""
        self._replies = bytearray()
        self._confirm_at = -1
        """Where in the replies a Confirm begins that none was behind yet; -1 for nowhere."""
        self._rest = memoryview(b"")
        """Copied bytes that go first: the rest of a cut frame, redeliveries, replies."""
        self._owed: deque[Callable[[], bool | None]] = deque()
        self._waits = False
        """Whether the first one owed is not known yet."""
        self._queue: deque[Feed] = deque()
        self._held: dict[Feed, None] = {}
        """Feeds that are queued as soon as they may begin."""
        self._peeked: memoryview = memoryview(b"")
        self._source: Feed | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes kept for this session beside the rings."""
        return len(self._rest) + len(self._replies) + OWED_BYTES * len(self._owed)

    @property
    def has_bytes(self) -> bool:
        """Whether the peer is to be sent something besides messages. An answer that is owed may
        have to wait for long, and is nothing to be sent until then."""
        return bool(self._rest or self._replies)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        owes = self._owed and not self._waits
        return not (self._rest or self._replies or owes or self._queue)

    def reply(self, frame: bytes) -> None:
        """Queue a frame that is no subscription's message."""
        self._replies += frame

    def confirm(self, number: int, level: int = 0) -> None:
        """Say that all numbers before this one are stored, and how safely, instead of what was to
        be said last."""
        frame = frames.encode(frames.CONFIRM, message_id=number, timer_index=level)
        if self._confirm_at + len(frame) == len(self._replies):
            del self._replies[self._confirm_at :]
        self._confirm_at = len(self._replies)
        self._replies += frame

    def answer(self, class_id: int, messages: Sequence[memoryview], reply: bytes) -> None:
        """Say what is owed: messages that were fetched, copied once, and the reply behind them."""
        if messages:
            named = frames.encode(frames.DELIVER, class_id=class_id)
            reply = b"".join([named, *messages, reply])
            self._named = None
        self._rest = memoryview(reply)

    def owe(self, say: Callable[[], bool | None]) -> None:
        """Have an answer said by calling this, once everything that was said before is taken. It
        returns False where it could not be said yet: it is called again after `go_on`."""
        self._owed.append(say)

    def go_on(self) -> None:
        """What was not known when it was to be said may be known now."""
        self._waits = False

    def wake(self, feed: Feed) -> None:
        """The feed has something to send."""
        if not feed.is_queued:
            feed.is_queued = True
            self._queue.append(feed)

    def hold(self, feed: Feed) -> None:
        """The feed sends nothing until `let_go`."""
        if feed.is_queued and feed not in self._held:
            self._queue.remove(feed)
        feed.is_queued = True
        self._held[feed] = None

    def let_go(self, feed: Feed) -> None:
        """The feed may begin, if it is still there."""
        if feed in self._held:
            del self._held[feed]
            self._queue.append(feed)

    def forget(self, feed: Feed) -> None:
        """The feed is gone."""
        if feed.is_queued:
            feed.is_queued = False
            if feed in self._held:
                del self._held[feed]
            else:
                self._queue.remove(feed)
        self._named = None  # Another one may come by the same name.

    def peek(self, tick: int) -> memoryview:
        """The next bytes to send; empty when there are none, or none were found yet: see Rule 3."""
        self._source = None
        if self._owed and not (self._waits or self._rest or self._replies):
            self._waits = True
            if self._owed[0]() is not False:
                self._waits = False
                self._owed.popleft()
        if not self._rest and self._replies:
            self._rest = memoryview(bytes(self._replies))
            self._replies.clear()
            self._confirm_at = -1
        looked = 0
        while not self._rest and self._queue and looked < LOOKED_MESSAGES_MAX:
            feed = self._queue[0]
            if feed.has_frames_to_copy:
                copies = feed.copy_frames(tick)
                looked += feed.scanned_count
                if copies:
                    if self.names_feeds:
                        copies = self._name(feed) + copies
                    self._rest = memoryview(copies)
                    self._queue.rotate(-1)
                    continue
                if feed.scanned_count >= LOOKED_MESSAGES_MAX and feed.has_work:
                    self._queue.rotate(-1)
                    break
            piece = feed.peek_frames(tick)
            if piece:
                if self.names_feeds and (name := self._name(feed)):
                    self._rest = memoryview(name)
                    continue
                self._source = feed
                self._peeked = piece
                return piece
            self._queue.popleft()
            feed.is_queued = False
        return self._rest

    def sent(self, count: int, tick: int) -> None:
        """The first `count` of the bytes that peek showed were taken."""
        self.sent_bytes += count
        if self._source is None:
            self._rest = self._rest[count:]
            return
        rest = self._source.mark_sent(self._peeked, count, tick)
        if rest:
            self._rest = memoryview(rest)
        if self._source.has_work:
            self._queue.rotate(-1)
        else:
            self._queue.popleft()
            self._source.is_queued = False
        self._source = None
        self._peeked = memoryview(b"")

    def _name(self, feed: Feed) -> bytes:
        """What says whose messages follow, if that is not what was said last."""
        name = (feed.class_id, feed.subscription_number, feed.attempt)
        if name == self._named:
            return b""
        self._named = name
        return frames.encode(
            frames.DELIVER, class_id=name[0], timer_index=name[1], message_id=name[2]
        )


class Nowhere(Outbox):
    """Where a position that nobody is connected to sends: nothing is ever taken from it."""

    def __init__(self) -> None:
        super().__init__(-1)

    def wake(self, feed: Feed) -> None:
        pass
