"""Simulation of a streaming query without Spark: its order of calls, its two logs, its restarts.

The order is that of a real micro-batch: log the end of the batch, commit the batch before it, plan
and read the tasks, write the rows to the sink, log the batch as done. A restarted query first
repeats an unfinished batch. Offsets travel as JSON and tasks as pickles, as they do in Spark.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

from simplebus.spark.options import source_options
from simplebus.spark.read.stream import SparkStreamReader

POINTS = ("ended", "planned", "reading", "read", "done")
"""Points for faults: the batch has an end, has tasks, is being read, is read, is done."""


class SimulatedQuery:
    """Checkpoint and sink of a query, with a reader while the query runs."""

    def __init__(self, **options: object) -> None:
        self.options = {name: str(value) for name, value in options.items()}
        self.ends: list[str] = []
        """The offset log: end offsets of each batch. The start of the first batch is not logged."""
        self.committed_count = 0
        """The commit log: number of finished batches."""
        self.rows: list[dict[str, Any]] = []
        """Rows of the finished batches."""
        self._reader: SparkStreamReader | None = None
        self._reported_count = 0

    @property
    def reader(self) -> SparkStreamReader:
        """Reader of the query, started on first use."""
        if self._reader is None:
            self._reader = SparkStreamReader(source_options(self.options, streaming=True))
            self._resolve_start = json.dumps(self._reader.initialOffset())
            self._reported_count = self.committed_count
        return self._reader

    def die(self) -> None:
        """Close the connections and nothing else, as if the driver was killed."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    stop = die

    def run(self, at: Callable[[str], None] = lambda point: None) -> list[dict[str, Any]] | None:
        """Run one batch; `at` is called at each point. Returns its rows; None if there was no
        batch.
        """
        reader = self.reader
        start = self.ends[self.committed_count - 1] if self.committed_count else self._resolve_start
        if len(self.ends) == self.committed_count:
            limit = reader.getDefaultReadLimit()
            end = json.dumps(reader.latestOffset(json.loads(start), limit))
            if end == start:
                return None
            self.ends.append(end)
            at("ended")
            if self._reported_count < self.committed_count:
                reader.commit(json.loads(start))
                self._reported_count = self.committed_count
        planned = reader.partitions(json.loads(start), json.loads(self.ends[-1]))
        tasks = pickle.loads(pickle.dumps(list(planned)))
        at("planned")
        found: list[dict[str, Any]] = []
        for task in tasks:
            for batch in reader.read(task):
                found += batch.to_pylist()
                at("reading")
        at("read")
        self.rows += found
        self.committed_count += 1
        at("done")
        return found

    def catch_up(self, at: Callable[[str], None] = lambda point: None) -> None:
        """Run batches until nothing is left to read."""
        while self.run(at) is not None:
            pass

    def counts(self) -> Counter[bytes]:
        """Return the number of copies of each value in the sink."""
        return Counter(row["value"] for row in self.rows)


def call_once_at(point: str, action: Callable[[], object]) -> Callable[[str], None]:
    """Return a callback that runs `action` the first time a batch reaches `point`."""
    waiting = [action]

    def at(reached: str) -> None:
        if reached == point and waiting:
            waiting.pop()()

    return at
