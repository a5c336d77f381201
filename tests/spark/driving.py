"""A query without Spark: its reader is asked what Spark asks, in Spark's order, and its checkpoint
is kept as Spark keeps it, in JSON.

    run      prepare ─ initialOffset ─ [partitions of the batch that was not finished] ─ then:
    batch    latestOffset ─ log ─ commit of the batch before ─ partitions ─ read ─ sink ─ finished
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simplebus.spark.options import source_options
from simplebus.spark.stream import StreamReader
from simplebus.spark.tasks import Task, read_task

Row = tuple[str, str, int]
"""Server, topic, offset."""


class CrashError(Exception):
    """The driver dies here."""


class Driven:
    """A query with a checkpoint and a sink that takes each batch once."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.logged: list[str] = []
        """The end of each batch that was begun."""
        self.finished = 0
        """Batches that were processed."""
        self.batches: list[list[Row]] = []
        self.values: dict[Row, bytes] = {}

    @property
    def rows(self) -> list[Row]:
        """What the sink has, in order of batches."""
        return [row for batch in self.batches for row in sorted(batch)]

    @property
    def offsets(self) -> dict[str, Any]:
        """Where the query stands."""
        found: dict[str, Any] = json.loads(self.logged[-1])
        return found

    def reader(self, **options: object) -> StreamReader:
        given = {name: str(value) for name, value in {**self.options, **options}.items()}
        return StreamReader(source_options(given, streaming=True))

    @contextmanager
    def running(self, *, to_end: bool = True, **options: object) -> Iterator[Run]:
        """The query runs, with further options."""
        reader = self.reader(**options)
        try:
            yield Run(self, reader, to_end=to_end)
        finally:
            reader.stop()

    def run(self, crash: str = "", **options: object) -> list[Row]:
        """Run to the end of what is there. With `crash` the driver dies at that point of its first
        batch. Returns what came."""
        before = len(self.rows)
        with self.running(**options) as run:
            try:
                while run.batch(crash):
                    pass
            except CrashError:
                pass
        return self.rows[before:]


class Run:
    """From one start of a query to its end."""

    def __init__(self, query: Driven, reader: StreamReader, *, to_end: bool) -> None:
        self.query, self.reader = query, reader
        if to_end:
            reader.prepareForTriggerAvailableNow()
        self._initial = json.dumps(reader.initialOffset())

    def batch(self, crash: str = "") -> bool:
        """One batch, if there is one."""

        def reach(point: str) -> None:
            if crash == point:
                raise CrashError

        query, reader = self.query, self.reader
        if len(query.logged) == query.finished:
            start = query.logged[-1] if query.logged else self._initial
            end = json.dumps(reader.latestOffset(json.loads(start), reader.getDefaultReadLimit()))
            if end == start:
                return False
            reach("before log")
            query.logged.append(end)
            reach("logged")
            if query.finished:
                reader.commit(json.loads(query.logged[-2]))
        else:
            start = query.logged[-2] if len(query.logged) > 1 else self._initial
        tasks = reader.partitions(json.loads(start), json.loads(query.logged[-1]))
        reach("planned")
        found = [row for task in tasks for row in self._read(task)]
        reach("read")
        query.batches[query.finished :] = [found]
        reach("sunk")
        query.finished += 1
        return True

    def _read(self, task: Any) -> list[Row]:
        assert isinstance(task, Task)
        rows = []
        for batch in read_task(task):
            for row in batch.select(["server", "topic", "offset", "value"]).to_pylist():
                key = row["server"], row["topic"], row["offset"]
                self.query.values[key] = row["value"]
                rows.append(key)
        return rows


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Begin something beside the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
