"""What a NATS server's bytes say.

Rule 1: messages in a row are one event, whatever their subjects, sizes and number.
Rule 2: an event owns its bytes: it is valid as long as it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from simplebus.core.protocol.frames import Bytes, Flags, Integers


@dataclass(slots=True)
class Messages:
    """MSG and HMSG, in the order in which they came. All columns have shape (n,), and positions
    are in `raw`, of which at least PADDING bytes lie in front of each."""

    raw: bytes
    """What they came in, and perhaps more."""
    sids: Integers
    """Which subscription each is for."""
    subjects: Integers
    """Where subjects begin."""
    subject_ends: Integers
    replies: Integers
    """Where the subject begins that an answer is to go to; no more than its end for none."""
    reply_ends: Integers
    bodies: Integers
    """Where headers begin; where there are none, the payload."""
    payloads: Integers
    """Where payloads begin."""
    ends: Integers
    """Where they end; CR LF follows."""

    @property
    def count(self) -> int:
        return len(self.sids)

    @property
    def data(self) -> Bytes:
        """The same bytes as an array, which cannot be written to."""
        return np.frombuffer(self.raw, np.uint8)

    def subject(self, row: int) -> bytes:
        return self.raw[self.subjects[row] : self.subject_ends[row]]

    def reply(self, row: int) -> bytes:
        """Where an answer to the message in this row is to go; empty for nowhere."""
        return self.raw[self.replies[row] : self.reply_ends[row]]

    def headers(self, row: int) -> bytes:
        """The whole block of them, from `NATS/1.0` to the empty line; empty for none."""
        return self.raw[self.bodies[row] : self.payloads[row]]

    def payload(self, row: int) -> bytes:
        return self.raw[self.payloads[row] : self.ends[row]]

    def all_payloads(self) -> list[bytes]:
        raw = self.raw
        pairs = zip(self.payloads.tolist(), self.ends.tolist(), strict=True)
        return [raw[begin:end] for begin, end in pairs]

    def pick(self, rows: Integers | Flags | slice) -> Messages:
        """Some of them: by positions, by a flag for each, or a stretch."""
        return Messages(
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

    def by_sid(self) -> dict[int, Messages]:
        """Those of each subscription, in their order."""
        if not self.count:
            return {}
        first = int(self.sids[0])
        if (self.sids == first).all():
            return {first: self}
        return {int(sid): self.pick(self.sids == sid) for sid in np.unique(self.sids)}


class Info(msgspec.Struct, frozen=True):
    """What a server says of itself. Fields that are left out mean no, or that it does not say."""

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
    """HOST:PORT of servers of the same cluster, this one perhaps among them."""
    ldm: bool = False
    """Whether it asks its clients to leave."""
    jetstream: bool = False


@dataclass(slots=True)
class Ping:
    """Are you there?"""


@dataclass(slots=True)
class Pong:
    """I am."""


@dataclass(slots=True)
class Complaint:
    """An -ERR line."""

    says: str
    """What stands between its quotes."""


Event = Messages | Info | Ping | Pong | Complaint
"""+OK says nothing."""
