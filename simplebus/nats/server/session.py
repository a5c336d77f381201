"""One NATS client: what it said of itself, what it subscribed to, what waits for it.

Rule 1: a session knows its own client only. What its words mean for others is the front's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import RECEIVE_BYTES, TRICKLE_BYTES
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.rate_limits import address_network
from simplebus.core.users.permissions import Grants
from simplebus.core.users.rate_limit import RateLimiter, read_bytes
from simplebus.nats.limits import (
    EVENTS_PER_READ,
    OUTPUT_PER_READ_BYTES,
    READ_BYTES_INITIAL,
    READ_BYTES_MIN,
)
from simplebus.nats.protocol import encode
from simplebus.nats.protocol.events import Indexes, MixedBatch, UniformBatch
from simplebus.nats.protocol.handshake import ConnectOptions, Info
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.server.outbox import NatsOutbox
from simplebus.nats.server.permissions import OpenReplies, SubjectGrants
from simplebus.nats.server.subscription import NatsSubscription

if TYPE_CHECKING:
    from simplebus.nats.bus.acked import AckedDeliveries
    from simplebus.nats.server.slow_consumers import PublisherStall
    from simplebus.nats.server.users import NatsUser

GatheredRows: TypeAlias = list[tuple[bytes, Indexes | None]]
"""What a client is to be sent of one batch: under which sid, and which messages."""
EncodedBatches: TypeAlias = dict[tuple[bytes, bool], memoryview]
"""What was written of one batch, all of it: by sid, and whether with headers."""


def _no_session() -> None:
    return None


class NatsSession:
    """Protocol state of one connection, from accept to close."""

    def __init__(
        self,
        info: Info,
        parser: NatsParser,
        *,
        peer: str,
        slow_pending_bytes: int,
        on_ready: Callable[[NatsSession], None],
        on_gathering: Callable[[NatsSession], None],
        on_subscription_complete: Callable[[NatsSubscription], None],
        on_slow: Callable[[NatsSession], None],
    ) -> None:
        self.client_id = info.client_id
        self.peer = peer
        """Who it is, for logs."""
        self.address = info.client_ip
        """Where it comes from."""
        self.parser = parser
        self.outbox = NatsOutbox()
        self.options = ConnectOptions()
        self.info = info
        """What it was told of the server."""
        self.certificate_user = ""
        """Name of the user whose certificate it showed."""
        self.user: NatsUser | None = None
        """Who it is; None where nobody is asked, or a token was."""
        self.admission_error: RemoteProtocolError | None = None
        """Why it is not to be let in, whoever it says to be."""
        self.is_authenticating = False
        """Whether it has said who it is, and that is looked at: it waits for us."""
        self.on_repeated_connect: Callable[[Auth], None] = lambda words: None
        """Called when it says to be somebody else. Raises RemoteProtocolError."""
        self.certificate_names: tuple[str, ...] = ()
        """What that calls its holder."""
        self.class_grants: Grants | None = None
        """What it may do with classes; None for everything."""
        self.subject_grants: SubjectGrants | None = None
        """What it may do; None for everything."""
        self.open_replies: OpenReplies | None = None
        """Where it may answer; None if that is nothing special."""
        self.token_buckets: tuple[RateLimiter, ...] = ()
        """How fast it may publish; none for as fast as it can. See `adopt`."""
        self.rate_limited_until = 0.0
        """Until when it is not read from because it has published too fast, by the bus's clock."""
        self.is_identified = False
        """Whether it is known who it is: it has said CONNECT, or need not."""
        self.has_sent_connect = False
        """Whether another CONNECT is one too many: subscriptions end with it."""
        self.is_first_pong_sent = False
        """Whether it was sent its first PONG."""
        self.is_connect_answered = False
        """Whether it was sent the first PONG behind its CONNECT, and the INFO that may follow."""
        self.last_received_at = 0.0
        """When it said anything the last time."""
        self.is_first_ping_sent = False
        """Whether it was sent its first PING."""
        self.unanswered_ping_count = 0
        """PINGs that it did not answer."""
        self.subscriptions: dict[bytes, NatsSubscription] = {}
        """By sid."""
        self.subscription_memory_bytes = 0
        """What they take of memory."""
        self.stall: PublisherStall | None = None
        """Clients that it has filled with its last words, and that are to catch up."""
        self.has_stalled = False
        """Whether there were any, ever."""
        self.last_fast_receiver: Callable[[], NatsSession | None] = _no_session
        """Who was sent something by it and was not behind, the last time that this was looked at,
        if it is still there."""
        self.last_fast_receiver_at = 0.0
        """When that was."""
        self.sent_bytes_at_tick = -1
        """What it had taken at the last beat; -1 if nothing waited for it then."""
        self.progress_at = 0.0
        """When it took something, or had nothing to take, the last time: as of the last beat.
        Means nothing while nothing waits for it."""
        self.stuck_sent_bytes = -1
        """What it had taken when somebody waited for it in vain; -1 for never."""
        self.stuck_since = 0.0
        """When that was, the first time with so much taken."""
        self.last_chance_until = 0.0
        """How long publishers wait for it though others would wait, too; 0 if it is not known yet:
        it was not about to be given up since it was behind."""
        self.is_closed = False
        self.is_disconnecting = False
        """Whether it is about to be closed: it is sent nothing more."""
        self.deliveries: AckedDeliveries | None = None
        """What it is sent with acknowledgements, and what else it has to do with classes, if it
        does."""
        self.in_messages = self.in_bytes = 0
        """What it has published: messages, and their headers and payloads."""
        self.ack_count = self.ack_bytes = 0
        """What of it are acknowledgements."""
        self.out_messages = 0
        """Messages that it was sent, or that wait for it."""
        self.on_subscription_complete = on_subscription_complete
        """Called with a subscription that has been sent all that it asked for."""
        self._on_ready = on_ready
        """Called when something waits to be sent."""
        self._on_slow = on_slow
        """Called when more waits for it than the mark."""
        self._slow_pending_bytes = slow_pending_bytes
        self._on_gathering = on_gathering
        """Called when something is gathered for it, where nothing was."""
        self._gathered_bytes = 0
        self._gathered: GatheredRows = []
        self._counted_messages = self._counted_bytes = 0
        self._max_read_bytes = RECEIVE_BYTES
        self._next_read_bytes = READ_BYTES_INITIAL

    @property
    def memory_account(self) -> str:
        """Who answers for what it takes: its user, or else its place."""
        return (self.user.name if self.user is not None else "") or address_network(self.address)

    @property
    def is_reading_paused(self) -> bool:
        """Whether reading is to pause: what it has published waits for room in a class."""
        return self.deliveries is not None and self.deliveries.local_session.is_reading_paused

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for it, or are about to."""
        return self.outbox.pending_bytes + self._gathered_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for it: what waits to be taken, and what it has begun to say."""
        return self.outbox.pending_bytes + self.parser.tail_bytes

    @property
    def next_read_bytes(self) -> int:
        """How much to read from this client at once."""
        most = TRICKLE_BYTES if self.is_reading_paused else self._max_read_bytes
        return min(self._next_read_bytes, most)

    @property
    def can_free_space(self) -> bool:
        """Whether its acknowledgements may make room for its own messages."""
        return True

    @property
    def can_receive_error(self) -> bool:
        """Whether it is sent what waits for it before it is closed."""
        return True

    def set_token_buckets(self, token_buckets: tuple[RateLimiter, ...]) -> None:
        """From now on what it publishes is measured by these."""
        self.drain_published()
        self.token_buckets, self.rate_limited_until = token_buckets, 0.0
        self._max_read_bytes = read_bytes(token_buckets) if token_buckets else RECEIVE_BYTES

    def drain_published(self) -> tuple[int, int]:
        """Messages that it has published since the last time, and their bytes."""
        messages = self.in_messages - self.ack_count - self._counted_messages
        size = self.in_bytes - self.ack_bytes - self._counted_bytes
        self._counted_messages += messages
        self._counted_bytes += size
        return messages, size

    def adapt_read_size(self, count: int, *, output_bytes: int, event_count: int) -> None:
        """A read brought so many bytes, that said so many things, and made so many bytes for
        others. Bulk is read in ever larger pieces, as long as not too much has to be done, and
        no read alone fills a client that keeps up."""
        most = min(OUTPUT_PER_READ_BYTES, self._slow_pending_bytes)
        work = max(output_bytes / most, event_count / EVENTS_PER_READ)
        if work > 1:
            self._next_read_bytes = max(READ_BYTES_MIN, int(count / work))
        elif count >= self._next_read_bytes and work <= 0.5:
            self._next_read_bytes = min(2 * self._next_read_bytes, RECEIVE_BYTES)

    def reduce_read_size(self) -> None:
        """Others do not take what is made of what it says: less at a time is better."""
        self._next_read_bytes = max(READ_BYTES_MIN, self._next_read_bytes // 4)

    @property
    def accepts_headers(self) -> bool:
        """Whether it is sent headers."""
        return self.options.headers

    def send(self, piece: bytes | bytearray | memoryview) -> None:
        """Queue bytes for it."""
        if self.is_disconnecting:
            return
        self.outbox.append(piece)
        self._on_ready(self)
        if self.outbox.pending_bytes > self._slow_pending_bytes:
            self._on_slow(self)

    def gather(self, sid: bytes, rows: Indexes | None, size: int) -> None:
        """These messages of the batch that is looked at are for it, under this sid: about so many
        bytes."""
        if not self._gathered:
            self._on_gathering(self)
        self._gathered_bytes += size
        self._gathered.append((sid, rows))
        self._on_ready(self)
        if self.outbox.pending_bytes + self._gathered_bytes > self._slow_pending_bytes:
            self._on_slow(self)

    def discard_output(self) -> None:
        """Nothing of what waits for it is to be sent."""
        self.discard_gathered()
        self.outbox.clear()

    def discard_gathered(self) -> None:
        """Nothing of the batch that is looked at is to be sent."""
        self._gathered.clear()
        self._gathered_bytes = 0

    def write_gathered(self, batch: UniformBatch | MixedBatch, encoded: EncodedBatches) -> int:
        """Queue what was gathered of a batch. `written` is what others were sent of it. Returns how
        many bytes that are."""
        if not self._gathered:
            return 0
        gathered, self._gathered = self._gathered, []
        self._gathered_bytes = 0
        headers = self.accepts_headers
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
        self.outbox.append(piece)
        return len(piece)
