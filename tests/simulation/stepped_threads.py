"""The journal's threads, each of whose turns is an event.

Rule 1: what they do is the product's; when they do it, and in which order, is chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from simplebus.core.commit_log import WriteBatch
from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.server.journal.writer import JournalWriter, SegmentFloors
from simplebus.storage.journal import Journal
from simplebus.storage.segment_reader import JournalReader

if TYPE_CHECKING:
    from tests.simulation.server import Server


class _TryLater(BaseException):
    """The writer would wait for a second."""


class _Waits:
    """Instead of the event for which the writer waits."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    def wait(self, seconds: float) -> bool:
        if self.is_set:
            return True
        raise _TryLater


class SteppedWriter(JournalWriter):
    """The writer, each of whose turns is an event."""

    server: Server
    """Set before one is made."""

    def __init__(self, journal: Journal, **told: Any) -> None:
        super().__init__(journal, **told)
        self._is_stopping = _Waits()  # type: ignore[assignment]

    def put(self, work: WriteBatch | SegmentFloors) -> None:
        super().put(work)
        self._later()

    def stop(self) -> None:
        self._is_stopping.set()
        self._queue.put(None)
        self._step()
        self._journal.close()

    def _later(self) -> None:
        world = self.server.world
        world.after(world.random.choice([0.0001, 0.005, 0.05]), self.server.guarded(self._step))

    _retried: list[WriteBatch] | None = None

    def _step(self) -> None:
        try:
            if self._retried is not None:
                batches = self._retried
                self._journal.withdraw()
                self._retried = None
                if not self._write_batches(batches):
                    return
            if not self._queue.empty():
                self._write_pending()
        except (_TryLater, OSError):
            self.server.world.after(1.0, self.server.guarded(self._step))

    def _write_batches(self, batches: list[WriteBatch]) -> bool:
        try:
            return super()._write_batches(batches)
        except _TryLater:
            self._retried = batches
            raise


class Token:
    """The way from the writer to the event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()

    def run_sync_soon(self, what: Callable[..., None], *given: object) -> None:
        self._calls.append((what, given))
        self._server.world.soon(self._server.guarded(self._next))

    def _next(self) -> None:
        """What is to be called is called in its order, whenever that is."""
        what, given = self._calls.popleft()
        what(*given)


class SteppedReader:
    """The reader, each of whose reads is an event."""

    server: Server
    """Set before one is made."""
    failure_count = read_bytes = 0

    def __init__(
        self,
        journal: JournalReader,
        *,
        on_read: Callable[[SpillRead, Sequence[SpilledRange]], None],
        on_failure: Callable[[SpillRead], None],
    ) -> None:
        self._journal = journal
        self._on_read = on_read
        self._on_failure = on_failure

    def stop(self) -> None:
        """Nothing is read any more."""

    def put(self, read: SpillRead) -> None:
        world = self.server.world
        delay = world.random.choice([0.0001, 0.01, 0.3])
        world.after(delay, self.server.guarded(self._read), read)

    def _read(self, read: SpillRead) -> None:
        server = self.server
        server.promises.count("reads")
        if server.world.chance(0.1):
            self._on_failure(read)
            return
        try:
            found = self._journal.read(read)
        except OSError:  # It is removed meanwhile, perhaps, as nobody needs it any more.
            self._on_failure(read)
            return
        stored = server.broker.classes[read.class_id].first_sequence
        for stretch in found:
            first, last = (
                max(stretch.first, stored),
                min(read.last, stretch.first + stretch.message_count),
            )
            if not stretch.frames and first < last:  # The others are nobody's, and removed.
                server.promises.unreadable(read.class_id, range(first, last))
        self._journal.problems.clear()
        self._on_read(read, found)
