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

from simplebus.client.core.acks import ACKED, NACKED, NACKED_AT_ONCE, AckLog, Desk, Receipt, Verdict
from simplebus.client.core.frame_runs import Ids, Run
from simplebus.client.core.messages import Batch, Message
from simplebus.client.core.open_requests import Request
from simplebus.core.errors import LocalProtocolError, RefusedError
from simplebus.core.limits import MESSAGE_ID_BITS, MESSAGE_ID_MASK
from simplebus.core.protocol.frames import ranges_of
from simplebus.core.protocol.requests import Start, SubscribeReply, SubscribeRequest

_HALF = 1 << (MESSAGE_ID_BITS - 1)


class Inbox:
    """The messages of one subscription for its consumer."""

    def __init__(
        self,
        class_id: int,
        options: SubscribeRequest,
        request: Request,
        desk: Desk,
        *,
        number: int,
        auto_ack: bool,
    ) -> None:
        self.class_id = class_id
        self.options = options
        self.request = request
        """The Subscribe: done once the bus has answered, on each connection anew."""
        self.subscription_number = number
        self.auto_ack = auto_ack
        """Whether what is settled is acknowledged."""
        self.decode: Callable[[bytes], Any] | None = None
        """What makes a message's `value` of its payload."""
        self.error: RefusedError | None = None
        """Why the bus has ended the subscription; None while it has not."""
        self.leaving: Request | None = None
        """The Unsubscribe, once the consumer has left."""
        self.is_begun = False
        """Whether the bus has answered, on this connection."""
        self.is_awaited = False
        """Whether a consumer waits for more; the driver says so."""
        self.buffered_bytes = 0
        """Bytes of batches that nobody has begun to take."""
        self.payloads: Iterator[bytes] = iter(())
        """Behind `ready`: its length hint is how many prepared messages were not handed out."""
        self.ready: Iterator[Message[Any]] = iter(())
        """The prepared messages that were not handed out."""
        self._desk = desk
        self._log = self._new_log()
        self._next: int | None = None
        """The sequence behind the furthest that came; None before the first answer."""
        self._run = ("", "")
        """Which bus has answered last, and in which run."""
        self._row = 1
        """The place in the row of the next message that comes in it."""
        self._queue: deque[Batch] = deque()
        self._batch: Batch | None = None
        """What the consumer is at; None before the first."""
        self._settled = 0
        self._prepared = 0
        self._unit = 1
        """How many messages were handed out at once, the last time."""
        self._makes_values = False
        """Whether `payloads` is taken from directly, and `ready` is of no use."""
        self.loop: object | None = None
        """The loop that asked last; None for who asks one by one, and for who acknowledges."""
        self._ended: deque[tuple[object, Verdict | None]] = deque()
        """Loops that have ended, and the verdict on what they were at; None to put it back."""
        self._aside: dict[object, tuple[Batch, int, int]] = {}
        """What loops are at while others have asked."""
        self.at_work: set[int] = set()
        """Sequences that a handler is at, and says what becomes of them."""

    def _new_log(self) -> AckLog:
        options = self.options
        # In a group the gaps are other members' messages, and may become ours any time.
        spans = bool(options.channels) and options.group is None
        return AckLog(self._desk, self.subscription_number, settles=self.auto_ack, spans=spans)

    @property
    def is_lasting(self) -> bool:
        """Whether its position is the bus's to keep when the connection goes."""
        return self.options.durable is not None or self.options.group is not None

    @property
    def was_begun(self) -> bool:
        """Whether the bus has ever answered."""
        return self._next is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hand out.

        Raises LocalProtocolError once it is left, and RefusedError once the bus has ended it and
        nothing waits any more.
        """
        if self.leaving is not None:
            raise LocalProtocolError("the subscription was left; subscribe again")
        if self._batch is not None and self._handed < len(self._batch):
            return False
        if self._queue and not self.auto_ack:
            self._drop_judged()
        if self._queue:
            return False
        if self.error is not None:
            raise self.error
        return True

    @property
    def pending(self) -> bool:
        """Whether something was handed out and not settled."""
        return self._settled < self._handed

    @property
    def _handed(self) -> int:
        return self._prepared - length_hint(self.payloads)

    # What comes ----------------------------------------------------------------------------------

    def accept(self, run: Run, attempt: int) -> int:
        """Messages have come. Returns how many of them were dropped as copies."""
        assert self._next is not None, "messages before the bus has answered"
        first = self._next + self._ahead(run.first_id)
        sequences: Ids
        if isinstance(run.ids, range):
            sequences = range(first, first + run.count)
            behind = min(max(self._next - first, 0), run.count)
        else:
            sequences = run.ids + (first - run.first_id)
            behind = int(np.searchsorted(sequences, self._next))
        copies = (
            self._accept_again(run.part(0, behind), sequences[:behind], attempt) if behind else 0
        )
        if behind < run.count:
            if behind:
                run, sequences = run.part(behind, run.count), sequences[behind:]
            self._next = int(sequences[-1]) + 1
            row = 0
            if attempt == 1:
                row = self._row
                self._row += run.count
            else:
                self._came_late(self._next - 1)
            self._put(run, sequences, attempt, row)
        return copies

    def _accept_again(self, run: Run, sequences: Ids, attempt: int) -> int:
        """Take what does not still wait here. Returns how many were dropped."""
        self._came_late(int(sequences[-1]))
        numbers = np.asarray(sequences)
        wanted = np.ones(run.count, np.bool_)
        for waiting in self._waiting():
            if isinstance(waiting, range):
                wanted &= (numbers < waiting.start) | (numbers >= waiting.stop)
            else:
                wanted &= ~np.isin(numbers, waiting)
        for first, last in ranges_of(wanted):
            self._put(run.part(first, last), sequences[first:last], attempt, 0)
        if wanted.all():
            return 0
        self._log.newer.update(numbers[~wanted].tolist())
        return run.count - int(np.count_nonzero(wanted))

    def _came_late(self, sequence: int) -> None:
        """Something came otherwise than in the row, up to this sequence."""
        self._log.late = max(self._log.late, sequence)
        self._row += 1  # So that nothing behind it follows on what came before it.

    def _put(self, run: Run, sequences: Ids, attempt: int, row: int) -> None:
        receipt = Receipt(
            self, self._log, class_id=run.class_id, sequences=sequences, attempt=attempt, row=row
        )
        batch = Batch(run, receipt)
        self._queue.append(batch)
        self.buffered_bytes += batch.size
        if not (row or self.auto_ack):
            self._log.late_ones.update(np.asarray(sequences).tolist())

    def _drop_judged(self) -> None:
        """Drop what came again, is the next, and was judged by hand since it came."""
        queue, late_ones = self._queue, self._log.late_ones
        while queue and queue[0].is_late and queue[0].is_alive:
            batch = queue[0]
            wanted = np.array(
                [number in late_ones for number in np.asarray(batch.sequences).tolist()]
            )
            if wanted.all():
                return
            queue.popleft()
            parts = [batch.part(first, last) for first, last in ranges_of(wanted)]
            queue.extendleft(reversed(parts))
            self.buffered_bytes += sum(part.size for part in parts) - batch.size
            if parts:
                return

    def _ahead(self, message_id: int) -> int:
        """How far the message id is from the next sequence, by the nearest-id rule."""
        assert self._next is not None
        return ((message_id - self._next + _HALF) & MESSAGE_ID_MASK) - _HALF

    def _waiting(self) -> Iterator[Ids]:
        """Messages of this position of which the bus will hear that they are processed."""
        if self._batch is not None and self._batch.is_alive:
            first = self._settled if self.auto_ack else self._handed
            yield self._batch.sequences[first:]
        for batch in self._queue:
            if batch.is_alive:
                yield batch.sequences
        if self.at_work:
            yield np.fromiter(self.at_work, np.int64)
        yield self._log.acknowledged()

    # Connections ---------------------------------------------------------------------------------

    def answered(self, reply: SubscribeReply, *, run: tuple[str, str]) -> None:
        """The bus has begun the subscription, on this connection: which bus, and in which run."""
        # A process that has lost what came last has given these sequences to others, or may. What
        # is here came from the run that answered last: others may have greeted since, no more.
        same_run = bool(run[0]) and run == self._run
        self._run = run
        kept = same_run and (reply.resumed or not self.is_lasting)
        if not kept or self._next is None or reply.cursor < self._next:
            self._log.end()
            self._log = self._new_log()
            self._next = reply.cursor
        self._row += 1
        self._log.attach()
        self.is_begun = True

    def lost(self) -> None:
        """The connection is gone."""
        self.is_begun = False
        self._log.detach()
        if self.options.group is not None:  # Others in the group get it now.
            self._drop_untouched()

    @property
    def holds_verdicts(self) -> bool:
        """Whether what was said of messages waits for the bus to begin the subscription again."""
        return self._log.is_held

    def content_again(self, *, same_bus: bool) -> bytes:
        """What the Subscribe says on another connection."""
        options = self.options
        if self._next is not None and options.seek:  # It was moved; now it goes on.
            options = replace(options, seek=False)
        if self._next is None or self.is_lasting or not same_bus or options.start == "waiting":
            return options.encode()
        return replace(options, start=Start(sequence=self._next)).encode()

    # Handing out, unless `is_empty`. What was handed out before must be settled or put back -------

    def prepare(self, most: int, *, values: bool = False) -> int:
        """Have up to `most` messages `ready`, or, for who makes values of them, `payloads`. Returns
        how many were added; 0 when there are none, or when those before are not used up."""
        if values == self._makes_values and length_hint(self.payloads):
            return 0
        if not self._begin():
            return 0
        assert self._batch is not None
        first = self._prepared
        self._prepared = min(first + most, len(self._batch))
        self._unit = 1
        self.payloads, ready = self._batch.messages(first, self._prepared)
        self._makes_values = values
        self.ready = iter(()) if values else ready
        return self._prepared - first

    def take_batch(self, most: int | None = None) -> Batch | None:
        """Hand out the next messages in one piece, at most so many."""
        if not self._begin():
            return None
        assert self._batch is not None
        first = self._prepared
        left = len(self._batch) - first
        self._unit = left if most is None else min(left, most)
        self._prepared = first + self._unit
        return self._batch.part(first, self._prepared)

    def current(self) -> Message[Any]:
        """The message that was handed out last."""
        assert self._batch is not None, "nothing was handed out"
        handed = self._handed
        return next(self._batch.messages(handed - 1, handed)[1])

    def _begin(self) -> bool:
        """Go on behind what was handed out, in the next batch if need be."""
        assert not self.pending, "asked for more before what was handed out is settled"
        self._forget_prepared()
        if self._batch is not None and self._prepared < len(self._batch):
            return True
        if not self._queue:
            return False
        self._batch = self._queue.popleft()
        self.buffered_bytes -= self._batch.size
        if self._log.late_ones and self._batch.is_late:
            self._log.late_ones.difference_update(np.asarray(self._batch.sequences).tolist())
        self._settled = self._prepared = 0
        return True

    # What becomes of what was handed out ---------------------------------------------------------

    def ask(self, loop: object | None = None) -> None:
        """Somebody comes for more: a loop, or who asks one by one. What it was handed before is
        processed; what another loop is at is not its to judge."""
        self._hear_ended()
        if self.loop is not None and self.loop is not loop:
            self._set_aside()
        self.loop = loop if self.auto_ack else None
        self.settle(current=True)
        if loop in self._aside:
            batch, first, last = self._aside.pop(loop)
            batch.settle(ACKED, first, last)

    def restart(self, loop: object) -> None:
        """A loop begins, perhaps anew: then it was left, and nobody knows how."""
        self.end_loop(loop, NACKED)
        self._hear_ended()

    def end_loop(self, loop: object, verdict: Verdict | None) -> None:
        """A loop has ended; the verdict on what it was at, None to put that back. Heard later: who
        calls may be a finalizer, anywhere in a program."""
        self._ended.append((loop, verdict))

    def settle(self, *, current: bool) -> None:
        """What was handed out is processed; the last of it only if `current`."""
        self._hear_ended()
        last = self._handed
        if not current:
            last -= self._unit
        self._decide(ACKED, last)

    def _decide(self, verdict: Verdict, last: int) -> None:
        """The verdict on what was handed out and not settled, up to there."""
        if last > self._settled:
            if self.auto_ack and self._batch is not None:
                self._batch.settle(verdict, self._settled, last)
            self._settled = last

    def _hear_ended(self) -> None:
        """Settle what loops were at that have ended."""
        while self._ended:
            loop, verdict = self._ended.popleft()
            if loop is self.loop:
                self.loop = None
                self._decide(ACKED, self._handed - self._unit)
                if verdict is None:
                    self._go_back()
                else:
                    self._decide(verdict, self._handed)
            elif loop in self._aside:
                batch, first, last = self._aside.pop(loop)
                batch.settle(verdict or NACKED_AT_ONCE, first, last)

    def _set_aside(self) -> None:
        """Others ask while a loop is at something, which stays that loop's."""
        self._decide(ACKED, self._handed - self._unit)
        handed = self._handed
        if self._batch is not None and handed > self._settled:
            self._aside[self.loop] = (self._batch, self._settled, handed)
            self._settled = handed
        self._forget_prepared()  # So that the loop asks when it comes round.

    def give_up(self) -> None:
        """The last that was handed out is not processed. The bus will send it again, in time."""
        self.settle(current=False)
        self._decide(NACKED, self._handed)

    def put_back(self) -> None:
        """The last that was handed out is not processed, and is the next to be handed out."""
        self.settle(current=False)
        self._go_back()

    def _go_back(self) -> None:
        """What was handed out and not settled is the next to be handed out."""
        self._forget_prepared()
        self._prepared = self._settled

    def finish(self, *, processed: bool) -> None:
        """The consumer is about to leave; `processed` says what became of the last that it asked
        for. What loops are at that have not ended is not processed."""
        self._hear_ended()
        if self.loop is not None:
            self._set_aside()
        elif processed:
            self.settle(current=True)
        else:
            self.give_up()
        for batch, first, last in self._aside.values():
            batch.settle(NACKED, first, last)
        self._aside.clear()

    def leave(self, request: Request) -> None:
        """The consumer leaves. What it was never handed goes back to the bus."""
        self.leaving = request
        for batch in self._drop_untouched():
            if self.is_lasting:
                batch.settle(NACKED_AT_ONCE, 0, len(batch))
        self._log.close()
        self._batch = None
        self._settled = self._prepared = 0

    def end(self, error: RefusedError | None = None) -> None:
        """The bus has no such subscription any more."""
        self.error = error
        self.is_begun = False
        self._log.end()

    def _drop_untouched(self) -> list[Batch]:
        """Returns what was never handed out, which is gone from here then."""
        self._forget_prepared()
        left = list(self._queue)
        if self._batch is not None and self._prepared < len(self._batch):
            left.insert(0, self._batch.part(self._prepared, len(self._batch)))
            self._batch = self._batch.part(0, self._prepared) if self._prepared else None
        self._queue.clear()
        self.buffered_bytes = 0
        return left

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        size = 0 if self._batch is None else len(self._batch)
        assert 0 <= self._settled <= self._handed <= self._prepared <= size, vars(self)
        assert self.buffered_bytes == sum(batch.size for batch in self._queue)

    def _forget_prepared(self) -> None:
        """Prepared messages that were not handed out are untouched again."""
        self._prepared = self._handed
        deque(self.payloads, maxlen=0)  # So that whoever still holds `ready` gets nothing from it.
        self.payloads = iter(())
        self.ready = iter(())
