"""A stream of messages: where a query stands, how far its next batch goes, what the buses keep.

Rule 1: asking moves nothing. Only what Spark says is finished moves what is kept: `commit`, and the
start of the next batch, which is the end of the last one that is finished and is told at times when
`commit` is not. What a batch that is being planned begins with is never beyond that.
Rule 2: this object lives in one process on the driver, as long as the query runs; it connects when
it is first asked something, for Spark also makes it elsewhere, only to have it read.
Rule 3: Spark asks every query where it begins, also one whose checkpoint says where it stands, and
one whose first batch is repeated. So the answer is only an answer: it fails nothing by itself, and
it counts as the beginning when a batch is planned from it. The end of that batch says where it
began, and what is planned later goes by that.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from simplebus.spark.batch_size import Pace
from simplebus.spark.connections import UNREACHED, Buses
from simplebus.spark.keepalive import Awake
from simplebus.spark.options import SourceOptions, is_path
from simplebus.spark.read.bus_reader import ClassMissingError, lose
from simplebus.spark.read.offsets import (
    BusExtent,
    OffsetError,
    Position,
    Query,
    check_apart,
    dump,
    load,
    load_query,
    merge,
    resolve,
)
from simplebus.spark.read.planner import at_most, ends, lag, overtaken, plan
from simplebus.spark.read.retention_durable import Keeping, NotKeeping
from simplebus.spark.read.tasks import read_task, tasks
from simplebus.spark.read.time_offsets import option_of, sought

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("simplebus.spark")

Dumped = dict[str, Any]
"""Offsets as Spark keeps them."""

# Spark asks again at once, and a hundred questions a second cost a bus an eighth of its rate.
_IDLE_SECONDS = 0.1
# A bus that did not answer, and is left out, is tried again so much later.
_AWAY_SECONDS = 5.0


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """For `spark.readStream`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._buses = Buses(options)
        self._keeping = NotKeeping() if options.is_of_journals else Keeping(self._buses)
        self._awake: Awake | None = None
        """None before the first question. A lock does not travel to executors."""
        self._fresh = Query(uuid.uuid4().hex)
        """What a query is called that begins here."""
        self._problem: Exception | None = None
        """Why it cannot begin here."""
        self._is_known = False
        """Whether the query's checkpoint was looked through for what is not read any more."""
        self._is_to_end = False
        self._target: dict[str, Position] | None = None
        """Where the query is to end; None for nowhere, or when nobody has looked yet."""
        self._pace = Pace(least=options.min_offsets, max_delay=options.max_delay)
        self._heads: Dumped | None = None
        """The ends of the classes when they were looked at last."""
        self._away: dict[str, float] = {}
        """Buses that did not answer, and when they are tried again."""

    # Where the query stands ----------------------------------------------------------------------

    def initialOffset(self) -> Dumped:  # noqa: N802
        """Where a query begins that has no checkpoint. Asked of every query."""
        query = replace(self._fresh, durable=self._durable(self._fresh))
        with self._using():
            self._problem = None
            try:
                return dump(self._beginning(), query)
            except (*UNREACHED, ClassMissingError, OffsetError) as error:
                self._problem = error
                return dump({}, query)

    def _beginning(self) -> dict[str, Position]:
        options = self._options
        starting = sought(options.starting, self._buses)
        memories = self._memories(strict=True, make=False)
        option = option_of(options.starting, "startingOffsets")
        start = resolve(starting, memories, option=option)
        for server, position in start.items():
            is_all = starting == "earliest"
            stays = bool(self._durable(self._fresh))  # Who only looks takes nothing from others.
            moved = self._keeping.begin(server, position.classes, with_waiting=is_all and stays)
            if is_all:  # Others may have let go of some meanwhile.
                start[server] = Position(position.bus, moved)
        return start

    def latestOffset(self, start: Dumped, limit: ReadLimit) -> Dumped:  # noqa: N802
        """How far the next batch goes. Everything before start is processed."""
        with self._using():
            query = self._begun(start)
            memories = self._memories(strict=self._options.fail_on_data_loss)
            position = self._position(start, memories)
            lose(overtaken(position, memories), strict=self._options.fail_on_data_loss)
            self._keep(position, memories, self._durable(query))
            self._forget_others(start)
            heads = position | ends(position, memories)
            self._heads = dump(heads)
            waiting = lag(position, memories)
            for (server, name), count in waiting.items():
                log.debug("%d messages of class %s at %s wait", count, name, server)
            if not (self._is_to_end or any(waiting.values())) and query is not None and query.began:
                sleep(_IDLE_SECONDS)
            if self._is_to_end:
                if self._target is None:
                    self._target = heads
            elif not self._pace.is_due(sum(waiting.values()), monotonic()):
                return start
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            end = position | ends(position, memories, most)
            if self._target is not None:
                end = at_most(end, self._target)
            return dump(end, self._going_on(query, position))

    def _begun(self, start: Dumped) -> Query | None:
        """What the query that stands at start says of itself, with the name that it is to have now;
        None if it says nothing, as in a checkpoint of before there were names. Raises what was
        wrong with the answer if start is where it was to begin."""
        query = load_query(start)
        if query is None:
            return None
        if query.id == self._fresh.id and not query.began and self._problem is not None:
            raise self._problem
        return replace(query, durable=self._durable(query))

    def _going_on(self, query: Query | None, position: dict[str, Position]) -> Query:
        """What the query says of itself at the end of a batch that begins there."""
        if query is None:
            query = replace(self._fresh, durable=self._durable(self._fresh))
        return query if query.began else replace(query, began=position)

    def _durable(self, query: Query | None) -> str:
        """The name under which buses keep what the query has not processed."""
        given = self._options.durable
        if given is not None:
            return given
        return "" if query is None else f"spark {query.id}"

    def _position(self, start: Dumped, memories: dict[str, BusExtent]) -> dict[str, Position]:
        """Start, for what is read now. A bus that does not answer stays where it is."""
        before = load(start)
        away = {
            server: before[server]
            for server in self._options.servers
            if server in before and server not in memories
        }
        return away | merge(before, memories)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How much a batch may have."""
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> Dumped | None:  # noqa: N802
        """The ends of the classes: what a query's progress shows beside where it is."""
        return self._heads

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """The query is to end with what is there when it is first asked how far it goes."""
        self._is_to_end = True

    # What is read --------------------------------------------------------------------------------

    def partitions(self, start: Dumped, end: Dumped) -> Sequence[InputPartition]:
        """The tasks of a batch, which may be one that failed."""
        with self._using():
            query, before = load_query(end), load(start)
            said = load_query(start)
            if query is not None and (said is None or said.id != query.id):
                before = dict(query.began)  # The first batch again: start is a new answer.
            else:
                self._begun(start)
            memories = self._memories(strict=self._options.fail_on_data_loss)
            if not self._keeping.is_begun:
                self._keep(before, memories, self._durable(query))
            goal = load(end)
            if self._heads is None:  # Nobody has asked yet how far a batch goes: this one failed.
                self._heads = dump(goal | ends(goal, memories))
            return tasks(plan(before, goal, memories), self._buses)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's messages."""
        return read_task(partition)

    # What is kept --------------------------------------------------------------------------------

    def commit(self, end: Dumped) -> None:
        """Everything before end is processed."""
        with self._using():
            memories = self._memories(strict=self._options.fail_on_data_loss)
            self._keep(load(end), memories, self._durable(load_query(end)))

    def _keep(
        self, offsets: dict[str, Position], memories: dict[str, BusExtent], durable: str
    ) -> None:
        try:
            self._keeping.keep(offsets, memories, durable)
        except UNREACHED as error:
            if self._options.fail_on_data_loss:
                raise
            log.warning("a bus keeps what it kept before: %s", error)

    def _forget_others(self, start: Dumped) -> None:
        """Have the buses let go of what was kept for what the query does not read any more: of
        classes and buses that are gone from its options, or under another name."""
        query, options = load_query(start), self._options
        if self._is_known or query is None or not query.durable:
            return
        self._is_known = True
        for server, position in load(start).items():
            classes = list(position.classes)
            if server in options.servers and query.durable == self._durable(query):
                classes = [name for name in classes if name not in options.subscribe]
            if classes and not is_path(server):
                Keeping(self._buses).forget(server, classes, query.durable)
            if server not in options.servers:
                self._buses.drop(server)

    def stop(self) -> None:
        """The query is over, for now."""
        if self._awake is not None:
            self._awake.stop()
        self._buses.close()

    def _using(self) -> threading.RLock:
        """To be held by who uses the connections."""
        if self._awake is None:
            self._awake = Awake(self._buses.wires)
            self._awake.start()
        return self._awake.lock

    def _memories(self, *, strict: bool, make: bool = True) -> dict[str, BusExtent]:
        """What the buses hold. One that does not answer raises BusConnectionError if `strict`;
        else it is logged and left out for a while. Raises
        OffsetError for two names of one bus."""
        found = {}
        for server in self._options.servers:
            if not strict and monotonic() < self._away.get(server, 0.0):
                continue
            try:
                found[server] = self._buses[server].memory(self._options.subscribe, make=make)
                self._away.pop(server, None)
            except UNREACHED as error:
                self._keeping.lost(server)
                self._buses.drop(server)
                if strict:
                    raise
                self._away[server] = monotonic() + _AWAY_SECONDS
                log.warning("%s is left out: %s", server, error)
        check_apart(
            {server: memory.bus for server, memory in found.items()}, "bus", self._options.places
        )
        return found
