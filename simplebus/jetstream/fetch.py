"""What lies in the stream of a class: looked at, and purged (trio).

Rule 1: to look changes nothing: it takes a consumer of its own, which acknowledges nothing and is
gone behind it.
Rule 2: a message's sequence is that of the stream, less 1.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import datetime
from itertools import pairwise

import numpy as np
import trio

from simplebus.core.clock import BrokerClock
from simplebus.core.errors import BusConnectionError, Reason, RemoteProtocolError
from simplebus.core.limits import FETCH_BYTES_MAX
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
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

LOOK_MESSAGES_MAX = 4096
STRIKE_MESSAGES_MAX = 10_000
"""So many are purged behind others that stay: each is a request."""
PATIENCE_SECONDS = 10.0
_TRIES = 4
_PAUSE_SECONDS = 0.05
_REST_SECONDS = 0.25

Tell = Callable[[], None]


class Stored:
    """Of one door."""

    def __init__(self, link: NatsConnection, options: JetStreamOptions) -> None:
        self._link = link
        self._options = options

    async def look(self, class_id: int, wish: FetchRequest, frame_bytes: int) -> RemoteFetchResult:
        """Messages in a row from where on `wish` says. Raises BusConnectionError and
        JetStreamError."""
        for _ in range(_TRIES):
            floor, head, now = await self._ends(class_id)
            first = max(wish.first, floor) if wish.time is None else floor
            if first >= head:
                break
            found = await self._read(class_id, wish, first, frame_bytes)
            if found is not None:
                at, batches, times = found
                return RemoteFetchResult(at, batches, times, floor, head, now)
            await trio.sleep(_PAUSE_SECONDS)  # A server may be a little behind the others.
        return RemoteFetchResult(head, [], [], floor, head, now)

    async def _ends(self, class_id: int) -> tuple[int, int, float]:
        """The lowest sequence, the next one, and what time it is by the clock of who stores them:
        seconds since 1970."""
        info = await self._link.api_request(f"STREAM.INFO.{self._options.names.stream_name(class_id)}")
        state = info.get("state", {})
        head = int(state.get("last_seq", 0))
        now = datetime.fromisoformat(info["ts"]).timestamp()
        return min(max(0, int(state.get("first_seq", 1)) - 1), head), head, now

    async def ask_time(
        self, cls: RemoteClass, clock: BrokerClock, read_clock: Callable[[], object], tell: Tell
    ) -> None:
        """Have the class know what time it is by its stream's clock. `read_clock` sets the door's
        `clock`; `tell` is called when the class knows it, or is to ask again."""
        read_clock()
        asked_at, info = clock.now, None
        try:
            info = await self._link.api_request(
                f"STREAM.INFO.{self._options.names.stream_name(cls.class_id)}"
            )
        except (BusConnectionError, JetStreamError):
            await trio.sleep(_REST_SECONDS)
        read_clock()
        cls.clock.heard(asked_at, clock.now, info)
        cls.touched(cls)
        tell()

    async def _read(
        self, class_id: int, wish: FetchRequest, first: int, frame_bytes: int
    ) -> tuple[int, list[FrameBatch], list[float]] | None:
        """What a consumer for once sends: the first of them, frames, times; None for nothing."""
        stream, name = self._options.names.stream_name(class_id), f"look-{secrets.token_hex(6)}"
        start: Start = Start(sequence=first) if wish.time is None else Start(time=wish.time)
        config = api.reader_config(name, api.start_config(start))
        body = {"stream_name": stream, "config": config, "action": "create"}
        await self._link.api_request(f"CONSUMER.CREATE.{stream}.{name}", body)
        batch = min(wish.count, LOOK_MESSAGES_MAX)
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
        at, batches, times = -1, list[FrameBatch](), list[float]()
        for messages in found:
            for some, sequences, stored_at in _rows(messages):
                made, good = _framed(class_id, some, frame_bytes)
                index = -1
                for row in range(some.count):
                    index += bool(good[row])
                    sequence = int(sequences[row]) - 1
                    if not good[row]:  # What can be no message of the bus is passed over.
                        if at < 0:
                            continue
                        return at, batches, times
                    if at < 0:
                        at = sequence
                    elif sequence != at + len(times):
                        return at, batches, times
                    batches.append(made.slice(index, index + 1))
                    times.append(float(stored_at[row]) / 1e9)
        return (at, batches, times) if at >= 0 else None

    async def strike(self, class_id: int, first: int, last: int | None) -> tuple[int, int, int]:
        """Have messages first..last-1 removed, those that are there. Returns how many these were,
        and which. Raises RemoteProtocolError (bad_request) for too many behind others that stay,
        BusConnectionError and JetStreamError."""
        floor, head, _ = await self._ends(class_id)
        first, last = max(first, floor), head if last is None else min(last, head)
        if first >= last:
            return 0, first, first
        stream = self._options.names.stream_name(class_id)
        if first == floor:
            said = await self._link.api_request(f"STREAM.PURGE.{stream}", {"seq": last + 1})
            return int(said.get("purged", 0)), first, last
        if last - first > STRIKE_MESSAGES_MAX:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                f"{last - first} messages of class {class_id} are to be purged behind others that "
                f"stay: before a JetStream cluster these may be {STRIKE_MESSAGES_MAX} at once",
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


async def found_of(
    stored: Stored,
    cls: RemoteClass,
    find: Callable[[StoredMessages], Awaitable[RemoteFetchOutcome | RemotePurgeOutcome]],
    wait_stored: Callable[[RemoteClass], Awaitable[None]],
) -> RemoteFetchOutcome | RemotePurgeOutcome:
    """What `find` finds in a class's stream when all is there that was accepted and has room; or
    why it finds nothing."""
    try:
        with trio.fail_after(PATIENCE_SECONDS):
            await wait_stored(cls)
        return await find(stored)
    except RemoteProtocolError as error:
        return error
    except (BusConnectionError, JetStreamError) as error:
        why = f"the cluster does not answer: {error}"
    except trio.TooSlowError:
        why = f"the cluster has not stored all that was accepted within {PATIENCE_SECONDS:g} s"
    except Exception:
        log.exception("class %d: what was asked of its stream went wrong", cls.class_id)
        why = "a fault of the door's own: its log says which"
    return RemoteProtocolError(Reason.BAD_REQUEST, why)


def _rows(messages: ReceivedMessages) -> list[tuple[ReceivedMessages, np.ndarray, np.ndarray]]:
    """Runs of messages that are alike, with sequences and times."""
    told = jetstream_codec.parse_deliveries(messages)
    kinds = codec.are_envelopes(messages)
    edges = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), messages.count]
    return [
        (messages.pick(slice(a, b)), told.sequences[a:b], told.times[a:b])
        for a, b in pairwise(edges)
        if a < b
    ]


def _framed(
    class_id: int, messages: ReceivedMessages, frame_bytes: int
) -> tuple[FrameBatch, np.ndarray]:
    """Messages that are alike as frames, and which of them can be any."""
    is_envelope = bool(codec.are_envelopes(messages)[0])
    batch, good = codec.framed(class_id, messages, is_envelope=is_envelope)
    fits = batch.lengths <= frame_bytes
    if is_envelope:
        fits &= [
            bool(envelope_batch.scan_envelopes(batch.slice(r, r + 1)).count)
            for r in range(batch.count)
        ]
    if not fits.all():
        good[np.flatnonzero(good)[~fits]] = False
        batch = batch.select(np.flatnonzero(fits)) if fits.any() else batch.slice(0, 0)
    return batch, good
