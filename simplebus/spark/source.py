"""Messages as DataFrames: `spark.read` and `spark.readStream`, `.format("simplebus")`.

Rule 1: no decisions here: options, offsets, planner and columns decide, `bus` asks.
Rule 2: an executor's reader knows nothing but its task, which says everything.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from simplebus.spark.bus import SourceBus
from simplebus.spark.columns import DDL, HEADERS_DDL, Shape, record_batch
from simplebus.spark.offsets import resolve
from simplebus.spark.options import SourceOptions, source_options
from simplebus.spark.planner import Plan, Range, plan, split

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("simplebus.spark")


class SimplebusSource(DataSource):
    """Messages of a bus as rows, and rows as messages.

    >>> rows = (
    ...     spark.read.format("simplebus")
    ...     .option("servers", "127.0.0.1:8888")
    ...     .option("subscribe", "7,orders")
    ...     .load()
    ... )

    Columns, as a Kafka source has them: key, value, topic (the class), partition (its id), offset
    (the sequence), timestamp and timestampType (the publisher's clock, if it said), headers with
    the option includeHeaders; and channel and server. What is not there is null.
    """

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "simplebus"

    def schema(self) -> str:
        """The columns. The other options are looked at when it is known what is to be done."""
        wanted = self.options.get("includeHeaders", "false").strip().lower()
        return f"{DDL}, {HEADERS_DDL}" if wanted == "true" else DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        return BatchReader(source_options(self.options, streaming=False))


@dataclass
class Task(InputPartition):
    """What one task reads."""

    range: Range
    class_id: int
    options: SourceOptions


class BatchReader(DataSourceReader):
    """Reads from startingOffsets to endingOffsets, as they are when the job begins."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[Task]:
        """What there is to read, in tasks."""
        options = self._options
        with Buses(options) as buses:
            memories = {server: bus.memory(options.subscribe) for server, bus in buses.items()}
            start = resolve(options.starting, memories, option="startingOffsets")
            end = resolve(options.ending, memories, option="endingOffsets")
            return tasks(plan(start, end, memories), buses)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's messages."""
        return read_task(partition)


class Buses(contextlib.ExitStack):
    """A connection to each of the servers, as a block."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__()
        self.options = options
        self._buses: dict[str, SourceBus] = {}

    def __enter__(self) -> Buses:
        try:
            for server in self.options.servers:
                bus = SourceBus(server, timeout=self.options.timeout)
                self._buses[server] = self.enter_context(bus)
        except BaseException:
            self.close()
            raise
        return self

    def __getitem__(self, server: str) -> SourceBus:
        return self._buses[server]

    def items(self) -> Iterator[tuple[str, SourceBus]]:
        """Each server and its connection."""
        return iter(self._buses.items())


def tasks(found: Plan, buses: Buses) -> list[Task]:
    """A plan as tasks. What is lost raises DataLossError, or is logged, as the options say."""
    options = buses.options
    if options.fail_on_data_loss:
        found.check()
    for loss in found.losses:
        log.warning("%s", loss)
    ranges = split(found.ranges, most=options.partition_messages, at_least=options.min_partitions)
    return [Task(one, buses[one.server].class_id(one.class_), options) for one in ranges]


def read_task(task: Any) -> Iterator[pa.RecordBatch]:
    """The messages of a task, in columns."""
    options: SourceOptions = task.options
    wanted: Range = task.range
    shape = Shape(
        server=wanted.server,
        topic=wanted.class_,
        class_id=task.class_id,
        channels=options.channels,
        include_headers=options.include_headers,
    )
    with SourceBus(wanted.server, timeout=options.timeout) as bus:
        for frames in bus.read(wanted, strict=options.fail_on_data_loss):
            yield record_batch(frames, shape)
