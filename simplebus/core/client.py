"""The client's side of the conversation (protocol/binary.md, version 1), without I/O.

Rule 1: bytes in, bytes out. A driver brings what it read to `receive`, writes what `outgoing`
shows, and makes callers wait when told so; it decides nothing.
Rule 2: a class is named to the bus before its first use, and subscribed to once, however many
local subscriptions it has. Each of them sees every message.
Rule 3: what reaches nobody is not acknowledged. It is kept for the next local subscription of its
class.
Rule 4: a redelivery of a message that still waits here is dropped: the one that waits will do.
Rule 5: a consumer that is slower than the bus makes reading pause. If it stands still while another
waits, reading goes on; what comes for it meanwhile is dropped unacknowledged, and comes again.

    bytes ─► FrameReceiver ─► runs ─► Feed(class) ─► Inbox … ─► Receipt ─► AckLog ─► bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from simplebus.core import frames
from simplebus.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from simplebus.core.frames import DELIMITER
from simplebus.core.inbox import Inbox
from simplebus.core.limits import (
    ACKS_MAX,
    BUFFERED_BYTES_MAX,
    CLASS_ID_MAX,
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    Limits,
)
from simplebus.core.messages import Batch, Receipt, Shares
from simplebus.core.outgoing import Outgoing
from simplebus.core.receive import FrameReceiver, ReceiveBuffer
from simplebus.core.runs import Run, ranges_of, runs

_SESSION_ID_BYTES = 4
_HALF = 1 << (MESSAGE_ID_BITS - 1)


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """A snapshot of one connection. Counters only grow."""

    session_id: int | None
    """What the bus calls this connection; None before it has answered."""
    published: int
    """Messages handed over for sending."""
    received: int
    """Messages that came from the bus, redeliveries included."""
    redelivered: int
    """Messages that came behind a later one of their class."""
    acknowledged: int
    """Messages whose acknowledgement was queued for writing."""
    ignored: int
    """Messages that came and were dropped unacknowledged: copies of what still waits here, what
    consumers that stand still have no room for, what nobody wanted, what no bus would send."""
    buffered_bytes: int
    """Bytes of messages that no consumer has begun to take."""
    queued_bytes: int
    """Bytes that wait to be written."""
    sent_bytes: int
    received_bytes: int


class Feed:
    """A class that this client has subscribed to, and its local subscriptions."""

    def __init__(self, class_id: int) -> None:
        self.class_id = class_id
        self.inboxes: list[Inbox] = []
        self.kept: list[Batch] = []
        """What waits for the next local subscription; empty while there is one."""
        self.kept_bytes = 0
        self.next_id: int | None = None
        """The id behind the furthest message seen; None before the first."""

    def waiting_ids(self) -> Iterator[range]:
        """Ids of messages that came and are still to be processed."""
        for batch in self.kept:
            yield batch.message_ids
        for inbox in self.inboxes:
            yield from inbox.waiting_ids()

    def keep(self, batch: Batch) -> None:
        """Keep a batch for the next local subscription."""
        self.kept.append(batch)
        self.kept_bytes += len(batch.data)


class ClientCore:
    """One connection's protocol state. See the module's law for how it is driven."""

    def __init__(self, *, frame_bytes_max: int = Limits().frame_bytes) -> None:
        self.outgoing = Outgoing()
        self.session_id: int | None = None
        self.answers = 0
        """Connects that the bus has answered."""
        self._asked = 0
        self._payload_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
        self._openings: dict[int, bytes] = {}
        """How the messages of a class begin, for the classes that were named to the bus."""
        self._feeds: dict[int, Feed] = {}
        self._put_piece = self.outgoing.put_piece
        self._published_many = self._received = self._redelivered = 0
        self._ignored = self._received_bytes = 0

    # Asking --------------------------------------------------------------------------------------

    def connect(self, *class_ids: int) -> int:
        """Queue a Connect. Everything queued before is applied once `answers` is what this returns.

        Raises ValueError for what is no class id.
        """
        for class_id in class_ids:
            check_class_id(class_id)
        content = b"[" + b",".join(b"%d" % class_id for class_id in class_ids) + b"]"
        self.outgoing.put(frames.encode(frames.CONNECT, content=content))
        for class_id in class_ids:
            header = frames.HEADER.pack(frames.MESSAGE, class_id, 0, 0)
            self._openings[class_id] = self.outgoing.opening(header)
        self._asked += 1
        return self._asked

    def subscribe(self, class_id: int, *, auto_ack: bool = True) -> Inbox:
        """A local subscription, the class's first or one more. It starts with what was kept.

        Raises ValueError for what is no class id.
        """
        self._name(class_id)
        feed = self._feeds.get(class_id)
        if feed is None:
            feed = self._feeds[class_id] = Feed(class_id)
            self.outgoing.put(frames.encode(frames.SUBSCRIBE, class_id=class_id))
        inbox = Inbox(class_id, auto_ack=auto_ack)
        for batch in feed.kept:
            inbox.put(batch.for_owner(inbox))
        feed.kept.clear()
        feed.kept_bytes = 0
        feed.inboxes.append(inbox)
        return inbox

    def unsubscribe(self, inbox: Inbox, *, processed: bool) -> None:
        """A local subscription ends; `processed` says what became of its last message.

        To the bus the class stays subscribed: version 1 has no word for anything else.
        """
        feed = self._feeds[inbox.class_id]
        if inbox not in feed.inboxes:
            return
        feed.inboxes.remove(inbox)
        if processed:
            inbox.settle(current=True)
        else:
            inbox.give_up()
        left = inbox.close()
        for batch in left:
            if feed.inboxes:  # The others decide now.
                batch.ack_part(0, len(batch))
            else:
                feed.keep(batch)

    # Publishing ----------------------------------------------------------------------------------

    def publish(self, payload: bytes, class_id: int) -> None:
        """Queue a message.

        Raises LocalProtocolError for a payload that the protocol cannot carry, ValueError for what
        is no class id, TypeError for what is not bytes.
        """
        try:
            opening = self._openings[class_id]
        except KeyError:
            opening = self._name(class_id)
        if type(payload) is not bytes:
            payload = _as_bytes(payload)
        if DELIMITER in payload or len(payload) > self._payload_bytes_max:
            raise self._uncarriable(payload, "")
        put = self._put_piece
        put(opening)
        put(payload)
        self.outgoing.queued_bytes += len(payload) + FRAME_BYTES_MIN

    def publish_many(self, payloads: Iterable[bytes], class_id: int) -> None:
        """Queue messages, all or, when it raises what `publish` does, none of them."""
        opening = self._openings.get(class_id) or self._name(class_id)
        payloads = list(payloads)
        if not payloads:
            return
        if set(map(type, payloads)) != {bytes}:
            payloads = list(map(_as_bytes, payloads))
        run = opening[DELIMITER_BYTES:] + opening.join(payloads) + DELIMITER
        longest = self._payload_bytes_max
        if run.count(DELIMITER) != len(payloads) or (
            len(run) > longest and max(map(len, payloads)) > longest
        ):
            raise next(
                self._uncarriable(payload, f" at index {index}")
                for index, payload in enumerate(payloads)
                if DELIMITER in payload or len(payload) > longest
            )
        self.outgoing.put_many(run)
        self._published_many += len(payloads)

    def _name(self, class_id: int) -> bytes:
        """The opening of the class's messages. Names the class to the bus if that is to be done."""
        check_class_id(class_id)
        if class_id not in self._openings:
            self.connect(class_id)
        return self._openings[class_id]

    def _uncarriable(self, payload: bytes, where: str) -> LocalProtocolError:
        size = len(payload)
        if size > self._payload_bytes_max:
            return LocalProtocolError(
                f"the payload{where} has {size} bytes; a message of this connection carries at "
                f"most {self._payload_bytes_max}"
            )
        return LocalProtocolError(
            f"the payload{where} holds the delimiter {DELIMITER!r} at offset "
            f"{payload.index(DELIMITER)}; protocol version 1 cannot carry it"
        )

    # Receiving -----------------------------------------------------------------------------------

    def receive(self, buffer: ReceiveBuffer, count: int) -> list[Inbox]:
        """`count` fresh bytes are in the buffer. Returns the subscriptions that got something.

        Raises RemoteProtocolError when the bus breaks the protocol; drop the connection then.
        """
        self._received_bytes += count
        woken: dict[Inbox, None] = {}
        if self._receiver.lone_frame(buffer, count):
            self._take(Run(bytes(buffer.space[:count]), count=1, stride=count, bounds=None), woken)
        else:
            for batch in self._receiver.receive(buffer, count):
                for run in runs(batch):
                    self._take(run, woken)
        return list(woken)

    @property
    def buffered_bytes(self) -> int:
        """Bytes that came and that no consumer has begun to take."""
        kept = sum(feed.kept_bytes for feed in self._feeds.values())
        return kept + sum(inbox.buffered_bytes for inbox in self._inboxes())

    @property
    def is_full(self) -> bool:
        """Whether reading should pause until `has_room`, or until consumers turn out to be still.

        Never while an answer is awaited: who waits for it may be the one who would make room.
        """
        return self.answers == self._asked and self._holds(BUFFERED_BYTES_MAX)

    @property
    def has_room(self) -> bool:
        """Whether reading should go on."""
        return not self._holds(BUFFERED_BYTES_MAX // 2)

    def _holds(self, size: int) -> bool:
        """Whether so many bytes wait for a consumer that moves, or for the first consumer."""
        inboxes = list(self._inboxes())
        if inboxes:
            return any(i.buffered_bytes >= size and not i.is_still for i in inboxes)
        return self.buffered_bytes >= size

    def progress(self) -> dict[Inbox, int]:
        """How far consumers have come, for `find_still`."""
        return {inbox: inbox.taken for inbox in self._inboxes()}

    def find_still(self, before: dict[Inbox, int]) -> None:
        """Find consumers that took nothing since `progress`, if another one waits for messages."""
        if any(inbox.is_awaited for inbox in self._inboxes()):
            for inbox, taken in before.items():
                if inbox.taken == taken and not inbox.is_empty:
                    inbox.mark_still()

    def _inboxes(self) -> Iterator[Inbox]:
        for feed in self._feeds.values():
            yield from feed.inboxes

    @property
    def acks_are_due(self) -> bool:
        """Whether so much is processed that the bus should know without delay."""
        return self.outgoing.acks.count >= ACKS_MAX

    def settle_processed(self) -> bool:
        """Acknowledge what consumers have processed up to now. False when no consumer holds any
        message: then there will be nothing new until one takes some."""
        holding = False
        for inbox in self._inboxes():
            inbox.settle(current=False)
            holding |= inbox.pending
        return holding

    def statistics(self) -> ClientStatistics:
        outgoing = self.outgoing
        return ClientStatistics(
            session_id=self.session_id,
            published=outgoing.messages + self._published_many,
            received=self._received,
            redelivered=self._redelivered,
            acknowledged=outgoing.acks.total + outgoing.acks.count,
            ignored=self._ignored,
            buffered_bytes=self.buffered_bytes,
            queued_bytes=outgoing.queued_bytes,
            sent_bytes=outgoing.sent_bytes,
            received_bytes=self._received_bytes,
        )

    def _take(self, run: Run, woken: dict[Inbox, None]) -> None:
        """What one run means."""
        if run.frame_type == frames.CONNECT:
            self._answered(run)
        elif run.frame_type == frames.MESSAGE:
            self._received += run.count
            feed = self._feeds.get(run.class_id) if run.is_deliverable else None
            if feed is None:
                self._ignored += run.count
            else:
                self._sort_in(feed, run)
                woken.update(dict.fromkeys(feed.inboxes))

    def _answered(self, run: Run) -> None:
        (content,) = run.contents(0, 1)
        if len(content) != _SESSION_ID_BYTES:
            raise RemoteProtocolError(
                Reason.BAD_CONNECT,
                f"the bus answered a Connect with {content[:40]!r}; expected a session id of "
                f"{_SESSION_ID_BYTES} bytes",
            )
        self.session_id = int.from_bytes(content, "little")
        self.answers += 1

    def _sort_in(self, feed: Feed, run: Run) -> None:
        """Deliver a run, as redelivered as far as it is behind what was seen before."""
        behind = 0
        if feed.next_id is not None:
            ahead = ((run.first_id - feed.next_id + _HALF) & MESSAGE_ID_MASK) - _HALF
            behind = min(max(-ahead, 0), run.count)
        if behind:
            self._redelivered += behind
            self._deliver_again(feed, run.part(0, behind))
        if behind < run.count:
            feed.next_id = run.ids.stop & MESSAGE_ID_MASK
            self._deliver(feed, run.part(behind, run.count), redelivered=False)

    def _deliver_again(self, feed: Feed, run: Run) -> None:
        """Deliver what does not still wait here."""
        wanted = np.ones(run.count, np.bool_)
        for ids in feed.waiting_ids():
            first = max(ids.start - run.first_id, 0)
            last = max(ids.stop - run.first_id, 0)
            wanted[first:last] = False
        for first, last in ranges_of(wanted):
            self._deliver(feed, run.part(first, last), redelivered=True)
        self._ignored += run.count - int(np.count_nonzero(wanted))

    def _deliver(self, feed: Feed, run: Run, *, redelivered: bool) -> None:
        acks, inboxes = self.outgoing.acks, feed.inboxes
        if not inboxes:
            if feed.kept_bytes >= BUFFERED_BYTES_MAX and any(self._inboxes()):
                self._ignored += run.count
            else:
                feed.keep(Batch(run, Receipt(None, acks, run=run, redelivered=redelivered)))
            return
        if any(i.is_still and i.buffered_bytes >= BUFFERED_BYTES_MAX for i in inboxes):
            self._ignored += run.count
            return
        shares = None
        if len(inboxes) > 1:
            shares = Shares(count=run.count, holders=len(inboxes))
        for inbox in inboxes:
            receipt = Receipt(inbox, acks, run=run, redelivered=redelivered, shares=shares)
            inbox.put(Batch(run, receipt))


def check_class_id(class_id: int) -> None:
    """Raise ValueError unless this is a class id."""
    if (
        isinstance(class_id, bool)
        or not isinstance(class_id, int)
        or not 0 <= class_id <= CLASS_ID_MAX
    ):
        raise ValueError(f"a class id is a number from 0 to {CLASS_ID_MAX}, got {class_id!r}")


def _as_bytes(payload: object) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise TypeError(
        f"a payload is bytes, got {type(payload).__name__}; encode it first, "
        "for example with str.encode() or json.dumps(…).encode()"
    )
