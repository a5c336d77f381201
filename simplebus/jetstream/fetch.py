"""Reads and purges stored messages of streams.

Reading uses a temporary consumer without acks, so it changes nothing. A message's sequence on the
bus is its stream sequence minus 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from datetime import datetime
from itertools import pairwise

import numpy as np
import trio

from simplebus.core.clock import BrokerClock
from simplebus.core.errors import BusConnectionError, Reason, RemoteProtocolError
from simplebus.core.limits import FETCH_BYTES_MAX, STORED_HEADERS_MAX
from simplebus.core.message_class.remote_storage import (
    RemoteFetchOutcome,
    RemoteFetchResult,
    RemotePurgeOutcome,
)
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import FetchRequest, Start
from simplebus.jetstream import api
from simplebus.jetstream.publish import codec
from simplebus.jetstream.remote_class import RemoteClass, StoredMessages
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

FETCH_LIMIT_MESSAGES = 4096
PURGE_LIMIT_MESSAGES = 10_000
"""Largest purge behind messages that stay, where each message is deleted by its own request."""
STORE_WAIT_SECONDS = 10.0
_TRIES = 4
_RETRY_SECONDS = 0.05
_TIME_QUERY_RETRY_SECONDS = 0.25


class StreamReader:
    """Access to the stored messages of all classes."""

    def __init__(self, link: NatsConnection, options: JetStreamOptions) -> None:
        self._link = link
        self._options = options

    async def fetch(
        self, class_id: int, request: FetchRequest, frame_bytes: int
    ) -> RemoteFetchResult:
        """Return consecutive messages that match `request`.

        Raises:
            BusConnectionError, JetStreamError: A request failed.
        """
        for _ in range(_TRIES):
            floor, head, now = await self._sequence_range(class_id)
            first = max(request.first, floor) if request.time is None else floor
            if first >= head:
                break
            found = await self._read(class_id, request, first, frame_bytes)
            if found is not None:
                first_sequence, batches, times = found
                return RemoteFetchResult(first_sequence, batches, times, floor, head, now)
            await trio.sleep(_RETRY_SECONDS)  # A replica may lag behind the leader.
        return RemoteFetchResult(head, [], [], floor, head, now)

    async def _sequence_range(self, class_id: int) -> tuple[int, int, float]:
        """Return the first sequence, the next sequence, and the server's time in seconds since
        1970.
        """
        info = await self._link.api_request(
            f"STREAM.INFO.{self._options.names.stream_name(class_id)}"
        )
        state = info.get("state", {})
        head = int(state.get("last_seq", 0))
        now = datetime.fromisoformat(info["ts"]).timestamp()
        return min(max(0, int(state.get("first_seq", 1)) - 1), head), head, now

    async def query_time(
        self,
        cls: RemoteClass,
        clock: BrokerClock,
        read_clock: Callable[[], object],
        on_answered: Callable[[], None],
    ) -> None:
        """Ask the stream of a class for its time and update the class's clock.

        Args:
            clock: The server's clock, which `read_clock` updates.
            on_answered: Called after the update, or when the query should be repeated.
        """
        read_clock()
        asked_at, info = clock.now, None
        try:
            info = await self._link.api_request(
                f"STREAM.INFO.{self._options.names.stream_name(cls.class_id)}"
            )
        except (BusConnectionError, JetStreamError):
            await trio.sleep(_TIME_QUERY_RETRY_SECONDS)
        read_clock()
        cls.clock.finish_query(asked_at, clock.now, info)
        cls.on_positions_changed(cls)
        on_answered()

    async def _read(
        self, class_id: int, request: FetchRequest, first: int, frame_bytes: int
    ) -> tuple[int, list[FrameBatch], list[float]] | None:
        """Read consecutive messages with a temporary consumer.

        Returns:
            The first sequence, the frames and their storage times; None if nothing was read.
        """
        stream, name = self._options.names.stream_name(class_id), f"look-{secrets.token_hex(6)}"
        start: Start = Start(sequence=first) if request.time is None else Start(time=request.time)
        config = api.reader_config(name, api.start_config(start))
        body = {"stream_name": stream, "config": config, "action": "create"}
        await self._link.api_request(f"CONSUMER.CREATE.{stream}.{name}", body)
        batch = min(request.count, FETCH_LIMIT_MESSAGES)
        most_bytes = FETCH_BYTES_MAX + self._link.payload_bytes_max  # Any message fits.
        try:
            found = await self._link.request_many(
                f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{stream}.{name}",
                jetstream_codec.pull_request(batch=batch, max_bytes=most_bytes),
                max_messages=batch,
            )
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                await self._link.api_request(f"CONSUMER.DELETE.{stream}.{name}")
        first_sequence, batches, times = -1, list[FrameBatch](), list[float]()
        for messages in found:
            for run, sequences, stored_at in _uniform_runs(messages):
                frames, good = _decode_uniform_run(class_id, run, frame_bytes)
                index = -1
                for row in range(run.count):
                    index += bool(good[row])
                    sequence = int(sequences[row]) - 1
                    if not good[row]:  # Not a valid message of the bus.
                        if first_sequence < 0:
                            continue
                        return first_sequence, batches, times
                    if first_sequence < 0:
                        first_sequence = sequence
                    elif sequence != first_sequence + len(times):
                        return first_sequence, batches, times
                    batches.append(frames.slice(index, index + 1))
                    times.append(float(stored_at[row]) / 1e9)
        return (first_sequence, batches, times) if first_sequence >= 0 else None

    async def purge(self, class_id: int, first: int, last: int | None) -> tuple[int, int, int]:
        """Remove the messages first..last-1.

        Returns:
            How many messages were removed, and the range.

        Raises:
            RemoteProtocolError: (bad_request) too many messages behind messages that stay.
            BusConnectionError, JetStreamError: A request failed.
        """
        floor, head, _ = await self._sequence_range(class_id)
        first, last = max(first, floor), head if last is None else min(last, head)
        if first >= last:
            return 0, first, first
        stream = self._options.names.stream_name(class_id)
        if first == floor:
            reply = await self._link.api_request(f"STREAM.PURGE.{stream}", {"seq": last + 1})
            return int(reply.get("purged", 0)), first, last
        if last - first > PURGE_LIMIT_MESSAGES:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"cannot purge {last - first} messages of class {class_id} behind messages that "
                f"stay: a JetStream cluster allows {PURGE_LIMIT_MESSAGES} per request",
            )
        count = 0
        for sequence in range(first, last):
            try:
                body = {"seq": sequence + 1, "no_erase": True}
                await self._link.api_request(f"STREAM.MSG.DELETE.{stream}", body)
                count += 1
            except JetStreamError as error:
                if error.code not in api.MESSAGE_NOT_FOUND:
                    raise
        return count, first, last


async def query_when_stored(
    reader: StoredMessages,
    cls: RemoteClass,
    query: Callable[[StoredMessages], Awaitable[RemoteFetchOutcome | RemotePurgeOutcome]],
    wait_stored: Callable[[RemoteClass], Awaitable[None]],
) -> RemoteFetchOutcome | RemotePurgeOutcome:
    """Run `query` after all accepted messages of the class are stored.

    Returns:
        The result of the query, or the error that the client receives.
    """
    try:
        with trio.fail_after(STORE_WAIT_SECONDS):
            await wait_stored(cls)
        return await query(reader)
    except RemoteProtocolError as error:
        return error
    except (BusConnectionError, JetStreamError) as error:
        problem = f"the cluster does not answer: {error}"
    except trio.TooSlowError:
        problem = f"the cluster did not store all accepted messages within {STORE_WAIT_SECONDS:g} s"
    except Exception:
        log.exception(
            "stream_query.failed",
            "class {class_name}: unexpected error in a request to its stream",
            class_name=cls.label,
        )
        problem = "internal error of the server; see its log"
    return RemoteProtocolError(Reason.BAD_REQUEST, problem)


def _uniform_runs(
    messages: ReceivedMessages,
) -> list[tuple[ReceivedMessages, np.ndarray, np.ndarray]]:
    """Split messages into runs with or without envelopes; return sequences and times, too."""
    deliveries = jetstream_codec.parse_deliveries(messages)
    kinds = codec.are_envelopes(messages)
    edges = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), messages.count]
    return [
        (messages.pick(slice(a, b)), deliveries.sequences[a:b], deliveries.times[a:b])
        for a, b in pairwise(edges)
        if a < b
    ]


def _decode_uniform_run(
    class_id: int, messages: ReceivedMessages, frame_bytes: int
) -> tuple[FrameBatch, np.ndarray]:
    """Decode a run as frames. Returns the frames and the flags of the messages that are valid."""
    is_envelope = bool(codec.are_envelopes(messages)[0])
    batch, good = codec.decode_frames(class_id, messages, is_envelope=is_envelope)
    fits = batch.lengths <= frame_bytes
    if is_envelope:
        fits &= [
            bool(
                envelope_batch.scan_envelopes(
                    batch.slice(r, r + 1), headers_max=STORED_HEADERS_MAX
                ).count
            )
            for r in range(batch.count)
        ]
    if not fits.all():
        good[np.flatnonzero(good)[~fits]] = False
        batch = batch.select(np.flatnonzero(fits)) if fits.any() else batch.slice(0, 0)
    return batch, good
