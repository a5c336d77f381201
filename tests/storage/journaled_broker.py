"""Broker with a journal, without threads and sockets.

`write` and `sync` are explicit steps. A bus that is dropped without them has crashed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog, WriteBatch
from simplebus.core.limits import CHECKPOINT_SECONDS
from simplebus.core.protocol.durability import Durability
from simplebus.storage.directory import lock_directory
from simplebus.storage.journal import Journal
from simplebus.storage.recovery import finish_recovery, recover
from simplebus.storage.segments import RecoveryResult
from tests.behaviour.wire_peer import BrokerHarness

START = 1_700_000_000.0

RUNS = count(1)
_open_buses: set[KeptBus] = set()
"""Buses that have neither crashed nor been closed."""


def end_all() -> None:
    """Crash the buses that a test has left open, to release their file descriptors."""
    for bus in list(_open_buses):
        bus.crash()


class KeptBus(BrokerHarness):
    """Broker recovered from a data directory and journaled to it, as in `serve`."""

    def __init__(
        self,
        path: Path,
        *,
        level: Durability = Durability.DISK,
        segment_bytes: int = 1 << 20,
        settings: Settings | None = None,
        now: float = START,
        boot: str = "",
    ) -> None:
        super().__init__()
        self.directory = replace(lock_directory(path, new_bus="here"), boot=boot)
        try:
            self.broker = Broker(
                settings or Settings(),
                identity=self.directory.bus_id,
                run_id=str(next(RUNS)),
                commit_log=CommitLog(level),
            )
            self.broker.clock.now = now
            self.found: RecoveryResult = recover(self.directory, self.broker)
            # No power failure is simulated.
            finish_recovery(self.directory, self.found, to_disk=False)
        except BaseException:
            self.directory.close()
            raise
        self.broker.check_invariants()
        assert self.broker.commit_log is not None
        self.commit_log: CommitLog = self.broker.commit_log
        self.commit_log.last_batch_number = self.commit_log.durable_position = (
            self.found.last_batch_number
        )
        self.keeper = Checkpointer(self.broker)
        self.journal = Journal(self.directory, durability=level, segment_bytes=segment_bytes)
        self.write_batches: list[WriteBatch] = []
        _open_buses.add(self)

    def write(self) -> None:
        """Write the changes since the last call."""
        write_batch = self.keeper.build_write_batch()
        if write_batch is not None:
            self.write_batches.append(write_batch)
            self.journal.write(write_batch)

    def sync(self) -> None:
        """Write and sync all changes, and mark them as durable."""
        self.write()
        self.journal.sync()
        self.write_batches.clear()
        self.broker.mark_durable(self.commit_log.last_batch_number)
        self.broker.check_invariants()

    def remove(self, *, is_short: bool = False) -> bool:
        """Sync, then remove unneeded journal segments. `is_short` simulates a full disk."""
        self.broker.clock.now += CHECKPOINT_SECONDS
        self.sync()
        empty = self.keeper.empty_class_ids() if is_short else ()
        return self.journal.remove(self.keeper.class_floors(), empty)

    def crash(self) -> None:
        """Simulate the end of the process: written data stays, and the lock is released."""
        _open_buses.discard(self)
        for cls in self.journal._classes.values():
            if cls.file is not None:
                cls.file.close_unchanged()
        if self.journal._state is not None:
            self.journal._state.close_unchanged()
        self.directory.close()

    def close(self) -> None:
        """Shut down in order."""
        self.keeper.is_snapshot_due = True
        self.sync()
        _open_buses.discard(self)
        self.journal.close()
        self.directory.close()
