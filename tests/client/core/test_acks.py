"""What is told about messages: everything that was said, nothing else, in few ranges."""

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
from tests.support.oracles import (
    ID_COUNT,
    group_ids,
    parse_frame,
    split_frames,
)

VECTORS = Path(__file__).parents[3] / "protocol" / "vectors" / "acks.json"
GROUPING = json.loads(VECTORS.read_text())["grouping"]


class Subscriber:
    decode = None


def log_of(*, settles: bool = True, spans: bool = True) -> AckBuffer:
    log = AckBuffer(AckSink(), 7, is_auto_ack=settles, can_span_gaps=spans)
    log.attach()
    return log


def receipt(log: AckBuffer | None, sequences: MessageIds | list[int], *, row: int = 0) -> AckToken:
    if isinstance(sequences, list):
        sequences = np.array(sequences, np.int64)
    return AckToken(
        Subscriber(), log, class_id=1, sequences=sequences, attempt=1, arrival_index=row
    )


def told(log: AckBuffer) -> list[tuple[str, str]]:
    """(type, content) of what is written."""
    found, rest = split_frames(log.ack_sink.encode_pending())
    assert rest == b""
    parsed = [parse_frame(frame) for frame in found]
    for kind, subject, attempt, detail, _ in parsed:
        assert (subject, attempt, detail) == (7, 0 if chr(kind) == "3" else 1, 0)
    return [(chr(kind), content.decode()) for kind, *_, content in parsed]


def acks(log: AckBuffer) -> list[str]:
    found = told(log)
    assert {kind for kind, _ in found} <= {"3"}
    return [content for _, content in found]


@pytest.mark.parametrize("case", GROUPING, ids=lambda case: case["name"])
def test_ids_are_grouped_as_the_vectors_say(case: dict[str, list[list[int]]]) -> None:
    log = log_of()
    for number in case["ids"]:
        receipt(log, range(number, number + 1)).settle(ACKED, 0, 1)
    assert acks(log) == [f"{first}-{last}" for first, last in case["ranges"]]


@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(ID_COUNT - 20, ID_COUNT + 20)), max_size=200)
)
def test_ranges_name_exactly_what_was_acknowledged_and_never_span_the_wrap(
    sequences: list[int],
) -> None:
    log = log_of()
    for number in sequences:
        receipt(log, range(number, number + 1)).settle(ACKED, 0, 1)
    assert log.ack_sink.pending_count == len(sequences)
    ranges = [tuple(map(int, content.split("-"))) for content in acks(log)]
    ids = [number % ID_COUNT for number in sequences]
    assert [i for first, last in ranges for i in range(first, last)] == ids
    assert all(0 <= first < last <= ID_COUNT for first, last in ranges)
    if max(sequences, default=0) < ID_COUNT:
        assert ranges == group_ids(ids)
    assert (
        log.ack_sink.pending_count,
        log.ack_sink.acked_count,
        log.ack_sink.encode_pending(),
    ) == (0, len(sequences), b"")


def test_a_range_is_cut_at_the_wrap_of_the_ids() -> None:
    log = log_of()
    receipt(log, range(3 * ID_COUNT - 2, 3 * ID_COUNT + 3)).settle(ACKED, 0, 5)
    assert acks(log) == ["2147483646-2147483648", "0-3"]


def test_what_came_in_a_row_is_one_range_whatever_was_left_out() -> None:
    log = log_of()
    first, second = receipt(log, [3, 7, 12], row=1), receipt(log, [20, 22], row=4)
    first.settle(ACKED, 0, 2)
    assert acks(log) == ["3-8"]
    first.settle(ACKED, 2, 3)
    second.settle(ACKED, 0, 2)
    assert acks(log) == ["12-23"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1, 2], ["3-13"]),
        ([0, 2], ["3-4", "12-13"]),
        ([2, 1, 0], ["12-13", "7-8", "3-4"]),
        ([1, 2, 0], ["7-13", "3-4"]),
    ],
)
def test_a_range_never_names_a_message_that_came_and_was_not_acknowledged(
    order: list[int], expected: list[str]
) -> None:
    log = log_of()
    came = receipt(log, [3, 7, 12], row=1)
    for index in order:
        came.settle(ACKED, index, index + 1)
    assert acks(log) == expected


def test_gaps_are_not_spanned_where_something_came_late() -> None:
    log = log_of()
    came = receipt(log, [3, 7, 12, 20, 30], row=1)
    came.settle(ACKED, 0, 5)
    log.last_out_of_order = 5
    assert acks(log) == ["3-4", "7-8", "12-13", "20-21", "30-31"]
    came.settle(ACKED, 1, 5)
    assert acks(log) == ["7-31"]


def test_gaps_are_not_spanned_where_they_are_others_messages_or_nothing_came_in_a_row() -> None:
    for log, row in ((log_of(spans=False), 1), (log_of(), 0)):
        receipt(log, [3, 4, 7], row=row).settle(ACKED, 0, 3)
        receipt(log, range(8, 10), row=row and 4).settle(ACKED, 0, 2)
        assert acks(log) == ["3-5", "7-10"]


def test_the_last_word_about_a_message_is_written_last() -> None:
    log = log_of()
    came = receipt(log, range(10))
    came.settle(WORKING, 0, 10)
    came.settle(ACKED, 0, 3)
    came.settle(NACKED, 3, 4)
    came.settle(nack_outcome(0.25), 4, 6)
    came.settle(nack_outcome(0.25), 6, 7)
    came.settle(NACKED_WITHOUT_DELAY, 7, 8)
    came.settle(ACKED, 8, 10)
    assert told(log) == [
        ("9", "0-10"),
        ("3", "0-3"),
        ("8", "3-4"),
        ("8", "4-7 250"),
        ("8", "7-8 0"),
        ("3", "8-10"),
    ]
    assert (log.ack_sink.acked_count, log.ack_sink.nacked_count) == (5, 5)


words = st.sampled_from([ACKED, NACKED, NACKED_WITHOUT_DELAY, WORKING, nack_outcome(1)])


@given(st.lists(st.tuples(words, st.integers(0, 5), st.integers(1, 3)), max_size=40), st.booleans())
def test_what_is_told_is_what_was_said_in_the_order_in_which_it_was_said(
    said: list[tuple[AckOutcome, int, int]], in_gaps: bool
) -> None:
    log = log_of()
    sequences = [3, 4, 7, 8, 11, 12, 13, 20] if in_gaps else range(3, 11)
    came = receipt(log, sequences, row=1)
    expected: dict[int, list[tuple[str, str]]] = {sequence: [] for sequence in sequences}
    for verdict, first, count in said:
        came.settle(verdict, first, first + count)
        for sequence in sequences[first : first + count]:
            expected[sequence].append((chr(verdict[0]), verdict[1].decode()))
    heard: dict[int, list[tuple[str, str]]] = {sequence: [] for sequence in sequences}
    for kind, content in told(log):
        ids, _, argument = content.partition(" ")
        for sequence in range(*map(int, ids.split("-"))):
            if sequence in heard:  # What was never sent is passed over.
                heard[sequence].append((kind, f" {argument}" if argument else ""))
    assert heard == expected


def test_what_is_said_by_hand_is_not_said_again_by_settling() -> None:
    log = log_of()
    came = receipt(log, range(6))
    calls: list[int] = []
    log.ack_sink.on_manual_ack = lambda: calls.append(1)
    came.record_outcome(nack_outcome(2), 1, 2)
    came.record_outcome(ACKED, 3, 4)
    came.record_outcome(WORKING, 4, 5)
    came.settle(ACKED, 0, 6)
    assert told(log) == [
        ("8", "1-2 2000"),
        ("3", "3-4"),
        ("9", "4-5"),
        ("3", "0-1"),
        ("3", "2-3"),
        ("3", "4-6"),
    ]
    assert len(calls) == 3


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("no such customer", "no such customer"),
        (ValueError("no number: 'x'"), "ValueError: no number: 'x'"),
        (KeyError(), "KeyError"),
        (SilentError(), "SilentError"),
        (7, "7"),
        ("", ""),
        ("<\r\n>", "<\r\n\0>"),
        ("x" * 2000, "x" * 1024),
        ("\u20ac" * 1000, "\u20ac" * 341),
        ("\ud800", "?"),
    ],
)
def test_a_nack_says_what_went_wrong_as_far_as_it_may(error: object, sentence: str) -> None:
    log = log_of()
    came = receipt(log, range(4))
    came.record_outcome(nack_outcome(None, error), 0, 1)
    came.record_outcome(nack_outcome(1.5, error), 1, 2)
    came.record_outcome(terminate_outcome(error), 2, 4)
    assert told(log) == [
        ("8", f"0-1\n{sentence}"),
        ("8", f"1-2 1500\n{sentence}"),
        ("8", f"2-4 terminate\n{sentence}"),
    ]
    came.record_outcome(terminate_outcome(), 0, 1)
    assert told(log) == [("8", "0-1 terminate")]


def test_a_nack_names_its_attempt_unless_a_newer_one_was_dropped() -> None:
    log = log_of()
    came = AckToken(Subscriber(), log, class_id=1, sequences=range(9), attempt=3)
    log.dropped_redeliveries.update((1, 5))

    def attempts() -> list[tuple[bytes, int]]:
        parsed = [parse_frame(frame) for frame in split_frames(log.ack_sink.encode_pending())[0]]
        return [(content, attempt) for _, _, attempt, _, content in parsed]

    came.record_outcome(NACKED, 0, 1)
    came.record_outcome(WORKING, 1, 2)
    came.record_outcome(NACKED, 1, 2)
    came.record_outcome(terminate_outcome(), 4, 6)
    assert attempts() == [(b"0-1", 3), (b"1-2", 0), (b"1-2", 0), (b"4-6 terminate", 0)]
    assert not log.dropped_redeliveries
    came.record_outcome(NACKED, 1, 2)
    came.record_outcome(ACKED, 2, 3)
    assert attempts() == [(b"1-2", 3), (b"2-3", 0)]


def test_what_is_said_before_the_bus_knows_the_subscription_waits() -> None:
    log = log_of()
    log.detach()
    receipt(log, range(6)).settle(ACKED, 0, 2)
    assert (log.ack_sink.pending_count, log.ack_sink.encode_pending()) == (0, b"")
    log.attach()
    assert log.ack_sink.pending_count == 2
    receipt(log, range(6)).settle(ACKED, 2, 4)
    assert log.ack_sink.pending_count == 4
    assert acks(log) == ["0-4"]


def test_what_is_said_to_nobody_is_forgotten() -> None:
    log = log_of()
    came = receipt(log, range(6))
    assert came.is_ack_wanted
    log.close()
    came.record_outcome(ACKED, 0, 1)
    assert not came.is_ack_wanted
    assert (log.ack_sink.pending_count, told(log)) == (0, [])


def test_a_fetched_message_is_nobodys_to_acknowledge() -> None:
    with pytest.raises(LocalProtocolError, match="fetched"):
        receipt(None, range(1)).record_outcome(ACKED, 0, 1)


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
def test_a_delay_is_neither_negative_nor_without_end(delay: float) -> None:
    with pytest.raises(ValueError, match=r"delay must be seconds from 0 to 3\.1536e\+07"):
        nack_outcome(delay)
