"""A stream of messages: where a query stands, how far its next batch goes, what the bus keeps.

Rule 1: asking moves nothing. Only what Spark says is finished moves the pin: `commit`, and the
start of the next batch, which is the end of the last one that is finished and is told at times when
`commit` is not. What a batch that is being planned begins with is never beyond that.
Rule 2: this object lives in one process on the driver, as long as the query runs; it connects when
it is first asked something, for Spark also makes it elsewhere, only to have it read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from simplebus.core.errors import BusConnectionError
from simplebus.spark.awake import Awake
from simplebus.spark.buses import Buses
from simplebus.spark.offsets import Memory, Position, dump, load, merge, resolve
from simplebus.spark.options import SourceOptions
from simplebus.spark.pin import Pin
from simplebus.spark.planner import at_most, ends, firsts, lag, plan
from simplebus.spark.tasks import read_task, tasks

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("simplebus.spark")

Dumped = dict[str, Any]
"""Offsets as Spark keeps them."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """For `spark.readStream`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._buses = Buses(options)
        self._awake: Awake | None = None
        """None before the first question. A lock does not travel to executors."""
        self._pins: dict[str, Pin] = {}
        self._first_pins: dict[str, Pin] = {}
        """Keep what the query begins with until it has begun."""
        self._target: dict[str, Position] | None = None
        """Where the query is to end; None for nowhere."""
        self._heads: Dumped | None = None
        """The ends of the classes when they were looked at last."""

    # Where the query stands ----------------------------------------------------------------------

    def initialOffset(self) -> Dumped:  # noqa: N802
        """Where a query begins that has no checkpoint. Asked of every query."""
        with self._using():
            options = self._options
            memories = self._memories(strict=True, make=False)
            start = resolve(options.starting, memories, option="startingOffsets")
            for server, position in start.items():
                pin = self._first_pins[server] = Pin(self._buses[server], "")
                moved = {name: pin.move(name, at) for name, at in position.classes.items()}
                if options.starting == "earliest":  # Others may have let go of some meanwhile.
                    start[server] = Position(position.bus, moved)
            return dump(start)

    def latestOffset(self, start: Dumped, limit: ReadLimit) -> Dumped:  # noqa: N802
        """How far the next batch goes. Everything before start is processed."""
        with self._using():
            memories = self._memories(strict=self._options.fail_on_data_loss)
            before = load(start)
            position = before | merge(
                {server: before[server] for server in memories if server in before}, memories
            )
            self._keep(position, memories)
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            end = position | ends(position, memories, most)
            if self._target is not None:
                end = at_most(end, self._target)
            self._heads = dump(position | ends(position, memories))
            if log.isEnabledFor(logging.DEBUG):
                for (server, name), waiting in lag(end, memories).items():
                    log.debug("%d messages of class %s at %s wait", waiting, name, server)
            return dump(end)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How much a batch may have."""
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> Dumped | None:  # noqa: N802
        """The ends of the classes: what a query's progress shows beside where it is."""
        return self._heads

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """The query is to end with what is there now."""
        with self._using():
            memories = self._memories(strict=self._options.fail_on_data_loss)
            self._target = resolve("latest", memories, option="latest")

    # What is read --------------------------------------------------------------------------------

    def partitions(self, start: Dumped, end: Dumped) -> Sequence[InputPartition]:
        """The tasks of a batch, which may be one that failed."""
        with self._using():
            memories = self._memories(strict=self._options.fail_on_data_loss)
            before = load(start)
            if not any(pin.is_held for pin in self._pins.values()):
                self._keep(before, memories)
            return tasks(plan(before, load(end), memories), self._buses)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's messages."""
        return read_task(partition)

    # What is kept --------------------------------------------------------------------------------

    def commit(self, end: Dumped) -> None:
        """Everything before end is processed."""
        with self._using():
            self._keep(load(end), self._memories(strict=self._options.fail_on_data_loss))

    def stop(self) -> None:
        """The query is over, for now."""
        if self._awake is not None:
            self._awake.stop()
        self._buses.close()

    def _using(self) -> threading.RLock:
        """To be held by who uses the connections."""
        if self._awake is None:
            self._awake = Awake(self._buses)
            self._awake.start()
        return self._awake.lock

    def _keep(self, offsets: dict[str, Position], memories: dict[str, Memory]) -> None:
        """Have the buses keep what lies behind these offsets, and nothing before them."""
        for (server, name), first in firsts(offsets, memories).items():
            pin = self._pins.get(server)
            if pin is None:
                pin = self._pins[server] = Pin(self._buses[server], self._options.durable)
            pin.move(name, first)
        for server in [server for server in self._first_pins if server in memories]:
            self._first_pins.pop(server).release()

    def _memories(self, *, strict: bool, make: bool = True) -> dict[str, Memory]:
        """What the buses hold. One that does not answer raises BusConnectionError if `strict`;
        else it is logged and left out."""
        found = {}
        for server in self._options.servers:
            try:
                found[server] = self._buses[server].memory(self._options.subscribe, make=make)
            except BusConnectionError as error:
                self._pins.pop(server, None)
                self._first_pins.pop(server, None)
                self._buses.drop(server)
                if strict:
                    raise
                log.warning("%s is left out: %s", server, error)
        return found
