"""Source and sinks that pause a query at a point chosen by the test.

They extend the shipped classes and add only the pause. Spark's executors import this module, so a
hold point is a file: a process that finds `NAME.hold` creates `NAME.held` and waits there until it
is killed. Any later process passes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import simplebus
from simplebus.spark.jobs.archive import BatchArchiver
from simplebus.spark.options import sink_options, source_options
from simplebus.spark.read.stream import SparkStreamReader
from simplebus.spark.sink import StreamWriter
from simplebus.spark.source import SimplebusSource


class TaskFailedError(Exception):
    """Simulated failure of a task."""


def hold(place: str) -> None:
    """Make the next process that reaches `place` wait there."""
    Path(f"{place}.hold").touch()


def is_held(place: str) -> bool:
    """Return True if a process is waiting at `place`."""
    return Path(f"{place}.held").exists()


def is_first(place: str) -> bool:
    """Return True if `place` is a hold point and the caller is the first to reach it."""
    if not place or not Path(f"{place}.hold").exists():
        return False
    try:
        with Path(f"{place}.held").open("x") as file:
            file.write(simplebus.__file__)
    except FileExistsError:
        return False
    return True


def package(place: str) -> str:
    """Return the path from which the process waiting at `place` imported simplebus."""
    return Path(f"{place}.held").read_text()


def pass_by(place: str) -> None:
    """Wait at `place` until killed, if it is a hold point that no process has reached before."""
    if is_first(place):
        while True:
            os.read(_NEVER[0], 1)


_NEVER = os.pipe()
"""Pipe without data: a read blocks until the process is killed."""


class HeldSource(SimplebusSource):
    """`format("held")`: the option `at` is the hold point; with `dies` a task dies there."""

    @classmethod
    def name(cls) -> str:
        return "held"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        at = self.options.pop("at", "")
        kind = FailingReader if self.options.pop("dies", "") else HeldReader
        return kind(source_options(self.options, streaming=True), at)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        at = self.options.pop("at", "")
        return HeldWriter(sink_options(self.options), at)


class HeldReader(SparkStreamReader):
    """Reader with a task that waits after its last row, before the sink can commit."""

    def __init__(self, options: Any, at: str) -> None:
        super().__init__(options)
        self._at = at

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield from super().read(partition)
        pass_by(self._at)


class FailingReader(HeldReader):
    """Reader with a task whose first attempt dies after its first rows."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for batch in SparkStreamReader.read(self, partition):
            yield batch
            if is_first(self._at):
                raise TaskFailedError


class HeldWriter(StreamWriter):
    """Writer that waits after its commit, before Spark records the end of the batch."""

    def __init__(self, options: Any, at: str) -> None:
        super().__init__(options)
        self._at = at

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        super().commit(list(messages), batchId)
        pass_by(self._at)


class HeldArchiver(BatchArchiver):
    """Archiver that waits after writing a table, before Spark records the end of the batch."""

    def __init__(self, to: str, at: str) -> None:
        super().__init__(to, format="delta")
        self._at = at

    def __call__(self, frame: Any, batch: int) -> None:
        super().__call__(frame, batch)
        pass_by(self._at)
