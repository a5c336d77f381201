"""Exceptions and reason codes of simplebus.

    BusError
    ├── LocalProtocolError     the caller asked for something that the protocol does not allow
    ├── RemoteProtocolError    the peer broke the protocol; the connection must be closed
    ├── RefusedError           the server refused a request; the connection continues
    └── BusConnectionError     the connection could not be opened, or is lost

Bugs of simplebus raise AssertionError. Wrong arguments raise ValueError, TypeError or
LocalProtocolError.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Reason code of a refusal, a disconnection or a dropped message.

    The values are stable: logs, metrics, the protocol and programs use them.
    """

    BAD_CONNECT = "bad_connect"
    TOO_MANY_CLASSES = "too_many_classes"
    UNKNOWN_CLASS = "unknown_class"
    UNKNOWN_TYPE = "unknown_type"
    BAD_ACK = "bad_ack"
    FRAME_TOO_LONG = "frame_too_long"
    FRAME_TIMEOUT = "frame_timeout"
    HELLO_TIMEOUT = "hello_timeout"
    UNAUTHORIZED = "unauthorized"
    PENDING_LIMIT = "pending_limit"
    STALLED = "stalled"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    ACK_UNSENT = "ack_unsent"
    ACK_UNSUBSCRIBED = "ack_unsubscribed"
    ACK_LATE = "ack_late"
    DROP_OLDEST = "drop_oldest"
    DROP_NEWEST = "drop_newest"
    UNDELIVERED_AT_CLOSE = "undelivered_at_close"
    BAD_REQUEST = "bad_request"
    BAD_ENVELOPE = "bad_envelope"
    BAD_CHANNEL = "bad_channel"
    UNKNOWN_SUBSCRIPTION = "unknown_subscription"
    SUBSCRIPTION_IN_USE = "subscription_in_use"
    SUBSCRIPTION_MISMATCH = "subscription_mismatch"
    DURABLE_IN_USE = "durable_in_use"
    TOO_MANY_SUBSCRIPTIONS = "too_many_subscriptions"
    MEMORY_LIMIT = "memory_limit"
    NAME_IN_USE = "name_in_use"
    TAKEN_OVER = "taken_over"
    NUMBER_GAP = "number_gap"
    DUPLICATE = "duplicate"
    OVER_CREDIT = "over_credit"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    CLASS_NAME_CONFLICT = "class_name_conflict"
    SLOW_CONSUMER = "slow_consumer"
    IDLE_DURABLE = "idle_durable"
    EXPIRED = "expired"
    UNCARRIABLE = "uncarriable"
    MAX_DELIVERIES = "max_deliveries"
    TERMINATED = "terminated"
    NO_DEAD_LETTER = "no_dead_letter"
    LAST_VALUE_DROPPED = "last_value_dropped"
    TLS_HANDSHAKE = "tls_handshake"
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    PURGED = "purged"
    UNKNOWN_SESSION = "unknown_session"
    DISK_FULL = "disk_full"
    DISK_FAILED = "disk_failed"
    DAMAGED = "damaged"
    DRAINING = "draining"


REFUSAL_REASONS = (
    *(Reason.UNAUTHORIZED, Reason.BAD_REQUEST, Reason.BAD_CONNECT, Reason.BAD_ENVELOPE),
    *(Reason.BAD_CHANNEL, Reason.BAD_ACK, Reason.UNKNOWN_CLASS, Reason.TOO_MANY_CLASSES),
    *(Reason.CLASS_NAME_CONFLICT, Reason.SUBSCRIPTION_IN_USE, Reason.UNKNOWN_SUBSCRIPTION),
    *(Reason.SUBSCRIPTION_MISMATCH, Reason.DURABLE_IN_USE, Reason.TOO_MANY_SUBSCRIPTIONS),
    *(Reason.MEMORY_LIMIT, Reason.NAME_IN_USE, Reason.UNKNOWN_SESSION, Reason.DROP_NEWEST),
    *(Reason.FRAME_TOO_LONG, Reason.DISK_FULL, Reason.DISK_FAILED, Reason.DRAINING),
)
"""Reasons of refused requests and messages. At the first Connect they end the connection."""
IGNORED_REASONS = (
    *(Reason.ACK_UNSENT, Reason.ACK_UNSUBSCRIBED, Reason.ACK_LATE, Reason.DUPLICATE),
)
"""Reasons of ignored acks and messages."""
DISCONNECT_REASONS = (
    *(Reason.UNKNOWN_TYPE, Reason.FRAME_TOO_LONG, Reason.FRAME_TIMEOUT, Reason.HELLO_TIMEOUT),
    *(Reason.HEARTBEAT_TIMEOUT, Reason.PENDING_LIMIT, Reason.STALLED),
    *(Reason.TOO_MANY_CONNECTIONS, Reason.TOO_MANY_ATTEMPTS, Reason.TLS_HANDSHAKE),
    *(Reason.SLOW_CONSUMER, Reason.TAKEN_OVER, Reason.NUMBER_GAP, Reason.OVER_CREDIT),
)
"""Reasons that end a connection, at any time."""
DEAD_LETTER_REASONS = (Reason.MAX_DELIVERIES, Reason.TERMINATED, Reason.UNCARRIABLE)
"""Reasons of dead letters."""
DROP_REASONS = (
    *(Reason.DROP_OLDEST, Reason.DROP_NEWEST, Reason.EXPIRED, Reason.PURGED, Reason.IDLE_DURABLE),
    *(Reason.SLOW_CONSUMER, Reason.UNDELIVERED_AT_CLOSE, Reason.LAST_VALUE_DROPPED),
    *(Reason.NO_DEAD_LETTER, Reason.DAMAGED, Reason.UNAUTHORIZED),
    *(Reason.DISK_FULL, Reason.DISK_FAILED),
)
"""Reasons of messages that are dropped without becoming dead letters."""


class BusError(Exception):
    """Base class of the exceptions that simplebus raises on purpose."""


class LocalProtocolError(BusError):
    """The caller asked for something that the protocol does not allow. Nothing was sent."""


class BusConnectionError(BusError, ConnectionError):
    """The connection to the server could not be opened, or is lost."""


class RemoteProtocolError(BusError):
    """The peer broke the protocol. Frames before the offending one were processed."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(f"{reason}: {sentence}")
        self.reason = reason
        """Reason code."""
        self.sentence = sentence
        """Description: what was received, and what was expected."""


class RefusedError(BusError):
    """The server refused a request. The request had no effect, and the connection continues."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code
        """Reason code, such as `unknown_class`."""
        self.sentence = sentence
        """Description: what was requested, and why it was refused."""
