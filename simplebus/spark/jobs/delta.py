"""Archive as a Delta table, written by delta-rs: one transaction makes a batch visible.

A transaction carries query and batch, so a committed batch is recognized and not written again.
Files of an attempt without a transaction are not part of the table. Spark reads the table as the
Parquet files of its newest version.
"""

from __future__ import annotations

import json
import re
from datetime import date
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from simplebus.core.broker.wait_reasons import format_count
from simplebus.spark.jobs.archive_commit import ArchiveFiles
from simplebus.spark.jobs.archive_layout import (
    NO_VALUE,
    PARTITION_COLUMNS,
    ArchiveError,
    ArchiveFile,
    partition_values,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG = "_delta_log"


def transaction_app_id(query: str) -> str:
    """Return the application id of a query's transactions."""
    return f"simplebus archive {query}"


class DeltaTableWriter:
    """Delta table, created with the first batch. `ddl` has its columns."""

    def __init__(
        self,
        uri: str,
        ddl: str,
        storage: dict[str, str] | None = None,
        partition_columns: tuple[str, ...] = PARTITION_COLUMNS["day"],
    ) -> None:
        self._uri, self._ddl, self._storage = uri.removeprefix("file:"), ddl, storage
        self._partition_columns = list(partition_columns)
        self._open: Any = None

    def _table(self, *, create: bool = False) -> Any:
        """Return the table's current version; None if it does not exist and `create` is false."""
        from deltalake import DeltaTable

        if self._open is not None:
            self._open.update_incremental()
        elif DeltaTable.is_deltatable(self._uri, self._storage):
            self._open = DeltaTable(self._uri, storage_options=self._storage)
        elif create:
            self._open = DeltaTable.create(
                self._uri,
                self._schema(),
                mode="ignore",
                partition_by=self._partition_columns,
                storage_options=self._storage,
            )
        return self._open

    def _schema(self) -> Any:
        from deltalake import Schema
        from pyspark.sql.types import StructType

        # Spark and Delta have the same JSON schema format.
        return Schema.from_json(StructType.fromDDL(self._ddl).json())

    def partition_columns(self) -> tuple[str, ...]:
        """Return the columns that are folder names; empty if the table does not exist."""
        table = self._table()
        return () if table is None else tuple(table.metadata().partition_columns)

    def has_batch(self, query: str, batch: int) -> bool:
        """Return True if a batch is in the table.

        Raises ArchiveError if later batches are, because the query's checkpoint is outdated.
        """
        table = self._table()
        latest = None if table is None else table.transaction_version(transaction_app_id(query))
        if latest is not None and latest > batch:
            raise ArchiveError(
                f"the table has batch {latest} of this query, which continues with batch {batch}: "
                "its checkpoint is older than the table, and messages would be archived twice"
            )
        return latest == batch

    def add_batch(self, query: str, batch: int, files: list[tuple[ArchiveFile, int]]) -> None:
        """Commit a batch, given its files with their row counts."""
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        now = int(time() * 1000)
        actions = [
            AddAction(
                path=file.path,  # Unescaped: delta-rs escapes it.
                size=file.size,
                partition_values=partition_values(file.folder),
                modification_time=now,
                data_change=True,
                stats=json.dumps({"numRecords": rows}),
            )
            for file, rows in files
        ]
        about = CommitProperties(app_transactions=[Transaction(transaction_app_id(query), batch)])
        self._table(create=True).create_write_transaction(
            actions,
            mode="append",
            schema=self._schema(),
            partition_by=self._partition_columns,
            commit_properties=about,
        )

    def delete_days(self, before: date) -> int:
        """Delete the messages of days before this one. Return the number of their files."""
        metrics = self._table().delete(f"date < '{before.isoformat()}'")
        return int(metrics["num_removed_files"])

    def compact(
        self, before: date | None, target_bytes: int, retention_hours: int
    ) -> tuple[int, int, int, str]:
        """Merge small files and remove files unused for `retention_hours`.

        Returns the number of partitions merged, files before, files after, and why none was merged.
        """
        table = self._table()
        chosen = None if before is None else [("date", "<", before.isoformat())]
        metrics = table.optimize.compact(partition_filters=chosen, target_size=target_bytes)
        table.vacuum(retention_hours, dry_run=False, enforce_retention_duration=False, full=True)
        merged = int(metrics["partitionsOptimized"])
        why_nothing = ""
        if not merged:
            days = "" if before is None else f" of days before {before}"
            files = format_count(int(metrics["totalConsideredFiles"]), "file")
            why_nothing = f"the table has {files}{days}, none with another small file in its folder"
        return merged, int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]), why_nothing

    def class_by_file(self) -> dict[str, str | None]:
        """Return the class of each file, by the file's path within the table."""
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


def is_table(files: ArchiveFiles) -> bool:
    """Return True if an archive is a Delta table."""
    return files.exists(LOG)


def read(spark: SparkSession, uri: str, ddl: str) -> DataFrame:
    """Read a table's newest version."""
    classes = DeltaTableWriter(uri, ddl).class_by_file()
    if not classes:
        return spark.createDataFrame([], ddl)
    paths = [f"{uri}/{path}" for path in classes]
    frame = spark.read.schema(ddl).option("basePath", uri).parquet(*paths)
    # delta-rs and Spark escape folder names differently; the log has the true class names.
    class_by_read_name = {_class_read_by_spark(path): name for path, name in classes.items()}
    misread: dict[Any, Any] = {
        reads: name for reads, name in class_by_read_name.items() if reads != name
    }
    return frame.replace(misread, subset=["class"]) if misread else frame


def _class_read_by_spark(path: str) -> str | None:
    """Return the class that Spark reads from a file's folder name."""
    text = path.removeprefix("class=").partition("/")[0]
    if text == NO_VALUE:
        return None
    return re.sub("%([0-9A-Fa-f]{2})", lambda match: chr(int(match[1], 16)), text)
