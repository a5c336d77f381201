"""How much memory may be held, by all together and by some of them.

Rule 1: memory is taken here before it is allocated, and given back when it is free.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import HUGE_BYTES_MIN, RING_BYTES_MIN
from simplebus.core.protocol.frames import Item


def allocate(count: int, dtype: np.dtype[Item]) -> npt.NDArray[Item]:
    """An array whose memory goes back to the system as soon as it is dropped, if it is large.

    The allocator would keep freed blocks of this size for itself; a mapping of its own is returned.
    """
    size = count * dtype.itemsize
    if size < RING_BYTES_MIN:
        return np.empty(count, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES_MIN and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)


def at_least(least: int, wanted: int) -> int:
    """The smallest power of two that is at least both."""
    return 1 << (max(least, wanted) - 1).bit_length()


class MemoryBudget:
    """Bytes that all classes together may hold. Invariant: 0 <= used <= limit, but for what was
    there before a restart."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.beyond = 0
        """What may be taken beyond the limit for now."""
        self.aside = 0
        """What is left for shares alone."""

    @property
    def left(self) -> int:
        """Bytes that may be taken; below 0 where more is held than the limit."""
        return self.limit + self.beyond - self.used - self.aside

    def take(self, size: int) -> bool:
        """Take size bytes, if they are left."""
        if size > max(0, self.left):
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        self.used -= size
        assert self.used >= 0, self.used


class MemoryShare(MemoryBudget):
    """A part of a budget: what is taken of it is taken of the whole, of which so much is set aside
    for it. Invariant: 0 <= aside of the whole == max(0, set_aside - used)."""

    def __init__(self, limit: int, whole: MemoryBudget, *, set_aside: int = 0) -> None:
        super().__init__(limit)
        self._whole = whole
        self._set_aside = min(set_aside, limit)
        self._whole.aside += self._set_aside

    def resize(self, limit: int, *, set_aside: int) -> None:
        """Have another limit, and another part that is set aside."""
        self._whole.aside -= self._mine
        self.limit, self._set_aside = limit, min(set_aside, limit)
        self._whole.aside += self._mine

    @property
    def left(self) -> int:
        return min(super().left, self._whole.left + self._mine)

    @property
    def _mine(self) -> int:
        """What of the whole is left for nobody else."""
        return max(0, self._set_aside - self.used)

    def take(self, size: int) -> bool:
        if size > max(0, self.left):
            return False
        self._add(size)
        return True

    def give(self, size: int) -> None:
        assert size <= self.used, (size, self.used)
        self._add(-size)

    def _add(self, size: int) -> None:
        before = self._mine
        self.used += size
        self._whole.used += size
        self._whole.aside += self._mine - before
