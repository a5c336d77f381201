"""Tests of an inbox: settling, duplicates, ended subscriptions."""

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
from tests.client.core.consumers import consume, consume_batches, payloads
from tests.client.core.inboxes import ENVELOPE, RecordingInbox, create_inbox, split_runs
from tests.support.oracles import build_frame

# Settling ----------------------------------------------------------------------------------------


def test_acks_a_message_when_the_next_is_requested() -> None:
    inbox = create_inbox(3)
    consume(inbox, 2)
    inbox.settle(include_last=False)
    assert inbox.encoded_outcomes() == ["+0-1"]
    consume(inbox, 1)
    inbox.settle(include_last=False)
    assert inbox.encoded_outcomes() == ["+1-2"]
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+2-3"]


def test_does_not_ack_prepared_messages() -> None:
    inbox = create_inbox(100)
    consume(inbox, 5)
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+0-5"]


def test_batches_and_messages_can_alternate() -> None:
    inbox = create_inbox(10, 5, 5)
    assert payloads(inbox, 4) == [b"%06d" % number for number in range(4)]
    batches = consume_batches(inbox)
    assert [batch.sequences for batch in batches] == [range(4, 10), range(10, 15), range(15, 20)]
    assert batches[0].payloads == [b"%06d" % number for number in range(4, 10)]
    assert inbox.encoded_outcomes() == ["+0-20"]
    assert inbox.is_empty


def test_batch_length_is_limited() -> None:
    inbox = create_inbox(10)
    assert [len(batch) for batch in consume_batches(inbox, 4)] == [4, 4, 2]
    assert inbox.encoded_outcomes() == ["+0-10"]


def test_nacks_a_failed_message_and_acks_its_neighbours() -> None:
    inbox = create_inbox(5)
    consume(inbox, 3)
    inbox.nack_last()
    consume(inbox)
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+0-2", "-2-3", "+3-5"]


def test_message_put_back_is_handed_out_next() -> None:
    inbox = create_inbox(5)
    consume(inbox, 3)
    inbox.put_back_last()
    assert inbox.encoded_outcomes() == ["+0-2"]
    assert payloads(inbox, 2) == [b"000002", b"000003"]
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+2-4"]


def test_batch_put_back_is_handed_out_next() -> None:
    inbox = create_inbox(5)
    consume(inbox, 2)
    inbox.settle(include_last=True)
    assert inbox.pop_batch() is not None
    inbox.put_back_last()
    assert payloads(inbox, 1) == [b"000002"]


def request_message(inbox: Inbox, loop: object | None = None) -> bytes:
    """Return the payload of the next message, requested by a loop or by `get`."""
    inbox.settle_previous(loop)
    inbox.prepare_messages(64)
    inbox.check_invariants()
    return next(inbox.prepared_messages).payload


def test_message_of_a_suspended_loop_is_settled_when_that_loop_continues() -> None:
    inbox, loop = create_inbox(5), object()
    assert request_message(inbox, loop) == b"000000"
    assert request_message(inbox) == b"000001"
    assert inbox.encoded_outcomes() == []
    assert request_message(inbox, loop) == b"000002"
    assert inbox.encoded_outcomes() == ["+1-2", "+0-1"]
    inbox.settle_before_leave(is_processed=True)
    assert inbox.encoded_outcomes() == ["+2-3"]


@pytest.mark.parametrize(
    ("is_cancelled", "when_active", "when_suspended", "next_call"),
    [(False, ["+0-1"], "+0-1", b"000001"), (True, [], "-0-1 0", b"000000")],
)
def test_message_of_an_ended_loop_is_settled_when_the_next_is_requested(
    *, is_cancelled: bool, when_active: list[str], when_suspended: str, next_call: bytes
) -> None:
    inbox, loop = create_inbox(5), object()
    assert request_message(inbox, loop) == b"000000"
    inbox.end_loop(loop, is_cancelled=is_cancelled)
    inbox.settle(include_last=False)
    assert inbox.encoded_outcomes() == []
    assert request_message(inbox) == next_call
    assert inbox.encoded_outcomes() == when_active

    inbox = create_inbox(5)
    assert [request_message(inbox, loop), request_message(inbox)] == [b"000000", b"000001"]
    inbox.end_loop(loop, is_cancelled=is_cancelled)
    assert request_message(inbox) == b"000002"
    assert sorted(inbox.encoded_outcomes()) == sorted(["+1-2", when_suspended])


@pytest.mark.parametrize(
    ("is_processed", "expected"), [(True, ["+1-2", "+0-1"]), (False, ["-1-2", "-0-1"])]
)
def test_leaving_settles_the_messages_of_all_loops(
    *, is_processed: bool, expected: list[str]
) -> None:
    inbox, outer, inner = create_inbox(5), object(), object()
    assert [request_message(inbox, outer), request_message(inbox, inner)] == [b"000000", b"000001"]
    inbox.end_loop(inner)
    inbox.end_loop(outer)
    inbox.settle_before_leave(is_processed=is_processed)
    assert inbox.encoded_outcomes() == expected


def test_putting_back_unprocessed_messages_covers_all_loops() -> None:
    inbox, outer = create_inbox(5), object()
    assert [request_message(inbox, outer), request_message(inbox)] == [b"000000", b"000001"]
    inbox.put_back_unprocessed()
    assert inbox.encoded_outcomes() == ["-0-1 0"]
    assert payloads(inbox, 1) == [b"000001"]


def test_drops_redelivery_of_a_message_in_a_handler() -> None:
    inbox = create_inbox(3, auto_ack=False)
    first, second = consume(inbox, 2)
    inbox.in_handler_sequences.add(first.sequence)
    assert inbox.deliver([0, 1, 2], attempt=2) == 2
    assert inbox.deliver([1], attempt=3) == 1
    inbox.in_handler_sequences.clear()
    assert inbox.deliver([0], attempt=3) == 0
    second.ack()
    assert payloads(inbox, 1) == [b"000002"]
    assert not inbox.is_empty
    assert payloads(inbox) == [b"000000"]


@pytest.mark.parametrize("auto_ack", [True, False])
def test_drops_redelivery_of_a_message_whose_ack_is_not_sent(*, auto_ack: bool) -> None:
    inbox = create_inbox(4, auto_ack=auto_ack)
    for message in consume(inbox, 3):
        message.ack()
    inbox.settle(include_last=True)
    assert inbox.deliver([0, 1, 2], attempt=2) == 3
    assert inbox.encoded_outcomes() == ["+0-3"]
    assert inbox.deliver([0, 1, 2], attempt=2) == 0


@pytest.mark.parametrize("verdict", ["ack", "nack", "working"])
def test_drops_queued_redelivery_after_manual_outcome(verdict: str) -> None:
    inbox = create_inbox(4, auto_ack=False)
    messages = consume(inbox)
    assert inbox.deliver([0, 1, 2, 3], attempt=2) == 0
    inbox.deliver([4])
    getattr(messages[1], verdict)()
    messages[0].ack()
    expected = [1, 2, 3, 4] if verdict == "working" else [2, 3, 4]
    assert not inbox.is_empty
    assert [message.sequence for message in consume(inbox)] == expected

    inbox.deliver([2, 3], attempt=3)
    for message in messages:
        message.ack()
    assert inbox.is_empty
    assert inbox.buffered_bytes == 0


def test_prepared_values_and_messages_are_separate() -> None:
    inbox = create_inbox(5)
    inbox.prepare_messages(64, as_values=True)
    assert next(inbox.prepared_payloads) == b"000000"
    assert next(inbox.prepared_messages, None) is None
    inbox.settle(include_last=True)
    inbox.prepare_messages(64)
    message = next(inbox.prepared_messages)
    assert (message.payload, message.sequence) == (b"000001", 1)


def test_without_auto_ack_only_manual_outcomes_are_sent() -> None:
    inbox = create_inbox(5, auto_ack=False)
    messages = consume(inbox)
    inbox.nack_last()
    assert inbox.encoded_outcomes() == []
    messages[3].ack(inbox)
    messages[1].ack()
    messages[2].nack()
    messages[4].nack(1.5)
    messages[0].working()
    with pytest.raises(LocalProtocolError, match="came from another subscription"):
        messages[0].ack(RecordingInbox())
    assert inbox.encoded_outcomes() == ["+3-4", "+1-2", "-2-3", "-4-5 1500", "~0-1"]


def test_batch_can_be_acked_manually() -> None:
    inbox = create_inbox(9, auto_ack=False)
    batches = consume_batches(inbox, 3)
    batches[0].ack(inbox)
    batches[1].nack(0)
    batches[2].working()
    batches[2].ack()
    assert inbox.encoded_outcomes() == ["+0-3", "-3-6 0", "~6-9", "+6-9"]


def test_manual_outcome_is_not_overwritten_by_settling() -> None:
    inbox = create_inbox(4)
    messages = consume(inbox, 2)
    messages[1].nack()
    consume(inbox, 2)[-1].nack(3)
    inbox.nack_last()
    assert inbox.encoded_outcomes() == ["-1-2", "-3-4 3000", "+0-1", "+2-3"]


def test_old_iterator_yields_nothing() -> None:
    inbox = create_inbox(5)
    consume(inbox, 1)
    old_messages, old_payloads = inbox.prepared_messages, inbox.prepared_payloads
    inbox.settle(include_last=True)
    inbox.pop_batch()
    assert (list(old_messages), list(old_payloads)) == ([], [])


def test_payloads_can_be_read_instead_of_messages() -> None:
    inbox = create_inbox(5)
    inbox.prepare_messages(3)
    assert next(inbox.prepared_payloads) == b"000000"
    assert next(inbox.prepared_payloads) == b"000001"
    assert inbox.get_last_message().sequence == 1
    inbox.settle(include_last=False)
    assert inbox.encoded_outcomes() == ["+0-1"]
    assert list(inbox.prepared_payloads) == [b"000002"]
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+1-3"]


def test_asserts_that_last_message_is_settled_before_the_next() -> None:
    inbox = create_inbox(1, 1)
    consume(inbox, 1)
    with pytest.raises(AssertionError, match="while the last hand-out is unsettled"):
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
def test_leaving_returns_unread_messages_of_a_kept_position(
    options: SubscribeRequest, expected: list[str]
) -> None:
    inbox = RecordingInbox(options)
    inbox.deliver(range(3))
    inbox.deliver(range(3, 5))
    consume(inbox, 1)
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == ["+0-1"]
    inbox.leave(OpenRequest(2, ord("U"), content=b""))
    assert inbox.encoded_outcomes() == expected
    assert inbox.buffered_bytes == 0
    with pytest.raises(LocalProtocolError, match="was closed; subscribe again"):
        assert inbox.is_empty


def test_ended_inbox_raises_after_last_message() -> None:
    inbox = create_inbox(2)
    inbox.mark_ended(RefusedError("slow_consumer", "too slow"))
    assert len(consume(inbox)) == 2
    with pytest.raises(RefusedError, match="slow_consumer: too slow"):
        assert inbox.is_empty
    inbox.settle(include_last=True)
    assert inbox.encoded_outcomes() == []


# Messages ----------------------------------------------------------------------------------------


def test_repr_of_messages_and_batches() -> None:
    inbox = RecordingInbox()
    inbox.deliver([0, 1], payload=b"7 bytes")
    inbox.deliver([2], payload=b"x" * 100)
    first, _, last_message = consume(inbox)
    assert repr(first) == "<Message 0 of class 1: b'7 bytes'>"
    assert repr(last_message) == "<Message 2 of class 1: 100 bytes>"
    assert (first.class_id, first.attempt, first.channel, first.key) == (1, 1, "", b"")
    assert (first.headers, first.published, first.expires_ms) == ((), None, None)
    assert not first.is_request
    inbox.settle(include_last=True)
    inbox.encoded_outcomes()
    inbox.deliver([0, 1], attempt=3, payload=b"7 bytes")
    batch = inbox.pop_batch()
    assert batch is not None
    assert repr(batch) == "<Batch of class 1: 2 messages, 0 to 1, redelivered>"
    assert (batch.class_id, batch.attempt, len(batch)) == (1, 3, 2)
    assert bytes(batch.data).startswith(b"1\0\1")
    assert [(m.attempt, m.redelivered) for m in batch] == [(3, True)] * 2
    assert "redelivered" in repr(next(iter(batch)))


def test_value_is_the_decoded_payload() -> None:
    inbox = RecordingInbox()
    inbox.deliver([0, 1])
    first, second = consume(inbox)
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
def test_envelope_fields_of_a_message(
    contents: list[tuple[Envelope, bytes]], times: int, in_parts: bool
) -> None:
    pairs = contents * times
    inbox = RecordingInbox()
    frames = [
        build_frame(
            ENVELOPE, class_id=1, message_id=n, content=envelope_batch.encode(envelope, payload)
        )
        for n, (envelope, payload) in enumerate(pairs)
    ]
    for run in split_runs(b"".join(frames)):
        inbox.accept_run(run, 1)
    if in_parts:
        found = [p for batch in consume_batches(inbox, 7) for p in batch.payloads]
        assert found == [payload for _, payload in pairs]
        return
    messages = consume(inbox)
    assert [(m.envelope, m.payload) for m in messages] == pairs
    for message, (envelope, _) in zip(messages, pairs, strict=True):
        assert (message.channel, message.key) == (envelope.channel, envelope.key)
        assert (message.headers, message.published) == (envelope.headers, envelope.published)
        assert (message.expires_ms, message.is_request) == (
            envelope.expires_ms,
            bool(envelope.headers),
        )


def test_reading_an_invalid_envelope_raises() -> None:
    inbox = RecordingInbox()
    (run,) = split_runs(build_frame(ENVELOPE, class_id=1, content=b"\xff"))
    inbox.accept_run(run, 1)
    with pytest.raises(RemoteProtocolError, match="bad_envelope"):
        consume(inbox)
