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

from simplebus.client.core.class_names import ClassName, named_class
from simplebus.client.core.class_names import check_class_id as check_class_id
from simplebus.client.core.connection import Conversation
from simplebus.client.core.frame_runs import Run, runs
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.open_requests import Request
from simplebus.client.core.statistics import ClientStatistics as ClientStatistics
from simplebus.core.commit_log import Level
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

_EVERYTHING = SubscribeRequest()


class ClientCore:
    """One program's protocol state. See the module's law for how it is driven."""

    def __init__(
        self,
        *,
        name: str | None = None,
        instance: str = "",
        heartbeat: float = 0.0,
        client: str = "",
        frame_bytes_max: int = Limits().frame_bytes,
        unconfirmed: int | None = None,
        bus: str = "",
        first: int | None = None,
        auth: Auth | None = None,
    ) -> None:
        """`unconfirmed` and `bus` are for who goes on with another one's numbers, `first` for who
        has numbers of its own, `auth` for who has to show who it is, as the Connect says them."""
        introduction = ConnectRequest(
            name=name,
            instance=instance or None,
            heartbeat=heartbeat,
            client=client,
            unconfirmed=unconfirmed,
            bus=bus,
            first=first,
            auth=auth,
        )
        self._talk = Conversation(introduction, frame_bytes_max=frame_bytes_max)
        self.publisher = self._talk.publisher
        self.publish = self.publisher.publish
        """Hand a message over; see Publisher.publish. Returns its position."""
        self.publish_many = self.publisher.publish_many
        """Hand messages over; see Publisher.publish_many. Returns the last one's position."""
        self.publish_runs = self.publisher.publish_runs
        """Hand messages of several classes over; see Publisher.publish_runs."""
        self.outgoing = self._talk.outgoing
        """What is to be written: `peek` shows it, `sent` says how much was taken."""
        self._inboxes = self._talk.inboxes
        self._frame_bytes_max = frame_bytes_max
        self._receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
        self._received_bytes = 0

    # Connections ---------------------------------------------------------------------------------

    @property
    def level(self) -> Level:
        """Where a message is when it is confirmed, by the bus that has answered last."""
        return self._talk.level

    @property
    def is_ready(self) -> bool:
        """Whether the bus is there and has answered."""
        return self.outgoing.is_open

    @property
    def frame_bytes(self) -> int:
        """The longest frame that the bus takes from here."""
        return self.publisher.frame_bytes

    @property
    def session_id(self) -> int | None:
        """What the bus calls the connection; None while there is none, or no answer."""
        return self._talk.session_id

    @property
    def bus_id(self) -> str:
        """The identity of the memory of the bus that answered last; empty before the first one."""
        return self._talk.bus_id

    @property
    def run(self) -> str:
        """Which process of the bus answered last."""
        return self._talk.run

    @property
    def duplicate_seconds(self) -> float:
        """How long a message is known by its number at whichever door before a cluster; 0 where the
        bus that answered last is none."""
        return self._talk.duplicate_seconds

    def connected(self, now: float) -> Request:
        """There is a fresh connection. Returns its Connect; what else waits follows the answer."""
        return self._talk.begin(now)

    def lost(self) -> None:
        """The connection is gone. What lasts goes on with the next one, the rest fails."""
        self._receiver = FrameReceiver(frame_bytes_max=self._frame_bytes_max)
        self._talk.lose()

    def fail_requests(self, error: BusError) -> None:
        """There will be no connection any more: whatever was asked fails with this error."""
        self._talk.requests.fail(error)

    def tick(self, now: float) -> float:
        """Time goes by. Returns when to call again; math.inf when only a connection changes that.

        Raises RemoteProtocolError when the bus has been silent for too long.
        """
        outgoing = self.outgoing
        if not self.is_ready:
            return math.inf
        if self._talk.heartbeat.is_due(now, outgoing.sent_bytes) and not outgoing.peek():
            outgoing.put(frames.encode(frames.HEARTBEAT))
        return self._talk.heartbeat.next_look

    # Asking --------------------------------------------------------------------------------------

    def name_classes(self, *classes: ClassName) -> Request:
        """Name classes to the bus, which makes those that are new.

        Raises ValueError for what is neither a class id nor a class name.
        """
        return self._talk.name_classes([named_class(one) for one in classes])

    def class_id(self, name: str) -> int | None:
        """The id of a class that was named by name; None before the bus has said it."""
        return self._talk.classes.id_of(name)

    def sync(self) -> Request:
        """Done when the bus has applied everything queued before."""
        content = ConnectRequest().encode()
        return self._talk.ask(frames.CONNECT, content=content, position=self.published)

    def subscribe(
        self, class_id: int, options: SubscribeRequest = _EVERYTHING, *, auto_ack: bool = True
    ) -> Inbox:
        """A subscription of its own. Its `request` is done when the bus has begun it.

        Raises ValueError for what is no class id, LocalProtocolError for one too many.
        """
        self._talk.name(class_id)
        inbox = self._inboxes.open(class_id, options, auto_ack=auto_ack)
        if self.is_ready:
            self._talk.subscribe(inbox)
        return inbox

    def unsubscribe(self, inbox: Inbox, *, processed: bool, forget: bool = False) -> Request:
        """A subscription ends; `processed` says what became of its last message.

        What was never handed out goes back to the bus, for others or for a later one. With `forget`
        a durable's position goes too.
        """
        if inbox.leaving is not None:
            return inbox.leaving
        inbox.finish(processed=processed)
        content = UnsubscribeRequest(forget=True).encode() if forget else b""
        number = inbox.subscription_number
        request = self._talk.requests.make(frames.UNSUBSCRIBE, subject=number, content=content)
        inbox.leave(request)
        if inbox.is_begun:
            self.outgoing.put(request.frame)
        elif self._inboxes.get(number) is not inbox or not (
            self.is_ready or (inbox.is_lasting and inbox.was_begun)
        ):
            self._inboxes.forget(inbox, inbox.error)
        # Otherwise the bus is told when it has begun the subscription, and been told what was
        # still to be said about its messages.
        return request

    def fetch(
        self,
        class_id: int,
        first: int,
        count: int,
        *,
        time: float | None = None,
        times: bool = False,
        make: bool = True,
    ) -> Request:
        """Messages of a class by sequence, with no effect on anybody's position: its `batches`.

        With a `time`, in seconds since 1970, they begin with the first one accepted at or after
        it, whatever `first` says; `times` has the reply say when they were accepted. A class that
        nobody has named is made; or, without `make`, refused as `unknown_class`.
        Raises ValueError for what is no class id.
        """
        check_class_id(class_id)
        if make:
            self._talk.name(class_id)
        content = FetchRequest(first=first, count=count, time=time, times=times).encode()
        request = self._talk.ask(frames.FETCH, subject=class_id, content=content)
        request.wanted = count
        return request

    def inquire(self, question: Question) -> Request:
        """What waits for what: its `reply`. No class is made."""
        content = msgspec.json.encode(question)
        return self._talk.ask(frames.INQUIRE, content=content, position=self.published)

    def keep_last_values(self, class_id: int) -> Request:
        """A class is to keep the last message of each channel. Raises ValueError for what is no
        class id."""
        return self.name_classes(NamedClass(id=class_id, last_values=True))

    def purge(self, class_id: int, first: int, last: int | None) -> Request:
        """Messages first..last-1 of a class, those to the head for None, are to be nobody's any
        more. Raises ValueError for what is no class id."""
        check_class_id(class_id)
        self._talk.name(class_id)
        content = PurgeRequest(first=first, last=last).encode()
        return self._talk.ask(
            frames.PURGE, subject=class_id, content=content, position=self.published
        )

    # Messages ------------------------------------------------------------------------------------

    @property
    def published(self) -> int:
        """Messages handed over so far: the position of the next one."""
        return self.publisher.published

    @property
    def confirmed(self) -> int:
        """All positions below are stored by the bus, or refused."""
        return self.publisher.confirmed

    @property
    def has_credit(self) -> bool:
        """Whether one message more may be handed over without piling up here."""
        return self.publisher.has_credit

    def refusals(self) -> dict[int, RefusedError]:
        """What was refused since this was asked the last time, by position."""
        return self.publisher.refusals()

    def hear_notices(self, call: Callable[[str], object]) -> None:
        """Have this called with what the bus says about nothing that was asked of it."""
        self._talk.on_notice = call

    @property
    def on_ack(self) -> Callable[[], object]:
        """Called when a consumer has said something about a message by itself."""
        return self.outgoing.desk.by_hand

    @on_ack.setter
    def on_ack(self, call: Callable[[], object]) -> None:
        self.outgoing.desk.by_hand = call

    @property
    def acks_are_due(self) -> bool:
        """Whether so much is processed that the bus should know without delay."""
        return self.outgoing.desk.count >= ACKS_MAX

    @property
    def holds_verdicts(self) -> bool:
        """Whether acknowledgements wait for a subscription to be begun again on a connection."""
        return any(inbox.holds_verdicts for inbox in self._inboxes)

    def settle_processed(self) -> bool:
        """Acknowledge what consumers have processed up to now. False when no consumer holds any
        message: then there will be nothing new until one takes some."""
        holding = False
        for inbox in self._inboxes:
            inbox.settle(current=False)
            holding |= inbox.pending
        return holding

    # Receiving -----------------------------------------------------------------------------------

    def receive(self, buffer: ReceiveBuffer, count: int, now: float) -> list[Inbox]:
        """`count` fresh bytes are in the buffer. Returns the subscriptions that got something, or
        were ended.

        Raises RemoteProtocolError when the bus breaks the protocol, or says that it closes; call
        `lost` then.
        """
        self._talk.heartbeat.heard(now)
        self._received_bytes += count
        woken: dict[Inbox, None] = {}
        if self._receiver.lone_frame(buffer, count):
            run = Run(bytes(buffer.space[:count]), count=1, stride=count)
            self._talk.take(run, woken, now)
        else:
            for batch in self._receiver.receive(buffer, count):
                for run in runs(batch):
                    self._talk.take(run, woken, now)
        return list(woken)

    def statistics(self) -> ClientStatistics:
        publisher, outgoing, inboxes = self.publisher, self.outgoing, self._inboxes
        return ClientStatistics(
            session_id=self.session_id,
            reconnections=max(0, self._talk.greetings - 1),
            published=publisher.published,
            confirmed=publisher.confirmed,
            refused=publisher.refused,
            resent=publisher.resent,
            forgotten=publisher.forgotten,
            unconfirmed=publisher.published - publisher.confirmed,
            unconfirmed_bytes=publisher.unconfirmed_bytes,
            received=inboxes.received,
            redelivered=inboxes.redelivered,
            acknowledged=outgoing.desk.acked,
            nacked=outgoing.desk.nacked,
            ignored=self._talk.ignored + inboxes.ignored,
            buffered_bytes=sum(inbox.buffered_bytes for inbox in inboxes),
            queued_bytes=outgoing.queued_bytes,
            sent_bytes=outgoing.sent_bytes,
            received_bytes=self._received_bytes,
        )

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.publisher.check()
        for inbox in self._inboxes:
            inbox.check()
