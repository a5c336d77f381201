"""The bus as a process: the server without its event loop and threads.

Broker, checkpointer, journal pump and writer are the real ones. Each read, each write batch and
each reply of the writer is an event, in any order that trio allows. The process may die before and
after each, and at each disk call. A process that dies leaves only its files.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from simplebus.core.broker.broker import NO_ACTIONS, Broker, Settings
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog, WriteBatch
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.server.journal import pump
from simplebus.server.journal.pump import JournalPump, load
from simplebus.storage.directory import JournalDirectory, lock_directory
from simplebus.storage.errors import JournalError
from simplebus.storage.journal import Journal
from tests.simulation.disk import SimulatedCrash, SimulatedDisk
from tests.simulation.network import Endpoint, SimulatedConnection
from tests.simulation.promises import PromiseChecker
from tests.simulation.stepped_threads import SteppedReader, SteppedTrioToken, SteppedWriter
from tests.simulation.world import World

EPOCH = 1_700_000_000.0
_BUFFER = ReceiveBuffer(1 << 13)


class _LogCapture(logging.Handler):
    """Collects the warnings of a process."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings.append(record.getMessage())

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the server's log within the `with` block."""
        log = logging.getLogger("simplebus.server")
        log.addHandler(self)
        log.propagate, propagates = False, log.propagate
        try:
            yield
        finally:
            log.removeHandler(self)
            log.propagate = propagates


class SimulatedServer(Endpoint):
    """One bus, over all its processes."""

    def __init__(
        self,
        world: World,
        disk: SimulatedDisk,
        promises: PromiseChecker,
        *,
        level: Durability | None,
        settings: Settings,
        segment_bytes: int,
        positions_per_turn: int,
    ) -> None:
        self.world = world
        self.disk = disk
        self.promises = promises
        self.level = level
        self.settings = settings
        self.segment_bytes = segment_bytes
        self.positions_per_turn = positions_per_turn
        self._has_scheduled_work = False
        """True if `_continue_deferred_work` will be called."""
        self.process_number = 0
        """Number of the current process."""
        self.is_up = False
        self.kills = 0
        self.broker: Broker
        self.journal_pump: JournalPump | None = None
        self._directory: JournalDirectory | None = None
        self.power_cuts = 0
        self._recovered_batch_number = 0
        """Last write batch of earlier processes. The next one contains a snapshot."""
        self._snapshot_boot = ""
        """Boot in which the newest snapshot was written."""
        self._lines: dict[int, SimulatedConnection] = {}
        self._sessions: dict[SimulatedConnection, Session] = {}
        self._unread: dict[SimulatedConnection, bytearray] = {}
        self._alarm = math.inf
        self._epoch = EPOCH
        self._paused_until = 0.0
        self._warnings: list[str] = []
        """Warnings of the current process, or of the last one."""
        self.log = _LogCapture(self._warnings)

    # Processes -----------------------------------------------------------------------------------

    def while_process_lives(self, action: object) -> object:
        """Wrap an action: it is skipped if this process is gone, and kills it on SimulatedCrash.

        While the process is paused, the action waits.
        """
        process_number = self.process_number

        def act(*args: object) -> None:
            if self.is_up and self.process_number == process_number:
                if self.is_paused:
                    self.world.call_later(self._paused_until - self.world.now, act, *args)
                    return
                try:
                    action(*args)  # type: ignore[operator]
                except SimulatedCrash:
                    self.kill()

        return act

    def start(self) -> None:
        """Start a process with the files on the disk."""
        assert not self.is_up
        self.process_number += 1
        world = self.world
        self._epoch = EPOCH + world.random.choice([0.0, 0.0, 3600.0, -3600.0, 0.5])
        try:
            self._load()
        except (SimulatedCrash, OSError, JournalError) as error:
            self.release_files()
            has_disk_error = (
                self.disk.is_broken or self.disk.is_full or isinstance(error, SimulatedCrash)
            )
            self.promises.check(has_disk_error, "a killed bus starts again", error)
            world.call_later(0.5, self.start)
            return
        self.is_up = True
        world.trace("the bus is up, process", self.process_number)
        self.promises.process_started(self.broker, self._warnings)
        self._watch()
        self.broker.store.limit_turns(self.positions_per_turn)
        self._has_scheduled_work = False
        self._alarm = math.inf
        world.call_later(self.settings.tick_seconds, self.while_process_lives(self.tick))
        self.settle()

    def _load(self) -> None:
        if self.level is None:
            self.broker = Broker(self.settings, identity=f"bus {self.process_number}")
            self.journal_pump = None
            self._read_clock()
            return
        boot = str(self.power_cuts)
        self._directory = replace(lock_directory(self.disk.path, new_bus="the bus"), boot=boot)
        self.broker = Broker(
            self.settings,
            identity=self._directory.bus_id,
            run_id=f"run {self.process_number}",
            commit_log=CommitLog(self.level),
        )
        self._read_clock()
        load(self.broker, self._directory)
        journal = functools.partial(Journal, segment_bytes=self.segment_bytes)
        SteppedWriter.server = SteppedReader.server = self
        with (
            mock.patch.object(pump, "JournalWriter", SteppedWriter),
            mock.patch.object(pump, "SpillReadThread", SteppedReader),
            mock.patch.object(pump, "Journal", journal),
        ):
            self.journal_pump = JournalPump(self.broker, self._directory, self.settle)
        assert self.broker.commit_log is not None
        self._recovered_batch_number = self.broker.commit_log.last_batch_number
        self.journal_pump._last_written = self._recovered_batch_number
        self.journal_pump._call_soon = SteppedTrioToken(self).run_sync_soon
        self._observe_write_batches(self.journal_pump._checkpointer)

    def _observe_write_batches(self, checkpointer: Checkpointer) -> None:
        """Report each write batch that leaves no delivery unrecorded."""
        build_write_batch = checkpointer.build_write_batch

        def build_and_observe(*, is_last: bool = False) -> WriteBatch | None:
            batch = build_write_batch(is_last=is_last)
            if batch is not None and not checkpointer.has_unrecorded_progress:
                self.promises.deliveries_recorded(batch.number)
            return batch

        checkpointer.build_write_batch = build_and_observe  # type: ignore[method-assign]

    def _watch(self) -> None:
        """Observe stored messages at once, because they may be dropped in the same turn."""
        store = self.broker.store
        wake = store.notify_subscribers

        def observe_and_notify(cls: MessageClass) -> None:
            self.promises.observe_class(cls)
            wake(cls)

        store.notify_subscribers = observe_and_notify  # type: ignore[method-assign]

    def jump(self, seconds: float) -> None:
        """Set the clock forward or back."""
        self.world.trace("the clock jumps by", seconds)
        self._epoch += seconds

    @property
    def is_paused(self) -> bool:
        """True while the process is stopped by SIGSTOP."""
        return self.world.now < self._paused_until

    def pause(self, seconds: float) -> None:
        """Stop the process as SIGSTOP does, and continue it later. Clients and clocks continue."""
        self.world.trace("the bus is paused for", seconds)
        self._paused_until = self.world.now + seconds

    def kill(self, *, power: bool = False) -> None:
        """Kill the process, or cut the power."""
        if self.is_up:
            self.world.trace("the power fails" if power else "the bus is killed")
            self.kills += 1
            self.power_cuts += power
            self._end(self.promises.power_cut if power else self.promises.killed, power=power)

    def kill_and_damage_record(self) -> None:
        """Kill the process, and damage a record that it has stored."""
        salt = self._directory.salt if self._directory is not None else 0
        self.kill()
        if self.level in (Durability.OS, Durability.DISK):
            damaged = self.disk.damage_record(salt)
            if damaged is not None:
                # Without a snapshot since the power cut, recovery takes damage for a torn end.
                may_end_class = self._snapshot_boot != str(self.power_cuts)
                self.promises.record_damage(*damaged, may_end_class=may_end_class)

    def stop(self) -> None:
        """Stop the process gracefully."""
        if not self.is_up:
            return
        self.world.trace("the bus is stopped")
        try:
            if self.journal_pump is not None:
                self.journal_pump.close()
        except SimulatedCrash:
            self.kill()
            return
        has_disk_error = self.disk.is_full or self.disk.is_broken
        self._end(self.promises.killed if has_disk_error else self.promises.stopped)

    def _end(self, record_end: object, *, power: bool = False) -> None:
        commit_log = self.broker.commit_log
        if commit_log is not None and commit_log.durable_position > self._recovered_batch_number:
            self._snapshot_boot = commit_log.boot_id
        record_end(self.broker, self.level)  # type: ignore[operator]
        self._warnings.clear()
        self.is_up = False
        self._paused_until = 0.0
        if power:
            self.disk.cut_power()
        self.release_files()
        lines = list(self._sessions)
        self._lines.clear()
        self._sessions.clear()
        self._unread.clear()
        for line in lines:
            line.break_off(client_after=self.world.random.uniform(0, 0.5), server_after=0)
        self.world.call_later(self.world.random.uniform(0.05, 1.0), self.start)

    def release_files(self) -> None:
        """Close the files that the process had open."""
        self.disk.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    # Connections ---------------------------------------------------------------------------------

    def accept(self, client: Endpoint, name: str) -> SimulatedConnection | None:
        """Accept a client; None if the bus is down or paused."""
        if not self.is_up or self.is_paused:
            return None
        line = SimulatedConnection(self.world, client, self, name)
        session = self.broker.open_session(name)
        session.allow_split_reads()
        self._lines[session.session_id] = line
        self._sessions[line] = session
        self._unread[line] = bytearray()
        self.promises.session_opened(session)
        return line

    def on_bytes(self, line: SimulatedConnection, data: bytes) -> None:
        if line in self._sessions:
            self._unread[line] += data  # Received by the kernel, even while the process is paused.
            self._when_running(self._read, line)

    def on_writable(self, line: SimulatedConnection) -> None:
        self._when_running(self._flush_on, line)

    def on_closed(self, line: SimulatedConnection) -> None:
        self._when_running(self._close_if_open, line)

    def _when_running(
        self, action: Callable[[SimulatedConnection], None], line: SimulatedConnection
    ) -> None:
        """Run an action of the process now, or when it is no longer paused."""
        self.while_process_lives(action)(line)  # type: ignore[operator]

    def _close_if_open(self, line: SimulatedConnection) -> None:
        if line in self._sessions:
            self._close(line)
            self.settle()

    def _read(self, line: SimulatedConnection) -> None:
        session = self._sessions.get(line)
        if session is None:
            return
        unread = self._unread[line]
        self._read_clock()
        while unread and line in self._sessions:
            if session.is_reading_paused and not self.broker.is_blocking_publishers(session):
                if session.can_free_space:
                    self.world.call_later(0.5, self.while_process_lives(self._read_slowly), line)
                return
            data = bytes(unread[: min(session.next_read_bytes, len(_BUFFER.writable))])
            del unread[: len(data)]
            self._receive(line, session, data)

    def _read_slowly(self, line: SimulatedConnection) -> None:
        """Read a little from a paused session, because its acks may make space."""
        session = self._sessions.get(line)
        if session is not None and self._unread[line]:
            data = bytes(self._unread[line][:500])
            del self._unread[line][:500]
            self._receive(line, session, data)
            self._read(line)

    def _receive(self, line: SimulatedConnection, session: Session, data: bytes) -> None:
        self.promises.bytes_received(session, data)
        try:
            self.broker.receive(session, _BUFFER, _BUFFER.fill(data))
            self._receive_rest(session)
        except RemoteProtocolError as error:
            self.promises.session_failed(session, error)
            self._cut(session, error)
        self.promises.observe(self.broker)
        self.settle()

    def _receive_rest(self, session: Session) -> None:
        """Process the rest of a read at once: `promises` has recorded all of it."""
        while session.is_request_pending or session.unprocessed:
            if session.is_request_pending:
                self.broker.continue_request(session)
            else:
                self.broker.receive(session, _BUFFER, session.refill(_BUFFER))

    def _cut(self, session: Session, error: RemoteProtocolError) -> None:
        line = self._lines.get(session.session_id)
        if line is None:
            return
        self.world.trace("session", session.session_id, "is cut off:", error.reason)
        self.broker.send_fatal_error(session, error)
        outbox = session.outbox
        while outbox.pending_bytes and (chunk := outbox.peek(self.broker.tick_number)):
            data = bytes(chunk)
            outbox.mark_sent(len(data), self.broker.tick_number)
            self.promises.bytes_sent(session, data)
            if not line.is_gone and not line.down.ends and not line.down.is_closed:
                line.down.put(data)
        self._close(line)
        if not line.is_gone:
            line.close_from(self)

    def _close(self, line: SimulatedConnection) -> None:
        session = self._sessions.pop(line)
        del self._lines[session.session_id], self._unread[line]
        self.promises.session_closed(session)
        self.broker.close_session(session)
        self.promises.observe(self.broker)

    def _flush(self, line: SimulatedConnection) -> None:
        session = self._sessions[line]
        outbox, tick_number = session.outbox, self.broker.tick_number
        pipe = line.down
        for _ in range(8):
            capacity = pipe.room
            if not capacity:
                return
            chunk = outbox.peek(tick_number)
            if not chunk:
                break
            count = min(len(chunk), capacity)
            if self.world.is_fault_due(0.1):
                count = self.world.random.randint(1, count)
            data = bytes(chunk[:count])
            outbox.mark_sent(count, tick_number)
            self.promises.bytes_sent(session, data)
            pipe.put(data)
        if not outbox.is_idle and pipe.room:
            self.world.call_soon(self.while_process_lives(self._flush_on), line)

    def _flush_on(self, line: SimulatedConnection) -> None:
        if line in self._sessions:
            self._flush(line)
            self.settle()

    # Time ----------------------------------------------------------------------------------------

    def _read_clock(self) -> None:
        clock, now = self.broker.clock, self._epoch + self.world.now
        is_set_back, clock.now = now < clock.now, now
        if is_set_back:  # Until now, the broker has stored messages by the earlier clock.
            self.promises.clock_set(now)

    def tick(self) -> None:
        """Advance the ack timer."""
        self._read_clock()
        if self.journal_pump is not None:
            self.journal_pump.tick()
        for session, error in self.broker.tick():
            self._cut(session, error)
        self.promises.observe(self.broker)
        self.settle()
        self.world.call_later(self.settings.tick_seconds, self.while_process_lives(self.tick))

    def _wake(self) -> None:
        self._alarm = math.inf
        self._read_clock()
        self.broker.run_due_wakeups()
        self.settle()

    def _continue_deferred_work(self) -> None:
        self._has_scheduled_work = False
        self._read_clock()
        self.broker.store.continue_deferred_work()
        self.settle()

    def settle(self) -> None:
        """Do what the server does at the end of each turn."""
        broker = self.broker
        while (actions := broker.end_turn()) is not NO_ACTIONS:
            for session_id in actions.flush:
                line = self._lines.get(session_id)
                if line is not None:
                    self._flush(line)
            for session, error in actions.close:
                self._cut(session, error)
            for session in actions.resume:
                line = self._lines.get(session.session_id)
                if line is not None:
                    self.world.call_soon(self.while_process_lives(self._read), line)
        if broker.store.has_deferred_work and not self._has_scheduled_work:
            self._has_scheduled_work = True
            self.world.call_soon(self.while_process_lives(self._continue_deferred_work))
        due = broker.next_wakeup
        if due < self._alarm:
            self._alarm = due
            self.world.call_later(
                max(0.0, due - self._epoch - self.world.now), self.while_process_lives(self._wake)
            )
        if self.journal_pump is not None:
            self.journal_pump.submit_pending()
