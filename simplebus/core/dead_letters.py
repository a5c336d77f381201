"""Dead letters: messages that a position does not deliver any more, in a separate class.

A dead letter is an ordinary message, so subscribing, fetching and archiving work as usual. This
module builds the messages; the store appends them.

    orders       7: channel, key, headers, payload               rejected by the durable "billing"
    dead.orders  0: channel, key, headers + reasons, payload     stored until it is consumed
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
from simplebus.core.users.permissions import DEAD_LETTER_PREFIX

CLASS_PREFIX = DEAD_LETTER_PREFIX
"""Prefix of the names of dead-letter classes."""

REASON_HEADER = "dead-reason"
"""`max_deliveries`, `terminated` or `uncarriable`."""
CLASS_HEADER = "dead-class"
"""Name of the class in which the message was given up, or its id if it has no name."""
SEQUENCE_HEADER = "dead-sequence"
"""Sequence of the message in that class."""
ATTEMPTS_HEADER = "dead-attempts"
"""Number of deliveries."""
SUBSCRIPTION_HEADER = "dead-subscription"
"""Name of the durable, or else of the group; empty if the position has neither."""
SESSION_HEADER = "dead-session"
"""Id of the session of the subscription; empty for a group or if none was connected."""
SINCE_HEADER = "dead-since"
"""Time at which the message was given up, in seconds since 1970, with microseconds."""
ACCEPTED_HEADER = "dead-accepted"
"""Time at which the message was accepted, in the same format; absent if unknown."""
ERROR_HEADER = "dead-error"
"""Reason given with the last nack; absent without a reason."""


_NO_ENVELOPE = Envelope()


@dataclass(frozen=True, slots=True)
class DeadLetterCause:
    """Header values that messages given up together have in common."""

    reason: Reason
    class_: str
    attempts: int
    subscription: str
    session: str
    since: float


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that was given up."""

    sequence: int
    frame: bytes
    accepted: float = 0.0
    """Seconds since 1970; 0 if unknown."""
    error: str = ""


def dead_letter_class_name(class_name: str) -> str:
    """Return the name of the dead-letter class of a class."""
    return (CLASS_PREFIX + class_name)[:NAME_CHARACTERS_MAX]


def is_dead_letter_class(name: str) -> bool:
    """Return True if a class with this name holds dead letters, and so has none itself."""
    return name.startswith(CLASS_PREFIX)


@dataclass(frozen=True, slots=True)
class DeadLetterBatch:
    """Dead letters, ready to be appended."""

    frames: FrameBatch | None
    """The frames; None if the batch is empty."""
    columns: EnvelopeColumns
    sequences: list[int]
    """The sequence of the given-up message for each dead letter."""
    lost_count: int
    """Number of given-up messages whose dead letter would exceed a limit of headers or frame."""


def build_dead_letters(
    messages: Iterable[DeadMessage],
    cause: DeadLetterCause,
    *,
    class_id: int,
    frame_bytes_max: int,
) -> DeadLetterBatch:
    """Build the dead letters of `messages`.

    Args:
        messages: The messages that were given up.
        cause: Their common header values.
        class_id: Id of the dead-letter class.
        frame_bytes_max: Longest frame that may be built.
    """
    common_headers = envelope_batch.encode_header_pairs(
        (
            (REASON_HEADER, cause.reason.value),
            (CLASS_HEADER, cause.class_),
            (ATTEMPTS_HEADER, str(cause.attempts)),
            (SUBSCRIPTION_HEADER, cause.subscription),
            (SESSION_HEADER, cause.session),
            (SINCE_HEADER, f"{cause.since:.6f}"),
        )
    )
    letters: list[bytes] = []
    sequences: list[int] = []
    names: dict[str, int] = {}
    channels: list[int] = []
    count = 0
    for message in messages:
        count += 1
        frame = message.frame
        envelope, payload = _NO_ENVELOPE, frame[HEADER_BYTES:-DELIMITER_BYTES]
        if frame[0] == frames.ENVELOPE:
            envelope, payload = envelope_batch.decode(payload)
            envelope = Envelope(
                envelope.channel, envelope.key, envelope.headers, envelope.published
            )
        for headers in _message_headers(message):
            try:
                content = envelope_batch.encode_with_headers(
                    envelope, common_headers + headers, payload
                )
            except LocalProtocolError:  # The message's own headers leave no space for these.
                continue
            letter = frames.encode(frames.ENVELOPE, class_id=class_id, content=content)
            if len(letter) <= frame_bytes_max:
                letters.append(letter)
                sequences.append(message.sequence)
                channels.append(names.setdefault(envelope.channel, len(names)))
                break
    columns = EnvelopeColumns(
        len(letters), list(names), np.array(channels, np.uint32) if len(names) > 1 else 0
    )
    batch = _join_frames(letters) if letters else None
    return DeadLetterBatch(batch, columns, sequences, count - len(letters))


def _message_headers(message: DeadMessage) -> Iterator[bytes]:
    """Yield the headers of one message, then the same without the error, in case it is too long."""
    headers = envelope_batch.encode_header_pairs(((SEQUENCE_HEADER, str(message.sequence)),))
    if message.accepted:
        headers += envelope_batch.encode_header_pairs(
            ((ACCEPTED_HEADER, f"{message.accepted:.6f}"),)
        )
    if message.error:
        yield headers + envelope_batch.encode_header_pairs(((ERROR_HEADER, message.error),))
    yield headers


def _join_frames(frames: list[bytes]) -> FrameBatch:
    lengths = [len(frame) for frame in frames]
    stride = lengths[0] if len(set(lengths)) == 1 else 0
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    return FrameBatch(np.frombuffer(b"".join(frames), np.uint8), bounds, stride)
