"""Message payloads that identify themselves, and dead letters.

A payload is {publisher.number.traits}: everything that a check must know. Traits are letters: t has
times, y the times are short, c has the channel that some subscriptions ask for, k and l its key.
"""

from __future__ import annotations

import functools

from simplebus.core.dead_letters import CLASS_HEADER, SEQUENCE_HEADER, SUBSCRIPTION_HEADER
from simplebus.core.protocol import envelope as protocol_envelope
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope


def payload(publisher: str, number: int, traits: str = "", *, size: int = 0) -> bytes:
    return f"{{{publisher}.{number}.{traits}}}".encode().ljust(size, b"x")


def key_from_traits(traits: bytes) -> bytes:
    """Return the key of a message with these traits."""
    return b"k" if b"k" in traits else b"l" if b"l" in traits else b""


@functools.lru_cache(100_000)
def parse_dead_letter(content: bytes) -> tuple[int, str, int] | None:
    """Return class, durable name and sequence of a dead letter; None for another message."""
    if SEQUENCE_HEADER.encode() not in content:
        return None
    read, _ = envelope_batch.decode(content)
    headers = dict(read.headers)
    return (
        int(headers[CLASS_HEADER].split()[-1]),
        headers[SUBSCRIPTION_HEADER],
        int(headers[SEQUENCE_HEADER]),
    )


def encode_envelope(data: bytes, envelope: Envelope) -> bytes:
    """Return the content of an Envelope frame."""
    return protocol_envelope.encode(envelope, data)
