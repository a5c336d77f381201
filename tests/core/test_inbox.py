"""One local subscription: what is settled when, whatever the consumer does."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from oracles import build_frame
from strategies import MESSAGE

from core.pair import payloads, take, take_batches
from simplebus.core.errors import LocalProtocolError
from simplebus.core.inbox import Inbox
from simplebus.core.messages import Batch, Receipt
from simplebus.core.outgoing import AckLog
from simplebus.core.runs import Run


class IdLog(AckLog):
    """Remembers every id."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []

    def add(self, *, class_id: int, timer_index: int, first: int, last: int) -> None:
        assert (class_id, timer_index) == (1, 0)
        assert first < last
        self.ids += range(first, last)


def batch_of(owner: object, log: AckLog, first_id: int, count: int) -> Batch:
    raw = b"".join(
        build_frame(MESSAGE, class_id=1, message_id=message_id, content=b"%06d" % message_id)
        for message_id in range(first_id, first_id + count)
    )
    run = Run(raw, count=count, stride=len(raw) // count, bounds=None)
    return Batch(run, Receipt(owner, log, run=run, redelivered=False))


def inbox_with(*counts: int, auto_ack: bool = True) -> tuple[Inbox, IdLog]:
    """An inbox with batches of so many messages, numbered on."""
    inbox, log = Inbox(1, auto_ack=auto_ack), IdLog()
    first_id = 0
    for count in counts:
        inbox.put(batch_of(inbox, log, first_id, count))
        first_id += count
    return inbox, log


def test_a_message_is_acknowledged_when_the_next_is_asked_for() -> None:
    inbox, log = inbox_with(3)
    take(inbox, 2)
    inbox.settle(current=False)
    assert log.ids == [0]
    take(inbox, 1)
    inbox.settle(current=False)
    assert log.ids == [0, 1]
    inbox.settle(current=True)
    assert log.ids == [0, 1, 2]


def test_what_was_only_prepared_is_not_acknowledged() -> None:
    inbox, log = inbox_with(100)
    take(inbox, 5)
    inbox.settle(current=True)
    assert log.ids == list(range(5))
    assert [len(batch) for batch in inbox.close()] == [95]


def test_batches_and_messages_take_turns() -> None:
    inbox, log = inbox_with(10, 5, 5)
    assert payloads(inbox, 4) == [b"%06d" % number for number in range(4)]
    batches = take_batches(inbox)
    assert [list(batch.message_ids) for batch in batches] == [
        list(range(4, 10)),
        list(range(10, 15)),
        list(range(15, 20)),
    ]
    assert batches[0].payloads == [b"%06d" % number for number in range(4, 10)]
    assert log.ids == list(range(20))
    assert inbox.is_empty


def test_a_failed_message_is_left_out_and_the_ones_around_it_are_not() -> None:
    inbox, log = inbox_with(5)
    take(inbox, 3)
    inbox.give_up()
    take(inbox)
    inbox.settle(current=True)
    assert log.ids == [0, 1, 3, 4]


def test_a_message_that_is_put_back_is_the_next_one() -> None:
    inbox, log = inbox_with(5)
    take(inbox, 3)
    inbox.put_back()
    assert log.ids == [0, 1]
    assert payloads(inbox, 2) == [b"000002", b"000003"]
    inbox.settle(current=True)
    assert log.ids == [0, 1, 2, 3]


def test_a_batch_that_is_put_back_is_the_next_one() -> None:
    inbox, log = inbox_with(5)
    take(inbox, 2)
    inbox.settle(current=True)
    assert inbox.take_batch() is not None
    inbox.put_back()
    assert log.ids == [0, 1]
    assert payloads(inbox, 1) == [b"000002"]


def test_without_auto_ack_nothing_is_acknowledged_but_by_hand() -> None:
    inbox, log = inbox_with(4, auto_ack=False)
    messages = take(inbox)
    inbox.settle(current=True)
    assert log.ids == []
    messages[3].ack(inbox)
    messages[1].ack(inbox)
    with pytest.raises(LocalProtocolError, match="came from another subscription"):
        messages[0].ack(Inbox(1, auto_ack=False))
    assert log.ids == [3, 1]


def test_an_iterator_that_is_kept_past_its_time_gives_nothing() -> None:
    inbox, _ = inbox_with(5)
    take(inbox, 1)
    kept = inbox.ready
    inbox.settle(current=True)
    inbox.take_batch()
    assert list(kept) == []


def test_a_subscription_that_was_left_has_nothing_more() -> None:
    inbox, _ = inbox_with(5)
    take(inbox, 1)
    assert [len(batch) for batch in inbox.close()] == [4]
    with pytest.raises(LocalProtocolError, match="was left; subscribe again"):
        assert inbox.is_empty


def test_asking_for_more_before_the_last_is_settled_is_our_bug() -> None:
    inbox, _ = inbox_with(1, 1)
    take(inbox, 1)
    with pytest.raises(AssertionError, match="before what was handed out is settled"):
        inbox.take_batch()


class InboxMachine(RuleBasedStateMachine):
    """An inbox against a list of waiting ids and a list of acknowledged ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox, self.log = Inbox(1, auto_ack=True), IdLog()
        self.waiting: list[int] = []
        self.unsettled: list[list[int]] = []
        """What was handed out, one list for each time."""
        self.acked: list[int] = []
        self.next_id = 0
        self.taken = 0

    @rule(count=st.integers(1, 90))
    def put(self, count: int) -> None:
        self.inbox.put(batch_of(self.inbox, self.log, self.next_id, count))
        self.waiting += range(self.next_id, self.next_id + count)
        self.next_id += count

    @rule(count=st.integers(1, 40))
    def take(self, count: int) -> None:
        messages = take(self.inbox, count)
        for message in messages:
            self.hand_out([message.message_id])
        if len(messages) < count:  # It asked once more.
            self.settle(current=True)

    @rule()
    def take_batch(self) -> None:
        self.inbox.settle(current=True)
        self.settle(current=True)
        batch = self.inbox.take_batch()
        assert (batch is None) == (not self.waiting)
        if batch is not None:
            self.hand_out(list(batch.message_ids))

    @rule(current=st.booleans())
    def settle_now(self, current: bool) -> None:
        self.inbox.settle(current=current)
        self.settle(current=current)

    @precondition(lambda self: self.unsettled)
    @rule()
    def give_up(self) -> None:
        self.inbox.give_up()
        self.settle(current=False)
        self.unsettled.clear()

    @precondition(lambda self: self.unsettled)
    @rule()
    def put_back(self) -> None:
        self.inbox.put_back()
        self.settle(current=False)
        self.waiting[:0] = self.unsettled.pop()

    @rule()
    def consumers_change(self) -> None:
        """One leaves, and another takes over what was never handed out."""
        left = self.inbox.close()
        self.unsettled.clear()
        assert [i for batch in left for i in batch.message_ids] == self.waiting
        self.inbox = Inbox(1, auto_ack=True)
        for batch in left:
            self.inbox.put(batch.for_owner(self.inbox))

    def hand_out(self, ids: list[int]) -> None:
        assert self.waiting[: len(ids)] == ids
        del self.waiting[: len(ids)]
        self.settle(current=True)
        self.unsettled.append(ids)

    def settle(self, *, current: bool) -> None:
        keep = self.unsettled[-1:] if not current else []
        for ids in self.unsettled[: len(self.unsettled) - len(keep)]:
            self.acked += ids
        self.unsettled = keep

    @invariant()
    def what_is_settled_is_acknowledged_once(self) -> None:
        self.inbox.check()
        assert self.inbox.is_empty == (not self.waiting)
        before = list(self.log.ids)
        self.inbox.settle(current=False)
        assert self.log.ids == self.acked
        assert self.log.ids[: len(before)] == before


InboxMachine.TestCase.settings = settings(stateful_step_count=30)
TestInbox = InboxMachine.TestCase
