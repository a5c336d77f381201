"""State of one NATS client: handshake, output, and its subscriptions.

A session has no access to other clients; `NatsServer` applies commands that concern them. A batch
is gathered per client and encoded once, in publication order across the client's subscriptions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from simplebus.core.channel.sharded_dict import ShardedDict
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import RECEIVE_BYTES, TRICKLE_BYTES
from simplebus.core.protocol.receive_buffer import ReceiveBuffer, UnprocessedInput
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.rate_limits import address_network
from simplebus.core.session.session import Session
from simplebus.core.users.permissions import Grants
from simplebus.core.users.rate_limit import RateLimiter, read_bytes
from simplebus.core.users.users import User
from simplebus.nats.limits import (
    EVENTS_PER_READ,
    FAN_OUT_READ_BYTES,
    FILTERED_DELIVERY_COST_BYTES,
    OUTPUT_PER_READ_BYTES,
    READ_BYTES_INITIAL,
    READ_BYTES_MIN,
    STALL_SECONDS_MAX,
)
from simplebus.nats.protocol import encode
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, row_indexes
from simplebus.nats.protocol.handshake import ConnectOptions, Info
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.server.outbox import NatsOutbox
from simplebus.nats.server.permissions import OpenReplies, PermissionCache, SubjectGrants

_NO_ROWS: Indexes = np.empty(0, np.int64)
_TARGET_COST = 0.9
"""Cost that a read should cause, as a fraction of the maximum: the read size grows up to there."""

GatheredRows: TypeAlias = list[tuple[bytes, Indexes | None]]
"""Messages of the current batch for one client: subscription id and rows; None for all rows."""
EncodedBatches: TypeAlias = dict[tuple[bytes, bool], memoryview]
"""Complete batches that were already encoded, by subscription id and whether with headers."""


def _no_session() -> None:
    return None


class NatsSessionOwner(Protocol):
    """Server of a session. It receives the events of the session's client."""

    def mark_ready(self, session: NatsSession) -> None:
        """Record that the outbox has new bytes."""

    def mark_gathering(self, session: NatsSession) -> None:
        """Record that the session has gathered the first messages of a batch."""

    def add_read_cost(self, cost_bytes: int) -> None:
        """Add to the cost of the current turn, in bytes of output."""

    def handle_slow(self, session: NatsSession) -> None:
        """Note that many bytes are pending for the client."""

    def finish_subscription(self, subscription: NatsSubscription) -> None:
        """End a subscription that has received its `max_messages`."""


class NatsSession:
    """Protocol state of one connection, from accept to close."""

    def __init__(
        self,
        info: Info,
        parser: NatsParser,
        *,
        peer: str,
        slow_pending_bytes: int,
        owner: NatsSessionOwner,
    ) -> None:
        self.client_id = info.client_id
        self.peer = peer
        """Name of the client in logs."""
        self.address = info.client_ip
        """Address of the client."""
        self.parser = parser
        self.outbox = NatsOutbox()
        self.options = ConnectOptions()
        self.info = info
        """INFO that was sent to the client."""
        self.user: User | None = None
        """The authenticated user; None without authentication."""
        self.admission_error: RemoteProtocolError | None = None
        """Reason to refuse the client even with valid credentials."""
        self.is_authenticating = False
        """True while the server checks the client's credentials."""
        self.on_repeated_connect: Callable[[Auth], None] = lambda auth: None
        """Called when CONNECT names another user. Raises RemoteProtocolError."""
        self.certificate_names: tuple[str, ...] = ()
        """Names in the client's certificate."""
        self.class_grants: Grants | None = None
        """Permissions for classes; None for all."""
        self.subject_grants: SubjectGrants | None = None
        """Permissions for subjects; None for all."""
        self.open_replies: OpenReplies | None = None
        """Reply subjects that the client may publish to; None without a response permission."""
        self.token_buckets: tuple[RateLimiter, ...] = ()
        """Rate limits of the client's publications; empty for none. See `set_token_buckets`."""
        self.rate_limited_until = 0.0
        """Time on the bus's clock until which the client is not read because of its rate limit."""
        self.is_identified = False
        """True after CONNECT, or if CONNECT is not required."""
        self.has_sent_connect = False
        """True after CONNECT: another CONNECT ends the subscriptions."""
        self.is_first_pong_sent = False
        """True after the first PONG to the client."""
        self.is_connect_answered = False
        """True after the first PONG that followed CONNECT."""
        self.last_received_at = 0.0
        """Time of the last bytes from the client."""
        self.is_first_ping_sent = False
        """True after the first PING to the client."""
        self.unanswered_ping_count = 0
        """PINGs that the client has not answered."""
        self.subscriptions: ShardedDict[bytes, NatsSubscription] = ShardedDict()
        """Subscriptions by subscription id."""
        self.subscription_generation = 0
        """Number that grows when all subscriptions end."""
        self.subscription_bytes_by_account: dict[str, int] = {}
        """Estimated memory of the subscriptions, by the account that is charged."""
        self.stall: PublisherStall | None = None
        """Slow clients that this publisher filled and waits for; None while it is read."""
        self.has_stalled = False
        """True once the client has waited for slow clients."""
        self.last_fast_receiver: Callable[[], NatsSession | None] = _no_session
        """Weak reference to a receiver that was not slow when this client last published."""
        self.last_fast_receiver_at = 0.0
        """Time of the publication for which `last_fast_receiver` was set."""
        self.sent_bytes_at_tick = -1
        """Bytes sent until the last tick; -1 if nothing was pending at that tick."""
        self.progress_at = 0.0
        """Tick of the last progress of sending. Undefined while nothing is pending."""
        self.stuck_sent_bytes = -1
        """Bytes sent when a publisher last waited for this client in vain; -1 for never."""
        self.stuck_since = 0.0
        """Time when a publisher first waited in vain at `stuck_sent_bytes`."""
        self.last_chance_until = 0.0
        """End of the period in which every publisher waits for this client; 0 before the period."""
        self.is_closed = False
        self.is_disconnecting = False
        """True if the session will be closed: nothing more is sent to it."""
        self.local_session: Session | None = None
        """Session of the client at the broker; None if the client uses no classes."""
        self.in_messages = self.in_bytes = 0
        """Messages published by the client, and the bytes of their headers and payloads."""
        self.ack_count = self.ack_bytes = 0
        """The part of `in_messages` and `in_bytes` that are acks."""
        self.out_messages = 0
        """Messages sent or pending."""
        self.unprocessed = UnprocessedInput()
        """Received bytes that are processed in later turns. See `allow_split_reads`."""
        self.pending_request: PendingRequest | None = None
        """Request that is processed in several turns, until it is done."""
        self.can_split_reads = False
        """True if a read with expensive commands may be processed in parts."""
        self._owner = owner
        self._slow_pending_bytes = slow_pending_bytes
        """The owner handles a session with more pending bytes as slow."""
        self._gathered_bytes = 0
        self._gathered: GatheredRows = []
        self._counted_messages = self._counted_bytes = 0
        self._max_read_bytes = RECEIVE_BYTES
        self._next_read_bytes = READ_BYTES_INITIAL

    @property
    def memory_account(self) -> str:
        """Account that is charged for subscriptions: the user, or the network of the address."""
        return (self.user.name if self.user is not None else "") or address_network(self.address)

    @property
    def subscription_memory_bytes(self) -> int:
        """Estimated memory of the subscriptions."""
        return sum(self.subscription_bytes_by_account.values())

    def take_subscriptions(self) -> ShardedDict[bytes, NatsSubscription]:
        """Remove and return all subscriptions. They end at once, but may still be in the routes."""
        self.subscription_generation += 1  # Ends them without a loop; see `has_ended`.
        subscriptions, self.subscriptions = self.subscriptions, ShardedDict()
        return subscriptions

    def send_info(self, **changes: Any) -> None:
        """Send INFO with changed fields, if the client accepts it now.

        A client accepts INFO at any time after the first PONG that follows CONNECT, if it has
        announced this in CONNECT.
        """
        if self.is_connect_answered and self.options.protocol:
            self.send(msgspec.structs.replace(self.info, **changes).line())

    def set_connect_urls(self, connect_urls: tuple[str, ...]) -> None:
        """Send the client the addresses of servers that it may use as well."""
        self.info = msgspec.structs.replace(self.info, connect_urls=connect_urls)
        self.send_info()

    @property
    def is_reading_paused(self) -> bool:
        """True while published messages wait for space in a class."""
        return self.local_session is not None and self.local_session.is_reading_paused

    @property
    def pending_bytes(self) -> int:
        """Bytes in the outbox, plus the estimated size of gathered messages."""
        return self.outbox.pending_bytes + self._gathered_bytes

    @property
    def kept_bytes(self) -> int:
        """Memory held for the client: pending output and kept input."""
        return self.outbox.pending_bytes + self.kept_input_bytes

    @property
    def kept_input_bytes(self) -> int:
        """Received bytes that are kept: the incomplete command, the pending request, and bytes
        that are not processed yet.
        """
        request_bytes = 0 if self.pending_request is None else self.pending_request.kept_bytes
        return self.parser.tail_bytes + len(self.unprocessed) + request_bytes

    @property
    def is_request_pending(self) -> bool:
        """True if `NatsServer.continue_request` must be called before the next `receive`."""
        return self.pending_request is not None

    @property
    def next_read_bytes(self) -> int:
        """Size of the next read."""
        local_session = self.local_session
        if local_session is not None and local_session.is_reading_paused:
            return min(self._next_read_bytes, TRICKLE_BYTES)
        return min(self._next_read_bytes, self._max_read_bytes)

    @property
    def can_free_space(self) -> bool:
        """True: acks of the client may free space for its own messages."""
        return True

    @property
    def can_receive_error(self) -> bool:
        """True: pending bytes are sent before closing."""
        return True

    def allow_split_reads(self) -> None:
        """Process only some expensive commands of a read at once.

        After each read the caller processes in later turns the pending request, see
        `NatsServer.continue_request`, and then `unprocessed`, see `refill`.
        """
        self.can_split_reads = True

    def refill(self, buffer: ReceiveBuffer) -> int:
        """Copy some of the unprocessed bytes into the buffer. Returns how many, as a read does."""
        return buffer.fill(self.unprocessed.pop(TRICKLE_BYTES))

    def begin_authentication(self) -> None:
        """Record that the client's credentials are being checked, which may take long."""
        self.is_authenticating = True

    def end_authentication(self, error: RemoteProtocolError | None) -> None:
        """Record the result of the check: the error that refuses the client, or None."""
        self.is_authenticating, self.admission_error = False, error

    def set_token_buckets(self, token_buckets: tuple[RateLimiter, ...]) -> None:
        """Set the rate limits of the client's publications."""
        self.drain_published()
        self.token_buckets, self.rate_limited_until = token_buckets, 0.0
        self._max_read_bytes = read_bytes(token_buckets) if token_buckets else RECEIVE_BYTES

    def drain_published(self) -> tuple[int, int]:
        """Return the messages and bytes published since the last call, without acks."""
        messages = self.in_messages - self.ack_count - self._counted_messages
        size = self.in_bytes - self.ack_bytes - self._counted_bytes
        self._counted_messages += messages
        self._counted_bytes += size
        return messages, size

    def adapt_read_size(
        self, count: int, *, output_bytes: int, fan_out_bytes: int, event_count: int
    ) -> None:
        """Choose the next read size after a read of `count` bytes.

        The size grows while reads are full and cheap, up to twice at a time and to `RECEIVE_BYTES`.
        It shrinks if one read caused too many events or enough output to make a receiver slow.

        Args:
            count: Size of the read.
            output_bytes: Cost of the read, as bytes of output.
            fan_out_bytes: Part of the cost that batches caused for all clients but one. It limits
                the size to `FAN_OUT_READ_BYTES` at the least.
            event_count: Events of the read.
        """
        size = self._adapted_read_size(count, output_bytes, event_count)
        if fan_out_bytes and size < FAN_OUT_READ_BYTES:
            fan_out_size = self._adapted_read_size(count, output_bytes - fan_out_bytes, event_count)
            size = max(size, min(fan_out_size, FAN_OUT_READ_BYTES))
        self._next_read_bytes = size

    def _adapted_read_size(self, count: int, output_bytes: int, event_count: int) -> int:
        max_output_bytes = min(OUTPUT_PER_READ_BYTES, self._slow_pending_bytes)
        cost = max(output_bytes / max_output_bytes, event_count / EVENTS_PER_READ)
        if cost > 1:
            return max(READ_BYTES_MIN, int(count / cost))
        if count >= self._next_read_bytes and cost < _TARGET_COST:
            growth = 2.0 if 2 * cost <= _TARGET_COST else _TARGET_COST / cost
            return min(int(growth * count), RECEIVE_BYTES)
        return self._next_read_bytes

    def reduce_read_size(self) -> None:
        """Read less at a time, because receivers do not keep up."""
        self._next_read_bytes = max(READ_BYTES_MIN, self._next_read_bytes // 4)

    def excuse_silence(self) -> None:
        """Restart the time limit for PONGs: the server is not reading from the client."""
        self.unanswered_ping_count = 0

    def accepts_from(self, origin: NatsSession | None) -> bool:
        """Return True if messages of this publisher are delivered to the client."""
        return not self.is_disconnecting and (origin is not self or self.options.echo)

    @property
    def accepts_headers(self) -> bool:
        """True if the client accepts HMSG."""
        return self.options.headers

    def send(
        self, piece: bytes | bytearray | memoryview, shared_piece: memoryview | None = None
    ) -> None:
        """Append bytes to the outbox, and a piece that the outboxes of other clients have too."""
        if self.is_disconnecting:
            return
        self.outbox.append(piece)
        if shared_piece is not None:
            self.outbox.append_shared(shared_piece)
        self._owner.mark_ready(self)
        if self.outbox.pending_bytes > self._slow_pending_bytes:
            self._owner.handle_slow(self)

    def gather(self, sid: bytes, rows: Indexes | None, size: int) -> None:
        """Gather messages of the current batch for a subscription, about `size` bytes."""
        if not self._gathered:
            self._owner.mark_gathering(self)
        self._gathered_bytes += size
        self._gathered.append((sid, rows))
        self._owner.mark_ready(self)
        if self.outbox.pending_bytes + self._gathered_bytes > self._slow_pending_bytes:
            self._owner.handle_slow(self)

    def finish_subscription(self, subscription: NatsSubscription) -> None:
        """End a subscription that has received its `max_messages`."""
        self._owner.finish_subscription(subscription)

    def add_read_cost(self, cost_bytes: int) -> None:
        """Add to the cost of the current turn, in bytes of output."""
        self._owner.add_read_cost(cost_bytes)

    def discard_output(self) -> deque[memoryview]:
        """Discard all pending output. Returns its pieces, because freeing many takes long."""
        self.discard_gathered()
        return self.outbox.clear()

    def discard_gathered(self) -> None:
        """Discard the gathered messages of the current batch."""
        self._gathered.clear()
        self._gathered_bytes = 0

    def write_gathered(self, batch: UniformBatch | MixedBatch, encoded: EncodedBatches) -> int:
        """Encode the gathered messages of a batch into the outbox.

        Args:
            batch: The batch that the gathered rows refer to.
            encoded: Complete batches encoded for other sessions; reused and extended.

        Returns:
            The number of bytes appended.
        """
        if not self._gathered:
            return 0
        gathered, headers = self._gathered, self.accepts_headers
        if len(gathered) > 1:
            piece = memoryview(encode.encode_for_subscriptions(batch, gathered, headers=headers))
        else:
            sid, rows = gathered[0]
            key = (sid, headers)
            if rows is None and key in encoded:
                piece = encoded[key]
            else:
                if isinstance(batch, UniformBatch):
                    piece = memoryview(encode.encode_uniform(batch, sid, rows, headers=headers))
                else:
                    piece = memoryview(encode.encode_mixed(batch, sid, rows))
                if rows is None:
                    encoded[key] = piece
        # Keeps the list: new ones of thousands of clients would prolong garbage collections.
        self.discard_gathered()
        self.outbox.append(piece)
        return len(piece)


class NatsSubscription:
    """Subscription of one client to a subject."""

    __slots__ = (
        "_generation",
        "delivered_count",
        "denied_subjects",
        "max_messages",
        "memory_account",
        "queue",
        "session",
        "sid",
        "subject",
    )

    def __init__(
        self,
        session: NatsSession,
        subject: bytes,
        queue: bytes,
        sid: bytes,
        denied_subjects: PermissionCache | None = None,
    ) -> None:
        self.session = session
        self.subject = subject
        self.queue = queue
        self.sid = sid
        self.memory_account = ""
        """Account charged for the memory of the subscription."""
        self.delivered_count = 0
        """Messages delivered so far."""
        self.max_messages = 0
        """Number of messages after which the subscription ends; 0 for no limit."""
        self.denied_subjects = denied_subjects
        """Cache of subjects whose messages are not delivered; None if nothing is denied."""
        self._generation = session.subscription_generation
        """Generation of the session's subscriptions; -1 if the subscription was removed alone."""

    @property
    def has_ended(self) -> bool:
        """True if the subscription has ended. It may still be in the routes, or a receiver of
        messages that are delivered in later turns.
        """
        return self._generation != self.session.subscription_generation

    @property
    def is_finished(self) -> bool:
        """True if the subscription has received its `max_messages`, and will end."""
        return 0 < self.max_messages <= self.delivered_count

    @property
    def is_ordered(self) -> bool:
        """True with `max_messages`: the limit applies to the first rows of a batch."""
        return self.max_messages > 0

    @property
    def order_key(self) -> NatsSession:
        """The session: messages for one client are encoded together."""
        return self.session

    @property
    def delivery_filters(self) -> tuple[PermissionCache, ...]:
        """The cache of denied subjects; empty if nothing is denied."""
        return () if self.denied_subjects is None else (self.denied_subjects,)

    def further_cost_bytes(self, count: int) -> int:
        """Return the size of the subscription ids, because a client may choose very long ones, and
        the cost of a delivery filter.
        """
        filter_cost_bytes = FILTERED_DELIVERY_COST_BYTES if self.denied_subjects is not None else 0
        return count * len(self.sid) + filter_cost_bytes

    def receiving_sessions(self) -> tuple[NatsSession]:
        """Return the session."""
        return (self.session,)

    def remove_from_session(self) -> bool:
        """Remove the subscription from its session. Nothing more is delivered to it.

        Returns:
            False if the session does not have the subscription.
        """
        if self.session.subscriptions.pop(self.sid, None) is None:
            return False
        self._generation = -1
        return True

    def accepts_from(self, origin: NatsSession | None) -> bool:
        """Return True if messages of this publisher are delivered."""
        return not self.has_ended and self.session.accepts_from(origin)

    def accepts(self, subject: bytes, origin: NatsSession | None) -> bool:
        """Return True if messages of this publisher on this subject are delivered."""
        return self.accepts_from(origin) and not (
            self.denied_subjects and self.denied_subjects.get(subject)
        )

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        session = self.session
        if (
            self.has_ended
            or session.is_disconnecting
            or (origin is session and not session.options.echo)
            or (self.denied_subjects and self.denied_subjects.get(message.subject))
        ):
            return False
        headers = session.options.headers
        if message.shared_end is None:
            session.send(encode.encode_message(message, self.sid, headers=headers))
        else:
            session.send(*encode.encode_shared(message, self.sid, headers=headers))
        if message.reply and session.open_replies is not None:
            session.open_replies.add(message.reply)
        self._count_delivered(1)
        return True

    def deliver_in_steps(
        self, message: Pub, origin: NatsSession | None
    ) -> Generator[None, None, bool]:
        yield from ()
        return self.deliver(message, origin)

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        self.deliver_rows(messages, rows, origin)

    def deliver_rows(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> Indexes:
        """Deliver rows of a batch; None for all. Returns the rows that were not accepted."""
        if not self.accepts_from(origin):
            return row_indexes(messages, rows)
        rejected = _NO_ROWS
        if self.denied_subjects is not None:
            rows, rejected = self._split_denied(messages, rows, self.denied_subjects)
        count = messages.count if rows is None else len(rows)
        remaining = self.max_messages - self.delivered_count
        if self.max_messages and count > remaining:
            rows = row_indexes(messages, rows)
            rejected = np.sort(np.concatenate((rejected, rows[remaining:])))
            rows, count = rows[:remaining], remaining
        if count:
            session = self.session
            session.gather(self.sid, rows, count * (messages.mean_message_bytes + len(self.sid)))
            if (
                isinstance(messages, UniformBatch)
                and messages.first_message.reply
                and session.open_replies is not None
            ):
                session.open_replies.add(messages.first_message.reply)
            self._count_delivered(count)
        return rejected

    def _split_denied(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, denied: PermissionCache
    ) -> tuple[Indexes | None, Indexes]:
        """Return the deliverable rows and the denied rows."""
        if isinstance(messages, UniformBatch):
            if denied.get(messages.first_message.subject):
                return _NO_ROWS, row_indexes(messages, rows)
            return rows, _NO_ROWS
        are_denied = denied.get_rows(messages, rows)
        if not are_denied.any():
            return rows, _NO_ROWS
        rows = row_indexes(messages, rows)
        return rows[~are_denied], rows[are_denied]

    def _count_delivered(self, count: int) -> None:
        self.delivered_count += count
        self.session.out_messages += count
        if self.max_messages and self.delivered_count >= self.max_messages:
            self.session.finish_subscription(self)


class PendingRequest:
    """Rest of a publication, or of a repeated CONNECT, which is processed in later turns."""

    __slots__ = (
        "cost_bytes",
        "event_count",
        "fan_out_bytes",
        "kept_bytes",
        "read_bytes",
        "slow_sessions",
        "steps",
    )

    def __init__(self, steps: Iterator[None], kept_bytes: int) -> None:
        self.steps = steps
        """Generator that does the work. It yields at the end of each turn but the last."""
        self.kept_bytes = kept_bytes
        """Size of copied messages."""
        self.read_bytes = self.event_count = 0
        """Size and number of events of the read that contained the request."""
        self.cost_bytes = self.fan_out_bytes = 0
        """Cost so far of the read that contained the request; see
        `NatsSession.adapt_read_size`.
        """
        self.slow_sessions: dict[NatsSession, None] = {}
        """Receivers that became slow."""


class PublisherStall:
    """Slow sessions that a publisher waits for."""

    __slots__ = ("has_fast_receivers", "initial_sent_bytes", "max_seconds", "sessions")

    def __init__(
        self, sessions: list[NatsSession], has_fast_receivers: bool, max_seconds: float
    ) -> None:
        self.sessions = sessions
        self.has_fast_receivers = has_fast_receivers
        """True if receivers that are not slow would be delayed by the stall."""
        self.max_seconds = max_seconds
        """Longest duration of the stall."""
        self.initial_sent_bytes = [session.outbox.sent_bytes for session in sessions]
        """Bytes sent to each session when the stall began."""

    def shorten(self) -> None:
        """Wait only briefly, and only for sessions that are about to be disconnected."""
        self.has_fast_receivers, self.max_seconds = True, STALL_SECONDS_MAX
