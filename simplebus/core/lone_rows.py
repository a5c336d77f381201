"""What is known of a single message with an envelope, before it is stored."""

from __future__ import annotations

from simplebus.core import envelope
from simplebus.core.classes import MessageClass
from simplebus.core.columns import AT_ONCE, NEVER, Row
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES


def lone_row(cls: MessageClass, frame: memoryview, now: float) -> Row | None:
    """As a row of its class's columns; None of a bad one, or without memory for its channel."""
    try:
        read, _ = envelope.decode(bytes(frame[HEADER_BYTES:-DELIMITER_BYTES]))
    except RemoteProtocolError:
        return None
    numbers = cls.channels.numbers((read.channel,))
    if numbers is None:
        return None
    expires, opens = read.expires_ms, read.not_before_ms
    return Row(
        numbers[0],
        NEVER if expires is None else now + expires / 1000,
        AT_ONCE if not opens else now + opens / 1000,
    )
