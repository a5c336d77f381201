"""Model test of an inbox."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.client.core.consumers import consume
from tests.client.core.inboxes import RecordingInbox


class InboxMachine(RuleBasedStateMachine):
    """Compares an inbox with a list of waiting sequences and a list of outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = RecordingInbox()
        self.waiting: list[int] = []
        self.unsettled: list[list[int]] = []
        """Sequences of each hand-out."""
        self.settled: list[tuple[str, int]] = []
        self.encoded: list[tuple[str, int]] = []
        self.next = 0

    @rule(count=st.integers(1, 90))
    def deliver(self, count: int) -> None:
        sequences = range(self.next, self.next + count)
        self.inbox.deliver(sequences)
        self.waiting += sequences
        self.next += count

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(self.waiting))
        assert self.inbox.deliver([first], attempt=2) == 1

    @rule(count=st.integers(1, 40))
    def consume(self, count: int) -> None:
        messages = consume(self.inbox, count)
        for message in messages:
            self.record_hand_out([message.sequence])
        if len(messages) < count:  # The consumer requested one more message.
            self.settle(include_last=True)

    @rule(max_count=st.sampled_from([None, 1, 10]))
    def take_batch(self, max_count: int | None) -> None:
        self.inbox.settle(include_last=True)
        self.settle(include_last=True)
        batch = self.inbox.pop_batch(max_count)
        assert (batch is None) == (not self.waiting)
        if batch is not None:
            self.record_hand_out([*batch.sequences])

    @rule(include_last=st.booleans())
    def settle_now(self, include_last: bool) -> None:
        self.inbox.settle(include_last=include_last)
        self.settle(include_last=include_last)

    @precondition(lambda self: self.unsettled)
    @rule()
    def nack(self) -> None:
        self.inbox.nack_last()
        self.settle(include_last=False)
        self.settled += [("-", sequence) for sequence in self.unsettled.pop()]

    @precondition(lambda self: self.unsettled)
    @rule()
    def put_back(self) -> None:
        self.inbox.put_back_last()
        self.settle(include_last=False)
        self.waiting[:0] = self.unsettled.pop()

    @rule()
    def reconnect(self) -> None:
        self.read_outcomes()
        self.inbox.ack_sink.clear()
        self.inbox.connection_lost()
        self.inbox.confirm_subscription(self.next, is_same_run=True)

    def record_hand_out(self, sequences: list[int]) -> None:
        assert self.waiting[: len(sequences)] == sequences
        del self.waiting[: len(sequences)]
        self.settle(include_last=True)
        self.unsettled.append(sequences)

    def settle(self, *, include_last: bool) -> None:
        kept_back = self.unsettled[-1:] if not include_last else []
        for sequences in self.unsettled[: len(self.unsettled) - len(kept_back)]:
            self.settled += [("+", sequence) for sequence in sequences]
        self.unsettled = kept_back

    def read_outcomes(self) -> None:
        for outcome in self.inbox.encoded_outcomes():
            self.encoded += [(outcome[0], n) for n in range(*map(int, outcome[1:].split("-")))]

    @invariant()
    def encoded_outcomes_equal_settled_outcomes(self) -> None:
        self.inbox.check_invariants()
        assert self.inbox.is_empty == (not self.waiting)
        self.inbox.settle(include_last=False)
        self.read_outcomes()
        assert self.encoded == self.settled


InboxMachine.TestCase.settings = settings(stateful_step_count=30)
TestInbox = InboxMachine.TestCase
