"""All subscriptions of a client, and the routing of received messages to them.

The server announces the subscription before its messages with a Deliver frame, which holds until
the next one. Fetched messages belong to the oldest open fetch of their class.
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
    """Inboxes by subscription number, until the Unsubscribe is answered."""

    def __init__(self, open_requests: OpenRequests, ack_sink: AckSink) -> None:
        self.received_count = 0
        """Messages received, including dropped messages."""
        self.redelivered_count = 0
        self.ignored_count = 0
        """Messages dropped: duplicates, and messages for subscriptions that were left."""
        self._open_requests = open_requests
        self._ack_sink = ack_sink
        self._inbox_by_number: dict[int, Inbox] = {}
        self.inboxes_to_subscribe: dict[Inbox, None] = {}
        """Inboxes whose Subscribe waits until their durable is free, on this connection."""
        self._last_number = 0
        """The number that was assigned last."""
        self._delivery_header: tuple[int, int, int] | None = None
        """Class id, attempt and subscription number from the last Deliver frame; None before the
        first.
        """

    def __iter__(self) -> Iterator[Inbox]:
        return iter(list(self._inbox_by_number.values()))

    def get(self, number: int) -> Inbox | None:
        return self._inbox_by_number.get(number)

    def open_inbox(self, class_id: int, options: SubscribeRequest, *, auto_ack: bool) -> Inbox:
        """Create an inbox and its Subscribe request.

        Raises:
            LocalProtocolError: If the client has SUBSCRIPTIONS_MAX subscriptions.
        """
        if len(self._inbox_by_number) >= SUBSCRIPTIONS_MAX:
            raise LocalProtocolError(f"a client has at most {SUBSCRIPTIONS_MAX} subscriptions")
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
        """Remove the inbox of an ended subscription, and finish its requests."""
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
        """Return True if an earlier inbox of the same durable has yet to send its Unsubscribe."""
        if inbox.options.durable is None or inbox.options.group is not None:
            return False
        for earlier_inbox in self:
            if earlier_inbox is inbox:
                return False
            if (
                earlier_inbox.unsubscribe_request is not None
                and not earlier_inbox.is_subscribed
                and earlier_inbox.class_id == inbox.class_id
                and earlier_inbox.options.durable == inbox.options.durable
            ):
                return True
        return False

    def find_by_request(self, request: OpenRequest) -> Inbox | None:
        """Return the inbox of a Subscribe request."""
        inbox = self._inbox_by_number.get(request.subscription_number)
        return inbox if inbox is not None and inbox.subscribe_request is request else None

    def find_by_request_number(self, number: int) -> Inbox | None:
        """Return the inbox of an answered Subscribe request."""
        return next(
            (
                inbox
                for inbox in self._inbox_by_number.values()
                if inbox.subscribe_request.number == number
            ),
            None,
        )

    def connection_lost(self) -> None:
        """Detach all inboxes. Remove a left inbox if the server does not keep its position."""
        self._delivery_header = None
        self.inboxes_to_subscribe.clear()
        for inbox in self:
            inbox.connection_lost()
            if inbox.unsubscribe_request is not None and not inbox.has_kept_position:
                self.remove(inbox)

    # Receiving -----------------------------------------------------------------------------------

    def set_delivery_header(self, class_id: int, attempt: int, number: int) -> None:
        """Set the subscription of the messages that follow."""
        self._delivery_header = (class_id, attempt, number)

    def route_run(self, run: FrameRun, inboxes_to_wake: dict[Inbox, None]) -> None:
        """Add received messages to their inbox, and that inbox to `inboxes_to_wake`.

        Raises:
            RemoteProtocolError: If the server did not announce the messages, or nothing
                requested them.
        """
        self.received_count += run.count
        if (
            self._delivery_header is None
            or self._delivery_header[0] != run.class_id
            or run.first_id < 0
        ):
            raise RemoteProtocolError(
                Reason.UNKNOWN_SUBSCRIPTION,
                f"the server sent message {run.first_id} of class {run.class_id}; expected a "
                "Deliver frame for that class before it, got "
                f"{self._delivery_header!r} (class, attempt, subscription)",
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
            f"the server sent {run.count} fetched messages of class {run.class_id}; "
            "expected an open fetch for them",
        )

    def complete_fetch(self, request: OpenRequest, reply: FetchReply) -> None:
        """Create the batches of a fetch from the sequences in its reply."""
        next_sequence = reply.first
        for run in request.frame_runs:
            first = (
                next_sequence
                + ((run.first_id - next_sequence + _HALF_ID_RANGE) & MESSAGE_ID_MASK)
                - _HALF_ID_RANGE
            )
            sequences: MessageIds = range(first, first + run.count)
            if not isinstance(run.ids, range):
                sequences = run.ids + (first - run.first_id)
            next_sequence = int(sequences[-1]) + 1
            ack_token = AckToken(
                request, None, class_id=run.class_id, sequences=sequences, attempt=0
            )
            request.batches.append(Batch(run, ack_token))
        request.frame_runs.clear()
        request.finish(reply)
