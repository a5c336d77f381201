"""Protocol state of one peer: its bytes become events (protocol/binary.md).

A session knows only its own peer; the broker applies the events. The first frame that is not a
Heartbeat determines the protocol version. The only error raised is RemoteProtocolError, after the
events of all frames before the offending one.

Message numbers of a version 2 publisher, modulo 2^31. Every bound is exclusive:

    confirmed_number <= promised_number <= decoder.stored_before <= decoder.next_number

    confirmed_number        numbers below are confirmed to the peer
    promised_number         numbers below are confirmed, or are when the journal is durable
    decoder.stored_before   numbers below are stored, dropped or refused; the first parked number
    decoder.next_number     numbers below were received; the next message must carry this number
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CLASSES_PER_TURN,
    CUT_READ_BYTES_MAX,
    EXPENSIVE_EVENTS_MAX,
    EXPENSIVE_EVENTS_READ_BYTES,
    HANDSHAKE_FRAME_BYTES_MAX,
    HEADROOM_BYTES,
    HEARTBEATS_MISSED_MAX,
    LONG_FRAME_READ_BYTES,
    PARKED_BATCH_BYTES,
    RECEIVE_BYTES,
    RECENT_PUBLISH_TICKS,
    REDUCED_READ_BYTES_MIN,
    REFUSALS_MAX,
    TRICKLE_BYTES,
    Limits,
)
from simplebus.core.outbox import Outbox, SendSource
from simplebus.core.producer_state import ProducerState
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import AckedRange, Event, PublishedFrame
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer, UnprocessedInput
from simplebus.core.session import version2
from simplebus.core.session.turn_budget import TurnBudget
from simplebus.core.session.version1 import Version1Decoder
from simplebus.core.session.version2 import Version2Decoder
from simplebus.core.users.permissions import ClassAccess, Grants
from simplebus.core.users.rate_limit import RateLimiter

if TYPE_CHECKING:
    from simplebus.core.group.group import GroupMember
    from simplebus.core.subscription.subscription import BrokerSubscription

_TLS_HANDSHAKE_BYTE = 0x16
"""First byte of a TLS client; no frame begins with it."""


class ClassWithName(Protocol):
    """A message class as far as a session needs it."""

    @property
    def name(self) -> str:
        """Name of the class; empty if it has none."""


class _OpenClasses:
    """Ids of the classes to which a session may publish at least some messages."""

    def __init__(self, classes: Mapping[int, ClassWithName], grants: Grants | None) -> None:
        self._classes = classes
        self._grants = grants

    def __contains__(self, class_id: object) -> bool:
        if not isinstance(class_id, int) or class_id not in self._classes:
            return False
        if self._grants is None:
            return True
        permissions = self._grants.publish_permissions(class_id, self._classes[class_id].name)
        return permissions.access is not ClassAccess.NONE


class Session:
    """Protocol state of one connection, from accept to close."""

    def __init__(
        self,
        session_id: int,
        *,
        frame_bytes_max: int,
        known_classes: Mapping[int, ClassWithName],
        peer: str,
        address: str = "",
        token_buckets: tuple[RateLimiter, ...] = (),
        must_authenticate: bool = False,
        ready: dict[int, None] | None = None,
    ) -> None:
        """Create the state of a new connection.

        Args:
            session_id: Id of the session.
            frame_bytes_max: Longest frame that is accepted, in bytes. Before authentication,
                frames must also be short enough for a handshake.
            known_classes: The existing classes by id; the caller updates them.
            peer: Name of the peer for logs.
            address: Address of the peer without the port; empty for an in-process session.
            token_buckets: Rate limits of its messages; empty for unlimited.
            must_authenticate: True if the peer must authenticate.
            ready: See `Outbox`.
        """
        self.session_id = session_id
        self.peer = peer
        """Name of the peer for logs."""
        self.address = address
        """IP address of the peer without the port; empty for an in-process session."""
        self.certificate_names: tuple[str, ...] = ()
        """Names in the client certificate."""
        self.is_authenticated = not must_authenticate
        """True if the peer has authenticated, or need not."""
        self.user = ""
        """User name; empty if the bus has no users."""
        self.grants: Grants | None = None
        """Permissions; None for all."""
        self.admission_error: RemoteProtocolError | None = None
        """Error with which the peer is refused, whatever its credentials."""
        self.is_authenticating = False
        """True while the credentials of the peer are being checked."""
        self.token_buckets = token_buckets
        """Publish rate limits of the peer; empty for unlimited."""
        self.receiver = FrameReceiver(
            frame_bytes_max=min(HANDSHAKE_FRAME_BYTES_MAX, frame_bytes_max)
            if must_authenticate
            else frame_bytes_max
        )
        self.outbox = Outbox(session_id, ready)
        self.decoder: Version1Decoder | Version2Decoder | None = None
        """Decoder of the peer's protocol version; None until its first frame."""
        self.version2: Version2Decoder | None = None
        """The decoder if the peer speaks version 2, with the state of its publisher."""
        self.has_confirms = False
        """True for version 2: the peer's messages have numbers, and are confirmed or refused."""
        self.subscriptions: dict[int, BrokerSubscription | GroupMember] = {}
        """Subscriptions by class id; in version 2 by the number that the peer chose."""
        self.declared_class_ids: set[int] = set()
        """Classes that the peer has declared. They are not removed while the session is open."""
        self.created_class_count = 0
        """Classes that the peer has created."""
        self.early_class_ids: set[int] = set()
        """Version 1: classes that the peer subscribed to before they exist."""
        self.parked_messages: deque[tuple[int, FrameBatch]] = deque()
        """Messages that wait for space in their class or for a rate limit, in order.

        Tuples (class id, frames); see `PublishQueue`.
        """
        self.parked_bytes = 0
        self.is_closed = False
        self.is_local = False
        """True for a local session: another listener decodes the bytes and encodes the frames."""
        self.is_internal = False
        """True for a part of the server, which has all permissions."""
        self.handled_count = 0
        """Messages that were stored, parked or refused."""
        self.confirmed_number = 0
        """Version 2: all numbers below are confirmed to the peer. See the module docstring."""
        self.promised_number = 0
        """Version 2: all numbers below are confirmed, or in `pending_confirms`."""
        self.pending_confirms: deque[tuple[int, int]] = deque()
        """Confirms that wait: log position and number."""
        self.pending_replies: deque[tuple[int, bytes, SendSource | None]] = deque()
        """Replies as (log position, frame, source that may start sending after the reply)."""
        self.has_write_backlog = False
        """True if reading pauses because too much waits to be written to the journal."""
        self.last_log_position = 0
        """Log position of the last message that the peer published."""
        self.heartbeat_seconds = 0.0
        """Version 2: longest silence of either side in seconds; 0 for unlimited."""
        self.last_publish_tick = -RECENT_PUBLISH_TICKS
        """Tick of the last message that the peer published."""
        self.recent_ack_count = 0
        """Messages that the peer's acks contained since reading was last delayed."""
        self.refusal_counts: Counter[Reason] = Counter()
        """Version 2: refused frames by reason."""
        self.send_blocked_ticks = 0
        """Ticks during which the peer read none of the waiting bytes."""
        self.parked_ticks = 0
        """Ticks during which messages were parked."""
        self._no_frame_ticks = 0
        self._no_receive_ticks = 0
        self._no_send_ticks = 0
        self._partial_frame_ticks = 0
        self._blocking_others_ticks = 0
        self._last_frame_count = 0
        self._last_received_bytes = 0
        self._last_sent_bytes = 0
        self.unprocessed = UnprocessedInput()
        """Received bytes that are processed in later turns. See `allow_split_reads`."""
        self._unread_bytes = 0
        """The part of the last read that was put back to `unprocessed`."""
        self._is_mixed_budget_spent = False
        """True if the last read had more than half of the mixed envelopes of one turn."""
        self._unsettled_refusal_count = 0
        """Refusals, less one for each later turn. Many of them make the turns shorter."""
        self._turn_class_ids: set[int] = set()
        """Classes for which this turn has stored messages."""
        self.can_split_reads = False
        """True if slow requests are processed in several turns. See `allow_split_reads`."""
        self.pending_request: Iterator[None] | None = None
        """Remaining parts of the request that is being processed; None if there is no such request.
        """
        self._known_classes = known_classes
        self._next_read_bytes = TRICKLE_BYTES

    # Authentication ------------------------------------------------------------------------------

    def set_certificate_names(self, names: tuple[str, ...]) -> None:
        """Set the names in the client certificate."""
        self.certificate_names = names

    def begin_authentication(self) -> None:
        """Record that the peer's credentials are being checked, which may take long."""
        self.is_authenticating = True

    def end_authentication(self, error: RemoteProtocolError | None) -> None:
        """Record the result of the check: the error with which the peer is refused, or None."""
        self.is_authenticating, self.admission_error = False, error

    def authenticate(
        self,
        user: str,
        grants: Grants | None,
        token_buckets: tuple[RateLimiter, ...],
        *,
        frame_bytes_max: int,
    ) -> None:
        """Admit the peer as this user. Its frames may have up to `frame_bytes_max` bytes now."""
        self.is_authenticated = True
        self.user, self.grants, self.token_buckets = user, grants, token_buckets
        self.receiver.set_frame_bytes_max(frame_bytes_max)

    def mark_internal(self, *, frame_bytes_max: int) -> None:
        """Make this the session of a part of the server, which needs no authentication."""
        self.is_internal = True
        self.authenticate("", None, self.token_buckets, frame_bytes_max=frame_bytes_max)

    def mark_local(
        self, user: str, grants: Grants | None, address: str, *, piece_messages_max: int
    ) -> None:
        """Make this a local session, for a client that another listener has authenticated.

        That listener applies the rate limits. It gets at most `piece_messages_max` messages at once
        from the outbox.
        """
        self.address = address
        self.is_authenticated, self.user, self.grants = True, user, grants
        self.is_local = self.outbox.has_deliver_frames = True
        self.outbox.piece_messages_max = piece_messages_max
        self.decoder = Version1Decoder(self._known_classes)

    def count_created_classes(self, count: int) -> None:
        """Count classes that the peer has created."""
        self.created_class_count += count

    def add_declared_class(self, class_id: int) -> bool:
        """Record that the peer has declared a class. Returns False if it had done so before."""
        if class_id in self.declared_class_ids:
            return False
        self.declared_class_ids.add(class_id)
        return True

    def set_token_buckets(self, token_buckets: tuple[RateLimiter, ...]) -> None:
        """Replace the publish rate limits."""
        self.token_buckets = token_buckets

    def set_client(self, client: str) -> None:
        """Add the name of the client library, if it is known, to the name of the peer for logs."""
        if client:
            self.peer = f"{self.peer} ({client!r})"

    def start_producer(
        self,
        producer: ProducerState,
        *,
        can_skip_numbers: bool,
        heartbeat_seconds: float,
    ) -> None:
        """Start a version 2 session: continue the messages of a publisher.

        Args:
            producer: State of the publisher.
            can_skip_numbers: True if the publisher may skip numbers.
            heartbeat_seconds: Longest silence of either side; 0 for unlimited.
        """
        assert self.version2 is not None
        self.version2.start_producer(producer, can_skip_numbers=can_skip_numbers)
        self.confirmed_number = self.promised_number = producer.next_number
        self.heartbeat_seconds = heartbeat_seconds

    def close(self) -> None:
        """Record that the connection has ended."""
        self.is_closed = True
        self.unprocessed.clear()

    # Messages and acks ---------------------------------------------------------------------------

    def record_published_one(self, tick: int) -> None:
        """Record a message that was decoded alone, and stored, parked or refused by the store."""
        self.last_publish_tick = tick
        self.handled_count += 1

    def record_published(self, tick: int, count: int) -> None:
        """Record messages of a batch that were stored, parked or refused.

        If decoding the batch is stopped, the decoder expects the numbers of its other messages
        again.
        """
        self.last_publish_tick = tick
        self.handled_count += count
        if self.version2 is not None:
            self.version2.record_handled(count)

    def can_publish_in_turn(self, class_id: int) -> bool:
        """Return True if this turn may store messages of a class; else later turns must do it.

        One turn stores messages of at most CLASSES_PER_TURN classes.
        """
        class_ids = self._turn_class_ids
        if not self.can_split_reads or class_id in class_ids:
            return True
        if len(class_ids) == CLASSES_PER_TURN:
            return False
        class_ids.add(class_id)
        return True

    def record_refused(self, reason: Reason, count: int) -> None:
        """Count refused frames of a version 2 peer that are refused together."""
        self.refusal_counts[reason] += count
        self._unsettled_refusal_count += 1

    def record_acked(self, count: int) -> None:
        """Count messages that an ack frame of the peer contained."""
        self.recent_ack_count += count

    def pop_recent_ack_count(self) -> int:
        """Return the number of messages that acks have contained since the last call."""
        count, self.recent_ack_count = self.recent_ack_count, 0
        return count

    def add_parked(self, class_id: int, batch: FrameBatch) -> None:
        """Append messages that must wait. They are copied."""
        self.parked_bytes += batch.data.size
        if self.parked_messages and self.parked_messages[-1][0] == class_id:
            last = self.parked_messages[-1][1]
            is_same_type = last.data[0] == batch.data[0]
            if is_same_type and last.data.size < PARKED_BATCH_BYTES:
                self.parked_messages[-1] = (class_id, last.concatenate(batch))
                return
        assert self.decoder is not None
        self.decoder.mark_parked(batch)
        self.parked_messages.append((class_id, batch.copy()))

    def remove_parked(self, count: int) -> None:
        """Remove the first `count` messages of the first parked batch: they were handled."""
        class_id, batch = self.parked_messages[0]
        assert self.decoder is not None
        self.parked_bytes -= int(batch.bounds[count])
        self.decoder.mark_unparked(batch, count)
        if count < batch.count:
            self.parked_messages[0] = (class_id, batch.slice(count, batch.count))
        else:
            self.parked_messages.popleft()

    def discard_parked(self) -> None:
        """Remove all parked messages."""
        self.parked_messages.clear()
        self.parked_bytes = 0

    # Confirms and the journal --------------------------------------------------------------------

    def promise(self, number: int, log_position: int) -> None:
        """Record that numbers below `number` are confirmed when `log_position` is durable."""
        self.promised_number = number
        if self.pending_confirms and self.pending_confirms[-1][0] == log_position:
            self.pending_confirms.pop()
        self.pending_confirms.append((log_position, number))

    def confirm(self, number: int) -> None:
        """Record that numbers below `number`, which were promised, are confirmed to the peer."""
        self.confirmed_number = number

    def confirm_at_once(self, number: int) -> None:
        """Promise numbers below `number` and confirm them, in place of all earlier promises."""
        self.confirmed_number = self.promised_number = number
        self.pending_confirms.clear()

    def record_log_position(self, log_position: int) -> None:
        """Set the log position of the last message that the peer published."""
        self.last_log_position = log_position

    def pause_for_journal(self) -> None:
        """Stop reading because too much waits to be written to the journal."""
        self.has_write_backlog = True

    def resume_after_journal(self) -> None:
        """Read again: the journal has written enough."""
        self.has_write_backlog = False

    # Reading -------------------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """Bytes held for this session outside the rings."""
        return (
            self.parked_bytes
            + self.outbox.pending_bytes
            + len(self.receiver.tail)
            + len(self.unprocessed)
        )

    def allow_split_reads(self) -> None:
        """Process only a few slow requests, or different channels, of a read at once.

        After each read the caller completes the pending request, see `Broker.continue_request`, and
        processes `unprocessed`, by `refill`, in later turns.
        """
        self.can_split_reads = True

    def set_pending_request(self, parts: Iterator[None] | None) -> None:
        """Set the remaining parts of the request in progress; None if it is complete."""
        self.pending_request = parts

    @property
    def is_request_pending(self) -> bool:
        """True if a request is being processed in parts; nothing else may be processed then."""
        return self.pending_request is not None

    def refill(self, buffer: ReceiveBuffer) -> int:
        """Copy some of the unprocessed bytes into the buffer. Returns how many, as a read does."""
        return buffer.fill(self.unprocessed.pop(max(self._next_read_bytes, TRICKLE_BYTES)))

    @property
    def next_read_bytes(self) -> int:
        """Size of the next read in bytes."""
        if self.is_reading_paused:
            return min(self._next_read_bytes, TRICKLE_BYTES)
        if len(self.receiver.tail) > HEADROOM_BYTES:
            return min(self._next_read_bytes, LONG_FRAME_READ_BYTES)
        return self._next_read_bytes

    def adapt_read_size(self, received_bytes: int, slow_event_count: float = 0.0) -> None:
        """Adapt the read size after a read. Bulk traffic is read in larger pieces."""
        is_cut = self._unread_bytes > 0
        if is_cut:
            # A little less than was processed, so that the next read need not be cut as well.
            received_bytes -= self._unread_bytes
            self._next_read_bytes = max(received_bytes * 15 // 16, EXPENSIVE_EVENTS_READ_BYTES)
            if received_bytes <= 0:  # The read was too long to be cut.
                self._next_read_bytes = CUT_READ_BYTES_MAX
            self._unread_bytes = 0
        if slow_event_count > EXPENSIVE_EVENTS_MAX:
            self._next_read_bytes = max(
                EXPENSIVE_EVENTS_READ_BYTES,
                int(received_bytes * EXPENSIVE_EVENTS_MAX / slow_event_count),
            )
        elif (
            received_bytes >= self._next_read_bytes
            and 2 * slow_event_count <= EXPENSIVE_EVENTS_MAX
            and not (is_cut or self._is_mixed_budget_spent)
        ):
            self._next_read_bytes = min(2 * self._next_read_bytes, RECEIVE_BYTES)

    @property
    def is_version1(self) -> bool:
        """True for a client of version 1 at a socket."""
        return self.decoder is not None and not self.outbox.has_deliver_frames

    @property
    def producer(self) -> ProducerState | None:
        """State of the publisher; None for version 1, which has none."""
        return None if self.version2 is None else self.version2.producer

    @property
    def producer_key(self) -> str:
        """Key of the publisher's state; empty if the publisher has no name."""
        return "" if self.version2 is None else self.version2.producer.key

    @property
    def can_free_space(self) -> bool:
        """True if its acks may free space for its own messages."""
        return bool(self.subscriptions)

    @property
    def can_receive_error(self) -> bool:
        """True if the peer can be sent an Error frame (version 2)."""
        return self.outbox.has_deliver_frames

    def reduce_read_size(self) -> None:
        """Read less at once, because others cannot keep up with its messages."""
        self._next_read_bytes = max(REDUCED_READ_BYTES_MIN, self._next_read_bytes // 4)

    def excuse_silence(self) -> None:
        """Restart the time limits for silence: the server is not reading from the peer."""
        self._no_receive_ticks = self._partial_frame_ticks = 0

    @property
    def is_reading_paused(self) -> bool:
        """True if reading must pause. A version 2 peer is limited by its credit instead."""
        return self.has_write_backlog or (bool(self.parked_messages) and not self.has_confirms)

    def receive(
        self, buffer: ReceiveBuffer, received_bytes: int, *, skipped_bytes: int = 0
    ) -> Iterator[Event]:
        """Yield the events of `received_bytes` new bytes in the buffer.

        Each event must be applied before the next one is requested: a Connect determines which
        classes the messages after it may name. Events are valid until the buffer is filled again.

        Args:
            buffer: The buffer.
            received_bytes: Number of new bytes.
            skipped_bytes: How many of them are skipped, because `receive_few` has yielded their
                events.

        Raises:
            RemoteProtocolError: The bytes are not a legal frame.
        """
        if not self.receiver.received_bytes and buffer.writable[0] == _TLS_HANDSHAKE_BYTE:
            raise RemoteProtocolError(
                Reason.UNKNOWN_TYPE,
                "the peer began a TLS handshake; this listener does not support TLS",
            )
        budget = None
        if self.can_split_reads:
            self._turn_class_ids.clear()
            budget = TurnBudget(
                has_refusals=self._unsettled_refusal_count > REFUSALS_MAX,
                open_classes=None
                if self.version2 is None
                else _OpenClasses(self._known_classes, self.grants),
            )
            self._unsettled_refusal_count = max(0, self._unsettled_refusal_count - 1)
        for batch in self.receiver.receive(buffer, received_bytes, skipped_bytes=skipped_bytes):
            whole_batch, end = batch, None
            if budget is not None:
                batch = budget.limit(batch)
                if batch.count < whole_batch.count:
                    is_short = received_bytes <= max(CUT_READ_BYTES_MAX, 4 * batch.data.size)
                    # The search for the frames of a long read takes much of a turn.
                    end = batch.count if is_short else 0
            self._is_mixed_budget_spent = budget is not None and budget.is_mostly_spent
            if end is not None:
                unread = self.receiver.unread(buffer, whole_batch, end)
                self._unread_bytes = sum(map(len, unread))
                self.unprocessed.put_back(unread)
                if end == 0:
                    return
            if self.decoder is None:
                yield from self._decode_first_frames(batch)
            else:
                yield from self.decoder.decode_events(batch)
            if end is not None:
                return

    def receive_few(
        self, buffer: ReceiveBuffer, received_bytes: int
    ) -> Iterator[tuple[PublishedFrame | AckedRange, int]]:
        """Yield the messages and acks of a read with few frames, one by one and without arrays.

        The bytes behind the last event, if any, must be passed to `receive`. Each event must be
        applied before the next one is requested.

        Yields:
            An event, and the end of its frame in the read.
        """
        if self.decoder is None:
            return
        bounds = self.receiver.find_few_frames(buffer, received_bytes)
        for first, end in pairwise(bounds):
            event = self.decoder.decode_single(buffer.writable[first:end])
            if event is None:
                return
            self.receiver.record_frames(1, end - first)
            yield event, end

    def expect_again(self, event: PublishedFrame | AckedRange) -> None:
        """Expect the number of a message again, because its event was not applied."""
        if self.version2 is not None and isinstance(event, PublishedFrame):
            self.version2.expect_again(event.frame)

    def _decode_first_frames(self, batch: FrameBatch) -> Iterator[Event]:
        """Yield the events of frames before the protocol version is known."""
        first = 0
        while first < batch.count and batch.data[batch.bounds[first]] == frames.HEARTBEAT:
            first += 1
        if first == batch.count:
            return
        opening = batch.slice(first, first + 1)
        if version2.is_version2_connect(opening):
            self.version2 = Version2Decoder(self._known_classes)
            self.decoder = self.version2
            self.has_confirms = self.outbox.has_deliver_frames = True
            yield version2.parse_connect(opening)
            first += 1
        else:
            self.decoder = Version1Decoder(self._known_classes)
        if first < batch.count:
            yield from self.decoder.decode_events(batch.slice(first, batch.count))

    def tick(
        self, limits: Limits, tick_seconds: float, *, is_blocking_publishers: bool
    ) -> RemoteProtocolError | None:
        """Check the timeouts of this peer once per tick.

        Args:
            is_blocking_publishers: True if publishers wait because this peer does not read.

        Returns:
            The error to close the session with, or None.
        """
        receiver, outbox = self.receiver, self.outbox
        has_received_nothing = receiver.received_bytes == self._last_received_bytes
        has_sent_nothing = outbox.sent_bytes == self._last_sent_bytes
        self._last_received_bytes = receiver.received_bytes
        sent_no_frame = (
            receiver.frame_count == 0 and not receiver.tail
        ) or not self.is_authenticated
        sent_no_frame = sent_no_frame and not self.is_authenticating
        has_partial_frame = receiver.tail and receiver.frame_count == self._last_frame_count
        is_send_blocked = has_sent_nothing and not outbox.is_idle
        is_blocking_others = is_blocking_publishers and is_send_blocked
        self.send_blocked_ticks = self.send_blocked_ticks + 1 if is_send_blocked else 0
        self.parked_ticks = self.parked_ticks + 1 if self.parked_messages else 0
        self._last_frame_count, self._last_sent_bytes = receiver.frame_count, outbox.sent_bytes
        if self.is_reading_paused or self.is_local:  # Nothing is read here, so nothing can be late.
            sent_no_frame = has_partial_frame = False
        self._no_frame_ticks = self._no_frame_ticks + 1 if sent_no_frame else 0
        self._partial_frame_ticks = self._partial_frame_ticks + 1 if has_partial_frame else 0
        self._blocking_others_ticks = self._blocking_others_ticks + 1 if is_blocking_others else 0
        for ticks, limit_seconds, reason, action in (
            (self._no_frame_ticks, limits.hello_seconds, Reason.HELLO_TIMEOUT, "sent nothing"),
            (
                self._partial_frame_ticks,
                limits.frame_seconds,
                Reason.FRAME_TIMEOUT,
                "completed no frame",
            ),
            (
                self._blocking_others_ticks,
                limits.stall_seconds,
                Reason.STALLED,
                "blocks the publishers of a full class and read nothing",
            ),
        ):
            if ticks * tick_seconds > limit_seconds:
                return RemoteProtocolError(reason, f"the peer {action} for {limit_seconds:g} s")
        return self._check_heartbeat(
            tick_seconds,
            has_received_nothing=has_received_nothing,
            has_sent_nothing=has_sent_nothing,
        )

    def _check_heartbeat(
        self, tick_seconds: float, *, has_received_nothing: bool, has_sent_nothing: bool
    ) -> RemoteProtocolError | None:
        """Send a heartbeat if due, and return an error if the peer missed its own."""
        seconds = self.heartbeat_seconds
        if not seconds:
            return None
        self._no_send_ticks = self._no_send_ticks + 1 if has_sent_nothing else 0
        if not self.outbox.has_bytes and (self._no_send_ticks + 1) * tick_seconds >= seconds:
            self.outbox.queue_reply(frames.encode(frames.HEARTBEAT))
        self._no_receive_ticks = self._no_receive_ticks + 1 if has_received_nothing else 0
        limit_seconds = seconds * HEARTBEATS_MISSED_MAX
        if self._no_receive_ticks * tick_seconds <= limit_seconds:
            return None
        return RemoteProtocolError(
            Reason.HEARTBEAT_TIMEOUT,
            f"the peer sent nothing for {limit_seconds:g} s, expected a heartbeat every "
            f"{seconds:g} s",
        )
