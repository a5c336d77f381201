"""A stand-in for a client of the original program: what it says, what it waits for, how it fails.

Rule 1: it is pure. Bytes in, bytes out, and time is an argument: hours of it pass in moments.
Rule 2: it does what the original is known to do, its weaknesses included. Where that is not known,
        it does what is hardest on a server, and the comment says so.
Rule 3: frames are built and read by oracles.py alone. Nothing here is imported from simplebus.

    publish ─► unserialised ─► workers ─► chunks ─► take
                                            ▲
                          acks: pulse ◄─ ranges ◄─ grouping ◄─ processed ids ◄─┐
                                                                               │
    receive ─► raw ─► workers ─► received ─► handlers, one message at a time ──┘

Each arrow into a full place waits, and so does what is before it: in the end `publish` says False,
or `reading` does.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tests.support.oracles import (
    DELIMITER,
    HEADER_BYTES,
    ID_COUNT,
    build_frame,
    group_ids,
    split_frames,
)
from tests.support.strategies import (
    ACK,
    CONNECT,
    HEARTBEAT,
    MESSAGE,
    SUBSCRIBE,
)

GROUPING_SECONDS = 1.0
"""Processed ids are made ranges so often."""
PULSE_SECONDS = 0.5
"""Ranges are sent so often."""
FRAMES_PER_CHUNK = 100
"""Not known. Small chunks make many, which is what the limit counts."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait in each place. A test may make them small, to reach them soon."""

    unserialised: int = 1_100
    raw: int = 10_000
    received: int = 1_500
    chunks: int = 1_000
    acks: int = 2_000_000


class Message(NamedTuple):
    """What a handler is given."""

    class_id: int
    message_id: int
    timer_index: int
    payload: bytes


Handler = Callable[[Message], float | None]
"""Returns how many seconds it takes, if it takes any. If it raises, the client is dead."""


class OutOfOrder(Exception):  # noqa: N818 - it is what the example throws, not an error of ours.
    """A message was not the one behind the last."""


class Reservations:
    """Results come out in the order in which their places were reserved, whenever they are made."""

    def __init__(self) -> None:
        self._results: deque[object] = deque()
        self._reserved = 0
        self._taken = 0

    def reserve(self) -> int:
        self._results.append(None)
        self._reserved += 1
        return self._reserved - 1

    def put(self, place: int, result: object) -> None:
        assert result is not None
        self._results[place - self._taken] = result

    def take(self) -> list[object]:
        """The results up to the first place that is still empty."""
        ready = []
        while self._results and self._results[0] is not None:
            ready.append(self._results.popleft())
        self._taken += len(ready)
        return ready


class StrictOrder:
    """The handler of the original's example: each message is the one behind the last, or it throws.

    The messages of a class are those that one publisher made with `numbered`.
    """

    def __init__(self, first: int = 0, *, seconds: float = 0.0) -> None:
        self.next = first
        """The number of the message that has to come."""
        self._seconds = seconds

    def __call__(self, message: Message) -> float:
        number = number_of(message.payload)
        if number != self.next:
            raise OutOfOrder(f"expected {self.next} of class {message.class_id}, got {number}")
        self.next += 1
        return self._seconds


def numbered(number: int) -> bytes:
    """A payload that tells its number. It ends in CR LF, as those of the original's example do."""
    return b"%d\r\n" % number


def number_of(payload: bytes) -> int:
    return int(payload)


class OriginalClient:
    """One client, from Connect on. `seed` decides in which order its workers come to an end.

    `grouping_phase` and `pulse_phase` are when its timers first fire, after its beginning.
    """

    def __init__(
        self,
        class_ids: Iterable[int],
        *,
        now: float = 0.0,
        seed: int = 0,
        workers: int = 4,
        bounds: QueueLimits | None = None,
        grouping_phase: float = GROUPING_SECONDS,
        pulse_phase: float = PULSE_SECONDS,
    ) -> None:
        self.now = now
        self.session_id: int | None = None
        """Until the reply to its Connect it publishes nothing and subscribes to nothing."""
        self.handler_error: Exception | None = None
        """What its handler threw. Its loop has ended then; its timers and its socket live on."""
        self.processed_count = 0
        """Messages whose handlers have returned."""
        self.ack_delay_max_seconds = 0.0
        """The longest time between the end of a handler and the acknowledgement being sent."""
        self._bounds = bounds or QueueLimits()
        self._random = random.Random(seed)
        self._workers = workers
        self._handlers: dict[int, list[Handler]] = {}
        # Outgoing.
        self._unserialised: deque[tuple[int, bytes]] = deque()
        self._chunks: deque[bytes] = deque()
        self._sent = 0
        # Incoming.
        self._partial = b""
        self._raw: deque[bytes] = deque()
        self._received: deque[Message] = deque()
        self._handling: Message | None = None
        self._handled_at = math.inf
        # Acknowledgements.
        self._ids: dict[tuple[int, int], list[int]] = {}
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._unflushed = 0
        self._oldest_id = self._oldest_range = math.inf
        self._group_at = now + grouping_phase
        self._pulse_at = now + pulse_phase
        array = json.dumps(list(class_ids), separators=(",", ":"))
        self._chunks.append(build_frame(CONNECT, content=array.encode()))

    # What the program around it does -------------------------------------------------------------

    def subscribe(self, class_id: int, handler: Handler) -> None:
        """Any number of handlers; one Subscribe."""
        handlers = self._handlers.setdefault(class_id, [])
        handlers.append(handler)
        if len(handlers) == 1 and self.session_id is not None:
            self._chunks.append(build_frame(SUBSCRIBE, class_id=class_id))

    def publish(self, class_id: int, payload: bytes) -> bool:
        """False: it would wait now."""
        if self.session_id is None or len(self._unserialised) >= self._bounds.unserialised:
            return False
        self._unserialised.append((class_id, payload))
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits in it. What a dead one has received does not count."""
        waiting = self._unserialised or self._chunks or self._unflushed or self._partial
        received = self._raw or self._received or self._handling
        return not (waiting or (received and self.handler_error is None))

    # The wire ------------------------------------------------------------------------------------

    @property
    def can_receive(self) -> bool:
        """Whether it takes bytes from its socket."""
        return len(self._raw) < self._bounds.raw

    def receive(self, data: bytes) -> None:
        """Bytes have come."""
        frames, self._partial = split_frames(self._partial + data)
        for frame in frames:
            if frame[0] == MESSAGE:
                self._raw.append(frame)
            elif frame[0] == CONNECT:
                self._greeted(frame)
            else:
                # Another type kills the original. Of those that it knows, a server sends this one.
                assert frame[0] == HEARTBEAT, frame
        self._turn()

    @property
    def has_output(self) -> bool:
        """Whether it has bytes for its socket."""
        return bool(self._chunks)

    def read_output(self, most: int) -> bytes:
        """The next bytes for the socket, up to so many."""
        taken = []
        while most and self._chunks:
            piece = self._chunks[0][self._sent : self._sent + most]
            taken.append(piece)
            most -= len(piece)
            self._sent += len(piece)
            if self._sent == len(self._chunks[0]):
                self._chunks.popleft()
                self._sent = 0
        return b"".join(taken)

    def _greeted(self, frame: bytes) -> None:
        content = frame[HEADER_BYTES : -len(DELIMITER)]
        assert len(content) == 4, frame
        first = self.session_id is None
        self.session_id = int.from_bytes(content, "little")
        if first:
            self._chunks.extend(build_frame(SUBSCRIBE, class_id=c) for c in self._handlers)

    # Time ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """It is so late now. Everything that was due until then happens, in its order."""
        assert now >= self.now
        while True:
            # The pulse before the grouping: what is grouped at that moment waits for the next one.
            due = min(self._pulse_at, self._group_at, self._handled_at)
            if due > now:
                break
            self.now = due
            if due == self._handled_at:
                self._handled()
            elif due == self._pulse_at:
                self._pulse_at += PULSE_SECONDS
                self._flush()
            else:
                self._group_at += GROUPING_SECONDS
                self._group()
            self._turn()
        self.now = now
        if self._unserialised or self._raw or self._received:
            self._turn()

    def _turn(self) -> None:
        """Everything goes as far as it can without time passing."""
        if self._unserialised:
            room = FRAMES_PER_CHUNK * (self._bounds.chunks - len(self._chunks))
            frames = self._work(self._unserialised, self._serialise, room)
            for at in range(0, len(frames), FRAMES_PER_CHUNK):
                self._chunks.append(b"".join(frames[at : at + FRAMES_PER_CHUNK]))
        while self._raw:
            room = self._bounds.received - len(self._received)
            messages = self._work(self._raw, self._deserialise, room)
            if not messages:
                break
            self._received.extend(messages)
            self._handle()
        if self._received:
            self._handle()

    # Workers -------------------------------------------------------------------------------------

    def _work(self, jobs: deque, work: Callable, room: int) -> list:  # type: ignore[type-arg]
        """What workers make of so many of the jobs, which they finish in any order."""
        results = Reservations()
        hands: list[tuple[int, object]] = []
        left = min(len(jobs), room)
        while left > 0 or hands:
            while left > 0 and len(hands) < self._workers:
                hands.append((results.reserve(), jobs.popleft()))
                left -= 1
            place, job = hands.pop(int(self._random.random() * len(hands)))
            results.put(place, work(job))
        return results.take()

    @staticmethod
    def _serialise(job: tuple[int, bytes]) -> bytes:
        class_id, payload = job
        return build_frame(MESSAGE, class_id=class_id, content=payload)

    @staticmethod
    def _deserialise(frame: bytes) -> Message:
        return Message(
            int.from_bytes(frame[1:3], "big"),
            int.from_bytes(frame[3:7], "big", signed=True),
            int.from_bytes(frame[7:9], "big"),
            frame[HEADER_BYTES : -len(DELIMITER)],
        )

    # Handlers ------------------------------------------------------------------------------------

    def _handle(self) -> None:
        """The client's loop: handle a message, acknowledge it, and again."""
        while self._received and self._handling is None and self.handler_error is None:
            if self._unflushed >= self._bounds.acks:
                return
            message = self._received.popleft()
            try:
                seconds = sum(handle(message) or 0.0 for handle in self._handlers[message.class_id])
            except Exception as error:
                self.handler_error = error
                return
            self._handling = message
            self._handled_at = self.now + seconds
            if not seconds:
                self._handled()

    def _handled(self) -> None:
        message = self._handling
        assert message is not None
        self._handling, self._handled_at = None, math.inf
        self.processed_count += 1
        key = (message.class_id, message.timer_index)
        self._ids.setdefault(key, []).append(message.message_id)
        self._unflushed += 1
        self._oldest_id = min(self._oldest_id, self.now)

    # Acknowledgements ----------------------------------------------------------------------------

    def _group(self) -> None:
        """Make ranges of the ids that came since the last time."""
        for key, ids in self._ids.items():
            self._ranges.setdefault(key, []).extend(group_ids(ids))
        self._ids.clear()
        self._oldest_range = min(self._oldest_range, self._oldest_id)
        self._oldest_id = math.inf

    def _flush(self) -> None:
        """Send the ranges, behind everything that waits to be sent."""
        if not self._ranges or len(self._chunks) >= self._bounds.chunks:
            return
        frames = []
        for (class_id, timer_index), ranges in self._ranges.items():
            for first, last in ranges:
                # It counts in 32 bits with a sign.
                end = last if last < ID_COUNT else last - 2 * ID_COUNT
                content = b"%d-%d" % (first, end)
                frames.append(
                    build_frame(ACK, class_id=class_id, timer_index=timer_index, content=content)
                )
                self._unflushed -= last - first
        self._ranges.clear()
        self._chunks.append(b"".join(frames))
        self.ack_delay_max_seconds = max(self.ack_delay_max_seconds, self.now - self._oldest_range)
        self._oldest_range = math.inf
