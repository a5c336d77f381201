"""One program's side of the conversation (protocol/binary.md, version 2), without I/O.

Rule 1: bytes and a clock reading in, bytes out. A driver brings what it read to `receive`, writes
what `outgoing` shows, and calls `tick` when told; it decides nothing.
Rule 2: the core outlives connections. On a fresh one it says who it is, subscribes again under the
same numbers, writes again what was not confirmed, and then goes on.
Rule 3: a class is named to the bus before its first use, and every subscription here is one there.
Rule 4: reading never pauses. What waits for a slow consumer is at most what its subscription has in
flight at the bus, for copies of what waits are dropped; all together, the sum of these bounds.
Rule 5: what is for a subscription that is gone is dropped and counted: the bus learns soon.

    bytes ─► FrameReceiver ─► runs ─► Inbox ─► Receipt ─► AckLog ─┐
    publish ─► Publisher ─► chunks ───────────────────────────────┼─► Outgoing ─► bytes
    connected, ask ─► Conversation ─► requests ───────────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from simplebus.client.core.class_names import ClassReference, parse_class_reference
from simplebus.client.core.class_names import check_class_id as check_class_id
from simplebus.client.core.connection import ConnectionState
from simplebus.client.core.frame_runs import FrameRun, split_into_runs
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.core.statistics import ClientStatistics as ClientStatistics
from simplebus.core.commit_log import Durability
from simplebus.core.errors import BusError, RefusedError
from simplebus.core.limits import ACKS_MAX, Limits
from simplebus.core.protocol import frames
from simplebus.core.protocol.inquiry import Question
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer
from simplebus.core.protocol.requests import (
    Auth,
    ConnectRequest,
    FetchRequest,
    NamedClass,
    PurgeRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)

_DEFAULT_OPTIONS = SubscribeRequest()


class ClientCore:
    """One program's protocol state. See the module's law for how it is driven."""

    def __init__(
        self,
        *,
        name: str | None = None,
        instance: str = "",
        heartbeat_seconds: float = 0.0,
        client: str = "",
        frame_bytes_max: int = Limits().frame_bytes,
        first_unconfirmed_number: int | None = None,
        bus_id: str = "",
        first_number: int | None = None,
        auth: Auth | None = None,
    ) -> None:
        """`unconfirmed` and `bus` are for who goes on with another one's numbers, `first` for who
        has numbers of its own, `auth` for who has to show who it is, as the Connect says them."""
        introduction = ConnectRequest(
            name=name,
            instance=instance or None,
            heartbeat=heartbeat_seconds,
            client=client,
            unconfirmed=first_unconfirmed_number,
            bus=bus_id,
            first=first_number,
            auth=auth,
        )
        self._connection = ConnectionState(introduction, frame_bytes_max=frame_bytes_max)
        self.publish_buffer = self._connection.publish_buffer
        self.publish = self.publish_buffer.publish
        """Hand a message over; see Publisher.publish. Returns its position."""
        self.publish_many = self.publish_buffer.publish_many
        """Hand messages over; see Publisher.publish_many. Returns the last one's position."""
        self.publish_runs = self.publish_buffer.publish_runs
        """Hand messages of several classes over; see Publisher.publish_runs."""
        self.send_queue = self._connection.send_queue
        """What is to be written: `peek` shows it, `sent` says how much was taken."""
        self._inboxes = self._connection.inboxes
        self._frame_bytes_max = frame_bytes_max
        self._receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
        self._received_bytes = 0

    # Connections ---------------------------------------------------------------------------------

    @property
    def durability(self) -> Durability:
        """Where a message is when it is confirmed, by the bus that has answered last."""
        return self._connection.durability

    @property
    def is_ready(self) -> bool:
        """Whether the bus is there and has answered."""
        return self.send_queue.is_open

    @property
    def accepted_frame_bytes_max(self) -> int:
        """The longest frame that the bus takes from here."""
        return self.publish_buffer.accepted_frame_bytes_max

    @property
    def session_id(self) -> int | None:
        """What the bus calls the connection; None while there is none, or no answer."""
        return self._connection.session_id

    @property
    def bus_id(self) -> str:
        """The identity of the memory of the bus that answered last; empty before the first one."""
        return self._connection.bus_id

    @property
    def run_id(self) -> str:
        """Which process of the bus answered last."""
        return self._connection.run_id

    @property
    def duplicate_seconds(self) -> float:
        """How long a message is known by its number at whichever door before a cluster; 0 where the
        bus that answered last is none."""
        return self._connection.duplicate_seconds

    def connection_made(self, now: float) -> OpenRequest:
        """There is a fresh connection. Returns its Connect; what else waits follows the answer."""
        return self._connection.connection_made(now)

    def connection_lost(self) -> None:
        """The connection is gone. What lasts goes on with the next one, the rest fails."""
        self._receiver = FrameReceiver(frame_bytes_max=self._frame_bytes_max)
        self._connection.connection_lost()

    def fail_requests(self, error: BusError) -> None:
        """There will be no connection any more: whatever was asked fails with this error."""
        self._connection.open_requests.fail_all(error)

    def tick(self, now: float) -> float:
        """Time goes by. Returns when to call again; math.inf when only a connection changes that.

        Raises RemoteProtocolError when the bus has been silent for too long.
        """
        outgoing = self.send_queue
        if not self.is_ready:
            return math.inf
        if self._connection.heartbeat.is_due(now, outgoing.sent_bytes) and not outgoing.peek():
            outgoing.append_frame(frames.encode(frames.HEARTBEAT))
        return self._connection.heartbeat.next_check

    # Asking --------------------------------------------------------------------------------------

    def name_classes(self, *classes: ClassReference) -> OpenRequest:
        """Name classes to the bus, which makes those that are new.

        Raises ValueError for what is neither a class id nor a class name.
        """
        return self._connection.name_classes([parse_class_reference(one) for one in classes])

    def find_class_id(self, name: str) -> int | None:
        """The id of a class that was named by name; None before the bus has said it."""
        return self._connection.class_names.find_id(name)

    def sync(self) -> OpenRequest:
        """Done when the bus has applied everything queued before."""
        content = ConnectRequest().encode()
        return self._connection.send_request(
            frames.CONNECT, content=content, after_position=self.published_position
        )

    def subscribe(
        self, class_id: int, options: SubscribeRequest = _DEFAULT_OPTIONS, *, auto_ack: bool = True
    ) -> Inbox:
        """A subscription of its own. Its `request` is done when the bus has begun it.

        Raises ValueError for what is no class id, LocalProtocolError for one too many.
        """
        self._connection.name_class(class_id)
        inbox = self._inboxes.open_inbox(class_id, options, auto_ack=auto_ack)
        if self.is_ready:
            self._connection.send_subscribe(inbox)
        return inbox

    def unsubscribe(self, inbox: Inbox, *, is_processed: bool, forget: bool = False) -> OpenRequest:
        """A subscription ends; `processed` says what became of its last message.

        What was never handed out goes back to the bus, for others or for a later one. With `forget`
        a durable's position goes too.
        """
        if inbox.unsubscribe_request is not None:
            return inbox.unsubscribe_request
        inbox.settle_before_leave(is_processed=is_processed)
        content = UnsubscribeRequest(forget=True).encode() if forget else b""
        number = inbox.subscription_number
        request = self._connection.open_requests.open_request(
            frames.UNSUBSCRIBE, target_id=number, content=content
        )
        inbox.leave(request)
        if inbox.is_subscribed:
            self.send_queue.append_frame(request.frame)
        elif self._inboxes.get(number) is not inbox or not (
            self.is_ready or (inbox.has_kept_position and inbox.was_subscribed)
        ):
            self._inboxes.remove(inbox, inbox.error)
        # Otherwise the bus is told when it has begun the subscription, and been told what was
        # still to be said about its messages.
        return request

    def fetch(
        self,
        class_id: int,
        first: int,
        count: int,
        *,
        start_time: float | None = None,
        with_times: bool = False,
        create_class: bool = True,
    ) -> OpenRequest:
        """Messages of a class by sequence, with no effect on anybody's position: its `batches`.

        With a `time`, in seconds since 1970, they begin with the first one accepted at or after
        it, whatever `first` says; `times` has the reply say when they were accepted. A class that
        nobody has named is made; or, without `make`, refused as `unknown_class`.
        Raises ValueError for what is no class id.
        """
        check_class_id(class_id)
        if create_class:
            self._connection.name_class(class_id)
        content = FetchRequest(first=first, count=count, time=start_time, times=with_times).encode()
        request = self._connection.send_request(frames.FETCH, target_id=class_id, content=content)
        request.remaining_count = count
        return request

    def inquire(self, inquiry: Question) -> OpenRequest:
        """What waits for what: its `reply`. No class is made."""
        content = msgspec.json.encode(inquiry)
        return self._connection.send_request(
            frames.INQUIRE, content=content, after_position=self.published_position
        )

    def keep_last_values(self, class_id: int) -> OpenRequest:
        """A class is to keep the last message of each channel. Raises ValueError for what is no
        class id."""
        return self.name_classes(NamedClass(id=class_id, last_values=True))

    def purge(self, class_id: int, first: int, last: int | None) -> OpenRequest:
        """Messages first..last-1 of a class, those to the head for None, are to be nobody's any
        more. Raises ValueError for what is no class id."""
        check_class_id(class_id)
        self._connection.name_class(class_id)
        content = PurgeRequest(first=first, last=last).encode()
        return self._connection.send_request(
            frames.PURGE,
            target_id=class_id,
            content=content,
            after_position=self.published_position,
        )

    # Messages ------------------------------------------------------------------------------------

    @property
    def published_position(self) -> int:
        """Messages handed over so far: the position of the next one."""
        return self.publish_buffer.published_position

    @property
    def confirmed_position(self) -> int:
        """All positions below are stored by the bus, or refused."""
        return self.publish_buffer.confirmed_position

    @property
    def has_credit(self) -> bool:
        """Whether one message more may be handed over without piling up here."""
        return self.publish_buffer.has_credit

    def pop_refusals(self) -> dict[int, RefusedError]:
        """What was refused since this was asked the last time, by position."""
        return self.publish_buffer.pop_refusals()

    def set_notice_handler(self, on_notice: Callable[[str], object]) -> None:
        """Have this called with what the bus says about nothing that was asked of it."""
        self._connection.on_notice = on_notice

    @property
    def on_ack(self) -> Callable[[], object]:
        """Called when a consumer has said something about a message by itself."""
        return self.send_queue.ack_sink.on_manual_ack

    @on_ack.setter
    def on_ack(self, call: Callable[[], object]) -> None:
        self.send_queue.ack_sink.on_manual_ack = call

    @property
    def has_due_acks(self) -> bool:
        """Whether so much is processed that the bus should know without delay."""
        return self.send_queue.ack_sink.pending_count >= ACKS_MAX

    @property
    def has_held_acks(self) -> bool:
        """Whether acknowledgements wait for a subscription to be begun again on a connection."""
        return any(inbox.has_held_acks for inbox in self._inboxes)

    def ack_processed(self) -> bool:
        """Acknowledge what consumers have processed up to now. False when no consumer holds any
        message: then there will be nothing new until one takes some."""
        holding = False
        for inbox in self._inboxes:
            inbox.settle(include_last=False)
            holding |= inbox.has_unsettled
        return holding

    # Receiving -----------------------------------------------------------------------------------

    def receive(self, buffer: ReceiveBuffer, count: int, now: float) -> list[Inbox]:
        """`count` fresh bytes are in the buffer. Returns the subscriptions that got something, or
        were ended.

        Raises RemoteProtocolError when the bus breaks the protocol, or says that it closes; call
        `lost` then.
        """
        self._connection.heartbeat.mark_received(now)
        self._received_bytes += count
        woken: dict[Inbox, None] = {}
        if self._receiver.lone_frame(buffer, count):
            run = FrameRun(bytes(buffer.space[:count]), count=1, stride=count)
            self._connection.handle_run(run, woken, now)
        else:
            for batch in self._receiver.receive(buffer, count):
                for run in split_into_runs(batch):
                    self._connection.handle_run(run, woken, now)
        return list(woken)

    def statistics(self) -> ClientStatistics:
        publisher, outgoing, inboxes = self.publish_buffer, self.send_queue, self._inboxes
        return ClientStatistics(
            session_id=self.session_id,
            reconnections=max(0, self._connection.connection_count - 1),
            published=publisher.published_position,
            confirmed=publisher.confirmed_position,
            refused=publisher.refused_count,
            resent=publisher.resent_count,
            forgotten=publisher.forgotten_count,
            unconfirmed=publisher.published_position - publisher.confirmed_position,
            unconfirmed_bytes=publisher.unconfirmed_bytes,
            received=inboxes.received_count,
            redelivered=inboxes.redelivered_count,
            acknowledged=outgoing.ack_sink.acked_count,
            nacked=outgoing.ack_sink.nacked_count,
            ignored=self._connection.ignored_count + inboxes.ignored_count,
            buffered_bytes=sum(inbox.buffered_bytes for inbox in inboxes),
            queued_bytes=outgoing.queued_bytes,
            sent_bytes=outgoing.sent_bytes,
            received_bytes=self._received_bytes,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.publish_buffer.check_invariants()
        for inbox in self._inboxes:
            inbox.check_invariants()
