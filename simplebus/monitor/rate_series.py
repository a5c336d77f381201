"""Rates of a program over time, averaged over steps of equal length."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec


class RateHistory(msgspec.Struct, frozen=True):
    """Rates per second of successive steps."""

    first: int
    """Number of the first step, counted from the start of the program."""
    seconds: list[float]
    """Actual duration of each step."""
    flows: dict[str, list[float | None]]
    """Rates by name; None for steps without a value."""


class RateSeries:
    """The latest steps of one length. Older ones are forgotten."""

    def __init__(self, *, tick_count: int, step_count_max: int) -> None:
        """`tick_count` is the number of ticks of a step."""
        self._tick_count = tick_count
        self._steps: deque[tuple[float, dict[str, float]]] = deque(maxlen=step_count_max)
        self._step_count = 0
        """Number of completed steps, forgotten ones included."""
        self._pending_ticks = 0
        self._pending_seconds = 0.0
        self._pending_amounts: dict[str, float] = {}

    def append(self, seconds: float, rates: Mapping[str, float]) -> None:
        """Append the rates of one tick."""
        self._pending_ticks += 1
        self._pending_seconds += seconds
        for name, rate in rates.items():
            self._pending_amounts[name] = self._pending_amounts.get(name, 0.0) + rate * seconds
        if self._pending_ticks < self._tick_count:
            return
        self._steps.append(self._average_pending())
        self._step_count += 1
        self._pending_ticks, self._pending_seconds, self._pending_amounts = 0, 0.0, {}

    def read(self, since: int = 0, *, with_incomplete: bool = False) -> RateHistory:
        """Return the stored steps from number `since` on, and the incomplete one if requested."""
        first = max(self._step_count - len(self._steps), min(since, self._step_count))
        steps = list(self._steps)[len(self._steps) - (self._step_count - first) :]
        if with_incomplete and self._pending_ticks:
            steps.append(self._average_pending())
        names = dict.fromkeys(name for _, rates in steps for name in rates)
        return RateHistory(
            first,
            [round(seconds, 3) for seconds, _ in steps],
            {
                name: [
                    None if (rate := rates.get(name)) is None else round(rate, 1)
                    for _, rates in steps
                ]
                for name in names
            },
        )

    def _average_pending(self) -> tuple[float, dict[str, float]]:
        seconds = self._pending_seconds
        return seconds, {name: each / seconds for name, each in self._pending_amounts.items()}
