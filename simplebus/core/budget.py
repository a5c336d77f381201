"""How much memory may be held, by all together and by some of them.

Rule 1: memory is taken here before it is allocated, and given back when it is free.
"""

from __future__ import annotations


class MemoryBudget:
    """Bytes that all classes together may hold. Invariant: 0 <= used <= limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def left(self) -> int:
        """Bytes not taken."""
        return self.limit - self.used

    def take(self, size: int) -> bool:
        """Take size bytes, if they are left."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        self.used -= size
        assert self.used >= 0, self.used


class MemoryShare(MemoryBudget):
    """A part of a budget: what is taken of it is taken of the whole."""

    def __init__(self, limit: int, whole: MemoryBudget) -> None:
        super().__init__(limit)
        self._whole = whole

    @property
    def left(self) -> int:
        return min(super().left, self._whole.left)

    def take(self, size: int) -> bool:
        if self.used + size > self.limit or not self._whole.take(size):
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        super().give(size)
        self._whole.give(size)
