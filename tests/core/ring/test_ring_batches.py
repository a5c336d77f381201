"""A ring filled with batches equals a ring filled with single frames. See
protocol/test_frame_batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import RING_IDLE_TICKS
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from tests.behaviour.wire_peer import LARGE_BATCH_COUNT, build_batch
from tests.support.oracles import ID_COUNT, RingOracle, build_frame, parse_frame
from tests.support.strategies import MESSAGE

MESSAGES_MAX = 3000
CLASS_ID = 0x8C0D


def store_form(content: bytes) -> bytes:
    return build_frame(MESSAGE, class_id=CLASS_ID, content=content)


class RingPair:
    """The same messages in a ring filled with batches, in one filled singly, and in the oracle."""

    def __init__(self, *, first: int = 0, bytes_max: int = 1 << 22) -> None:
        self.batched, self.single = (
            Ring(
                class_id=CLASS_ID,
                messages_max=MESSAGES_MAX,
                bytes_max=bytes_max,
                budget=MemoryBudget(1 << 30),
            )
            for _ in range(2)
        )
        self.oracle = RingOracle(floor=first)
        for ring in (self.batched, self.single):
            ring.floor = ring.head = first

    def append(self, frames: Sequence[bytes], *, timer_index: int) -> None:
        taken = self.batched.append(build_batch(*frames), timer_index)
        one_by_one = 0
        for frame in frames:
            if not self.single.append_one(memoryview(frame), timer_index) and not (
                self.single.append(build_batch(frame), timer_index)
            ):
                break
            one_by_one += 1
        assert taken == one_by_one
        for frame in frames[:taken]:
            frame_type, class_id, _, _, content = parse_frame(frame)
            self.oracle.append(
                build_frame(
                    frame_type,
                    class_id=class_id,
                    content=content,
                    message_id=self.oracle.head % ID_COUNT,
                    timer_index=timer_index,
                )
            )
        self.check()

    def release(self, count: int) -> None:
        floor = min(self.batched.floor + count, self.batched.head)
        self.oracle.release(self.oracle.floor, floor)
        for ring in (self.batched, self.single):
            ring.release(floor)
        self.check()

    def stamp(self, first: int, last: int, timer_index: int) -> None:
        for ring in (self.batched, self.single):
            ring.set_timer_index(first, last, timer_index)
        for sequence in range(first, last):
            frame = self.oracle.frames[sequence]
            self.oracle.frames[sequence] = frame[:7] + timer_index.to_bytes(2, "big") + frame[9:]
        self.check()

    def tick(self, times: int) -> None:
        for _ in range(times):
            self.batched.tick()
            self.single.tick()
        self.check()

    def check(self) -> None:
        oracle = self.oracle
        for ring in (self.batched, self.single):
            ring.check()
            assert (ring.floor, ring.head) == (oracle.floor, oracle.head)
            gathered, at = b"", ring.floor
            while at < ring.head:
                piece, at = ring.view_frames(at, ring.head, 1 << 30)
                gathered += piece
            assert gathered == oracle.read(ring.floor, ring.head)
        assert self.batched.frame_bytes == self.single.frame_bytes


ring_floors = st.sampled_from([0, ID_COUNT - 100, 3 * ID_COUNT - 1])
"""From the beginning, and from just before the message ids wrap."""


@given(
    ring_floors,
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=3),
            st.integers(0, 500),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_batches_equal_single_appends(
    first: int, steps: list[tuple[list[tuple[int, int]], int, int]]
) -> None:
    # Runs of one length: strided. Several: by columns. Short ones: the plain loop.
    rings = RingPair(first=first)
    for runs, released, timer_index in steps:
        frames = [
            store_form(b"%d" % number + b"y" * size)
            for number, (size, count) in enumerate(runs)
            for _ in range(count)
        ]
        rings.append(frames, timer_index=timer_index)
        rings.release(released)


@given(st.integers(150, 2100), st.integers(1, 40), st.integers(20, 60))
def test_batches_equal_single_appends_while_growing_and_draining(
    size: int, uneven: int, count: int
) -> None:
    # A backlog of `count` frames or two: segments are added, drained and reused.
    rings = RingPair(first=ID_COUNT - 2 * count)
    for turn in range(8):
        frames = [store_form(b"z" * (size + (turn * i) % uneven)) for i in range(count)]
        rings.append(frames, timer_index=turn % 3)
        if turn != 3:
            rings.release(count - turn)
    rings.stamp(rings.oracle.floor + 1, rings.oracle.head - 1, 5)
    rings.release(len(rings.batched) - 2)
    rings.tick(2 * RING_IDLE_TICKS)
    rings.append([store_form(b"more")] * LARGE_BATCH_COUNT, timer_index=5)
    rings.release(1 << 30)
    rings.tick(2 * RING_IDLE_TICKS)
    assert rings.batched.statistics().memory_bytes == 0
    rings.append([store_form(b"again")] * 3, timer_index=1)


@pytest.mark.parametrize("size", [0, 1000, 30_000])
def test_full_ring_accepts_equally_many_in_batches(size: int) -> None:
    # Full by messages, by bytes, and by bytes with an unused end of each segment.
    rings = RingPair(bytes_max=1 << 18)
    frame = store_form(b"f" * size)
    for turn in range(3):
        rings.append([frame] * (MESSAGES_MAX + 10), timer_index=turn)
        assert 0 < len(rings.batched) <= MESSAGES_MAX
        rings.release(1 + turn * 3)


def test_message_ids_wrap_inside_a_batch_on_every_path() -> None:
    uniform = [store_form(b"s")] * LARGE_BATCH_COUNT
    uneven = [store_form(b"u" * (i % 5)) for i in range(LARGE_BATCH_COUNT)]
    for frames in (uniform, uneven, uneven[:10]):
        rings = RingPair(first=ID_COUNT - 5)
        rings.append(frames, timer_index=2)
        assert rings.batched.copy_frame(ID_COUNT - 1)[3:7] == b"\x7f\xff\xff\xff"
        assert rings.batched.copy_frame(ID_COUNT)[3:7] == b"\0\0\0\0"
