"""Tests of archive commits that fail at every step: recovery must keep each message exactly once.

The model is a file system that fails after a given number of steps. Queries and compactions follow
the order of the jobs: begin, write, publish, finish, then Spark's own record of the batch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.jobs import archive_commit, archive_layout
from simplebus.spark.jobs.archive_layout import ArchiveError
from tests.spark.memory_files import DiedError, Folders

QUERY = "e42d2678-090c-4834-9e1b-2c653a2cb594"
CLASSES = 3


@dataclass
class World:
    """Archive, the query that fills it, and its checkpoint."""

    files: Folders = field(default_factory=Folders)
    next_batch: int = 0
    """What Spark's log of finished batches says."""
    runs: int = 0
    """How often something was begun: Spark calls its files differently each time."""

    def messages(self, batch: int) -> list[tuple[int, int]]:
        """Return the (class, number) pairs of a batch, the same for every attempt."""
        return [(n % CLASSES, n) for n in range(batch * 7, batch * 7 + batch % 4 * 3)]

    def archive(self, batches: int) -> None:
        """Run the query from the position of its checkpoint."""
        self.runs += 1
        archive_commit.recover_swaps(self.files)
        for turn in range(batches):
            batch = self.next_batch
            if not turn:
                archive_commit.begin_batch(self.files, QUERY, batch)
            for class_ in range(CLASSES):
                rows = [m for m in self.messages(batch) if m[0] == class_]
                for part in range(2):
                    if rows[part::2]:
                        staging = archive_layout.staging_folder(QUERY, batch)
                        folder = f"{staging}/class={class_}/date=2026-11-21"
                        self.files.put(
                            f"{folder}/part-{part}-{self.runs}.parquet", list(rows[part::2])
                        )
            archive_commit.publish_batch(self.files, QUERY, batch)
            archive_commit.finish_batch(self.files, QUERY, batch)
            self.files._step()
            self.next_batch = batch + 1

    def compact(self) -> None:
        """Compact the archive as the job does."""
        archive_commit.recover_swaps(self.files)
        self.runs += 1
        run = str(self.runs)
        latest = archive_commit.latest_batches(self.files)
        found = archive_layout.plan_merges(
            self.files.list_files(""), latest=latest, target_bytes=1000
        ).merges
        for number, merge in enumerate(found):
            rows = sorted(row for path in merge.files for row in self.files.data[path])
            staged = (
                f"{archive_layout.compaction_staging_folder(run)}/{merge.folder}/part-0.parquet"
            )
            self.files.put(staged, list(rows))
            moves = archive_layout.compacted_moves(merge.folder, run, number, [staged])
            archive_commit.swap_files(
                self.files, archive_layout.swap_manifest(run, number), moves, merge.files
            )
        self.files.remove(archive_layout.compaction_staging_folder(run))

    def expected(self) -> list[tuple[int, int]]:
        return sorted(m for batch in range(self.next_batch) for m in self.messages(batch))


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["archive", "compact"]), st.integers(0, 60)), max_size=12
    ),
    copies=st.booleans(),
)
def test_kills_archive_each_message_once(steps: list[tuple[str, int]], copies: bool) -> None:
    world = World()
    world.files.copies = copies
    for step, lives in steps:
        world.files.remaining_steps = lives
        with contextlib.suppress(DiedError):
            world.archive(3) if step == "archive" else world.compact()
    world.files.remaining_steps = None
    world.archive(2)
    assert world.files.seen() == world.expected()
    world.compact()
    assert world.files.seen() == world.expected()


@pytest.mark.parametrize("copies", [False, True])
def test_interrupted_compaction_is_completed_without_loss(copies: bool) -> None:
    for lives in range(100):
        world = World()
        world.files.copies = copies
        world.archive(8)
        before = world.files.seen()
        world.files.remaining_steps = lives
        with contextlib.suppress(DiedError):
            world.compact()
        finished, world.files.remaining_steps = bool(world.files.remaining_steps), None
        assert set(world.files.seen()) == set(before)
        if lives % 2:
            archive_commit.recover_swaps(world.files)
            assert world.files.seen() == before
        world.compact()
        assert world.files.seen() == before
        if finished:
            break
    assert finished, "it never came to its end"
    assert len([path for path in world.files.data if "/compacted-" in path]) == CLASSES
    assert not world.files.list_files(archive_layout.STAGING)


@pytest.mark.parametrize("copies", [False, True])
def test_interrupted_batch_is_completed(copies: bool) -> None:
    for lives in range(100):
        world = World()
        world.files.copies = copies
        world.archive(2)
        world.files.remaining_steps = lives
        with contextlib.suppress(DiedError):
            world.archive(3)
        finished, world.files.remaining_steps = bool(world.files.remaining_steps), None
        found = world.files.seen()
        assert len(set(found)) == len(found), "a reader saw a message twice"
        world.archive(3)
        assert world.files.seen() == world.expected()
        if finished:
            break
    assert finished, "it never came to its end"


def test_repeated_batch_replaces_its_files() -> None:
    world = World()
    world.archive(4)
    world.next_batch = 3  # As if Spark had died before it noted the batch.
    before = dict(world.files.data)
    world.archive(1)
    assert world.files.data == before
    world.archive(1)  # The next one is empty.
    assert world.files.data == before


def test_outdated_checkpoint_is_rejected() -> None:
    world = World()
    world.archive(4)
    world.next_batch = 1
    with pytest.raises(
        ArchiveError, match="has batch 3 of this query, which continues with batch 1"
    ):
        world.archive(1)


def test_swap_with_missing_files_removes_nothing() -> None:
    files = Folders()
    files.data["class=1/a.parquet"] = ((1, 1),)
    note = archive_layout.swap_manifest("x", 0)
    files.data[note] = archive_layout.dump_manifest(
        {"moves": [["gone", "class=1/b.parquet"]], "removed": ["class=1/a.parquet"]}
    )
    with pytest.raises(ArchiveError, match=r"gone to class=1/b\.parquet, but neither file exists"):
        archive_commit.recover_swaps(files)
    assert files.seen() == [(1, 1)]
