"""Memory of the C library: it returns to the system in steps, except for a reserve."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from simplebus.server.process import resident_bytes
from simplebus.server.runtime import heap
from simplebus.server.turns import SlowRequestTurns

MIB = 1024 * 1024
M_TRIM_THRESHOLD = -1
"""From glibc's malloc.h."""
PIECE_BYTES = 64 * 1024
PIECE_COUNT = 2000
TOTAL_BYTES = PIECE_COUNT * PIECE_BYTES

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def heap_end() -> int:
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    end: int = sbrk(0)
    return end


@pytest.fixture(autouse=True)
def kept_memory() -> None:
    """Let malloc keep freed memory, as in a server."""
    heap.keep_freed_memory_mapped()


@pytest.fixture
def pieces() -> Iterator[list[bytearray]]:
    """Return pieces of the heap, with memory in use between them."""
    kept, pieces = [], []
    for number in range(PIECE_COUNT):
        pieces.append(bytearray(PIECE_BYTES))
        if number % 50 == 0:
            kept.append(bytes([number % 256]) * 5000)
    kept.append(bytes(5000))
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, -1)  # `free` must not return memory itself.
    yield pieces
    assert all(set(piece) == {number * 50 % 256} for number, piece in enumerate(kept[:-1]))


def test_free_memory_is_returned_in_steps(pieces: list[bytearray]) -> None:
    before = resident_bytes()
    pieces.clear()
    steps = sum(1 for _ in heap.return_free_memory_in_steps())
    assert before - resident_bytes() > TOTAL_BYTES // 2
    assert steps >= TOTAL_BYTES // (16 * MIB)


def test_heap_does_not_grow_when_memory_is_returned() -> None:
    before = heap_end()
    for _ in range(400):
        for _ in heap.return_free_memory_in_steps():
            pass
    assert heap_end() - before <= 8 * MIB


def test_return_can_be_stopped_after_a_step(pieces: list[bytearray]) -> None:
    pieces.clear()
    for _ in heap.return_free_memory_in_steps():
        break
    pieces += [bytearray(b"x" * PIECE_BYTES) for _ in range(PIECE_COUNT)]
    assert all(piece == pieces[0] for piece in pieces)


async def test_memory_is_mapped_after_a_large_read_and_returned_at_intervals(
    pieces: list[bytearray],
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heap, "_GROWTH_BYTES", -heap_end())
    for _ in heap.return_free_memory_in_steps():
        pass
    had_large_read = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heap.maintain, had_large_read, SlowRequestTurns())
        before = resident_bytes()
        await trio.sleep(60)
        assert abs(resident_bytes() - before) < 4 * MIB
        had_large_read.set()
        await trio.sleep(1)
        pieces.clear()
        before = resident_bytes()
        await trio.sleep(60)
        assert before - resident_bytes() > TOTAL_BYTES // 2
        nursery.cancel_scope.cancel()
