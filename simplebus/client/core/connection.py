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

from simplebus.client.core.class_names import ClassNames, check_class_id, on_the_wire
from simplebus.client.core.frame_runs import Run
from simplebus.client.core.heartbeat import Heartbeat
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.inboxes import Inboxes
from simplebus.client.core.open_requests import Reply, Request, Requests
from simplebus.client.core.publish_buffer import Publisher
from simplebus.client.core.send_queue import Outgoing
from simplebus.core.commit_log import Level
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

_FLEETING = (frames.CONNECT, frames.FETCH, frames.PURGE, frames.INQUIRE)
"""Requests that fail with their connection."""
_BEFORE_THE_ANSWER = (frames.CONNECT, frames.ERROR, frames.HEARTBEAT)

_DECODERS: dict[int, Callable[[bytes], Reply | None]] = {
    frames.CONNECT: lambda content: decode(ConnectReply, content, reason=Reason.BAD_CONNECT),
    frames.SUBSCRIBE: lambda content: decode(SubscribeReply, content),
    frames.FETCH: lambda content: decode(FetchReply, content),
    frames.PURGE: lambda content: decode(PurgeReply, content),
    frames.INQUIRE: explained,
    frames.UNSUBSCRIBE: lambda content: None,
}
"""What stands in the reply to each type of request."""


class Conversation:
    """One program's, with every bus that it was connected to."""

    def __init__(self, introduction: ConnectRequest, *, frame_bytes_max: int) -> None:
        self.publisher = Publisher(frame_bytes_max=frame_bytes_max, name_class=self.name)
        self.outgoing = Outgoing(self.publisher)
        self.requests = Requests()
        self.inboxes = Inboxes(self.requests, self.outgoing.desk)
        self.classes = ClassNames()
        self.heartbeat = Heartbeat()
        self.bus_id = ""
        """Whose memory knows us; empty before the first answer."""
        self.level = Level.MEMORY
        """Where a message is when it is confirmed."""
        self.session_id: int | None = None
        """What the bus calls the connection; None while there is none, or no answer."""
        self.greetings = 0
        """Connections that the bus has answered."""
        self.on_notice: Callable[[str], object] = lambda sentence: None
        """Called with what the bus says about nothing that was asked of it."""
        self.ignored = 0
        """Frames of no consequence."""
        self._introduction = introduction
        self._greeting: Request | None = None
        """The Connect that opened this connection; None without connection."""
        self._naming: dict[Request, list[NamedClass]] = {}
        """What is being named."""
        self.run = ""
        """Which process had that memory."""
        self.duplicate_seconds = 0.0
        """As the bus has said it, see ConnectReply."""

    # Connections ---------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the bus is there and has answered."""
        return self.outgoing.is_open

    def begin(self, now: float) -> Request:
        """There is a fresh connection. Returns its Connect."""
        assert self._greeting is None, "connected again without having lost the connection"
        said = replace(self._introduction, classes=self.classes.all())
        if self.greetings:
            at = self.publisher.unconfirmed
            first = None if said.first is None else at
            said = replace(said, unconfirmed=at, bus=self.bus_id, first=first)
        content = said.encode()
        self._greeting = self.requests.make(frames.CONNECT, content=content)
        self.heartbeat.begin(0, now)
        self.outgoing.put(self._greeting.frame)
        return self._greeting

    def lose(self) -> None:
        """The connection is gone. What lasts goes on with the next one, the rest fails."""
        gone = BusConnectionError("the connection was lost before the bus answered")
        if self._greeting is not None and not self._greeting.done:
            self.requests.drop(self._greeting)
            self._greeting.fail(gone)
        self._greeting = self.session_id = None
        self._naming.clear()
        self.outgoing.close()
        self.publisher.lost()
        self.inboxes.lost()
        self.requests.lost(gone)

    def _greeted(self, reply: ConnectReply, now: float) -> None:
        """The bus has answered a fresh connection."""
        same_bus = bool(reply.bus) and reply.bus == self.bus_id
        self.publisher.resume(
            number=reply.next,
            credit=reply.credit,
            frame_bytes=reply.frame_bytes,
            forgotten=bool(self.bus_id) and not same_bus,
            lost=reply.lost,
        )
        self.bus_id, self.run = reply.bus, reply.run
        self.duplicate_seconds = reply.duplicates
        self.session_id = reply.session
        self.level = Level(min(reply.level, max(Level)))
        self.greetings += 1
        self.heartbeat.begin(reply.heartbeat, now)
        outgoing = self.outgoing
        names = [one for one in self.requests.of_type(frames.CONNECT) if one.position is None]
        rest = self.requests.of_type(*_FLEETING)
        for request in names:
            outgoing.put(request.frame)
        for inbox in self.inboxes:
            self.requests.again(inbox.request, inbox.content_again(same_bus=same_bus))
            self.subscribe(inbox)
        outgoing.is_open = True
        for request in rest:
            if request not in names:
                self.put(request)

    # Asking --------------------------------------------------------------------------------------

    def ask(
        self, frame_type: int, *, subject: int = 0, content: bytes, position: int | None = None
    ) -> Request:
        request = self.requests.make(frame_type, subject=subject, content=content)
        request.position = position
        if self.is_ready:
            self.put(request)
        return request

    def subscribe(self, inbox: Inbox) -> None:
        """Ask the bus for it, as soon as its durable is free."""
        if self.inboxes.must_wait(inbox):
            self.inboxes.waiting[inbox] = None
        else:
            self.outgoing.put(inbox.request.frame)

    def _subscribe_waiting(self) -> None:
        """A durable may be free."""
        waiting = list(self.inboxes.waiting)
        self.inboxes.waiting.clear()
        for inbox in waiting:
            self.subscribe(inbox)

    def put(self, request: Request) -> None:
        if request.position is None:
            self.outgoing.put(request.frame)
        else:
            self.outgoing.put_behind(request.position, request.frame)

    def name(self, class_id: int) -> None:
        """Name a class if it is used for the first time."""
        check_class_id(class_id)
        if not self.publisher.knows(class_id):
            if self._greeting is None:  # The Connect will name it.
                self._know(NamedClass(id=class_id))
            else:
                self.name_classes([NamedClass(id=class_id)])

    def name_classes(self, named: list[NamedClass]) -> Request:
        """Name classes to the bus, now and on every connection to come."""
        for one in named:
            self._know(one)
        content = ConnectRequest(classes=on_the_wire(named)).encode()
        request = self.ask(frames.CONNECT, content=content)
        self._naming[request] = named
        return request

    def _know(self, named: NamedClass) -> None:
        self.classes.add(named)
        if named.id is not None:
            self.publisher.open_class(named.id)

    # Hearing -------------------------------------------------------------------------------------

    def take(self, run: Run, woken: dict[Inbox, None], now: float) -> None:
        """What one run means."""
        kind = run.frame_type
        if not self.is_ready and kind not in _BEFORE_THE_ANSWER:
            raise RemoteProtocolError(
                Reason.BAD_CONNECT,
                f"the bus sent a frame of type {kind:#04x} before it answered the Connect",
            )
        if run.is_of_messages:
            self.inboxes.take(run, woken)
        elif kind == frames.DELIVER:
            self.inboxes.announce(run)
        elif kind == frames.CONFIRM:
            self.publisher.confirm(run.first_id & MESSAGE_ID_MASK)
        elif kind in _DECODERS:
            self._answered(run, now)
        elif kind == frames.ERROR:
            self._refused(run, woken)
        elif kind != frames.HEARTBEAT:
            self.ignored += 1

    def _answered(self, run: Run, now: float) -> None:
        """The reply to a request."""
        kind = run.frame_type
        reply = _DECODERS[kind](run.content)
        request = self.requests.take(run.first_id, kind)
        if request is None:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"the bus answered request {run.first_id} (type {chr(kind)!r}), "
                "which nobody waits for",
            )
        match reply:
            case ConnectReply():
                self._naming.pop(request, None)
                for name, class_id in reply.classes.items():
                    self._know(_given(name, class_id))
                if request is self._greeting:
                    self._greeted(reply, now)
                request.finish(reply)
            case SubscribeReply():
                inbox = self.inboxes.of(request)
                if inbox is not None:
                    inbox.answered(reply, run=(self.bus_id, self.run))
                    if inbox.leaving is not None:
                        self.outgoing.put(inbox.leaving.frame)
                        self._subscribe_waiting()
                request.finish(reply)
            case FetchReply():
                self.inboxes.fetched(request, reply)
            case None:
                self._left(request)
            case _:
                request.finish(reply)

    def _refused(self, run: Run, woken: dict[Inbox, None]) -> None:
        """Why a frame had no effect, or why the bus closes."""
        reply = decode(ErrorReply, run.content)
        if reply.fatal:
            raise self._closing(reply)
        number, kind = run.first_id & MESSAGE_ID_MASK, run.timer_index
        error = RefusedError(reply.code, reply.message)
        if kind in (frames.MESSAGE, frames.ENVELOPE):
            self.publisher.refuse(number, reply.count, error)
            return
        if not kind:
            self.on_notice(f"{reply.code}: {reply.message}")
        request = self.requests.take(number, kind)
        if kind == frames.SUBSCRIBE:
            inbox = self.inboxes.of(request) if request else self.inboxes.of_request(number)
            if inbox is not None:
                inbox.request.fail(error)
                self.inboxes.forget(inbox, error)
                self._subscribe_waiting()
                woken[inbox] = None
                return
        if request is None:
            self.ignored += 1
        elif kind == frames.UNSUBSCRIBE:  # There is no such subscription, and that was wanted.
            self._left(request)
        else:
            for named in self._naming.pop(request, ()):
                self.classes.remove(named)
                if named.id is not None:
                    self.publisher.close_class(named.id)
            request.fail(error)
            if request is self._greeting:
                raise self._closing(reply)

    def _closing(self, reply: ErrorReply) -> RemoteProtocolError:
        """Why the bus closes."""
        reason, sentence = _reason(reply.code), reply.message
        if reason == Reason.CLASS_NAME_CONFLICT and self.greetings:
            sentence += (
                "; the bus before gave the class that id, which messages of this program have; "
                "bind a class to an id (class_id=…) where a program goes from bus to bus"
            )
        return RemoteProtocolError(reason, sentence)

    def _left(self, request: Request) -> None:
        """An Unsubscribe is done."""
        request.finish()
        inbox = self.inboxes.get(request.subject)
        if inbox is not None:
            self.inboxes.forget(inbox)


def _given(name: str, class_id: int) -> NamedClass:
    """A class as the bus has named it."""
    try:
        check_class_id(class_id)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CONNECT, f"for {name!r}, {error}") from None
    return NamedClass(id=class_id, name=name)


def _reason(code: str) -> Reason:
    """The word for why; the bus's own if we do not know it."""
    try:
        return Reason(code)
    except ValueError:
        return cast(Reason, code)
