"""Events parsed from the bytes of a NATS client.

Consecutive messages become one event: a `UniformBatch` if all have the same line, a `MixedBatch`
otherwise. Events refer to the receive buffer and are valid until it is filled again. They are not
checked: the session and the server decide about subjects and permissions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simplebus.nats.protocol.subject_table import SubjectTable

Octets = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.int64]


@dataclass(slots=True)
class Pub:
    """One message: PUB or HPUB."""

    subject: bytes
    reply: bytes
    """Reply subject; empty for none."""
    size: bytes
    """Size of headers and payload as written by the client, for example `002`."""
    header_size: bytes
    """Size of the headers as written by the client; empty for PUB."""
    header_bytes: int
    """Bytes of the body that are headers; 0 for PUB."""
    body: memoryview
    """Headers and payload, without the final CR LF."""
    shared_end: memoryview | None = None
    """The body and the final CR LF for output that several clients share, or None."""

    def copy(self) -> Pub:
        """Return a message that stays valid when the receive buffer is filled again."""
        return replace(self, body=memoryview(bytes(self.body)))

    def with_shared_end(self) -> Pub:
        """Return a copy whose body several clients may share. Nobody may modify it."""
        end = memoryview(b"".join((self.body, b"\r\n")))
        return replace(self, body=end[:-2], shared_end=end)


@dataclass(slots=True)
class UniformBatch:
    """Consecutive messages with the same PUB or HPUB line."""

    first_message: Pub
    """The first message."""
    rows: Octets
    """Messages from the verb to the final CR LF, shape (n, stride)."""
    body_column: int
    """Column where bodies begin; they end two columns before the end."""

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def mean_message_bytes(self) -> int:
        """Bytes of one message, from the verb to the final CR LF."""
        return int(self.rows.shape[1])

    @property
    def size_bytes(self) -> int:
        """Bytes of all messages."""
        return self.rows.size

    def copy(self, table: SubjectTable) -> UniformBatch:
        """Return a batch that stays valid when the receive buffer is filled again."""
        return UniformBatch(self.first_message.copy(), self.rows.copy(), self.body_column)


@dataclass(slots=True)
class MixedBatch:
    """Consecutive messages of any subjects and sizes.

    Each is `PUB subject size` with single blanks and without a reply subject.
    """

    data: Octets
    """The bytes of all messages, shape (bytes,)."""
    bounds: Indexes
    """Offsets where messages begin, and the end of the last one, shape (n + 1,)."""
    subject_ends: Indexes
    """Offsets where subjects end, shape (n,). A subject begins four bytes after its bound."""
    body_starts: Indexes
    """Offsets where payloads begin, shape (n,). A payload ends two bytes before the next bound."""
    subject_numbers: npt.NDArray[np.int32]
    """Subject numbers in the `SubjectTable`, or in `subject_names`, shape (n,)."""
    subject_names: tuple[bytes, ...] | None = None
    """Subjects by number; None for the names of the `SubjectTable`."""
    table_numbers: npt.NDArray[np.int32] | None = None
    """Number of each of `subject_names` in the `SubjectTable`, while its generation is
    `table_generation`. None if the messages do not come from a client.
    """
    table_generation: int = -1
    """Generation of the `SubjectTable` for `table_numbers`; -1 if they are None."""

    @property
    def count(self) -> int:
        return len(self.body_starts)

    def subject_at(self, row: int) -> bytes:
        """Return the subject of the message in this row."""
        return self.data[self.bounds[row] + len(b"PUB ") : self.subject_ends[row]].tobytes()

    @property
    def mean_message_bytes(self) -> int:
        """Mean bytes of a message, from the verb to the final CR LF."""
        return self.data.size // len(self.body_starts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all messages."""
        return self.data.size

    def first_messages(self, count: int) -> MixedBatch:
        """Return the first messages as a batch."""
        return replace(
            self,
            data=self.data[: self.bounds[count]],
            bounds=self.bounds[: count + 1],
            subject_ends=self.subject_ends[:count],
            body_starts=self.body_starts[:count],
            subject_numbers=self.subject_numbers[:count],
        )

    def copy(self, table: SubjectTable) -> MixedBatch:
        """Return a batch that stays valid when the receive buffer is filled again and the table of
        its subjects is cleared.
        """
        used = np.flatnonzero(np.bincount(self.subject_numbers))
        new_numbers = np.empty(used[-1] + 1, np.int32)
        new_numbers[used] = np.arange(used.size, dtype=np.int32)
        return replace(
            self,
            data=self.data.copy(),
            subject_numbers=new_numbers[self.subject_numbers],
            subject_names=tuple(table.names[number] for number in used.tolist()),
            table_numbers=used.astype(np.int32),
            table_generation=table.generation,
        )


@dataclass(slots=True)
class Sub:
    """SUB command."""

    subject: bytes
    queue: bytes
    """Queue group; empty for none."""
    sid: bytes


@dataclass(slots=True)
class Unsub:
    """UNSUB command."""

    sid: bytes
    max_messages: int
    """Number of messages after which the subscription ends; 0 for immediately."""


@dataclass(slots=True)
class Connect:
    """CONNECT command with its JSON, not parsed yet."""

    options_json: bytes


@dataclass(slots=True)
class Ping:
    """PING command."""


@dataclass(slots=True)
class Pong:
    """PONG command."""


ClientEvent = Pub | UniformBatch | MixedBatch | Sub | Unsub | Connect | Ping | Pong


def row_indexes(batch: UniformBatch | MixedBatch, rows: Indexes | None) -> Indexes:
    """Return `rows`, or the indexes of all rows for None."""
    return np.arange(batch.count) if rows is None else rows


@dataclass(slots=True)
class LazyMessages:
    """Stored messages that are converted one after the other while they are delivered."""

    messages: Iterator[Pub | MixedBatch]
    """Converts the next message, or the next messages."""
    size_bytes: int
    """Bytes of the stored messages, which are kept meanwhile."""


def iter_messages(
    batch: UniformBatch | MixedBatch, subject_names: Sequence[bytes] = ()
) -> Iterator[Pub]:
    """Yield the messages of a batch. `subject_names` replace subject names missing in it."""
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
