"""Limits of the work that one turn does for one read of a peer.

The rest of the read is processed in later turns, so that other peers are served in between.
"""

from __future__ import annotations

import re
from collections.abc import Container

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import (
    ACKS_PER_TURN,
    FRAMES_AFTER_REFUSALS,
    FRAMES_PER_TURN,
    HEADER_BYTES,
    HEADERS_BYTES_PER_TURN,
    INTERLEAVED_ACKS_PER_TURN,
    INTERLEAVED_ACKS_PER_TURN_VERSION1,
    KEYS_PER_TURN,
    LONG_NACK_MESSAGES,
    MIXED_ENVELOPES_PER_TURN,
    PLAIN_FRAMES_MAX,
    REFUSALS_MAX,
    REFUSED_RUNS_PER_TURN,
    SLOW_ACK_BYTES,
    SLOW_ACK_BYTES_PER_MESSAGE,
    SLOW_KEYS_PER_TURN,
    SLOW_REQUEST_BYTES,
    SLOW_REQUESTS_BYTES_MAX,
    TYPE_CHANGES_PER_TURN,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_reader import measure_headers, survey_envelopes
from simplebus.core.protocol.frames import Bytes, FrameBatch, Integers

_SLOW_COSTS: Integers = np.zeros(256, np.int64)
"""Cost in bytes of a slow request, without its length, by frame type; 0 for other frames."""
_SLOW_COSTS[[frames.CONNECT, frames.SUBSCRIBE, frames.UNSUBSCRIBE]] = SLOW_REQUEST_BYTES
_SLOW_COSTS[[frames.FETCH, frames.PURGE, frames.INQUIRE]] = SLOW_REQUEST_BYTES
_SLOW_COSTS[[frames.NACK, frames.WORKING]] = SLOW_ACK_BYTES

_LAST_VALUES = b'"last_values"'
"""Text in a Subscribe or Connect that may need several turns."""

_TERMINATE = b" terminate"
"""Text in a Nack whose messages become dead letters."""

_MESSAGE_RANGE = re.compile(rb"(\d{1,19})-(\d{1,19})")
"""Beginning of the content of a Nack or Working."""

_UNLIMITED_BYTES = 4 * 1024
"""Envelopes of one type that a turn processes in any case."""

_COMPARED_FIRST = 64
"""Frames whose types and classes are compared before those of all frames."""

_SURVEYED_FIRST = 2048
"""Envelopes that are surveyed before the others of a batch."""

_OTHER_CHANNELS_MAX = 64
"""A batch is mixed if this many of its envelopes have another channel than the first envelope."""


class TurnBudget:
    """Limits of the work that one turn does for one read.

    Mixed envelopes, headers, frames of different lengths, types or classes, and changes of type
    are limited per read, slow requests and different classes per batch.
    """

    def __init__(
        self, *, has_refusals: bool = False, open_classes: Container[int] | None = None
    ) -> None:
        """Create the budget of one read.

        Args:
            has_refusals: True if the peer has recently sent many frames that were refused.
            open_classes: Ids of the classes to which the peer may publish; messages to others,
                and invalid acks, are refused. None if the first such frame is fatal.
        """
        self._has_refusals = has_refusals
        self._open_classes = open_classes
        self._interleaved_acks_max = (
            INTERLEAVED_ACKS_PER_TURN_VERSION1
            if open_classes is None
            else INTERLEAVED_ACKS_PER_TURN
        )
        self._frames_max = FRAMES_AFTER_REFUSALS if has_refusals else FRAMES_PER_TURN
        self._type_changes_max = TYPE_CHANGES_PER_TURN
        self._mixed_max = MIXED_ENVELOPES_PER_TURN
        self._header_bytes_max = HEADERS_BYTES_PER_TURN

    @property
    def is_mostly_spent(self) -> bool:
        """True if less than half of the mixed envelopes are left."""
        return 2 * self._mixed_max < MIXED_ENVELOPES_PER_TURN

    def limit(self, batch: FrameBatch) -> FrameBatch:
        """Return the leading frames of the next batch that this turn should process.

        If these are all of its frames, the turn continues with the next batch. At least one frame
        of the first batch is returned.
        """
        for find_end in (self._find_frames_end, _find_keys_end, self._find_expensive_end):
            end = find_end(batch)
            if end is not None and end < batch.count:
                batch = batch.slice(0, end)
            if not batch.count:
                break
        return batch

    def _find_frames_end(self, batch: FrameBatch) -> int | None:
        """Return how many frames of any kind this turn may process, or None for all."""
        if batch.data[0] == frames.ACK and batch.count > ACKS_PER_TURN:
            return min(ACKS_PER_TURN, self._frames_max)
        # The first frames of most mixed batches differ: then the others are not compared.
        head = batch.slice(0, min(_COMPARED_FIRST, batch.count))
        if batch.stride and not self._has_refusals and head.is_uniform and batch.is_uniform:
            return None
        end = self._frames_max
        self._frames_max = max(0, end - batch.count)
        return end if batch.count > end else None

    def _find_expensive_end(self, batch: FrameBatch) -> int | None:
        """Return the end of the expensive frames that this turn may process, or None for all."""
        if not batch.is_uniform:
            types = batch.data[batch.starts]
            envelopes = np.flatnonzero(types == frames.ENVELOPE)
            return _find_first(
                _find_slow_requests_end(batch, types),
                self._find_mixed_end(envelopes),
                self._find_headers_end(batch, envelopes),
                self._find_interleaved_acks_end(types),
                self._find_type_changes_end(types),
                self._find_refused_runs_end(batch),
            )
        frame_type = batch.data[0]
        if _SLOW_COSTS[frame_type]:
            return _find_slow_requests_end(batch, batch.data[batch.starts])
        if frame_type == frames.ACK and self._open_classes is not None:
            valid_count = batch.ack_ranges()[0].size
            end = valid_count + REFUSALS_MAX
            return end if end < batch.count else None
        if frame_type != frames.ENVELOPE or batch.data.size <= _UNLIMITED_BYTES:
            return None
        if batch.count <= _SURVEYED_FIRST:
            return self._find_envelopes_end(batch)
        # The first envelopes of most expensive batches are expensive: the others are not surveyed.
        first_end = self._find_envelopes_end(batch.slice(0, _SURVEYED_FIRST))
        if first_end is not None:
            return first_end
        rest_end = self._find_envelopes_end(batch.slice(_SURVEYED_FIRST, batch.count))
        return None if rest_end is None else _SURVEYED_FIRST + rest_end

    def _find_envelopes_end(self, batch: FrameBatch) -> int | None:
        """Return the end of the envelopes that this turn may process, or None for all.

        All envelopes are for one class.
        """
        survey = survey_envelopes(batch)
        others = survey.other_indexes
        if not others.size and not survey.may_be_stuffed:
            return None
        headers_end = self._find_headers_end(batch, others)
        if batch.count <= PLAIN_FRAMES_MAX:
            return headers_end
        if survey.other_channel_count >= _OTHER_CHANNELS_MAX or survey.may_be_stuffed:
            others = np.arange(batch.count)
        elif others.size < _OTHER_CHANNELS_MAX:
            return headers_end
        return _find_first(headers_end, self._find_mixed_end(others))

    def _find_mixed_end(self, indexes: npt.NDArray[np.intp]) -> int | None:
        """Return the end of the envelopes that this turn may process, or None for all.

        `indexes` are the frame indexes of the envelopes in the batch.
        """
        if indexes.size > self._mixed_max:
            return int(indexes[self._mixed_max])
        self._mixed_max -= indexes.size
        return None

    def _find_headers_end(self, batch: FrameBatch, indexes: npt.NDArray[np.intp]) -> int | None:
        """Return the end of the envelopes whose headers this turn may process, or None for all.

        `indexes` as in `_find_mixed_end`. The first envelope of a turn is processed in any case.
        """
        lengths = measure_headers(batch, indexes) if indexes.size else None
        if lengths is None:
            return None
        ends = np.cumsum(lengths)
        count = int(ends.searchsorted(self._header_bytes_max, side="right"))
        if self._header_bytes_max == HEADERS_BYTES_PER_TURN:
            count = max(1, count)
        self._header_bytes_max = max(0, self._header_bytes_max - int(ends[-1]))
        return int(indexes[count]) if count < indexes.size else None

    def _find_interleaved_acks_end(self, types: Bytes) -> int | None:
        """Return the end of the acks between other frames that this turn may process, or None for
        all. Some of them may be invalid.
        """
        acks = np.flatnonzero(types == frames.ACK)
        if acks.size > self._interleaved_acks_max:
            return int(acks[self._interleaved_acks_max])
        self._interleaved_acks_max -= acks.size
        return None

    def _find_refused_runs_end(self, batch: FrameBatch) -> int | None:
        """Return the end of the runs of one type and class that this turn may process if some of
        the classes refuse messages, or None for all.
        """
        changes = batch.key_changes()
        if changes.size <= REFUSED_RUNS_PER_TURN or not self._has_closed_class(batch, changes):
            return None
        return int(changes[REFUSED_RUNS_PER_TURN])

    def _has_closed_class(self, batch: FrameBatch, changes: npt.NDArray[np.intp]) -> bool:
        """Return True if some messages that begin a run are for a class that refuses them."""
        open_classes = self._open_classes
        if open_classes is None:
            return False
        starts = batch.starts[changes]
        types, data = batch.data[starts], batch.data
        starts = starts[(types == frames.MESSAGE) | (types == frames.ENVELOPE)]
        class_ids = np.unique(data[starts + 1].astype(np.uint16) << 8 | data[starts + 2])
        return any(class_id not in open_classes for class_id in class_ids.tolist())

    def _find_type_changes_end(self, types: Bytes) -> int | None:
        """Return the end of the runs of one frame type that this turn may process, or None for all.

        Each run is processed on its own.
        """
        changes = np.flatnonzero(types[1:] != types[:-1])
        if changes.size > self._type_changes_max:
            return int(changes[self._type_changes_max]) + 1
        self._type_changes_max -= changes.size
        return None


def _find_first(*ends: int | None) -> int | None:
    """Return the lowest of some ends; None stands for no end."""
    return min((end for end in ends if end is not None), default=None)


def _find_keys_end(batch: FrameBatch) -> int | None:
    """Return the end of the frames of so many types and classes as one turn may process, or None
    for all frames.
    """
    changes = batch.key_changes()
    if changes.size < SLOW_KEYS_PER_TURN:
        return None
    firsts = np.concatenate(([0], changes))
    keys, first_of_key = np.unique(batch.keys()[firsts], return_index=True)
    # Index of the first frame of each key, and the number of frames.
    ends = np.append(firsts[np.sort(first_of_key)], batch.count)
    keys_max = min(KEYS_PER_TURN, keys.size)
    has_few_frames = ends[keys_max] < 2 * keys_max
    if has_few_frames or (keys & 0xFF == frames.ACK).any():
        keys_max = min(SLOW_KEYS_PER_TURN, keys.size)
    return int(ends[keys_max]) if keys_max < keys.size else None


def _find_slow_requests_end(batch: FrameBatch, types: Bytes) -> int | None:
    """Return the end of the slow requests of one turn, or None if it may process all frames.

    A Connect, an Unsubscribe, a terminate, a Nack or Working for many messages, and a Subscribe
    with the text "last_values" may need several turns, so no frame after such a request is
    processed in this turn.
    """
    costs = _SLOW_COSTS[types]
    slow = np.flatnonzero(costs)
    if not slow.size:
        return None
    lengths = batch.lengths[slow]
    costs = lengths + costs[slow]
    count = _count_affordable(costs)
    is_long = (types[slow] == frames.CONNECT) | (types[slow] == frames.UNSUBSCRIBE)
    for index in np.flatnonzero(~is_long[:count]).tolist():
        frame_type = types[slow[index]]
        frame = batch.data[batch.bounds[slow[index]] : batch.ends[slow[index]]].tobytes()
        if frame_type == frames.SUBSCRIBE:
            is_long[index] = _LAST_VALUES in frame
        elif frame_type in (frames.NACK, frames.WORKING):
            message_count = _count_rejected(frame)
            costs[index] += min(message_count, LONG_NACK_MESSAGES) * SLOW_ACK_BYTES_PER_MESSAGE
            is_long[index] = message_count > LONG_NACK_MESSAGES or _TERMINATE in frame
    count = _count_affordable(costs)
    if is_long[:count].any():
        return int(slow[is_long.argmax()]) + 1
    return None if count >= slow.size else int(slow[count - 1]) + 1


def _count_affordable(costs: Integers) -> int:
    """Return how many of the first slow requests one turn may process, but at least 1."""
    return max(1, int(np.cumsum(costs).searchsorted(SLOW_REQUESTS_BYTES_MAX, side="right")))


def _count_rejected(frame: bytes) -> int:
    """Return how many messages a Nack or Working names; 0 if it is invalid."""
    found = _MESSAGE_RANGE.match(frame, HEADER_BYTES)
    return 0 if found is None else max(0, int(found[2]) - int(found[1]))
