"""Names of OpenTelemetry's semantic conventions for messaging.

They are written out because the package of the conventions has no stable names for messaging yet.
"""

from __future__ import annotations

SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"
BODY_SIZE = "messaging.message.body.size"
BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"

CHANNEL = "messaging.simplebus.channel"
"""Own attribute: channel of the message."""
ATTEMPT = "messaging.simplebus.attempt"
"""Own attribute: number of the delivery, from 1."""

OPERATION_DURATION = "messaging.client.operation.duration"
PROCESS_DURATION = "messaging.process.duration"
SENT_MESSAGES = "messaging.client.sent.messages"
CONSUMED_MESSAGES = "messaging.client.consumed.messages"

DURATION_BOUNDARIES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Bucket boundaries of durations in seconds, as the conventions recommend."""


def describe_error(error: BaseException) -> str:
    """Return the value of `ERROR_TYPE`."""
    kind = type(error)
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"
