"""The ring by example: numbering, pieces, wrapping, growing, giving memory back."""

from __future__ import annotations

import pytest

from simplebus.core.limits import RING_BYTES_MIN, RING_IDLE_TICKS, RING_SLOTS_MIN
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from tests.behaviour.wire_peer import build_batch
from tests.support.oracles import (
    ID_COUNT,
    build_frame,
    parse_frame,
    split_frames,
)
from tests.support.strategies import MESSAGE

SLOT_BYTES = 8
"""Of the column that says where a frame begins."""


def ring_of(
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


def message(text: str | int, *, size: int = 0) -> bytes:
    return build_frame(MESSAGE, class_id=1, content=str(text).encode().ljust(size, b"."))


def append(ring: Ring, *whole: bytes, timer_index: int = 0) -> int:
    taken = ring.append(build_batch(*whole), timer_index)
    ring.check()
    return taken


def fill(ring: Ring, count: int, *, size: int = 0) -> int:
    """Append frames until there are `count`, one by one; returns how many were taken."""
    return sum(append(ring, message(i, size=size)) for i in range(count))


def read(ring: Ring, first: int, last: int, bytes_max: int = 1 << 30) -> list[bytes]:
    """The frames first..last-1, gathered piece by piece."""
    gathered = b""
    while first < last:
        piece, after = ring.view_frames(first, last, bytes_max)
        frames, leftover = split_frames(bytes(piece))
        assert (len(frames), leftover) == (after - first, b"")
        gathered += bytes(piece)
        first = after
    return split_frames(gathered)[0]


def texts(ring: Ring) -> list[str]:
    frames = read(ring, ring.floor, ring.head) if len(ring) else []
    return [parse_frame(frame)[4].decode().rstrip(".") for frame in frames]


def ids(ring: Ring) -> list[int]:
    return [parse_frame(frame)[2] for frame in read(ring, ring.floor, ring.head)]


def test_an_empty_ring_holds_no_memory() -> None:
    budget = MemoryBudget(1000)
    ring = ring_of(budget=budget)
    ring.check()
    assert (len(ring), ring.statistics().memory_bytes, budget.used_bytes) == (0, 0, 0)


def test_messages_are_numbered_from_zero_without_a_gap() -> None:
    ring = ring_of()
    assert append(ring, message("a"), message("b")) == 2
    assert append(ring, message("c")) == 1
    assert ids(ring) == [0, 1, 2]
    assert texts(ring) == ["a", "b", "c"]


def test_everything_but_id_and_timer_index_is_kept_as_it_came() -> None:
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
        ring = ring_of(class_id=0xFC0D)
        append(ring, *[frame(n, message_id=77, timer_index=8) for n in range(count)], timer_index=5)
        for n in range(count):
            assert ring.copy_frame(n) == frame(n, message_id=n, timer_index=5)


def test_the_frames_given_are_copied() -> None:
    ring = ring_of()
    buffer = bytearray(message("a") * 2)
    batch = build_batch(message("a"), message("a"))
    ring.append(batch, 0)
    buffer[:] = bytes(len(buffer))
    assert texts(ring) == ["a", "a"]


def test_statistics_say_what_is_kept() -> None:
    ring = ring_of()
    append(ring, message("a"), message("bcd"), message("e"))
    ring.release(1)
    ring.check()
    statistics = ring.statistics()
    assert (statistics.floor, statistics.head, statistics.message_count) == (1, 3, 2)
    assert statistics.frame_bytes == len(message("bcd") + message("e"))
    assert statistics.memory_bytes == RING_BYTES_MIN + RING_SLOTS_MIN * SLOT_BYTES


def test_releasing_backwards_changes_nothing() -> None:
    ring = ring_of()
    fill(ring, 5)
    ring.release(3)
    ring.release(2)
    ring.check()
    assert ids(ring) == [3, 4]


def test_releasing_what_is_not_there_is_our_own_bug() -> None:
    ring = ring_of()
    fill(ring, 2)
    with pytest.raises(AssertionError):
        ring.release(3)


def test_reading_what_is_not_there_is_our_own_bug() -> None:
    ring = ring_of()
    fill(ring, 4)
    ring.release(1)
    for first, last in ((0, 2), (2, 2), (3, 5)):
        with pytest.raises(AssertionError):
            ring.view_frames(first, last, 100)


def test_the_slot_count_doubles_when_messages_are_many() -> None:
    ring = ring_of()
    assert fill(ring, RING_SLOTS_MIN) == RING_SLOTS_MIN
    before = ring.statistics().memory_bytes
    fill(ring, 1)
    assert ring.statistics().memory_bytes - before == RING_SLOTS_MIN * SLOT_BYTES
    assert ids(ring) == list(range(RING_SLOTS_MIN + 1))


def test_the_arena_doubles_when_bytes_are_many() -> None:
    ring = ring_of()
    fill(ring, 3, size=30_000)
    assert ring.statistics().memory_bytes == 2 * RING_BYTES_MIN + RING_SLOTS_MIN * SLOT_BYTES
    assert texts(ring) == ["0", "1", "2"]


def test_one_long_frame_grows_the_arena_as_far_as_it_needs() -> None:
    ring = ring_of()
    append(ring, message("long", size=5 * RING_BYTES_MIN))
    assert texts(ring) == ["long"]
    assert ring.statistics().memory_bytes == 8 * RING_BYTES_MIN + RING_SLOTS_MIN * SLOT_BYTES


def test_released_room_is_used_again_around_the_ends() -> None:
    ring = ring_of(messages_max=40)
    kept: list[int] = []
    for turn in range(3000):
        size = (turn * 37) % 3000
        assert append(ring, message(turn, size=size)) == 1
        kept.append(turn)
        if len(kept) == 40:
            ring.release(ring.floor + 1 + turn % 17)
            ring.check()
            kept = kept[1 + turn % 17 :]
        if turn % 500 == 0:
            assert texts(ring) == [str(k) for k in kept]
    assert ring.statistics().memory_bytes <= 2 * RING_BYTES_MIN + RING_SLOTS_MIN * SLOT_BYTES
    assert ids(ring) == kept


def test_a_frame_never_straddles_the_arenas_end() -> None:
    ring = ring_of()
    fill(ring, 6, size=10_000)
    ring.release(4)
    append(ring, message("over", size=10_000))
    piece, after = ring.view_frames(4, 7, 1 << 20)
    assert after == 6
    assert parse_frame(ring.copy_frame(6))[4].startswith(b"over")
    assert len(piece) == 2 * len(message(0, size=10_000))


def test_growing_while_wrapped_keeps_the_order() -> None:
    ring = ring_of()
    fill(ring, 6, size=10_000)
    ring.release(4)
    append(ring, *(message(f"w{i}", size=10_000) for i in range(3)))
    append(ring, *(message(f"g{i}", size=20_000) for i in range(4)))
    assert texts(ring) == ["4", "5", "w0", "w1", "w2", "g0", "g1", "g2", "g3"]


def test_a_ring_that_is_empty_again_starts_at_its_front() -> None:
    ring = ring_of()
    fill(ring, 6, size=10_000)
    ring.release(6)
    append(ring, *(message(i, size=10_000) for i in range(6)))
    assert ring.view_frames(6, 12, 1 << 20)[1] == 12
    assert ring.statistics().memory_bytes == RING_BYTES_MIN + RING_SLOTS_MIN * SLOT_BYTES


def test_a_full_ring_takes_what_fits_and_no_more() -> None:
    ring = ring_of(messages_max=5)
    assert append(ring, *(message(i) for i in range(3))) == 3
    assert append(ring, *(message(i) for i in range(3, 8))) == 2
    assert append(ring, message("no")) == 0
    assert texts(ring) == ["0", "1", "2", "3", "4"]
    ring.release(1)
    assert append(ring, message("yes"), message("no")) == 1
    assert texts(ring) == ["1", "2", "3", "4", "yes"]


def test_memory_stays_within_the_rings_limit() -> None:
    ring = ring_of(bytes_max=4 * RING_BYTES_MIN)
    taken = fill(ring, 100, size=5000)
    memory = ring.statistics().memory_bytes
    assert memory <= 4 * RING_BYTES_MIN
    assert taken == (4 * RING_BYTES_MIN - RING_SLOTS_MIN * SLOT_BYTES) // len(message(0, size=5000))
    assert append(ring, message("no", size=5000)) == 0


def test_memory_stays_within_the_budget_of_all_rings() -> None:
    column = RING_SLOTS_MIN * SLOT_BYTES
    budget = MemoryBudget(2 * RING_BYTES_MIN + 2 * column)
    one, two = ring_of(budget=budget), ring_of(budget=budget)
    fill(one, 2, size=40_000)
    assert budget.used_bytes == one.statistics().memory_bytes == 2 * RING_BYTES_MIN + column
    assert append(two, message("no")) == 0
    assert two.statistics().memory_bytes == 0
    assert budget.used_bytes <= budget.limit_bytes


def test_the_last_step_takes_what_the_budget_leaves() -> None:
    # 4 units are held, 8 would be the next step, 6.5 are there.
    column = 2 * RING_SLOTS_MIN * SLOT_BYTES
    budget = MemoryBudget(6 * RING_BYTES_MIN + RING_BYTES_MIN // 2 + column)
    ring = ring_of(budget=budget)
    taken = fill(ring, 1000, size=1000)
    assert taken * len(message(0, size=1000)) > 6 * RING_BYTES_MIN
    assert (
        budget.limit_bytes - 2 * len(message(0, size=1000))
        < budget.used_bytes
        <= budget.limit_bytes
    )
    ring.check()
    budget.limit_bytes += RING_BYTES_MIN // 4  # Too little to move everything for it.
    assert append(ring, message("no", size=1000)) == 0


def test_a_budget_never_gives_more_than_it_has() -> None:
    budget = MemoryBudget(10)
    assert budget.acquire(7)
    assert not budget.acquire(4)
    assert budget.acquire(3)
    budget.release(10)
    assert budget.used_bytes == 0
    with pytest.raises(AssertionError):
        budget.release(1)


@pytest.mark.parametrize("bytes_max", [4 * RING_BYTES_MIN, 502_144, 1_000_000])
def test_an_empty_ring_takes_a_frame_of_half_its_limit_whatever_it_held_before(
    bytes_max: int,
) -> None:
    # At 502,144 the column of very many small messages takes more than half of the memory.
    ring = ring_of(bytes_max=bytes_max)
    ring.append(build_batch(*[message("")] * (bytes_max // 25)), 0)
    ring.release(ring.head)
    assert append(ring, message("long", size=bytes_max // 2 - 13)) == 1
    assert texts(ring) == ["long"]


def test_a_piece_ends_before_it_has_too_many_bytes_but_holds_a_frame() -> None:
    ring = ring_of()
    append(ring, *(message(i, size=87) for i in range(10)))  # 100 bytes each.
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
def test_a_cut_says_which_frame_it_goes_through_and_what_is_behind(released: int) -> None:
    # Also where the slots go around their end in the middle of the piece.
    ring = ring_of()
    fill(ring, released)
    ring.release(released)
    first = released
    append(ring, *(message(i, size=87) for i in range(8)))
    assert ring.locate_cut(first, first + 8, 0) == (first, 0)
    assert ring.locate_cut(first, first + 8, 1) == (first, 99)
    assert ring.locate_cut(first, first + 8, 99) == (first, 1)
    assert ring.locate_cut(first, first + 8, 100) == (first + 1, 0)
    assert ring.locate_cut(first, first + 8, 550) == (first + 5, 50)
    assert ring.locate_cut(first, first + 8, 799) == (first + 7, 1)


def test_where_so_many_bytes_lie_in_front_is_found_around_the_arenas_end() -> None:
    ring = ring_of()
    fill(ring, 6, size=9_987)  # 10,000 bytes each.
    ring.release(4)
    append(ring, *(message(i, size=9_987) for i in "abc"))
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


def test_a_stamp_reaches_the_frames_asked_for_and_those_appended_later() -> None:
    def timers(ring: Ring) -> list[int]:
        return [parse_frame(frame)[3] for frame in read(ring, ring.floor, ring.head)]

    ring = ring_of()
    append(ring, *(message(i) for i in range(6)), timer_index=1)
    ring.set_timer_index(2, 4, 5)
    assert timers(ring) == [1, 1, 5, 5, 1, 1]
    append(ring, message("later"), timer_index=5)
    assert timers(ring) == [1, 1, 5, 5, 1, 1, 5]
    ring.set_timer_index(0, 7, 5)
    assert timers(ring) == [5] * 7
    ring.set_timer_index(6, 7, 0)
    ring.set_timer_index(5, 7, 1)
    assert timers(ring) == [5, 5, 5, 5, 5, 1, 1]


def test_one_frame_is_taken_where_there_is_plainly_room() -> None:
    ring = ring_of(messages_max=3)
    assert not ring.append_one(memoryview(message("no memory yet")), 2)
    assert append(ring, message("a")) == 1
    for text in ("b", "c"):
        assert ring.append_one(memoryview(message(text)), 2)
        ring.check()
    assert not ring.append_one(memoryview(message("full")), 2)
    ring.check()
    assert texts(ring) == ["a", "b", "c"]
    assert ids(ring) == [0, 1, 2]
    ring.release(3)
    assert ring.append_one(memoryview(message("d")), 4)
    ring.check()
    assert ring.copy_frame(3) == build_frame(
        MESSAGE, class_id=1, message_id=3, timer_index=4, content=b"d"
    )


def test_one_frame_goes_neither_over_the_end_nor_over_the_oldest() -> None:
    ring = ring_of()
    fill(ring, 6, size=10_000)
    assert not ring.append_one(memoryview(message("end", size=10_000)), 0)
    ring.release(4)
    assert not ring.append_one(memoryview(message("end", size=10_000)), 0)
    append(ring, *(message(i, size=10_000) for i in "abcd"))
    assert not ring.append_one(memoryview(message("oldest", size=10_000)), 0)
    ring.check()
    assert texts(ring) == ["4", "5", "a", "b", "c", "d"]


def test_memory_long_unused_is_given_back_and_what_is_kept_stays() -> None:
    budget = MemoryBudget(1 << 24)
    ring = ring_of(budget=budget)
    fill(ring, 1000, size=200)
    grown = budget.used_bytes
    ring.release(997)
    for _ in range(RING_IDLE_TICKS):
        ring.tick()
        ring.check()
    assert budget.used_bytes == grown, "it was needed within these ticks"
    for _ in range(RING_IDLE_TICKS):
        ring.tick()
        ring.check()
    assert budget.used_bytes == RING_BYTES_MIN + RING_SLOTS_MIN * SLOT_BYTES
    assert ids(ring) == [997, 998, 999]
    assert append(ring, message("more")) == 1
    assert texts(ring)[-1] == "more"


def test_a_ring_long_empty_gives_everything_back_and_goes_on_numbering() -> None:
    budget = MemoryBudget(1 << 24)
    ring = ring_of(budget=budget)
    fill(ring, 100)
    ring.release(100)
    for _ in range(2 * RING_IDLE_TICKS):
        ring.tick()
        ring.check()
    assert (budget.used_bytes, ring.statistics().memory_bytes) == (0, 0)
    append(ring, message("next"))
    assert ids(ring) == [100]


def test_memory_in_use_is_not_given_back() -> None:
    ring = ring_of()
    fill(ring, 1000, size=200)
    memory = ring.statistics().memory_bytes
    for _ in range(3 * RING_IDLE_TICKS):
        ring.tick()
        ring.check()
    assert ring.statistics().memory_bytes == memory


def test_ids_go_on_from_zero_after_the_last_one() -> None:
    ring = ring_of()
    ring.floor = ring.head = ID_COUNT - 3
    append(ring, *(message(i) for i in range(2)))
    append(ring, *(message(i) for i in range(2, 80)))
    assert ids(ring) == [*range(ID_COUNT - 3, ID_COUNT), *range(77)]
    assert ring.append_one(memoryview(message("one")), 0)
    assert (ring.head, ids(ring)[-1]) == (ID_COUNT + 78, 77)


def test_a_ring_that_was_tampered_with_is_noticed() -> None:
    ring = ring_of()
    fill(ring, 3)
    ring._offsets[1] += 1
    with pytest.raises(AssertionError):
        ring.check()
    ring._offsets[1] -= 1
    ring.check()
    ring.floor = 4
    with pytest.raises(AssertionError):
        ring.check()


def test_a_ring_for_whose_growth_there_is_no_memory_is_full_and_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    ring = ring_of()
    assert fill(ring, RING_SLOTS_MIN) == RING_SLOTS_MIN
    used = ring.budget.used_bytes
    for where in ("simplebus.core.ring.ring.allocate_array", "simplebus.core.ring.columns.RingColumns.allocate_arrays"):
        with monkeypatch.context() as patch:
            patch.setattr(where, refuse)
            assert append(ring, message("one more")) == 0
        assert (len(ring), ring.budget.used_bytes) == (RING_SLOTS_MIN, used)
    assert append(ring, message("one more")) == 1
