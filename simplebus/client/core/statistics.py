"""What a client tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """A snapshot of one program's bus. Counters only grow."""

    session_id: int | None
    """What the bus calls the connection; None while there is none."""
    reconnections: int
    """Connections that the bus has answered, but for the first."""
    published: int
    """Messages handed over for sending."""
    confirmed: int
    """Those of them that the bus has stored or refused."""
    refused: int
    """Those of them that the bus has refused."""
    resent: int
    """Messages that were given to a connection again."""
    forgotten: int
    """Messages that were confirmed, and that a bus which came back with its memory has not: kept
    at a level that does not outlive what ended it."""
    unconfirmed: int
    """Messages handed over and not confirmed."""
    unconfirmed_bytes: int
    """Bytes of their frames."""
    received: int
    """Messages that came from the bus, redeliveries included."""
    redelivered: int
    """Messages that were not the first delivery, as far as the bus knows."""
    acknowledged: int
    """Messages whose acknowledgement was encoded for writing."""
    nacked: int
    """Messages that were given back, encoded for writing."""
    ignored: int
    """What came and was dropped: copies of what still waits here, messages for subscriptions that
    are gone, complaints about what is of no consequence, frames of unknown types."""
    buffered_bytes: int
    """Bytes of messages that no consumer has begun to take."""
    queued_bytes: int
    """Bytes that wait to be written."""
    sent_bytes: int
    received_bytes: int
