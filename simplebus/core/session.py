"""One peer's side of the conversation: its bytes become events (protocol/binary.md, version 1).

Rule 1: a session knows its own peer only. What an event means for others is the broker's business.
Rule 2: events come in an order in which every effect is as if frames were handled one by one: a run
of messages and acks of several classes may be sorted by class, nothing moves across other frames.
Rule 3: the only error that escapes is RemoteProtocolError, after the events of the frames before
the offending one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from simplebus.core import frames
from simplebus.core.delivery import Outbox, Subscription
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.events import (
    Acked,
    AckedOne,
    Connected,
    Event,
    Published,
    PublishedOne,
    Subscribed,
)
from simplebus.core.frames import FrameBatch
from simplebus.core.limits import (
    CLASS_ID_MAX,
    DELIMITER_BYTES,
    HEADER_BYTES,
    PLAIN_FRAMES_MAX,
    PUBLISHER_TICKS,
    RECEIVE_BYTES,
    TRICKLE_BYTES,
    Limits,
)
from simplebus.core.receive import FrameReceiver, ReceiveBuffer

# With this many changes of type or class in one batch, sorting it beats going run by run.
_RUNS_MAX = PLAIN_FRAMES_MAX

# A read this short is looked at as a single frame first.
_LONE_BYTES_MAX = 4096

_CLASS_IDS = msgspec.json.Decoder(list[int], strict=True)


class Session:
    """Protocol state of one connection, from accept to close."""

    def __init__(
        self, session_id: int, *, frame_bytes_max: int, known_classes: Container[int], peer: str
    ) -> None:
        self.session_id = session_id
        self.peer = peer
        """Who it is, for logs."""
        self.receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
        self.outbox = Outbox(session_id)
        self.subscriptions: dict[int, Subscription] = {}
        """By class id."""
        self.early: set[int] = set()
        """Classes that it subscribed to before anybody named them."""
        self.parked: deque[tuple[int, FrameBatch]] = deque()
        """Messages that wait for room in their class, in order, as (class id, frames)."""
        self.parked_bytes = 0
        self.closed = False
        self.published_tick = -PUBLISHER_TICKS
        """The tick of its last message."""
        self.acknowledged = 0
        """Messages that its acks named since it was last asked whether it may rest."""
        self._silent_ticks = 0
        self._partial_ticks = 0
        self._stalled_ticks = 0
        self._frames_before = 0
        self._sent_before = 0
        self._known_classes = known_classes

    @property
    def pending_bytes(self) -> int:
        """Bytes kept for this session beside the rings."""
        return self.parked_bytes + self.outbox.pending_bytes + self.receiver.tail_bytes

    @property
    def read_bytes(self) -> int:
        """How much to read from this peer at once."""
        return TRICKLE_BYTES if self.parked else RECEIVE_BYTES

    def receive(self, buffer: ReceiveBuffer, count: int) -> Iterator[Event]:
        """Yield the events of `count` fresh bytes in the buffer.

        Each event is to be applied before the next one is asked for: a Connected decides which
        classes the messages behind it may name. Events are valid until the buffer is filled again.
        """
        for batch in self.receiver.receive(buffer, count):
            yield from self._events(batch)

    def receive_one(self, buffer: ReceiveBuffer, count: int) -> PublishedOne | AckedOne | None:
        """The event of a single message or ack, if that is all that came; without arrays.

        None leaves everything to `receive`.
        """
        if count > _LONE_BYTES_MAX:
            return None
        frame = buffer.space[:count]
        frame_type = frame[0]
        if frame_type == frames.MESSAGE:
            class_id = frame[1] << 8 | frame[2] if count > 2 else -1
            if class_id in self._known_classes and self.receiver.lone_frame(buffer, count):
                return PublishedOne(class_id, frame)
        elif frame_type == frames.ACK and self.receiver.lone_frame(buffer, count):
            first, last = frames.ack_range(frame[HEADER_BYTES:-DELIMITER_BYTES])
            return AckedOne(frame[1] << 8 | frame[2], first, last)
        return None

    def tick(
        self, limits: Limits, tick_seconds: float, *, holds_back: bool
    ) -> RemoteProtocolError | None:
        """One beat: is this peer overdue? `holds_back` says that a full class waits for it."""
        receiver, outbox = self.receiver, self.outbox
        silent = receiver.frames == 0 and receiver.tail_bytes == 0
        partial = receiver.tail_bytes and receiver.frames == self._frames_before
        stalled = holds_back and not outbox.idle and outbox.sent_bytes == self._sent_before
        self._frames_before, self._sent_before = receiver.frames, outbox.sent_bytes
        if self.parked:  # It is not read from: what it cannot say, it cannot be late with.
            silent = partial = False
        self._silent_ticks = self._silent_ticks + 1 if silent else 0
        self._partial_ticks = self._partial_ticks + 1 if partial else 0
        self._stalled_ticks = self._stalled_ticks + 1 if stalled else 0
        for ticks, most, reason, what in (
            (self._silent_ticks, limits.hello_seconds, Reason.HELLO_TIMEOUT, "sent nothing"),
            (self._partial_ticks, limits.frame_seconds, Reason.FRAME_TIMEOUT, "ended no frame"),
            (
                self._stalled_ticks,
                limits.stall_seconds,
                Reason.STALLED,
                "holds back a full class and took no bytes",
            ),
        ):
            if ticks * tick_seconds > most:
                return RemoteProtocolError(reason, f"the peer {what} for {most:g} s")
        return None

    def _events(self, batch: FrameBatch) -> Iterator[Event]:
        if batch.count == 1:
            yield from self._run(batch)
            return
        changes = batch.changes()
        if np.count_nonzero(changes) <= _RUNS_MAX:
            yield from self._runs(batch, np.flatnonzero(changes) + 1)
            return
        keys = batch.keys()
        types = keys & 0xFF
        sortable = (types == frames.MESSAGE) | (types == frames.ACK) | (types == frames.HEARTBEAT)
        others = np.flatnonzero(~sortable)
        first = 0
        for at in (*others.tolist(), batch.count):
            if first < at:
                yield from self._sorted(batch.slice(first, at), keys[first:at])
            if at < batch.count:
                yield from self._run(batch.slice(at, at + 1))
            first = at + 1

    def _runs(self, batch: FrameBatch, changes: npt.NDArray[np.intp]) -> Iterator[Event]:
        """Frames of one type and class at a time, in the order in which they came."""
        first = 0
        for last in (*changes.tolist(), batch.count):
            yield from self._run(batch if last - first == batch.count else batch.slice(first, last))
            first = last

    def _sorted(self, batch: FrameBatch, keys: npt.NDArray[np.uint32]) -> Iterator[Event]:
        """Messages, acks and heartbeats, each type and class in one piece; acks first.

        Nothing is yielded before all is known to be good; else what stands before the first bad
        frame is done alone.
        """
        types = keys & 0xFF
        classes = (keys >> 8).astype(np.uint16)  # Sorting so few bits takes linear time.
        events: list[Event] = []
        bad = batch.count
        for frame_type in (frames.ACK, frames.MESSAGE):
            here = types == frame_type
            count = np.count_nonzero(here)
            if count == here.size:
                order = np.argsort(classes, kind="stable")
            elif count:
                order = np.flatnonzero(here)
                order = order[np.argsort(classes[order], kind="stable")]
            else:
                continue
            sorted_classes = classes[order]
            gathered = batch.take(order)
            first = 0
            changes = np.flatnonzero(sorted_classes[1:] != sorted_classes[:-1]) + 1
            for last in (*changes.tolist(), order.size):
                event, good = self._group(gathered.slice(first, last))
                if good < last - first:
                    bad = min(bad, int(order[first + good]))
                events.append(event)
                first = last
        if bad == batch.count:
            yield from events
            return
        if bad:
            yield from self._events(batch.slice(0, bad))
        yield from self._run(batch.slice(bad, bad + 1))

    def _group(self, batch: FrameBatch) -> tuple[Event, int]:
        """The event of some acks or messages of one class, and how many of them are good."""
        frame_type, class_id = _type_and_class(batch)
        if frame_type == frames.ACK:
            firsts, lasts = frames.ack_ranges(batch)
            return Acked(class_id, firsts, lasts), firsts.size
        return Published(class_id, batch), batch.count if class_id in self._known_classes else 0

    def _run(self, batch: FrameBatch) -> Iterator[Event]:
        """Frames of one type and class."""
        frame_type, class_id = _type_and_class(batch)
        handle = _HANDLERS.get(frame_type)
        if handle is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_TYPE,
                f"a frame began with byte 0x{frame_type:02x}; expected one of the digits 0 to 4",
            )
        yield from handle(self, class_id, batch)

    def _heartbeat(self, class_id: int, batch: FrameBatch) -> Iterator[Event]:
        return iter(())

    def _message(self, class_id: int, batch: FrameBatch) -> Iterator[Event]:
        if class_id not in self._known_classes:
            raise RemoteProtocolError(
                Reason.UNKNOWN_CLASS,
                f"a message for class {class_id} came before any Connect that names this class",
            )
        yield Published(class_id, batch)

    def _subscribe(self, class_id: int, batch: FrameBatch) -> Iterator[Event]:
        yield Subscribed(class_id)

    def _ack(self, class_id: int, batch: FrameBatch) -> Iterator[Event]:
        firsts, lasts = frames.ack_ranges(batch)
        if firsts.size:
            yield Acked(class_id, firsts, lasts)
        if firsts.size < batch.count:
            bad = batch.slice(firsts.size, firsts.size + 1)
            frames.ack_range(_content(bad))
            raise AssertionError("an ack that one parser refused was taken by the other")

    def _connect(self, class_id: int, batch: FrameBatch) -> Iterator[Event]:
        for at in range(batch.count):
            yield Connected(_class_ids(_content(batch.slice(at, at + 1))))


_HANDLERS: dict[int, Callable[[Session, int, FrameBatch], Iterator[Event]]] = {
    frames.HEARTBEAT: Session._heartbeat,
    frames.MESSAGE: Session._message,
    frames.SUBSCRIBE: Session._subscribe,
    frames.ACK: Session._ack,
    frames.CONNECT: Session._connect,
}
"""What a version 1 session accepts. It has one state, open: every frame is legal at any time."""


def _type_and_class(batch: FrameBatch) -> tuple[int, int]:
    frame_type, high, low = batch.data[:3].tolist()
    return frame_type, high << 8 | low


def _content(frame: FrameBatch) -> bytes:
    return frame.data[HEADER_BYTES:-DELIMITER_BYTES].tobytes()


def _class_ids(content: bytes) -> tuple[int, ...]:
    """The classes that a Connect names. Raises RemoteProtocolError (bad_connect)."""
    try:
        class_ids = _CLASS_IDS.decode(content)
        wrong = next((c for c in class_ids if not 0 <= c <= CLASS_ID_MAX), None)
        problem = "" if wrong is None else f"it holds {wrong}"
        if b"-" in content:
            problem = "it holds a sign"
        if len(class_ids) > CLASS_ID_MAX + 1:
            problem = f"it holds {len(class_ids)} numbers"
    except (msgspec.DecodeError, RecursionError) as error:
        problem = str(error)
    if problem:
        shown = content[:40].decode("utf-8", "backslashreplace")
        raise RemoteProtocolError(
            Reason.BAD_CONNECT,
            f"a Connect held {shown!r}, expected a JSON array of class ids from 0 to "
            f"{CLASS_ID_MAX}: {problem}",
        )
    return tuple(dict.fromkeys(class_ids))
