"""Protocol state machine of a client (protocol/binary.md, version 2), without I/O or a clock.

received bytes ─► FrameReceiver ─► FrameRun ─► Inbox ─► AckToken ─► AckBuffer ─┐
publish ─► PublishBuffer ─► PublishBatch ──────────────────────────────────────┼─► SendQueue
connection_made, subscribe, fetch … ─► ConnectionState ─► OpenRequest ─────────┘
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
from simplebus.core.errors import BusError, RefusedError
from simplebus.core.limits import ACK_BATCH_MESSAGES, Limits
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.inquiry import AcksInquiry, Inquiry
from simplebus.core.protocol.opening import OPENING_BYTES, check_server_opening
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
    """Protocol state of one client, across connections.

    A driver passes received bytes to `receive`, sends the bytes of `send_queue`, and calls `tick`
    at the times that it returns. Times are in seconds of a monotonic clock. After a reconnect the
    core subscribes again with the same numbers and resends unconfirmed messages. Reading never
    pauses: an inbox holds at most the messages in flight of its subscription.
    """

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
        late_confirms: bool = False,
    ) -> None:
        """Create the state of a client that is not connected.

        Args:
            name: Publisher name; None for an anonymous publisher.
            instance: Identity of this run of the program.
            heartbeat_seconds: Longest silence that the client asks for; 0 for no heartbeat.
            client: Description of the program, shown by the server.
            frame_bytes_max: Longest frame that is sent or accepted.
            first_unconfirmed_number: First unconfirmed message number of an earlier run to
                continue.
            bus_id: Bus id of the server that confirmed the messages of that run.
            first_number: First message number, for a program that assigns its own numbers.
            auth: Credentials; None to connect without.
            late_confirms: Let the server delay Confirms for which `require_confirm` was not
                called.
        """
        connect_request = ConnectRequest(
            name=name,
            instance=instance or None,
            heartbeat=heartbeat_seconds,
            client=client,
            unconfirmed=first_unconfirmed_number,
            bus=bus_id,
            first=first_number,
            auth=auth,
        )
        self._connection = ConnectionState(
            connect_request, frame_bytes_max=frame_bytes_max, late_confirms=late_confirms
        )
        self.publish_buffer = self._connection.publish_buffer
        self.publish = self.publish_buffer.publish
        """Publish a message and return its position; see `PublishBuffer.publish`."""
        self.publish_many = self.publish_buffer.publish_many
        """Publish messages and return the last position; see `PublishBuffer.publish_many`."""
        self.publish_runs = self.publish_buffer.publish_runs
        """Publish messages of several classes; see `PublishBuffer.publish_runs`."""
        self.send_queue = self._connection.send_queue
        """Bytes to send: `peek` returns them, `mark_sent` removes them."""
        self._inboxes = self._connection.inboxes
        self._frame_bytes_max = frame_bytes_max
        self._receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
        self._received_bytes = 0

    # Connections ---------------------------------------------------------------------------------

    @property
    def durability(self) -> Durability:
        """Durability of a confirmed message at the server that replied last."""
        return self._connection.durability

    @property
    def is_ready(self) -> bool:
        """True if the server has accepted the Connect."""
        return self.send_queue.is_open

    @property
    def accepted_frame_bytes_max(self) -> int:
        """Bytes of the longest frame that may be published."""
        return self.publish_buffer.accepted_frame_bytes_max

    @property
    def session_id(self) -> int | None:
        """Id of this connection at the server; None before the reply to the Connect."""
        return self._connection.session_id

    @property
    def bus_id(self) -> str:
        """Identity of the stored state of the last server; empty before the first reply."""
        return self._connection.bus_id

    @property
    def run_id(self) -> str:
        """Identity of the server process that replied last."""
        return self._connection.run_id

    @property
    def duplicate_seconds(self) -> float:
        """Seconds for which every server of a cluster detects duplicates; 0 without a cluster."""
        return self._connection.duplicate_seconds

    @property
    def reply_channel_prefix(self) -> str:
        """Prefix of the channels on which this client may receive replies; empty for any."""
        return self._connection.reply_channel_prefix

    def connection_made(self, now: float) -> OpenRequest:
        """Start a new connection and return its Connect request.

        Everything else is sent after the reply.
        """
        return self._connection.connection_made(now)

    def connection_lost(self) -> None:
        """End the connection. Requests that do not survive a reconnect fail."""
        self._receiver = FrameReceiver(frame_bytes_max=self._frame_bytes_max)
        self._connection.connection_lost()

    def fail_requests(self, error: BusError) -> None:
        """Fail all open requests, because there will be no further connection."""
        self._connection.open_requests.fail_all(error)

    def tick(self, now: float) -> float:
        """Queue a heartbeat if one is due.

        Returns:
            Time of the next call; `math.inf` without a heartbeat.

        Raises:
            RemoteProtocolError: If the server was silent for too long.
        """
        send_queue = self.send_queue
        if not self.is_ready:
            return math.inf
        if self._connection.heartbeat.is_due(now, send_queue.sent_bytes) and not send_queue.peek():
            send_queue.append_frame(frames.encode(frames.HEARTBEAT))
        return self._connection.heartbeat.next_check

    # Requests ------------------------------------------------------------------------------------

    def name_classes(self, *classes: ClassReference) -> OpenRequest:
        """Name classes to the server. The server creates missing classes.

        Raises:
            ValueError: If a reference is not a valid class id or class name.
        """
        return self._connection.name_classes(
            [parse_class_reference(reference) for reference in classes]
        )

    def find_class_id(self, name: str) -> int | None:
        """Return the id of the class `name`, or None before the server has replied."""
        return self._connection.class_names.find_id(name)

    def sync(self) -> OpenRequest:
        """Send a request that is done when the server has processed everything queued before it."""
        content = ConnectRequest().encode()
        return self._connection.send_request(
            frames.CONNECT, content=content, after_position=self.published_position
        )

    def subscribe(
        self, class_id: int, options: SubscribeRequest = _DEFAULT_OPTIONS, *, auto_ack: bool = True
    ) -> Inbox:
        """Create a subscription. Its `subscribe_request` is done when the server has confirmed it.

        Raises:
            ValueError: If `class_id` is not a valid class id.
            LocalProtocolError: If the client has too many subscriptions.
        """
        self._connection.name_class(class_id)
        inbox = self._inboxes.open_inbox(class_id, options, auto_ack=auto_ack)
        if self.is_ready:
            self._connection.send_subscribe(inbox)
        return inbox

    def unsubscribe(self, inbox: Inbox, *, is_processed: bool, forget: bool = False) -> OpenRequest:
        """End a subscription. Messages that were not handed out return to the server.

        Args:
            inbox: The subscription.
            is_processed: True to acknowledge the last message, False to reject it.
            forget: Also delete the position of a durable.

        Returns:
            The Unsubscribe request.
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
        # Otherwise the Unsubscribe is sent when the server has confirmed the subscription, after
        # the pending acks.
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
        """Read stored messages by sequence, without changing any position.

        Args:
            class_id: Class of the messages.
            first: First sequence; ignored if `start_time` is given.
            count: Maximum number of messages.
            start_time: Seconds since 1970: start with the first message accepted at or after
                this time.
            with_times: Request the acceptance times in the reply.
            create_class: Create the class if it does not exist. Otherwise the server refuses
                the request with `unknown_class`.

        Returns:
            The request; its `batches` hold the messages when it is done.

        Raises:
            ValueError: If `class_id` is not a valid class id.
        """
        check_class_id(class_id)
        if create_class:
            self._connection.name_class(class_id)
        content = FetchRequest(first=first, count=count, time=start_time, times=with_times).encode()
        request = self._connection.send_request(frames.FETCH, target_id=class_id, content=content)
        request.remaining_count = count
        return request

    def inquire(self, inquiry: Inquiry) -> OpenRequest:
        """Ask which messages wait for which subscriptions. No class is created."""
        content = msgspec.json.encode(inquiry)
        return self._connection.send_request(
            frames.INQUIRE, content=content, after_position=self.published_position
        )

    def sync_acks(self) -> OpenRequest:
        """Ask for a reply when the acks so far are stored. They are sent before the request."""
        return self._connection.send_request(
            frames.INQUIRE, content=msgspec.json.encode(AcksInquiry())
        )

    def keep_last_values(self, class_id: int) -> OpenRequest:
        """Make a class keep the last value of each channel.

        Raises:
            ValueError: If `class_id` is not a valid class id.
        """
        return self.name_classes(NamedClass(id=class_id, last_values=True))

    def purge(self, class_id: int, first: int, last: int | None) -> OpenRequest:
        """Discard the messages first..last-1 of a class for every position.

        Args:
            class_id: Class of the messages.
            first: First sequence.
            last: End of the range; None for the head.

        Raises:
            ValueError: If `class_id` is not a valid class id.
        """
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
        """Number of published messages, which is the position of the next one."""
        return self.publish_buffer.published_position

    @property
    def confirmed_position(self) -> int:
        """All messages below this position were stored or refused by the server."""
        return self.publish_buffer.confirmed_position

    @property
    def has_credit(self) -> bool:
        """True if the credit allows one more message, so that it need not wait in the buffer."""
        return self.publish_buffer.has_credit

    def require_confirm(self, end: int) -> None:
        """Let the server confirm the messages below position `end` without waiting."""
        if self.publish_buffer.require_confirm(end):
            self.send_queue.append_frame(frames.encode(frames.HEARTBEAT))

    def pop_refusals(self) -> dict[int, RefusedError]:
        """Return the refusals since the previous call, by position."""
        return self.publish_buffer.pop_refusals()

    def set_notice_handler(self, on_notice: Callable[[str], object]) -> None:
        """Set the function that receives error messages that belong to no request."""
        self._connection.on_notice = on_notice

    @property
    def on_ack(self) -> Callable[[], object]:
        """Called after the program has settled a message itself."""
        return self.send_queue.ack_sink.on_manual_ack

    @on_ack.setter
    def on_ack(self, call: Callable[[], object]) -> None:
        self.send_queue.ack_sink.on_manual_ack = call

    @property
    def has_due_acks(self) -> bool:
        """True if enough acks are pending to send them without delay."""
        return self.send_queue.ack_sink.pending_count >= ACK_BATCH_MESSAGES

    @property
    def has_held_acks(self) -> bool:
        """True if acks wait until the server confirms a subscription again."""
        return any(inbox.has_held_acks for inbox in self._inboxes)

    def ack_processed(self) -> bool:
        """Acknowledge the messages that consumers have processed.

        Returns:
            True if a consumer holds an unsettled message, so that a later call may find new acks.
        """
        has_unsettled = False
        for inbox in self._inboxes:
            inbox.settle(include_last=False)
            inbox.offer_acks()
            has_unsettled |= inbox.has_unsettled
        return has_unsettled

    # Receiving -----------------------------------------------------------------------------------

    def receive(self, buffer: ReceiveBuffer, count: int, now: float) -> list[Inbox]:
        """Process the `count` bytes that were added to `buffer`.

        Returns:
            The subscriptions that received messages or were ended by the server.

        Raises:
            RemoteProtocolError: If the server violates the protocol or closes the connection.
                The driver then calls `connection_lost`.
        """
        if self.session_id is None and not self._receiver.received_bytes:
            check_server_opening(bytes(buffer.writable[: min(count, OPENING_BYTES)]))
        self._connection.heartbeat.mark_received(now)
        self._received_bytes += count
        inboxes_to_wake: dict[Inbox, None] = {}
        if bounds := self._receiver.find_few_frames(buffer, count):
            self._receiver.record_frames(len(bounds) - 1, count)
            raw = bytes(buffer.writable[:count])
            self._connection.handle_few_frames(raw, bounds, inboxes_to_wake, now)
        elif self._receiver.receive_single_frame(buffer, count):
            run = FrameRun(bytes(buffer.writable[:count]), count=1, stride=count)
            self._connection.handle_run(run, inboxes_to_wake, now)
        else:
            for batch in self._receiver.receive(buffer, count):
                for run in split_into_runs(batch):
                    self._connection.handle_run(run, inboxes_to_wake, now)
        return list(inboxes_to_wake)

    def statistics(self) -> ClientStatistics:
        publisher, send_queue, inboxes = self.publish_buffer, self.send_queue, self._inboxes
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
            acknowledged=send_queue.ack_sink.acked_count,
            nacked=send_queue.ack_sink.nacked_count,
            ignored=self._connection.ignored_count + inboxes.ignored_count,
            buffered_bytes=sum(inbox.buffered_bytes for inbox in inboxes),
            queued_bytes=send_queue.queued_bytes,
            sent_bytes=send_queue.sent_bytes,
            received_bytes=self._received_bytes,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.publish_buffer.check_invariants()
        for inbox in self._inboxes:
            inbox.check_invariants()
