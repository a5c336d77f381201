"""One subscription: what is settled when, what is dropped, what outlives a connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.inbox import Inbox
from simplebus.client.core.open_requests import OpenRequest
from simplebus.core.errors import LocalProtocolError, RefusedError, RemoteProtocolError
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.requests import SubscribeRequest
from tests.client.core.consumers import payloads, take, take_batches
from tests.client.core.inboxes import (
    ENVELOPE,
    HeardInbox,
    inbox_with,
    runs_of,
)
from tests.support.oracles import build_frame

# Settling ----------------------------------------------------------------------------------------


def test_a_message_is_acknowledged_when_the_next_is_asked_for() -> None:
    inbox = inbox_with(3)
    take(inbox, 2)
    inbox.settle(include_last=False)
    assert inbox.told() == ["+0-1"]
    take(inbox, 1)
    inbox.settle(include_last=False)
    assert inbox.told() == ["+1-2"]
    inbox.settle(include_last=True)
    assert inbox.told() == ["+2-3"]


def test_what_was_only_prepared_is_not_acknowledged() -> None:
    inbox = inbox_with(100)
    take(inbox, 5)
    inbox.settle(include_last=True)
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
    inbox.nack_last()
    take(inbox)
    inbox.settle(include_last=True)
    assert inbox.told() == ["+0-2", "-2-3", "+3-5"]


def test_a_message_that_is_put_back_is_the_next_one() -> None:
    inbox = inbox_with(5)
    take(inbox, 3)
    inbox.put_back_last()
    assert inbox.told() == ["+0-2"]
    assert payloads(inbox, 2) == [b"000002", b"000003"]
    inbox.settle(include_last=True)
    assert inbox.told() == ["+2-4"]


def test_a_batch_that_is_put_back_is_the_next_one() -> None:
    inbox = inbox_with(5)
    take(inbox, 2)
    inbox.settle(include_last=True)
    assert inbox.pop_batch() is not None
    inbox.put_back_last()
    assert payloads(inbox, 1) == [b"000002"]


def ask(inbox: Inbox, loop: object | None = None) -> bytes:
    """The next message's payload, for a loop or for who asks one by one."""
    inbox.settle_previous(loop)
    inbox.prepare_messages(64)
    inbox.check_invariants()
    return next(inbox.prepared_messages).payload


def test_what_a_loop_is_at_is_set_aside_until_it_comes_round() -> None:
    inbox, loop = inbox_with(5), object()
    assert ask(inbox, loop) == b"000000"
    assert ask(inbox) == b"000001"
    assert inbox.told() == []
    assert ask(inbox, loop) == b"000002"
    assert inbox.told() == ["+1-2", "+0-1"]
    inbox.settle_before_leave(is_processed=True)
    assert inbox.told() == ["+2-3"]


@pytest.mark.parametrize(
    ("is_cancelled", "when_active", "when_suspended", "following"),
    [(False, ["+0-1"], "+0-1", b"000001"), (True, [], "-0-1 0", b"000000")],
)
def test_message_of_an_ended_loop_is_settled_when_the_next_is_asked_for(
    *, is_cancelled: bool, when_active: list[str], when_suspended: str, following: bytes
) -> None:
    inbox, loop = inbox_with(5), object()
    assert ask(inbox, loop) == b"000000"
    inbox.end_loop(loop, is_cancelled=is_cancelled)
    inbox.settle(include_last=False)
    assert inbox.told() == []
    assert ask(inbox) == following
    assert inbox.told() == when_active

    inbox = inbox_with(5)
    assert [ask(inbox, loop), ask(inbox)] == [b"000000", b"000001"]
    inbox.end_loop(loop, is_cancelled=is_cancelled)
    assert ask(inbox) == b"000002"
    assert sorted(inbox.told()) == sorted(["+1-2", when_suspended])


@pytest.mark.parametrize(
    ("is_processed", "expected"), [(True, ["+1-2", "+0-1"]), (False, ["-1-2", "-0-1"])]
)
def test_leaving_settles_the_messages_of_all_loops(
    *, is_processed: bool, expected: list[str]
) -> None:
    inbox, outer, inner = inbox_with(5), object(), object()
    assert [ask(inbox, outer), ask(inbox, inner)] == [b"000000", b"000001"]
    inbox.end_loop(inner)
    inbox.end_loop(outer)
    inbox.settle_before_leave(is_processed=is_processed)
    assert inbox.told() == expected


def test_putting_back_unprocessed_messages_covers_all_loops() -> None:
    inbox, outer = inbox_with(5), object()
    assert [ask(inbox, outer), ask(inbox)] == [b"000000", b"000001"]
    inbox.put_back_unprocessed()
    assert inbox.told() == ["-0-1 0"]
    assert payloads(inbox, 1) == [b"000001"]


def test_what_a_handler_is_at_is_dropped_when_it_comes_again() -> None:
    inbox = inbox_with(3, auto_ack=False)
    first, second = take(inbox, 2)
    inbox.in_handler_sequences.add(first.sequence)
    assert inbox.come([0, 1, 2], attempt=2) == 2
    assert inbox.come([1], attempt=3) == 1
    inbox.in_handler_sequences.clear()
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
    inbox.settle(include_last=True)
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
    inbox.prepare_messages(64, as_values=True)
    assert next(inbox.prepared_payloads) == b"000000"
    assert next(inbox.prepared_messages, None) is None
    inbox.settle(include_last=True)
    inbox.prepare_messages(64)
    message = next(inbox.prepared_messages)
    assert (message.payload, message.sequence) == (b"000001", 1)


def test_without_auto_ack_nothing_is_said_but_by_hand() -> None:
    inbox = inbox_with(5, auto_ack=False)
    messages = take(inbox)
    inbox.nack_last()
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
    inbox.nack_last()
    assert inbox.told() == ["-1-2", "-3-4 3000", "+0-1", "+2-3"]


def test_an_iterator_that_is_kept_past_its_time_gives_nothing() -> None:
    inbox = inbox_with(5)
    take(inbox, 1)
    kept, raw = inbox.prepared_messages, inbox.prepared_payloads
    inbox.settle(include_last=True)
    inbox.pop_batch()
    assert (list(kept), list(raw)) == ([], [])


def test_payloads_may_be_taken_in_the_place_of_messages() -> None:
    inbox = inbox_with(5)
    inbox.prepare_messages(3)
    assert next(inbox.prepared_payloads) == b"000000"
    assert next(inbox.prepared_payloads) == b"000001"
    assert inbox.get_last_message().sequence == 1
    inbox.settle(include_last=False)
    assert inbox.told() == ["+0-1"]
    assert list(inbox.prepared_payloads) == [b"000002"]
    inbox.settle(include_last=True)
    assert inbox.told() == ["+1-3"]


def test_asking_for_more_before_the_last_is_settled_is_our_bug() -> None:
    inbox = inbox_with(1, 1)
    take(inbox, 1)
    with pytest.raises(AssertionError, match="before what was handed out is settled"):
        inbox.pop_batch()


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
    inbox.settle(include_last=True)
    assert inbox.told() == ["+0-1"]
    inbox.leave(OpenRequest(2, ord("U"), content=b""))
    assert inbox.told() == expected
    assert inbox.buffered_bytes == 0
    with pytest.raises(LocalProtocolError, match="was left; subscribe again"):
        assert inbox.is_empty


def test_a_subscription_that_the_bus_has_ended_says_why_once_all_is_taken() -> None:
    inbox = inbox_with(2)
    inbox.mark_ended(RefusedError("slow_consumer", "too slow"))
    assert len(take(inbox)) == 2
    with pytest.raises(RefusedError, match="slow_consumer: too slow"):
        assert inbox.is_empty
    inbox.settle(include_last=True)
    assert inbox.told() == []


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
    inbox.settle(include_last=True)
    inbox.told()
    inbox.come([0, 1], attempt=3, payload=b"7 bytes")
    batch = inbox.pop_batch()
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
        build_frame(
            ENVELOPE, class_id=1, message_id=n, content=envelope_batch.encode(about, payload)
        )
        for n, (about, payload) in enumerate(pairs)
    ]
    for run in runs_of(b"".join(frames)):
        inbox.accept_run(run, 1)
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
    inbox.accept_run(run, 1)
    with pytest.raises(RemoteProtocolError, match="bad_envelope"):
        take(inbox)
