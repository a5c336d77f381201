"""Tests of the ack buffer: ranges, order, manual outcomes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.acks import (
    ACKED,
    NACKED,
    NACKED_WITHOUT_DELAY,
    WORKING,
    AckBuffer,
    AckOutcome,
    AckSink,
    AckToken,
    nack_outcome,
    terminate_outcome,
)
from simplebus.client.core.frame_runs import MessageIds
from simplebus.core.errors import LocalProtocolError
from tests.support.oracles import ID_COUNT, group_ids, parse_frame, split_frames

VECTORS = Path(__file__).parents[3] / "protocol" / "vectors" / "acks.json"
GROUPING = json.loads(VECTORS.read_text())["grouping"]


class Subscriber:
    decode = None


def create_buffer(
    *, is_auto_ack: bool = True, can_span_gaps: bool = True, batch_messages: int = 1
) -> AckBuffer:
    ack_buffer = AckBuffer(
        AckSink(),
        7,
        is_auto_ack=is_auto_ack,
        can_span_gaps=can_span_gaps,
        batch_messages=batch_messages,
    )
    ack_buffer.attach()
    return ack_buffer


def create_token(
    ack_buffer: AckBuffer | None, sequences: MessageIds | list[int], *, arrival_index: int = 0
) -> AckToken:
    if isinstance(sequences, list):
        sequences = np.array(sequences, np.int64)
    return AckToken(
        Subscriber(),
        ack_buffer,
        class_id=1,
        sequences=sequences,
        attempt=1,
        arrival_index=arrival_index,
    )


def encoded_outcomes(ack_buffer: AckBuffer) -> list[tuple[str, str]]:
    """Return (type, content) of the encoded frames."""
    found, incomplete = split_frames(ack_buffer.ack_sink.encode_pending())
    assert incomplete == b""
    parsed = [parse_frame(frame) for frame in found]
    for kind, subject, attempt, detail, _ in parsed:
        assert (subject, attempt, detail) == (7, 0 if chr(kind) == "3" else 1, 0)
    return [(chr(kind), content.decode()) for kind, *_, content in parsed]


def encoded_acks(ack_buffer: AckBuffer) -> list[str]:
    found = encoded_outcomes(ack_buffer)
    assert {kind for kind, _ in found} <= {"3"}
    return [content for _, content in found]


@pytest.mark.parametrize("case", GROUPING, ids=lambda case: case["name"])
def test_groups_ids_into_ranges_as_in_vectors(case: dict[str, list[list[int]]]) -> None:
    ack_buffer = create_buffer()
    for number in case["ids"]:
        create_token(ack_buffer, range(number, number + 1)).settle(ACKED, 0, 1)
    assert encoded_acks(ack_buffer) == [f"{first}-{last}" for first, last in case["ranges"]]


@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(ID_COUNT - 20, ID_COUNT + 20)), max_size=200)
)
def test_ranges_contain_exactly_the_acked_ids_and_never_cross_the_wrap(
    sequences: list[int],
) -> None:
    ack_buffer = create_buffer()
    for number in sequences:
        create_token(ack_buffer, range(number, number + 1)).settle(ACKED, 0, 1)
    assert ack_buffer.ack_sink.pending_count == len(sequences)
    ranges = [tuple(map(int, content.split("-"))) for content in encoded_acks(ack_buffer)]
    ids = [number % ID_COUNT for number in sequences]
    assert [i for first, last in ranges for i in range(first, last)] == ids
    assert all(0 <= first < last <= ID_COUNT for first, last in ranges)
    if max(sequences, default=0) < ID_COUNT:
        assert ranges == group_ids(ids)
    assert (
        ack_buffer.ack_sink.pending_count,
        ack_buffer.ack_sink.acked_count,
        ack_buffer.ack_sink.encode_pending(),
    ) == (0, len(sequences), b"")


def test_splits_range_at_wrap() -> None:
    ack_buffer = create_buffer()
    create_token(ack_buffer, range(3 * ID_COUNT - 2, 3 * ID_COUNT + 3)).settle(ACKED, 0, 5)
    assert encoded_acks(ack_buffer) == ["2147483646-2147483648", "0-3"]


def test_first_deliveries_in_a_row_form_one_range_across_gaps() -> None:
    ack_buffer = create_buffer()
    first, second = (
        create_token(ack_buffer, [3, 7, 12], arrival_index=1),
        create_token(ack_buffer, [20, 22], arrival_index=4),
    )
    first.settle(ACKED, 0, 2)
    assert encoded_acks(ack_buffer) == ["3-8"]
    first.settle(ACKED, 2, 3)
    second.settle(ACKED, 0, 2)
    assert encoded_acks(ack_buffer) == ["12-23"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1, 2], ["3-13"]),
        ([0, 2], ["3-4", "12-13"]),
        ([2, 1, 0], ["12-13", "7-8", "3-4"]),
        ([1, 2, 0], ["7-13", "3-4"]),
    ],
)
def test_range_never_contains_a_received_message_that_was_not_acked(
    order: list[int], expected: list[str]
) -> None:
    ack_buffer = create_buffer()
    token = create_token(ack_buffer, [3, 7, 12], arrival_index=1)
    for index in order:
        token.settle(ACKED, index, index + 1)
    assert encoded_acks(ack_buffer) == expected


def test_gaps_are_not_spanned_below_out_of_order_messages() -> None:
    ack_buffer = create_buffer()
    token = create_token(ack_buffer, [3, 7, 12, 20, 30], arrival_index=1)
    token.settle(ACKED, 0, 5)
    ack_buffer.last_out_of_order = 5
    assert encoded_acks(ack_buffer) == ["3-4", "7-8", "12-13", "20-21", "30-31"]
    token.settle(ACKED, 1, 5)
    assert encoded_acks(ack_buffer) == ["7-31"]


def test_gaps_are_not_spanned_in_groups_or_without_arrival_index() -> None:
    for ack_buffer, arrival_index in (
        (create_buffer(can_span_gaps=False), 1),
        (create_buffer(), 0),
    ):
        create_token(ack_buffer, [3, 4, 7], arrival_index=arrival_index).settle(ACKED, 0, 3)
        create_token(ack_buffer, range(8, 10), arrival_index=arrival_index and 4).settle(
            ACKED, 0, 2
        )
        assert encoded_acks(ack_buffer) == ["3-5", "7-10"]


def test_outcomes_are_encoded_in_the_order_of_their_calls() -> None:
    ack_buffer = create_buffer()
    token = create_token(ack_buffer, range(10))
    token.settle(WORKING, 0, 10)
    token.settle(ACKED, 0, 3)
    token.settle(NACKED, 3, 4)
    token.settle(nack_outcome(0.25), 4, 6)
    token.settle(nack_outcome(0.25), 6, 7)
    token.settle(NACKED_WITHOUT_DELAY, 7, 8)
    token.settle(ACKED, 8, 10)
    assert encoded_outcomes(ack_buffer) == [
        ("9", "0-10"),
        ("3", "0-3"),
        ("8", "3-4"),
        ("8", "4-7 250"),
        ("8", "7-8 0"),
        ("3", "8-10"),
    ]
    assert (ack_buffer.ack_sink.acked_count, ack_buffer.ack_sink.nacked_count) == (5, 5)


outcomes = st.sampled_from([ACKED, NACKED, NACKED_WITHOUT_DELAY, WORKING, nack_outcome(1)])


@given(
    st.lists(st.tuples(outcomes, st.integers(0, 5), st.integers(1, 3)), max_size=40), st.booleans()
)
def test_encoded_outcomes_equal_recorded_outcomes_in_order(
    recorded: list[tuple[AckOutcome, int, int]], in_gaps: bool
) -> None:
    ack_buffer = create_buffer()
    sequences = [3, 4, 7, 8, 11, 12, 13, 20] if in_gaps else range(3, 11)
    token = create_token(ack_buffer, sequences, arrival_index=1)
    expected: dict[int, list[tuple[str, str]]] = {sequence: [] for sequence in sequences}
    for outcome, first, count in recorded:
        token.settle(outcome, first, first + count)
        for sequence in sequences[first : first + count]:
            expected[sequence].append((chr(outcome[0]), outcome[1].decode()))
    encoded: dict[int, list[tuple[str, str]]] = {sequence: [] for sequence in sequences}
    for kind, content in encoded_outcomes(ack_buffer):
        ids, _, argument = content.partition(" ")
        for sequence in range(*map(int, ids.split("-"))):
            if sequence in encoded:  # Ranges may include sequences that were never sent.
                encoded[sequence].append((kind, f" {argument}" if argument else ""))
    assert encoded == expected


def test_settle_skips_messages_with_a_manual_outcome() -> None:
    ack_buffer = create_buffer()
    token = create_token(ack_buffer, range(6))
    calls: list[int] = []
    ack_buffer.ack_sink.on_manual_ack = lambda: calls.append(1)
    token.record_outcome(nack_outcome(2), 1, 2)
    token.record_outcome(ACKED, 3, 4)
    token.record_outcome(WORKING, 4, 5)
    token.settle(ACKED, 0, 6)
    assert encoded_outcomes(ack_buffer) == [
        ("8", "1-2 2000"),
        ("3", "3-4"),
        ("9", "4-5"),
        ("3", "0-1"),
        ("3", "2-3"),
        ("3", "4-6"),
    ]
    assert len(calls) == 3


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no outcomes")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("no such customer", "no such customer"),
        (ValueError("no number: 'x'"), "ValueError: no number: 'x'"),
        (KeyError(), "KeyError"),
        (UnprintableError(), "UnprintableError"),
        (7, "7"),
        ("", ""),
        ("<\r\n>", "<\r\n\0>"),
        ("x" * 2000, "x" * 1024),
        ("\u20ac" * 1000, "\u20ac" * 341),
        ("\ud800", "?"),
    ],
)
def test_nack_contains_the_error_up_to_its_maximum_length(error: object, text: str) -> None:
    ack_buffer = create_buffer()
    token = create_token(ack_buffer, range(4))
    token.record_outcome(nack_outcome(None, error), 0, 1)
    token.record_outcome(nack_outcome(1.5, error), 1, 2)
    token.record_outcome(terminate_outcome(error), 2, 4)
    assert encoded_outcomes(ack_buffer) == [
        ("8", f"0-1\n{text}"),
        ("8", f"1-2 1500\n{text}"),
        ("8", f"2-4 terminate\n{text}"),
    ]
    token.record_outcome(terminate_outcome(), 0, 1)
    assert encoded_outcomes(ack_buffer) == [("8", "0-1 terminate")]


def test_nack_names_its_attempt_unless_a_later_delivery_was_dropped() -> None:
    ack_buffer = create_buffer()
    token = AckToken(Subscriber(), ack_buffer, class_id=1, sequences=range(9), attempt=3)
    ack_buffer.dropped_redeliveries.update((1, 5))

    def attempts() -> list[tuple[bytes, int]]:
        parsed = [
            parse_frame(frame) for frame in split_frames(ack_buffer.ack_sink.encode_pending())[0]
        ]
        return [(content, attempt) for _, _, attempt, _, content in parsed]

    token.record_outcome(NACKED, 0, 1)
    token.record_outcome(WORKING, 1, 2)
    token.record_outcome(NACKED, 1, 2)
    token.record_outcome(terminate_outcome(), 4, 6)
    assert attempts() == [(b"0-1", 3), (b"1-2", 0), (b"1-2", 0), (b"4-6 terminate", 0)]
    assert not ack_buffer.dropped_redeliveries
    token.record_outcome(NACKED, 1, 2)
    token.record_outcome(ACKED, 2, 3)
    assert attempts() == [(b"1-2", 3), (b"2-3", 0)]


def test_outcomes_wait_until_the_subscription_is_attached() -> None:
    ack_buffer = create_buffer()
    ack_buffer.detach()
    create_token(ack_buffer, range(6)).settle(ACKED, 0, 2)
    assert (ack_buffer.ack_sink.pending_count, ack_buffer.ack_sink.encode_pending()) == (0, b"")
    ack_buffer.attach()
    assert ack_buffer.ack_sink.pending_count == 2
    create_token(ack_buffer, range(6)).settle(ACKED, 2, 4)
    assert ack_buffer.ack_sink.pending_count == 4
    assert encoded_acks(ack_buffer) == ["0-4"]


def test_acks_are_collected_until_there_are_enough() -> None:
    ack_buffer = create_buffer(batch_messages=3)
    token = create_token(ack_buffer, range(9))
    for index in range(2):
        token.settle(ACKED, index, index + 1)
    assert (ack_buffer.ack_sink.pending_count, encoded_acks(ack_buffer)) == (0, [])
    token.settle(ACKED, 2, 3)
    token.settle(ACKED, 3, 4)
    assert ack_buffer.ack_sink.pending_count == 4
    assert encoded_acks(ack_buffer) == ["0-4"]
    token.settle(ACKED, 4, 5)
    ack_buffer.offer()
    ack_buffer.offer()
    assert encoded_acks(ack_buffer) == ["4-5"]


def test_collected_acks_are_offered_on_the_next_connection() -> None:
    ack_buffer = create_buffer(batch_messages=3)
    create_token(ack_buffer, range(9)).settle(ACKED, 0, 1)
    ack_buffer.detach()
    ack_buffer.offer()
    assert encoded_acks(ack_buffer) == []
    ack_buffer.attach()
    assert encoded_acks(ack_buffer) == ["0-1"]


@given(st.data())
def test_pending_count_is_that_of_the_offered_outcomes(data: st.DataObject) -> None:
    ack_buffer = create_buffer(batch_messages=data.draw(st.sampled_from([1, 3])))
    sink, token = ack_buffer.ack_sink, create_token(ack_buffer, range(100))
    settled = encoded = 0
    for _ in range(data.draw(st.integers(1, 20))):
        match data.draw(st.sampled_from("sssoeda")):
            case "s":
                count = data.draw(st.integers(1, 4))
                token.settle(ACKED, settled, settled + count)
                settled += count
            case "o":
                ack_buffer.offer()
            case "e":
                before = sink.pending_count
                acked = [
                    tuple(map(int, encoded_ack.split("-")))
                    for encoded_ack in encoded_acks(ack_buffer)
                ]
                assert sum(last - first for first, last in acked) == before
                encoded += before
            case "d":
                sink.clear()
                ack_buffer.detach()
            case "a":
                sink.clear()
                ack_buffer.detach()
                ack_buffer.attach()
        assert sink.pending_count in (0, settled - encoded)
    ack_buffer.detach()
    sink.clear()
    ack_buffer.attach()
    assert sink.pending_count == settled - encoded
    ack_buffer.discard()
    assert sink.pending_count == 0


def test_closed_buffer_ignores_outcomes() -> None:
    ack_buffer = create_buffer()
    token = create_token(ack_buffer, range(6))
    assert token.is_ack_wanted
    ack_buffer.close()
    token.record_outcome(ACKED, 0, 1)
    assert not token.is_ack_wanted
    assert (ack_buffer.ack_sink.pending_count, encoded_outcomes(ack_buffer)) == (0, [])


def test_fetched_message_cannot_be_acked() -> None:
    with pytest.raises(LocalProtocolError, match="fetched"):
        create_token(None, range(1)).record_outcome(ACKED, 0, 1)


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
def test_nack_rejects_invalid_delay(delay: float) -> None:
    with pytest.raises(ValueError, match=r"delay must be seconds from 0 to 3\.1536e\+07"):
        nack_outcome(delay)
