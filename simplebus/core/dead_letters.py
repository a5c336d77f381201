"""What a subscription gave up on, as messages of a class of their own.

Rule 1: a dead letter is an ordinary message: who subscribes, fetches or archives knows nothing new.
Rule 2: this file knows what a dead letter looks like; where it is kept is the store's business.

    orders       7: channel, key, headers, payload             given up by the durable "billing"
    dead.orders  0: channel, key, headers and why, payload     lies here until somebody reads it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from simplebus.core.errors import LocalProtocolError, Reason
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, NAME_CHARACTERS_MAX
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import Envelope, EnvelopeColumns
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.users.permissions import DEAD

PREFIX = DEAD
"""What names of classes that keep dead letters begin with."""

REASON = "dead-reason"
"""Why: `max_deliveries`, `terminated` or `uncarriable`."""
CLASS = "dead-class"
"""The class that it was given up in: its name, or its id where it has none."""
SEQUENCE = "dead-sequence"
"""Its sequence there."""
ATTEMPTS = "dead-attempts"
"""How often the subscription was sent it."""
SUBSCRIPTION = "dead-subscription"
"""The name of the durable, or else of the group; empty where it has neither."""
SESSION = "dead-session"
"""The id of the session that held the subscription; empty where several may, or none did."""
SINCE = "dead-since"
"""When it was given up: seconds since 1970 by the bus's clock, to the microsecond."""
ACCEPTED = "dead-accepted"
"""When the bus accepted it, or a little before: as `SINCE`. Not there where that is not known."""
ERROR = "dead-error"
"""What its consumer said last, when it refused it. Not there where it said nothing."""


_NOTHING = Envelope()


@dataclass(frozen=True, slots=True)
class DeadLetterCause:
    """What some messages of a class have in common that were given up together."""

    reason: Reason
    class_: str
    """As in the header."""
    attempts: int
    subscription: str
    session: str
    since: float


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """One of them."""

    sequence: int
    frame: bytes
    accepted: float = 0.0
    """0 when that is not known."""
    error: str = ""


def class_name(of: str) -> str:
    """The name of the class in which the dead letters of a class lie."""
    return (PREFIX + of)[:NAME_CHARACTERS_MAX]


def are_kept_in(name: str) -> bool:
    """Whether a class of this name keeps dead letters, and has none itself."""
    return name.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class DeadLetterBatch:
    """Dead letters, and what the bus needs to know of each."""

    batch: FrameBatch | None
    """None when there is none."""
    columns: EnvelopeColumns
    sequences: list[int]
    """Which message each is about."""
    lost: int
    """Of how many messages there can be none: their headers, or the whole, would be too long."""


def write(
    given_up: Iterable[DeadMessage], death: DeadLetterCause, *, class_id: int, frame_bytes_max: int
) -> DeadLetterBatch:
    """Dead letters for messages, for the class with this id."""
    alike = envelope_batch.encode_pairs(
        (
            (REASON, death.reason.value),
            (CLASS, death.class_),
            (ATTEMPTS, str(death.attempts)),
            (SUBSCRIPTION, death.subscription),
            (SESSION, death.session),
            (SINCE, f"{death.since:.6f}"),
        )
    )
    letters: list[bytes] = []
    sequences: list[int] = []
    names: dict[str, int] = {}
    channels: list[int] = []
    count = 0
    for dead in given_up:
        count += 1
        frame = dead.frame
        read, payload = _NOTHING, frame[HEADER_BYTES:-DELIMITER_BYTES]
        if frame[0] == frames.ENVELOPE:
            read, payload = envelope_batch.decode(payload)
            read = Envelope(read.channel, read.key, read.headers, read.published)
        for own in _own(dead):
            try:
                content = envelope_batch.encode_with(read, alike + own, payload)
            except LocalProtocolError:  # Together with its own, the headers are too long.
                continue
            whole = frames.encode(frames.ENVELOPE, class_id=class_id, content=content)
            if len(whole) <= frame_bytes_max:
                letters.append(whole)
                sequences.append(dead.sequence)
                channels.append(names.setdefault(read.channel, len(names)))
                break
    columns = EnvelopeColumns(
        len(letters), list(names), np.array(channels, np.uint32) if len(names) > 1 else 0
    )
    batch = _batch(letters) if letters else None
    return DeadLetterBatch(batch, columns, sequences, count - len(letters))


def _own(dead: DeadMessage) -> Iterator[bytes]:
    """The headers that are about this one alone; without what was said, should that be too
    long."""
    own = envelope_batch.encode_pairs(((SEQUENCE, str(dead.sequence)),))
    if dead.accepted:
        own += envelope_batch.encode_pairs(((ACCEPTED, f"{dead.accepted:.6f}"),))
    if dead.error:
        yield own + envelope_batch.encode_pairs(((ERROR, dead.error),))
    yield own


def _batch(whole: list[bytes]) -> FrameBatch:
    """These frames as a batch."""
    lengths = [len(frame) for frame in whole]
    stride = lengths[0] if len(set(lengths)) == 1 else 0
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    return FrameBatch(np.frombuffer(b"".join(whole), np.uint8), bounds, stride)
