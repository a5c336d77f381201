"""Where the payloads begin in a run of envelopes that look alike.

Rule 1: this only finds out whether every envelope of the run is as long as the first one; what
stands in it is told elsewhere.
Rule 2: "no" is always a right answer: each envelope is then looked at for itself.

    content   │ fields │ times … │ length, channel │ length, key │ length, headers │ payload …
              └ all of the same length: one slice per payload ──────────────────────┘
"""

from __future__ import annotations

import numpy as np

from simplebus.core import frames
from simplebus.core.client.runs import Run
from simplebus.core.frames import DELIMITER
from simplebus.core.limits import (
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    PLAIN_FRAMES_MAX,
)

_TIMES = 0b000111
_TEXTS = (0b001000, 0b010000, 0b100000)
_UNKNOWN = 0b11000000
_LENGTH: np.dtype[np.uint16] = np.dtype(">u2")
_NEVER_IN_A_PLAIN_ONE = DELIMITER[:-1]


def uniform_prefix(run: Run) -> int | None:
    """How long every envelope of the run is; None when they differ, or one holds stuffing."""
    raw = run.raw
    if run.count == 1 or raw.count(_NEVER_IN_A_PLAIN_ONE) != run.count:
        return None
    shortest = run.stride if run.bounds is None else int(np.diff(run.bounds).min())
    if shortest == FRAME_BYTES_MIN or raw[HEADER_BYTES] & _UNKNOWN:
        return None
    fields = raw[HEADER_BYTES]
    at = HEADER_BYTES + 1 + 8 * (fields & _TIMES).bit_count()
    places = []
    for text in _TEXTS:
        if fields & text:
            places.append(at)
            at += 2 + int.from_bytes(raw[at : at + 2], "big")
    if at > shortest - DELIMITER_BYTES or not _agree(run, places):
        return None
    return at - HEADER_BYTES


def _agree(run: Run, places: list[int]) -> bool:
    """Whether every frame has the first one's fields, and its lengths in these places."""
    raw = run.raw
    if run.count <= PLAIN_FRAMES_MAX:
        parts = [slice(HEADER_BYTES, HEADER_BYTES + 1), *(slice(at, at + 2) for at in places)]
        begins = range(0, len(raw), run.stride) if run.bounds is None else run.bounds[:-1].tolist()
        return all(
            raw[begin + part.start : begin + part.stop] == raw[part]
            for begin in begins
            for part in parts
        )
    data = np.frombuffer(raw, np.uint8)
    lengths = frames.unaligned(data, _LENGTH)
    begins = np.arange(0, data.size, run.stride) if run.bounds is None else run.bounds[:-1]
    if (data[begins + HEADER_BYTES] != raw[HEADER_BYTES]).any():
        return False
    return not any((lengths[begins + at] != lengths[at]).any() for at in places)
