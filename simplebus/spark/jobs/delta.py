"""An archive as a Delta table, by delta-rs: what a batch wrote becomes visible by one transaction.

Rule 1: a transaction carries its query and batch. A batch whose transaction is there is done, and
is not written again; what an attempt without a transaction left is no part of the table.
Rule 2: Spark reads the table as the Parquet files that its newest version consists of.
"""

from __future__ import annotations

import json
import re
from datetime import date
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from simplebus.spark.jobs.archive_commit import Files
from simplebus.spark.jobs.archive_layout import NO_VALUE, PARTITIONS, ArchiveError, File, values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG = "_delta_log"


def app_id(query: str) -> str:
    """What a query's transactions are found by."""
    return f"simplebus archive {query}"


class Table:
    """A Delta table, made when the first batch is added. `ddl` has its columns."""

    def __init__(self, uri: str, ddl: str, storage: dict[str, str] | None = None) -> None:
        self._uri, self._ddl, self._storage = uri.removeprefix("file:"), ddl, storage
        self._open: Any = None

    def _table(self, *, make: bool = False) -> Any:
        """The table as it is now; None when there is none and none is to be made."""
        from deltalake import DeltaTable

        if self._open is not None:
            self._open.update_incremental()
        elif DeltaTable.is_deltatable(self._uri, self._storage):
            self._open = DeltaTable(self._uri, storage_options=self._storage)
        elif make:
            self._open = DeltaTable.create(
                self._uri,
                self._schema(),
                mode="ignore",
                partition_by=list(PARTITIONS),
                storage_options=self._storage,
            )
        return self._open

    def _schema(self) -> Any:
        from deltalake import Schema
        from pyspark.sql.types import StructType

        return Schema.from_json(StructType.fromDDL(self._ddl).json())  # They write it the same way.

    def has(self, query: str, batch: int) -> bool:
        """Whether a batch is in the table.

        Raises ArchiveError when later ones are: the query's checkpoint is an older one.
        """
        table = self._table()
        done = None if table is None else table.transaction_version(app_id(query))
        if done is not None and done > batch:
            raise ArchiveError(
                f"the table has batch {done} of this query, which goes on with batch {batch}: its "
                "checkpoint is older than the table, and messages would be there twice"
            )
        return done == batch

    def add(self, query: str, batch: int, files: list[tuple[File, int]]) -> None:
        """Add a batch: its files, and how many rows each has."""
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        now = int(time() * 1000)
        actions = [
            AddAction(
                path=file.path,  # As it is: the log's way of writing it is delta-rs's business.
                size=file.size,
                partition_values=values(file.folder),
                modification_time=now,
                data_change=True,
                stats=json.dumps({"numRecords": rows}),
            )
            for file, rows in files
        ]
        about = CommitProperties(app_transactions=[Transaction(app_id(query), batch)])
        self._table(make=True).create_write_transaction(
            actions,
            mode="append",
            schema=self._schema(),
            partition_by=list(PARTITIONS),
            commit_properties=about,
        )

    def compact(
        self, before: date | None, target_bytes: int, retention_hours: int
    ) -> tuple[int, int, int]:
        """Merge small files, and remove what no version of late knows. Returns in how many
        partitions, how many files there were, and how many they became."""
        table = self._table()
        chosen = None if before is None else [("date", "<", before.isoformat())]
        done = table.optimize.compact(partition_filters=chosen, target_size=target_bytes)
        table.vacuum(retention_hours, dry_run=False, enforce_retention_duration=False, full=True)
        merged = int(done["partitionsOptimized"])
        return merged, int(done["numFilesRemoved"]), int(done["numFilesAdded"])

    def classes(self) -> dict[str, str | None]:
        """Its files, within the table, and of which class each is."""
        import pyarrow as pa

        table = self._table()
        if table is None:
            return {}
        actions = pa.table(table.get_add_actions(flatten=True))
        paths, classes = actions.column("path"), actions.column("partition.class")
        return {
            unquote(path): name
            for path, name in zip(paths.to_pylist(), classes.to_pylist(), strict=True)
        }


def is_table(files: Files) -> bool:
    """Whether an archive is a Delta table."""
    return files.exists(LOG)


def read(spark: SparkSession, uri: str, ddl: str) -> DataFrame:
    """What a table holds now."""
    classes = Table(uri, ddl).classes()
    if not classes:
        return spark.createDataFrame([], ddl)
    paths = [f"{uri}/{path}" for path in classes]
    frame = spark.read.schema(ddl).option("basePath", uri).parquet(*paths)
    # Folders that delta-rs names are escaped in another way than Spark's: the log knows better.
    said = {_spark_reads(path): name for path, name in classes.items()}
    misread: dict[Any, Any] = {reads: name for reads, name in said.items() if reads != name}
    return frame.replace(misread, subset=["class"]) if misread else frame


def _spark_reads(path: str) -> str | None:
    """The class of a file as Spark reads it from the folder's name."""
    text = path.removeprefix("class=").partition("/")[0]
    if text == NO_VALUE:
        return None
    return re.sub("%([0-9A-Fa-f]{2})", lambda match: chr(int(match[1], 16)), text)
