"""One local subscription: what waits for it, what it was handed, what of that is processed.

Rule 1: a message is settled when its consumer comes back for the next one, never when it is handed
out. Settling acknowledges, unless the consumer acknowledges by itself.
Rule 2: nothing here runs per message. How far a consumer has come is read off its iterator when
somebody wants to know.

    batch   │ settled │ handed out │ prepared │ untouched │      queue   batch batch …
            0      settled       handed     prepared     len

Invariant: 0 <= settled <= handed <= prepared <= len(batch)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from operator import length_hint

from simplebus.core.errors import LocalProtocolError
from simplebus.core.messages import Batch, Message


class Inbox:
    """The messages of one class for one consumer."""

    def __init__(self, class_id: int, *, auto_ack: bool) -> None:
        self.class_id = class_id
        self.auto_ack = auto_ack
        """Whether what is settled is acknowledged."""
        self.buffered_bytes = 0
        """Bytes of batches that nobody has begun to take."""
        self.ready: Iterator[Message] = iter(())
        """The prepared messages that were not handed out."""
        self.is_awaited = False
        """Whether a consumer waits for more; the driver says so."""
        self._queue: deque[Batch] = deque()
        self._batch: Batch | None = None
        """What the consumer is at; None before the first."""
        self._settled = 0
        self._prepared = 0
        self._unit = 1
        """How many messages were handed out at once, the last time."""
        self._payloads: Iterator[bytes] = iter(())
        """Behind `ready`: its length hint is how many prepared messages were not handed out."""
        self._taken_before = 0
        """Messages handed out of earlier batches."""
        self._still_at = -1
        self._is_closed = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hand out. Raises LocalProtocolError once it is closed."""
        if self._is_closed:
            raise LocalProtocolError("the subscription was left; subscribe again")
        return not self._queue and (self._batch is None or self._handed == len(self._batch))

    @property
    def pending(self) -> bool:
        """Whether something was handed out and not settled."""
        return self._settled < self._handed

    @property
    def taken(self) -> int:
        """Messages handed out so far."""
        return self._taken_before + self._handed

    @property
    def is_still(self) -> bool:
        """Whether nothing was handed out since `mark_still`."""
        return self._still_at == self.taken

    def mark_still(self) -> None:
        """The consumer has not come for messages for a while."""
        self._still_at = self.taken

    @property
    def _handed(self) -> int:
        return self._prepared - length_hint(self._payloads)

    def put(self, batch: Batch) -> None:
        """A batch has come."""
        self._queue.append(batch)
        self.buffered_bytes += len(batch.data)

    # Handing out. What was handed out before must be settled, put back or given up ----------------

    def prepare(self, most: int) -> int:
        """Make up to `most` messages `ready`. Returns how many; 0 when there are none."""
        if not self._begin():
            return 0
        assert self._batch is not None
        first = self._prepared
        self._prepared = min(first + most, len(self._batch))
        self._unit = 1
        self._payloads, self.ready = self._batch.messages(first, self._prepared)
        return self._prepared - first

    def take_batch(self) -> Batch | None:
        """Hand out the next messages in one piece."""
        if not self._begin():
            return None
        assert self._batch is not None
        first = self._prepared
        self._prepared = len(self._batch)
        self._unit = self._prepared - first
        return self._batch.part(first, self._prepared)

    def _begin(self) -> bool:
        """Go on behind what was handed out, in the next batch if need be."""
        assert not self.pending, "asked for more before what was handed out is settled"
        self._forget_prepared()
        if self._batch is not None and self._prepared < len(self._batch):
            return True
        if not self._queue:
            return False
        self._taken_before += self._prepared
        self._batch = self._queue.popleft()
        self.buffered_bytes -= len(self._batch.data)
        self._settled = self._prepared = 0
        return True

    # What becomes of what was handed out ---------------------------------------------------------

    def settle(self, *, current: bool) -> None:
        """What was handed out is processed; the last of it only if `current`."""
        last = self._handed
        if not current:
            last -= self._unit
        if last > self._settled:
            if self.auto_ack and self._batch is not None:
                self._batch.ack_part(self._settled, last)
            self._settled = last

    def give_up(self) -> None:
        """The last that was handed out is not processed. The bus will send it again, in time."""
        self.settle(current=False)
        self._settled = self._handed

    def put_back(self) -> None:
        """The last that was handed out is not processed, and is the next to be handed out."""
        self.settle(current=False)
        self._forget_prepared()
        self._prepared = self._settled

    def close(self) -> list[Batch]:
        """The consumer leaves. Returns what was never handed out."""
        self._forget_prepared()
        left = list(self._queue)
        if self._batch is not None and self._prepared < len(self._batch):
            left.insert(0, self._batch.part(self._prepared, len(self._batch)))
        self._batch = None
        self._settled = self._prepared = 0
        self._queue.clear()
        self.buffered_bytes = 0
        self._is_closed = True
        return left

    def waiting_ids(self) -> Iterator[range]:
        """The ids of the messages that are still to be processed and then acknowledged."""
        if self._batch is not None:
            first = self._settled if self.auto_ack else self._handed
            yield self._batch.message_ids[first:]
        for batch in self._queue:
            yield batch.message_ids

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        size = 0 if self._batch is None else len(self._batch)
        assert 0 <= self._settled <= self._handed <= self._prepared <= size, vars(self)
        assert self.buffered_bytes == sum(len(batch.data) for batch in self._queue)

    def _forget_prepared(self) -> None:
        """Prepared messages that were not handed out are untouched again."""
        self._prepared = self._handed
        deque(self._payloads, maxlen=0)  # So that whoever still holds `ready` gets nothing from it.
        self._payloads = iter(())
        self.ready = iter(())
