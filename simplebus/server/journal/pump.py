"""A broker that keeps what it holds: between the event loop and the thread that writes.

Rule 1: at most two lots are with the writer: one is written, one waits. What comes meanwhile grows
into the next one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog, Durability
from simplebus.core.histogram import HistogramSnapshot
from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.server.journal.reader import Reader
from simplebus.server.journal.writer import Failure, Needed, Writer
from simplebus.storage.directory import Directory
from simplebus.storage.disk_reserve import Reserve
from simplebus.storage.errors import JournalError
from simplebus.storage.journal import Journal
from simplebus.storage.recovery import recover, settle
from simplebus.storage.segment_reader import JournalReader

log = logging.getLogger("simplebus.server")

_LOTS_MAX = 2

Soon = Callable[..., None]
"""Called with a function and what it is given: has it called soon, in the event loop."""


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """A snapshot of a journal and of what it has to do."""

    level: Durability
    lots: int
    """How many lots are under way."""
    held_bytes: int
    """Bytes of frames that have not reached the level."""
    written_bytes: int
    """Bytes of records of messages that this process has written."""
    lots_written: int
    """How many are written."""
    syncs: int
    """How often files were synced."""
    synced_after: HistogramSnapshot
    """Seconds that writing and syncing took, of what was written at once."""
    failures: int
    """How often something could not be written."""
    failure: str
    """Why nothing can be written now; empty where it can."""
    lagging_sessions: int
    """Sessions that are not read from meanwhile, as they cannot be told."""
    behind: int
    """Subscriptions for which messages are read back from disk."""
    read_bytes: int
    """Bytes of frames that were read back."""
    read_failures: int
    """How often they could not be."""


class Keeping:
    """Of one broker with a ledger, in one directory."""

    def __init__(self, broker: Broker, directory: Directory, settle: Callable[[], None]) -> None:
        """`settle` is called when confirms have become due."""
        assert broker.commit_log is not None
        self._broker = broker
        self._ledger: CommitLog = broker.commit_log
        self._settle = settle
        self._keeper = Checkpointer(broker)
        self._give: Soon = _in_no_loop
        self._journal = Journal(directory, level=broker.commit_log.level)
        self._writer = Writer(
            self._journal,
            reached=lambda lot, has_space: self._soon(self._has_reached, lot, has_space),
            failed=lambda failure: self._soon(self._has_failed, failure),
            snapshot=lambda: self._soon(self._want_snapshot),
            reserve=Reserve(directory.path),
        )
        self._spilling = broker.spill_manager
        self._reader = Reader(
            JournalReader(directory.path),
            given=lambda read, found: self._soon(self._has_read, read, found),
            failed=lambda read: self._soon(self._has_not_read, read),
        )
        self._needed = Needed({}, ())
        self._written = 0
        """The last lot that is written."""
        self._is_short = False
        """Whether it is written with what was kept back for a full disk."""

    def _soon(self, what: Callable[..., None], *given: object) -> None:
        """Have it done in the event loop."""
        self._give(what, *given)

    def start(self, soon: Soon | None = None) -> None:
        """Within the event loop. `soon` has something done there, and is called in other threads;
        None for trio's way."""
        self._written = self._ledger.taken
        self._give = soon or soon_in_trio()
        self._writer.start(self._written)
        if self._spilling is not None:
            self._reader.start()

    def statistics(self) -> JournalStatistics:
        ledger, failure = self._ledger, self._ledger.failure
        return JournalStatistics(
            level=ledger.level,
            lots=ledger.taken - self._written,
            held_bytes=ledger.held_bytes,
            written_bytes=self._journal.written_bytes,
            lots_written=self._writer.lots_written,
            syncs=self._journal.files_synced,
            synced_after=self._writer.synced_after.snapshot(),
            failures=self._writer.failures,
            failure=failure[1] if failure is not None else "",
            lagging_sessions=len(ledger.lagging),
            behind=len(self._spilling.readers) if self._spilling is not None else 0,
            read_bytes=self._reader.read_bytes,
            read_failures=self._reader.failures,
        )

    @property
    def due(self) -> float:
        """When positions are looked at again, by the broker's clock."""
        return self._keeper.next_full_scan

    def hand_over(self) -> int:
        """At the end of a turn: have written what has come, unless enough is under way. Returns how
        many things were asked of other threads."""
        asked = 0
        if self._ledger.taken - self._written < _LOTS_MAX:
            lot = self._keeper.build_write_batch()
            if lot is not None:
                self._writer.put(lot)
                asked += 1
        if self._spilling is not None:
            for read in self._spilling.drain_reads():
                self._reader.put(read)
                asked += 1
        return asked

    def tick(self) -> None:
        """Once per tick: let go of segments that nobody needs."""
        needed = Needed(self._keeper.class_floors(), self._keeper.empty_class_ids())
        if needed != self._needed and (self._ledger.failure is None or self._is_short):
            self._needed = needed
            self._writer.put(needed)

    def close(self) -> None:
        """Write all there is; blocks until it is done. Within the event loop, or behind it."""
        self._keeper.is_snapshot_due = True
        lot = self._keeper.build_write_batch()
        if lot is not None:
            self._writer.put(lot)
        self._writer.stop()
        if self._spilling is not None:
            self._reader.stop()

    def _has_reached(self, lot: int, has_space: bool) -> None:
        if self._ledger.failure is not None and has_space:
            log.warning("the journal is written again")
        self._written = lot
        self._is_short = not has_space
        self._broker.mark_durable(lot, has_space=has_space)
        self._settle()

    def _has_failed(self, failure: Failure) -> None:
        if self._ledger.failure is None:
            log.error("%s; publishers are refused until it can be", failure[1])
        self._broker.journal_failed(*failure)
        self._settle()

    def _has_read(self, read: SpillRead, found: Sequence[SpilledRange]) -> None:
        assert self._spilling is not None
        self._spilling.complete_read(read, found)
        self._settle()

    def _has_not_read(self, read: SpillRead) -> None:
        assert self._spilling is not None
        self._spilling.fail_read(read)

    def _want_snapshot(self) -> None:
        self._keeper.is_snapshot_due = True


def soon_in_trio() -> Soon:
    """How other threads have something done in the loop of trio that runs here."""
    token = trio.lowlevel.current_trio_token()

    def soon(what: Callable[..., None], *given: object) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # Nobody is there to be told.
            token.run_sync_soon(what, *given)

    return soon


def _in_no_loop(what: Callable[..., None], *given: object) -> None:
    raise AssertionError("not started")


def load(broker: Broker, directory: Directory) -> None:
    """Fill a fresh broker with what a directory holds. Raises JournalError."""
    assert broker.commit_log is not None
    found = recover(directory, broker)
    broker.commit_log.taken = broker.commit_log.reached = found.lot
    for sentence in found.dropped:
        log.warning("left out: %s", sentence)
    try:
        settle(directory, found, to_disk=broker.commit_log.level is Durability.DISK)
    except OSError as error:
        raise JournalError(
            f"{directory.path} cannot be used as a journal: {error.strerror}"
        ) from None
    if found.lot:
        log.info("%d messages are back, from %s", found.messages, directory.path)
