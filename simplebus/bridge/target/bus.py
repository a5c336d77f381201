"""A class of a bus as the far end of a lane: every message is stored there once.

Rule 1: before anything is sent, it is found out what the far bus has: by its `next`, and by the
record that the lane has left there (`progress`). What it lacks is sent under the same numbers.
Rule 2: a number is never used for another message than the one that it was announced for, or, where
that is gone, for the record again, which changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import trio

from simplebus.bridge.bus_connection import check, core_of, wired
from simplebus.bridge.channel_map import Renaming
from simplebus.bridge.checkpoint import Batch, Numbering, Record, RecordError, ranges
from simplebus.bridge.interfaces import SourceBatch, FatalConfigurationError, TargetBatch, Near, Refusal
from simplebus.bridge.loop_header import HOPS_MAX
from simplebus.bridge.source.identity import Looked
from simplebus.bridge.transform import Copies, Rewriter
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.client.aio.wakeup_event import WakeupEvent
from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
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

log = logging.getLogger("simplebus.bridge")

_RECORD_SECONDS = 10.0
_OLD_DOOR = "cluster "
"""What the identity of a door began with, when doors did not say how long they know numbers."""
_AGAIN_BYTES_MAX = 4 * 1024 * 1024
"""So much of what is sent again is under way at once."""
_BATCHES_MAX = 6
"""So many are announced or under way: the far bus has something to do while others are made."""
_MESSAGES_MAX = 24_576
_RANGES_MAX = 16_384
"""Of a batch; fewer where the far bus takes no frames that are long enough to tell them."""
_RECORD_BYTES = 512
"""What a record has beside its batches, and its frame beside it, at most;"""
_BATCH_BYTES = 192
"""and a batch beside its ranges."""
_RANGES_PART = 4
"""Those of a batch take so small a part of a record at most: it is to tell the next ones, too."""


@dataclass(frozen=True, slots=True)
class FarTerms:
    """What a lane wants of its far end."""

    name: str
    """The publisher's, but for what `of` adds."""
    channel: str
    """That of its records."""
    class_: int | str
    """The class there."""
    channels: tuple[str, ...] = ()
    """Only what one of these matches is copied; none: everything."""
    renaming: Renaming = field(default_factory=Renaming)
    hops: int = HOPS_MAX
    """How many buses a message may have come over, this lane's near one included."""
    heartbeat: float = 10.0
    path: bool = True
    """Whether a message says there where it has been."""
    auth: Auth | None = field(default=None, repr=False)
    """Who the lane is there."""

    def core(self, **more: Any) -> ClientCore:
        """A client that goes on with its numbers."""
        return core_of(self.name, heartbeat=self.heartbeat, auth=self.auth, **more)

    def of(self, source: str) -> FarTerms:
        """These, told apart from those of a bridge that is called the same and reads from another
        `source`: each has its own numbers and records."""
        tag = hashlib.blake2b(f"{source}\n{self.name}".encode(), digest_size=6).hexdigest()
        name = f"{self.name[: NAME_CHARACTERS_MAX - len(tag) - 1]} {tag}"
        return replace(self, name=name, channel=f"{self.channel}.{tag}")


class FarBus:
    """One connection, on which it is known where to go on."""

    def __init__(self, wire: Wire, class_id: int, records: Inbox, terms: FarTerms) -> None:
        self._wire = wire
        self._core = wire.core
        self.class_id = class_id
        self._records = records
        self._terms = terms
        self._channel = Envelope(channel=terms.channel)
        self.identity = wire.core.bus_id
        self.at: int | None = None
        """The sequence at which to go on; None for where the near end is."""
        self.doubts = 0
        """How many records did not count."""
        self._numbering = Numbering("", 0)
        self._rewriter: Rewriter | None = None
        self._sent: deque[tuple[Waiter, Batch | None]] = deque()
        """What is not settled; None for a record."""
        self._done = Signal()
        self._plan: list[_Announced] = []
        """What was announced and is not sent."""
        self._again_bytes = 0
        """How much was sent again, since all of it was safe."""

    async def resume(self, near: Near, record: Record | None, *, kept: int) -> list[Refusal]:
        """Send what the far bus lacks of what was announced to it. Returns what it refuses of it:
        nothing below `kept`, for with that the lane was through."""
        terms, number = self._terms, self._core.publish_buffer.stored_before_count & MESSAGE_ID_MASK
        self._rewriter = Rewriter(
            class_id=self.class_id,
            here=near.identity,
            there=self.identity,
            channels=terms.channels,
            renaming=terms.renaming,
            hops=terms.hops,
            frame_bytes_max=self._core.accepted_frame_bytes_max,
        )
        self._numbering = Numbering(near.storage_id, number)
        if record is None:
            return []
        if not record.fits(number):
            numbers = f"tells the numbers {record.first} to {record.end}"
            self._doubt(f"{numbers}, and {self.identity} goes on at {number}")
            return []
        is_same = record.source == near.storage_id
        if is_same and record.next > near.head:
            self._doubt(f"says to go on at {record.next}, and {near.identity} ends at {near.head}")
            is_same = False
        elif is_same and (other := await self._other(near, record, kept)) is not None:
            self._doubt(
                f"tells of another message {other} than {near.identity} has now: that came back "
                "from an old copy, and what was copied from there since may come again"
            )
            is_same = False
        self.at = record.next if is_same else None
        refused: dict[int, Refusal] = {}
        batches = {batch.number: batch for batch in record.batches}
        for first, parts in record.owed(number):
            if first in batches:  # What it tells may have been sent before: the last word counts.
                await self._settle_again(refused)
                for begin, end in batches[first].ranges:
                    for sequence in range(begin, end) if refused else ():
                        refused.pop(sequence, None)
            assert first == self._numbering.next, (first, self._numbering.next)
            if not parts:
                await self._fill(record, 1, refused)
            elif not is_same:  # These sequences are nobody's any more.
                await self._fill(record, sum(end - begin for begin, end in parts), refused)
            else:
                for begin, end in parts:
                    await self._send_again(near, record, begin, end, refused)
        await self._settle_again(refused)
        return [refused[sequence] for sequence in sorted(refused) if sequence >= kept]

    def _doubt(self, why: str) -> None:
        self.doubts += 1
        log.warning("%s: a record %s: it does not count", self._terms.name, why)

    async def _other(self, near: Near, record: Record, kept: int) -> int | None:
        """The sequence of a message that is not the one that the record tells of; None where all
        is as it was, or nobody knows. Below `kept` all may be gone."""
        for batch in reversed(record.batches):
            if batch.mark is not None and batch.last >= kept:
                there = await near.read_fingerprint(batch.last)
                if there is not None:
                    return None if batch.mark.may_be(there) else batch.last
        return None

    def _count(self, count: int) -> None:
        self._numbering.next = (self._numbering.next + count) & MESSAGE_ID_MASK

    async def _send_again(
        self, near: Near, record: Record, begin: int, end: int, refused: dict[int, Refusal]
    ) -> None:
        """Messages begin..end-1, each under the number that follows; what the near end has not any
        more, or would not send any more, is replaced."""
        at = begin
        while at < end:
            found = (await near.read(at)).below(end)
            made = self.make(found)
            upto = min(end, max(made.next_sequence, at + 1))
            for first, last in made.ranges:
                await self._fill(record, first - at, refused)
                run = made
                if len(made.ranges) > 1:
                    run = self.make(found.starting_at(first).below(last))
                assert run.ranges == [(first, last)], (run.ranges, first, last)
                size = self._put(run, Batch(self._numbering.next, run.ranges, last))
                self._count(last - first)
                await self._sent_again(size, refused)
                at = last
            await self._fill(record, upto - at, refused)
            at = upto

    async def _fill(self, record: Record, count: int, refused: dict[int, Refusal]) -> None:
        """Use up so many numbers: the record again changes nothing."""
        size = len(record.encode()) if count else 0
        for _ in range(count):
            self._put_record(record)
            self._count(1)
            await self._sent_again(size, refused)

    async def _sent_again(self, size: int, refused: dict[int, Refusal]) -> None:
        """So much more is under way: wait, where it is too much."""
        self._again_bytes += size
        if self._again_bytes >= _AGAIN_BYTES_MAX:
            await self._settle_again(refused)

    async def _settle_again(self, refused: dict[int, Refusal]) -> None:
        """Wait for all that was sent, and note what of it is refused."""
        self._again_bytes = 0
        for each in await self._confirmed():
            refused[each.sequence] = each

    # Sending -------------------------------------------------------------------------------------

    @property
    def must_wait(self) -> bool:
        return bool(self._plan) and not self._plan[0].waiter.is_done

    @property
    def confirmed(self) -> int:
        before = self._core.confirmed_position
        return sum(
            min(batch.count, max(0, before - waiter.first))
            for waiter, batch in self._sent
            if batch is not None
        )

    def make(self, found: SourceBatch) -> TargetBatch:
        assert self._rewriter is not None
        copies = Copies()
        for piece in found.runs:
            self._rewriter.many(piece, copies)
        sequences = copies.numbers()
        parts = ranges(sequences)
        most = self._ranges_max(found.next_sequence)
        if len(parts) > most:  # A record would be too long.
            return self.make(found.below(parts[most][0]))
        made = TargetBatch(sequences, found.next_sequence, copies, copies.left, copies.refused, ranges=parts)
        made.last_fingerprint = found.fingerprint(int(sequences[-1])) if made.count else None
        return made

    def _ranges_max(self, next: int) -> int:
        """So many ranges of sequences below `next` may a batch have."""
        space = (self._core.accepted_frame_bytes_max - _RECORD_BYTES) // _RANGES_PART
        return max(1, min(_RANGES_MAX, space // _range_bytes(next)))

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        under_way = self._numbering.under_way
        count = sum(made.count for made in planned) + sum(batch.count for batch in under_way)
        told = [(len(batch.ranges), batch.next) for batch in under_way]
        told += [(len(made.ranges), made.next_sequence) for made in planned]
        if len(told) >= _BATCHES_MAX or count >= _MESSAGES_MAX:
            return False
        next = told[-1][1] if told else 0
        told.append((self._ranges_max(next), next))  # As long as it may be.
        size = sum(_BATCH_BYTES + count * _range_bytes(next) for count, next in told)
        return _RECORD_BYTES + size <= self._core.accepted_frame_bytes_max

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        before, self._plan = self._plan, []
        wanted = [(made.ranges, made.next_sequence, made.last_fingerprint) for made in planned]
        record, batches = self._numbering.record(wanted)
        waiter = self._put_record(record)
        self._wire.writer.write_now()
        for row, (made, batch) in enumerate(zip(planned, batches, strict=True)):
            known = before[row] if row < len(before) else None
            is_known = known is not None and known.made is made and known.batch == batch
            if known is not None and is_known and not known.waiter.refusals:
                self._plan.append(known)
            else:
                self._plan.append(_Announced(made, batch, waiter))

    async def announced(self) -> list[Refusal]:
        waiter = self._plan[0].waiter
        await self._through(waiter)
        return [Refusal(-1, error.code, error.sentence) for error in waiter.refusals]

    def _put_record(self, record: Record) -> Waiter:
        position = self._core.publish(record.encode(), self._records.class_id, self._channel)
        return self._await(position, position, None)

    def send(self, made: TargetBatch) -> None:
        told = self._plan.pop(0)
        assert told.made is made, "sent before it was announced"
        self._numbering.sent(told.batch)
        self._put(made, told.batch)
        self._wire.writer.write_now()

    def _put(self, made: TargetBatch, batch: Batch) -> int:
        """Hand it over. Returns how many bytes it has."""
        copies, size = made.encoded, 0
        assert isinstance(copies, Copies)
        first = self._core.published_position
        for raw, bounds in copies.frames():
            self._core.publish_buffer.publish_frames(raw, bounds, self.class_id)
            size += len(raw)
        self._await(first, self._core.published_position - 1, batch)
        return size

    def _await(self, first: int, last: int, batch: Batch | None) -> Waiter:
        """Hear what becomes of these positions, from now on."""
        waiter = self._wire.confirms.wait_for(first, last, self._done.set)
        self._sent.append((waiter, batch))
        return waiter

    async def settle(self) -> list[Refusal]:
        refusals, is_batch = list[Refusal](), False
        while not is_batch:
            is_batch = self._sent[0][1] is not None
            refusals += await self._first_through()
        self._numbering.settled()
        records = self._records
        records.settle_previous()  # The records that have come back are of no more use.
        while not records.is_empty:
            records.pop_batch()
            records.settle_previous()
        return refusals

    async def _confirmed(self) -> list[Refusal]:
        """Wait for all that was sent."""
        self._wire.writer.write_now()
        refusals = list[Refusal]()
        while self._sent:
            refusals += await self._first_through()
        return refusals

    async def _first_through(self) -> list[Refusal]:
        """Wait for the first that was sent. A record that is refused has no sequence."""
        waiter, batch = self._sent[0]
        await self._through(waiter)
        self._sent.popleft()
        return [
            Refusal(
                -1 if batch is None else batch.sequence(position - waiter.first),
                error.code,
                error.sentence,
            )
            for position, error in zip(waiter.refused_positions, waiter.refusals, strict=True)
        ]

    async def _through(self, waiter: Waiter) -> None:
        while not waiter.is_done:
            check(self._wire)
            await self._done.wait()


def _range_bytes(next: int) -> int:
    """How much of a record a range of sequences below `next` takes."""
    return len(f"[{next},{next}],")


@dataclass(frozen=True, slots=True)
class _Announced:
    """What is to be sent."""

    made: TargetBatch
    batch: Batch
    waiter: ConfirmWaiter
    """That of the record which told it first."""


# Finding out where to go on -----------------------------------------------------------------------


@asynccontextmanager
async def far_bus(place: Place, terms: FarTerms) -> AsyncIterator[tuple[FarBus, Record | None]]:
    """A connection, and what the lane has left there. Raises BusConnectionError, RefusedError, and
    HopelessError where nothing can be left."""
    name = terms.name
    record, is_odd = None, False
    async with wired(place, terms.core()) as wire:
        bus = wire.core.bus_id
        if wire.core.publish_buffer.stored_before_count:
            record = await _last_record(wire, terms)
            is_odd = record is None
    if is_odd:  # What its numbers are is forgotten there.
        log.warning("%s has no good record of %s: what was under way may be there twice", bus, name)
        fresh = secrets.token_hex(8)
        async with wired(place, terms.core(instance=fresh)):
            pass
    core = terms.core()
    if record is not None:
        core = terms.core(unconfirmed=record.first, bus=bus)
    async with wired(place, core) as wire:
        class_id = await named_at(wire, terms.class_)
        records = await _subscribed(wire, terms, seek=False)
        if class_id == records.class_id:
            raise BusError(
                f"class {class_id} of {bus} is {BRIDGE_RECORDS_CLASS!r}, where bridges write "
                "down where they "
                "are: nothing is copied there"
            )
        yield FarBus(wire, class_id, records, terms), record


async def _last_record(wire: Wire, terms: FarTerms) -> Record | None:
    """What the lane has announced last; None where that is gone."""
    inbox = await _subscribed(wire, terms, seek=True)
    try:
        with trio.move_on_after(_RECORD_SECONDS):
            while inbox.is_empty:
                check(wire)
                await wire.changed.wait()
        if inbox.is_empty:
            await wire.answered(wire.core.sync())  # Or the line is silent, and that says nothing.
        if inbox.is_empty:
            return None
        batch = inbox.pop_batch()
        assert batch is not None
        try:
            return Record.decode(batch.payloads[-1])
        except RecordError as error:
            log.warning("%s: %s", terms.name, error)
            return None
    finally:
        wire.core.unsubscribe(inbox, is_processed=False)
        wire.closed(inbox)


async def _subscribed(wire: Wire, terms: FarTerms, *, seek: bool) -> Inbox:
    """The lane's position in the class of records; with `seek` at the last one of it."""
    core = wire.core
    try:
        await wire.wait_answered(
            core.name_classes(NamedClass(name=BRIDGE_RECORDS_CLASS, last_values=True))
        )
    except RefusedError as error:
        if error.code != Reason.BAD_REQUEST or not core.bus_id.startswith(_OLD_DOOR):
            raise
        raise FatalConfigurationError(
            f"{core.bus_id!r} is a door before a JetStream cluster of a version to which no bridge "
            "or uplink leads: upgrade it, or have it lead to the NATS servers of that cluster"
        ) from error
    class_id = core.find_class_id(BRIDGE_RECORDS_CLASS)
    assert class_id is not None
    options = SubscribeRequest(
        channels=[terms.channel],
        durable=terms.name,
        start="last_values",
        seek=seek,
        max_deliveries=0,
    )
    inbox = core.subscribe(class_id, options)
    wire.opened(inbox, WakeupEvent())
    await wire.wait_answered(inbox.subscribe_request)
    return inbox


async def named_at(wire: Wire, class_: int | str) -> int:
    """The id of a class there."""
    core = wire.core
    named = NamedClass(id=class_) if isinstance(class_, int) else NamedClass(name=class_)
    await wire.answered(core.name_classes(named))
    if isinstance(class_, int):
        return class_
    found = core.find_class_id(class_)
    assert found is not None
    return found


_SPAN_MAX = 1 << (MESSAGE_ID_BITS - 2)
"""Numbers that are under way are no further apart: else nobody could tell which one is ahead."""


class FarDoor:
    """One connection."""

    must_wait = False

    def __init__(
        self, wire: Wire, class_id: int, terms: FarTerms, near: Near, at: int, looked: Looked
    ) -> None:
        """`at` is the sequence whose number the connection has begun with."""
        self._near, self._looked = near, looked
        self.identity = wire.core.bus_id
        self.class_id = class_id
        self._wire, self._core = wire, wire.core
        self._at = at - wire.core.published_position
        """The sequence of position 0."""
        self._rewriter = Rewriter(
            class_id=class_id,
            here=near.identity,
            there=self.identity,
            channels=terms.channels,
            renaming=terms.renaming,
            hops=terms.hops,
            frame_bytes_max=wire.core.accepted_frame_bytes_max,
        )
        self._sent: deque[tuple[ConfirmWaiter, TargetBatch]] = deque()
        """What is not settled."""
        self._done = Signal()

    @property
    def confirmed(self) -> int:
        end = self._at + self._core.confirmed_position
        return sum(int(np.searchsorted(made.sequences, end)) for _, made in self._sent)

    def make(self, found: SourceBatch) -> TargetBatch:
        copies = Copies()
        for piece in found.runs:
            self._rewriter.many(piece, copies)
        made = TargetBatch(copies.numbers(), found.next_sequence, copies, copies.left, copies.refused)
        made.last_fingerprint = found.fingerprint(int(made.sequences[-1])) if made.count else None
        return made

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        count = sum(made.count for made in planned) + sum(made.count for _, made in self._sent)
        return len(planned) + len(self._sent) < _BATCHES_MAX and count < _MESSAGES_MAX

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        """Nobody there has to remember it."""

    async def announced(self) -> list[Refusal]:
        return []

    def send(self, made: TargetBatch) -> None:
        copies, core = made.encoded, self._core
        assert isinstance(copies, Copies)
        first, last = int(made.sequences[0]) - self._at, int(made.sequences[-1]) - self._at
        if first < core.published_position:
            raise BusConnectionError(
                f"what is to be sent again comes before what {self.identity} has: beginning anew"
            )
        if last - core.confirmed_position >= _SPAN_MAX:
            raise BusConnectionError(
                f"{last - core.confirmed_position} messages in a row were not copied: beginning "
                "anew"
            )
        for (raw, bounds), sequences in zip(copies.frames(), copies.sequences, strict=True):
            edges = [0, *(np.flatnonzero(np.diff(sequences) != 1) + 1).tolist(), sequences.size]
            for begin, end in pairwise(edges):
                part = memoryview(raw)[int(bounds[begin]) : int(bounds[end]) + DELIMITER_BYTES]
                core.publish_buffer.publish_frames(
                    part,
                    bounds[begin : end + 1] - bounds[begin],
                    self.class_id,
                    skipped_count=int(sequences[begin]) - self._at - core.published_position,
                )
        self._looked.note(self._near, made)
        self._sent.append((self._wire.confirms.wait_for(first, last, self._done.set), made))
        self._wire.writer.write_now()

    async def settle(self) -> list[Refusal]:
        waiter, _ = self._sent[0]
        while not waiter.is_done:
            check(self._wire)
            await self._done.wait()
        self._sent.popleft()
        return [
            Refusal(self._at + position, error.code, error.sentence)
            for position, error in zip(waiter.refused_positions, waiter.refusals, strict=True)
        ]


@asynccontextmanager
async def far_door(
    place: Place, terms: FarTerms, near: Near, at: int, looked: Looked
) -> AsyncIterator[FarDoor]:
    """A connection that goes on at this sequence. Raises BusConnectionError and RefusedError."""
    core = terms.core(first=at & MESSAGE_ID_MASK)
    async with wired(place, core) as wire:
        yield FarDoor(wire, await named_at(wire, terms.class_), terms, near, at, looked)
