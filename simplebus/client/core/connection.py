"""What is said on one connection after another: who is there, what is asked, what is answered.

Rule 1: a connection begins with a Connect, and nothing follows it before its answer. Then come the
names that are new, the subscriptions, the messages that were not confirmed, and everything else.
Rule 2: the bus answers what it was asked, once. Anything else that it says is its mistake; or it
is of no consequence, and counted.

    Connect ─► answer ─► names, Subscribes ─► messages again ─► requests and messages in order
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from msgspec.structs import replace

from simplebus.client.core.class_names import ClassNames, check_class_id, to_wire_references
from simplebus.client.core.frame_runs import FrameRun
from simplebus.client.core.heartbeat import Heartbeat
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.inboxes import Inboxes
from simplebus.client.core.open_requests import OpenRequest, OpenRequests, ReplyBody
from simplebus.client.core.publish_buffer import PublishBuffer
from simplebus.client.core.send_queue import SendQueue
from simplebus.core.commit_log import Durability
from simplebus.core.errors import BusConnectionError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.protocol import frames
from simplebus.core.protocol.inquiry import explained
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

_CONNECTION_BOUND_TYPES = (frames.CONNECT, frames.FETCH, frames.PURGE, frames.INQUIRE)
"""Requests that fail with their connection."""
_TYPES_BEFORE_CONNECT_REPLY = (frames.CONNECT, frames.ERROR, frames.HEARTBEAT)

_REPLY_DECODERS: dict[int, Callable[[bytes], ReplyBody | None]] = {
    frames.CONNECT: lambda content: decode(ConnectReply, content, reason=Reason.BAD_CONNECT),
    frames.SUBSCRIBE: lambda content: decode(SubscribeReply, content),
    frames.FETCH: lambda content: decode(FetchReply, content),
    frames.PURGE: lambda content: decode(PurgeReply, content),
    frames.INQUIRE: explained,
    frames.UNSUBSCRIBE: lambda content: None,
}
"""What stands in the reply to each type of request."""


class ConnectionState:
    """One program's, with every bus that it was connected to."""

    def __init__(self, connect_request: ConnectRequest, *, frame_bytes_max: int) -> None:
        self.publish_buffer = PublishBuffer(
            frame_bytes_max=frame_bytes_max, name_class=self.name_class
        )
        self.send_queue = SendQueue(self.publish_buffer)
        self.open_requests = OpenRequests()
        self.inboxes = Inboxes(self.open_requests, self.send_queue.ack_sink)
        self.class_names = ClassNames()
        self.heartbeat = Heartbeat()
        self.bus_id = ""
        """Whose memory knows us; empty before the first answer."""
        self.durability = Durability.MEMORY
        """Where a message is when it is confirmed."""
        self.session_id: int | None = None
        """What the bus calls the connection; None while there is none, or no answer."""
        self.connection_count = 0
        """Connections that the bus has answered."""
        self.on_notice: Callable[[str], object] = lambda sentence: None
        """Called with what the bus says about nothing that was asked of it."""
        self.ignored_count = 0
        """Frames of no consequence."""
        self._connect_request = connect_request
        self._open_connect: OpenRequest | None = None
        """The Connect that opened this connection; None without connection."""
        self._naming_requests: dict[OpenRequest, list[NamedClass]] = {}
        """What is being named."""
        self.run_id = ""
        """Which process had that memory."""
        self.duplicate_seconds = 0.0
        """As the bus has said it, see ConnectReply."""

    # Connections ---------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the bus is there and has answered."""
        return self.send_queue.is_open

    def connection_made(self, now: float) -> OpenRequest:
        """There is a fresh connection. Returns its Connect."""
        assert self._open_connect is None, "connected again without having lost the connection"
        said = replace(self._connect_request, classes=self.class_names.list_references())
        if self.connection_count:
            at = self.publish_buffer.first_unconfirmed_number
            first = None if said.first is None else at
            said = replace(said, unconfirmed=at, bus=self.bus_id, first=first)
        content = said.encode()
        self._open_connect = self.open_requests.open_request(frames.CONNECT, content=content)
        self.heartbeat.start(0, now)
        self.send_queue.append_frame(self._open_connect.frame)
        return self._open_connect

    def connection_lost(self) -> None:
        """The connection is gone. What lasts goes on with the next one, the rest fails."""
        gone = BusConnectionError("the connection was lost before the bus answered")
        if self._open_connect is not None and not self._open_connect.is_done:
            self.open_requests.discard(self._open_connect)
            self._open_connect.fail(gone)
        self._open_connect = self.session_id = None
        self._naming_requests.clear()
        self.send_queue.close()
        self.publish_buffer.connection_lost()
        self.inboxes.connection_lost()
        self.open_requests.connection_lost(gone)

    def _handle_connect_reply(self, reply: ConnectReply, now: float) -> None:
        """The bus has answered a fresh connection."""
        same_bus = bool(reply.bus) and reply.bus == self.bus_id
        self.publish_buffer.resume(
            next_number=reply.next,
            credit_bytes=reply.credit,
            frame_bytes_max=reply.frame_bytes,
            is_forgotten=bool(self.bus_id) and not same_bus,
            lost_count=reply.lost,
        )
        self.bus_id, self.run_id = reply.bus, reply.run
        self.duplicate_seconds = reply.duplicates
        self.session_id = reply.session
        self.durability = Durability(min(reply.level, max(Durability)))
        self.connection_count += 1
        self.heartbeat.start(reply.heartbeat, now)
        outgoing = self.send_queue
        names = [
            one
            for one in self.open_requests.find_by_type(frames.CONNECT)
            if one.after_position is None
        ]
        rest = self.open_requests.find_by_type(*_CONNECTION_BOUND_TYPES)
        for request in names:
            outgoing.append_frame(request.frame)
        for inbox in self.inboxes:
            self.open_requests.reopen(
                inbox.subscribe_request, inbox.resubscribe_content(is_same_bus=same_bus)
            )
            self.send_subscribe(inbox)
        outgoing.is_open = True
        for request in rest:
            if request not in names:
                self.queue_request(request)

    # Asking --------------------------------------------------------------------------------------

    def send_request(
        self,
        frame_type: int,
        *,
        target_id: int = 0,
        content: bytes,
        after_position: int | None = None,
    ) -> OpenRequest:
        request = self.open_requests.open_request(
            frame_type, target_id=target_id, content=content
        )
        request.after_position = after_position
        if self.is_ready:
            self.queue_request(request)
        return request

    def send_subscribe(self, inbox: Inbox) -> None:
        """Ask the bus for it, as soon as its durable is free."""
        if self.inboxes.is_durable_occupied(inbox):
            self.inboxes.inboxes_to_subscribe[inbox] = None
        else:
            self.send_queue.append_frame(inbox.subscribe_request.frame)

    def _send_waiting_subscribes(self) -> None:
        """A durable may be free."""
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
        """Name a class if it is used for the first time."""
        check_class_id(class_id)
        if not self.publish_buffer.has_class(class_id):
            if self._open_connect is None:  # The Connect will name it.
                self._register_class(NamedClass(id=class_id))
            else:
                self.name_classes([NamedClass(id=class_id)])

    def name_classes(self, named: list[NamedClass]) -> OpenRequest:
        """Name classes to the bus, now and on every connection to come."""
        for one in named:
            self._register_class(one)
        content = ConnectRequest(classes=to_wire_references(named)).encode()
        request = self.send_request(frames.CONNECT, content=content)
        self._naming_requests[request] = named
        return request

    def _register_class(self, named: NamedClass) -> None:
        self.class_names.add(named)
        if named.id is not None:
            self.publish_buffer.add_class(named.id)

    # Hearing -------------------------------------------------------------------------------------

    def handle_run(self, run: FrameRun, inboxes_to_wake: dict[Inbox, None], now: float) -> None:
        """What one run means."""
        kind = run.frame_type
        if not self.is_ready and kind not in _TYPES_BEFORE_CONNECT_REPLY:
            raise RemoteProtocolError(
                Reason.BAD_CONNECT,
                f"the bus sent a frame of type {kind:#04x} before it answered the Connect",
            )
        if run.has_messages:
            self.inboxes.route_run(run, inboxes_to_wake)
        elif kind == frames.DELIVER:
            self.inboxes.set_delivery_header(run)
        elif kind == frames.CONFIRM:
            self.publish_buffer.confirm(run.first_id & MESSAGE_ID_MASK)
        elif kind in _REPLY_DECODERS:
            self._handle_reply(run, now)
        elif kind == frames.ERROR:
            self._handle_error(run, inboxes_to_wake)
        elif kind != frames.HEARTBEAT:
            self.ignored_count += 1

    def _handle_reply(self, run: FrameRun, now: float) -> None:
        """The reply to a request."""
        kind = run.frame_type
        reply = _REPLY_DECODERS[kind](run.content)
        request = self.open_requests.pop_answered(run.first_id, kind)
        if request is None:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"the bus answered request {run.first_id} (type {chr(kind)!r}), "
                "which nobody waits for",
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
        """Why a frame had no effect, or why the bus closes."""
        reply = decode(ErrorReply, run.content)
        if reply.fatal:
            raise self._closing_error(reply)
        number, kind = run.first_id & MESSAGE_ID_MASK, run.timer_index
        error = RefusedError(reply.code, reply.message)
        if kind in (frames.MESSAGE, frames.ENVELOPE):
            self.publish_buffer.refuse(number, reply.count, error)
            return
        if not kind:
            self.on_notice(f"{reply.code}: {reply.message}")
        request = self.open_requests.pop_answered(number, kind)
        if kind == frames.SUBSCRIBE:
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
        elif kind == frames.UNSUBSCRIBE:  # There is no such subscription, and that was wanted.
            self._handle_unsubscribed(request)
        else:
            for named in self._naming_requests.pop(request, ()):
                self.class_names.remove(named)
                if named.id is not None:
                    self.publish_buffer.remove_class(named.id)
            request.fail(error)
            if request is self._open_connect:
                raise self._closing_error(reply)

    def _closing_error(self, reply: ErrorReply) -> RemoteProtocolError:
        """Why the bus closes."""
        reason, sentence = _parse_reason(reply.code), reply.message
        if reason == Reason.CLASS_NAME_CONFLICT and self.connection_count:
            sentence += (
                "; the bus before gave the class that id, which messages of this program have; "
                "bind a class to an id (class_id=…) where a program goes from bus to bus"
            )
        return RemoteProtocolError(reason, sentence)

    def _handle_unsubscribed(self, request: OpenRequest) -> None:
        """An Unsubscribe is done."""
        request.finish()
        inbox = self.inboxes.get(request.target_id)
        if inbox is not None:
            self.inboxes.remove(inbox)


def _check_named_class(name: str, class_id: int) -> NamedClass:
    """A class as the bus has named it."""
    try:
        check_class_id(class_id)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CONNECT, f"for {name!r}, {error}") from None
    return NamedClass(id=class_id, name=name)


def _parse_reason(code: str) -> Reason:
    """The word for why; the bus's own if we do not know it."""
    try:
        return Reason(code)
    except ValueError:
        return cast(Reason, code)
