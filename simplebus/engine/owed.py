"""What a door that goes gives back of a consumer that was its alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simplebus.core.columns import Times
from simplebus.core.frames import Integers

BURIED = float("inf")
"""As a pause: its dead letter is on its way."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What a door that goes gives back of a consumer that was its alone."""

    sequences: Integers
    """Messages of the stream, ascending: shape (n,)."""
    waits: Times
    """For how many seconds none of them is to be sent; less than 0 for one that is done with."""
    highest: int
    """The last one that was sent to this door,"""
    sent_to: int
    """or to somebody before."""

    def when_buried(self, is_stored: bool) -> Owed | None:
        """The same when it is known whether the dead letters are stored of what is being buried:
        who comes next has it otherwise. None for nothing."""
        waits = np.where(self.waits == BURIED, -1.0 if is_stored else 0.0, self.waits)
        return replace(self, waits=waits) if (waits >= 0.0).any() else None
