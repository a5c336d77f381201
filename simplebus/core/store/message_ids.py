"""Message ids: the ids that publishers have given their messages lately, for deduplication.

Each class has a window: the ids of its messages of the last DUPLICATE_WINDOW_SECONDS, with their
sequences. A message whose id is in the window is a duplicate. All windows together hold at most
MESSAGE_IDS_MAX ids; at the limit a new id replaces the oldest id of its class.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator

import numpy as np

from simplebus.core.limits import (
    DELIMITER_BYTES,
    DUPLICATE_WINDOW_SECONDS,
    HEADER_BYTES,
    MESSAGE_IDS_EXPIRED_PER_TICK,
    MESSAGE_IDS_MAX,
    SEQUENCE_MAX,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import decode
from simplebus.core.snapshot import MessageIdsSnapshot

MESSAGE_ID_HEADER = "Nats-Msg-Id"
"""Header with the id of a message."""

# Exactness of the times of ids.
_STEP_SECONDS = 1.0
# Expired ids that each new id removes.
_EXPIRED_PER_ADD = 2


class MessageIds:
    """The windows of all classes. Times are in seconds since 1970."""

    def __init__(self, count_max: int = MESSAGE_IDS_MAX) -> None:
        """`count_max` limits the ids of all windows together."""
        self._count_max = count_max
        self._windows: dict[int, _DuplicateWindow] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of ids, some of which may have expired."""
        return self._count

    def has_ids(self, class_id: int) -> bool:
        """Return True if ids of messages of the class are remembered."""
        return class_id in self._windows

    def find(self, class_id: int, message_id: bytes, now: float) -> int | None:
        """Return the sequence of the message that has used an id; None if the id is unused."""
        window = self._windows.get(class_id)
        return None if window is None else window.find(_digest(message_id), now)

    def add(self, class_id: int, message_id: bytes, sequence: int, now: float) -> None:
        """Record that a message has used an id. Sequences of a class ascend."""
        window = self._windows.setdefault(class_id, _DuplicateWindow())
        self._count += window.add(_digest(message_id), sequence, now)
        self._count -= window.remove_expired(now, _EXPIRED_PER_ADD)
        while self._count > self._count_max:
            if len(window) == 1:  # The class is new here.
                window = max(self._windows.values(), key=len)
            window.remove_oldest()
            self._count -= 1

    def tick(self, now: float) -> None:
        """Remove some expired ids. Called once per tick."""
        remaining = MESSAGE_IDS_EXPIRED_PER_TICK
        for class_id, window in list(self._windows.items()):
            removed = window.remove_expired(now, remaining)
            self._count -= removed
            remaining -= removed
            if not len(window):
                del self._windows[class_id]

    def snapshot(self) -> list[MessageIdsSnapshot]:
        """Return the windows for a snapshot of the broker."""
        return [
            window.snapshot(class_id) for class_id, window in self._windows.items() if len(window)
        ]

    def restore(self, snapshot: MessageIdsSnapshot, *, head: int, now: float) -> None:
        """Restore the window of a class, without ids of sequences from `head` on."""
        window = self._windows[snapshot.class_id] = _DuplicateWindow()
        self._count += window.restore(snapshot, head, now)


class _DuplicateWindow:
    """Window of one class. Ids are digests of 8 bytes."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, int] = OrderedDict()
        """Sequences by digest, ascending."""
        self._steps: deque[tuple[float, int]] = deque()
        """Times, at least _STEP_SECONDS apart, with the first sequence that was added in that step.
        """

    def __len__(self) -> int:
        return len(self._sequences)

    def find(self, digest: int, now: float) -> int | None:
        sequence = self._sequences.get(digest)
        if sequence is None or sequence < self._first_sequence(now):
            return None
        return sequence

    def add(self, digest: int, sequence: int, now: float) -> int:
        """Add an id, or renew it if it has expired. Returns the number of ids added."""
        if not self._steps or now - self._steps[-1][0] >= _STEP_SECONDS:
            self._steps.append((now, sequence))
        before = len(self._sequences)
        self._sequences[digest] = sequence
        self._sequences.move_to_end(digest)
        return len(self._sequences) - before

    def _first_sequence(self, now: float) -> int:
        """Return the first sequence that has not expired."""
        steps = self._steps
        while steps and steps[0][0] + _STEP_SECONDS <= now - DUPLICATE_WINDOW_SECONDS:
            steps.popleft()
        return steps[0][1] if steps else SEQUENCE_MAX

    def remove_expired(self, now: float, count_max: int) -> int:
        """Remove up to `count_max` expired ids. Returns how many were removed."""
        removed, sequences, first = 0, self._sequences, self._first_sequence(now)
        while sequences and removed < count_max and next(iter(sequences.values())) < first:
            sequences.popitem(last=False)
            removed += 1
        return removed

    def remove_oldest(self) -> None:
        self._sequences.popitem(last=False)

    def snapshot(self, class_id: int) -> MessageIdsSnapshot:
        count = len(self._sequences)
        return MessageIdsSnapshot(
            class_id,
            np.fromiter(self._sequences, "<u8", count).tobytes(),
            np.fromiter(self._sequences.values(), "<i8", count).tobytes(),
            list(self._steps),
        )

    def restore(self, snapshot: MessageIdsSnapshot, head: int, now: float) -> int:
        """Restore a window. Returns the number of ids."""
        digests = np.frombuffer(snapshot.digests, "<u8").tolist()
        sequences = np.frombuffer(snapshot.sequences, "<i8").tolist()
        self._sequences.update(
            (digest, sequence)
            for digest, sequence in zip(digests, sequences, strict=True)
            if sequence < head
        )
        # The clock may have been set back; ids must not stay longer because of that.
        self._steps.extend((min(time, now), first) for time, first in snapshot.steps)
        return len(self._sequences)


def _digest(message_id: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(message_id, digest_size=8).digest(), "big")


def iter_message_ids(stored: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the ids of stored messages as (index of the message, id).

    Args:
        stored: Whole frames, back to back.
    """
    if MESSAGE_ID_HEADER.encode() not in stored:
        return
    offset = index = 0
    while offset < len(stored):
        end = stored.index(frames.DELIMITER, offset + HEADER_BYTES)
        if stored[offset] == frames.ENVELOPE:
            envelope, _ = decode(stored[offset + HEADER_BYTES : end])
            for name, value in envelope.headers:
                if name == MESSAGE_ID_HEADER:
                    yield index, value.encode()
                    break
        offset, index = end + DELIMITER_BYTES, index + 1
