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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import trio

from simplebus.bridge.channels import Renaming
from simplebus.bridge.ends import Found, Made, Near, Refusal
from simplebus.bridge.origin import HOPS_MAX
from simplebus.bridge.progress import Batch, Numbering, Record, RecordError
from simplebus.bridge.rewriting import Copies, Rewriter
from simplebus.bridge.wires import check, core_of, wired
from simplebus.client.confirms import Waiter
from simplebus.client.link import Place
from simplebus.client.signal import Signal
from simplebus.client.wire import Wire
from simplebus.core.client.core import ClientCore
from simplebus.core.client.inbox import Inbox
from simplebus.core.envelope import Envelope
from simplebus.core.limits import MESSAGE_ID_MASK, NAME_CHARACTERS_MAX
from simplebus.core.requests import NamedClass, SubscribeRequest

log = logging.getLogger("simplebus.bridge")

RECORDS = "bridges"
"""The class of records."""
_RECORD_SECONDS = 10.0


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
        self._numbering = Numbering("", 0)
        self._rewriter: Rewriter | None = None
        self._sent: list[tuple[Waiter, Batch | None]] = []
        """What is not settled; None for a record."""
        self._done = Signal()
        self._next: Batch | None = None
        """What was announced and is not sent."""

    async def resume(self, near: Near, record: Record | None, *, kept: int) -> list[Refusal]:
        """Send what the far bus lacks of what was announced to it. Returns what it refuses of it:
        nothing below `kept`, for with that the lane was through."""
        terms, number = self._terms, self._core.publisher.stored_before & MESSAGE_ID_MASK
        self._rewriter = Rewriter(
            class_id=self.class_id,
            here=near.identity,
            there=self.identity,
            channels=terms.channels,
            renaming=terms.renaming,
            hops=terms.hops,
            frame_bytes_max=self._core.frame_bytes,
        )
        self._numbering = Numbering(near.memory, number)
        if record is None:
            return []
        is_same = record.source == near.memory
        if is_same and record.next > near.head:
            log.warning(
                "%s: a record says to go on at %d, and %s ends at %d: it does not count",
                terms.name,
                record.next,
                near.identity,
                near.head,
            )
            is_same = False
        self.at = record.next if is_same else None
        refused: dict[int, Refusal] = {}
        last = record.batches[-1]
        for first, ranges in record.owed(number):
            if first == last.number:  # What it tells was sent again: the last word counts.
                for each in await self._confirmed():
                    refused[each.sequence] = each
                for begin, end in last.ranges:
                    for sequence in range(begin, end):
                        refused.pop(sequence, None)
            assert first == self._numbering.next, (first, self._numbering.next)
            if not is_same:  # These sequences are nobody's any more.
                for _ in range(max(1, sum(end - begin for begin, end in ranges))):
                    self._put_record(record)
                    self._count(1)
                continue
            if not ranges:
                self._put_record(record)
                self._count(1)
            for begin, end in ranges:
                await self._send_again(near, record, begin, end)
        for each in await self._confirmed():
            refused[each.sequence] = each
        return [refused[sequence] for sequence in sorted(refused) if sequence >= kept]

    def _count(self, count: int) -> None:
        self._numbering.next = (self._numbering.next + count) & MESSAGE_ID_MASK

    async def _send_again(self, near: Near, record: Record, begin: int, end: int) -> None:
        """Messages begin..end-1, each under the number that follows."""
        at = begin
        while at < end:
            made = self.make((await near.find(at)).until(end))
            known = set(made.sequences.tolist())
            upto = min(end, max(made.next, at + 1))
            if known == set(range(at, upto)):
                self._put(made, Batch(self._numbering.next, [(at, upto)], upto))
                self._count(upto - at)
            else:
                for sequence in range(at, upto):
                    await self._send_one_again(near, record, sequence)
            at = upto

    async def _send_one_again(self, near: Near, record: Record, sequence: int) -> None:
        made = self.make((await near.find(sequence)).until(sequence + 1))
        if made.count == 1 and int(made.sequences[0]) == sequence:
            batch = Batch(self._numbering.next, [(sequence, sequence + 1)], sequence + 1)
            self._put(made, batch)
        else:
            self._put_record(record)
        self._count(1)

    # Sending -------------------------------------------------------------------------------------

    def make(self, found: Found) -> Made:
        assert self._rewriter is not None
        copies = Copies()
        for piece in found.pieces:
            self._rewriter.many(piece, copies)
        return Made(copies.numbers(), found.next, copies, copies.left, copies.refused)

    def announce(self, made: Made) -> None:
        record, self._next = self._numbering.record(made.sequences, made.next)
        self._put_record(record)
        self._wire.writer.push()

    def _put_record(self, record: Record) -> None:
        position = self._core.publish(record.encode(), self._records.class_id, self._channel)
        self._await(position, position, None)

    def send(self, made: Made) -> None:
        batch, self._next = self._next, None
        assert batch is not None, "sent before it was announced"
        self._numbering.sent(batch)
        self._put(made, batch)
        self._wire.writer.push()

    def _put(self, made: Made, batch: Batch) -> None:
        copies = made.body
        assert isinstance(copies, Copies)
        first = self._core.published
        for raw, bounds in copies.frames():
            self._core.publisher.publish_frames(raw, bounds, self.class_id)
        self._await(first, self._core.published - 1, batch)

    def _await(self, first: int, last: int, batch: Batch | None) -> None:
        """Hear what becomes of these positions, from now on."""
        self._sent.append((self._wire.confirms.wait_for(first, last, self._done.set), batch))

    async def settle(self) -> list[Refusal]:
        found = await self._confirmed()
        records = self._records
        records.ask()  # The records that have come back are of no more use.
        while not records.is_empty:
            records.take_batch()
            records.ask()
        return found

    async def _confirmed(self) -> list[Refusal]:
        """Wait for all that was sent. A record that is refused has no sequence."""
        self._wire.writer.push()
        refusals = []
        for waiter, batch in self._sent:
            while not waiter.is_done:
                check(self._wire)
                await self._done.wait()
            for position, error in zip(waiter.positions, waiter.refused, strict=True):
                sequence = -1 if batch is None else batch.sequence(position - waiter.first)
                refusals.append(Refusal(sequence, error.code, error.sentence))
        self._sent.clear()
        return refusals


# Finding out where to go on -----------------------------------------------------------------------


@asynccontextmanager
async def far_bus(place: Place, terms: FarTerms) -> AsyncIterator[tuple[FarBus, Record | None]]:
    """A connection, and what the lane has left there. Raises BusConnectionError, RefusedError."""
    beat, name = terms.heartbeat, terms.name
    record, is_odd = None, False
    async with wired(place, core_of(name, heartbeat=beat)) as wire:
        bus = wire.core.bus_id
        if wire.core.publisher.stored_before:
            record = await _last_record(wire, terms)
            is_odd = record is None
    if is_odd:  # What its numbers are is forgotten there.
        log.warning("%s has no good record of %s: what was under way may be there twice", bus, name)
        fresh = secrets.token_hex(8)
        async with wired(place, core_of(name, heartbeat=beat, instance=fresh)):
            pass
    core = core_of(name, heartbeat=beat)
    if record is not None:
        core = core_of(name, heartbeat=beat, unconfirmed=record.first, bus=bus)
    async with wired(place, core) as wire:
        class_id = await _named(core, wire, terms.class_)
        records = await _subscribed(wire, terms, seek=False)
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
        batch = inbox.take_batch()
        assert batch is not None
        try:
            return Record.decode(batch.payloads[-1])
        except RecordError as error:
            log.warning("%s: %s", terms.name, error)
            return None
    finally:
        wire.core.unsubscribe(inbox, processed=False)
        wire.closed(inbox)


async def _subscribed(wire: Wire, terms: FarTerms, *, seek: bool) -> Inbox:
    """The lane's position in the class of records; with `seek` at the last one of it."""
    core = wire.core
    await wire.answered(core.name_classes(NamedClass(name=RECORDS, last_values=True)))
    class_id = core.class_id(RECORDS)
    assert class_id is not None
    options = SubscribeRequest(
        channels=[terms.channel],
        durable=terms.name,
        start="last_values",
        seek=seek,
        max_deliveries=0,
    )
    inbox = core.subscribe(class_id, options)
    wire.opened(inbox, Signal())
    await wire.answered(inbox.request)
    return inbox


async def _named(core: ClientCore, wire: Wire, class_: int | str) -> int:
    named = NamedClass(id=class_) if isinstance(class_, int) else NamedClass(name=class_)
    await wire.answered(core.name_classes(named))
    if isinstance(class_, int):
        return class_
    found = core.class_id(class_)
    assert found is not None
    return found
