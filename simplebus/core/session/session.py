"""One peer's side of the conversation: its bytes become events (protocol/binary.md).

Rule 1: a session knows its own peer only. What an event means for others is the broker's business.
Rule 2: the first frame that is no Heartbeat decides for good which version is spoken.
Rule 3: the only error that escapes is RemoteProtocolError, after the events of the frames before
the offending one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DENSE_EVENT_BYTES,
    DENSE_EVENTS,
    DENSE_READ_BYTES,
    HEARTBEATS_MISSED_MAX,
    HEAVY_EVENTS,
    HEAVY_READ_BYTES,
    PUBLISHER_TICKS,
    RECEIVE_BYTES,
    TRICKLE_BYTES,
    Limits,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import AckedOne, Event, PublishedOne
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer
from simplebus.core.session import version2
from simplebus.core.session.outbox import Feed, Outbox
from simplebus.core.session.version1 import Version1
from simplebus.core.session.version2 import Version2
from simplebus.core.users.rate_limit import Meter

if TYPE_CHECKING:
    from simplebus.core.group.group import Member
    from simplebus.core.subscription.subscription import Subscription
    from simplebus.core.users.permissions import Grants

# A read this short is looked at as a single frame first.
_LONE_BYTES_MAX = 4096

_TLS_HANDSHAKE = 0x16
"""The first byte of a TLS client, and no frame's."""


class Session:
    """Protocol state of one connection, from accept to close."""

    def __init__(
        self, session_id: int, *, frame_bytes_max: int, known_classes: Container[int], peer: str
    ) -> None:
        self.session_id = session_id
        self.peer = peer
        """Who it is, for logs."""
        self.address = ""
        """Where it comes from, without a port; empty for nowhere."""
        self.certified: tuple[str, ...] = ()
        """What the certificate calls it that it has shown."""
        self.is_admitted = True
        """Whether it is known who it is, as far as the bus asks."""
        self.user = ""
        """The user's name; empty where nobody is asked."""
        self.grants: Grants | None = None
        """What it may do; None for everything."""
        self.refusal: RemoteProtocolError | None = None
        """Why it is not to be let in, whoever it says to be."""
        self.is_judged = False
        """Whether it has said who it is, and that is looked at: it waits for us."""
        self.meters: tuple[Meter, ...] = ()
        """How fast it may publish; none for as fast as it can."""
        self.receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
        self.outbox = Outbox(session_id)
        self.dialect: Version1 | Version2 | None = None
        """What the peer speaks; None until it has shown it."""
        self.subscriptions: dict[int, Subscription | Member] = {}
        """By class id; in version 2 by the number that the peer gave."""
        self.early: set[int] = set()
        """Classes that it subscribed to before anybody named them."""
        self.parked: deque[tuple[int, FrameBatch]] = deque()
        """Messages that wait for room in their class, in order, as (class id, frames)."""
        self.parked_bytes = 0
        self.closed = False
        self.is_inside = False
        """Whether it comes through another door: its bytes are understood, and it is heard, there.
        What is said to it is written as for version 2."""
        self.is_own = False
        """Whether it is a part of the server, and may do everything."""
        self.handled = 0
        """Messages that were stored, parked or refused."""
        self.confirmed = 0
        """Version 2: the peer was told that every number before it is stored."""
        self.claimed = 0
        """The same, or it is to be told so as soon as that is true."""
        self.unsaid: deque[tuple[int, int]] = deque()
        """What it is to be told: the mark in the ledger that is awaited, and the number."""
        self.unanswered: deque[tuple[int, bytes, Feed | None]] = deque()
        """Answers that wait for a mark in the ledger, and whose messages may come behind each."""
        self.lags = False
        """Whether so much is to be written that it is not read from: a peer without credit."""
        self.kept_mark = 0
        """The mark of its last message that was noted in the ledger."""
        self.heartbeat_seconds = 0.0
        """Version 2: how long either side may be silent; 0 for ever."""
        self.published_tick = -PUBLISHER_TICKS
        """The tick of its last message."""
        self.acknowledged = 0
        """Messages that its acks named since it was last asked whether it may rest."""
        self.refused: Counter[Reason] = Counter()
        """Version 2: frames without effect of which it was told, by reason."""
        self.full_ticks = 0
        """For how many ticks it has taken none of the bytes that wait for it."""
        self.parked_ticks = 0
        """For how many ticks messages of it have waited for room."""
        self._silent_ticks = 0
        self._quiet_ticks = 0
        self._mute_ticks = 0
        self._partial_ticks = 0
        self._stalled_ticks = 0
        self._frames_before = 0
        self._received_before = 0
        self._sent_before = 0
        self._known_classes = known_classes
        self._read_bytes = TRICKLE_BYTES

    @property
    def pending_bytes(self) -> int:
        """Bytes kept for this session beside the rings."""
        return self.parked_bytes + self.outbox.pending_bytes + self.receiver.tail_bytes

    @property
    def read_bytes(self) -> int:
        """How much to read from this peer at once."""
        return min(self._read_bytes, TRICKLE_BYTES) if self.must_wait else self._read_bytes

    def took(self, count: int, events: int, heavy: int = 0) -> None:
        """A read of `count` bytes brought so many events, of which so many take long. Bulk is read
        in ever larger pieces."""
        if heavy > HEAVY_EVENTS:
            self._read_bytes = max(HEAVY_READ_BYTES, count * HEAVY_EVENTS // heavy)
        elif events > DENSE_EVENTS and count < events * DENSE_EVENT_BYTES:
            self._read_bytes = DENSE_READ_BYTES
        elif count >= self._read_bytes:
            self._read_bytes = min(2 * self._read_bytes, RECEIVE_BYTES)

    @property
    def may_make_room(self) -> bool:
        """Whether its acknowledgements may make room for its own messages."""
        return bool(self.subscriptions)

    @property
    def hears_farewell(self) -> bool:
        """Whether its peer is told why it is cut off: version 2."""
        return self.outbox.names_feeds

    def slow_down(self) -> None:
        """Others do not take what is made of what it says: less at a time is better."""
        self._read_bytes = max(DENSE_READ_BYTES, self._read_bytes // 4)

    @property
    def must_wait(self) -> bool:
        """Whether reading is to pause. A version 2 peer is held by its credit instead."""
        return self.lags or (bool(self.parked) and not isinstance(self.dialect, Version2))

    def enter(self) -> None:
        """Its bytes are another door's business."""
        self.is_inside = self.outbox.names_feeds = True
        self.dialect = Version1(self._known_classes)

    def receive(self, buffer: ReceiveBuffer, count: int) -> Iterator[Event]:
        """Yield the events of `count` fresh bytes in the buffer.

        Each event is to be applied before the next one is asked for: a Connected decides which
        classes the messages behind it may name. Events are valid until the buffer is filled again.
        """
        if not self.receiver.received_bytes and buffer.space[0] == _TLS_HANDSHAKE:
            raise RemoteProtocolError(
                Reason.UNKNOWN_TYPE, "the peer began a TLS handshake; this door speaks no TLS"
            )
        for batch in self.receiver.receive(buffer, count):
            if self.dialect is None:
                yield from self._first_events(batch)
            else:
                yield from self.dialect.events(batch)

    def receive_one(self, buffer: ReceiveBuffer, count: int) -> PublishedOne | AckedOne | None:
        """The event of a single message or ack, if that is all that came; without arrays.

        None leaves everything to `receive`.
        """
        if (
            count > _LONE_BYTES_MAX
            or self.dialect is None
            or not self.receiver.is_lone_frame(buffer, count)
        ):
            return None
        event = self.dialect.lone_event(buffer.space[:count])
        if event is not None:
            self.receiver.took_lone_frame(count)
        return event

    def _first_events(self, batch: FrameBatch) -> Iterator[Event]:
        """Frames of a peer that has not shown yet which version it speaks."""
        first = 0
        while first < batch.count and batch.data[batch.bounds[first]] == frames.HEARTBEAT:
            first += 1
        if first == batch.count:
            return
        opening = batch.slice(first, first + 1)
        if version2.is_greeting(opening):
            self.dialect = Version2(self._known_classes, lambda: self.handled)
            self.outbox.names_feeds = True
            yield version2.greeting(opening)
            first += 1
        else:
            self.dialect = Version1(self._known_classes)
        if first < batch.count:
            yield from self.dialect.events(batch.slice(first, batch.count))

    def tick(
        self, limits: Limits, tick_seconds: float, *, holds_back: bool
    ) -> RemoteProtocolError | None:
        """One beat: is this peer overdue? `holds_back` says that a full class waits for it."""
        receiver, outbox = self.receiver, self.outbox
        quiet = receiver.received_bytes == self._received_before
        mute = outbox.sent_bytes == self._sent_before
        self._received_before = receiver.received_bytes
        silent = (receiver.frames == 0 and receiver.tail_bytes == 0) or not self.is_admitted
        silent = silent and not self.is_judged
        partial = receiver.tail_bytes and receiver.frames == self._frames_before
        full = mute and not outbox.idle
        stalled = holds_back and full
        self.full_ticks = self.full_ticks + 1 if full else 0
        self.parked_ticks = self.parked_ticks + 1 if self.parked else 0
        self._frames_before, self._sent_before = receiver.frames, outbox.sent_bytes
        if self.must_wait or self.is_inside:  # What is not read here cannot be late.
            silent = partial = False
        self._silent_ticks = self._silent_ticks + 1 if silent else 0
        self._partial_ticks = self._partial_ticks + 1 if partial else 0
        self._stalled_ticks = self._stalled_ticks + 1 if stalled else 0
        for ticks, most, reason, what in (
            (self._silent_ticks, limits.hello_seconds, Reason.HELLO_TIMEOUT, "sent nothing"),
            (self._partial_ticks, limits.frame_seconds, Reason.FRAME_TIMEOUT, "ended no frame"),
            (
                self._stalled_ticks,
                limits.stall_seconds,
                Reason.STALLED,
                "holds back a full class and took no bytes",
            ),
        ):
            if ticks * tick_seconds > most:
                return RemoteProtocolError(reason, f"the peer {what} for {most:g} s")
        return self._heartbeat(tick_seconds, quiet=quiet, mute=mute)

    def _heartbeat(
        self, tick_seconds: float, *, quiet: bool, mute: bool
    ) -> RemoteProtocolError | None:
        """Say that we are there, and notice when the peer no longer does."""
        seconds = self.heartbeat_seconds
        if not seconds:
            return None
        self._mute_ticks = self._mute_ticks + 1 if mute else 0
        if not self.outbox.has_bytes and (self._mute_ticks + 1) * tick_seconds >= seconds:
            self.outbox.reply(frames.encode(frames.HEARTBEAT))
        self._quiet_ticks = self._quiet_ticks + 1 if quiet else 0
        most = seconds * HEARTBEATS_MISSED_MAX
        if self._quiet_ticks * tick_seconds <= most:
            return None
        return RemoteProtocolError(
            Reason.HEARTBEAT_TIMEOUT,
            f"the peer sent nothing for {most:g} s; a heartbeat every {seconds:g} s was agreed",
        )
