"""Tests of an inbox: received runs, duplicates, reconnects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.protocol.requests import Start, SubscribeRequest
from tests.client.core.consumers import consume, consume_batches, payloads
from tests.client.core.inboxes import RecordingInbox, create_inbox
from tests.support.oracles import ID_COUNT, parse_frame, split_frames

# Received messages -------------------------------------------------------------------------------


def test_sequences_continue_beyond_the_wrap() -> None:
    inbox = RecordingInbox(cursor=5 * ID_COUNT - 2)
    inbox.deliver(range(5 * ID_COUNT - 2, 5 * ID_COUNT + 2))
    inbox.deliver(range(5 * ID_COUNT - 9, 5 * ID_COUNT - 7), attempt=0)
    messages = consume(inbox)
    assert [m.sequence - 5 * ID_COUNT for m in messages] == [-2, -1, 0, 1, -9, -8]
    assert [m.message_id for m in messages][:3] == [ID_COUNT - 2, ID_COUNT - 1, 0]
    assert [m.redelivered for m in messages] == [False] * 4 + [True] * 2
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == [
        "+2147483646-2147483648",
        "+0-2",
        "+2147483639-2147483641",
    ]


def test_acks_of_a_filtered_subscription_span_gaps() -> None:
    inbox = RecordingInbox(SubscribeRequest(channels=["a.#"]))
    inbox.deliver([3, 7, 12])
    inbox.deliver([15])
    consume(inbox)
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+3-16"]


def test_acks_of_a_group_do_not_span_gaps() -> None:
    inbox = RecordingInbox(SubscribeRequest(channels=["a.#"], group="g"))
    inbox.deliver([3, 7, 8])
    consume(inbox)
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+3-4", "+7-9"]


def test_acks_do_not_span_redelivered_messages() -> None:
    inbox = RecordingInbox(SubscribeRequest(channels=["a.#"]), auto_ack=False)
    inbox.deliver([3, 7, 12])
    messages = consume(inbox)
    inbox.settle(include_last=True)
    inbox.deliver([5], attempt=2)
    inbox.deliver([20, 30])
    inbox.deliver([25], attempt=1)  # Received late, after the messages that follow it.
    inbox.deliver([40, 44])
    messages += consume(inbox)
    for message in messages:
        if message.sequence not in (5, 25):
            message.ack()
    assert inbox.encoded_outcomes() == ["+3-4", "+7-8", "+12-13", "+20-21", "+30-31", "+40-45"]


@given(st.data())
def test_no_ack_contains_a_received_message_that_was_not_acked(data: st.DataObject) -> None:
    inbox = RecordingInbox(SubscribeRequest(channels=["a.#"]), auto_ack=False)
    received: set[int] = set()
    acked: set[int] = set()
    held_messages: dict[int, list[object]] = {}
    head = 0
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from("nnlaat")):
            case "n":
                steps = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
                sequences = [head + sum(steps[: n + 1]) for n in range(len(steps))]
                head = sequences[-1]
                inbox.deliver(sequences)
                received |= set(sequences)
            case "l" if head:
                sequences = sorted(data.draw(st.sets(st.integers(0, head), min_size=1, max_size=3)))
                inbox.deliver(sequences, attempt=data.draw(st.sampled_from([0, 1, 2])))
                received |= set(sequences)
            case "a":
                for message in consume(inbox):
                    held_messages.setdefault(message.sequence, []).append(message)
                chosen = data.draw(
                    st.lists(st.sampled_from(sorted(held_messages) or [-1]), max_size=6)
                )
                for sequence in chosen:
                    for message in held_messages.get(sequence, []):
                        message.ack()  # type: ignore[attr-defined]
                        acked.add(sequence)
            case "t":
                acked_in_outcomes = {
                    sequence
                    for outcome in inbox.encoded_outcomes()
                    for sequence in range(*map(int, outcome[1:].split("-")))
                }
                assert acked_in_outcomes & received <= acked


def test_drops_redelivery_of_a_waiting_or_unsettled_message() -> None:
    inbox = create_inbox(10)
    consume(inbox, 4)  # 0 to 2 are processed, but not settled yet.
    inbox.settle(include_last=False)
    assert inbox.encoded_outcomes() == ["+0-3"]
    assert inbox.deliver(range(10), attempt=2) == 7
    assert payloads(inbox) == [b"%06d" % n for n in (4, 5, 6, 7, 8, 9, 0, 1, 2)]
    inbox.settle(include_last=True)
    inbox.encoded_outcomes()
    assert inbox.deliver([9], attempt=3) == 0


def test_run_with_old_and_new_messages_is_split() -> None:
    inbox = create_inbox(3)
    consume(inbox)
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+0-3"]
    assert inbox.deliver(range(1, 6), attempt=1) == 0
    assert [batch.sequences for batch in consume_batches(inbox)] == [range(1, 3), range(3, 6)]
    inbox = RecordingInbox()
    inbox.deliver([1, 5, 9])
    assert inbox.deliver([1, 4, 9, 11, 13], attempt=0) == 2
    assert [[*map(int, batch.sequences)] for batch in consume_batches(inbox)] == [
        [1, 5, 9],
        [4],
        [11, 13],
    ]


def test_inbox_never_exceeds_messages_in_flight() -> None:
    inbox = create_inbox(100)
    size = inbox.buffered_bytes
    for attempt in range(2, 9):
        assert inbox.deliver(range(100), attempt) == 100
    assert inbox.buffered_bytes == size


# Connections -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [SubscribeRequest(), SubscribeRequest(durable="d")], ids=["plain", "durable"]
)
def test_messages_and_acks_survive_reconnect_to_same_run(
    options: SubscribeRequest,
) -> None:
    inbox = RecordingInbox(options)
    inbox.deliver(range(10))
    consume(inbox, 4)
    inbox.settle(include_last=False)
    inbox.ack_sink.clear()
    inbox.connection_lost()
    consume(inbox, 1)
    inbox.settle(include_last=False)
    assert inbox.encoded_outcomes() == []
    inbox.confirm_subscription(10, resumed=options.durable is not None, is_same_run=True)
    assert inbox.encoded_outcomes() == ["+0-4"]
    assert inbox.deliver(range(4, 12), attempt=0) == 6
    assert len(consume(inbox)) == 7
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+4-12"]


def test_outcome_of_a_dropped_redelivery_names_attempt_zero() -> None:
    inbox = create_inbox(2, auto_ack=False)
    first, second = consume(inbox, 2)
    inbox.in_handler_sequences.add(0)
    assert inbox.deliver([0], attempt=2) == 1
    first.nack(error="no")
    second.nack()
    parsed = [parse_frame(frame) for frame in split_frames(inbox.ack_sink.encode_pending())[0]]
    assert [(content, attempt) for _, _, attempt, _, content in parsed] == [
        (b"0-1\nno", 0),
        (b"1-2", 1),
    ]


@pytest.mark.parametrize(
    ("options", "resumed", "is_same_run"),
    [
        (SubscribeRequest(), False, False),
        (SubscribeRequest(durable="d"), False, True),
        (SubscribeRequest(durable="d"), True, False),
        (
            SubscribeRequest(durable="d"),
            True,
            True,
        ),  # The server has lost messages that it had sent.
    ],
)
def test_messages_of_another_server_or_durable_are_never_duplicates(
    options: SubscribeRequest, resumed: bool, is_same_run: bool
) -> None:
    inbox = RecordingInbox(options)
    inbox.deliver(range(10))
    messages = consume(inbox, 4)
    inbox.settle(include_last=False)
    inbox.ack_sink.clear()
    inbox.connection_lost()
    inbox.confirm_subscription(0, resumed=resumed, is_same_run=is_same_run)
    assert inbox.deliver(range(3)) == 0
    messages[3].ack()
    assert len(consume(inbox)) == 9
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+0-3"], (
        "outcomes of the previous connection are not sent to another server"
    )


def test_lost_connection_drops_waiting_messages_of_a_group_member() -> None:
    inbox = RecordingInbox(SubscribeRequest(group="g"))
    inbox.deliver(range(10))
    consume(inbox, 4)
    inbox.ack_sink.clear()
    inbox.connection_lost()
    assert inbox.buffered_bytes == 0
    inbox.confirm_subscription(10, resumed=True, is_same_run=True)
    assert consume(inbox) == []
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+0-4"]
    inbox.deliver([2], attempt=2)
    assert len(consume(inbox)) == 1


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
def test_resubscribe_continues_at_next_sequence(
    options: SubscribeRequest, same_bus: bool, expected: str | Start
) -> None:
    inbox = RecordingInbox(options)
    inbox.deliver(range(10))
    inbox.connection_lost()
    content = inbox.encode_resubscribe(is_same_bus=same_bus)
    assert content == SubscribeRequest(start=expected, durable=options.durable).encode()
