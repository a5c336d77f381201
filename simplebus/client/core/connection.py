"""Protocol state of a client across connections: handshake, requests, replies.

A connection starts with a Connect request. Nothing else is sent before its reply. Then the client
sends new class names, Subscribe requests, unconfirmed messages, and everything else in order. A
reply that matches no request is a protocol error.

    Connect ─► reply ─► class names, Subscribes ─► resent messages ─► requests and messages
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from msgspec.structs import replace

from simplebus.client.core.class_names import ClassNames, check_class_id, to_wire_references
from simplebus.client.core.frame_runs import FrameRun, build_run, find_run_end
from simplebus.client.core.heartbeat import Heartbeat
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.inboxes import Inboxes
from simplebus.client.core.open_requests import OpenRequest, OpenRequests, ReplyBody
from simplebus.client.core.publish_buffer import PublishBuffer
from simplebus.client.core.send_queue import SendQueue
from simplebus.core.errors import BusConnectionError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.inquiry import decode_reply
from simplebus.core.protocol.requests import (
    ConnectReply,
    ConnectRequest,
    ErrorReply,
    FetchReply,
    NamedClass,
    PurgeReply,
    SubscribeReply,
    decode,
)

_unpack_header = frames.HEADER.unpack_from
_CONNECTION_BOUND_TYPES = (frames.CONNECT, frames.FETCH, frames.PURGE, frames.INQUIRE)
"""Requests that fail when their connection is lost."""
_TYPES_BEFORE_CONNECT_REPLY = (frames.CONNECT, frames.ERROR, frames.HEARTBEAT)

_REPLY_DECODERS: dict[int, Callable[[bytes], ReplyBody | None]] = {
    frames.CONNECT: lambda content: decode(ConnectReply, content, reason=Reason.BAD_CONNECT),
    frames.SUBSCRIBE: lambda content: decode(SubscribeReply, content),
    frames.FETCH: lambda content: decode(FetchReply, content),
    frames.PURGE: lambda content: decode(PurgeReply, content),
    frames.INQUIRE: decode_reply,
    frames.UNSUBSCRIBE: lambda content: None,
}
"""Decoder of the reply content, by request type."""


class ConnectionState:
    """Protocol state of one client, across all servers that it connects to."""

    def __init__(
        self,
        connect_request: ConnectRequest,
        *,
        frame_bytes_max: int,
        late_confirms: bool = False,
    ) -> None:
        self.publish_buffer = PublishBuffer(
            frame_bytes_max=frame_bytes_max,
            name_class=self.name_class,
            late_confirms=late_confirms,
        )
        self.send_queue = SendQueue(self.publish_buffer)
        self.open_requests = OpenRequests()
        self.inboxes = Inboxes(self.open_requests, self.send_queue.ack_sink)
        self.class_names = ClassNames()
        self.heartbeat = Heartbeat()
        self.bus_id = ""
        """Identity of the server's stored state; empty before the first reply."""
        self.durability = Durability.MEMORY
        """Durability of a confirmed message."""
        self.session_id: int | None = None
        """Id of this connection at the server; None before the reply to the Connect."""
        self.connection_count = 0
        """Connections that the server has accepted."""
        self.on_notice: Callable[[str], object] = lambda text: None
        """Called with an error message of the server that belongs to no request."""
        self.ignored_count = 0
        """Frames of unknown types and errors that match no request."""
        self._connect_request = connect_request
        self._open_connect: OpenRequest | None = None
        """The Connect of this connection; None without a connection."""
        self._naming_requests: dict[OpenRequest, list[NamedClass]] = {}
        """Requests that name classes, with the classes."""
        self.run_id = ""
        """Identity of the server process."""
        self.duplicate_seconds = 0.0
        """Seconds for which a cluster detects duplicates; see `ConnectReply.duplicates`."""
        self.reply_channel_prefix = ""
        """Prefix of the channels on which this client may receive replies; empty for any."""

    # Connections ---------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if the server has accepted the Connect."""
        return self.send_queue.is_open

    def connection_made(self, now: float) -> OpenRequest:
        """Start a new connection. Return its Connect request."""
        assert self._open_connect is None, "connected again without having lost the connection"
        first_group, *further_groups = self.class_names.group_references() or [[]]
        connect_request = replace(self._connect_request, classes=first_group)
        if self.connection_count:
            first_unconfirmed = self.publish_buffer.first_unconfirmed_number
            first = None if connect_request.first is None else first_unconfirmed
            connect_request = replace(
                connect_request, unconfirmed=first_unconfirmed, bus=self.bus_id, first=first
            )
        content = connect_request.encode()
        self._open_connect = self.open_requests.open_request(frames.CONNECT, content=content)
        self.heartbeat.start(0, now)
        self.send_queue.append_frame(self._open_connect.frame)
        for group in further_groups:  # Sent when the server has accepted the Connect.
            self.send_request(frames.CONNECT, content=ConnectRequest(classes=group).encode())
        return self._open_connect

    def connection_lost(self) -> None:
        """End the connection. Requests that do not survive a reconnect fail."""
        error = BusConnectionError("the connection was lost before the server replied")
        if self._open_connect is not None and not self._open_connect.is_done:
            self.open_requests.discard(self._open_connect)
            self._open_connect.fail(error)
        self._open_connect = self.session_id = None
        self._naming_requests.clear()
        self.send_queue.close()
        self.publish_buffer.connection_lost()
        self.inboxes.connection_lost()
        self.open_requests.connection_lost(error)

    def _handle_connect_reply(self, reply: ConnectReply, now: float) -> None:
        """Resume on a new connection after its Connect was accepted."""
        is_same_bus = bool(reply.bus) and reply.bus == self.bus_id
        self.publish_buffer.resume(
            next_number=reply.next,
            credit_bytes=reply.credit,
            frame_bytes_max=reply.frame_bytes,
            is_other_server=bool(self.bus_id) and not is_same_bus,
            lost_count=reply.lost,
        )
        self.bus_id, self.run_id = reply.bus, reply.run
        self.duplicate_seconds = reply.duplicates
        self.reply_channel_prefix = reply.replies
        self.session_id = reply.session
        self.durability = Durability(min(reply.level, max(Durability)))
        self.connection_count += 1
        self.heartbeat.start(reply.heartbeat, now)
        send_queue = self.send_queue
        naming_requests = [
            request
            for request in self.open_requests.find_by_type(frames.CONNECT)
            if request.after_position is None
        ]
        pending_requests = self.open_requests.find_by_type(*_CONNECTION_BOUND_TYPES)
        for request in naming_requests:
            send_queue.append_frame(request.frame)
        for inbox in self.inboxes:
            self.open_requests.reopen(
                inbox.subscribe_request, inbox.encode_resubscribe(is_same_bus=is_same_bus)
            )
            self.send_subscribe(inbox)
        send_queue.is_open = True
        for request in pending_requests:
            if request not in naming_requests:
                self.queue_request(request)

    # Requests ------------------------------------------------------------------------------------

    def send_request(
        self,
        frame_type: int,
        *,
        target_id: int = 0,
        content: bytes,
        after_position: int | None = None,
    ) -> OpenRequest:
        request = self.open_requests.open_request(frame_type, target_id=target_id, content=content)
        request.after_position = after_position
        if self.is_ready:
            self.queue_request(request)
        return request

    def send_subscribe(self, inbox: Inbox) -> None:
        """Send the Subscribe of the inbox, or wait until its durable is free."""
        if self.inboxes.is_durable_occupied(inbox):
            self.inboxes.inboxes_to_subscribe[inbox] = None
        else:
            self.send_queue.append_frame(inbox.subscribe_request.frame)

    def _send_waiting_subscribes(self) -> None:
        """Retry the Subscribes that wait for a durable."""
        waiting = list(self.inboxes.inboxes_to_subscribe)
        self.inboxes.inboxes_to_subscribe.clear()
        for inbox in waiting:
            self.send_subscribe(inbox)

    def queue_request(self, request: OpenRequest) -> None:
        if request.after_position is None:
            self.send_queue.append_frame(request.frame)
        else:
            self.send_queue.append_frame_after(request.after_position, request.frame)

    def name_class(self, class_id: int) -> None:
        """Name a class to the server before its first use."""
        check_class_id(class_id)
        if not self.publish_buffer.has_class(class_id):
            if self._open_connect is None:  # The next Connect will name it.
                self._register_class(NamedClass(id=class_id))
            else:
                self.name_classes([NamedClass(id=class_id)])

    def name_classes(self, classes: list[NamedClass]) -> OpenRequest:
        """Name classes to the server, now and on every later connection."""
        for named_class in classes:
            self._register_class(named_class)
        content = ConnectRequest(classes=to_wire_references(classes)).encode()
        request = self.send_request(frames.CONNECT, content=content)
        self._naming_requests[request] = classes
        return request

    def _register_class(self, named_class: NamedClass) -> None:
        self.class_names.add(named_class)
        if named_class.id is not None:
            self.publish_buffer.add_class(named_class.id)

    # Received frames -----------------------------------------------------------------------------

    def handle_few_frames(
        self, raw: bytes, bounds: list[int], inboxes_to_wake: dict[Inbox, None], now: float
    ) -> None:
        """Process few received frames like `handle_run`, without a run for frames without content.

        Args:
            raw: Whole frames.
            bounds: Their offsets, and the end of the last one.
            inboxes_to_wake: Gets the inboxes with new messages.
            now: Current time in seconds.

        Raises:
            RemoteProtocolError: As `handle_run`.
        """
        headers = [_unpack_header(raw, offset) for offset in bounds[:-1]]
        first = 0
        while first < len(headers):
            frame_type, class_id, message_id, timer_index = headers[first]
            last = first + 1
            if frame_type == frames.DELIVER and self.is_ready:
                self.inboxes.set_delivery_header(class_id, message_id, timer_index)
            elif frame_type == frames.CONFIRM and self.is_ready:
                self.publish_buffer.confirm(message_id & MESSAGE_ID_MASK)
            else:
                last = find_run_end(headers, first)
                run = build_run(raw, bounds, headers, first, last)
                self.handle_run(run, inboxes_to_wake, now)
            first = last

    def handle_run(self, run: FrameRun, inboxes_to_wake: dict[Inbox, None], now: float) -> None:
        """Process one received run. Inboxes with new messages are added to `inboxes_to_wake`.

        Raises:
            RemoteProtocolError: If the server violates the protocol or closes the connection.
        """
        frame_type = run.frame_type
        if not self.is_ready and frame_type not in _TYPES_BEFORE_CONNECT_REPLY:
            raise RemoteProtocolError(
                Reason.BAD_CONNECT,
                f"the server sent a frame of type {frame_type:#04x}; expected the reply to the "
                "Connect first",
            )
        if run.has_messages:
            self.inboxes.route_run(run, inboxes_to_wake)
        elif frame_type == frames.DELIVER:
            self.inboxes.set_delivery_header(run.class_id, run.first_id, run.timer_index)
        elif frame_type == frames.CONFIRM:
            self.publish_buffer.confirm(run.first_id & MESSAGE_ID_MASK)
        elif frame_type in _REPLY_DECODERS:
            self._handle_reply(run, now)
        elif frame_type == frames.ERROR:
            self._handle_error(run, inboxes_to_wake)
        elif frame_type != frames.HEARTBEAT:
            self.ignored_count += 1

    def _handle_reply(self, run: FrameRun, now: float) -> None:
        frame_type = run.frame_type
        reply = _REPLY_DECODERS[frame_type](run.content)
        request = self.open_requests.pop_answered(run.first_id, frame_type)
        if request is None:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"the server replied to request {run.first_id} (type {chr(frame_type)!r}), "
                "but no such request is open",
            )
        match reply:
            case ConnectReply():
                self._naming_requests.pop(request, None)
                for name, class_id in reply.classes.items():
                    self._register_class(_check_named_class(name, class_id))
                if request is self._open_connect:
                    self._handle_connect_reply(reply, now)
                request.finish(reply)
            case SubscribeReply():
                inbox = self.inboxes.find_by_request(request)
                if inbox is not None:
                    inbox.handle_subscribed(reply, server_run=(self.bus_id, self.run_id))
                    if inbox.unsubscribe_request is not None:
                        self.send_queue.append_frame(inbox.unsubscribe_request.frame)
                        self._send_waiting_subscribes()
                request.finish(reply)
            case FetchReply():
                self.inboxes.complete_fetch(request, reply)
            case None:
                self._handle_unsubscribed(request)
            case _:
                request.finish(reply)

    def _handle_error(self, run: FrameRun, inboxes_to_wake: dict[Inbox, None]) -> None:
        """Fail the request or messages that an Error frame names, or raise if it is fatal."""
        reply = decode(ErrorReply, run.content)
        if reply.fatal:
            raise self._closing_error(reply)
        number, frame_type = run.first_id & MESSAGE_ID_MASK, run.timer_index
        error = RefusedError(reply.code, reply.message)
        if frame_type in (frames.MESSAGE, frames.ENVELOPE):
            self.publish_buffer.refuse(number, reply.count, error)
            return
        if not frame_type:
            self.on_notice(f"{reply.code}: {reply.message}")
        request = self.open_requests.pop_answered(number, frame_type)
        if frame_type == frames.SUBSCRIBE:
            inbox = (
                self.inboxes.find_by_request(request)
                if request
                else self.inboxes.find_by_request_number(number)
            )
            if inbox is not None:
                inbox.subscribe_request.fail(error)
                self.inboxes.remove(inbox, error)
                self._send_waiting_subscribes()
                inboxes_to_wake[inbox] = None
                return
        if request is None:
            self.ignored_count += 1
        elif frame_type == frames.UNSUBSCRIBE:  # The subscription had ended already.
            self._handle_unsubscribed(request)
        else:
            for named_class in self._naming_requests.pop(request, ()):
                self.class_names.remove(named_class)
                if named_class.id is not None:
                    self.publish_buffer.remove_class(named_class.id)
            request.fail(error)
            if request is self._open_connect:
                raise self._closing_error(reply)

    def _closing_error(self, reply: ErrorReply) -> RemoteProtocolError:
        """Return the reason why the server closes the connection."""
        reason, message = _parse_reason(reply.code), reply.message
        if reason == Reason.CLASS_NAME_CONFLICT and self.connection_count:
            message += (
                "; the previous server assigned that id to the class, and this client uses it; "
                "bind classes to fixed ids (class_id=…) if a program connects to several servers"
            )
        return RemoteProtocolError(reason, message)

    def _handle_unsubscribed(self, request: OpenRequest) -> None:
        """Remove the inbox of an answered Unsubscribe."""
        request.finish()
        inbox = self.inboxes.get(request.target_id)
        if inbox is not None:
            self.inboxes.remove(inbox)


def _check_named_class(name: str, class_id: int) -> NamedClass:
    """Return a class from a Connect reply. Raises RemoteProtocolError for an invalid id."""
    try:
        check_class_id(class_id)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CONNECT, f"for {name!r}, {error}") from None
    return NamedClass(id=class_id, name=name)


def _parse_reason(code: str) -> Reason:
    """Return the reason code; the server's own text if it is unknown."""
    try:
        return Reason(code)
    except ValueError:
        return cast(Reason, code)
