"""Compaction of an archive: merges many small files into few, while queries continue.

`archive_layout` chooses the files and `archive_commit` swaps them crash-safely. Files are replaced
only after the new ones exist with the same number of rows. Only one compaction works on an archive:
a newer one takes over, and the older one ends before its next swap.

A Parquet reader may see messages twice, or miss a file it had listed, during a swap. Use a Delta
table if this must not occur.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from simplebus.core.broker.wait_reasons import format_count
from simplebus.spark.jobs import delta
from simplebus.spark.jobs.archive import DDL, FILE_DDL
from simplebus.spark.jobs.archive_commit import (
    latest_batches,
    read_manifest,
    recover_swaps,
    swap_files,
)
from simplebus.spark.jobs.archive_layout import (
    OWNER,
    STAGING,
    ArchiveError,
    FileMerge,
    compacted_moves,
    compaction_staging_folder,
    dump_manifest,
    expired_files,
    plan_merges,
    swap_manifest,
)
from simplebus.spark.jobs.hadoop import HadoopArchiveFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TARGET_BYTES = 128 << 20
"""Large enough that opening a file is cheap, small enough that many cores can read one day."""
RETENTION_HOURS = 168
_SORT_COLUMNS = ("server", "memory", "offset")


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """Result of a compaction."""

    folders: int
    files_before: int
    """Number of merged files."""
    files_after: int
    why_nothing: str = ""
    """Reason why no file was merged; empty if some were."""
    deleted: int = 0
    """Number of deleted files."""

    def __str__(self) -> str:
        deleted = f"{format_count(self.deleted, 'file')} deleted; " if self.deleted else ""
        if not self.files_before:
            return f"{deleted}nothing to merge: {self.why_nothing}"
        files, folders = (
            format_count(self.files_before, "file"),
            format_count(self.folders, "folder"),
        )
        return f"{deleted}{files} became {self.files_after:,}, in {folders}"


def compact(
    spark: SparkSession,
    path: str,
    *,
    before: date | None = None,
    delete_before: date | None = None,
    target_bytes: int = TARGET_BYTES,
    retention_hours: int = RETENTION_HOURS,
    storage: dict[str, str] | None = None,
) -> CompactionResult:
    """Merge small files of each folder, sorted by server, memory and offset.

    Args:
        spark: The session.
        path: Path of the archive.
        before: Merge only days before this one; None for all days.
        delete_before: First delete the messages of days before this one; None deletes none. In
            Parquet, files of the latest batch of a query stay, since the query may repeat it.
        target_bytes: Approximate size of a merged file.
        retention_hours: Delta tables only: also remove files that no version of these last hours
            uses. 0 would remove files of a batch that a query is adding.
        storage: Options of delta-rs for an object store.

    Returns:
        How many files in how many folders were merged, or why none was.

    Raises:
        ArchiveError: There is no archive, or another compaction took over.
    """
    files = HadoopArchiveFiles(spark, path)
    if delta.is_table(files):
        table = delta.DeltaTableWriter(files.root, DDL, storage)
        deleted = 0 if delete_before is None else table.delete_days(delete_before)
        return CompactionResult(
            *table.compact(before, target_bytes, retention_hours), deleted=deleted
        )
    if not files.exists(""):
        raise ArchiveError(f"there is no archive at {files.root}")
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"
    _take_over(files, run)
    # List the files before the batches: a batch that starts in between has no listed files, and all
    # batches before it are finished.
    listed = files.list_visible_files()
    latest = latest_batches(files)
    expired: set[str] = set()
    if delete_before is not None:
        expired = expired_files(listed, latest=latest, before=delete_before)
        for expired_path in expired:
            files.remove(expired_path)
        listed = [file for file in listed if file.path not in expired]
    merges, _ = plan = plan_merges(listed, latest=latest, target_bytes=target_bytes, before=before)
    after = 0
    try:
        for number, merge in enumerate(merges):
            after += _merge(spark, files, run, number, merge)
    finally:
        files.remove(compaction_staging_folder(run))
    merged_count = sum(len(merge.files) for merge in merges)
    why_nothing = "" if merges else plan.explain_empty()
    return CompactionResult(len(merges), merged_count, after, why_nothing, len(expired))


def _take_over(files: HadoopArchiveFiles, run: str) -> None:
    """Take over the archive, finish interrupted swaps and remove files of dead compactions."""
    files.remove(OWNER)
    files.write(OWNER, dump_manifest({"run": run}))
    recover_swaps(files)
    for folder in {file.path.split("/")[2] for file in files.list_files(STAGING)}:
        if folder.startswith("compaction-"):
            files.remove(f"{STAGING}/{folder}")


def _merge(
    spark: SparkSession, files: HadoopArchiveFiles, run: str, number: int, merge: FileMerge
) -> int:
    """Merge files. Return the number of new files."""
    staging = f"{compaction_staging_folder(run)}/{number}"
    frame = spark.read.schema(FILE_DDL).parquet(*[files.uri(path) for path in merge.files])
    if merge.output_count == 1:
        frame = frame.coalesce(1)
    else:
        frame = frame.repartitionByRange(merge.output_count, *_SORT_COLUMNS)
    frame.sortWithinPartitions(*_SORT_COLUMNS).write.mode("overwrite").parquet(files.uri(staging))
    staged = [file.path for file in files.list_files(staging) if file.name.startswith("part-")]
    rows_before = sum(files.read_row_count(path)[1] for path in merge.files)
    rows_after = sum(files.read_row_count(path)[1] for path in staged)
    if rows_before != rows_after:
        raise ArchiveError(
            f"{len(merge.files)} files of {merge.folder} have {rows_before:,} rows, but the merged "
            f"files have {rows_after:,}; nothing was replaced"
        )
    if read_manifest(files, OWNER).get("run") != run:
        raise ArchiveError(f"another compaction has taken over at {files.root}; this one ends here")
    swap_files(
        files,
        swap_manifest(run, number),
        compacted_moves(merge.folder, run, number, staged),
        merge.files,
    )
    return len(staged)
