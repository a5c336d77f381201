"""One subscription: what is settled when, what is dropped, what outlives a connection."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from oracles import ID_COUNT, build_frame, parse_frame, split_frames

from core.consumers import payloads, take, take_batches
from simplebus.core import envelope
from simplebus.core.client.asking import Request
from simplebus.core.client.inbox import Inbox
from simplebus.core.client.receipts import ACKED, NACKED, Desk, Verdict
from simplebus.core.client.runs import Run, runs
from simplebus.core.envelope import Envelope
from simplebus.core.errors import LocalProtocolError, RefusedError, RemoteProtocolError
from simplebus.core.receive import FrameReceiver, ReceiveBuffer
from simplebus.core.requests import Start, SubscribeReply, SubscribeRequest

MESSAGE, SUBSCRIBE, ENVELOPE = b"125"
BUFFER = ReceiveBuffer(1 << 20)


def runs_of(data: bytes) -> list[Run]:
    receiver = FrameReceiver(frame_bytes_max=1 << 20)
    return [r for b in receiver.receive(BUFFER, BUFFER.fill(data)) for r in runs(b)]


class HeardInbox(Inbox):
    """An inbox that is given sequences, and tells what was written about them."""

    def __init__(
        self, options: SubscribeRequest | None = None, *, cursor: int = 0, auto_ack: bool = True
    ) -> None:
        self.desk = Desk()
        options = options or SubscribeRequest()
        request = Request(1, SUBSCRIBE, content=options.encode())
        super().__init__(1, options, request, self.desk, number=7, auto_ack=auto_ack)
        self.runs = 0
        self.begin(cursor)

    def begin(self, cursor: int, *, resumed: bool = False, same_run: bool = False) -> None:
        self.runs += not same_run
        reply = SubscribeReply(cursor=cursor, floor=cursor, resumed=resumed)
        self.answered(reply, run=("bus", f"{self.runs}"))

    def come(self, sequences: Iterable[int], attempt: int = 1, payload: bytes = b"%06d") -> int:
        """These messages have come. Returns how many were dropped."""
        data = b"".join(
            build_frame(
                MESSAGE,
                class_id=1,
                message_id=sequence % ID_COUNT,
                content=payload % sequence if b"%" in payload else payload,
            )
            for sequence in sequences
        )
        return sum(self.accept(run, attempt) for run in runs_of(data))

    def told(self) -> list[str]:
        """What is written: `+first-last` for acks, `-first-last delay` for nacks."""
        words = {ord("3"): "+", ord("8"): "-", ord("9"): "~"}
        parsed = [parse_frame(frame) for frame in split_frames(self.desk.take())[0]]
        return [words[kind] + content.decode() for kind, *_, content in parsed]


def inbox_with(*counts: int, auto_ack: bool = True) -> HeardInbox:
    """An inbox with batches of so many messages, numbered on."""
    inbox, first = HeardInbox(auto_ack=auto_ack), 0
    for count in counts:
        inbox.come(range(first, first + count))
        first += count
    return inbox


# Settling ----------------------------------------------------------------------------------------


def test_a_message_is_acknowledged_when_the_next_is_asked_for() -> None:
    inbox = inbox_with(3)
    take(inbox, 2)
    inbox.settle(current=False)
    assert inbox.told() == ["+0-1"]
    take(inbox, 1)
    inbox.settle(current=False)
    assert inbox.told() == ["+1-2"]
    inbox.settle(current=True)
    assert inbox.told() == ["+2-3"]


def test_what_was_only_prepared_is_not_acknowledged() -> None:
    inbox = inbox_with(100)
    take(inbox, 5)
    inbox.settle(current=True)
    assert inbox.told() == ["+0-5"]


def test_batches_and_messages_take_turns() -> None:
    inbox = inbox_with(10, 5, 5)
    assert payloads(inbox, 4) == [b"%06d" % number for number in range(4)]
    batches = take_batches(inbox)
    assert [batch.sequences for batch in batches] == [range(4, 10), range(10, 15), range(15, 20)]
    assert batches[0].payloads == [b"%06d" % number for number in range(4, 10)]
    assert inbox.told() == ["+0-20"]
    assert inbox.is_empty


def test_a_batch_can_be_bounded() -> None:
    inbox = inbox_with(10)
    assert [len(batch) for batch in take_batches(inbox, 4)] == [4, 4, 2]
    assert inbox.told() == ["+0-10"]


def test_a_failed_message_is_given_back_and_the_ones_around_it_are_acknowledged() -> None:
    inbox = inbox_with(5)
    take(inbox, 3)
    inbox.give_up()
    take(inbox)
    inbox.settle(current=True)
    assert inbox.told() == ["+0-2", "-2-3", "+3-5"]


def test_a_message_that_is_put_back_is_the_next_one() -> None:
    inbox = inbox_with(5)
    take(inbox, 3)
    inbox.put_back()
    assert inbox.told() == ["+0-2"]
    assert payloads(inbox, 2) == [b"000002", b"000003"]
    inbox.settle(current=True)
    assert inbox.told() == ["+2-4"]


def test_a_batch_that_is_put_back_is_the_next_one() -> None:
    inbox = inbox_with(5)
    take(inbox, 2)
    inbox.settle(current=True)
    assert inbox.take_batch() is not None
    inbox.put_back()
    assert payloads(inbox, 1) == [b"000002"]


def ask(inbox: Inbox, loop: object | None = None) -> bytes:
    """The next message's payload, for a loop or for who asks one by one."""
    inbox.ask(loop)
    inbox.prepare(64)
    inbox.check()
    return next(inbox.ready).payload


def test_what_a_loop_is_at_is_set_aside_until_it_comes_round() -> None:
    inbox, loop = inbox_with(5), object()
    assert ask(inbox, loop) == b"000000"
    assert ask(inbox) == b"000001"
    assert inbox.told() == []
    assert ask(inbox, loop) == b"000002"
    assert inbox.told() == ["+1-2", "+0-1"]
    inbox.finish(processed=True)
    assert inbox.told() == ["-2-3"]


@pytest.mark.parametrize(
    ("verdict", "at_once", "aside", "next_"),
    [
        (ACKED, "+0-1", "+0-1", b"000001"),
        (NACKED, "-0-1", "-0-1", b"000001"),
        (None, None, "-0-1 0", b"000000"),
    ],
)
def test_a_loop_that_ends_says_what_becomes_of_what_it_was_at(
    verdict: Verdict | None, at_once: str | None, aside: str, next_: bytes
) -> None:
    inbox, loop = inbox_with(5), object()
    assert ask(inbox, loop) == b"000000"
    inbox.end_loop(loop, verdict)
    assert ask(inbox) == next_
    assert inbox.told() == ([] if at_once is None else [at_once])

    inbox = inbox_with(5)
    assert [ask(inbox, loop), ask(inbox)] == [b"000000", b"000001"]
    inbox.end_loop(loop, verdict)
    inbox.settle(current=False)
    assert inbox.told() == [aside]


def test_a_loop_that_begins_anew_was_left_and_nobody_knows_how() -> None:
    inbox, loop = inbox_with(5), object()
    assert ask(inbox, loop) == b"000000"
    inbox.restart(loop)
    assert inbox.told() == ["-0-1"]
    assert ask(inbox, loop) == b"000001"


def test_what_a_handler_is_at_is_dropped_when_it_comes_again() -> None:
    inbox = inbox_with(3, auto_ack=False)
    first, second = take(inbox, 2)
    inbox.at_work.add(first.sequence)
    assert inbox.come([0, 1, 2], attempt=2) == 2
    assert inbox.come([1], attempt=3) == 1
    inbox.at_work.clear()
    assert inbox.come([0], attempt=3) == 0
    second.ack()
    assert payloads(inbox, 1) == [b"000002"]
    assert not inbox.is_empty
    assert payloads(inbox) == [b"000000"]


@pytest.mark.parametrize("auto_ack", [True, False])
def test_what_is_acknowledged_and_not_written_is_dropped_when_it_comes_again(
    *, auto_ack: bool
) -> None:
    inbox = inbox_with(4, auto_ack=auto_ack)
    for message in take(inbox, 3):
        message.ack()
    inbox.settle(current=True)
    assert inbox.come([0, 1, 2], attempt=2) == 3
    assert inbox.told() == ["+0-3"]
    assert inbox.come([0, 1, 2], attempt=2) == 0


@pytest.mark.parametrize("verdict", ["ack", "nack", "working"])
def test_what_waits_again_is_dropped_when_it_is_judged_by_hand_meanwhile(verdict: str) -> None:
    inbox = inbox_with(4, auto_ack=False)
    taken = take(inbox)
    assert inbox.come([0, 1, 2, 3], attempt=2) == 0
    inbox.come([4])
    getattr(taken[1], verdict)()
    taken[0].ack()
    expected = [1, 2, 3, 4] if verdict == "working" else [2, 3, 4]
    assert not inbox.is_empty
    assert [message.sequence for message in take(inbox)] == expected

    inbox.come([2, 3], attempt=3)
    for message in taken:
        message.ack()
    assert inbox.is_empty
    assert inbox.buffered_bytes == 0


def test_values_and_messages_are_not_mixed_up() -> None:
    inbox = inbox_with(5)
    inbox.prepare(64, values=True)
    assert next(inbox.payloads) == b"000000"
    assert next(inbox.ready, None) is None
    inbox.settle(current=True)
    inbox.prepare(64)
    message = next(inbox.ready)
    assert (message.payload, message.sequence) == (b"000001", 1)


def test_without_auto_ack_nothing_is_said_but_by_hand() -> None:
    inbox = inbox_with(5, auto_ack=False)
    messages = take(inbox)
    inbox.give_up()
    assert inbox.told() == []
    messages[3].ack(inbox)
    messages[1].ack()
    messages[2].nack()
    messages[4].nack(1.5)
    messages[0].working()
    with pytest.raises(LocalProtocolError, match="came from another subscription"):
        messages[0].ack(HeardInbox())
    assert inbox.told() == ["+3-4", "+1-2", "-2-3", "-4-5 1500", "~0-1"]


def test_a_batch_can_be_acknowledged_by_hand() -> None:
    inbox = inbox_with(9, auto_ack=False)
    batches = take_batches(inbox, 3)
    batches[0].ack(inbox)
    batches[1].nack(0)
    batches[2].working()
    batches[2].ack()
    assert inbox.told() == ["+0-3", "-3-6 0", "~6-9", "+6-9"]


def test_what_a_consumer_says_by_hand_is_not_settled_over() -> None:
    inbox = inbox_with(4)
    messages = take(inbox, 2)
    messages[1].nack()
    take(inbox, 2)[-1].nack(3)
    inbox.give_up()
    assert inbox.told() == ["-1-2", "-3-4 3000", "+0-1", "+2-3"]


def test_an_iterator_that_is_kept_past_its_time_gives_nothing() -> None:
    inbox = inbox_with(5)
    take(inbox, 1)
    kept, raw = inbox.ready, inbox.payloads
    inbox.settle(current=True)
    inbox.take_batch()
    assert (list(kept), list(raw)) == ([], [])


def test_payloads_may_be_taken_in_the_place_of_messages() -> None:
    inbox = inbox_with(5)
    inbox.prepare(3)
    assert next(inbox.payloads) == b"000000"
    assert next(inbox.payloads) == b"000001"
    assert inbox.current().sequence == 1
    inbox.settle(current=False)
    assert inbox.told() == ["+0-1"]
    assert list(inbox.payloads) == [b"000002"]
    inbox.settle(current=True)
    assert inbox.told() == ["+1-3"]


def test_asking_for_more_before_the_last_is_settled_is_our_bug() -> None:
    inbox = inbox_with(1, 1)
    take(inbox, 1)
    with pytest.raises(AssertionError, match="before what was handed out is settled"):
        inbox.take_batch()


# Leaving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SubscribeRequest(), []),
        (SubscribeRequest(durable="d"), ["-1-5 0"]),
        (SubscribeRequest(group="g"), ["-1-5 0"]),
    ],
)
def test_what_was_never_handed_out_goes_back_if_the_position_is_kept(
    options: SubscribeRequest, expected: list[str]
) -> None:
    inbox = HeardInbox(options)
    inbox.come(range(3))
    inbox.come(range(3, 5))
    take(inbox, 1)
    inbox.settle(current=True)
    assert inbox.told() == ["+0-1"]
    inbox.leave(Request(2, ord("U"), content=b""))
    assert inbox.told() == expected
    assert inbox.buffered_bytes == 0
    with pytest.raises(LocalProtocolError, match="was left; subscribe again"):
        assert inbox.is_empty


def test_a_subscription_that_the_bus_has_ended_says_why_once_all_is_taken() -> None:
    inbox = inbox_with(2)
    inbox.end(RefusedError("slow_consumer", "too slow"))
    assert len(take(inbox)) == 2
    with pytest.raises(RefusedError, match="slow_consumer: too slow"):
        assert inbox.is_empty
    inbox.settle(current=True)
    assert inbox.told() == []


# What comes --------------------------------------------------------------------------------------


def test_messages_know_their_sequence_beyond_the_wrap_of_the_ids() -> None:
    inbox = HeardInbox(cursor=5 * ID_COUNT - 2)
    inbox.come(range(5 * ID_COUNT - 2, 5 * ID_COUNT + 2))
    inbox.come(range(5 * ID_COUNT - 9, 5 * ID_COUNT - 7), attempt=0)
    messages = take(inbox)
    assert [m.sequence - 5 * ID_COUNT for m in messages] == [-2, -1, 0, 1, -9, -8]
    assert [m.message_id for m in messages][:3] == [ID_COUNT - 2, ID_COUNT - 1, 0]
    assert [m.redelivered for m in messages] == [False] * 4 + [True] * 2
    inbox.settle(current=True)
    assert inbox.told() == [
        "+2147483646-2147483648",
        "+0-2",
        "+2147483639-2147483641",
    ]


def test_acks_of_a_filtered_subscription_span_what_was_not_for_it() -> None:
    inbox = HeardInbox(SubscribeRequest(channels=["a.#"]))
    inbox.come([3, 7, 12])
    inbox.come([15])
    take(inbox)
    inbox.settle(current=True)
    assert inbox.told() == ["+3-16"]


def test_acks_of_a_group_do_not_span_what_others_got() -> None:
    inbox = HeardInbox(SubscribeRequest(channels=["a.#"], group="g"))
    inbox.come([3, 7, 8])
    take(inbox)
    inbox.settle(current=True)
    assert inbox.told() == ["+3-4", "+7-9"]


def test_acks_do_not_span_what_came_again() -> None:
    inbox = HeardInbox(SubscribeRequest(channels=["a.#"]), auto_ack=False)
    inbox.come([3, 7, 12])
    messages = take(inbox)
    inbox.settle(current=True)
    inbox.come([5], attempt=2)
    inbox.come([20, 30])
    inbox.come([25], attempt=1)  # Not before now, though its place was passed.
    inbox.come([40, 44])
    messages += take(inbox)
    for message in messages:
        if message.sequence not in (5, 25):
            message.ack()
    assert inbox.told() == ["+3-4", "+7-8", "+12-13", "+20-21", "+30-31", "+40-45"]


@given(st.data())
def test_no_ack_names_a_message_that_came_and_was_not_acknowledged(data: st.DataObject) -> None:
    inbox = HeardInbox(SubscribeRequest(channels=["a.#"]), auto_ack=False)
    came: set[int] = set()
    acked: set[int] = set()
    held: dict[int, list[object]] = {}
    head = 0
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from("nnlaat")):
            case "n":
                steps = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
                sequences = [head + sum(steps[: n + 1]) for n in range(len(steps))]
                head = sequences[-1]
                inbox.come(sequences)
                came |= set(sequences)
            case "l" if head:
                sequences = sorted(data.draw(st.sets(st.integers(0, head), min_size=1, max_size=3)))
                inbox.come(sequences, attempt=data.draw(st.sampled_from([0, 1, 2])))
                came |= set(sequences)
            case "a":
                for message in take(inbox):
                    held.setdefault(message.sequence, []).append(message)
                chosen = data.draw(st.lists(st.sampled_from(sorted(held) or [-1]), max_size=6))
                for sequence in chosen:
                    for message in held.get(sequence, []):
                        message.ack()  # type: ignore[attr-defined]
                        acked.add(sequence)
            case "t":
                named = {
                    sequence
                    for word in inbox.told()
                    for sequence in range(*map(int, word[1:].split("-")))
                }
                assert named & came <= acked


def test_a_copy_of_what_still_waits_or_is_being_processed_is_dropped() -> None:
    inbox = inbox_with(10)
    take(inbox, 4)  # 0 to 2 are processed, but not settled before somebody looks.
    inbox.settle(current=False)
    assert inbox.told() == ["+0-3"]
    assert inbox.come(range(10), attempt=2) == 7
    assert payloads(inbox) == [b"%06d" % n for n in (4, 5, 6, 7, 8, 9, 0, 1, 2)]
    inbox.settle(current=True)
    inbox.told()
    assert inbox.come([9], attempt=3) == 0


def test_a_run_that_is_old_at_first_and_then_new_is_cut_there() -> None:
    inbox = inbox_with(3)
    take(inbox)
    inbox.settle(current=True)
    assert inbox.told() == ["+0-3"]
    assert inbox.come(range(1, 6), attempt=1) == 0
    assert [batch.sequences for batch in take_batches(inbox)] == [range(1, 3), range(3, 6)]
    inbox = HeardInbox()
    inbox.come([1, 5, 9])
    assert inbox.come([1, 4, 9, 11, 13], attempt=0) == 2
    assert [[*map(int, batch.sequences)] for batch in take_batches(inbox)] == [
        [1, 5, 9],
        [4],
        [11, 13],
    ]


def test_what_waits_never_exceeds_what_may_be_in_flight() -> None:
    inbox = inbox_with(100)
    size = inbox.buffered_bytes
    for attempt in range(2, 9):
        assert inbox.come(range(100), attempt) == 100
    assert inbox.buffered_bytes == size


# Connections -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [SubscribeRequest(), SubscribeRequest(durable="d")], ids=["plain", "durable"]
)
def test_what_waits_and_what_was_said_outlive_the_connection_if_the_bus_does(
    options: SubscribeRequest,
) -> None:
    inbox = HeardInbox(options)
    inbox.come(range(10))
    take(inbox, 4)
    inbox.settle(current=False)
    inbox.desk.withdraw()
    inbox.lost()
    take(inbox, 1)
    inbox.settle(current=False)
    assert inbox.told() == []
    inbox.begin(10, resumed=options.durable is not None, same_run=True)
    assert inbox.told() == ["+0-4"]
    assert inbox.come(range(4, 12), attempt=0) == 6
    assert len(take(inbox)) == 7
    inbox.settle(current=True)
    assert inbox.told() == ["+4-12"]


def test_who_is_at_a_message_of_which_a_copy_was_dropped_speaks_of_whichever_was_sent() -> None:
    inbox = inbox_with(2, auto_ack=False)
    first, second = take(inbox, 2)
    inbox.at_work.add(0)
    assert inbox.come([0], attempt=2) == 1
    first.nack(error="no")
    second.nack()
    parsed = [parse_frame(frame) for frame in split_frames(inbox.desk.take())[0]]
    assert [(content, attempt) for _, _, attempt, _, content in parsed] == [
        (b"0-1\nno", 0),
        (b"1-2", 1),
    ]


@pytest.mark.parametrize(
    ("options", "resumed", "same_run"),
    [
        (SubscribeRequest(), False, False),
        (SubscribeRequest(durable="d"), False, True),
        (SubscribeRequest(durable="d"), True, False),
        (SubscribeRequest(durable="d"), True, True),  # It has lost what it had sent.
    ],
)
def test_what_another_bus_or_another_durable_sends_is_never_taken_for_a_copy(
    options: SubscribeRequest, resumed: bool, same_run: bool
) -> None:
    inbox = HeardInbox(options)
    inbox.come(range(10))
    messages = take(inbox, 4)
    inbox.settle(current=False)
    inbox.desk.withdraw()
    inbox.lost()
    inbox.begin(0, resumed=resumed, same_run=same_run)
    assert inbox.come(range(3)) == 0
    messages[3].ack()
    assert len(take(inbox)) == 9
    inbox.settle(current=True)
    assert inbox.told() == ["+0-3"], "nothing of what was before is said to the other one"


def test_what_waits_for_a_member_of_a_group_is_others_once_the_connection_is_gone() -> None:
    inbox = HeardInbox(SubscribeRequest(group="g"))
    inbox.come(range(10))
    take(inbox, 4)
    inbox.desk.withdraw()
    inbox.lost()
    assert inbox.buffered_bytes == 0
    inbox.begin(10, resumed=True, same_run=True)
    assert take(inbox) == []
    inbox.settle(current=True)
    assert inbox.told() == ["+0-4"]
    inbox.come([2], attempt=2)
    assert len(take(inbox)) == 1


@pytest.mark.parametrize(
    ("options", "same_bus", "expected"),
    [
        (SubscribeRequest(start="earliest"), True, Start(sequence=10)),
        (SubscribeRequest(start="new"), True, Start(sequence=10)),
        (SubscribeRequest(start="new"), False, "new"),
        (SubscribeRequest(), True, "waiting"),
        (SubscribeRequest(start="earliest", durable="d"), True, "earliest"),
    ],
)
def test_a_subscription_goes_on_where_it_was(
    options: SubscribeRequest, same_bus: bool, expected: str | Start
) -> None:
    inbox = HeardInbox(options)
    inbox.come(range(10))
    inbox.lost()
    content = inbox.content_again(same_bus=same_bus)
    assert content == SubscribeRequest(start=expected, durable=options.durable).encode()


# Messages ----------------------------------------------------------------------------------------


def test_messages_and_batches_say_what_they_are() -> None:
    inbox = HeardInbox()
    inbox.come([0, 1], payload=b"7 bytes")
    inbox.come([2], payload=b"x" * 100)
    first, _, third = take(inbox)
    assert repr(first) == "<Message 0 of class 1: b'7 bytes'>"
    assert repr(third) == "<Message 2 of class 1: 100 bytes>"
    assert (first.class_id, first.attempt, first.channel, first.key) == (1, 1, "", b"")
    assert (first.headers, first.published, first.expires_ms) == ((), None, None)
    assert not first.is_request
    inbox.settle(current=True)
    inbox.told()
    inbox.come([0, 1], attempt=3, payload=b"7 bytes")
    batch = inbox.take_batch()
    assert batch is not None
    assert repr(batch) == "<Batch of class 1: 2 messages, 0 to 1, redelivered>"
    assert (batch.class_id, batch.attempt, len(batch)) == (1, 3, 2)
    assert bytes(batch.data).startswith(b"1\0\1")
    assert [(m.attempt, m.redelivered) for m in batch] == [(3, True)] * 2
    assert "redelivered" in repr(next(iter(batch)))


def test_a_value_is_what_the_subscription_makes_of_the_payload() -> None:
    inbox = HeardInbox()
    inbox.come([0, 1])
    first, second = take(inbox)
    assert first.value == b"000000"
    inbox.decode = int
    assert second.value == 1


abouts = st.builds(
    Envelope,
    channel=st.sampled_from(["", "a.b", "x"]),
    key=st.sampled_from([b"", b"key", b"<\r\n>"]),
    headers=st.sampled_from([(), (("reply-to", "a"),)]),
    published=st.sampled_from([None, 7]),
    expires_ms=st.sampled_from([None, 7]),
    not_before_ms=st.none(),
)


@given(
    st.lists(st.tuples(abouts, st.sampled_from([b"", b"load", b"<\r\n>"])), min_size=1, max_size=3),
    st.integers(1, 30),
    st.booleans(),
)
def test_envelopes_are_taken_apart_for_who_asks(
    some: list[tuple[Envelope, bytes]], times: int, in_parts: bool
) -> None:
    pairs = some * times
    inbox = HeardInbox()
    frames = [
        build_frame(ENVELOPE, class_id=1, message_id=n, content=envelope.encode(about, payload))
        for n, (about, payload) in enumerate(pairs)
    ]
    for run in runs_of(b"".join(frames)):
        inbox.accept(run, 1)
    if in_parts:
        found = [p for batch in take_batches(inbox, 7) for p in batch.payloads]
        assert found == [payload for _, payload in pairs]
        return
    messages = take(inbox)
    assert [(m.envelope, m.payload) for m in messages] == pairs
    for message, (about, _) in zip(messages, pairs, strict=True):
        assert (message.channel, message.key) == (about.channel, about.key)
        assert (message.headers, message.published) == (about.headers, about.published)
        assert (message.expires_ms, message.is_request) == (about.expires_ms, bool(about.headers))


def test_an_envelope_that_is_none_is_told_to_who_looks() -> None:
    inbox = HeardInbox()
    (run,) = runs_of(build_frame(ENVELOPE, class_id=1, content=b"\xff"))
    inbox.accept(run, 1)
    with pytest.raises(RemoteProtocolError, match="bad_envelope"):
        take(inbox)


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
        self.inbox.settle(current=True)
        self.settle(current=True)
        batch = self.inbox.take_batch(most)
        assert (batch is None) == (not self.waiting)
        if batch is not None:
            self.hand_out([*batch.sequences])

    @rule(current=st.booleans())
    def settle_now(self, current: bool) -> None:
        self.inbox.settle(current=current)
        self.settle(current=current)

    @precondition(lambda self: self.unsettled)
    @rule()
    def give_up(self) -> None:
        self.inbox.give_up()
        self.settle(current=False)
        self.said += [("-", sequence) for sequence in self.unsettled.pop()]

    @precondition(lambda self: self.unsettled)
    @rule()
    def put_back(self) -> None:
        self.inbox.put_back()
        self.settle(current=False)
        self.waiting[:0] = self.unsettled.pop()

    @rule()
    def the_connection_is_lost_and_comes_again(self) -> None:
        self.listen()
        self.inbox.desk.withdraw()
        self.inbox.lost()
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
        self.inbox.check()
        assert self.inbox.is_empty == (not self.waiting)
        self.inbox.settle(current=False)
        self.listen()
        assert self.heard == self.said


InboxMachine.TestCase.settings = settings(stateful_step_count=30)
TestInbox = InboxMachine.TestCase
