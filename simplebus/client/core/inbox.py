"""One subscription: what waits for it, what it was handed, what of that is processed.

Rule 1: a message is settled when its consumer comes back for the next one, never when it is handed
out. Settling acknowledges, unless the consumer acknowledges by itself.
Rule 2: what a loop was handed is that loop's to settle: by coming round, or by telling how it
ended. When others ask meanwhile, it is set aside: nothing is said about it, so the bus sends it
again in time. What was handed to who asks one by one is settled by whoever asks next.
Rule 3: nothing here runs per message. How far a consumer has come is read off its iterator when
somebody wants to know.
Rule 4: a message that comes again while it still waits here, while a loop or a handler is at it, or
before its acknowledgement is written, is dropped: the one that is here will do. So what waits is at
most what the bus lets be in flight. Who acknowledges by hand may have forgotten what it was handed:
that waits here again, and is dropped if it is judged before its turn.
Rule 5: what waits here outlives the connection. Whether the bus still wants to hear about it, the
bus says when the subscription begins again.

    batch   │ settled │ handed out │ prepared │ untouched │      queue   batch batch …
            0      settled       handed     prepared     len

Invariant: 0 <= settled <= handed <= prepared <= len(batch)
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
from simplebus.core.protocol.frames import ranges_of
from simplebus.core.protocol.requests import Start, SubscribeReply, SubscribeRequest

_HALF_ID_RANGE = 1 << (MESSAGE_ID_BITS - 1)


class Inbox:
    """The messages of one subscription for its consumer."""

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
        """The Subscribe: done once the bus has answered, on each connection anew."""
        self.subscription_number = subscription_number
        self.auto_ack = auto_ack
        """Whether what is settled is acknowledged."""
        self.decode: Callable[[bytes], Any] | None = None
        """What makes a message's `value` of its payload."""
        self.error: RefusedError | None = None
        """Why the bus has ended the subscription; None while it has not."""
        self.unsubscribe_request: OpenRequest | None = None
        """The Unsubscribe, once the consumer has left."""
        self.is_subscribed = False
        """Whether the bus has answered, on this connection."""
        self.has_waiting_consumer = False
        """Whether a consumer waits for more; the driver says so."""
        self.buffered_bytes = 0
        """Bytes of batches that nobody has begun to take."""
        self.prepared_payloads: Iterator[bytes] = iter(())
        """Behind `ready`: its length hint is how many prepared messages were not handed out."""
        self.prepared_messages: Iterator[Message[Any]] = iter(())
        """The prepared messages that were not handed out."""
        self._ack_sink = ack_sink
        self._ack_buffer = self._create_ack_buffer()
        self._next_sequence: int | None = None
        """The sequence behind the furthest that came; None before the first answer."""
        self._server_run = ("", "")
        """Which bus has answered last, and in which run."""
        self._next_arrival_index = 1
        """The place in the row of the next message that comes in it."""
        self._queued_batches: deque[Batch] = deque()
        self._current_batch: Batch | None = None
        """What the consumer is at; None before the first."""
        self._settled_count = 0
        self._prepared_count = 0
        self._last_handed_out_count = 1
        """How many messages were handed out at once, the last time."""
        self._has_prepared_values = False
        """Whether `payloads` is taken from directly, and `ready` is of no use."""
        self.active_loop: object | None = None
        """The loop that asked last; None for who asks one by one, and for who acknowledges."""
        self._ended_loops: deque[tuple[object, AckOutcome | None]] = deque()
        """Loops that have ended, and the verdict on what they were at; None to put it back."""
        self._unsettled_by_loop: dict[object, tuple[Batch, int, int]] = {}
        """What loops are at while others have asked."""
        self.in_handler_sequences: set[int] = set()
        """Sequences that a handler is at, and says what becomes of them."""

    def _create_ack_buffer(self) -> AckBuffer:
        options = self.options
        # In a group the gaps are other members' messages, and may become ours any time.
        can_span_gaps = bool(options.channels) and options.group is None
        return AckBuffer(
            self._ack_sink, self.subscription_number, is_auto_ack=self.auto_ack, can_span_gaps=can_span_gaps
        )

    @property
    def has_kept_position(self) -> bool:
        """Whether its position is the bus's to keep when the connection goes."""
        return self.options.durable is not None or self.options.group is not None

    @property
    def was_subscribed(self) -> bool:
        """Whether the bus has ever answered."""
        return self._next_sequence is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hand out.

        Raises LocalProtocolError once it is left, and RefusedError once the bus has ended it and
        nothing waits any more.
        """
        if self.unsubscribe_request is not None:
            raise LocalProtocolError("the subscription was left; subscribe again")
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
        """Whether something was handed out and not settled."""
        return self._settled_count < self._handed_out_count

    @property
    def _handed_out_count(self) -> int:
        return self._prepared_count - length_hint(self.prepared_payloads)

    # What comes ----------------------------------------------------------------------------------

    def accept_run(self, run: FrameRun, attempt: int) -> int:
        """Messages have come. Returns how many of them were dropped as copies."""
        assert self._next_sequence is not None, "messages before the bus has answered"
        first = self._next_sequence + self._distance_from_next(run.first_id)
        sequences: MessageIds
        if isinstance(run.ids, range):
            sequences = range(first, first + run.count)
            redelivered_count = min(max(self._next_sequence - first, 0), run.count)
        else:
            sequences = run.ids + (first - run.first_id)
            redelivered_count = int(np.searchsorted(sequences, self._next_sequence))
        duplicate_count = (
            self._accept_redelivered(run.slice(0, redelivered_count), sequences[:redelivered_count], attempt)
            if redelivered_count
            else 0
        )
        if redelivered_count < run.count:
            if redelivered_count:
                run, sequences = run.slice(redelivered_count, run.count), sequences[redelivered_count:]
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
        """Take what does not still wait here. Returns how many were dropped."""
        self._mark_out_of_order(int(sequences[-1]))
        sequence_array = np.asarray(sequences)
        is_new = np.ones(run.count, np.bool_)
        for undecided in self._iter_undecided():
            if isinstance(undecided, range):
                is_new &= (sequence_array < undecided.start) | (sequence_array >= undecided.stop)
            else:
                is_new &= ~np.isin(sequence_array, undecided)
        for first, last in ranges_of(is_new):
            self._append_batch(run.slice(first, last), sequences[first:last], attempt, 0)
        if is_new.all():
            return 0
        self._ack_buffer.dropped_redeliveries.update(sequence_array[~is_new].tolist())
        return run.count - int(np.count_nonzero(is_new))

    def _mark_out_of_order(self, sequence: int) -> None:
        """Something came otherwise than in the row, up to this sequence."""
        self._ack_buffer.last_out_of_order = max(self._ack_buffer.last_out_of_order, sequence)
        self._next_arrival_index += 1  # So that nothing behind it follows on what came before it.

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
        """Drop what came again, is the next, and was judged by hand since it came."""
        queue, undecided = self._queued_batches, self._ack_buffer.undecided_out_of_order
        while queue and queue[0].is_late and queue[0].is_alive:
            batch = queue[0]
            is_undecided = np.array(
                [sequence in undecided for sequence in np.asarray(batch.sequences).tolist()]
            )
            if is_undecided.all():
                return
            queue.popleft()
            parts = [batch.part(first, last) for first, last in ranges_of(is_undecided)]
            queue.extendleft(reversed(parts))
            self.buffered_bytes += sum(part.size for part in parts) - batch.size
            if parts:
                return

    def _distance_from_next(self, message_id: int) -> int:
        """How far the message id is from the next sequence, by the nearest-id rule."""
        assert self._next_sequence is not None
        return (
            (message_id - self._next_sequence + _HALF_ID_RANGE) & MESSAGE_ID_MASK
        ) - _HALF_ID_RANGE

    def _iter_undecided(self) -> Iterator[MessageIds]:
        """Messages of this position of which the bus will hear that they are processed."""
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
        """The bus has begun the subscription, on this connection: which bus, and in which run."""
        # A process that has lost what came last has given these sequences to others, or may. What
        # is here came from the run that answered last: others may have greeted since, no more.
        same_run = bool(bus_run[0]) and bus_run == self._server_run
        self._server_run = server_run
        kept = same_run and (reply.resumed or not self.has_kept_position)
        if not kept or self._next_sequence is None or reply.cursor < self._next_sequence:
            self._ack_buffer.discard()
            self._ack_buffer = self._create_ack_buffer()
            self._next_sequence = reply.cursor
        self._next_arrival_index += 1
        self._ack_buffer.attach()
        self.is_subscribed = True

    def connection_lost(self) -> None:
        """The connection is gone."""
        self.is_subscribed = False
        self._ack_buffer.detach()
        if self.options.group is not None:  # Others in the group get it now.
            self._pop_unread()

    @property
    def has_held_acks(self) -> bool:
        """Whether what was said of messages waits for the bus to begin the subscription again."""
        return self._ack_buffer.has_held_acks

    def encode_resubscribe(self, *, is_same_bus: bool) -> bytes:
        """What the Subscribe says on another connection."""
        options = self.options
        if self._next_sequence is not None and options.seek:  # It was moved; now it goes on.
            options = replace(options, seek=False)
        if (
            self._next_sequence is None
            or self.has_kept_position
            or not is_same_bus
            or options.start == "waiting"
        ):
            return options.encode()
        return replace(options, start=Start(sequence=self._next_sequence)).encode()

    # Handing out, unless `is_empty`. What was handed out before must be settled or put back -------

    def prepare_messages(self, max_count: int, *, as_values: bool = False) -> int:
        """Have up to `most` messages `ready`, or, for who makes values of them, `payloads`. Returns
        how many were added; 0 when there are none, or when those before are not used up."""
        if as_values == self._has_prepared_values and length_hint(self.prepared_payloads):
            return 0
        if not self._select_batch():
            return 0
        assert self._current_batch is not None
        first = self._prepared_count
        self._prepared_count = min(first + max_count, len(self._current_batch))
        self._last_handed_out_count = 1
        self.prepared_payloads, ready = self._current_batch.messages(first, self._prepared_count)
        self._has_prepared_values = as_values
        self.prepared_messages = iter(()) if as_values else ready
        return self._prepared_count - first

    def pop_batch(self, max_count: int | None = None) -> Batch | None:
        """Hand out the next messages in one piece, at most so many."""
        if not self._select_batch():
            return None
        assert self._current_batch is not None
        first = self._prepared_count
        left = len(self._current_batch) - first
        self._last_handed_out_count = left if max_count is None else min(left, max_count)
        self._prepared_count = first + self._last_handed_out_count
        return self._current_batch.part(first, self._prepared_count)

    def get_last_message(self) -> Message[Any]:
        """The message that was handed out last."""
        assert self._current_batch is not None, "nothing was handed out"
        handed = self._handed_out_count
        return next(self._current_batch.messages(handed - 1, handed)[1])

    def _select_batch(self) -> bool:
        """Go on behind what was handed out, in the next batch if need be."""
        assert not self.has_unsettled, "asked for more before what was handed out is settled"
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

    # What becomes of what was handed out ---------------------------------------------------------

    def settle_previous(self, loop: object | None = None) -> None:
        """Somebody comes for more: a loop, or who asks one by one. What it was handed before is
        processed; what another loop is at is not its to judge."""
        self._settle_ended_loops()
        if self.active_loop is not None and self.active_loop is not loop:
            self._suspend_active_loop()
        self.active_loop = loop if self.auto_ack else None
        self.settle(include_last=True)
        if loop in self._unsettled_by_loop:
            batch, first, last = self._unsettled_by_loop.pop(loop)
            batch.settle(ACKED, first, last)

    def start_loop(self, loop: object) -> None:
        """A loop begins, perhaps anew: then it was left, and nobody knows how."""
        self.end_loop(loop, NACKED)
        self._settle_ended_loops()

    def end_loop(self, loop: object, outcome: AckOutcome | None) -> None:
        """A loop has ended; the verdict on what it was at, None to put that back. Heard later: who
        calls may be a finalizer, anywhere in a program."""
        self._ended_loops.append((loop, outcome))

    def settle(self, *, include_last: bool) -> None:
        """What was handed out is processed; the last of it only if `current`."""
        self._settle_ended_loops()
        last = self._handed_out_count
        if not include_last:
            last -= self._last_handed_out_count
        self._settle_until(ACKED, last)

    def _settle_until(self, outcome: AckOutcome, end: int) -> None:
        """The verdict on what was handed out and not settled, up to there."""
        if end > self._settled_count:
            if self.auto_ack and self._current_batch is not None:
                self._current_batch.settle(outcome, self._settled_count, end)
            self._settled_count = end

    def _settle_ended_loops(self) -> None:
        """Settle what loops were at that have ended."""
        while self._ended_loops:
            loop, verdict = self._ended_loops.popleft()
            if loop is self.active_loop:
                self.active_loop = None
                self._settle_until(ACKED, self._handed_count - self._last_handed_count)
                if verdict is None:
                    self._put_back_unsettled()
                else:
                    self._settle_until(verdict, self._handed_count)
            elif loop in self._unsettled_by_loop:
                batch, first, last = self._unsettled_by_loop.pop(loop)
                batch.settle(verdict or NACKED_WITHOUT_DELAY, first, last)

    def _suspend_active_loop(self) -> None:
        """Others ask while a loop is at something, which stays that loop's."""
        self._settle_until(ACKED, self._handed_out_count - self._last_handed_out_count)
        handed = self._handed_out_count
        if self._current_batch is not None and handed > self._settled_count:
            self._unsettled_by_loop[self.active_loop] = (
                self._current_batch,
                self._settled_count,
                handed,
            )
            self._settled_count = handed
        self._discard_prepared()  # So that the loop asks when it comes round.

    def nack_last(self) -> None:
        """The last that was handed out is not processed. The bus will send it again, in time."""
        self.settle(include_last=False)
        self._settle_until(NACKED, self._handed_out_count)

    def put_back_last(self) -> None:
        """The last that was handed out is not processed, and is the next to be handed out."""
        self.settle(include_last=False)
        self._put_back_unsettled()

    def _put_back_unsettled(self) -> None:
        """What was handed out and not settled is the next to be handed out."""
        self._discard_prepared()
        self._prepared_count = self._settled_count

    def settle_before_leave(self, *, is_processed: bool) -> None:
        """The consumer is about to leave; `processed` says what became of the last that it asked
        for. What loops are at that have not ended is not processed."""
        self._settle_ended_loops()
        if self.active_loop is not None:
            self._suspend_active_loop()
        elif is_processed:
            self.settle(include_last=True)
        else:
            self.nack_last()
        for batch, first, last in self._unsettled_by_loop.values():
            batch.settle(NACKED, first, last)
        self._unsettled_by_loop.clear()

    def leave(self, unsubscribe_request: OpenRequest) -> None:
        """The consumer leaves. What it was never handed goes back to the bus."""
        self.unsubscribe_request = unsubscribe_request
        for batch in self._pop_unread():
            if self.has_kept_position:
                batch.settle(NACKED_WITHOUT_DELAY, 0, len(batch))
        self._ack_buffer.close()
        self._current_batch = None
        self._settled_count = self._prepared_count = 0

    def mark_ended(self, error: RefusedError | None = None) -> None:
        """The bus has no such subscription any more."""
        self.error = error
        self.is_subscribed = False
        self._ack_buffer.discard()

    def _pop_unread(self) -> list[Batch]:
        """Returns what was never handed out, which is gone from here then."""
        self._discard_prepared()
        left = list(self._queued_batches)
        if self._current_batch is not None and self._prepared_count < len(self._current_batch):
            left.insert(0, self._current_batch.part(self._prepared_count, len(self._current_batch)))
            self._current_batch = (
                self._current_batch.part(0, self._prepared_count) if self._prepared_count else None
            )
        self._queued_batches.clear()
        self.buffered_bytes = 0
        return left

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        size = 0 if self._current_batch is None else len(self._current_batch)
        assert 0 <= self._settled_count <= self._handed_out_count <= self._prepared_count <= size, vars(
            self
        )
        assert self.buffered_bytes == sum(batch.size for batch in self._queued_batches)

    def _discard_prepared(self) -> None:
        """Prepared messages that were not handed out are untouched again."""
        self._prepared_count = self._handed_out_count
        deque(
            self.prepared_payloads, maxlen=0
        )  # So that whoever still holds `ready` gets nothing from it.
        self.prepared_payloads = iter(())
        self.prepared_messages = iter(())
