"""The model of version 1 must detect defects: each test breaks the broker on purpose.

The broker's own checks are disabled, so that only the model can detect the defect.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import TimerWheel
from simplebus.core.ring.columns import MessageRows
from simplebus.core.ring.ring import Ring
from simplebus.core.ring.segment import Segment
from simplebus.core.session.session import Session
from simplebus.core.store.publish_queue import PublishQueue
from simplebus.core.store.store import Store
from simplebus.core.subscription.unacked_messages import UnackedMessages
from tests.models.broken_broker import Patch, assert_model_detects_defect
from tests.models.test_version1_model import BlockMachine


class TrustingMachine(BlockMachine):
    trusting = True


def loses_a_message(patch: Patch) -> None:
    append = Ring.append

    def append_less(
        self: Ring, batch: FrameBatch, timer_index: int, rows: MessageRows | None = None
    ) -> int:
        if batch.count <= 3 or rows is not None:
            return append(self, batch, timer_index, rows)
        stored_count = append(self, batch.slice(0, batch.count - 1), timer_index)
        return stored_count + (stored_count == batch.count - 1)

    patch.setattr(Ring, "append", append_less)


def loses_waiting_messages(patch: Patch) -> None:
    patch.setattr(PublishQueue, "park", lambda self, session, cls, batch: None)


def redelivers_acknowledged_messages(patch: Patch) -> None:
    def everything(self: AckWindow, first: int, last: int) -> list[tuple[int, int]]:
        first, last = max(first, self.floor), min(last, self.cursor)
        return [(first, last)] if first < last else []

    patch.setattr(AckWindow, "unacked_ranges", everything)


def acknowledges_one_too_many(patch: Patch) -> None:
    ack_range = AckWindow.ack_range

    def ack_more(self: AckWindow, first: int, last: int) -> None:
        ack_range(self, first, min(last + 1, self.cursor))

    patch.setattr(AckWindow, "ack_range", ack_more)


def numbers_wrongly(patch: Patch) -> None:
    append = Segment.append

    def append_shifted(self: Segment, batch: FrameBatch, class_id: int, timer_index: int) -> None:
        self.first += 1
        append(self, batch, class_id, timer_index)
        self.first -= 1

    patch.setattr(Segment, "append", append_shifted)


def stores_in_another_order(patch: Patch) -> None:
    def add_parked(self: Session, class_id: int, batch: FrameBatch) -> None:
        self.parked_messages.insert(1, (class_id, batch.copy()))
        self.parked_bytes += batch.data.size

    patch.setattr(Session, "add_parked", add_parked)


def never_increases_the_delay(patch: Patch) -> None:
    expect = UnackedMessages.start_ack_timeout

    def expect_soon(self: UnackedMessages, first: int, last: int, attempts: int, tick: int) -> None:
        expect(self, first, last, 1, tick)

    patch.setattr(UnackedMessages, "start_ack_timeout", expect_soon)


def loses_overdue_messages(patch: Patch) -> None:
    pop = TimerWheel.pop_due_sets

    def pop_forgetting(self: TimerWheel, tick: int) -> list[tuple[int, SequenceSet]]:
        due = pop(self, tick)
        return [] if tick % 3 == 0 else due

    patch.setattr(TimerWheel, "pop_due_sets", pop_forgetting)


def wakes_one_subscriber_only(patch: Patch) -> None:
    def wake(self: Store, cls: MessageClass) -> None:
        for subscription in list(cls.subscriptions.values())[:1]:
            subscription.outbox.enqueue(subscription)

    patch.setattr(Store, "notify_subscribers", wake)


def keeps_the_first_timer_index(patch: Patch) -> None:
    patch.setattr(Ring, "set_timer_index", lambda self, first, last, timer_index: None)


BREAKS: list[Callable[[Patch], None]] = [
    loses_a_message,
    loses_waiting_messages,
    redelivers_acknowledged_messages,
    acknowledges_one_too_many,
    numbers_wrongly,
    stores_in_another_order,
    never_increases_the_delay,
    loses_overdue_messages,
    wakes_one_subscriber_only,
    keeps_the_first_timer_index,
]


@pytest.mark.parametrize("break_engine", BREAKS, ids=lambda each: each.__name__)
def test_model_detects_broker_that(
    break_engine: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    break_engine(monkeypatch)
    assert_model_detects_defect(TrustingMachine, "version1_model.py", derandomize=True)
