"""Memory budgets: limits on the memory of all rings, and shares of single classes or users.

Memory is acquired from a budget before it is allocated and released after it is freed.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import ADDRESS_SPACE_RESERVE_BYTES, RING_BYTES_MIN
from simplebus.core.protocol.frames import Item

_PRIVATE_AND_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def allocate_array(count: int, dtype: np.dtype[Item]) -> npt.NDArray[Item]:
    """Return an uninitialised array. Each large array uses a separate memory mapping.

    The memory of a mapping returns to the system as soon as the array is dropped. The C allocator
    would keep freed blocks of this size.
    """
    size = count * dtype.itemsize
    if size < RING_BYTES_MIN:
        return np.empty(count, dtype)
    # Huge pages are not requested: the system takes milliseconds to provide one.
    return np.frombuffer(mmap.mmap(-1, size, flags=_PRIVATE_AND_ANONYMOUS), dtype)


def check_free_address_space(size: int) -> None:
    """Raise OSError unless the system can provide `size` bytes and a reserve.

    The reserve is for everything else that the process allocates: without it, a class that grows
    would stop the whole server where address space is limited.
    """
    mmap.mmap(-1, size + ADDRESS_SPACE_RESERVE_BYTES, flags=_PRIVATE_AND_ANONYMOUS).close()


def discard_pages(array: npt.NDArray[Item], first_byte: int) -> None:
    """Give the whole pages of an array behind `first_byte` back to the system.

    Their content is lost. Arrays without a separate mapping are not changed.
    """
    first_byte = round_up_to_page(first_byte)
    memory = array.base.obj if isinstance(array.base, memoryview) else None
    if isinstance(memory, mmap.mmap) and first_byte < array.nbytes:
        memory.madvise(mmap.MADV_DONTNEED, first_byte, array.nbytes - first_byte)


def round_up_to_page(size: int) -> int:
    """Return the smallest number of whole pages that hold `size` bytes, in bytes."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class MemoryBudget:
    """Bytes that all classes together may hold.

    Invariant: 0 <= used_bytes <= limit_bytes, except for messages restored after a restart.
    """

    def __init__(self, limit: int) -> None:
        self.limit_bytes = limit
        self.used_bytes = 0
        self.overdraft_bytes = 0
        """Bytes that may temporarily be acquired beyond the limit."""
        self.reserved_bytes = 0
        """Bytes that only shares of the budget may acquire."""

    @property
    def available_bytes(self) -> int:
        """Bytes that may be acquired; negative if more than the limit is used."""
        return self.limit_bytes + self.overdraft_bytes - self.used_bytes - self.reserved_bytes

    def acquire(self, size: int) -> bool:
        """Acquire `size` bytes. Returns False, and acquires none, if they are not available."""
        if size > max(0, self.available_bytes):
            return False
        self.used_bytes += size
        return True

    def release(self, size: int) -> None:
        self.used_bytes -= size
        assert self.used_bytes >= 0, self.used_bytes


class MemoryShare(MemoryBudget):
    """Part of a budget, with an optional reservation in it.

    Everything acquired from the share is also acquired from its parent. Invariant: the share adds
    max(0, reserved - used_bytes) to the parent's `reserved_bytes`.
    """

    def __init__(self, limit: int, parent: MemoryBudget, *, reserved: int = 0) -> None:
        super().__init__(limit)
        self._parent = parent
        self._reserved = min(reserved, limit)
        self._parent.reserved_bytes += self._reserved

    def resize(self, limit: int, *, reserved: int) -> None:
        """Change the limit and the reservation."""
        self._parent.reserved_bytes -= self._unused_reservation
        self.limit_bytes, self._reserved = limit, min(reserved, limit)
        self._parent.reserved_bytes += self._unused_reservation

    @property
    def available_bytes(self) -> int:
        return min(super().available_bytes, self._parent.available_bytes + self._unused_reservation)

    @property
    def _unused_reservation(self) -> int:
        """Reserved bytes of the parent that are not used yet."""
        return max(0, self._reserved - self.used_bytes)

    def acquire(self, size: int) -> bool:
        if size > max(0, self.available_bytes):
            return False
        self._add_used(size)
        return True

    def release(self, size: int) -> None:
        assert size <= self.used_bytes, (size, self.used_bytes)
        self._add_used(-size)

    def _add_used(self, size: int) -> None:
        unused_before = self._unused_reservation
        self.used_bytes += size
        self._parent.used_bytes += size
        self._parent.reserved_bytes += self._unused_reservation - unused_before
