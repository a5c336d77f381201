"""All subscriptions of a program, and which of them a message is for.

Rule 1: the bus says before messages whom they are for; that holds until it says otherwise.
Rule 2: what is for a subscription that is gone is dropped and counted: the bus learns soon. What is
for none at all is the bus's mistake.
Rule 3: fetched messages belong to the oldest fetch of their class that is not answered.
"""

from __future__ import annotations

from collections.abc import Iterator

from simplebus.client.core.acks import AckSink, AckToken
from simplebus.client.core.frame_runs import FrameRun, MessageIds
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch
from simplebus.client.core.open_requests import OpenRequest, OpenRequests
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import MESSAGE_ID_BITS, MESSAGE_ID_MASK, SUBSCRIPTIONS_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import FetchReply, SubscribeRequest

_HALF_ID_RANGE = 1 << (MESSAGE_ID_BITS - 1)


class Inboxes:
    """Subscriptions by number, those that were left and not yet forgotten included."""

    def __init__(self, open_requests: OpenRequests, ack_sink: AckSink) -> None:
        self.received_count = 0
        """Messages that came."""
        self.redelivered_count = 0
        self.ignored_count = 0
        """Messages that were dropped."""
        self._open_requests = open_requests
        self._ack_sink = ack_sink
        self._inbox_by_number: dict[int, Inbox] = {}
        self.inboxes_to_subscribe: dict[Inbox, None] = {}
        """Those that the bus is not asked for yet, on this connection."""
        self._last_number = 0
        """The number given last."""
        self._delivery_header: tuple[int, int, int] | None = None
        """Class, attempt and number of the subscription of what comes; None before the first."""

    def __iter__(self) -> Iterator[Inbox]:
        return iter(list(self._inbox_by_number.values()))

    def get(self, number: int) -> Inbox | None:
        return self._inbox_by_number.get(number)

    def open_inbox(self, class_id: int, options: SubscribeRequest, *, auto_ack: bool) -> Inbox:
        """A new subscription, and the request for it."""
        if len(self._inbox_by_number) >= SUBSCRIPTIONS_MAX:
            raise LocalProtocolError(f"a program has at most {SUBSCRIPTIONS_MAX} subscriptions")
        number = self._last_number
        while True:
            number = number % SUBSCRIPTIONS_MAX + 1
            if number not in self._inbox_by_number:
                break
        self._last_number = number
        request = self._open_requests.open_request(
            frames.SUBSCRIBE,
            target_id=class_id,
            subscription_number=number,
            content=options.encode(),
        )
        inbox = Inbox(
            class_id,
            options,
            request,
            self._ack_sink,
            subscription_number=number,
            auto_ack=auto_ack,
        )
        self._inbox_by_number[number] = inbox
        return inbox

    def remove(self, inbox: Inbox, error: RefusedError | None = None) -> None:
        """The bus has no such subscription any more, and we need none."""
        inbox.mark_ended(error)
        if self._inbox_by_number.get(inbox.subscription_number) is inbox:
            del self._inbox_by_number[inbox.subscription_number]
        if not inbox.subscribe_request.is_done:
            self._open_requests.discard(inbox.subscribe_request)
            inbox.subscribe_request.finish()
        if inbox.unsubscribe_request is not None and not inbox.unsubscribe_request.is_done:
            self._open_requests.discard(inbox.unsubscribe_request)
            inbox.unsubscribe_request.finish()

    def is_durable_occupied(self, inbox: Inbox) -> bool:
        """Whether its durable is still that of one before it, which was left, and of which the bus
        is told so when it has begun it."""
        if inbox.options.durable is None or inbox.options.group is not None:
            return False
        for other in self:
            if other is inbox:
                return False
            if (
                other.unsubscribe_request is not None
                and not other.is_subscribed
                and other.class_id == inbox.class_id
                and other.options.durable == inbox.options.durable
            ):
                return True
        return False

    def find_by_request(self, request: OpenRequest) -> Inbox | None:
        """The subscription that a Subscribe asks for."""
        inbox = self._inbox_by_number.get(request.subscription_number)
        return inbox if inbox is not None and inbox.subscribe_request is request else None

    def find_by_request_number(self, number: int) -> Inbox | None:
        """The subscription that was asked for, and granted, under this number."""
        return next(
            (
                one
                for one in self._inbox_by_number.values()
                if one.subscribe_request.number == number
            ),
            None,
        )

    def connection_lost(self) -> None:
        """The connection is gone, and with it every subscription whose position is not kept."""
        self._delivery_header = None
        self.inboxes_to_subscribe.clear()
        for inbox in self:
            inbox.connection_lost()
            if inbox.unsubscribe_request is not None and not inbox.has_kept_position:
                self.remove(inbox)

    # What comes ----------------------------------------------------------------------------------

    def set_delivery_header(self, run: FrameRun) -> None:
        """Whom the messages are for that come from now on."""
        self._delivery_header = (run.class_id, run.first_id, run.timer_index)

    def route_run(self, run: FrameRun, inboxes_to_wake: dict[Inbox, None]) -> None:
        """Messages have come. Adds who got some of them."""
        self.received_count += run.count
        if (
            self._delivery_header is None
            or self._delivery_header[0] != run.class_id
            or run.first_id < 0
        ):
            raise RemoteProtocolError(
                Reason.UNKNOWN_SUBSCRIPTION,
                f"the bus sent message {run.first_id} of class {run.class_id}, and before it "
                f"announced {self._delivery_header!r} (class, attempt, subscription)",
            )
        _, attempt, number = self._delivery_header
        if number == 0:
            self._append_to_fetch(run)
            return
        if attempt != 1:
            self.redelivered_count += run.count
        inbox = self._inbox_by_number.get(number)
        if inbox is None or not inbox.is_subscribed or inbox.unsubscribe_request is not None:
            self.ignored_count += run.count
            return
        self.ignored_count += inbox.accept_run(run, attempt)
        inboxes_to_wake[inbox] = None

    def _append_to_fetch(self, run: FrameRun) -> None:
        for request in self._open_requests.find_by_type(frames.FETCH):
            if request.target_id == run.class_id:
                request.remaining_count -= run.count
                if request.remaining_count < 0:
                    break
                request.frame_runs.append(run)
                return
        raise RemoteProtocolError(
            Reason.BAD_REQUEST,
            f"the bus sent {run.count} messages of class {run.class_id} that nobody fetches",
        )

    def complete_fetch(self, request: OpenRequest, reply: FetchReply) -> None:
        """A fetch is answered: now it is known which sequences its messages have."""
        at = reply.first
        for run in request.frame_runs:
            first = at + ((run.first_id - at + _HALF_ID_RANGE) & MESSAGE_ID_MASK) - _HALF_ID_RANGE
            sequences: MessageIds = range(first, first + run.count)
            if not isinstance(run.ids, range):
                sequences = run.ids + (first - run.first_id)
            at = int(sequences[-1]) + 1
            receipt = AckToken(request, None, class_id=run.class_id, sequences=sequences, attempt=0)
            request.batches.append(Batch(run, receipt))
        request.frame_runs.clear()
        request.finish(reply)
