"""Source for a class of a bus.

Messages are fetched by sequence, so each arrives once and in order. The bus returns only
messages that are as durable as it promises, so a crash cannot take back a copied message. The
bus keeps uncopied messages because of a durable subscription with one message in flight, which
also signals new messages. Ages of messages are measured by the clock of the bus alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import trio

from simplebus.bridge.bus_connection import check_connected, connect, create_client_core
from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.dead_letters import BridgeDeadLetters
from simplebus.bridge.interfaces import Refusal, SourceBatch
from simplebus.bridge.source.lag import OpenSource
from simplebus.bridge.transform import MessageRun
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.event_loop.wakeup_event import WakeupEvent
from simplebus.core.errors import Reason, RefusedError
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_MESSAGES_MAX
from simplebus.core.protocol.envelope_reader import Seconds
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import (
    Auth,
    FetchReply,
    FetchRequest,
    NamedClass,
    Start,
    SubscribeReply,
    SubscribeRequest,
)

_COMMIT_SECONDS = 0.1
"""Interval of commits while the copier is busy."""
_DURABLE_POLL_SECONDS = 0.001, 0.05
"""First and longest delay between checks if a delivered message is durable."""
_ACK_TIMEOUT_SECONDS = 86_400.0
_REPLIES_PER_READ_MAX = 3
"""Replies that one read combines. Each read has a fixed cost."""
_PREFETCH_MAX = 2 * _REPLIES_PER_READ_MAX
_PREFETCH_BYTES = FETCH_BYTES_MAX * 3 // 4
"""Expected size of a prefetched reply. The estimate holds until messages become a third longer."""


@runtime_checkable
class InProcessBus(Protocol):
    """A bus in this process, whose messages can be read without a request."""

    def fetch_from_memory(
        self, class_id: int, request: FetchRequest
    ) -> tuple[FetchReply, list[FrameBatch]] | None:
        """Return the reply to a Fetch, valid until the next await; None if it takes longer."""


@dataclass(slots=True)
class _FetchInFlight:
    """A fetch that was sent."""

    request: OpenRequest
    first: int
    end: int
    """Sequence at which the reply is expected to end. It ends earlier if it would be too long."""
    replied_at: float = 0.0
    """Time of the reply, by the event loop's clock."""

    def set_replied(self) -> None:
        self.replied_at = trio.current_time()


class BusSource:
    """A class of a bus, over one connection. Call `open` first."""

    def __init__(
        self,
        connection: ClientConnection,
        *,
        class_: int | str,
        durable: str,
        channels: tuple[str, ...] = (),
        start: str = "waiting",
        endpoint: Endpoint | None = None,
    ) -> None:
        """Create the source.

        Args:
            connection: Connection to the bus.
            class_: Class to read.
            durable: Name of the durable subscription.
            channels: Patterns of the channels to copy; empty for all.
            start: Start position of a durable that does not exist.
            endpoint: Endpoint of the connection. A bus in this process is read without requests.
        """
        self._connection = connection
        self._core = connection.core
        self._class = class_
        self._durable = durable
        self._channels = list(channels)
        self._start = start
        self._in_process_bus = endpoint if isinstance(endpoint, InProcessBus) else None
        self.class_id = -1
        self.head = 0
        """Highest head that the bus has reported."""
        self.identity = self.storage_id = connection.core.bus_id
        self._inbox: Inbox | None = None
        self._arrived = WakeupEvent()
        self._committed = 0
        """Position of the durable."""
        self._committed_at = -_COMMIT_SECONDS
        self._pending_fetches: deque[_FetchInFlight] = deque()
        """Fetches that were sent in advance, in reading order."""
        self._prefetch_limit = _PREFETCH_MAX
        """Number of fetches to send in advance. Their starts are estimates."""

    async def open(self) -> int:
        """Subscribe to the durable, and return its position.

        Raises RefusedError while another client is connected to it.
        """
        if isinstance(self._class, int):
            self.class_id = self._class
        else:
            await self._connection.wait_answered(
                self._core.name_classes(NamedClass(name=self._class))
            )
            class_id = self._core.find_class_id(self._class)
            assert class_id is not None
            self.class_id = class_id
        try:
            reply = await self._subscribe(self._start)
        except RefusedError as error:
            if error.code != Reason.SUBSCRIPTION_MISMATCH:
                raise
            raise RefusedError(
                error.code,
                f"{error.sentence}: to copy other channels, give the bridge another name, or "
                "forget that durable first",
            ) from error
        self._committed = reply.floor
        fetch = self._core.fetch(self.class_id, self._committed, 1, create_class=False)
        fetch_reply = (await self._connection.wait_answered(fetch)).reply
        assert isinstance(fetch_reply, FetchReply)
        self.head = fetch_reply.head
        return self._committed

    async def _subscribe(self, start: str | Start, *, seek: bool = False) -> SubscribeReply:
        options = SubscribeRequest(
            channels=self._channels,
            durable=self._durable,
            start=start,
            seek=seek,
            max_in_flight=1,
            max_deliveries=0,
            ack_seconds=_ACK_TIMEOUT_SECONDS,
        )
        inbox = self._inbox = self._core.subscribe(self.class_id, options, auto_ack=False)
        self._connection.add_inbox(inbox, self._arrived.set)
        await self._connection.wait_answered(inbox.subscribe_request)
        reply = inbox.subscribe_request.reply
        assert isinstance(reply, SubscribeReply)
        return reply

    # Reading -------------------------------------------------------------------------------------

    async def read(self, sequence: int) -> SourceBatch:
        if (
            self._in_process_bus is not None
            and (batch := await self._read_in_place(self._in_process_bus, sequence)) is not None
        ):
            return batch
        if self._pending_fetches and self._pending_fetches[0].first != sequence:
            self._pending_fetches.clear()
        if not self._pending_fetches:
            self._send_fetch(sequence, FETCH_MESSAGES_MAX)
        replies = [await self._wait_reply(self._pending_fetches.popleft())]
        while len(replies) < _REPLIES_PER_READ_MAX and self._is_next_ready(replies[-1]):
            replies.append(await self._wait_reply(self._pending_fetches.popleft()))
        fetch, reply = replies[-1]
        self._prefetch(fetch, reply)
        now = reply.now + trio.current_time() - fetch.replied_at
        runs: list[MessageRun] = []
        missed, next = 0, sequence
        for fetch, reply in replies:
            ages = _message_ages(reply, now)
            for message_batch in fetch.request.batches:
                runs += _runs_without_purged(message_batch, reply, ages)
            missed += self._count_missed(next, reply)
            next = max(next, reply.next)
            self.head = max(self.head, reply.head)  # The reply may be older than the last head.
        return SourceBatch(runs, sequence, next, self.head, missed, now)

    async def _wait_reply(self, fetch: _FetchInFlight) -> tuple[_FetchInFlight, FetchReply]:
        reply = (await self._connection.wait_answered(fetch.request)).reply
        assert isinstance(reply, FetchReply)
        return fetch, reply

    def _is_next_ready(self, reply: tuple[_FetchInFlight, FetchReply]) -> bool:
        """Return True if the next reply has arrived: few large batches cost less than many small
        ones.
        """
        return (
            bool(self._pending_fetches)
            and self._pending_fetches[0].request.reply is not None
            and self._pending_fetches[0].first == reply[1].next
        )

    async def _read_in_place(
        self, in_process_bus: InProcessBus, sequence: int
    ) -> SourceBatch | None:
        """Read from a bus in this process. Returns None if the messages are not in memory."""
        await trio.lowlevel.checkpoint()
        check_connected(self._connection)
        result = in_process_bus.fetch_from_memory(
            self.class_id, FetchRequest(first=sequence, times=True)
        )
        if result is None:
            return None
        reply, batches = result
        ages = _message_ages(reply, reply.now)
        runs, first = [], reply.first
        for batch in batches:
            for run in _split_by_type(batch, first, ages[first - reply.first :]):
                runs += _exclude_purged(run, reply.purged)
            first += batch.count
        missed = self._count_missed(sequence, reply)
        return SourceBatch(runs, sequence, max(sequence, reply.next), reply.head, missed, reply.now)

    def _count_missed(self, sequence: int, reply: FetchReply) -> int:
        """Return how many messages were dropped before the copier read them.

        With channel patterns the answer is 0: the dropped messages may have been on other
        channels, and the bus counts its dropped messages itself.
        """
        return 0 if self._channels else max(0, reply.first - sequence)

    async def read_fingerprint(self, sequence: int) -> MessageFingerprint | None:
        fetch = self._core.fetch(self.class_id, sequence, 1, with_times=True, create_class=False)
        reply = (await self._connection.wait_answered(fetch)).reply
        assert isinstance(reply, FetchReply)
        ages = _message_ages(reply, reply.now)
        runs = [
            part for batch in fetch.batches for part in _runs_without_purged(batch, reply, ages)
        ]
        return SourceBatch(runs, sequence, reply.next, reply.head, read_at=reply.now).fingerprint(
            sequence
        )

    async def measure_backlog(self, sequence: int) -> tuple[int, float]:
        """Count unread messages, including those on channels that are not copied."""
        fetch = self._core.fetch(self.class_id, sequence, 1, with_times=True, create_class=False)
        reply = (await self._connection.wait_answered(fetch)).reply
        assert isinstance(reply, FetchReply)
        self.head = max(self.head, reply.head)
        ages = _message_ages(reply, reply.now)
        return max(0, reply.head - max(sequence, reply.first)), float(ages[0]) if ages.size else 0.0

    def _prefetch(self, fetch: _FetchInFlight, reply: FetchReply) -> None:
        """Send fetches for the messages after this reply."""
        is_estimate_wrong = self._pending_fetches and self._pending_fetches[0].first != reply.next
        if is_estimate_wrong:  # An estimated start was wrong.
            self._pending_fetches.clear()
            self._prefetch_limit = 1
        sequence = self._pending_fetches[-1].end if self._pending_fetches else reply.next
        size = sum(batch.size for batch in fetch.request.batches)
        count = reply.next - reply.first
        expected_count = min(count * _PREFETCH_BYTES // max(1, size) + 1, FETCH_MESSAGES_MAX)
        while (
            len(self._pending_fetches) < self._prefetch_limit
            and fetch.first < sequence < reply.head
        ):
            self._send_fetch(
                sequence, expected_count if self._prefetch_limit > 1 else FETCH_MESSAGES_MAX
            )
            sequence += expected_count
        self._prefetch_limit = min(_PREFETCH_MAX, self._prefetch_limit + 1)
        self._connection.writer.write_now()

    def _send_fetch(self, sequence: int, count: int) -> None:
        request = self._core.fetch(
            self.class_id, sequence, count, with_times=True, create_class=False
        )
        fetch = _FetchInFlight(request, sequence, sequence + count)
        self._pending_fetches.append(fetch)
        self._connection.pending_requests.append((request, fetch.set_replied))

    async def wait_for_message(self, sequence: int) -> int:
        await self.commit_position(sequence, now=True)
        inbox = self._inbox
        assert inbox is not None
        while inbox.is_empty:
            check_connected(self._connection)
            await self._arrived.wait()
        batch = inbox.pop_batch()
        assert batch is not None
        # Delayed messages may be stored before it.
        first = max(sequence, int(batch.sequences[0]))
        delay, delay_max = _DURABLE_POLL_SECONDS
        while True:
            fetch = self._core.fetch(self.class_id, first, 1, create_class=False)
            reply = (await self._connection.wait_answered(fetch)).reply
            assert isinstance(reply, FetchReply)
            if reply.head > first:
                return sequence
            await trio.sleep(delay)
            delay = min(2 * delay, delay_max)

    # Positions -----------------------------------------------------------------------------------

    async def commit_position(self, sequence: int, *, now: bool) -> None:
        time = trio.current_time()
        if sequence == self._committed and not self._has_delivered():
            return
        if not now and time - self._committed_at < _COMMIT_SECONDS:
            return
        inbox = self._inbox
        assert inbox is not None
        unsubscribe_request = self._core.unsubscribe(inbox, is_processed=False)
        self._committed, self._committed_at = sequence, time
        # Both requests are sent together: a bus that shuts down does not wait for a client
        # without a subscription.
        await self._subscribe(Start(sequence=sequence), seek=True)
        self._connection.remove_inbox(inbox)
        await self._connection.wait_answered(unsubscribe_request)

    def _has_delivered(self) -> bool:
        """Return True if the durable has a message in flight, and so would not deliver another."""
        return self._inbox is None or self._inbox.has_unsettled

    async def dead_letter(self, refusals: Sequence[Refusal]) -> int:
        letters = BridgeDeadLetters(self._connection, self._class, self._durable)
        await letters.open()
        remaining = sorted(refusals, key=lambda each: each.sequence)
        missing_count = len(remaining)
        while remaining:
            sequence = remaining[0].sequence
            span = remaining[-1].sequence + 1 - sequence
            fetch = self._core.fetch(
                self.class_id,
                sequence,
                min(span, FETCH_MESSAGES_MAX),
                with_times=True,
                create_class=False,
            )
            reply = (await self._connection.wait_answered(fetch)).reply
            assert isinstance(reply, FetchReply)
            ages = _message_ages(reply, reply.now)
            runs = [
                part for batch in fetch.batches for part in _runs_without_purged(batch, reply, ages)
            ]
            runs_by_sequence = {
                sequence: run.slice(row, row + 1)
                for run in runs
                for row, sequence in enumerate(run.sequences.tolist())
            }
            read_to = max(reply.next, sequence + 1)
            while remaining and remaining[0].sequence < read_to:
                refusal = remaining.pop(0)
                if (run := runs_by_sequence.get(refusal.sequence)) is not None:
                    accepted = reply.now - float(np.max(run.ages))
                    letters.add(bytes(run.raw), refusal, accepted=accepted, now=reply.now)
                    missing_count -= 1
        await letters.wait_stored()  # Raises if there is no space; then the copier reconnects.
        return missing_count

    def count_lost_on_close(self, sequence: int) -> int:
        return 0


def bus_source_opener(
    endpoint: Endpoint,
    create: Callable[[ClientConnection], BusSource],
    *,
    heartbeat: float,
    auth: Auth | None,
) -> OpenSource:
    """Return a function that opens the source alone, so that the bus keeps the messages to copy."""

    @asynccontextmanager
    async def open() -> AsyncIterator[tuple[BusSource, int]]:
        async with connect(
            endpoint, create_client_core(None, heartbeat=heartbeat, auth=auth)
        ) as connection:
            source = create(connection)
            yield source, await source.open()

    return open


def _message_ages(reply: FetchReply, now: float) -> Seconds:
    """Return the age at `now` of each message from `first` to `next - 1`."""
    if not reply.times:
        return np.zeros(reply.next - reply.first)
    steps = np.array([max(step, reply.first) for step, _ in reply.times] + [reply.next])
    seconds = np.array([accepted_at for _, accepted_at in reply.times])
    ages: Seconds = now - np.repeat(seconds, np.diff(steps))
    return ages


def _runs_without_purged(batch: Batch, reply: FetchReply, ages: Seconds) -> list[MessageRun]:
    """Return the messages of a batch that were not purged."""
    if isinstance(batch.sequences, range):
        first, end = batch.sequences.start, batch.sequences.stop
        sequences = np.arange(first, end)
        batch_ages = ages[first - reply.first : end - reply.first]
    else:
        sequences = batch.sequences
        batch_ages = ages[sequences - reply.first]
    return _exclude_purged(
        MessageRun(batch.data, batch.bounds, sequences, batch_ages, batch.stride), reply.purged
    )


def _split_by_type(batch: FrameBatch, first: int, ages: Seconds) -> list[MessageRun]:
    """Return copies of the frames from sequence `first` on, as runs of one frame type."""
    raw = batch.data.tobytes()
    whole = MessageRun(
        raw, batch.bounds, np.arange(first, first + batch.count), ages[: batch.count]
    )
    types = np.frombuffer(raw, np.uint8)[batch.starts]
    edges = [0, *(np.flatnonzero(types[1:] != types[:-1]) + 1).tolist(), batch.count]
    return [whole.slice(a, b) for a, b in pairwise(edges)] if len(edges) > 2 else [whole]


def _exclude_purged(run: MessageRun, purged: Sequence[tuple[int, int]]) -> list[MessageRun]:
    """Return the messages outside of the purged ranges."""
    if not purged:
        return [run]
    parts, row, first = [], 0, int(run.sequences[0])
    for begin, end in purged:
        begin, end = max(0, begin - first), min(run.count, end - first)
        if begin < end:
            parts.append((row, begin))
            row = end
    parts.append((row, run.count))
    return [run.slice(a, b) for a, b in parts if a < b]
