"""What was given back to a consumer and is to come first: given back again where it does not come.

Rule 1: a server that removes messages from a stream forgets what it is to send again, and sends it
after the ack wait. Whoever has the consumer alone says it once more, a few times, while the
consumer owes messages and none of these come: a server that has not forgotten takes no notice.
"""

from __future__ import annotations

from simplebus.core.frames import Integers
from simplebus.nats.client import jetstream, writing

_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before it is said again; after that it comes by itself."""


class Awaited:
    """Of one position."""

    def __init__(self, subjects: dict[int, bytes]) -> None:
        """`subjects`: by which the consumer is told of each message of the stream, in order."""
        self._subjects = dict(subjects)
        self._since: float | None = None
        """Since when nothing of it has come that could have."""
        self._tries = 0

    def came(self, sequences: Integers) -> None:
        """These messages of the stream have come."""
        if not self._subjects:
            return
        before = len(self._subjects)
        for sequence in sequences.tolist():
            self._subjects.pop(sequence, None)
        if len(self._subjects) < before:
            self._since = None

    def late(self, now: float, *, is_owed: bool) -> bytes:
        """What is to be said now; `is_owed` says whether the consumer was asked for messages."""
        if not (self._subjects and is_owed):
            self._since = None
            return b""
        if self._since is None:
            self._since = now
        if now - self._since < _PAUSES[self._tries]:
            return b""
        said = [writing.pub(subject, jetstream.NAK) for subject in self._subjects.values()]
        self._since, self._tries = now, self._tries + 1
        if self._tries == len(_PAUSES):
            self._subjects.clear()
        return b"".join(said)
