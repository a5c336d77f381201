"""The journal's threads, with each step as an event.

The code is the product's; the time and order of its steps are random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from simplebus.core.commit_log import WriteBatch
from simplebus.core.message_class.spill import SpilledRange, SpillRead
from simplebus.server.journal.writer import JournalWriter, SegmentFloors
from simplebus.storage.journal import Journal
from simplebus.storage.segment_reader import SegmentReader

if TYPE_CHECKING:
    from tests.simulation.server import SimulatedServer


class _RetryLater(BaseException):
    """Raised where the writer would wait for a second."""


class _SteppedEvent:
    """Replaces the event on which the writer waits."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    def wait(self, seconds: float) -> bool:
        if self.is_set:
            return True
        raise _RetryLater


class SteppedWriter(JournalWriter):
    """Journal writer whose steps are events."""

    server: SimulatedServer
    """Set before an instance is created."""

    def __init__(self, journal: Journal, **options: Any) -> None:
        super().__init__(journal, **options)
        self._is_stopping = _SteppedEvent()  # type: ignore[assignment]

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
        world.call_later(
            world.random.choice([0.0001, 0.005, 0.05]), self.server.while_process_lives(self._step)
        )

    _retried: list[WriteBatch] | None = None

    def _step(self) -> None:
        try:
            if self._retried is not None:
                batches = self._retried
                self._journal.discard_unsynced()
                self._retried = None
                if not self._write_batches(batches):
                    return
            if not self._queue.empty():
                self._write_pending()
        except (_RetryLater, OSError):
            self.server.world.call_later(1.0, self.server.while_process_lives(self._step))

    def _write_batches(self, batches: list[WriteBatch]) -> bool:
        try:
            return super()._write_batches(batches)
        except _RetryLater:
            self._retried = batches
            raise


class SteppedTrioToken:
    """Replaces the trio token with which the writer calls into the event loop."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()

    def run_sync_soon(self, function: Callable[..., None], *args: object) -> None:
        self._calls.append((function, args))
        self._server.world.call_soon(self._server.while_process_lives(self._next))

    def _next(self) -> None:
        """Run the next call, in order."""
        function, args = self._calls.popleft()
        function(*args)


class SteppedReader:
    """Spill reader whose reads are events."""

    server: SimulatedServer
    """Set before an instance is created."""
    failure_count = read_bytes = 0

    def __init__(
        self,
        journal: SegmentReader,
        *,
        on_read: Callable[[SpillRead, Sequence[SpilledRange]], None],
        on_failure: Callable[[SpillRead], None],
    ) -> None:
        self._journal = journal
        self._on_read = on_read
        self._on_failure = on_failure

    def stop(self) -> None:
        """Do nothing: no read is pending outside of events."""

    def put(self, read: SpillRead) -> None:
        world = self.server.world
        delay = world.random.choice([0.0001, 0.01, 0.3])
        world.call_later(delay, self.server.while_process_lives(self._read), read)

    def _read(self, read: SpillRead) -> None:
        server = self.server
        server.promises.count("reads")
        if server.world.is_fault_due(0.1):
            self._on_failure(read)
            return
        try:
            found = self._journal.read(read)
        except OSError:  # The file may have been removed meanwhile.
            self._on_failure(read)
            return
        stored = server.broker.classes[read.class_id].first_sequence
        for span in found:
            first, last = (
                max(span.first, stored),
                min(read.last, span.first + span.message_count),
            )
            if (
                not span.frames and first < last
            ):  # Other spans were removed because no position needs them.
                server.promises.unreadable(read.class_id, range(first, last))
        self._journal.problems.clear()
        self._on_read(read, found)
