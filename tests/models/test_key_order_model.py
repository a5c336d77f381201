"""A key-ordered group against its model, with random members, replies and times."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.models.key_order_model import KeyOrderModel

KEYS = st.sampled_from([b"", b"a", b"a", b"b", b"c", b"d"])
CHANNELS = st.sampled_from(["", "a.x", "b"])
TIMES = st.sampled_from([(None, None)] * 6 + [(1500, None), (None, 2500), (4000, 1000)])
MEMBER_INDEXES = st.integers(0, 7)


class KeyGroupMachine(RuleBasedStateMachine):
    """Rules are actions of peers or time; the model checks everything after each."""

    @initialize(
        max_deliveries=st.sampled_from([0, 0, 2]),
        channels=st.sampled_from([(), (), ("a.#",)]),
        bound=st.sampled_from(
            [
                {},
                {},
                {"class_messages": 8, "drops": True},
                {"max_pending": 5, "slow": "drop_oldest"},
                {"max_pending": 5, "slow": "drop_newest"},
            ]
        ),
    )
    def start(
        self, max_deliveries: int, channels: tuple[str, ...], bound: dict[str, object]
    ) -> None:
        self.model = KeyOrderModel(max_deliveries=max_deliveries, channels=channels, **bound)  # type: ignore[arg-type]

    def member(self, member_index: int):  # type: ignore[no-untyped-def]
        return self.model.members[member_index % len(self.model.members)]

    @property
    def has_members(self) -> bool:
        return bool(self.model.members)

    @precondition(lambda self: len(self.model.members) < 5)
    @rule(max_in_flight=st.sampled_from([None, None, None, 1, 2]))
    def add_member(self, max_in_flight: int | None) -> None:
        self.model.join(max_in_flight)

    @precondition(lambda self: self.has_members)
    @rule(member_index=MEMBER_INDEXES)
    def remove_member(self, member_index: int) -> None:
        self.model.leave(self.member(member_index))

    @rule(messages=st.lists(st.tuples(KEYS, CHANNELS, TIMES), min_size=1, max_size=8))
    def publish(self, messages: list[tuple[bytes, str, tuple[int | None, int | None]]]) -> None:
        self.model.publish(*((key, channel, *times) for key, channel, times in messages))

    @rule(key=KEYS, count=st.sampled_from([3, 20]))
    def publish_a_run(self, key: bytes, count: int) -> None:
        self.model.publish(*((key, "a.x", None, None),) * count)

    @precondition(lambda self: self.has_members)
    @rule(member_index=MEMBER_INDEXES)
    def receive(self, member_index: int) -> None:
        self.model.receive(self.member(member_index))

    @precondition(lambda self: self.has_members)
    @rule(member_index=MEMBER_INDEXES, data=st.data())
    def send(self, member_index: int, data: st.DataObject) -> None:
        """Ack, reject or extend held messages, or a range that contains more."""
        model, member = self.model, self.member(member_index)
        self.model.receive(member)
        held_sequences = [m.sequence for m in model.messages if m.holder is member]
        if not held_sequences:
            return
        first = data.draw(st.sampled_from(held_sequences))
        last = data.draw(st.sampled_from([first + 1, first + 1, held_sequences[-1] + 1]))
        last = max(last, first + 1)
        match data.draw(st.sampled_from(["ack"] * 4 + ["nack", "later", "at once", "working"])):
            case "ack":
                model.ack(member, first, last)
            case "nack":
                model.nack(member, first, last, None)
            case "later":
                model.nack(member, first, last, 1200)
            case "at once":
                model.nack(member, first, last, 0)
            case _:
                model.working(member, first, last)

    @rule(times=st.sampled_from([1, 1, 3, 7]))
    def tick(self, times: int) -> None:
        self.model.tick(times)

    @rule(seconds=st.sampled_from([0.5, 1.3]))
    def pass_time(self, seconds: float) -> None:
        self.model.pass_time(seconds)

    @rule(first=st.integers(0, 12), count=st.sampled_from([1, 1, 3, 10]))
    def purge(self, first: int, count: int) -> None:
        """Purge a range that may contain messages that were removed already."""
        messages = self.model.messages
        remaining = [m.sequence for m in messages if not (m.is_acked or m.is_gone)]
        at = remaining[first % len(remaining)] if remaining else first
        self.model.purge(at, min(at + count, len(messages)))

    @rule()
    def restart(self) -> None:
        self.model.restart()

    @rule()
    def check_nothing_is_stuck(self) -> None:
        self.model.check_nothing_is_stuck()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.finish()


TestKeyGroup = KeyGroupMachine.TestCase
TestKeyGroup.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
