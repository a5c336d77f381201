"""What a server tells of itself: the facts of its engine and of its doors.

Rule 1: it looks and counts, and changes nothing.
Rule 2: whatever grows with the number of classes, positions or connections is told in pieces, and
cut at so many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import nlargest
from importlib.metadata import PackageNotFoundError, version
from itertools import islice

from simplebus.core.broker.inquire_positions import PositionReporter, truncate_text
from simplebus.core.commit_log import Level
from simplebus.monitor import classes as class_figures
from simplebus.monitor import waiters
from simplebus.monitor.board import Board
from simplebus.monitor.classes import BusFigures
from simplebus.monitor.counted import Counted
from simplebus.monitor.facts import Column, Facts, Health, Note, Table, Telling, Tile, merged
from simplebus.nats.statistics import FrontStatistics
from simplebus.server import process
from simplebus.server.journal.pump import JournalStatistics
from simplebus.server.latency import Recent, Timing
from simplebus.server.loop_watchdog import Stalls
from simplebus.server.nats_listener import NatsDoor
from simplebus.server.server import Engine

_CLIENTS_MAX = 50
_LATE_SECONDS = 0.25

More = Callable[[], Facts]
"""Facts of something that is part of this server."""


def installed_version() -> str:
    """Of this package; empty where it runs without being installed."""
    try:
        return version("simplebus")
    except PackageNotFoundError:
        return ""


class Watch:
    """Of one server."""

    def __init__(self, engine: Engine, nats_door: NatsDoor | None) -> None:
        self._engine = engine
        self._nats_door = nats_door
        self._explaining = PositionReporter(engine.broker.store, engine.broker.sessions)
        self.timing = Timing(engine.broker)
        engine.timing = self.timing
        self.is_ready = self.is_draining = False
        self._told_classes: set[int] = set()
        """Those that were told one by one last."""
        self.http_connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.http_seconds: Callable[[], float] = lambda: 0.0
        """How many are open at the HTTP door, and were ever."""
        self.stalls: Stalls | None = None
        self.more: list[More] = []
        self._recent = Recent()
        self._front: FrontStatistics | None = None
        """Of the NATS door, as it was looked at last."""
        self.version = installed_version()
        self.board = Board(self.tell, self.health)

    def health(self) -> Health:
        """Whether the server takes work."""
        if self.is_draining:
            return Health(ready=False, draining=True, why="the server is stopping")
        if not self.is_ready:
            return Health(ready=False, why="not every door is open yet")
        ledger, cluster = self._engine.broker.commit_log, self._engine.cluster
        failure = ledger.failure if ledger is not None else None
        if failure is not None:
            return Health(ready=False, why=f"{failure[0].value}: {failure[1]}")
        if cluster is not None and not cluster.link.is_ready:
            return Health(ready=False, why="no server of the cluster can be reached")
        return Health()

    def tell(self, detailed: bool) -> Telling:
        """Everything, in pieces."""
        broker, counted = self._engine.broker, Counted()
        if self._nats_door is not None:
            self._front = self._nats_door.front.statistics()
            yield
        figures = yield from class_figures.of_bus(broker.store, self._told_classes)
        self._told_classes = {each.class_id for each in figures.classes}
        class_figures.count(counted, figures)
        yield
        self._count_bus(counted, figures)
        self._count_doors(counted)
        self._count_journal(counted)
        process.count(counted)
        yield
        tables = [waiters.classes_table(figures)]
        notes: list[Note] = []
        if detailed:
            notes += self._notes(figures)
            positions, said = yield from waiters.positions(broker, self._explaining)
            tables.append(positions)
            notes += said
            sessions, said = yield from waiters.sessions(broker, self._explaining)
            tables.append(sessions)
            notes += said
            if self._nats_door is not None:
                tables.append((yield from self._clients()))
        dead = waiters.dead_table(figures)
        if dead.rows:
            tables.append(dead)
        counted.gauge("info", "What runs here.", 1, version=self.version)
        facts = Facts(
            title="simplebus",
            subtitle=f"bus {broker.inquiry_handler.identity}",
            health=self.health(),
            metrics=counted.metrics(),
            flows=self._flows(figures),
            tiles=self._tiles(figures),
            tables=tables,
            notes=notes,
        )
        return merged(facts, [more() for more in self.more])

    def _flows(self, figures: BusFigures) -> dict[str, float]:
        total = figures.total
        flows: dict[str, float] = {
            "published": total.published,
            "delivered": total.delivered,
            "acknowledged": total.acknowledged,
            "redelivered": total.redelivered,
            "dropped": total.dropped.total(),
        }
        if (front := self._front) is not None:
            flows["NATS in"], flows["NATS out"] = front.in_messages, front.out_messages
        return flows

    def _tiles(self, figures: BusFigures) -> list[Tile]:
        broker, total = self._engine.broker, figures.total
        confirmed, acked, _ = self._recent.look(self.timing)
        tiles = [
            Tile("In flight", total.in_flight),
            Tile("Stored", total.stored),
            Tile("Memory of messages", broker.budget.used, "bytes"),
            Tile("Memory of the process", process.resident_bytes(), "bytes"),
            Tile("Connections", sum(count for _, count, _ in self._doors())),
            Tile("Dead letters", figures.dead_letters),
            Tile("Publish to confirm, p99", confirmed.quantile(0.99), "seconds"),
            Tile("Publish to ack, p99", acked.quantile(0.99), "seconds"),
        ]
        if (keeping := self._engine.keeping) is not None:
            synced = keeping.statistics().synced_after
            tiles.append(Tile("Journal write, p99", synced.quantile(0.99), "seconds"))
        return tiles

    def _doors(self) -> list[tuple[str, int, int]]:
        """Each door, how many connections it has, and ever had."""
        engine, nats = self._engine, self._nats_door
        doors = [("tcp", len(engine.connections), engine.accepted)]
        if nats is not None:
            doors.append(("nats", len(nats.connections), nats.accepted))
        return [*doors, ("http", *self.http_connections())]

    def _notes(self, figures: BusFigures) -> list[Note]:
        engine = self._engine
        notes = waiters.blocked_notes(engine.broker, figures)
        notes += waiters.refused_notes(engine.broker, figures)
        health = self.health()
        if health.why:
            notes.insert(0, Note("the server", health.why, is_bad=True))
        late = self._recent.look(self.timing)[2].quantile(0.99)
        if late > _LATE_SECONDS:
            sentence = f"in the last minute one in a hundred things was {late:.2f} s late, or more"
            notes.append(Note("the event loop", sentence, is_bad=True))
        return notes

    def _clients(self) -> Generator[None, None, Table]:
        """NATS clients, those for which most waits."""
        assert self._nats_door is not None
        sessions = self._nats_door.front.sessions
        some = islice(sessions.values(), 10_000)
        chosen = nlargest(_CLIENTS_MAX, some, key=lambda each: each.outbox.pending_bytes)
        yield
        return Table(
            "clients",
            "NATS clients",
            [
                Column("Client"),
                Column("Name"),
                Column("Peer"),
                Column("Library"),
                Column("Subscriptions", "count"),
                Column("Published", "count", "Messages that it has published.", is_flow=True),
                Column("Sent", "count", "Messages that were sent to it.", is_flow=True),
                Column("Waiting", "bytes", "Bytes that it has not taken yet."),
            ],
            [
                [
                    f"{each.client_id}",
                    truncate_text(each.options.name),
                    truncate_text(each.peer),
                    truncate_text(f"{each.options.lang} {each.options.version}".strip()),
                    len(each.subscriptions),
                    each.in_messages,
                    each.out_messages,
                    each.outbox.pending_bytes,
                ]
                for each in chosen
            ],
            left_out=max(0, len(sessions) - len(chosen)),
        )

    # Metrics -------------------------------------------------------------------------------------

    def _count_bus(self, counted: Counted, figures: BusFigures) -> None:
        broker, timing = self._engine.broker, self.timing
        counted.gauge("classes", "Classes that there are.", len(broker.classes))
        counted.gauge("sessions", "Sessions open.", len(broker.sessions))
        counted.gauge("memory_bytes", "Memory of all rings.", broker.budget.used)
        counted.gauge("memory_limit_bytes", "What it may be.", broker.budget.limit)
        counted.gauge(
            "dead_letters", "Messages that were given up and lie there.", figures.dead_letters
        )
        for reason, count in broker.refusal_counts.items():
            counted.counter(
                "refused_frames",
                "What peers asked for or said in vain, by reason.",
                count,
                reason=reason.value,
            )
        counted.histogram(
            "publish_confirm_seconds",
            "From reading what was published until it is confirmed; some of all.",
            timing.confirmed_after.snapshot(),
        )
        counted.histogram(
            "publish_ack_seconds",
            "From accepting a message until every subscription has acknowledged it; some of all.",
            timing.acknowledged_after.snapshot(),
        )
        counted.histogram(
            "event_loop_delay_seconds",
            "How much later than it could the event loop had time for something.",
            timing.late.snapshot(),
        )
        if (stalls := self.stalls) is not None:
            counted.counter("event_loop_stalls", "How often it stood still for long.", stalls.count)
            help = "For how long altogether, as far as it is over."
            counted.counter("event_loop_stalled_seconds", help, stalls.stalled_seconds)

    def _count_doors(self, counted: Counted) -> None:
        for door, open_now, ever in self._doors():
            counted.gauge("connections", "Connections open.", open_now, door=door)
            counted.counter("connections_accepted", "Connections ever made.", ever, door=door)
        counted.counter(
            "http_answers_seconds",
            "Processor time of the event loop for answers at the HTTP port, and for looking at the "
            "figures once a second.",
            self.http_seconds(),
        )
        for reason, count in self._engine.cut_off.items():
            counted.counter(
                "disconnected",
                "Connections closed by the bus, by reason.",
                count,
                reason=reason.value,
            )
        if (front := self._front) is not None:
            for name, help, value in (
                ("nats_in_messages", "Messages that NATS clients published.", front.in_messages),
                ("nats_in_bytes", "Their headers and payloads.", front.in_bytes),
                ("nats_out_messages", "Messages sent to NATS clients.", front.out_messages),
                ("nats_denied", "What permissions did not allow.", front.denied),
                ("nats_slow_consumers", "Clients that took too little.", front.slow_consumers),
            ):
                counted.counter(name, help, value)
            counted.gauge("nats_subscriptions", "Of NATS clients.", front.subscriptions)
            counted.gauge("nats_pending_bytes", "Waiting for NATS clients.", front.pending_bytes)

    def _count_journal(self, counted: Counted) -> None:
        engine = self._engine
        if engine.keeping is not None:
            _count_journal(counted, engine.keeping.statistics())
        if engine.cluster is not None:
            cluster = engine.cluster
            uplink = cluster.uplink.statistics()
            counted.gauge("engine_up", "Whether the cluster is reached.", cluster.link.is_ready)
            counted.gauge("engine_lots", "Lots that have not reached it.", uplink.lots)
            counted.gauge(
                "engine_under_way_messages", "Published there, not confirmed.", uplink.under_way
            )
            counted.gauge(
                "engine_refused_classes",
                "Classes of which it takes nothing: their publishers wait.",
                len(cluster.refusals),
            )
            for name, help, value in (
                ("engine_stored_messages", "Messages that it has confirmed.", uplink.stored),
                ("engine_duplicate_messages", "Of these, it had them already.", uplink.duplicates),
                ("engine_refused_messages", "Not stored, and sent again.", uplink.refused),
            ):
                counted.counter(name, help, value)


def _count_journal(counted: Counted, journal: JournalStatistics) -> None:
    counted.gauge(
        "journal_level",
        "What a confirm promises: 0 memory, 1 the operating system, 2 the disk.",
        Level(journal.level),
    )
    counted.gauge("journal_failing", "Whether nothing can be written now.", bool(journal.failure))
    for name, help, value in (
        ("journal_lots", "Lots written.", journal.lots_written),
        ("journal_written_bytes", "Bytes of records of messages.", journal.written_bytes),
        ("journal_syncs", "How often files were synced.", journal.syncs),
        ("journal_failures", "How often something could not be written.", journal.failures),
        ("journal_read_bytes", "Bytes of frames read back.", journal.read_bytes),
        ("journal_read_failures", "How often they could not be.", journal.read_failures),
    ):
        counted.counter(name, help, value)
    for name, help, value in (
        ("journal_pending_lots", "Lots under way.", journal.lots),
        ("journal_held_bytes", "Bytes of frames not written yet.", journal.held_bytes),
        ("journal_lagging_sessions", "Sessions not read from.", journal.lagging_sessions),
        ("journal_behind", "Subscriptions that are sent what is read back.", journal.behind),
    ):
        counted.gauge(name, help, value)
    counted.histogram(
        "journal_write_seconds",
        "How long writing and syncing took, of what was written at once.",
        journal.synced_after,
    )
