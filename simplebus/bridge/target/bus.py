"""Target for a class of a bus or of a stateless server. Every message is stored once.

A bus stores the bridge record of the copier (see `checkpoint`). A new connection compares the
record with the bus's `next` number, and first sends the messages that the bus lacks, under the same
numbers. A number is never used for another message than the announced one. If that message no
longer exists, the record is sent again in its place, which changes nothing.

A stateless server stores no records. There the number of a message is derived from its sequence,
and the cluster drops duplicates.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import trio

from simplebus.bridge.bus_connection import check_connected, connect, create_client_core
from simplebus.bridge.channel_map import ChannelMap
from simplebus.bridge.checkpoint import (
    AnnouncedBatch,
    BridgeRecord,
    BridgeRecordError,
    TargetNumbering,
    ranges,
)
from simplebus.bridge.interfaces import (
    FatalConfigurationError,
    MessageSource,
    Refusal,
    SourceBatch,
    TargetBatch,
)
from simplebus.bridge.loop_header import HOPS_MAX
from simplebus.bridge.source.identity import SourceIdentity
from simplebus.bridge.transform import FrameRewriter, RewrittenFrames
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.client.event_loop.wakeup_event import WakeupEvent
from simplebus.client.pending_confirms import ConfirmWaiter
from simplebus.core.errors import BusConnectionError, BusError, Reason, RefusedError
from simplebus.core.limits import (
    DELIMITER_BYTES,
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    NAME_CHARACTERS_MAX,
)
from simplebus.core.message_class.last_values import BRIDGE_RECORDS_CLASS
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.requests import Auth, NamedClass, SubscribeRequest
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.bridge")

_RECORD_SECONDS = 10.0
_OLD_STATELESS_SERVER_PREFIX = "cluster "
"""Start of the identity of old stateless servers, which did not announce their duplicate window."""
_RESEND_BYTES_MAX = 4 * 1024 * 1024
"""Bytes in flight while messages are sent again."""
_BATCHES_MAX = 6
"""Batches announced or in flight. The bus has work while the next ones are prepared."""
_MESSAGES_MAX = 24_576
_RANGES_MAX = 16_384
"""Ranges per batch; fewer if the target's frame limit is small."""
_RECORD_BYTES = 512
"""Largest size of a record and its frame without the batches."""
_BATCH_BYTES = 192
"""Largest size of a batch without its ranges."""
_RECORD_FRACTION = 4
"""The ranges of a batch take at most this fraction of a record, which announces later batches, too.
"""


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Settings of a copier for its target."""

    name: str
    """Name of the publisher, without the tag that `for_source` adds."""
    record_channel: str
    """Channel of the bridge records."""
    class_: int | str
    """Class at the target."""
    channels: tuple[str, ...] = ()
    """Patterns of the channels to copy; empty for all."""
    channel_map: ChannelMap = field(default_factory=ChannelMap)
    hops_max: int = HOPS_MAX
    """Largest number of buses on the path of a message, the source included."""
    heartbeat_seconds: float = 10.0
    has_path: bool = True
    """True if copied messages get the `bridge-path` header."""
    auth: Auth | None = field(default=None, repr=False)
    """Credentials for the target."""

    def create_client_core(self, **options: Any) -> ClientCore:
        """Create a client that continues the copier's numbering."""
        return create_client_core(
            self.name, heartbeat=self.heartbeat_seconds, auth=self.auth, **options
        )

    def for_source(self, source: str) -> TargetSettings:
        """Return settings with a tag for `source` in the names.

        Bridges with the same name and different sources need separate numbers and records.
        """
        tag = hashlib.blake2b(f"{source}\n{self.name}".encode(), digest_size=6).hexdigest()
        name = f"{self.name[: NAME_CHARACTERS_MAX - len(tag) - 1]} {tag}"
        return replace(self, name=name, record_channel=f"{self.record_channel}.{tag}")


class BusTarget:
    """A class of a bus, over one connection."""

    def __init__(
        self, connection: ClientConnection, class_id: int, records: Inbox, settings: TargetSettings
    ) -> None:
        self._connection = connection
        self._core = connection.core
        self.class_id = class_id
        self._record_inbox = records
        self._settings = settings
        self._channel = Envelope(channel=settings.record_channel)
        self.identity = connection.core.bus_id
        self.resume_sequence: int | None = None
        """Source sequence at which to continue; None to continue at the source's own position."""
        self.discarded_records = 0
        """Number of discarded records: 0 or 1."""
        self._numbering = TargetNumbering("", 0)
        self._rewriter: FrameRewriter | None = None
        self._sent: deque[tuple[ConfirmWaiter, AnnouncedBatch | None]] = deque()
        """Confirms that are awaited, with their batch; None for a record."""
        self._result_received = WakeupEvent()
        self._announced: list[_Announcement] = []
        """Announced batches that are not sent yet."""
        self._resent_bytes = 0
        """Bytes sent again since everything was confirmed."""

    async def resume(
        self, source: MessageSource, record: BridgeRecord | None, *, committed: int
    ) -> list[Refusal]:
        """Send the announced messages that the bus lacks.

        Args:
            source: Opened source.
            record: Last bridge record of the copier, or None.
            committed: Position of the copier at the source. Messages below it are settled.

        Returns:
            Refusals of messages from `committed` on.
        """
        settings, number = (
            self._settings,
            self._core.publish_buffer.stored_before_count & MESSAGE_ID_MASK,
        )
        self._rewriter = FrameRewriter(
            class_id=self.class_id,
            source=source.identity,
            targets=self.identity,
            channels=settings.channels,
            channel_map=settings.channel_map,
            hops_max=settings.hops_max,
            frame_bytes_max=self._core.accepted_frame_bytes_max,
        )
        self._numbering = TargetNumbering(source.storage_id, number)
        if record is None:
            return []
        if not record.matches_next_number(number):
            numbers = f"has the numbers {record.first_number} to {record.end_number}"
            self._discard_record(f"{numbers}, but {self.identity} expects {number}")
            return []
        is_same_source = record.source == source.storage_id
        if is_same_source and record.next > source.head:
            self._discard_record(
                f"has the position {record.next}, but {source.identity} ends at {source.head}"
            )
            is_same_source = False
        elif (
            is_same_source
            and (changed_sequence := await self._find_changed_message(source, record, committed))
            is not None
        ):
            self._discard_record(
                f"has another message {changed_sequence} than {source.identity}, which was "
                "restored from an old copy; messages copied since then may be copied again"
            )
            is_same_source = False
        self.resume_sequence = record.next if is_same_source else None
        refused: dict[int, Refusal] = {}
        batches = {batch.number: batch for batch in record.batches}
        for first, parts in record.iter_missing(number):
            if first in batches:  # The batch may have been sent before: the last result counts.
                await self._settle_resent(refused)
                for begin, end in batches[first].ranges:
                    for sequence in range(begin, end) if refused else ():
                        refused.pop(sequence, None)
            assert first == self._numbering.next_number, (first, self._numbering.next_number)
            if not parts:
                await self._use_up_numbers(record, 1, refused)
            elif not is_same_source:  # The sequences belong to other messages now.
                await self._use_up_numbers(
                    record, sum(end - begin for begin, end in parts), refused
                )
            else:
                for begin, end in parts:
                    await self._resend_range(source, record, begin, end, refused)
        await self._settle_resent(refused)
        return [refused[sequence] for sequence in sorted(refused) if sequence >= committed]

    def _discard_record(self, reason: str) -> None:
        self.discarded_records += 1
        log.warning(
            "bridge_record.discarded",
            "{copier}: discarded a bridge record: it {reason}",
            copier=self._settings.name,
            reason=reason,
        )

    async def _find_changed_message(
        self, source: MessageSource, record: BridgeRecord, committed: int
    ) -> int | None:
        """Return the sequence of a message that differs from the record, or None if all are equal.

        Messages below `committed` may have been removed, so they are not compared.
        """
        for batch in reversed(record.batches):
            if batch.fingerprint is not None and batch.last_sequence >= committed:
                current = await source.read_fingerprint(batch.last_sequence)
                if current is not None:
                    return None if batch.fingerprint.may_match(current) else batch.last_sequence
        return None

    def _skip_numbers(self, count: int) -> None:
        self._numbering.next_number = (self._numbering.next_number + count) & MESSAGE_ID_MASK

    async def _resend_range(
        self,
        source: MessageSource,
        record: BridgeRecord,
        begin: int,
        end: int,
        refused: dict[int, Refusal],
    ) -> None:
        """Send the messages from `begin` to `end - 1` under their announced numbers.

        Numbers of messages that the source no longer has, or that are no longer to be copied,
        are used up.
        """
        next_sequence = begin
        while next_sequence < end:
            batch = (await source.read(next_sequence)).below(end)
            prepared = self.prepare(batch)
            next_begin = min(end, max(prepared.next_sequence, next_sequence + 1))
            for first, last in prepared.ranges:
                await self._use_up_numbers(record, first - next_sequence, refused)
                run = prepared
                if len(prepared.ranges) > 1:
                    run = self.prepare(batch.starting_at(first).below(last))
                assert run.ranges == [(first, last)], (run.ranges, first, last)
                size = self._publish_batch(
                    run, AnnouncedBatch(self._numbering.next_number, run.ranges, last)
                )
                self._skip_numbers(last - first)
                await self._count_resent(size, refused)
                next_sequence = last
            await self._use_up_numbers(record, next_begin - next_sequence, refused)
            next_sequence = next_begin

    async def _use_up_numbers(
        self, record: BridgeRecord, count: int, refused: dict[int, Refusal]
    ) -> None:
        """Use up `count` numbers by sending the record again, which changes nothing."""
        size = len(record.encode()) if count else 0
        for _ in range(count):
            self._publish_record(record)
            self._skip_numbers(1)
            await self._count_resent(size, refused)

    async def _count_resent(self, size: int, refused: dict[int, Refusal]) -> None:
        """Add to the bytes in flight, and wait if these are too many."""
        self._resent_bytes += size
        if self._resent_bytes >= _RESEND_BYTES_MAX:
            await self._settle_resent(refused)

    async def _settle_resent(self, refused: dict[int, Refusal]) -> None:
        """Wait for everything that was sent, and collect the refusals."""
        self._resent_bytes = 0
        for refusal in await self._settle_all():
            refused[refusal.sequence] = refusal

    # Sending -------------------------------------------------------------------------------------

    @property
    def must_wait_for_announcement(self) -> bool:
        return bool(self._announced) and not self._announced[0].waiter.is_done

    @property
    def confirmed_count(self) -> int:
        before = self._core.confirmed_position
        return sum(
            min(batch.count, max(0, before - waiter.first))
            for waiter, batch in self._sent
            if batch is not None
        )

    def prepare(self, batch: SourceBatch) -> TargetBatch:
        assert self._rewriter is not None
        frames = RewrittenFrames()
        for run in batch.runs:
            self._rewriter.rewrite_run(run, frames)
        sequences = frames.all_sequences()
        parts = ranges(sequences)
        limit = self._ranges_max(batch.next_sequence)
        if len(parts) > limit:  # A record would be too long.
            return self.prepare(batch.below(parts[limit][0]))
        prepared = TargetBatch(
            sequences,
            batch.next_sequence,
            frames,
            frames.skipped_counts,
            frames.rejected,
            ranges=parts,
        )
        prepared.last_fingerprint = (
            batch.fingerprint(int(sequences[-1])) if prepared.count else None
        )
        return prepared

    def _ranges_max(self, next: int) -> int:
        """Return how many ranges of sequences below `next` a batch may have."""
        space = (self._core.accepted_frame_bytes_max - _RECORD_BYTES) // _RECORD_FRACTION
        return max(1, min(_RANGES_MAX, space // _range_bytes(next)))

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        in_flight = self._numbering.in_flight
        count = sum(prepared.count for prepared in planned)
        count += sum(batch.count for batch in in_flight)
        sizes = [(len(batch.ranges), batch.next) for batch in in_flight]
        sizes += [(len(prepared.ranges), prepared.next_sequence) for prepared in planned]
        if len(sizes) >= _BATCHES_MAX or count >= _MESSAGES_MAX:
            return False
        next = sizes[-1][1] if sizes else 0
        sizes.append((self._ranges_max(next), next))  # The longest possible batch.
        size = sum(_BATCH_BYTES + count * _range_bytes(next) for count, next in sizes)
        return _RECORD_BYTES + size <= self._core.accepted_frame_bytes_max

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        before, self._announced = self._announced, []
        planned_batches = [
            (prepared.ranges, prepared.next_sequence, prepared.last_fingerprint)
            for prepared in planned
        ]
        record, batches = self._numbering.create_record(planned_batches)
        waiter = self._publish_record(record)
        self._connection.writer.write_now()
        for row, (prepared, batch) in enumerate(zip(planned, batches, strict=True)):
            earlier = before[row] if row < len(before) else None
            is_announced = (
                earlier is not None and earlier.prepared is prepared and earlier.batch == batch
            )
            if earlier is not None and is_announced and not earlier.waiter.refusals:
                self._announced.append(earlier)
            else:
                self._announced.append(_Announcement(prepared, batch, waiter))

    async def wait_announced(self) -> list[Refusal]:
        waiter = self._announced[0].waiter
        await self._wait_done(waiter)
        return [Refusal(-1, error.code, error.sentence) for error in waiter.refusals]

    def _publish_record(self, record: BridgeRecord) -> ConfirmWaiter:
        position = self._core.publish(record.encode(), self._record_inbox.class_id, self._channel)
        return self._wait_for_confirm(position, position, None)

    def send(self, prepared: TargetBatch) -> None:
        announcement = self._announced.pop(0)
        assert announcement.prepared is prepared, "sent before it was announced"
        self._numbering.note_sent(announcement.batch)
        self._publish_batch(prepared, announcement.batch)
        self._connection.writer.write_now()

    def _publish_batch(self, prepared: TargetBatch, batch: AnnouncedBatch) -> int:
        """Publish a batch. Returns its size in bytes."""
        frames, size = prepared.encoded, 0
        assert isinstance(frames, RewrittenFrames)
        first = self._core.published_position
        for raw, bounds in frames.frames():
            self._core.publish_buffer.publish_frames(raw, bounds, self.class_id)
            size += len(raw)
        self._wait_for_confirm(first, self._core.published_position - 1, batch)
        return size

    def _wait_for_confirm(
        self, first: int, last: int, batch: AnnouncedBatch | None
    ) -> ConfirmWaiter:
        """Register for the confirm of some positions."""
        waiter = self._connection.confirms.add_waiter(first, last, self._result_received.set)
        self._sent.append((waiter, batch))
        return waiter

    async def settle_oldest(self) -> list[Refusal]:
        refusals, is_batch = list[Refusal](), False
        while not is_batch:
            is_batch = self._sent[0][1] is not None
            refusals += await self._settle_first()
        self._numbering.note_settled()
        records = self._record_inbox
        records.settle_previous()  # Own records are received again, and are not needed.
        while not records.is_empty:
            records.pop_batch()
            records.settle_previous()
        return refusals

    async def _settle_all(self) -> list[Refusal]:
        """Wait for everything that was sent."""
        self._connection.writer.write_now()
        refusals = list[Refusal]()
        while self._sent:
            refusals += await self._settle_first()
        return refusals

    async def _settle_first(self) -> list[Refusal]:
        """Wait for the first confirm. The refusal of a record has no sequence."""
        waiter, batch = self._sent[0]
        await self._wait_done(waiter)
        self._sent.popleft()
        return [
            Refusal(
                -1 if batch is None else batch.sequence_at(position - waiter.first),
                error.code,
                error.sentence,
            )
            for position, error in zip(waiter.refused_positions, waiter.refusals, strict=True)
        ]

    async def _wait_done(self, waiter: ConfirmWaiter) -> None:
        while not waiter.is_done:
            check_connected(self._connection)
            await self._result_received.wait()


def _range_bytes(next: int) -> int:
    """Return the size of an encoded range of sequences below `next`."""
    return len(f"[{next},{next}],")


@dataclass(frozen=True, slots=True)
class _Announcement:
    """A batch that was announced, and is to be sent."""

    prepared: TargetBatch
    batch: AnnouncedBatch
    waiter: ConfirmWaiter
    """Confirm of the first record that announced the batch."""


# Opening ------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_bus_target(
    endpoint: Endpoint, settings: TargetSettings
) -> AsyncIterator[tuple[BusTarget, BridgeRecord | None]]:
    """Connect to a bus, and return the target with the last bridge record.

    Raises:
        BusConnectionError: The bus cannot be reached.
        RefusedError: The bus refused a request.
        FatalConfigurationError: The bus cannot store records.
    """
    name = settings.name
    record, is_record_missing = None, False
    async with connect(endpoint, settings.create_client_core()) as connection:
        bus = connection.core.bus_id
        if connection.core.publish_buffer.stored_before_count:
            record = await _read_last_record(connection, settings)
            is_record_missing = record is None
    if is_record_missing:  # The target cannot assign the copier's numbers to sequences.
        log.warning(
            "bridge_record.missing",
            "{target} has no valid bridge record of {copier}: messages in flight may be "
            "stored twice",
            target=bus,
            copier=name,
        )
        new_instance = secrets.token_hex(8)
        async with connect(endpoint, settings.create_client_core(instance=new_instance)):
            pass
    core = settings.create_client_core()
    if record is not None:
        core = settings.create_client_core(first_unconfirmed=record.first_number, bus_id=bus)
    async with connect(endpoint, core) as connection:
        class_id = await open_class(connection, settings.class_)
        records = await _subscribe_records(connection, settings, seek=False)
        if class_id == records.class_id:
            raise BusError(
                f"class {class_id} of {bus} is {BRIDGE_RECORDS_CLASS!r}: it holds the "
                "records of bridges, and nothing can be copied to it"
            )
        yield BusTarget(connection, class_id, records, settings), record


async def _read_last_record(
    connection: ClientConnection, settings: TargetSettings
) -> BridgeRecord | None:
    """Return the last bridge record, or None if the target has no record."""
    inbox = await _subscribe_records(connection, settings, seek=True)
    try:
        with trio.move_on_after(_RECORD_SECONDS):
            while inbox.is_empty:
                check_connected(connection)
                await connection.changed.wait()
        if inbox.is_empty:
            # Without it, a silent connection would look like no record.
            await connection.wait_answered(connection.core.sync())
        if inbox.is_empty:
            return None
        batch = inbox.pop_batch()
        assert batch is not None
        try:
            return BridgeRecord.decode(batch.payloads[-1])
        except BridgeRecordError as error:
            log.warning(
                "bridge_record.invalid", "{copier}: {error}", copier=settings.name, error=error
            )
            return None
    finally:
        connection.core.unsubscribe(inbox, is_processed=False)
        connection.remove_inbox(inbox)


async def _subscribe_records(
    connection: ClientConnection, settings: TargetSettings, *, seek: bool
) -> Inbox:
    """Subscribe to the copier's records; with `seek`, from the last one on."""
    core = connection.core
    try:
        await connection.wait_answered(
            core.name_classes(NamedClass(name=BRIDGE_RECORDS_CLASS, last_values=True))
        )
    except RefusedError as error:
        if error.code != Reason.BAD_REQUEST or not core.bus_id.startswith(
            _OLD_STATELESS_SERVER_PREFIX
        ):
            raise
        raise FatalConfigurationError(
            f"{core.bus_id!r} is a stateless server of a version that bridges and uplinks do not "
            "support: upgrade it, or copy to the NATS servers of its cluster"
        ) from error
    class_id = core.find_class_id(BRIDGE_RECORDS_CLASS)
    assert class_id is not None
    options = SubscribeRequest(
        channels=[settings.record_channel],
        durable=settings.name,
        start="last_values",
        seek=seek,
        max_deliveries=0,
    )
    inbox = core.subscribe(class_id, options)
    connection.add_inbox(inbox, WakeupEvent().set)
    await connection.wait_answered(inbox.subscribe_request)
    return inbox


async def open_class(connection: ClientConnection, class_: int | str) -> int:
    """Return the id of a class, after creating the class if it does not exist."""
    core = connection.core
    named_class = NamedClass(id=class_) if isinstance(class_, int) else NamedClass(name=class_)
    await connection.wait_answered(core.name_classes(named_class))
    if isinstance(class_, int):
        return class_
    class_id = core.find_class_id(class_)
    assert class_id is not None
    return class_id


_NUMBER_SPAN_MAX = 1 << (MESSAGE_ID_BITS - 2)
"""Largest distance of message numbers in flight. Numbers wrap, so larger distances are ambiguous.
"""


class StatelessServerTarget:
    """A class of a stateless server, over one connection."""

    must_wait_for_announcement = False

    def __init__(
        self,
        connection: ClientConnection,
        class_id: int,
        settings: TargetSettings,
        source: MessageSource,
        start_sequence: int,
        source_identity: SourceIdentity,
    ) -> None:
        """Create the target. The first number of the connection belongs to `start_sequence`."""
        self._source, self._source_identity = source, source_identity
        self.identity = connection.core.bus_id
        self.class_id = class_id
        self._connection, self._core = connection, connection.core
        self._first_sequence = start_sequence - connection.core.published_position
        """Source sequence that corresponds to publish position 0."""
        self._rewriter = FrameRewriter(
            class_id=class_id,
            source=source.identity,
            targets=self.identity,
            channels=settings.channels,
            channel_map=settings.channel_map,
            hops_max=settings.hops_max,
            frame_bytes_max=connection.core.accepted_frame_bytes_max,
        )
        self._sent: deque[tuple[ConfirmWaiter, TargetBatch]] = deque()
        """Batches that are not settled."""
        self._result_received = WakeupEvent()

    @property
    def confirmed_count(self) -> int:
        end = self._first_sequence + self._core.confirmed_position
        return sum(int(np.searchsorted(prepared.sequences, end)) for _, prepared in self._sent)

    def prepare(self, batch: SourceBatch) -> TargetBatch:
        frames = RewrittenFrames()
        for run in batch.runs:
            self._rewriter.rewrite_run(run, frames)
        prepared = TargetBatch(
            frames.all_sequences(),
            batch.next_sequence,
            frames,
            frames.skipped_counts,
            frames.rejected,
        )
        prepared.last_fingerprint = (
            batch.fingerprint(int(prepared.sequences[-1])) if prepared.count else None
        )
        return prepared

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        count = sum(prepared.count for prepared in planned) + sum(
            prepared.count for _, prepared in self._sent
        )
        return len(planned) + len(self._sent) < _BATCHES_MAX and count < _MESSAGES_MAX

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        """Do nothing: a stateless server stores no bridge records."""

    async def wait_announced(self) -> list[Refusal]:
        return []

    def send(self, prepared: TargetBatch) -> None:
        frames, core = prepared.encoded, self._core
        assert isinstance(frames, RewrittenFrames)
        first, last = (
            int(prepared.sequences[0]) - self._first_sequence,
            int(prepared.sequences[-1]) - self._first_sequence,
        )
        if first < core.published_position:
            raise BusConnectionError(
                f"messages to resend are older than the messages of {self.identity}: reconnecting"
            )
        if last - core.confirmed_position >= _NUMBER_SPAN_MAX:
            raise BusConnectionError(
                f"a message is {last - core.confirmed_position} sequences after the last confirmed "
                f"one; expected fewer than {_NUMBER_SPAN_MAX}: reconnecting"
            )
        for (raw, bounds), sequences in zip(frames.frames(), frames.sequences, strict=True):
            edges = [0, *(np.flatnonzero(np.diff(sequences) != 1) + 1).tolist(), sequences.size]
            for begin, end in pairwise(edges):
                part = memoryview(raw)[int(bounds[begin]) : int(bounds[end]) + DELIMITER_BYTES]
                core.publish_buffer.publish_frames(
                    part,
                    bounds[begin : end + 1] - bounds[begin],
                    self.class_id,
                    skipped_count=int(sequences[begin])
                    - self._first_sequence
                    - core.published_position,
                )
        self._source_identity.note_sent(self._source, prepared)
        self._sent.append(
            (self._connection.confirms.add_waiter(first, last, self._result_received.set), prepared)
        )
        self._connection.writer.write_now()

    async def settle_oldest(self) -> list[Refusal]:
        waiter, _ = self._sent[0]
        while not waiter.is_done:
            check_connected(self._connection)
            await self._result_received.wait()
        self._sent.popleft()
        return [
            Refusal(self._first_sequence + position, error.code, error.sentence)
            for position, error in zip(waiter.refused_positions, waiter.refusals, strict=True)
        ]


@asynccontextmanager
async def open_stateless_server_target(
    endpoint: Endpoint,
    settings: TargetSettings,
    source: MessageSource,
    start_sequence: int,
    source_identity: SourceIdentity,
) -> AsyncIterator[StatelessServerTarget]:
    """Connect to a stateless server, and continue at `start_sequence`.

    Raises BusConnectionError and RefusedError.
    """
    core = settings.create_client_core(first_number=start_sequence & MESSAGE_ID_MASK)
    async with connect(endpoint, core) as connection:
        yield StatelessServerTarget(
            connection,
            await open_class(connection, settings.class_),
            settings,
            source,
            start_sequence,
            source_identity,
        )
