"""All subscriptions of a program, and which of them a message is for.

Rule 1: the bus says before messages whom they are for; that holds until it says otherwise.
Rule 2: what is for a subscription that is gone is dropped and counted: the bus learns soon. What is
for none at all is the bus's mistake.
Rule 3: fetched messages belong to the oldest fetch of their class that is not answered.
"""

from __future__ import annotations

from collections.abc import Iterator

from simplebus.client.core.acks import Desk, Receipt
from simplebus.client.core.frame_runs import Ids, Run
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch
from simplebus.client.core.open_requests import Request, Requests
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import MESSAGE_ID_BITS, MESSAGE_ID_MASK, SUBSCRIPTIONS_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import FetchReply, SubscribeRequest

_HALF = 1 << (MESSAGE_ID_BITS - 1)


class Inboxes:
    """Subscriptions by number, those that were left and not yet forgotten included."""

    def __init__(self, requests: Requests, desk: Desk) -> None:
        self.received = 0
        """Messages that came."""
        self.redelivered = 0
        self.ignored = 0
        """Messages that were dropped."""
        self._requests = requests
        self._desk = desk
        self._inboxes: dict[int, Inbox] = {}
        self.waiting: dict[Inbox, None] = {}
        """Those that the bus is not asked for yet, on this connection."""
        self._numbered = 0
        """The number given last."""
        self._delivery: tuple[int, int, int] | None = None
        """Class, attempt and number of the subscription of what comes; None before the first."""

    def __iter__(self) -> Iterator[Inbox]:
        return iter(list(self._inboxes.values()))

    def get(self, number: int) -> Inbox | None:
        return self._inboxes.get(number)

    def open(self, class_id: int, options: SubscribeRequest, *, auto_ack: bool) -> Inbox:
        """A new subscription, and the request for it."""
        if len(self._inboxes) >= SUBSCRIPTIONS_MAX:
            raise LocalProtocolError(f"a program has at most {SUBSCRIPTIONS_MAX} subscriptions")
        number = self._numbered
        while True:
            number = number % SUBSCRIPTIONS_MAX + 1
            if number not in self._inboxes:
                break
        self._numbered = number
        request = self._requests.make(
            frames.SUBSCRIBE, subject=class_id, detail=number, content=options.encode()
        )
        inbox = Inbox(class_id, options, request, self._desk, number=number, auto_ack=auto_ack)
        self._inboxes[number] = inbox
        return inbox

    def forget(self, inbox: Inbox, error: RefusedError | None = None) -> None:
        """The bus has no such subscription any more, and we need none."""
        inbox.end(error)
        if self._inboxes.get(inbox.subscription_number) is inbox:
            del self._inboxes[inbox.subscription_number]
        if not inbox.request.done:
            self._requests.drop(inbox.request)
            inbox.request.finish()
        if inbox.leaving is not None and not inbox.leaving.done:
            self._requests.drop(inbox.leaving)
            inbox.leaving.finish()

    def must_wait(self, inbox: Inbox) -> bool:
        """Whether its durable is still that of one before it, which was left, and of which the bus
        is told so when it has begun it."""
        if inbox.options.durable is None or inbox.options.group is not None:
            return False
        for other in self:
            if other is inbox:
                return False
            if (
                other.leaving is not None
                and not other.is_begun
                and other.class_id == inbox.class_id
                and other.options.durable == inbox.options.durable
            ):
                return True
        return False

    def of(self, request: Request) -> Inbox | None:
        """The subscription that a Subscribe asks for."""
        inbox = self._inboxes.get(request.detail)
        return inbox if inbox is not None and inbox.request is request else None

    def of_request(self, number: int) -> Inbox | None:
        """The subscription that was asked for, and granted, under this number."""
        return next((one for one in self._inboxes.values() if one.request.number == number), None)

    def lost(self) -> None:
        """The connection is gone, and with it every subscription whose position is not kept."""
        self._delivery = None
        self.waiting.clear()
        for inbox in self:
            inbox.lost()
            if inbox.leaving is not None and not inbox.is_lasting:
                self.forget(inbox)

    # What comes ----------------------------------------------------------------------------------

    def announce(self, run: Run) -> None:
        """Whom the messages are for that come from now on."""
        self._delivery = (run.class_id, run.first_id, run.timer_index)

    def take(self, run: Run, woken: dict[Inbox, None]) -> None:
        """Messages have come. Adds who got some of them."""
        self.received += run.count
        if self._delivery is None or self._delivery[0] != run.class_id or run.first_id < 0:
            raise RemoteProtocolError(
                Reason.UNKNOWN_SUBSCRIPTION,
                f"the bus sent message {run.first_id} of class {run.class_id}, and before it "
                f"announced {self._delivery!r} (class, attempt, subscription)",
            )
        _, attempt, number = self._delivery
        if number == 0:
            self._take_fetched(run)
            return
        if attempt != 1:
            self.redelivered += run.count
        inbox = self._inboxes.get(number)
        if inbox is None or not inbox.is_begun or inbox.leaving is not None:
            self.ignored += run.count
            return
        self.ignored += inbox.accept(run, attempt)
        woken[inbox] = None

    def _take_fetched(self, run: Run) -> None:
        for request in self._requests.of_type(frames.FETCH):
            if request.subject == run.class_id:
                request.wanted -= run.count
                if request.wanted < 0:
                    break
                request.runs.append(run)
                return
        raise RemoteProtocolError(
            Reason.BAD_REQUEST,
            f"the bus sent {run.count} messages of class {run.class_id} that nobody fetches",
        )

    def fetched(self, request: Request, reply: FetchReply) -> None:
        """A fetch is answered: now it is known which sequences its messages have."""
        at = reply.first
        for run in request.runs:
            first = at + ((run.first_id - at + _HALF) & MESSAGE_ID_MASK) - _HALF
            sequences: Ids = range(first, first + run.count)
            if not isinstance(run.ids, range):
                sequences = run.ids + (first - run.first_id)
            at = int(sequences[-1]) + 1
            receipt = Receipt(request, None, class_id=run.class_id, sequences=sequences, attempt=0)
            request.batches.append(Batch(run, receipt))
        request.runs.clear()
        request.finish(reply)
