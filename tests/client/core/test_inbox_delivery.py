"""One subscription and what comes: what is dropped, and what outlives a connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.protocol.requests import Start, SubscribeRequest
from tests.client.core.consumers import payloads, take, take_batches
from tests.client.core.inboxes import HeardInbox, inbox_with
from tests.support.oracles import ID_COUNT, parse_frame, split_frames

# What comes --------------------------------------------------------------------------------------


def test_messages_know_their_sequence_beyond_the_wrap_of_the_ids() -> None:
    inbox = HeardInbox(cursor=5 * ID_COUNT - 2)
    inbox.come(range(5 * ID_COUNT - 2, 5 * ID_COUNT + 2))
    inbox.come(range(5 * ID_COUNT - 9, 5 * ID_COUNT - 7), attempt=0)
    messages = take(inbox)
    assert [m.sequence - 5 * ID_COUNT for m in messages] == [-2, -1, 0, 1, -9, -8]
    assert [m.message_id for m in messages][:3] == [ID_COUNT - 2, ID_COUNT - 1, 0]
    assert [m.redelivered for m in messages] == [False] * 4 + [True] * 2
    inbox.settle(include_last=True)
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
    inbox.settle(include_last=True)
    assert inbox.told() == ["+3-16"]


def test_acks_of_a_group_do_not_span_what_others_got() -> None:
    inbox = HeardInbox(SubscribeRequest(channels=["a.#"], group="g"))
    inbox.come([3, 7, 8])
    take(inbox)
    inbox.settle(include_last=True)
    assert inbox.told() == ["+3-4", "+7-9"]


def test_acks_do_not_span_what_came_again() -> None:
    inbox = HeardInbox(SubscribeRequest(channels=["a.#"]), auto_ack=False)
    inbox.come([3, 7, 12])
    messages = take(inbox)
    inbox.settle(include_last=True)
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
    inbox.settle(include_last=False)
    assert inbox.told() == ["+0-3"]
    assert inbox.come(range(10), attempt=2) == 7
    assert payloads(inbox) == [b"%06d" % n for n in (4, 5, 6, 7, 8, 9, 0, 1, 2)]
    inbox.settle(include_last=True)
    inbox.told()
    assert inbox.come([9], attempt=3) == 0


def test_a_run_that_is_old_at_first_and_then_new_is_cut_there() -> None:
    inbox = inbox_with(3)
    take(inbox)
    inbox.settle(include_last=True)
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
    inbox.settle(include_last=False)
    inbox.desk.clear()
    inbox.connection_lost()
    take(inbox, 1)
    inbox.settle(include_last=False)
    assert inbox.told() == []
    inbox.begin(10, resumed=options.durable is not None, same_run=True)
    assert inbox.told() == ["+0-4"]
    assert inbox.come(range(4, 12), attempt=0) == 6
    assert len(take(inbox)) == 7
    inbox.settle(include_last=True)
    assert inbox.told() == ["+4-12"]


def test_who_is_at_a_message_of_which_a_copy_was_dropped_speaks_of_whichever_was_sent() -> None:
    inbox = inbox_with(2, auto_ack=False)
    first, second = take(inbox, 2)
    inbox.in_handler_sequences.add(0)
    assert inbox.come([0], attempt=2) == 1
    first.nack(error="no")
    second.nack()
    parsed = [parse_frame(frame) for frame in split_frames(inbox.desk.encode_pending())[0]]
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
    inbox.settle(include_last=False)
    inbox.desk.clear()
    inbox.connection_lost()
    inbox.begin(0, resumed=resumed, same_run=same_run)
    assert inbox.come(range(3)) == 0
    messages[3].ack()
    assert len(take(inbox)) == 9
    inbox.settle(include_last=True)
    assert inbox.told() == ["+0-3"], "nothing of what was before is said to the other one"


def test_what_waits_for_a_member_of_a_group_is_others_once_the_connection_is_gone() -> None:
    inbox = HeardInbox(SubscribeRequest(group="g"))
    inbox.come(range(10))
    take(inbox, 4)
    inbox.desk.clear()
    inbox.connection_lost()
    assert inbox.buffered_bytes == 0
    inbox.begin(10, resumed=True, same_run=True)
    assert take(inbox) == []
    inbox.settle(include_last=True)
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
    inbox.connection_lost()
    content = inbox.encode_resubscribe(is_same_bus=same_bus)
    assert content == SubscribeRequest(start=expected, durable=options.durable).encode()
