"""Events parsed from the bytes of a NATS server.

Consecutive messages are one event. An event owns its bytes and stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from simplebus.core.protocol.frames import Bytes, Flags, Integers


@dataclass(slots=True)
class ReceivedMessages:
    """MSG and HMSG messages in order of arrival.

    All columns have shape (n,). Offsets refer to `raw` and are preceded by at least PADDING bytes.
    """

    raw: bytes
    """Buffer that contains the messages."""
    sids: Integers
    """Subscription ids."""
    subjects: Integers
    """Offsets where subjects begin."""
    subject_ends: Integers
    replies: Integers
    """Offsets where reply subjects begin; not below `reply_ends` for a message without one."""
    reply_ends: Integers
    bodies: Integers
    """Offsets where headers begin, or payloads if there are no headers."""
    payloads: Integers
    """Offsets where payloads begin."""
    ends: Integers
    """Offsets where payloads end; CR LF follows."""

    @property
    def count(self) -> int:
        return len(self.sids)

    @property
    def data(self) -> Bytes:
        """Read-only array of `raw`."""
        return np.frombuffer(self.raw, np.uint8)

    def subject(self, row: int) -> bytes:
        return self.raw[self.subjects[row] : self.subject_ends[row]]

    def reply(self, row: int) -> bytes:
        """Return the reply subject of a message; empty for none."""
        return self.raw[self.replies[row] : self.reply_ends[row]]

    def headers(self, row: int) -> bytes:
        """Return the header block from `NATS/1.0` to the empty line; empty for none."""
        return self.raw[self.bodies[row] : self.payloads[row]]

    def payload(self, row: int) -> bytes:
        return self.raw[self.payloads[row] : self.ends[row]]

    def all_payloads(self) -> list[bytes]:
        raw = self.raw
        pairs = zip(self.payloads.tolist(), self.ends.tolist(), strict=True)
        return [raw[begin:end] for begin, end in pairs]

    def pick(self, rows: Integers | Flags | slice) -> ReceivedMessages:
        """Return the messages selected by indexes, flags or a slice."""
        return ReceivedMessages(
            self.raw,
            self.sids[rows],
            self.subjects[rows],
            self.subject_ends[rows],
            self.replies[rows],
            self.reply_ends[rows],
            self.bodies[rows],
            self.payloads[rows],
            self.ends[rows],
        )

    def split_by_sid(self) -> dict[int, ReceivedMessages]:
        """Return the messages of each subscription, in order."""
        if not self.count:
            return {}
        first = int(self.sids[0])
        if (self.sids == first).all():
            return {first: self}
        return {int(sid): self.pick(self.sids == sid) for sid in np.unique(self.sids)}


class ServerInfo(msgspec.Struct, frozen=True):
    """INFO of the server. Missing fields have their defaults."""

    server_id: str = ""
    server_name: str = ""
    version: str = ""
    headers: bool = False
    max_payload: int = 1024 * 1024
    auth_required: bool = False
    tls_required: bool = False
    tls_available: bool = False
    nonce: str = ""
    connect_urls: list[str] = []
    """HOST:PORT of servers of the cluster, possibly including this one."""
    ldm: bool = False
    """True if the server asks its clients to leave."""
    jetstream: bool = False


@dataclass(slots=True)
class ServerPing:
    """PING of the server."""


@dataclass(slots=True)
class ServerPong:
    """PONG of the server."""


@dataclass(slots=True)
class ServerError:
    """`-ERR` line."""

    text: str
    """Text between the quotes."""


ServerEvent = ReceivedMessages | ServerInfo | ServerPing | ServerPong | ServerError
"""Event of a server. `+OK` yields none."""
