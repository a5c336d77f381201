"""Partitions of a batch, and their reading in executors.

A partition contains everything its executor needs: it may run on another machine, and twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from simplebus.spark.arrow_columns import ColumnOptions, to_record_batch
from simplebus.spark.connections import UNREACHABLE_ERRORS, SourceConnections, open_source
from simplebus.spark.options import SourceOptions
from simplebus.spark.read.bus_reader import report_losses
from simplebus.spark.read.planner import LostRange, MessageRange, ReadPlan, split_ranges

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class SparkPartition(InputPartition):
    """Messages that one task reads."""

    range: MessageRange
    class_id: int
    options: SourceOptions


def make_partitions(found: ReadPlan, connections: SourceConnections) -> list[SparkPartition]:
    """Cut a plan into partitions.

    Lost ranges raise DataLossError or are logged, depending on failOnDataLoss.
    """
    options = connections.options
    report_losses(found.losses, strict=options.fail_on_data_loss)
    ranges = split_ranges(
        found.ranges, max_messages=options.max_partition_messages, min_ranges=options.min_partitions
    )
    return [
        SparkPartition(
            message_range, connections[message_range.server].class_id(message_range.class_), options
        )
        for message_range in ranges
    ]


def read_partition(task: Any) -> Iterator[pa.RecordBatch]:
    """Read the messages of a partition as Arrow batches."""
    options: SourceOptions = task.options
    message_range: MessageRange = task.range
    shape = ColumnOptions(
        server=message_range.server,
        topic=message_range.class_,
        class_id=task.class_id,
        channels=options.channels,
        include_headers=options.include_headers,
        memory=message_range.memory_id if options.include_memory else None,
    )
    next_sequence = message_range.first
    try:
        with open_source(
            message_range.server, timeout=options.timeout, retries_connect=True
        ) as bus:
            for frames in bus.read(message_range, strict=options.fail_on_data_loss):
                yield to_record_batch(frames, shape)
                next_sequence = frames.first + frames.count
    except UNREACHABLE_ERRORS as error:
        if options.fail_on_data_loss:
            raise type(error)(f"{message_range} could not be read completely: {error}") from error
        report_losses(
            [
                LostRange(
                    message_range.server,
                    message_range.class_,
                    next_sequence,
                    message_range.last,
                    str(error),
                )
            ],
            strict=False,
        )
