"""Ring by example: numbering, views, growing by segments and freeing memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from simplebus.core.limits import (
    RING_BYTES_MIN,
    RING_FREED_SEGMENTS_MAX,
    RING_IDLE_TICKS,
    RING_SEGMENT_BYTES_MAX,
    RING_SLOTS_MIN,
)
from simplebus.core.ring.columns import MessageRows
from simplebus.core.ring.memory_budget import MemoryBudget, MemoryShare
from simplebus.core.ring.ring import Ring
from simplebus.core.ring.segment import memory_bytes_of
from tests.behaviour.wire_peer import build_batch
from tests.support.oracles import ID_COUNT, build_frame, parse_frame, split_frames
from tests.support.strategies import MESSAGE

SEGMENT_BYTES_MIN = memory_bytes_of(RING_BYTES_MIN, RING_SLOTS_MIN)
"""Memory of the first segment of a ring with frames of over 256 bytes."""
CHECKED_INTERVAL = 32
"""Appended frames per check of a ring that is filled. A check examines all stored frames."""


def build_ring(
    *,
    class_id: int = 1,
    messages_max: int = 100_000,
    bytes_max: int = 1 << 24,
    budget: MemoryBudget | None = None,
) -> Ring:
    return Ring(
        class_id=class_id,
        messages_max=messages_max,
        bytes_max=bytes_max,
        budget=budget or MemoryBudget(1 << 30),
    )


def build_message(text: str | int, *, size: int = 0) -> bytes:
    return build_frame(MESSAGE, class_id=1, content=str(text).encode().ljust(size, b"."))


def append_frames(ring: Ring, *whole: bytes, timer_index: int = 0) -> int:
    taken = ring.append(build_batch(*whole), timer_index)
    ring.check()
    return taken


def fill_ring(ring: Ring, count: int, *, size: int = 0) -> int:
    """Append `count` frames one by one. Returns how many were accepted."""
    taken = 0
    for i in range(count):
        taken += ring.append(build_batch(build_message(i, size=size)), 0)
        if i % CHECKED_INTERVAL == 0:
            ring.check()
    ring.check()
    return taken


def read_frames(ring: Ring, first: int, last: int, bytes_max: int = 1 << 30) -> list[bytes]:
    """Return frames first..last-1, gathered view by view."""
    gathered = b""
    while first < last:
        piece, after = ring.view_frames(first, last, bytes_max)
        frames, leftover = split_frames(bytes(piece))
        assert (len(frames), leftover) == (after - first, b"")
        gathered += bytes(piece)
        first = after
    return split_frames(gathered)[0]


def read_texts(ring: Ring) -> list[str]:
    frames = read_frames(ring, ring.floor, ring.head) if len(ring) else []
    return [parse_frame(frame)[4].decode().rstrip(".") for frame in frames]


def read_ids(ring: Ring) -> list[int]:
    return [parse_frame(frame)[2] for frame in read_frames(ring, ring.floor, ring.head)]


def test_an_empty_ring_holds_no_memory() -> None:
    budget = MemoryBudget(1000)
    ring = build_ring(budget=budget)
    ring.check()
    assert (len(ring), ring.statistics().memory_bytes, budget.used_bytes) == (0, 0, 0)


def test_messages_are_numbered_from_zero_without_a_gap() -> None:
    ring = build_ring()
    assert append_frames(ring, build_message("a"), build_message("b")) == 2
    assert append_frames(ring, build_message("c")) == 1
    assert read_ids(ring) == [0, 1, 2]
    assert read_texts(ring) == ["a", "b", "c"]


def test_append_changes_only_id_and_timer_index() -> None:
    def frame(number: int, *, message_id: int, timer_index: int) -> bytes:
        content = b"<\r\n\x00\xff\r\n" + bytes(number % 3)
        return build_frame(
            MESSAGE,
            class_id=0xFC0D,
            message_id=message_id,
            timer_index=timer_index,
            content=content,
        )

    for count in (1, 3, 100):  # Alone, in a loop and as arrays.
        ring = build_ring(class_id=0xFC0D)
        append_frames(
            ring, *[frame(n, message_id=77, timer_index=8) for n in range(count)], timer_index=5
        )
        for n in range(count):
            assert ring.copy_frame(n) == frame(n, message_id=n, timer_index=5)


def test_append_copies_frames() -> None:
    ring = build_ring()
    buffer = bytearray(build_message("a") * 2)
    batch = build_batch(build_message("a"), build_message("a"))
    ring.append(batch, 0)
    buffer[:] = bytes(len(buffer))
    assert read_texts(ring) == ["a", "a"]


def test_statistics_describe_stored_messages() -> None:
    ring = build_ring()
    append_frames(ring, *(build_message(text, size=300) for text in "abc"))
    ring.release(1)
    ring.check()
    statistics = ring.statistics()
    assert (statistics.floor, statistics.head, statistics.message_count) == (1, 3, 2)
    assert statistics.frame_bytes == 2 * len(build_message("", size=300))
    assert statistics.memory_bytes == SEGMENT_BYTES_MIN


def test_releasing_backwards_changes_nothing() -> None:
    ring = build_ring()
    fill_ring(ring, 5)
    ring.release(3)
    ring.release(2)
    ring.check()
    assert read_ids(ring) == [3, 4]


def test_releasing_beyond_the_head_fails_an_assertion() -> None:
    ring = build_ring()
    fill_ring(ring, 2)
    with pytest.raises(AssertionError):
        ring.release(3)


def test_reading_outside_floor_and_head_fails_an_assertion() -> None:
    ring = build_ring()
    fill_ring(ring, 4)
    ring.release(1)
    for first, last in ((0, 2), (2, 2), (3, 5)):
        with pytest.raises(AssertionError):
            ring.view_frames(first, last, 100)


def test_ring_grows_when_all_slots_are_used() -> None:
    ring = build_ring()
    append_frames(ring, build_message("long", size=300))
    assert fill_ring(ring, RING_SLOTS_MIN - 1) == RING_SLOTS_MIN - 1
    assert ring.statistics().memory_bytes == SEGMENT_BYTES_MIN
    fill_ring(ring, 1)
    assert len(read_texts(ring)) == RING_SLOTS_MIN + 1


def test_few_messages_need_few_slots() -> None:
    ring = build_ring()
    append_frames(ring, build_message("one"))
    assert ring.statistics().memory_bytes <= SEGMENT_BYTES_MIN


def test_next_segment_is_twice_as_large_as_the_stored_frames() -> None:
    ring = build_ring()
    fill_ring(ring, 8, size=8_000)
    assert ring.statistics().memory_bytes == SEGMENT_BYTES_MIN
    stored = ring.frame_bytes
    fill_ring(ring, 1, size=8_000)
    assert ring.statistics().memory_bytes == SEGMENT_BYTES_MIN + memory_bytes_of(
        2 * stored, RING_SLOTS_MIN
    )


def test_stored_frames_never_move() -> None:
    ring = build_ring(bytes_max=1 << 26)
    append_frames(ring, build_message("first", size=1000))
    view, _ = ring.view_frames(0, 1, 1 << 20)
    for _ in range(40):
        append_frames(ring, *[build_message("more", size=1000)] * 1000)
    later_view, _ = ring.view_frames(0, 1, 1 << 20)
    assert (np.frombuffer(view, np.uint8).ctypes.data) == np.frombuffer(
        later_view, np.uint8
    ).ctypes.data


def test_size_of_a_segment_is_limited() -> None:
    ring = build_ring(bytes_max=1 << 28)
    frames = [build_message("x", size=1000)] * 1000
    longest = 0
    while ring.statistics().memory_bytes < 4 * RING_SEGMENT_BYTES_MAX:
        before = ring.statistics().memory_bytes
        append_frames(ring, *frames)
        longest = max(longest, ring.statistics().memory_bytes - before)
    assert longest <= RING_SEGMENT_BYTES_MAX + RING_SEGMENT_BYTES_MAX // 100


def test_long_frame_gets_a_segment_of_its_length() -> None:
    ring = build_ring()
    append_frames(ring, build_message("long", size=5 * RING_BYTES_MIN))
    assert read_texts(ring) == ["long"]
    size = len(build_message("long", size=5 * RING_BYTES_MIN))
    assert ring.statistics().memory_bytes == memory_bytes_of(size, RING_SLOTS_MIN)


def test_released_memory_is_reused() -> None:
    ring = build_ring(messages_max=40)
    stored_turns: list[int] = []
    for turn in range(3000):
        size = (turn * 37) % 3000
        assert append_frames(ring, build_message(turn, size=size)) == 1
        stored_turns.append(turn)
        if len(stored_turns) == 40:
            ring.release(ring.floor + 1 + turn % 17)
            ring.check()
            stored_turns = stored_turns[1 + turn % 17 :]
        if turn % 500 == 0:
            assert read_texts(ring) == [str(k) for k in stored_turns]
    assert ring.statistics().memory_bytes <= 6 * SEGMENT_BYTES_MIN
    assert read_ids(ring) == stored_turns


def test_view_ends_with_its_segment() -> None:
    ring = build_ring()
    fill_ring(ring, 8, size=8_000)
    ring.release(6)
    append_frames(ring, build_message("over", size=8_000))
    piece, after = ring.view_frames(6, 9, 1 << 20)
    assert after == 8
    assert parse_frame(ring.copy_frame(8))[4].startswith(b"over")
    assert len(piece) == 2 * len(build_message(0, size=8_000))


def test_growing_keeps_order() -> None:
    ring = build_ring()
    fill_ring(ring, 6, size=10_000)
    ring.release(4)
    append_frames(ring, *(build_message(f"w{i}", size=10_000) for i in range(3)))
    append_frames(ring, *(build_message(f"g{i}", size=20_000) for i in range(4)))
    assert read_texts(ring) == ["4", "5", "w0", "w1", "w2", "g0", "g1", "g2", "g3"]


def test_empty_ring_writes_at_the_front_again() -> None:
    ring = build_ring()
    fill_ring(ring, 8, size=8_000)
    ring.release(8)
    append_frames(ring, *(build_message(i, size=8_000) for i in range(8)))
    assert ring.view_frames(8, 16, 1 << 20)[1] == 16
    assert ring.statistics().memory_bytes == SEGMENT_BYTES_MIN


def test_full_ring_appends_only_frames_that_fit() -> None:
    ring = build_ring(messages_max=5)
    assert append_frames(ring, *(build_message(i) for i in range(3))) == 3
    assert append_frames(ring, *(build_message(i) for i in range(3, 8))) == 2
    assert append_frames(ring, build_message("no")) == 0
    assert read_texts(ring) == ["0", "1", "2", "3", "4"]
    ring.release(1)
    assert append_frames(ring, build_message("yes"), build_message("no")) == 1
    assert read_texts(ring) == ["1", "2", "3", "4", "yes"]


@pytest.mark.parametrize("size", [0, 5000, 20_000, 60_000])
def test_memory_stays_within_bytes_max(size: int) -> None:
    bytes_max = 4 * RING_BYTES_MIN
    ring = build_ring(bytes_max=bytes_max)
    taken = fill_ring(ring, 20_000 if size == 0 else 100, size=size)
    frame_bytes = len(build_message(0, size=size))
    assert ring.statistics().memory_bytes <= bytes_max
    stored_bytes = ring.frame_bytes + taken * 4
    assert bytes_max - stored_bytes <= frame_bytes + bytes_max // 16
    assert append_frames(ring, build_message("no", size=size + 1000)) == 0


@pytest.mark.parametrize("size", [0, 5000, 20_000])
def test_full_ring_accepts_frames_again_when_a_fifth_is_released(size: int) -> None:
    ring = build_ring(bytes_max=4 * RING_BYTES_MIN)
    frames = [build_message("x", size=size)] * 100
    for _ in range(50):
        while append_frames(ring, *frames) == len(frames):
            pass
        ring.release(ring.sequence_after_bytes(ring.frame_bytes // 5))
        assert append_frames(ring, frames[0]) == 1


def test_memory_stays_within_the_budget() -> None:
    budget = MemoryBudget(2 * SEGMENT_BYTES_MIN + 1100)
    first, second = build_ring(budget=budget), build_ring(budget=budget)
    fill_ring(first, 12, size=8_000)
    assert budget.used_bytes == first.statistics().memory_bytes >= 2 * SEGMENT_BYTES_MIN
    assert append_frames(second, build_message("no")) == 0
    assert second.statistics().memory_bytes == 0
    assert budget.used_bytes <= budget.limit_bytes


def test_last_segment_uses_the_rest_of_the_budget() -> None:
    budget = MemoryBudget(6 * RING_BYTES_MIN + RING_BYTES_MIN // 2)
    ring = build_ring(budget=budget)
    fill_ring(ring, 1000, size=1000)
    assert budget.limit_bytes - RING_BYTES_MIN // 8 <= budget.used_bytes <= budget.limit_bytes
    budget.limit_bytes += RING_BYTES_MIN // 16  # Too little for a segment.
    assert append_frames(ring, build_message("no", size=1000)) == 0


def test_budget_never_exceeds_its_limit() -> None:
    budget = MemoryBudget(10)
    assert budget.acquire(7)
    assert not budget.acquire(4)
    assert budget.acquire(3)
    budget.release(10)
    assert budget.used_bytes == 0
    with pytest.raises(AssertionError):
        budget.release(1)


def test_resized_share_has_its_new_limit() -> None:
    share = MemoryShare(10, MemoryBudget(100))
    assert not share.acquire(20)
    share.resize(20, reserved=0)
    assert share.acquire(20)
    assert not share.acquire(1)


@pytest.mark.parametrize("bytes_max", [4 * RING_BYTES_MIN, 502_144, 1_000_000])
def test_empty_ring_accepts_frame_of_half_its_limit(
    bytes_max: int,
) -> None:
    # At 502,144 the column of very many small messages takes more than half of the memory.
    ring = build_ring(bytes_max=bytes_max)
    ring.append(build_batch(*[build_message("")] * (bytes_max // 25)), 0)
    ring.release(ring.head)
    assert append_frames(ring, build_message("long", size=bytes_max // 2 - 13)) == 1
    assert read_texts(ring) == ["long"]


def test_view_is_limited_to_bytes_max_but_has_a_frame() -> None:
    ring = build_ring()
    append_frames(ring, *(build_message(i, size=87) for i in range(10)))  # 100 bytes each.
    assert [
        ring.view_frames(2, 10, most)[1] for most in (1, 99, 100, 199, 200, 201, 799, 800, 900)
    ] == [
        3,
        3,
        3,
        3,
        4,
        4,
        9,
        10,
        10,
    ]
    assert ring.view_frames(2, 5, 1 << 20)[1] == 5


@pytest.mark.parametrize("released", [0, RING_SLOTS_MIN - 4])
def test_locate_cut_returns_frame_and_remaining_bytes(released: int) -> None:
    # Also where the slots go around their end in the middle of the piece.
    ring = build_ring()
    fill_ring(ring, released)
    ring.release(released)
    first = released
    append_frames(ring, *(build_message(i, size=87) for i in range(8)))
    assert ring.locate_cut(first, first + 8, 0) == (first, 0)
    assert ring.locate_cut(first, first + 8, 1) == (first, 99)
    assert ring.locate_cut(first, first + 8, 99) == (first, 1)
    assert ring.locate_cut(first, first + 8, 100) == (first + 1, 0)
    assert ring.locate_cut(first, first + 8, 550) == (first + 5, 50)
    assert ring.locate_cut(first, first + 8, 799) == (first + 7, 1)


def test_sequence_after_bytes_counts_across_the_wrap() -> None:
    ring = build_ring()
    fill_ring(ring, 6, size=9_987)  # 10,000 bytes each.
    ring.release(4)
    append_frames(ring, *(build_message(i, size=9_987) for i in "abc"))
    for size, expected in (
        (1, 5),
        (10_000, 5),
        (10_001, 6),
        (20_000, 6),
        (20_001, 7),
        (30_000, 7),
        (49_999, 9),
        (50_000, 9),
        (1 << 20, 9),
    ):
        assert ring.sequence_after_bytes(size) == expected


def test_timer_index_is_set_on_given_and_later_frames() -> None:
    def timers(ring: Ring) -> list[int]:
        return [parse_frame(frame)[3] for frame in read_frames(ring, ring.floor, ring.head)]

    ring = build_ring()
    append_frames(ring, *(build_message(i) for i in range(6)), timer_index=1)
    ring.set_timer_index(2, 4, 5)
    assert timers(ring) == [1, 1, 5, 5, 1, 1]
    append_frames(ring, build_message("later"), timer_index=5)
    assert timers(ring) == [1, 1, 5, 5, 1, 1, 5]
    ring.set_timer_index(0, 7, 5)
    assert timers(ring) == [5] * 7
    ring.set_timer_index(6, 7, 0)
    ring.set_timer_index(5, 7, 1)
    assert timers(ring) == [5, 5, 5, 5, 5, 1, 1]


def test_append_one_accepts_a_frame_that_fits() -> None:
    ring = build_ring(messages_max=3)
    assert not ring.append_one(memoryview(build_message("no memory yet")), 2)
    assert append_frames(ring, build_message("a")) == 1
    for text in ("b", "c"):
        assert ring.append_one(memoryview(build_message(text)), 2)
        ring.check()
    assert not ring.append_one(memoryview(build_message("full")), 2)
    ring.check()
    assert read_texts(ring) == ["a", "b", "c"]
    assert read_ids(ring) == [0, 1, 2]
    ring.release(3)
    assert ring.append_one(memoryview(build_message("d")), 4)
    ring.check()
    assert ring.copy_frame(3) == build_frame(
        MESSAGE, class_id=1, message_id=3, timer_index=4, content=b"d"
    )


def test_append_one_does_not_grow() -> None:
    ring = build_ring()
    fill_ring(ring, 8, size=8_000)
    assert not ring.append_one(memoryview(build_message("end", size=8_000)), 0)
    ring.release(6)
    assert not ring.append_one(memoryview(build_message("end", size=8_000)), 0)
    ring.check()
    assert read_texts(ring) == ["6", "7"]


def test_unused_memory_is_freed_and_messages_stay() -> None:
    budget = MemoryBudget(1 << 24)
    ring = build_ring(budget=budget)
    fill_ring(ring, 2000, size=200)
    grown = budget.used_bytes
    ring.release(1997)
    assert budget.used_bytes >= grown - grown // 8
    for _ in range(2 * RING_IDLE_TICKS):
        ring.tick()
        ring.check()
    assert budget.used_bytes <= 5 * SEGMENT_BYTES_MIN < grown
    assert read_ids(ring) == [1997, 1998, 1999]
    assert append_frames(ring, build_message("more")) == 1
    assert read_texts(ring)[-1] == "more"


def test_spare_memory_that_is_in_use_is_kept() -> None:
    ring = build_ring()
    for _ in range(3 * RING_IDLE_TICKS):  # The ring fills up and drains with each tick.
        fill_ring(ring, 1000, size=200)
        grown = ring.statistics().memory_bytes
        ring.release(ring.head - 1)
        ring.tick()
        ring.check()
    assert ring.statistics().memory_bytes > grown // 2


def test_one_tick_frees_a_limited_number_of_segments() -> None:
    ring = build_ring(bytes_max=1 << 20)  # Segments of up to 128 KiB.
    ring.bytes_max = 1 << 40
    while ring.statistics().memory_bytes < 200 * RING_BYTES_MIN:
        ring.append(build_batch(build_message("x", size=40_000)), 0)
    ring.release(ring.head)
    for _ in range(4 * RING_IDLE_TICKS):
        before = ring.statistics().memory_bytes
        ring.tick()
        ring.check()
        freed = before - ring.statistics().memory_bytes
        assert freed <= RING_FREED_SEGMENTS_MAX * (RING_SEGMENT_BYTES_MAX + (1 << 16))
    assert ring.statistics().memory_bytes == 0


def test_empty_ring_frees_all_memory_and_keeps_numbering() -> None:
    budget = MemoryBudget(1 << 24)
    ring = build_ring(budget=budget)
    fill_ring(ring, 100)
    ring.release(100)
    for _ in range(2 * RING_IDLE_TICKS):
        ring.tick()
        ring.check()
    assert (budget.used_bytes, ring.statistics().memory_bytes) == (0, 0)
    append_frames(ring, build_message("next"))
    assert read_ids(ring) == [100]


def test_used_memory_is_not_freed() -> None:
    ring = build_ring()
    fill_ring(ring, 1000, size=200)
    memory = ring.statistics().memory_bytes
    for _ in range(3 * RING_IDLE_TICKS):
        ring.tick()
        ring.check()
    assert ring.statistics().memory_bytes == memory


def test_message_ids_wrap_to_zero() -> None:
    ring = build_ring()
    ring.floor = ring.head = ID_COUNT - 3
    append_frames(ring, *(build_message(i) for i in range(2)))
    append_frames(ring, *(build_message(i) for i in range(2, 80)))
    assert read_ids(ring) == [*range(ID_COUNT - 3, ID_COUNT), *range(77)]
    assert ring.append_one(memoryview(build_message("one")), 0)
    assert (ring.head, read_ids(ring)[-1]) == (ID_COUNT + 78, 77)


def test_check_detects_a_corrupted_ring() -> None:
    ring = build_ring()
    fill_ring(ring, 3)
    view, _ = ring.view_frames(1, 2, 1000)
    view[-1] += 1
    with pytest.raises(AssertionError):
        ring.check()
    view[-1] -= 1
    ring.check()
    ring.floor = 4
    with pytest.raises(AssertionError):
        ring.check()


def test_failed_allocation_leaves_the_ring_full_and_intact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    ring = build_ring()
    stored = fill_ring(ring, 8, size=8_000)
    used = ring.budget.used_bytes
    with monkeypatch.context() as patch:
        patch.setattr("simplebus.core.ring.segment.allocate_array", refuse)
        assert append_frames(ring, build_message("one more", size=8_000)) == 0
    assert (len(ring), ring.budget.used_bytes) == (stored, used)
    assert append_frames(ring, build_message("one more", size=8_000)) == 1


def test_failed_allocation_of_a_column_leaves_the_ring_full_and_intact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    ring = build_ring()
    fill_ring(ring, 5, size=8_000)
    used = ring.budget.used_bytes
    frame, rows = build_message("channel", size=3000), MessageRows(1, 3)
    with monkeypatch.context() as patch:
        patch.setattr("simplebus.core.ring.segment.SegmentColumns.add_missing", refuse)
        assert ring.append(build_batch(frame), 0, rows) == 0
    ring.check()
    assert len(ring) == 5
    assert ring.budget.used_bytes <= used + SEGMENT_BYTES_MIN + (1 << 14)
    assert ring.append(build_batch(frame), 0, rows) == 1


FILL_WITH_LITTLE_ADDRESS_SPACE = """
import resource
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from tests.behaviour.wire_peer import build_batch
from tests.behaviour.wire_peer_v2 import publish

ring = Ring(class_id=1, messages_max=1 << 30, bytes_max=1 << 33, budget=MemoryBudget(1 << 33))
batch = build_batch(*[publish(1, 0, b"x" * 1000)] * 1000)
used_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (64 << 20), resource.RLIM_INFINITY))
while ring.append(batch, 0) == batch.count:
    pass
assert 32 << 20 < ring.frame_bytes < 64 << 20, ring.frame_bytes
ring.release(ring.head - 1)
assert ring.append(batch, 0) == batch.count
"""


def test_ring_is_full_when_the_address_space_is_used_up() -> None:
    command = [sys.executable, "-c", FILL_WITH_LITTLE_ADDRESS_SPACE]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
