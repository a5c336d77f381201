"""What a NATS client's bytes say.

Rule 1: messages of one subject in a row are one event, whatever their number; so is a stretch of
messages of several subjects. Only what comes alone is an event for itself.
Rule 2: events are facts; whether a subject is legal, who may publish and who gets what is the
session's and the front's business.
Rule 3: what an event holds of the receive buffer is valid until the buffer is filled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Octets = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


@dataclass(slots=True)
class Pub:
    """One message: PUB or HPUB."""

    subject: bytes
    reply: bytes
    """Where an answer is to go; empty for nowhere."""
    size: bytes
    """As it was written, `002` perhaps: of headers and payload together."""
    header_size: bytes
    """As it was written; empty for PUB."""
    header_bytes: int
    """How many of the body's bytes are headers; 0 for PUB."""
    body: memoryview
    """Headers and payload, without the CR LF behind them."""


@dataclass(slots=True)
class Run:
    """Messages with the same line in front of each, back to back: PUB or HPUB."""

    head: Pub
    """What the line says; its body is the first message's."""
    rows: Octets
    """Shape (n, stride): each message from its verb to the CR LF behind its payload."""
    body_at: int
    """In which column bodies begin; they end two columns before the last."""

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def mean_bytes(self) -> int:
        """How long a message is, from its verb to its end."""
        return int(self.rows.shape[1])


@dataclass(slots=True)
class Mix:
    """Messages of any subjects and sizes, back to back: each `PUB subject size`, with one blank
    between words, and without a reply."""

    data: Octets
    """All of them, shape (bytes,)."""
    bounds: Positions
    """Shape (n + 1,): where in data each begins, and where the last one ends."""
    subject_ends: Positions
    """Shape (n,): where in data each one's subject ends. It begins four bytes behind the bound."""
    bodies: Positions
    """Shape (n,): where in data each one's payload begins; it ends two bytes before the next."""
    subjects: npt.NDArray[np.int32]
    """Shape (n,): numbers of the subjects, in the parser's `SubjectTable` or in `names`."""
    names: tuple[bytes, ...] | None = None
    """Subjects by numbers of its own, where it comes from no parser."""

    @property
    def count(self) -> int:
        return len(self.bodies)

    def subject(self, row: int) -> bytes:
        """Of the message in this row."""
        return self.data[self.bounds[row] + len(b"PUB ") : self.subject_ends[row]].tobytes()

    @property
    def mean_bytes(self) -> int:
        """About how long a message is, from its verb to its end."""
        return self.data.size // len(self.bodies)


@dataclass(slots=True)
class Sub:
    """A subscription is asked for."""

    subject: bytes
    queue: bytes
    """Its queue group; empty for none."""
    sid: bytes


@dataclass(slots=True)
class Unsub:
    """A subscription is to end: at once, or when it has been sent so many messages."""

    sid: bytes
    most: int
    """0 for at once."""


@dataclass(slots=True)
class Connect:
    """Who is there: JSON, not looked at yet."""

    options: bytes


@dataclass(slots=True)
class Ping:
    """Are you there?"""


@dataclass(slots=True)
class Pong:
    """I am."""


Event = Pub | Run | Mix | Sub | Unsub | Connect | Ping | Pong


def all_of(messages: Run | Mix, rows: Positions | None) -> Positions:
    """Positions in a batch; None stands for all."""
    return np.arange(messages.count) if rows is None else rows


def singles(event: Run | Mix, names: Sequence[bytes] = ()) -> Iterator[Pub]:
    """Each message by itself. `names` are the subjects by their numbers, where a mix has none."""
    if isinstance(event, Run):
        head = event.head
        for row in event.rows:
            body = row[event.body_at : -2].data
            yield Pub(
                head.subject, head.reply, head.size, head.header_size, head.header_bytes, body
            )
        return
    data, names = event.data.data, event.names or names
    bounds, ends = event.bounds.tolist(), event.subject_ends.tolist()
    for at, (end, body, number) in enumerate(
        zip(ends, event.bodies.tolist(), event.subjects.tolist(), strict=True)
    ):
        size = bytes(data[end + 1 : body - 2])
        yield Pub(names[number], b"", size, b"", 0, data[body : bounds[at + 1] - 2])
