"""How often something may happen, for each of many keys.

Rule 1: who does it seldom is never held up; who does it often is slowed to a rate. Keys are
forgotten when that makes no difference, and there are never more than so many.
"""

from __future__ import annotations

KEYS_MAX = 65_536


class Buckets:
    """A bucket for each key: full at first, and filled again at a rate. Time is an argument."""

    def __init__(self, at_once: float, per_second: float) -> None:
        assert at_once >= 1
        self._at_once = at_once
        self._per_second = per_second
        self._left: dict[str, tuple[float, float]] = {}
        """How much is left, and since when that was true."""

    def __len__(self) -> int:
        return len(self._left)

    def left(self, key: str, now: float) -> float:
        """How many it has."""
        left, since = self._left.get(key, (self._at_once, now))
        return min(self._at_once, left + (now - since) * self._per_second)

    def has(self, key: str, now: float) -> bool:
        """Whether there is one that could be taken."""
        return self.left(key, now) >= 1

    def take(self, key: str, now: float) -> bool:
        """Take one, if there is one."""
        left = self.left(key, now)
        self._left.pop(key, None)
        is_there = left >= 1
        if is_there:
            left -= 1
        while len(self._left) >= KEYS_MAX:
            del self._left[next(iter(self._left))]  # The one that was asked for longest ago.
        self._left[key] = (left, now)
        return is_there

    def forget_full(self, now: float) -> None:
        """Forget those that have filled up again."""
        for key, (left, since) in list(self._left.items()):
            if left + (now - since) * self._per_second < self._at_once:
                break  # Those behind it were asked for later.
            del self._left[key]
