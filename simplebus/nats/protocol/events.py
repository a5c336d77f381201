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
Indexes = npt.NDArray[np.int64]


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
class UniformBatch:
    """Messages with the same line in front of each, back to back: PUB or HPUB."""

    first_message: Pub
    """What the line says; its body is the first message's."""
    rows: Octets
    """Shape (n, stride): each message from its verb to the CR LF behind its payload."""
    body_column: int
    """In which column bodies begin; they end two columns before the last."""

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def mean_message_bytes(self) -> int:
        """How long a message is, from its verb to its end."""
        return int(self.rows.shape[1])


@dataclass(slots=True)
class MixedBatch:
    """Messages of any subjects and sizes, back to back: each `PUB subject size`, with one blank
    between words, and without a reply."""

    data: Octets
    """All of them, shape (bytes,)."""
    bounds: Indexes
    """Shape (n + 1,): where in data each begins, and where the last one ends."""
    subject_ends: Indexes
    """Shape (n,): where in data each one's subject ends. It begins four bytes behind the bound."""
    body_starts: Indexes
    """Shape (n,): where in data each one's payload begins; it ends two bytes before the next."""
    subject_numbers: npt.NDArray[np.int32]
    """Shape (n,): numbers of the subjects, in the parser's `SubjectTable` or in `names`."""
    subject_names: tuple[bytes, ...] | None = None
    """Subjects by numbers of its own, where it comes from no parser."""

    @property
    def count(self) -> int:
        return len(self.body_starts)

    def subject_at(self, row: int) -> bytes:
        """Of the message in this row."""
        return self.data[self.bounds[row] + len(b"PUB ") : self.subject_ends[row]].tobytes()

    @property
    def mean_message_bytes(self) -> int:
        """About how long a message is, from its verb to its end."""
        return self.data.size // len(self.body_starts)


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
    max_messages: int
    """0 for at once."""


@dataclass(slots=True)
class Connect:
    """Who is there: JSON, not looked at yet."""

    options_json: bytes


@dataclass(slots=True)
class Ping:
    """Are you there?"""


@dataclass(slots=True)
class Pong:
    """I am."""


ClientEvent = Pub | UniformBatch | MixedBatch | Sub | Unsub | Connect | Ping | Pong


def row_indexes(batch: UniformBatch | MixedBatch, rows: Indexes | None) -> Indexes:
    """Positions in a batch; None stands for all."""
    return np.arange(batch.count) if rows is None else rows


def iter_messages(
    batch: UniformBatch | MixedBatch, subject_names: Sequence[bytes] = ()
) -> Iterator[Pub]:
    """Each message by itself. `names` are the subjects by their numbers, where a mix has none."""
    if isinstance(batch, UniformBatch):
        head = batch.first_message
        for row in batch.rows:
            body = row[batch.body_column : -2].data
            yield Pub(
                head.subject, head.reply, head.size, head.header_size, head.header_bytes, body
            )
        return
    data, subject_names = batch.data.data, batch.subject_names or subject_names
    bounds, ends = batch.bounds.tolist(), batch.subject_ends.tolist()
    for at, (end, body, number) in enumerate(
        zip(ends, batch.body_starts.tolist(), batch.subject_numbers.tolist(), strict=True)
    ):
        size = bytes(data[end + 1 : body - 2])
        yield Pub(subject_names[number], b"", size, b"", 0, data[body : bounds[at + 1] - 2])
