"""Target for a stream that may change its leader or become full: few messages are in flight.

The target sends a few messages and waits for all answers. If the leader changes, some of them can
be lost while later ones are stored by the new leader; the same happens when a full stream has room
again. With one message in flight, the default, the order is always kept.

After a message that the stream may accept later, the rest of the batch is refused for the same
reason, and all of it is sent again in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simplebus.bridge.interfaces import STREAM_FULL, Refusal, SourceBatch, TargetBatch
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.target.nats import NatsTarget, nats_batch

IN_FLIGHT_MESSAGES = 1
"""Measured: with 1,024 in flight, 2 of 246 leader changes reordered messages; with 24,576, 6 of 56.
"""
_TYPICAL_MESSAGE_BYTES = 512
"""Fewer messages are in flight if they are longer than this, because they arrive later."""
_ROUNDS_PER_BATCH_MAX = 512
"""A batch with more rounds would have to be sent again as a whole after a lost connection."""


class OrderedStreamTarget(NatsTarget):
    """A stream, over one connection."""

    def __init__(
        self, connection: BridgeNatsConnection, *args: Any, under_way: int, **options: Any
    ) -> None:
        """Create the target. `under_way` is the largest number of messages in flight."""
        super().__init__(connection, *args, **options)
        self._in_flight_max = under_way
        self._next_part = self._next_row = self._sent_count = 0
        """Next command of the oldest batch, its next row, and the number of rows sent."""
        self._retry_reason: Refusal | None = None
        """Refusal after which nothing more is sent; None if no message was refused."""

    def prepare(self, batch: SourceBatch) -> TargetBatch:
        prepared = super().prepare(batch.limit(_ROUNDS_PER_BATCH_MAX * self._in_flight_max))
        nats_batch(prepared).batch_limit = min(self._in_flight_max, self._stream_state.batch_limit)
        return prepared

    def send(self, prepared: TargetBatch) -> None:
        nats_batch(prepared).pending = np.ones(prepared.count, np.bool_)
        self._source_identity.note_sent(self._source, prepared)
        self._sent.append(prepared)
        if len(self._sent) == 1:
            self._start_batch()

    async def settle_oldest(self) -> list[Refusal]:
        prepared = self._sent[0]
        if self._retry_reason is None:
            await self._wait_processed(prepared)
            self._handle_server_errors()
        self._refuse_rest_if_retryable(prepared)
        await self._note_mapped_subjects(prepared)
        self._sent.popleft()
        if not self._sent:
            self._retry_reason = None
        elif self._retry_reason is None:
            self._start_batch()
        return nats_batch(prepared).refusals

    async def _wait_pub_acks(self) -> None:
        """Wait for answers, after sending as many messages as may be in flight.

        All sent messages may be answered already, with none left to send.
        """
        prepared = self._sent[0]
        body = nats_batch(prepared)
        if not body.pending[: self._sent_count].any():
            if body.unanswered:
                await self._refuse_unanswered(prepared)
            self._refuse_rest_if_retryable(prepared)
            if body.pending.any():
                self._send_allowed(prepared)
            else:
                return
        await super()._wait_pub_acks()

    def _start_batch(self) -> None:
        self._next_part = self._next_row = self._sent_count = 0
        self._send_allowed(self._sent[0])

    def _send_allowed(self, prepared: TargetBatch) -> None:
        """Send as many messages as may be in flight, except known refused messages."""
        body = nats_batch(prepared)
        limit = min(self._in_flight_max, self._stream_state.batch_limit)
        remaining, bytes_left = limit, _TYPICAL_MESSAGE_BYTES * limit
        while remaining and self._next_part < len(body.commands):
            commands, count = body.commands[self._next_part], body.counts[self._next_part]
            size = len(commands) // count
            fitting = max(bytes_left // size, int(remaining == limit))
            rows = min(count - self._next_row, remaining, fitting)
            if not rows:
                break
            if body.pending[self._sent_count : self._sent_count + rows].any():
                self._core.write(commands[self._next_row * size : (self._next_row + rows) * size])
                remaining -= rows
                bytes_left -= rows * size
            self._sent_count += rows
            self._next_row += rows
            if self._next_row == count:
                self._next_part, self._next_row = self._next_part + 1, 0
        self._connection.nats.flush()

    def _refuse_rest_if_retryable(self, prepared: TargetBatch) -> None:
        """If a message is to be sent again later, refuse all unanswered messages after it, too."""
        body = nats_batch(prepared)
        refused = (refusal for refusal in body.refusals if refusal.code == STREAM_FULL)
        reason = self._retry_reason = self._retry_reason or next(refused, None)
        if reason is not None:
            for sequence in prepared.sequences[body.pending].tolist():
                body.refusals.append(Refusal(sequence, reason.code, reason.sentence))
            body.pending[:] = False
