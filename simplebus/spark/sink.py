"""DataFrames as messages: `frame.write` and `frame.writeStream`, `.format("simplebus")`.

Each task publishes as a publisher of its own, named by query, batch and partition, and row n of the
task is its message number n. The bus remembers how far each name came, so a task that is tried
again goes on where the one before it stopped, and one that is thought to be dead and is not is cut
off by the one that replaces it. So every row is there **once**, as long as

- the rows of a task are the same, and in the same order, when it is tried again. They are, when
  they come from a source or through maps and filters. Behind a shuffle sort them within their
  partitions;
- the bus remembers: for an hour after a task has ended, and for 65,536 names. A batch that Spark
  tries again later than that, or that was cut into more tasks, may be there twice;
- the bus keeps its memory. One that begins anew has lost the messages, too. A task that is busy
  then fails, and is published as a whole when it is tried again, some of its rows for the second
  time;
- no class drops the newest messages when it is full: what the bus refuses has used up its number.
  The task fails and says so, but when it is tried again it goes on behind it.

What a task has published is seen at once, also when its batch fails afterwards and is never tried
again: a bus has no way back.

Rule 1: no decisions here about rows: `rows` makes messages of them.
Rule 2: a task ends when the bus has confirmed its last message.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from simplebus.client.blocking.bus import BlockingBus
from simplebus.spark.keepalive import Awake
from simplebus.spark.options import SinkOptions, class_id
from simplebus.spark.retry import patient_bus
from simplebus.spark.rows import Some, check_columns, messages

if TYPE_CHECKING:
    import pyarrow as pa


class BusRenewedError(Exception):
    """A bus has lost what a task had published."""


@dataclass
class Written(WriterCommitMessage):
    """What one task has done."""

    rows: int
    stored_before: int
    """How many of them an earlier attempt had published."""


def check(schema: StructType, options: SinkOptions, *, overwrite: bool) -> None:
    """Raise ValueError for what cannot be published."""
    if overwrite:
        raise ValueError(
            "a bus cannot be overwritten, messages are added: expected mode append, or update for "
            "a stream"
        )
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    check_columns(types, has_class=bool(options.class_))


class BatchWriter(DataSourceArrowWriter):
    """For `frame.write`. Every job publishes under names of its own."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """One task."""
        return write_task(iterator, self._options, f"spark {self._job} {_partition()}")


class StreamWriter(DataSourceStreamArrowWriter):
    """For `frame.writeStream`."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """One task of one batch."""
        context = _context()
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or batch is None:
            raise RuntimeError("Spark does not say which query and batch this task is of")
        return write_task(iterator, self._options, f"spark {query} {batch} {_partition()}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing is left to be done: the bus has confirmed everything."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What was published stays; the next attempt goes on behind it."""


def _context() -> Any:
    context = TaskContext.get()
    assert context is not None, "a writer works in tasks"
    return context


def _partition() -> int:
    return int(_context().partitionId())


def write_task(rows: Iterator[pa.RecordBatch], options: SinkOptions, name: str) -> Written:
    """Publish what of these rows the bus does not have under this name yet.

    Raises RowError, BusConnectionError, BusRenewedError, and an ExceptionGroup of what the bus
    refused.
    """
    with patient_bus(options.server, timeout=options.timeout) as bus:
        memory = bus.wire.core.bus_id
    # In another memory the numbers of this publisher would be those of other rows.
    name = f"{name} {memory}"
    with patient_bus(options.server, timeout=options.timeout, name=name) as bus:
        core, wire = bus.wire.core, bus.wire
        stored = core.publish_buffer.stored_before_count
        count = 0
        with Awake(lambda: [wire]).kept() as lock:
            for batch in rows:  # Which may be long in coming.
                with lock:
                    done = min(max(0, stored - count), batch.num_rows)
                    first, count = count + done, count + batch.num_rows
                    for some in messages(
                        batch.slice(done), first, class_=options.class_, channel=options.channel
                    ):
                        _publish(bus, some)
                    wire.push()
                    wire.wait_until(lambda: core.has_credit)
        bus.flush()
        if core.bus_id != memory:
            raise BusRenewedError(
                f"the bus at {options.server} has begun anew, with the memory {core.bus_id}, and "
                "lost what this task had published"
            )
        return Written(count, min(stored, count))


def _publish(bus: BlockingBus, some: Some) -> None:
    number = class_id(some.class_)
    number = bus.class_of(some.class_) if number is None else number
    if len(some.payloads) == 1:
        bus.wire.core.publish(some.payloads[0], number, some.envelope)
    else:
        bus.wire.core.publish_many(some.payloads, number, some.envelope)
