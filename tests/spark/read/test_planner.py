"""Planning of read ranges from offsets and stored messages: no duplicates, no unreported losses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.read.bus_reader import report_losses
from simplebus.spark.read.offsets import BusExtent, ClassExtent, ServerOffsets
from simplebus.spark.read.planner import (
    DataLossError,
    LostRange,
    MessageRange,
    count_backlog,
    limit_to_target,
    next_batch_end,
    plan_reads,
    split_ranges,
)


def at(*sequences: int, bus: str = "m") -> dict[str, ServerOffsets]:
    return {"s": ServerOffsets(bus, {str(n): sequence for n, sequence in enumerate(sequences)})}


def memory(*bounds: tuple[int, int], bus: str = "m") -> dict[str, BusExtent]:
    return {"s": BusExtent(bus, {str(n): ClassExtent(*pair) for n, pair in enumerate(bounds)})}


def test_stored_messages_are_read_from_start_to_end() -> None:
    found = plan_reads(at(5, 9), at(8, 9), memory((0, 20), (0, 9)))
    assert found.ranges == [MessageRange("s", "m", "0", 5, 8)]
    assert not found.losses


def test_loss_below_first_stored_message_names_class_and_range() -> None:
    found = plan_reads(at(5), at(20), memory((12, 30)))
    assert found.ranges == [MessageRange("s", "m", "0", 12, 20)]
    with pytest.raises(
        DataLossError, match=r"messages 5 to 11 of class 0 at s are lost.*from 12 on"
    ):
        report_losses(found.losses, strict=True)


def test_missing_batch_is_a_loss() -> None:
    found = plan_reads(at(5), at(20), memory((25, 30)))
    assert found.ranges == []
    assert [(loss.first, loss.last) for loss in found.losses] == [(5, 20)]


def test_restart_after_planning_loses_the_batch() -> None:
    found = plan_reads(at(5), at(20), memory((0, 30), bus="n"))
    assert found.ranges == []
    assert [(loss.first, loss.last) for loss in found.losses] == [(5, 20)]


def test_restarted_server_is_read_from_its_first_message() -> None:
    extents = memory((0, 3), bus="n")
    end = next_batch_end(at(5), extents)
    assert end == at(3, bus="n")
    found = plan_reads(at(5), end, extents)
    assert found.ranges == [MessageRange("s", "n", "0", 0, 3)]
    assert [(loss.first, loss.last) for loss in found.losses] == [(5, None)]
    assert "messages 5 and on of class 0 at s are lost" in str(found.losses[0])


def test_end_beyond_the_head_is_a_loss() -> None:
    found = plan_reads(at(5), at(20), memory((0, 12)))
    assert found.ranges == [MessageRange("s", "m", "0", 5, 12)]
    assert [(loss.first, loss.last) for loss in found.losses] == [(12, 20)]


def test_unread_or_silent_server_with_messages_is_a_loss() -> None:
    extents = memory((0, 12))
    found = plan_reads(at(5, 3), at(9, 4), extents)
    assert [(loss.class_, loss.first, loss.last) for loss in found.losses] == [("1", 3, 4)]
    assert plan_reads(at(5), at(9), {}).losses[0].count == 4
    assert not plan_reads(at(9), at(9), {}).losses


def test_ending_query_stops_at_its_end_offset() -> None:
    assert limit_to_target(at(7, 3), at(5, 9)) == at(5, 3)
    assert limit_to_target(at(2, bus="new"), at(5)) == at(5)
    assert limit_to_target(at(2), {}) == at(2)


def test_limit_is_shared_by_backlogs() -> None:
    assert next_batch_end(at(0, 0), memory((0, 100), (0, 300)), 40) == at(10, 30)
    assert next_batch_end(at(0, 0), memory((0, 1), (0, 1000)), 10) == at(0, 10)
    assert next_batch_end(at(0, 0), memory((0, 3), (0, 4)), 10) == at(3, 4)


def test_backlog_is_reported_per_class() -> None:
    assert count_backlog(at(5, 9), memory((0, 20), (0, 9))) == {("s", "0"): 15, ("s", "1"): 0}


extents = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.tuples(st.integers(0, 50), extents), min_size=1, max_size=4), st.data())
def test_batches_read_or_lose_each_message_once(
    classes: list[tuple[int, tuple[int, int]]], data: st.DataObject
) -> None:
    memories = memory(*(pair for _, pair in classes))
    starts = [min(start, pair[1]) for start, pair in classes]
    most = data.draw(st.one_of(st.none(), st.integers(1, 30)))
    position, seen = at(*starts), {n: set[int]() for n in range(len(classes))}
    for _ in range(300):
        end = next_batch_end(position, memories, most)
        found = plan_reads(position, end, memories)
        assert found == plan_reads(position, end, memories)
        for message_range in (*found.ranges, *found.losses):
            assert message_range.last is not None
            numbers = set(range(message_range.first, message_range.last))
            assert numbers
            assert not numbers & seen[int(message_range.class_)]
            seen[int(message_range.class_)] |= numbers
        if most is not None:
            assert sum(message_range.count for message_range in found.ranges) <= most
        if end == position:
            break
        position = end
    assert [seen[n] for n in seen] == [
        set(range(start, pair[1])) for start, (_, pair) in zip(starts, classes, strict=True)
    ]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_tasks_partition_the_ranges(counts: list[int], most: int, at_least: int | None) -> None:
    whole = [MessageRange("s", "m", str(n), 7, 7 + count) for n, count in enumerate(counts)]
    tasks = split_ranges(whole, max_messages=most, min_ranges=at_least)
    assert all(0 < task.count <= most for task in tasks)
    for message_range in whole:
        pieces = [task for task in tasks if task.class_ == message_range.class_]
        assert (pieces[0].first, pieces[-1].last) == (message_range.first, message_range.last)
        assert all(a.last == b.first for a, b in itertools.pairwise(pieces))
    if at_least is not None:
        assert len(tasks) >= min(at_least, sum(counts))


def test_loss_of_known_size_is_counted() -> None:
    assert LostRange("s", "7", 3, 10, "why").count == 7
    assert LostRange("s", "7", 3, None, "why").count == 0


def test_log_of_lost_ranges_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    losses = [LostRange("s", "orders", at, at + 2, "dropped") for at in range(50)]
    report_losses(losses, strict=False)
    assert len(caplog.messages) == 21
    assert caplog.messages[0].startswith("skipped 2 messages: messages 0 to 1 of class orders at s")
    assert caplog.messages[-1] == "skipped 60 messages of 30 more ranges"
