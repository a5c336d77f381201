"""Traces of the load generators, converted to tables for `simplebus pipeline report`.

simplebus/spark/jobs/report/traces.py defines the tables, generator/trace.c the files. Each
measurement gives one Parquet file, each run a _run.json. A folder holds one run only, since rounds
of two runs could not be told apart.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from load.processes import LoadError
from simplebus.spark.jobs.report.traces import COLUMNS, RUN_FILE

MAGIC = b"sbtrace1"
HEAD_BYTES = len(MAGIC) + 8
RECORD = np.dtype(
    [
        ("at", "<u8"),
        ("first", "<u8"),
        ("last", "<u8"),
        ("class", "<u2"),
        ("kind", "u1"),
        ("nothing", "V5"),
    ]
)
KINDS = ("sent", "confirmed", "delivered", "acked", "redelivered")
"""Kinds in the order of the generator's codes."""

Records = npt.NDArray[np.void]


def read_records(path: Path) -> Records:
    """Return the records of one generator's file. Raises LoadError."""
    data = path.read_bytes()
    count = int.from_bytes(data[len(MAGIC) : HEAD_BYTES], "little")
    whole = HEAD_BYTES + count * RECORD.itemsize
    if data[: len(MAGIC)] != MAGIC or len(data) != whole:
        raise LoadError(f"{path} holds {len(data)} bytes and is no trace of a generator")
    return np.frombuffer(data, RECORD, offset=HEAD_BYTES)


@dataclass(frozen=True)
class _Process:
    """One generator that wrote a trace."""

    name: str
    subscriber: str | None
    path: Path


@dataclass(frozen=True)
class Tracer:
    """Traces of one measurement, in its own folder."""

    directory: Path
    processes: list[_Process] = field(default_factory=list)

    def option(self, name: str, *, subscriber: str | None = None) -> dict[str, object]:
        """Return the generator's option to write a trace.

        `subscriber` is the generator's name as a subscriber; without it, only sent messages are
        recorded.
        """
        process = _Process(name, subscriber, self.directory / f"{name}.trace")
        self.processes.append(process)
        return {"trace": process.path}

    def table(self, scenario: str, variant: str, round_: int) -> Any:
        """Return all records as an Arrow table; times start at the first record."""
        import pyarrow as pa

        records = [read_records(process.path) for process in self.processes]
        started_at = min((int(rows["at"].min()) for rows in records if rows.size), default=0)
        tables = []
        for process, rows in zip(self.processes, records, strict=True):
            count = rows.size
            subscriber = np.where(rows["kind"] == KINDS.index("sent"), None, process.subscriber)
            columns = {
                "scenario": pa.repeat(scenario, count),
                "variant": pa.repeat(variant, count),
                "round": pa.array(np.full(count, round_, np.int32)),
                "process": pa.repeat(process.name, count),
                "subscriber": pa.array(subscriber, pa.string()),
                "kind": pa.array(KINDS).take(pa.array(rows["kind"])),
                "class": pa.array(rows["class"]).cast(pa.string()),
                "at": pa.array(rows["at"].astype(np.int64) - started_at),
                "first": pa.array(rows["first"].astype(np.int64)),
                "last": pa.array(rows["last"].astype(np.int64)),
            }
            tables.append(pa.table({name: columns[name] for name in COLUMNS}))
        return pa.concat_tables(tables)


def prepare(directory: Path) -> None:
    """Create a folder for a run's traces. Raises LoadError if it is not empty."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise LoadError(f"{directory} is not empty: every run needs a folder of its own")


def write_table(directory: Path, table: Any, scenario: str, variant: str, round_: int) -> None:
    """Write one measurement's file."""
    import pyarrow.parquet as pq

    name = re.sub(r"[^a-z0-9]+", "-", f"{scenario} {variant} {round_}".lower()).strip("-")
    pq.write_table(table, directory / f"{name}.parquet", compression="zstd")


def write_run(directory: Path, found: dict[str, Any]) -> None:
    """Write the description and results of a run beside its traces."""
    (directory / RUN_FILE).write_text(json.dumps(found, indent=1) + "\n")
