"""Inbox of one subscription: received messages, and how far the program has processed them.

    current batch   │ settled │ handed out │ prepared │ unread │      queued batches …

Invariant: 0 <= settled <= handed out <= prepared <= len(current batch)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any

import numpy as np
from msgspec.structs import replace

from simplebus.client.core.acks import (
    ACKED,
    NACKED,
    NACKED_WITHOUT_DELAY,
    AckBuffer,
    AckOutcome,
    AckSink,
    AckToken,
)
from simplebus.client.core.frame_runs import FrameRun, MessageIds
from simplebus.client.core.messages import Batch, Message
from simplebus.client.core.open_requests import OpenRequest
from simplebus.core.errors import LocalProtocolError, RefusedError
from simplebus.core.limits import MESSAGE_ID_BITS, MESSAGE_ID_MASK
from simplebus.core.protocol.frames import flags_to_ranges
from simplebus.core.protocol.requests import Start, SubscribeReply, SubscribeRequest

_HALF_ID_RANGE = 1 << (MESSAGE_ID_BITS - 1)


class Inbox:
    """Received messages of one subscription.

    A message is settled when its consumer asks for the next one, not when it is handed out.
    Settling acknowledges the message, unless the program acknowledges messages itself. If another
    consumer asks in between, the last message of a loop is set aside until that loop asks again or
    ends.

    Nothing is stored per message: the number of handed out messages is computed from the length
    hint of the iterator that the program reads.

    The server may redeliver a message that still waits here, that a loop or handler is processing,
    or that has an unsent ack. Such a redelivery is dropped, so an inbox never holds more than the
    server's limit of messages in flight. With manual acks the program may have lost a message that
    it received. Its redelivery is queued, and dropped if the program acknowledges the message
    before it reads the redelivery.

    Received messages survive a reconnect. The reply to the new Subscribe contains whether the
    server still accepts their acks.
    """

    def __init__(
        self,
        class_id: int,
        options: SubscribeRequest,
        subscribe_request: OpenRequest,
        ack_sink: AckSink,
        *,
        subscription_number: int,
        auto_ack: bool,
    ) -> None:
        self.class_id = class_id
        self.options = options
        self.subscribe_request = subscribe_request
        """The Subscribe request. It is reopened on each connection and done when the server has
        replied.
        """
        self.subscription_number = subscription_number
        self.auto_ack = auto_ack
        """True if settled messages are acknowledged."""
        self.decode: Callable[[bytes], Any] | None = None
        """Converts a payload into a message's `value`; None returns the payload."""
        self.on_prepared: Callable[[Iterator[Message[Any]]], None] | None = None
        """Called with messages that are about to be handed out; None calls nothing."""
        self.error: RefusedError | None = None
        """The reason why the server ended the subscription; None while it has not."""
        self.unsubscribe_request: OpenRequest | None = None
        """The Unsubscribe request; None until the subscription is left."""
        self.is_subscribed = False
        """True if the server has confirmed the subscription on this connection."""
        self.has_waiting_consumer = False
        """True if a consumer waits for messages. Set by the driver."""
        self.buffered_bytes = 0
        """Bytes of the queued batches."""
        self.prepared_payloads: Iterator[bytes] = iter(())
        """Payloads of the prepared messages. `prepared_messages` reads from this iterator, so its
        length hint is the number of prepared messages that were not handed out.
        """
        self.prepared_messages: Iterator[Message[Any]] = iter(())
        """Prepared messages that were not handed out."""
        self._has_handler = False
        """True if a handler processes the messages."""
        self._ack_sink = ack_sink
        self._ack_batch_messages = 1
        """Acks that are collected before they are sent."""
        self._ack_buffer = self._create_ack_buffer()
        self._next_sequence: int | None = None
        """One more than the highest received sequence; None before the first Subscribe reply."""
        self._server_run = ("", "")
        """Bus id and run id of the server that confirmed the subscription last."""
        self._next_arrival_index = 1
        """Arrival index of the next first delivery; see `AckToken.arrival_index`."""
        self._queued_batches: deque[Batch] = deque()
        self._current_batch: Batch | None = None
        """The batch that the consumer reads; None before the first."""
        self._settled_count = 0
        self._prepared_count = 0
        self._last_handed_out_count = 1
        """Number of messages in the last hand-out: 1, or the length of a batch."""
        self._has_prepared_values = False
        """True if the consumer reads `prepared_payloads` and not `prepared_messages`."""
        self.active_loop: object | None = None
        """The loop that asked for messages last; None if the last call was not from a loop, or acks
        are manual.
        """
        self._ended_loops: deque[tuple[object, bool]] = deque()
        """Loops that have ended, and whether their task was cancelled; not yet processed."""
        self._unsettled_by_loop: dict[object, tuple[Batch, int, int]] = {}
        """The last messages of loops that were suspended because another consumer asked."""
        self._unsettled_of_ended_loops: list[tuple[Batch, int, int]] = []
        """The last messages of loops that ended while they were suspended."""
        self.in_handler_sequences: set[int] = set()
        """Sequences that a handler is processing. The handler settles them."""

    def _create_ack_buffer(self) -> AckBuffer:
        options = self.options
        # In a group the gaps are messages of other members, which may be redelivered to this one.
        can_span_gaps = bool(options.channels) and options.group is None
        return AckBuffer(
            self._ack_sink,
            self.subscription_number,
            is_auto_ack=self.auto_ack or self._has_handler,
            can_span_gaps=can_span_gaps,
            batch_messages=self._ack_batch_messages,
        )

    def set_handled(self) -> None:
        """Record that a handler processes the messages.

        Messages that the handler does not settle itself are settled for it.
        """
        self._has_handler = self._ack_buffer.is_auto_ack = True

    def set_ack_batch(self, messages: int) -> None:
        """Collect this many acks before they are sent, unless `offer_acks` is called before."""
        self._ack_batch_messages = self._ack_buffer.batch_messages = messages

    def offer_acks(self) -> None:
        """Let the server get the acks of all settled messages."""
        self._ack_buffer.offer()

    @property
    def has_kept_position(self) -> bool:
        """True if the server keeps the position when the connection is lost."""
        return self.options.durable is not None or self.options.group is not None

    @property
    def was_subscribed(self) -> bool:
        """True if the server has confirmed the subscription on any connection."""
        return self._next_sequence is not None

    @property
    def is_empty(self) -> bool:
        """True if no message can be handed out.

        Raises:
            LocalProtocolError: If the subscription was closed.
            RefusedError: If the server ended the subscription and all received messages were
                handed out.
        """
        if self.unsubscribe_request is not None:
            raise LocalProtocolError("the subscription was closed; subscribe again")
        if self._current_batch is not None and self._handed_out_count < len(self._current_batch):
            return False
        if self._queued_batches and not self.auto_ack:
            self._drop_decided()
        if self._queued_batches:
            return False
        if self.error is not None:
            raise self.error
        return True

    @property
    def has_unsettled(self) -> bool:
        """True if a message was handed out and not settled."""
        return self._settled_count < self._handed_out_count

    @property
    def _handed_out_count(self) -> int:
        return self._prepared_count - length_hint(self.prepared_payloads)

    # Receiving -----------------------------------------------------------------------------------

    def accept_run(self, run: FrameRun, attempt: int) -> int:
        """Queue received messages. Return the number of duplicates that were dropped."""
        assert self._next_sequence is not None, "messages before the Subscribe reply"
        first = self._next_sequence + self._distance_from_next(run.first_id)
        sequences: MessageIds
        if isinstance(run.ids, range):
            sequences = range(first, first + run.count)
            redelivered_count = min(max(self._next_sequence - first, 0), run.count)
        else:
            sequences = run.ids + (first - run.first_id)
            redelivered_count = int(np.searchsorted(sequences, self._next_sequence))
        duplicate_count = (
            self._accept_redelivered(
                run.slice(0, redelivered_count), sequences[:redelivered_count], attempt
            )
            if redelivered_count
            else 0
        )
        if redelivered_count < run.count:
            if redelivered_count:
                run, sequences = (
                    run.slice(redelivered_count, run.count),
                    sequences[redelivered_count:],
                )
            self._next_sequence = int(sequences[-1]) + 1
            arrival_index = 0
            if attempt == 1:
                arrival_index = self._next_arrival_index
                self._next_arrival_index += run.count
            else:
                self._mark_out_of_order(self._next_sequence - 1)
            self._append_batch(run, sequences, attempt, arrival_index)
        return duplicate_count

    def _accept_redelivered(self, run: FrameRun, sequences: MessageIds, attempt: int) -> int:
        """Queue redeliveries, except of messages that wait here or have an unsent ack.

        Returns:
            The number of dropped redeliveries.
        """
        self._mark_out_of_order(int(sequences[-1]))
        sequence_array = np.asarray(sequences)
        is_new = np.ones(run.count, np.bool_)
        for undecided in self._iter_undecided():
            if isinstance(undecided, range):
                is_new &= (sequence_array < undecided.start) | (sequence_array >= undecided.stop)
            else:
                is_new &= ~np.isin(sequence_array, undecided)
        for first, last in flags_to_ranges(is_new):
            self._append_batch(run.slice(first, last), sequences[first:last], attempt, 0)
        if is_new.all():
            return 0
        self._ack_buffer.dropped_redeliveries.update(sequence_array[~is_new].tolist())
        return run.count - int(np.count_nonzero(is_new))

    def _mark_out_of_order(self, sequence: int) -> None:
        """Record that a message up to `sequence` did not arrive as a first delivery in order."""
        self._ack_buffer.last_out_of_order = max(self._ack_buffer.last_out_of_order, sequence)
        self._next_arrival_index += 1  # A gap, so that no range includes messages from both sides.

    def _append_batch(
        self, run: FrameRun, sequences: MessageIds, attempt: int, arrival_index: int
    ) -> None:
        ack_token = AckToken(
            self,
            self._ack_buffer,
            class_id=run.class_id,
            sequences=sequences,
            attempt=attempt,
            arrival_index=arrival_index,
        )
        batch = Batch(run, ack_token)
        self._queued_batches.append(batch)
        self.buffered_bytes += batch.size
        if not (arrival_index or self.auto_ack):
            self._ack_buffer.undecided_out_of_order.update(np.asarray(sequences).tolist())

    def _drop_decided(self) -> None:
        """Drop the next redelivered messages that the program has settled since they arrived."""
        queue, undecided = self._queued_batches, self._ack_buffer.undecided_out_of_order
        while queue and queue[0].is_late and queue[0].is_alive:
            batch = queue[0]
            is_undecided = np.array(
                [sequence in undecided for sequence in np.asarray(batch.sequences).tolist()]
            )
            if is_undecided.all():
                return
            queue.popleft()
            parts = [batch.part(first, last) for first, last in flags_to_ranges(is_undecided)]
            queue.extendleft(reversed(parts))
            self.buffered_bytes += sum(part.size for part in parts) - batch.size
            if parts:
                return

    def _distance_from_next(self, message_id: int) -> int:
        """Return the signed distance of the message id from the next sequence, modulo 2^31."""
        assert self._next_sequence is not None
        return (
            (message_id - self._next_sequence + _HALF_ID_RANGE) & MESSAGE_ID_MASK
        ) - _HALF_ID_RANGE

    def _iter_undecided(self) -> Iterator[MessageIds]:
        """Yield the sequences of messages that wait here, are being processed or have an unsent
        ack.
        """
        if self._current_batch is not None and self._current_batch.is_alive:
            first = self._settled_count if self.auto_ack else self._handed_out_count
            yield self._current_batch.sequences[first:]
        for batch in self._queued_batches:
            if batch.is_alive:
                yield batch.sequences
        if self.in_handler_sequences:
            yield np.fromiter(self.in_handler_sequences, np.int64)
        yield self._ack_buffer.acked_sequences()

    # Connections ---------------------------------------------------------------------------------

    def handle_subscribed(self, reply: SubscribeReply, *, server_run: tuple[str, str]) -> None:
        """Resume after the server has confirmed the subscription on this connection."""
        # A server process that restarted may have lost the newest messages and may assign their
        # sequences to other ones. The messages here came from the run in `_server_run`: only a
        # server that confirmed the subscription can have sent any.
        is_same_run = bool(server_run[0]) and server_run == self._server_run
        self._server_run = server_run
        is_position_kept = is_same_run and (reply.resumed or not self.has_kept_position)
        if (
            not is_position_kept
            or self._next_sequence is None
            or reply.cursor < self._next_sequence
        ):
            self._ack_buffer.discard()
            self._ack_buffer = self._create_ack_buffer()
            self._next_sequence = reply.cursor
        self._next_arrival_index += 1
        self._ack_buffer.attach()
        self.is_subscribed = True

    def connection_lost(self) -> None:
        """Keep received messages, unless the server sends them to other group members now."""
        self.is_subscribed = False
        self._ack_buffer.detach()
        if self.options.group is not None:  # The server sends them to other members now.
            self._pop_unread()

    @property
    def has_held_acks(self) -> bool:
        """True if acks wait until the server confirms the subscription again."""
        return self._ack_buffer.has_held_acks

    def encode_resubscribe(self, *, is_same_bus: bool) -> bytes:
        """Return the content of the Subscribe request for the next connection."""
        options = self.options
        if self._next_sequence is not None and options.seek:  # The seek was done before.
            options = replace(options, seek=False)
        if (
            self._next_sequence is None
            or self.has_kept_position
            or not is_same_bus
            or options.start == "waiting"
        ):
            return options.encode()
        return replace(options, start=Start(sequence=self._next_sequence)).encode()

    # Handing out, if not `is_empty` and all earlier messages are settled or put back --------------

    def prepare_messages(self, max_count: int, *, as_values: bool = False) -> int:
        """Prepare up to `max_count` messages in `prepared_messages`.

        Args:
            max_count: Maximum number of messages.
            as_values: Prepare `prepared_payloads` only, for a consumer that decodes them to values.

        Returns:
            Number of messages added; 0 if none are queued or prepared ones are left.
        """
        if as_values == self._has_prepared_values and length_hint(self.prepared_payloads):
            return 0
        if not self._select_batch():
            return 0
        assert self._current_batch is not None
        first = self._prepared_count
        self._prepared_count = min(first + max_count, len(self._current_batch))
        self._last_handed_out_count = 1
        self.prepared_payloads, messages = self._current_batch.messages(first, self._prepared_count)
        self._has_prepared_values = as_values
        self.prepared_messages = iter(()) if as_values else messages
        if self.on_prepared is not None:
            self.on_prepared(self._current_batch.messages(first, self._prepared_count)[1])
        return self._prepared_count - first

    def pop_batch(self, max_count: int | None = None) -> Batch | None:
        """Hand out up to `max_count` messages as one batch; None if none are queued."""
        if not self._select_batch():
            return None
        assert self._current_batch is not None
        first = self._prepared_count
        remaining_count = len(self._current_batch) - first
        self._last_handed_out_count = (
            remaining_count if max_count is None else min(remaining_count, max_count)
        )
        self._prepared_count = first + self._last_handed_out_count
        if self.on_prepared is not None:
            self.on_prepared(self._current_batch.messages(first, self._prepared_count)[1])
        return self._current_batch.part(first, self._prepared_count)

    def get_last_message(self) -> Message[Any]:
        """Return the message that was handed out last."""
        assert self._current_batch is not None, "nothing was handed out"
        handed_out_count = self._handed_out_count
        return next(self._current_batch.messages(handed_out_count - 1, handed_out_count)[1])

    def _select_batch(self) -> bool:
        """Make `_current_batch` a batch with unread messages. Return False if all are read."""
        assert not self.has_unsettled, "asked for messages while the last hand-out is unsettled"
        self._discard_prepared()
        if self._current_batch is not None and self._prepared_count < len(self._current_batch):
            return True
        if not self._queued_batches:
            return False
        self._current_batch = self._queued_batches.popleft()
        self.buffered_bytes -= self._current_batch.size
        if self._ack_buffer.undecided_out_of_order and self._current_batch.is_late:
            self._ack_buffer.undecided_out_of_order.difference_update(
                np.asarray(self._current_batch.sequences).tolist()
            )
        self._settled_count = self._prepared_count = 0
        return True

    # Settling ------------------------------------------------------------------------------------

    def settle_previous(self, loop: object | None = None) -> None:
        """Acknowledge earlier hand-outs, because `loop` or `get` asks for more messages.

        The last message of another loop that has not ended stays unsettled.
        """
        if self._ended_loops:
            self._process_ended_loops()
        if self.active_loop is not None and self.active_loop is not loop:
            self._suspend_active_loop()
        self.active_loop = loop if self.auto_ack else None
        self._settle_until(ACKED, self._handed_out_count)
        if self._unsettled_of_ended_loops:
            self._settle_ended_unsettled(ACKED)
        if loop in self._unsettled_by_loop:
            batch, first, last = self._unsettled_by_loop.pop(loop)
            batch.settle(ACKED, first, last)

    def end_loop(self, loop: object, *, is_cancelled: bool = False) -> None:
        """Record that a loop has ended, by `break`, by an exception or by cancellation.

        The last message of a cancelled loop is put back. That of any other loop is acknowledged
        when a consumer asks for more, or when the subscription is left without an exception.
        Processed later, because a finalizer may call this at any point of a program.
        """
        self._ended_loops.append((loop, is_cancelled))

    def settle(self, *, include_last: bool) -> None:
        """Settle the messages that were handed out, with or without those of the last hand-out."""
        self._process_ended_loops()
        end = self._handed_out_count
        if not include_last:
            end -= self._last_handed_out_count
        self._settle_until(ACKED, end)

    def _settle_until(self, outcome: AckOutcome, end: int) -> None:
        """Settle the messages of the current batch with an index below `end`."""
        if end > self._settled_count:
            if self.auto_ack and self._current_batch is not None:
                self._current_batch.settle(outcome, self._settled_count, end)
            self._settled_count = end

    def _process_ended_loops(self) -> None:
        while self._ended_loops:
            loop, is_cancelled = self._ended_loops.popleft()
            if loop is self.active_loop:
                self.active_loop = None
                if is_cancelled:
                    self._settle_until(ACKED, self._handed_out_count - self._last_handed_out_count)
                    self._put_back_unsettled()
            elif loop in self._unsettled_by_loop:
                batch, first, last = self._unsettled_by_loop.pop(loop)
                if is_cancelled:
                    batch.settle(NACKED_WITHOUT_DELAY, first, last)
                else:
                    self._unsettled_of_ended_loops.append((batch, first, last))

    def _settle_ended_unsettled(self, outcome: AckOutcome) -> None:
        for batch, first, last in self._unsettled_of_ended_loops:
            batch.settle(outcome, first, last)
        self._unsettled_of_ended_loops.clear()

    def _settle_suspended(self, outcome: AckOutcome) -> None:
        """Settle the last messages of all loops that are not active."""
        self._settle_ended_unsettled(outcome)
        for batch, first, last in self._unsettled_by_loop.values():
            batch.settle(outcome, first, last)
        self._unsettled_by_loop.clear()

    def _suspend_active_loop(self) -> None:
        """Set the last messages of the active loop aside for another consumer."""
        self._settle_until(ACKED, self._handed_out_count - self._last_handed_out_count)
        handed_out_count = self._handed_out_count
        if self._current_batch is not None and handed_out_count > self._settled_count:
            self._unsettled_by_loop[self.active_loop] = (
                self._current_batch,
                self._settled_count,
                handed_out_count,
            )
            self._settled_count = handed_out_count
        self._discard_prepared()  # The loop must ask again in its next iteration.

    def nack_last(self) -> None:
        """Reject the last hand-out, so that it is redelivered after the backoff."""
        self.settle(include_last=False)
        self._settle_until(NACKED, self._handed_out_count)

    def put_back_last(self) -> None:
        """Put the last hand-out back, so that it is handed out next."""
        self.settle(include_last=False)
        self._put_back_unsettled()

    def _put_back_unsettled(self) -> None:
        """Put the unsettled messages of the current batch back."""
        self._discard_prepared()
        self._prepared_count = self._settled_count

    def put_back_unprocessed(self) -> None:
        """Return the last messages of all consumers after the subscription's block was cancelled.

        The server redelivers them without a backoff.
        """
        self.put_back_last()
        self._settle_suspended(NACKED_WITHOUT_DELAY)

    def settle_before_leave(self, *, is_processed: bool) -> None:
        """Acknowledge the last messages of all consumers, or reject them if not `is_processed`.

        Called when the subscription's block is left.
        """
        if is_processed:
            self.settle(include_last=True)
        else:
            self.nack_last()
        self._settle_suspended(ACKED if is_processed else NACKED)
        self.offer_acks()

    def leave(self, unsubscribe_request: OpenRequest) -> None:
        """End the subscription. Messages that were not handed out return to the server."""
        self.unsubscribe_request = unsubscribe_request
        for batch in self._pop_unread():
            if self.has_kept_position:
                batch.settle(NACKED_WITHOUT_DELAY, 0, len(batch))
        self._ack_buffer.close()
        self._current_batch = None
        self._settled_count = self._prepared_count = 0

    def mark_ended(self, error: RefusedError | None = None) -> None:
        """Record that the server has ended the subscription."""
        self.error = error
        self.is_subscribed = False
        self._ack_buffer.discard()

    def _pop_unread(self) -> list[Batch]:
        """Remove and return the messages that were not handed out."""
        self._discard_prepared()
        unread_batches = list(self._queued_batches)
        if self._current_batch is not None and self._prepared_count < len(self._current_batch):
            unread_batches.insert(
                0, self._current_batch.part(self._prepared_count, len(self._current_batch))
            )
            self._current_batch = (
                self._current_batch.part(0, self._prepared_count) if self._prepared_count else None
            )
        self._queued_batches.clear()
        self.buffered_bytes = 0
        return unread_batches

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        size = 0 if self._current_batch is None else len(self._current_batch)
        assert 0 <= self._settled_count <= self._handed_out_count <= self._prepared_count <= size, (
            vars(self)
        )
        assert self.buffered_bytes == sum(batch.size for batch in self._queued_batches)

    def _discard_prepared(self) -> None:
        """Make prepared messages that were not handed out unread again."""
        if not length_hint(self.prepared_payloads):
            return
        self._prepared_count = self._handed_out_count
        # Exhaust the iterator: a loop that still holds `prepared_messages` must get no message.
        deque(self.prepared_payloads, maxlen=0)
        self.prepared_payloads = iter(())
        self.prepared_messages = iter(())
