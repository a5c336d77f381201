"""An inbox against a list of waiting sequences and one of acknowledged ones, whatever happens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.client.core.consumers import take
from tests.client.core.inboxes import HeardInbox


class InboxMachine(RuleBasedStateMachine):
    """An inbox against a list of waiting sequences and a list of acknowledged ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = HeardInbox()
        self.waiting: list[int] = []
        self.unsettled: list[list[int]] = []
        """What was handed out, one list for each time."""
        self.said: list[tuple[str, int]] = []
        self.heard: list[tuple[str, int]] = []
        self.next = 0

    @rule(count=st.integers(1, 90))
    def come(self, count: int) -> None:
        sequences = range(self.next, self.next + count)
        self.inbox.come(sequences)
        self.waiting += sequences
        self.next += count

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(self.waiting))
        assert self.inbox.come([first], attempt=2) == 1

    @rule(count=st.integers(1, 40))
    def take(self, count: int) -> None:
        messages = take(self.inbox, count)
        for message in messages:
            self.hand_out([message.sequence])
        if len(messages) < count:  # It asked once more.
            self.settle(current=True)

    @rule(most=st.sampled_from([None, 1, 10]))
    def take_batch(self, most: int | None) -> None:
        self.inbox.settle(include_last=True)
        self.settle(current=True)
        batch = self.inbox.pop_batch(most)
        assert (batch is None) == (not self.waiting)
        if batch is not None:
            self.hand_out([*batch.sequences])

    @rule(current=st.booleans())
    def settle_now(self, current: bool) -> None:
        self.inbox.settle(include_last=current)
        self.settle(current=current)

    @precondition(lambda self: self.unsettled)
    @rule()
    def give_up(self) -> None:
        self.inbox.nack_last()
        self.settle(current=False)
        self.said += [("-", sequence) for sequence in self.unsettled.pop()]

    @precondition(lambda self: self.unsettled)
    @rule()
    def put_back(self) -> None:
        self.inbox.put_back_last()
        self.settle(current=False)
        self.waiting[:0] = self.unsettled.pop()

    @rule()
    def the_connection_is_lost_and_comes_again(self) -> None:
        self.listen()
        self.inbox.desk.clear()
        self.inbox.connection_lost()
        self.inbox.begin(self.next, same_run=True)

    def hand_out(self, sequences: list[int]) -> None:
        assert self.waiting[: len(sequences)] == sequences
        del self.waiting[: len(sequences)]
        self.settle(current=True)
        self.unsettled.append(sequences)

    def settle(self, *, current: bool) -> None:
        keep = self.unsettled[-1:] if not current else []
        for sequences in self.unsettled[: len(self.unsettled) - len(keep)]:
            self.said += [("+", sequence) for sequence in sequences]
        self.unsettled = keep

    def listen(self) -> None:
        for word in self.inbox.told():
            self.heard += [(word[0], n) for n in range(*map(int, word[1:].split("-")))]

    @invariant()
    def what_is_settled_is_said_once_and_in_order(self) -> None:
        self.inbox.check_invariants()
        assert self.inbox.is_empty == (not self.waiting)
        self.inbox.settle(include_last=False)
        self.listen()
        assert self.heard == self.said


InboxMachine.TestCase.settings = settings(stateful_step_count=30)
TestInbox = InboxMachine.TestCase
