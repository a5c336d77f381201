"""A query as Spark runs it, without Spark: its order of calls, its two logs, its restarts.

Rule 1: the order is that of a real micro-batch: the end of a batch is written down, the batch
before it is committed, the tasks are made and read, the rows go to the sink, the batch is done. A
query that is started again first repeats the batch that was not.
Rule 2: offsets and tasks travel as they do in Spark: as JSON and as pickles.
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
"""Where something may happen: the batch has an end, has tasks, is being read, is read, is done."""


class SimulatedQuery:
    """What a checkpoint and a sink hold, and a reader for as long as it runs."""

    def __init__(self, **options: object) -> None:
        self.options = {name: str(value) for name, value in options.items()}
        self.ends: list[str] = []
        """The offset log: where batch n ends. Nobody writes down where the first one begins."""
        self.done = 0
        """The commit log: batches that are done."""
        self.rows: list[dict[str, Any]] = []
        """Of the batches that are done."""
        self._reader: SparkStreamReader | None = None
        self._told = 0

    @property
    def reader(self) -> SparkStreamReader:
        """Started when it is not."""
        if self._reader is None:
            self._reader = SparkStreamReader(source_options(self.options, streaming=True))
            self._resolve_start = json.dumps(self._reader.initialOffset())
            self._told = self.done
        return self._reader

    def die(self) -> None:
        """As a driver that is killed: its connections break, and nothing else happens."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    stop = die

    def run(self, at: Callable[[str], None] = lambda point: None) -> list[dict[str, Any]] | None:
        """One batch; `at` is called at each point. Returns its rows; None if there was no batch."""
        reader = self.reader
        start = self.ends[self.done - 1] if self.done else self._resolve_start
        if len(self.ends) == self.done:
            limit = reader.getDefaultReadLimit()
            end = json.dumps(reader.latestOffset(json.loads(start), limit))
            if end == start:
                return None
            self.ends.append(end)
            at("ended")
            if self._told < self.done:
                reader.commit(json.loads(start))
                self._told = self.done
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
        self.done += 1
        at("done")
        return found

    def catch_up(self, at: Callable[[str], None] = lambda point: None) -> None:
        """Batches until there is nothing left to read."""
        while self.run(at) is not None:
            pass

    def counts(self) -> Counter[bytes]:
        """How often the sink has each value."""
        return Counter(row["value"] for row in self.rows)


def once(point: str, what: Callable[[], object]) -> Callable[[str], None]:
    """Have something happen the first time that a batch comes to a point."""
    waiting = [what]

    def at(here: str) -> None:
        if here == point and waiting:
            waiting.pop()()

    return at
