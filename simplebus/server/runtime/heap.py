"""Heap of the C library: freed memory stays mapped, and much of it returns to the system in steps.

A page of new memory takes two microseconds or more. Allocations of a few MiB, such as a dict that
grows, would take several milliseconds. So some memory is mapped in advance as soon as clients have
sent much at once. The functions have no effect with another C library than glibc.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import trio

from simplebus.server.turns import SlowRequestTurns

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_TRIM = -1

_MAPPED_SEPARATELY_BYTES = 4 * 1024 * 1024
_TRIM_BYTES = 32 * 1024 * 1024
_RESERVE_BYTES = 16 * 1024 * 1024
"""Memory that is mapped in advance, and free memory that is kept."""
_PIECE_BYTES = 3 * 1024 * 1024
"""Contiguous memory of the reserve, as much as a dict with 65,536 entries needs to grow."""
_MAPPED_BYTES_PER_STEP = 512 * 1024
_MAP_SECONDS = 0.5
_RETURN_SECONDS = 10.0
_GROWTH_BYTES = 64 * 1024 * 1024
"""Growth of the heap since the start, below which free memory is kept."""
_CHUNK_BYTES = 256 * 1024
_RETURNED_CHUNKS_PER_STEP = 32
_FREED_CHUNKS_PER_STEP = 1024
_PAGE_BYTES = resource.getpagesize()


def keep_freed_memory_mapped() -> None:
    """Make malloc keep freed memory instead of returning it to the system and faulting it in again.

    Measured with two classes interleaved: 110,000 page faults per second without this, none with
    it. Rings have separate mappings and are still returned.
    """
    if (libc := _load_glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_SEPARATELY_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


async def maintain(had_large_read: trio.Event, turns: SlowRequestTurns) -> None:
    """From the first large read on, map memory in advance and return free memory at regular
    intervals, until cancelled.

    After many clients have left, or slow ones have read their pending output, malloc keeps their
    memory. `malloc_trim` returns all free memory in one call: 47 ms for 700 MB. `free` may trim the
    heap, too, so trimming is switched off. For a process that runs only the server.

    Args:
        had_large_read: Set after the first large read.
        turns: Turns for the steps.
    """
    if (libc := _load_glibc()) is None:
        return
    started_end = libc.sbrk(0)
    await had_large_read.wait()
    while True:
        next_return = trio.current_time() + _RETURN_SECONDS
        while trio.current_time() < next_return:
            libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
            for _ in _map_reserve_in_steps():
                await turns.wait_turn()
            await trio.sleep(_MAP_SECONDS)
        if libc.sbrk(0) > started_end + _GROWTH_BYTES:
            await return_free_memory(turns)


async def return_free_memory(turns: SlowRequestTurns) -> None:
    """Return free memory to the system, except for a reserve."""
    for _ in return_free_memory_in_steps():
        await turns.wait_turn()


def _map_reserve_in_steps() -> Iterator[None]:
    """Map memory and free it, so that later allocations use it. Ends early without memory.

    One write per page is enough, and takes 0.1 ms in total if the memory is mapped already.
    """
    pieces: list[npt.NDArray[np.uint8]] = []
    while len(pieces) * _PIECE_BYTES < _RESERVE_BYTES:
        try:
            pieces.append(np.empty(_PIECE_BYTES, np.uint8))
        except MemoryError:
            return
        for first in range(0, _PIECE_BYTES, _MAPPED_BYTES_PER_STEP):
            pieces[-1][first : first + _MAPPED_BYTES_PER_STEP : _PAGE_BYTES] = 0
            yield


def return_free_memory_in_steps() -> Iterator[None]:
    """Return free memory to the system in steps, between which malloc may be called.

    Allocates the free memory in chunks, discards the pages of the chunks, and frees the chunks.
    """
    if (libc := _load_glibc()) is None:
        return
    heap_end = libc.sbrk(0)
    chunks: list[int] = []
    try:
        while True:
            last_heap_end = libc.sbrk(0)
            if (chunk := libc.malloc(_CHUNK_BYTES)) is None:
                break
            chunks.append(chunk)
            end = chunk + _CHUNK_BYTES
            if end > heap_end:  # The heap had no free chunk of this size any more.
                break
            if len(chunks) * _CHUNK_BYTES > _RESERVE_BYTES:
                first_page = -(-chunk // _PAGE_BYTES) * _PAGE_BYTES
                last_page = end // _PAGE_BYTES * _PAGE_BYTES
                libc.madvise(first_page, last_page - first_page, mmap.MADV_DONTNEED)
            if len(chunks) % _RETURNED_CHUNKS_PER_STEP == 0:
                yield
        if chunks and libc.sbrk(0) > last_heap_end:  # The last chunk has extended the heap.
            libc.mallopt(_M_TRIM_THRESHOLD, 0)
            libc.free(chunks.pop())
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        while chunks:
            libc.free(chunks.pop())
            if len(chunks) % _FREED_CHUNKS_PER_STEP == 0:
                yield
    finally:
        for chunk in chunks:
            libc.free(chunk)


def _load_glibc() -> ctypes.PyDLL | None:
    """Return the C library with the types of the functions used; None if it is not glibc."""
    try:
        libc = ctypes.PyDLL(None)
        malloc, free, madvise, sbrk = libc.malloc, libc.free, libc.madvise, libc.sbrk
        libc.mallopt  # noqa: B018 - Other allocators have no `mallopt`.
    except (OSError, AttributeError):
        return None
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    sbrk.argtypes, sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    return libc
