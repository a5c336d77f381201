"""What is in messages: payloads that can be told apart, and dead letters.

Rule 1: all that a check needs to know of a message stands in its payload, as {whose.which.what}; of
`what`, t says that it has times, y that they are short, c that it has the channel that some ask
for, k and l its key.
"""

from __future__ import annotations

import functools

from simplebus.core.dead_letters import CLASS_HEADER, SEQUENCE_HEADER, SUBSCRIPTION_HEADER
from simplebus.core.protocol import envelope as protocol_envelope
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope


def payload(whose: str, which: int, what: str = "", *, size: int = 0) -> bytes:
    """A message's."""
    return f"{{{whose}.{which}.{what}}}".encode().ljust(size, b"x")


def key_of(what: bytes) -> bytes:
    """The key of such a message."""
    return b"k" if b"k" in what else b"l" if b"l" in what else b""


@functools.lru_cache(100_000)
def dead_letter(content: bytes) -> tuple[int, str, int] | None:
    """Of a dead letter: its class, whose it was, by name, and its sequence. None of another
    message."""
    if SEQUENCE_HEADER.encode() not in content:
        return None
    read, _ = envelope_batch.decode(content)
    headers = dict(read.headers)
    return (
        int(headers[CLASS_HEADER].split()[-1]),
        headers[SUBSCRIPTION_HEADER],
        int(headers[SEQUENCE_HEADER]),
    )


def enveloped(data: bytes, about: Envelope) -> bytes:
    """The content of an Envelope frame."""
    return protocol_envelope.encode(about, data)
