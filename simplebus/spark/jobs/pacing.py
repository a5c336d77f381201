"""When a message of an archive is due again, if time passes as it did then, or faster.

Rule 1: nothing of Spark and no clock here: times are arguments, and so is sleeping.
Rule 2: order comes before time: a message is due no sooner than those before it.
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
"""The column that says when a message was published, in microseconds since 1970."""

# A nap long enough that what became due meanwhile goes out together, and short enough that nobody
# sees it.
_NAP_SECONDS = 0.01
# A bus hears of us more often than this, or it takes us for dead.
SILENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How the times of an archive become times now, the same for everybody who plays it."""

    origin: int
    """When it began then, in microseconds since 1970."""
    start: float
    """When it begins now, in seconds since 1970."""
    speed: float
    """How many seconds of then pass in one of now."""

    def due(self, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """When messages are due now, by when they were published then."""
        found: npt.NDArray[np.float64] = self.start + (stamps - self.origin) / (1e6 * self.speed)
        return found


def paced(
    batches: Iterator[pa.RecordBatch],
    pace: Pace,
    *,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, each when it is due, or at once when it is late already.

    Long silences are broken by batches without rows.
    """
    latest = float("-inf")
    for batch in batches:
        stamps = batch.column(DUE).to_numpy(zero_copy_only=False)
        dues = np.maximum(np.maximum.accumulate(pace.due(stamps)), latest)
        at, spoke = 0, now()
        while at < dues.size:
            until = int(np.searchsorted(dues, now(), "right"))
            if until > at:
                yield batch.slice(at, until - at)
                at, spoke = until, now()
            elif now() - spoke >= SILENCE_SECONDS:
                yield batch.slice(0, 0)
                spoke = now()
            else:
                sleep(min(max(float(dues[at]) - now(), _NAP_SECONDS), SILENCE_SECONDS))
        latest = float(dues[-1]) if dues.size else latest
