"""What executors read: a plan cut into tasks, and a task done.

Rule 1: a task says everything that its executor needs to know: it runs in another process, perhaps
on another machine, and perhaps twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from simplebus.spark.arrow_columns import Shape, record_batch
from simplebus.spark.connections import UNREACHED, Buses, source_at
from simplebus.spark.options import SourceOptions
from simplebus.spark.read.bus_reader import lose
from simplebus.spark.read.planner import Loss, Plan, Range, split

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Task(InputPartition):
    """What one task reads."""

    range: Range
    class_id: int
    options: SourceOptions


def tasks(found: Plan, buses: Buses) -> list[Task]:
    """A plan as tasks. What is lost raises DataLossError, or is logged, as the options say."""
    options = buses.options
    lose(found.losses, strict=options.fail_on_data_loss)
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
        memory=wanted.bus if options.include_memory else None,
    )
    at = wanted.first
    try:
        with source_at(wanted.server, timeout=options.timeout, patient=True) as bus:
            for frames in bus.read(wanted, strict=options.fail_on_data_loss):
                yield record_batch(frames, shape)
                at = frames.first + frames.count
    except UNREACHED as error:
        if options.fail_on_data_loss:
            raise type(error)(f"{wanted} were not read to their end: {error}") from error
        lose([Loss(wanted.server, wanted.class_, at, wanted.last, str(error))], strict=False)
