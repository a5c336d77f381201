"""Statistics of a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Snapshot of the counters of one client.

    The counters start at 0 when the bus is created, count across reconnects and never decrease.
    `unconfirmed`, `unconfirmed_bytes`, `buffered_bytes` and `queued_bytes` are current amounts.
    """

    session_id: int | None
    """Id of this connection at the server; None while there is no connection."""
    reconnections: int
    """Connections that the server has accepted, without the first one."""
    published: int
    """Messages passed to the publish methods."""
    confirmed: int
    """Published messages that the server has stored or refused."""
    refused: int
    """Published messages that the server has refused."""
    resent: int
    """Messages that were sent again on a later connection."""
    forgotten: int
    """Confirmed messages that the server lost when it restarted, because their durability did not
    survive the restart.
    """
    unconfirmed: int
    """Published messages that are not confirmed yet."""
    unconfirmed_bytes: int
    """Bytes of the frames of unconfirmed messages."""
    received: int
    """Messages received, including redeliveries."""
    redelivered: int
    """Received messages that may have been delivered before."""
    acknowledged: int
    """Messages whose ack was encoded for sending."""
    nacked: int
    """Messages whose nack was encoded for sending."""
    ignored: int
    """Received messages and frames that were dropped: duplicates of messages that still wait here,
    messages for closed subscriptions, errors that match no request, and frames of unknown types.
    """
    buffered_bytes: int
    """Bytes of received batches that no consumer has started to read."""
    queued_bytes: int
    """Bytes that wait to be sent."""
    sent_bytes: int
    """Bytes passed to the socket."""
    received_bytes: int
    """Bytes read from the socket."""
