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
from simplebus.core.session.version1 import Version1Decoder
from simplebus.core.session.version2 import Version2Decoder
from simplebus.core.users.rate_limit import Meter

if TYPE_CHECKING:
    from simplebus.core.group.group import GroupMember
    from simplebus.core.subscription.subscription import BrokerSubscription
    from simplebus.core.users.permissions import Grants

# A read this short is looked at as a single frame first.
_SINGLE_FRAME_BYTES_MAX = 4096

_TLS_HANDSHAKE_BYTE = 0x16
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
        self.certificate_names: tuple[str, ...] = ()
        """What the certificate calls it that it has shown."""
        self.is_authenticated = True
        """Whether it is known who it is, as far as the bus asks."""
        self.user = ""
        """The user's name; empty where nobody is asked."""
        self.grants: Grants | None = None
        """What it may do; None for everything."""
        self.admission_error: RemoteProtocolError | None = None
        """Why it is not to be let in, whoever it says to be."""
        self.is_authenticating = False
        """Whether it has said who it is, and that is looked at: it waits for us."""
        self.token_buckets: tuple[Meter, ...] = ()
        """How fast it may publish; none for as fast as it can."""
        self.receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
        self.outbox = Outbox(session_id)
        self.decoder: Version1Decoder | Version2Decoder | None = None
        """What the peer speaks; None until it has shown it."""
        self.subscriptions: dict[int, BrokerSubscription | GroupMember] = {}
        """By class id; in version 2 by the number that the peer gave."""
        self.early_class_ids: set[int] = set()
        """Classes that it subscribed to before anybody named them."""
        self.parked_messages: deque[tuple[int, FrameBatch]] = deque()
        """Messages that wait for room in their class, in order, as (class id, frames)."""
        self.parked_bytes = 0
        self.is_closed = False
        self.is_foreign = False
        """Whether it comes through another door: its bytes are understood, and it is heard, there.
        What is said to it is written as for version 2."""
        self.is_internal = False
        """Whether it is a part of the server, and may do everything."""
        self.handled_count = 0
        """Messages that were stored, parked or refused."""
        self.confirmed_number = 0
        """Version 2: the peer was told that every number before it is stored."""
        self.promised_number = 0
        """The same, or it is to be told so as soon as that is true."""
        self.pending_confirms: deque[tuple[int, int]] = deque()
        """What it is to be told: the mark in the ledger that is awaited, and the number."""
        self.pending_replies: deque[tuple[int, bytes, Feed | None]] = deque()
        """Answers that wait for a mark in the ledger, and whose messages may come behind each."""
        self.has_write_backlog = False
        """Whether so much is to be written that it is not read from: a peer without credit."""
        self.last_log_position = 0
        """The mark of its last message that was noted in the ledger."""
        self.heartbeat_seconds = 0.0
        """Version 2: how long either side may be silent; 0 for ever."""
        self.last_publish_tick = -PUBLISHER_TICKS
        """The tick of its last message."""
        self.recent_ack_count = 0
        """Messages that its acks named since it was last asked whether it may rest."""
        self.refusal_counts: Counter[Reason] = Counter()
        """Version 2: frames without effect of which it was told, by reason."""
        self.send_blocked_ticks = 0
        """For how many ticks it has taken none of the bytes that wait for it."""
        self.parked_ticks = 0
        """For how many ticks messages of it have waited for room."""
        self._no_frame_ticks = 0
        self._no_receive_ticks = 0
        self._no_send_ticks = 0
        self._partial_frame_ticks = 0
        self._blocking_others_ticks = 0
        self._last_frame_count = 0
        self._last_received_bytes = 0
        self._last_sent_bytes = 0
        self._known_classes = known_classes
        self._next_read_bytes = TRICKLE_BYTES

    @property
    def pending_bytes(self) -> int:
        """Bytes kept for this session beside the rings."""
        return self.parked_bytes + self.outbox.pending_bytes + self.receiver.tail_bytes

    @property
    def next_read_bytes(self) -> int:
        """How much to read from this peer at once."""
        return (
            min(self._next_read_bytes, TRICKLE_BYTES)
            if self.is_reading_paused
            else self._next_read_bytes
        )

    def adapt_read_size(
        self, received_bytes: int, event_count: int, expensive_count: int = 0
    ) -> None:
        """A read of `count` bytes brought so many events, of which so many take long. Bulk is read
        in ever larger pieces."""
        if expensive_count > HEAVY_EVENTS:
            self._next_read_bytes = max(
                HEAVY_READ_BYTES, received_bytes * HEAVY_EVENTS // expensive_count
            )
        elif event_count > DENSE_EVENTS and received_bytes < event_count * DENSE_EVENT_BYTES:
            self._next_read_bytes = DENSE_READ_BYTES
        elif received_bytes >= self._next_read_bytes:
            self._next_read_bytes = min(2 * self._next_read_bytes, RECEIVE_BYTES)

    @property
    def can_make_room(self) -> bool:
        """Whether its acknowledgements may make room for its own messages."""
        return bool(self.subscriptions)

    @property
    def can_receive_error(self) -> bool:
        """Whether its peer is told why it is cut off: version 2."""
        return self.outbox.names_feeds

    def reduce_read_size(self) -> None:
        """Others do not take what is made of what it says: less at a time is better."""
        self._next_read_bytes = max(DENSE_READ_BYTES, self._next_read_bytes // 4)

    @property
    def is_reading_paused(self) -> bool:
        """Whether reading is to pause. A version 2 peer is held by its credit instead."""
        return self.has_write_backlog or (
            bool(self.parked_messages) and not isinstance(self.decoder, Version2Decoder)
        )

    def mark_foreign(self) -> None:
        """Its bytes are another door's business."""
        self.is_foreign = self.outbox.names_feeds = True
        self.decoder = Version1Decoder(self._known_classes)

    def receive(self, buffer: ReceiveBuffer, received_bytes: int) -> Iterator[Event]:
        """Yield the events of `count` fresh bytes in the buffer.

        Each event is to be applied before the next one is asked for: a Connected decides which
        classes the messages behind it may name. Events are valid until the buffer is filled again.
        """
        if not self.receiver.received_bytes and buffer.space[0] == _TLS_HANDSHAKE_BYTE:
            raise RemoteProtocolError(
                Reason.UNKNOWN_TYPE, "the peer began a TLS handshake; this door speaks no TLS"
            )
        for batch in self.receiver.receive(buffer, received_bytes):
            if self.decoder is None:
                yield from self._decode_first_frames(batch)
            else:
                yield from self.decoder.decode_events(batch)

    def receive_single(
        self, buffer: ReceiveBuffer, received_bytes: int
    ) -> PublishedOne | AckedOne | None:
        """The event of a single message or ack, if that is all that came; without arrays.

        None leaves everything to `receive`.
        """
        if (
            received_bytes > _SINGLE_FRAME_BYTES_MAX
            or self.decoder is None
            or not self.receiver.is_lone_frame(buffer, received_bytes)
        ):
            return None
        event = self.decoder.decode_single(buffer.space[:received_bytes])
        if event is not None:
            self.receiver.took_lone_frame(received_bytes)
        return event

    def _decode_first_frames(self, batch: FrameBatch) -> Iterator[Event]:
        """Frames of a peer that has not shown yet which version it speaks."""
        first = 0
        while first < batch.count and batch.data[batch.bounds[first]] == frames.HEARTBEAT:
            first += 1
        if first == batch.count:
            return
        opening = batch.slice(first, first + 1)
        if version2.is_version2_connect(opening):
            self.decoder = Version2Decoder(self._known_classes, lambda: self.handled_count)
            self.outbox.names_feeds = True
            yield version2.parse_connect(opening)
            first += 1
        else:
            self.decoder = Version1Decoder(self._known_classes)
        if first < batch.count:
            yield from self.decoder.decode_events(batch.slice(first, batch.count))

    def tick(
        self, limits: Limits, tick_seconds: float, *, is_blocking_publishers: bool
    ) -> RemoteProtocolError | None:
        """One beat: is this peer overdue? `holds_back` says that a full class waits for it."""
        receiver, outbox = self.receiver, self.outbox
        quiet = receiver.received_bytes == self._last_received_bytes
        mute = outbox.sent_bytes == self._last_sent_bytes
        self._last_received_bytes = receiver.received_bytes
        silent = (receiver.frames == 0 and receiver.tail_bytes == 0) or not self.is_authenticated
        silent = silent and not self.is_authenticating
        partial = receiver.tail_bytes and receiver.frames == self._last_frame_count
        full = mute and not outbox.idle
        stalled = is_blocking_publishers and full
        self.send_blocked_ticks = self.send_blocked_ticks + 1 if full else 0
        self.parked_ticks = self.parked_ticks + 1 if self.parked_messages else 0
        self._last_frame_count, self._last_sent_bytes = receiver.frames, outbox.sent_bytes
        if self.is_reading_paused or self.is_foreign:  # What is not read here cannot be late.
            silent = partial = False
        self._no_frame_ticks = self._no_frame_ticks + 1 if silent else 0
        self._partial_frame_ticks = self._partial_frame_ticks + 1 if partial else 0
        self._blocking_others_ticks = self._blocking_others_ticks + 1 if stalled else 0
        for ticks, most, reason, what in (
            (self._no_frame_ticks, limits.hello_seconds, Reason.HELLO_TIMEOUT, "sent nothing"),
            (
                self._partial_frame_ticks,
                limits.frame_seconds,
                Reason.FRAME_TIMEOUT,
                "ended no frame",
            ),
            (
                self._blocking_others_ticks,
                limits.stall_seconds,
                Reason.STALLED,
                "holds back a full class and took no bytes",
            ),
        ):
            if ticks * tick_seconds > most:
                return RemoteProtocolError(reason, f"the peer {what} for {most:g} s")
        return self._check_heartbeat(
            tick_seconds, has_received_nothing=quiet, has_sent_nothing=mute
        )

    def _check_heartbeat(
        self, tick_seconds: float, *, has_received_nothing: bool, has_sent_nothing: bool
    ) -> RemoteProtocolError | None:
        """Say that we are there, and notice when the peer no longer does."""
        seconds = self.heartbeat_seconds
        if not seconds:
            return None
        self._no_send_ticks = self._no_send_ticks + 1 if has_sent_nothing else 0
        if not self.outbox.has_bytes and (self._no_send_ticks + 1) * tick_seconds >= seconds:
            self.outbox.reply(frames.encode(frames.HEARTBEAT))
        self._no_receive_ticks = self._no_receive_ticks + 1 if has_received_nothing else 0
        most = seconds * HEARTBEATS_MISSED_MAX
        if self._no_receive_ticks * tick_seconds <= most:
            return None
        return RemoteProtocolError(
            Reason.HEARTBEAT_TIMEOUT,
            f"the peer sent nothing for {most:g} s; a heartbeat every {seconds:g} s was agreed",
        )
