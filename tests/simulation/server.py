"""The bus as a process: what `serve` is, without its event loop and its thread.

Rule 1: broker, keeper, keeping and writer are the real ones. What trio would do between them is
done here by events, with the same order and the same freedom: each read, each lot, each answer of
the writer is an event of its own, and the process may die before and behind each, and at each call
to the disk.
Rule 2: who dies leaves its files, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.server.journal import pump
from simplebus.server.journal.pump import JournalPump, load
from simplebus.storage.directory import Directory, take
from simplebus.storage.errors import JournalError
from simplebus.storage.journal import Journal
from tests.simulation.disk import Crash, Disk
from tests.simulation.network import End, Line
from tests.simulation.promises import Promises
from tests.simulation.stepped_threads import SteppedReader, SteppedWriter, Token
from tests.simulation.world import World

EPOCH = 1_700_000_000.0
_BUFFER = ReceiveBuffer(1 << 13)


class _Log(logging.Handler):
    """What a process says to its operator."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    @contextlib.contextmanager
    def listens(self) -> Iterator[None]:
        """For so long, and nobody else does."""
        log = logging.getLogger("simplebus.server")
        log.addHandler(self)
        log.propagate, propagates = False, log.propagate
        try:
            yield
        finally:
            log.removeHandler(self)
            log.propagate = propagates


class Server(End):
    """One bus, over all its processes."""

    def __init__(
        self,
        world: World,
        disk: Disk,
        promises: Promises,
        *,
        level: Durability | None,
        settings: Settings,
        segment_bytes: int,
    ) -> None:
        self.world = world
        self.disk = disk
        self.promises = promises
        self.level = level
        self.settings = settings
        self.segment_bytes = segment_bytes
        self.life = 0
        """Which process it is."""
        self.is_up = False
        self.kills = 0
        self.broker: Broker
        self.journal_pump: JournalPump | None = None
        self._directory: Directory | None = None
        self.power_cuts = 0
        self._lines: dict[int, Line] = {}
        self._sessions: dict[Line, Session] = {}
        self._unread: dict[Line, bytearray] = {}
        self._alarm = math.inf
        self._epoch = EPOCH
        self._said: list[str] = []
        """What the process has logged that is there, or was there last."""
        self.log = _Log(self._said)

    # Processes -----------------------------------------------------------------------------------

    def guarded(self, action: object) -> object:
        """An action of this process: nothing when that is gone; its death when it dies in it."""
        life = self.life

        def act(*given: object) -> None:
            if self.is_up and self.life == life:
                try:
                    action(*given)  # type: ignore[operator]
                except Crash:
                    self.kill()

        return act

    def start(self) -> None:
        """A process begins, with what is on the disk."""
        assert not self.is_up
        self.life += 1
        world = self.world
        self._epoch = EPOCH + world.random.choice([0.0, 0.0, 3600.0, -3600.0, 0.5])
        try:
            self._load()
        except (Crash, OSError, JournalError) as error:
            self.let_go()
            is_sick = self.disk.is_broken or self.disk.is_full or isinstance(error, Crash)
            self.promises.demand(is_sick, "a bus that was killed starts again", error)
            world.after(0.5, self.start)
            return
        self.is_up = True
        world.say("the bus is up, process", self.life)
        self.promises.begin(self.broker, self._said)
        self._watch()
        self._alarm = math.inf
        world.after(self.settings.tick_seconds, self.guarded(self.tick))
        self.settle()

    def _load(self) -> None:
        if self.level is None:
            self.broker = Broker(self.settings, identity=f"bus {self.life}")
            self.journal_pump = None
            self._read_clock()
            return
        boot = str(self.power_cuts)
        self._directory = replace(take(self.disk.path, new_bus="the bus"), boot=boot)
        self.broker = Broker(
            self.settings,
            identity=self._directory.bus,
            run_id=f"run {self.life}",
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
        self.journal_pump._last_written = self.broker.commit_log.last_batch_number
        self.journal_pump._call_soon = Token(self).run_sync_soon

    def _watch(self) -> None:
        """What is stored is seen at once: it may be dropped in the same turn."""
        store = self.broker.store
        wake = store.notify_subscribers

        def watched(cls: MessageClass) -> None:
            self.promises.look_at(cls)
            wake(cls)

        store.notify_subscribers = watched  # type: ignore[method-assign]

    def jump(self, seconds: float) -> None:
        """The clock is set."""
        self.world.say("the clock jumps by", seconds)
        self._epoch += seconds
        self.promises.clock_set(self._epoch + self.world.now)

    def kill(self, *, power: bool = False) -> None:
        """The process is killed, or the power fails."""
        if self.is_up:
            self.world.say("the power fails" if power else "the bus is killed")
            self.kills += 1
            self.power_cuts += power
            self._end(self.promises.power_cut if power else self.promises.killed, power=power)

    def stop(self) -> None:
        """The process ends in peace."""
        if not self.is_up:
            return
        self.world.say("the bus is stopped")
        try:
            if self.journal_pump is not None:
                self.journal_pump.close()
        except Crash:
            self.kill()
            return
        is_sick = self.disk.is_full or self.disk.is_broken
        self._end(self.promises.killed if is_sick else self.promises.stopped)

    def _end(self, tell: object, *, power: bool = False) -> None:
        tell(self.broker, self.level)  # type: ignore[operator]
        self._said.clear()
        self.is_up = False
        if power:
            self.disk.cut_power()
        self.let_go()
        lines = list(self._sessions)
        self._lines.clear()
        self._sessions.clear()
        self._unread.clear()
        for line in lines:
            line.cut(client_after=self.world.random.uniform(0, 0.5), server_after=0)
        self.world.after(self.world.random.uniform(0.05, 1.0), self.start)

    def let_go(self) -> None:
        """What the process had open is closed."""
        self.disk.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    # Connections ---------------------------------------------------------------------------------

    def accept(self, client: End, name: str) -> Line | None:
        """A client connects."""
        if not self.is_up:
            return None
        line = Line(self.world, client, self, name)
        session = self.broker.open_session(name)
        self._lines[session.session_id] = line
        self._sessions[line] = session
        self._unread[line] = bytearray()
        self.promises.opened(session)
        return line

    def hear(self, line: Line, data: bytes) -> None:
        if line in self._sessions:
            self._unread[line] += data
            self._read(line)

    def go_on(self, line: Line) -> None:
        if line in self._sessions:
            self._flush(line)
            self.settle()

    def hang_up(self, line: Line) -> None:
        if line in self._sessions:
            self._close(line)
            self.settle()

    def _read(self, line: Line) -> None:
        session = self._sessions.get(line)
        if session is None:
            return
        unread = self._unread[line]
        self._read_clock()
        while unread and line in self._sessions:
            if session.is_reading_paused and not self.broker.is_blocking_publishers(session):
                if session.can_free_space:
                    self.world.after(0.5, self.guarded(self._read_slowly), line)
                return
            data = bytes(unread[: min(session.next_read_bytes, len(_BUFFER.writable))])
            del unread[: len(data)]
            self._receive(line, session, data)

    def _read_slowly(self, line: Line) -> None:
        """Acks of one that waits may make room."""
        session = self._sessions.get(line)
        if session is not None and self._unread[line]:
            data = bytes(self._unread[line][:500])
            del self._unread[line][:500]
            self._receive(line, session, data)
            self._read(line)

    def _receive(self, line: Line, session: Session, data: bytes) -> None:
        self.promises.heard(session, data)
        try:
            self.broker.receive(session, _BUFFER, _BUFFER.fill(data))
        except RemoteProtocolError as error:
            self.promises.refused(session, error)
            self._cut(session, error)
        self.promises.look(self.broker)
        self.settle()

    def _cut(self, session: Session, error: RemoteProtocolError) -> None:
        line = self._lines.get(session.session_id)
        if line is None:
            return
        self.world.say("session", session.session_id, "is cut off:", error.reason)
        self.broker.send_fatal_error(session, error)
        outbox = session.outbox
        while outbox.pending_bytes and (piece := outbox.peek(self.broker.tick_number)):
            data = bytes(piece)
            outbox.mark_sent(len(data), self.broker.tick_number)
            self.promises.sent(session, data)
            if not line.is_gone and not line.down.ends and not line.down.is_closed:
                line.down.put(data)
        self._close(line)
        if not line.is_gone:
            line.shut(self)

    def _close(self, line: Line) -> None:
        session = self._sessions.pop(line)
        del self._lines[session.session_id], self._unread[line]
        self.promises.closed(session)
        self.broker.close_session(session)
        self.promises.look(self.broker)

    def _flush(self, line: Line) -> None:
        session = self._sessions[line]
        outbox, tick = session.outbox, self.broker.tick_number
        pipe = line.down
        for _ in range(8):
            room = pipe.room
            if not room:
                return
            piece = outbox.peek(tick)
            if not piece:
                break
            count = min(len(piece), room)
            if self.world.chance(0.1):
                count = self.world.random.randint(1, count)
            data = bytes(piece[:count])
            outbox.mark_sent(count, tick)
            self.promises.sent(session, data)
            pipe.put(data)
        if not outbox.is_idle and pipe.room:
            self.world.soon(self.guarded(self._flush_on), line)

    def _flush_on(self, line: Line) -> None:
        if line in self._sessions:
            self._flush(line)
            self.settle()

    # Time ----------------------------------------------------------------------------------------

    def _read_clock(self) -> None:
        self.broker.clock.now = self._epoch + self.world.now

    def tick(self) -> None:
        """One beat of the ack timer."""
        self._read_clock()
        if self.journal_pump is not None:
            self.journal_pump.tick()
        for session, error in self.broker.tick():
            self._cut(session, error)
        self.promises.look(self.broker)
        self.settle()
        self.world.after(self.settings.tick_seconds, self.guarded(self.tick))

    def _wake(self) -> None:
        self._alarm = math.inf
        self._read_clock()
        self.broker.run_due_wakeups()
        self.settle()

    def settle(self) -> None:
        """What the engine does at the end of each turn."""
        broker = self.broker
        while ready := broker.drain_writable():
            for session_id in ready:
                line = self._lines.get(session_id)
                if line is not None:
                    self._flush(line)
        for session, error in broker.drain_closing():
            self._cut(session, error)
        due = broker.next_wakeup
        if due < self._alarm:
            self._alarm = due
            self.world.after(max(0.0, due - self._epoch - self.world.now), self.guarded(self._wake))
        for session in broker.drain_resumed():
            line = self._lines.get(session.session_id)
            if line is not None:
                self.world.soon(self.guarded(self._read), line)
        if self.journal_pump is not None:
            self.journal_pump.submit_pending()
