"""Due times of replayed messages, at the original pace or faster.

No clock: times and the sleep function are arguments. Order takes precedence over time: a message is
not due before its predecessors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

DUE = "due"
"""Column with a message's publishing time, in microseconds since 1970."""

# Long enough to batch the messages that become due meanwhile, short enough not to show.
_SLEEP_MIN_SECONDS = 0.01
# Maximum silence: empty batches make the sink send heartbeats before the bus drops it.
IDLE_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """Mapping from an archive's times to current times, shared by all tasks."""

    origin: int
    """Archived time of the start, in microseconds since 1970."""
    start: float
    """Current time of the start, in seconds since 1970."""
    speed: float
    """Archived seconds per current second."""

    def due_times(self, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return due times in seconds since 1970, from publishing times in microseconds."""
        found: npt.NDArray[np.float64] = self.start + (stamps - self.origin) / (1e6 * self.speed)
        return found


def pace_batches(
    batches: Iterator[pa.RecordBatch],
    schedule: ReplaySchedule,
    *,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows in order, each when it is due; overdue rows at once.

    During long pauses, batches without rows are yielded.
    """
    latest = float("-inf")
    for batch in batches:
        stamps = batch.column(DUE).to_numpy(zero_copy_only=False)
        dues = np.maximum(np.maximum.accumulate(schedule.due_times(stamps)), latest)
        row, last_yield = 0, now()
        while row < dues.size:
            until = int(np.searchsorted(dues, now(), "right"))
            if until > row:
                yield batch.slice(row, until - row)
                row, last_yield = until, now()
            elif now() - last_yield >= IDLE_SECONDS_MAX:
                yield batch.slice(0, 0)
                last_yield = now()
            else:
                sleep(min(max(float(dues[row]) - now(), _SLEEP_MIN_SECONDS), IDLE_SECONDS_MAX))
        latest = float(dues[-1]) if dues.size else latest
