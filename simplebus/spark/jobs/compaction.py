"""An archive's many small files become few, while its queries go on.

Rule 1: what is merged, `layout` decides; how it is swapped, so that a death at any step hides
nothing and doubles nothing for long, `tables` does.
Rule 2: before anything is replaced, what replaces it is there and has as many rows.
Rule 3: one compaction at a time works on an archive. The last one that began goes on; one that is
overtaken ends before its next swap.

A program that reads Parquet while a folder is swapped may see some of its messages twice, or miss
a file that it had listed: such programs should read a Delta table, where neither happens.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from simplebus.spark.jobs import delta
from simplebus.spark.jobs.archive import DDL, FILE_DDL
from simplebus.spark.jobs.archive_commit import latest_batches, noted, recover
from simplebus.spark.jobs.archive_commit import swap as swap_files
from simplebus.spark.jobs.archive_layout import (
    OWNER,
    STAGING,
    ArchiveError,
    Merge,
    compacted,
    compaction_staging,
    dump,
    merges,
    swap,
)
from simplebus.spark.jobs.hadoop import HadoopFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TARGET_BYTES = 128 << 20
"""Large enough that opening a file does not show, small enough that a day keeps many cores busy."""
RETENTION_HOURS = 168
_ORDER = ("server", "memory", "offset")


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction has done."""

    folders: int
    files_before: int
    """Of those that were merged."""
    files_after: int

    def __str__(self) -> str:
        return (
            f"{self.files_before:,} files became {self.files_after:,}, in {self.folders:,} folders"
        )


def compact(
    spark: SparkSession,
    path: str,
    *,
    before: date | None = None,
    target_bytes: int = TARGET_BYTES,
    retention_hours: int = RETENTION_HOURS,
    storage: dict[str, str] | None = None,
) -> Compacted:
    """Merge small files of each class and day into some of about `target_bytes`, sorted by server,
    memory and offset. `before` leaves out this day and later ones.

    Of a Delta table, files that no version of the last `retention_hours` knows are removed, too.
    Those of a batch that a query is about to add are such files: 0 is for tables that nobody
    archives to meanwhile.
    Raises ArchiveError.
    """
    files = HadoopFiles(spark, path)
    if delta.is_table(files):
        table = delta.Table(files.root, DDL, storage)
        return Compacted(*table.compact(before, target_bytes, retention_hours))
    if not files.exists(""):
        raise ArchiveError(f"there is no archive at {files.root}")
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"
    _begin(files, run)
    # The files before the batches: of a batch that begins in between no file is listed, and all
    # batches before it are done.
    listed = files.visible()
    found = merges(listed, latest=latest_batches(files), target_bytes=target_bytes, before=before)
    after = 0
    try:
        for number, merge in enumerate(found):
            after += _merge(spark, files, run, number, merge)
    finally:
        files.remove(compaction_staging(run))
    return Compacted(len(found), sum(len(merge.files) for merge in found), after)


def _begin(files: HadoopFiles, run: str) -> None:
    """Take over, and clean up behind those who died."""
    files.remove(OWNER)
    files.write(OWNER, dump({"run": run}))
    recover(files)
    for folder in {file.path.split("/")[2] for file in files.listed(STAGING)}:
        if folder.startswith("compaction-"):
            files.remove(f"{STAGING}/{folder}")


def _merge(spark: SparkSession, files: HadoopFiles, run: str, number: int, merge: Merge) -> int:
    """Do one merge. Returns how many files it made."""
    place = f"{compaction_staging(run)}/{number}"
    frame = spark.read.schema(FILE_DDL).parquet(*[files.uri(path) for path in merge.files])
    if merge.outputs == 1:
        frame = frame.coalesce(1)
    else:
        frame = frame.repartitionByRange(merge.outputs, *_ORDER)
    frame.sortWithinPartitions(*_ORDER).write.mode("overwrite").parquet(files.uri(place))
    staged = [file.path for file in files.listed(place) if file.name.startswith("part-")]
    was = sum(files.measured(path)[1] for path in merge.files)
    became = sum(files.measured(path)[1] for path in staged)
    if was != became:
        raise ArchiveError(
            f"{len(merge.files)} files of {merge.folder} have {was:,} rows, and what was to "
            f"replace them has {became:,}: nothing was replaced"
        )
    if noted(files, OWNER).get("run") != run:
        raise ArchiveError(f"another compaction has taken over at {files.root}; this one ends here")
    swap_files(files, swap(run, number), compacted(merge.folder, run, number, staged), merge.files)
    return len(staged)
