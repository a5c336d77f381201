"""Names of files and folders in an archive, and the choice of files to merge."""

from __future__ import annotations

from datetime import date

import pytest

from simplebus.spark.jobs.archive_layout import (
    ArchiveError,
    ArchiveFile,
    FileMove,
    batch_moves,
    dump_manifest,
    load_manifest,
    partition_day,
    partition_values,
    plan_merges,
)
from simplebus.spark.jobs.compaction import CompactionResult

QUERY, OTHER = "e42d2678-090c-4834-9e1b-2c653a2cb594", "b9d4c1aa-8764-48cd-b55c-03f018af2179"


def batch_file(
    query: str, batch: int, size: int = 10, folder: str = "class=7/date=2026-11-21"
) -> ArchiveFile:
    return ArchiveFile(f"{folder}/{query}-{batch:06d}-00000.parquet", size)


def test_files_of_a_batch_have_stable_names() -> None:
    root = f".simplebus/staging/{QUERY}/000012"
    staged = [
        ArchiveFile(f"{root}/class=b/date=2026-11-21/part-1.parquet", 1),
        ArchiveFile(f"{root}/class=a/date=2026-11-21/part-1.parquet", 1),
        ArchiveFile(f"{root}/class=a/date=2026-11-21/part-0.parquet", 1),
        ArchiveFile(f"{root}/class=a/date=2026-11-21/.part-0.parquet.crc", 1),
        ArchiveFile(f"{root}/_SUCCESS", 0),
        ArchiveFile(f"{root}/_temporary/0/part-2.parquet", 1),
    ]
    expected = [
        FileMove(f"{root}/{folder}/{part}", f"{folder}/{QUERY}-000012-{number:05d}.parquet")
        for number, (folder, part) in enumerate(
            [
                ("class=a/date=2026-11-21", "part-0.parquet"),
                ("class=a/date=2026-11-21", "part-1.parquet"),
                ("class=b/date=2026-11-21", "part-1.parquet"),
            ]
        )
    ]
    assert batch_moves(QUERY, 12, staged) == expected
    assert batch_moves(QUERY, 12, reversed(staged)) == expected


def test_directory_names_contain_columns() -> None:
    assert partition_values("class=a%3Ab c%2Fd%2541é/date=2026-11-21") == {
        "class": "a:b c/d%41é",
        "date": "2026-11-21",
    }
    assert partition_values("class=7/date=__HIVE_DEFAULT_PARTITION__") == {
        "class": "7",
        "date": None,
    }
    assert partition_day("class=7/date=2026-11-21") == date(2026, 11, 21)
    assert partition_day("class=7/date=__HIVE_DEFAULT_PARTITION__") is None


def test_manifest_round_trips() -> None:
    assert load_manifest(dump_manifest({"files": ["a"]}), "x.json")["files"] == ["a"]
    with pytest.raises(ArchiveError, match=r"x\.json has version 2, expected 1"):
        load_manifest(b'{"version": 2}', "x.json")
    for data in (b"", b"[]", b"7", b"{}", b"{"):
        with pytest.raises(ArchiveError, match=r"x\.json is not a manifest"):
            load_manifest(data, "x.json")


def test_small_files_are_merged() -> None:
    files = [batch_file(QUERY, n, 30) for n in range(10)] + [batch_file(QUERY, 10, 90)]
    (found,), skipped = plan_merges(files, latest={QUERY: 11}, target_bytes=100)
    assert skipped == {"of about the size of a merged file, or larger": 1}
    assert (found.folder, found.output_count, found.size) == ("class=7/date=2026-11-21", 3, 300)
    assert found.files == tuple(file.path for file in files[:10])
    assert not plan_merges(files[:1], latest={QUERY: 11}, target_bytes=100).merges


def test_repeatable_batch_is_not_compacted() -> None:
    files = [batch_file(QUERY, n) for n in range(4)] + [batch_file(OTHER, n) for n in range(3)]
    (found,), _ = plan_merges(files, latest={QUERY: 3}, target_bytes=1000)
    assert found.files == tuple(sorted(f.path for f in (*files[:3], *files[4:6])))
    (found,), _ = plan_merges(files, latest={QUERY: 9, OTHER: 1}, target_bytes=1000)
    assert found.files == tuple(sorted(f.path for f in (*files[:4], *files[4:6])))


def test_unfinished_days_can_be_excluded() -> None:
    days = [
        f"class=7/date={partition_day}"
        for partition_day in ("2026-11-20", "2026-11-21", "__HIVE_DEFAULT_PARTITION__")
    ]
    files = [batch_file(QUERY, n, folder=folder) for n in range(2) for folder in days]
    found, skipped = plan_merges(
        files, latest={QUERY: 9}, target_bytes=1000, before=date(2026, 11, 21)
    )
    assert skipped == {"not of a day before 2026-11-21": 4}
    assert [merge.folder for merge in found] == days[:1]
    assert len(plan_merges(files, latest={QUERY: 9}, target_bytes=1000).merges) == 3


def test_hidden_files_are_ignored() -> None:
    hidden = [ArchiveFile(f".simplebus/staging/{n}/class=7/x.parquet", 1) for n in range(3)]
    hidden += [ArchiveFile(f"_checkpoint/{n}.parquet", 1) for n in range(3)]
    assert not plan_merges(hidden, latest={}, target_bytes=1000).merges


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "the archive has no files"),
        (
            [batch_file(QUERY, 1)],
            "1 file without another small file in the same folder",
        ),
        (
            [batch_file(QUERY, 1), batch_file(QUERY, 9), batch_file(QUERY, 8, size=90)],
            "1 file without another small file in the same folder; "
            "1 file of the latest batch of a query, which may repeat it; "
            "1 file of about the size of a merged file, or larger",
        ),
        (
            [batch_file(QUERY, n, folder="class=7/date=2026-11-22") for n in range(3)],
            "3 files not of a day before 2026-11-22",
        ),
    ],
)
def test_empty_plan_says_why(files: list[ArchiveFile], reason: str) -> None:
    plan = plan_merges(files, latest={QUERY: 9}, target_bytes=100, before=date(2026, 11, 22))
    assert (plan.merges, plan.explain_empty()) == ([], reason)
    assert str(CompactionResult(0, 0, 0, reason)) == f"nothing to merge: {reason}"
