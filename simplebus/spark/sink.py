"""Batch and stream writers of `format("simplebus")`: they publish rows as messages.

Each task has its own publisher name, made of query, batch, partition and the memory id of the bus.
In a batch write, the option publisher takes the place of query and batch, so that a write that is
repeated with this option is stored once.
Row n is message number n, so the bus discards the rows that an earlier attempt of the task stored.
A retried task replaces the connection of a previous attempt that still runs. Each row is stored
**once** if

- a retry has the same rows in the same order, as rows from a source, maps and filters do; sort rows
  within their partitions after a shuffle;
- the bus still has the producer state: it keeps 65,536 names, each for an hour after its task. A
  later retry, or a batch with more tasks, may store rows twice;
- the bus keeps its data. A running task fails if the bus lost it, and the retry publishes all rows,
  some for the second time;
- no class uses `drop_newest`. A refused message uses up its number: the task fails, and its retry
  continues after that message.

Published messages are visible at once, also if their batch fails and is never retried. The
connector in Java writes under the same names and numbers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from simplebus.client.blocking.bus import BlockingBus
from simplebus.client.blocking.connect import connect_blocking
from simplebus.core.errors import RefusedError
from simplebus.spark.error_reports import report_without_traceback
from simplebus.spark.json_payloads.encoder import check_json_type
from simplebus.spark.keepalive import ConnectionKeepalive
from simplebus.spark.options import SinkOptions, class_id
from simplebus.spark.retry import connect_with_retry
from simplebus.spark.rows import RowRun, check_columns, message_runs

if TYPE_CHECKING:
    import pyarrow as pa


# Timeout of a connection without retries: the user who starts a write waits for it.
_CONNECT_SECONDS = 5.0


class BusResetError(Exception):
    """The bus lost its data, and with it the messages that this task published."""


@dataclass
class TaskWriteResult(WriterCommitMessage):
    """Result of one task."""

    rows: int
    stored_before: int
    """Rows that an earlier attempt of the task had published."""


def check_sink(schema: StructType, options: SinkOptions, *, overwrite: bool) -> None:
    """Raise ValueError if rows with this schema cannot be published."""
    if overwrite:
        raise ValueError("a bus cannot be overwritten, messages are added: expected mode append")
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    check_columns(types, has_class=bool(options.class_), is_json=options.is_json)
    if options.is_json:
        check_json_type(schema["value"].dataType)


class BatchWriter(DataSourceArrowWriter):
    """Writer for `frame.write`. Each job has its own publisher names, unless the option publisher
    is set.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._job = options.publisher or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWriteResult:
        """Publish the rows of one task."""
        with report_without_traceback():
            return write_task(iterator, self._options, task_publisher(self._job, _partition()))


class StreamWriter(DataSourceStreamArrowWriter):
    """Writer for `frame.writeStream`."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWriteResult:
        """Publish the rows of one task of one batch."""
        context = _context()
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or batch is None:
            raise RuntimeError("Spark did not set the query id and batch id of this task")
        name = task_publisher(f"{query} {batch}", _partition())
        with report_without_traceback():
            return write_task(iterator, self._options, name)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: the bus has confirmed every message.

        Raises:
            ValueError: Tasks have no result. With a continuous trigger, Spark passes no rows to a
                sink in Python.
        """
        if None in messages:
            with report_without_traceback():
                raise ValueError(
                    f"batch {batchId} has tasks without a result, as with a continuous trigger; "
                    "expected the trigger processingTime or availableNow"
                )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: published messages stay, and the next attempt continues after them."""


def _context() -> Any:
    context = TaskContext.get()
    assert context is not None, "a writer runs inside a Spark task"
    return context


def _partition() -> int:
    return int(_context().partitionId())


def task_publisher(job: str, partition: int) -> str:
    """Return the publisher name of a task, without the memory id of the bus.

    Args:
        job: Option publisher or random id of a batch write; query and batch of a stream.
        partition: Number of the task.
    """
    return f"spark {job} {partition}"


def check_bus(options: SinkOptions) -> None:
    """Connect to the bus and create the class, without retries.

    So a wrong option fails before tasks start.

    Raises:
        BusConnectionError: The bus cannot be reached within seconds.
        ValueError: The bus refuses the class.
    """
    with connect_blocking(options.server, timeout=min(options.timeout, _CONNECT_SECONDS)) as bus:
        if options.class_:
            try:
                _resolve_class(bus, options.class_)
            except RefusedError as error:
                raise ValueError(
                    f"cannot write to {options.server}: {error.sentence}; check the option class "
                    "and the permissions of the user"
                ) from None


def count_stored(options: SinkOptions, partition: int) -> int:
    """Return how many rows of a partition a batch write with this publisher has stored.

    An unfinished write with the same publisher loses its connection.

    Raises:
        BusConnectionError: The bus cannot be reached within seconds.
    """
    timeout = min(options.timeout, _CONNECT_SECONDS)
    with connect_blocking(options.server, timeout=timeout) as bus:
        memory = bus.connection.core.bus_id
    name = f"{task_publisher(options.publisher, partition)} {memory}"
    with connect_blocking(options.server, name=name, instance=name, timeout=timeout) as bus:
        return bus.connection.core.publish_buffer.stored_before_count


def write_task(rows: Iterator[pa.RecordBatch], options: SinkOptions, name: str) -> TaskWriteResult:
    """Publish the rows that the bus does not yet have under this publisher name.

    Args:
        rows: Arrow batches with the sink's columns.
        options: The bus, and the defaults for class and channel.
        name: Publisher name of the task; the memory id of the bus is appended.

    Returns:
        How many rows the task had, and how many an earlier attempt had stored.

    Raises:
        RowError: A row is not a valid message.
        BusConnectionError: The bus could not be reached within the timeout, or another attempt of
            the task has published meanwhile.
        BusResetError: The bus lost its data while the task ran.
        ExceptionGroup: The bus refused messages.
    """
    with connect_with_retry(options.server, timeout=options.timeout) as bus:
        memory = bus.connection.core.bus_id
    # In a bus that lost its data, this publisher's numbers must start again at 0.
    name = f"{name} {memory}"
    with connect_with_retry(options.server, timeout=options.timeout, name=name) as bus:
        core, wire = bus.connection.core, bus.connection
        # Another attempt may publish while this one has no connection.
        core.publish_buffer.fix_numbers()
        stored = core.publish_buffer.stored_before_count
        count = 0
        with ConnectionKeepalive(lambda: [wire]).running() as lock:
            for batch in rows:  # May block for long; the keepalive sends heartbeats meanwhile.
                with lock:
                    stored_count = min(max(0, stored - count), batch.num_rows)
                    first, count = count + stored_count, count + batch.num_rows
                    for run in message_runs(
                        batch.slice(stored_count),
                        first,
                        class_=options.class_,
                        channel=options.channel,
                        is_json=options.is_json,
                    ):
                        _publish(bus, run)
                    wire.write_now()
                    wire.wait_until(lambda: core.has_credit)
        bus.flush()
        if core.bus_id != memory:
            raise BusResetError(
                f"the bus at {options.server} was reset, has the memory id {core.bus_id} now, and "
                "lost the messages that this task had published; Spark retries the task"
            )
        return TaskWriteResult(count, min(stored, count))


def _resolve_class(bus: BlockingBus, name: str) -> int:
    """Return the id of a class, given as digits or a name. Creates the class if it is new.

    Raises RefusedError if the bus refuses the class.
    """
    number = class_id(name)
    if number is None:
        return bus.resolve_class_id(name)
    core = bus.connection.core
    if not core.publish_buffer.has_class(number):
        bus.connection.request(partial(core.name_classes, number))
    return number


def _publish(bus: BlockingBus, run: RowRun) -> None:
    number = _resolve_class(bus, run.class_)
    if len(run.payloads) == 1:
        bus.connection.core.publish(run.payloads[0], number, run.envelope)
    else:
        bus.connection.core.publish_many(run.payloads, number, run.envelope)
