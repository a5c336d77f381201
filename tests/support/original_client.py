"""Model of a client of the original program: its messages, its queues and its failures.

It does no I/O, and time is an argument. It has the known behaviour of the original client, with its
weaknesses. Where that is unknown, the model uses the behaviour that is hardest for a server, and a
comment notes this. Frames are built and read with `oracles`; nothing is imported from simplebus.

    publish ─► unserialised ─► workers ─► chunks ─► read_output
                                            ▲
                          acks: pulse ◄─ ranges ◄─ grouping ◄─ processed ids ◄─┐
                                                                               │
    receive ─► raw ─► workers ─► received ─► handlers, one message at a time ──┘

A full queue blocks the step before it: finally `publish` returns False or `can_receive` is False.
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
from tests.support.strategies import ACK, CONNECT, HEARTBEAT, MESSAGE, SUBSCRIBE

GROUPING_SECONDS = 1.0
"""Interval in which processed ids are grouped into ranges."""
PULSE_SECONDS = 0.5
"""Interval in which ranges are sent."""
FRAMES_PER_CHUNK = 100
"""Unknown for the original. Small chunks make many chunks, and their number is limited."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Capacity of each queue. Tests make them small to reach them soon."""

    unserialised: int = 1_100
    raw: int = 10_000
    received: int = 1_500
    chunks: int = 1_000
    acks: int = 2_000_000


class Message(NamedTuple):
    """Argument of a handler."""

    class_id: int
    message_id: int
    timer_index: int
    payload: bytes


Handler = Callable[[Message], float | None]
"""Returns the seconds that handling takes, or None. An exception stops the client's loop."""


class OutOfOrder(Exception):  # noqa: N818 - the name of the original's example.
    """A message was not the successor of the previous message."""


class Reservations:
    """Results in the order of their reservations, regardless of the order of completion."""

    def __init__(self) -> None:
        self._results: deque[object] = deque()
        self._reserved_count = 0
        self._popped_count = 0

    def reserve(self) -> int:
        self._results.append(None)
        self._reserved_count += 1
        return self._reserved_count - 1

    def set_result(self, index: int, result: object) -> None:
        assert result is not None
        self._results[index - self._popped_count] = result

    def pop_ready(self) -> list[object]:
        """Remove and return the results before the first missing result."""
        ready = []
        while self._results and self._results[0] is not None:
            ready.append(self._results.popleft())
        self._popped_count += len(ready)
        return ready


class StrictOrder:
    """Handler of the original's example: raises OutOfOrder unless messages arrive in sequence.

    The messages of a class come from one publisher, which made them with `numbered`.
    """

    def __init__(self, first: int = 0, *, seconds: float = 0.0) -> None:
        self.next = first
        """Number of the next expected message."""
        self._seconds = seconds

    def __call__(self, message: Message) -> float:
        number = number_of(message.payload)
        if number != self.next:
            raise OutOfOrder(f"expected {self.next} of class {message.class_id}, got {number}")
        self.next += 1
        return self._seconds


def numbered(number: int) -> bytes:
    """Return a payload with this number; it ends with CRLF as in the original's example."""
    return b"%d\r\n" % number


def number_of(payload: bytes) -> int:
    return int(payload)


class OriginalClient:
    """One client, starting with its Connect.

    `seed` determines the order in which its workers finish. `grouping_phase` and `pulse_phase` are
    the times of its first timer events, relative to its start.
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
        """None until the reply to its Connect; until then it does not publish or subscribe."""
        self.handler_error: Exception | None = None
        """Exception of a handler. It stops the loop; timers and socket continue."""
        self.processed_count = 0
        """Messages whose handlers have returned."""
        self.ack_delay_max_seconds = 0.0
        """Longest time between the end of a handler and the sending of the ack."""
        self._limits = bounds or QueueLimits()
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
        class_id_array = json.dumps(list(class_ids), separators=(",", ":"))
        self._chunks.append(build_frame(CONNECT, content=class_id_array.encode()))

    # Interface of the program --------------------------------------------------------------------

    def subscribe(self, class_id: int, handler: Handler) -> None:
        """Add a handler. Several handlers of a class share one Subscribe."""
        handlers = self._handlers.setdefault(class_id, [])
        handlers.append(handler)
        if len(handlers) == 1 and self.session_id is not None:
            self._chunks.append(build_frame(SUBSCRIBE, class_id=class_id))

    def publish(self, class_id: int, payload: bytes) -> bool:
        """Queue a message. Returns False if the original would block."""
        if self.session_id is None or len(self._unserialised) >= self._limits.unserialised:
            return False
        self._unserialised.append((class_id, payload))
        return True

    @property
    def is_idle(self) -> bool:
        """True if all queues are empty. A stopped loop's received messages do not count."""
        waiting = self._unserialised or self._chunks or self._unflushed or self._partial
        received = self._raw or self._received or self._handling
        return not (waiting or (received and self.handler_error is None))

    # The wire ------------------------------------------------------------------------------------

    @property
    def can_receive(self) -> bool:
        """True if it reads from its socket."""
        return len(self._raw) < self._limits.raw

    def receive(self, data: bytes) -> None:
        """Process bytes from the socket."""
        frames, self._partial = split_frames(self._partial + data)
        for frame in frames:
            if frame[0] == MESSAGE:
                self._raw.append(frame)
            elif frame[0] == CONNECT:
                self._handle_connect_reply(frame)
            else:
                # Any other type kills the original.
                assert frame[0] == HEARTBEAT, frame
        self._process()

    @property
    def has_output(self) -> bool:
        """True if it has bytes for its socket."""
        return bool(self._chunks)

    def read_output(self, max_bytes: int) -> bytes:
        """Remove and return the next bytes for the socket, at most `most`."""
        chunks = []
        while max_bytes and self._chunks:
            chunk = self._chunks[0][self._sent : self._sent + max_bytes]
            chunks.append(chunk)
            max_bytes -= len(chunk)
            self._sent += len(chunk)
            if self._sent == len(self._chunks[0]):
                self._chunks.popleft()
                self._sent = 0
        return b"".join(chunks)

    def _handle_connect_reply(self, frame: bytes) -> None:
        content = frame[HEADER_BYTES : -len(DELIMITER)]
        assert len(content) == 4, frame
        first = self.session_id is None
        self.session_id = int.from_bytes(content, "little")
        if first:
            self._chunks.extend(build_frame(SUBSCRIBE, class_id=c) for c in self._handlers)

    # Time ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Advance the time to `now`; everything due until then happens in order."""
        assert now >= self.now
        while True:
            # The pulse comes first: ranges that are grouped at the same time wait for the next one.
            due = min(self._pulse_at, self._group_at, self._handled_at)
            if due > now:
                break
            self.now = due
            if due == self._handled_at:
                self._finish_handling()
            elif due == self._pulse_at:
                self._pulse_at += PULSE_SECONDS
                self._flush()
            else:
                self._group_at += GROUPING_SECONDS
                self._group()
            self._process()
        self.now = now
        if self._unserialised or self._raw or self._received:
            self._process()

    def _process(self) -> None:
        """Process everything that needs no time."""
        if self._unserialised:
            capacity = FRAMES_PER_CHUNK * (self._limits.chunks - len(self._chunks))
            frames = self._run_workers(self._unserialised, self._serialise, capacity)
            for start in range(0, len(frames), FRAMES_PER_CHUNK):
                self._chunks.append(b"".join(frames[start : start + FRAMES_PER_CHUNK]))
        while self._raw:
            capacity = self._limits.received - len(self._received)
            messages = self._run_workers(self._raw, self._deserialise, capacity)
            if not messages:
                break
            self._received.extend(messages)
            self._handle()
        if self._received:
            self._handle()

    # Workers -------------------------------------------------------------------------------------

    def _run_workers(self, jobs: deque, work: Callable, max_count: int) -> list:  # type: ignore[type-arg]
        """Process up to `room` jobs with workers, which finish in any order."""
        results = Reservations()
        in_progress: list[tuple[int, object]] = []
        jobs_left = min(len(jobs), max_count)
        while jobs_left > 0 or in_progress:
            while jobs_left > 0 and len(in_progress) < self._workers:
                in_progress.append((results.reserve(), jobs.popleft()))
                jobs_left -= 1
            index, job = in_progress.pop(int(self._random.random() * len(in_progress)))
            results.set_result(index, work(job))
        return results.pop_ready()

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
        """Handle and acknowledge messages one after the other."""
        while self._received and self._handling is None and self.handler_error is None:
            if self._unflushed >= self._limits.acks:
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
                self._finish_handling()

    def _finish_handling(self) -> None:
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
        """Group the ids that were processed since the last call into ranges."""
        for key, ids in self._ids.items():
            self._ranges.setdefault(key, []).extend(group_ids(ids))
        self._ids.clear()
        self._oldest_range = min(self._oldest_range, self._oldest_id)
        self._oldest_id = math.inf

    def _flush(self) -> None:
        """Queue the acks of all ranges, after everything that waits to be sent."""
        if not self._ranges or len(self._chunks) >= self._limits.chunks:
            return
        frames = []
        for (class_id, timer_index), ranges in self._ranges.items():
            for first, last in ranges:
                # The original writes ids as signed 32-bit numbers.
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
