"""Payloads of the benchmark, and the check of received frames."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.bench.run import BenchPlan, BenchResult, format_report
from simplebus.bench.traffic import (
    PAYLOAD_BYTES_MIN,
    TrafficCheck,
    TrafficError,
    payload_rows,
    payloads,
    quantiles,
)
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.protocol import frames

RUN, COUNT, SIZE = 42, 30, 20


def wire(contents: list[bytes]) -> memoryview:
    return memoryview(b"".join(frames.encode(frames.MESSAGE, content=c) for c in contents))


def sent(*, run: int = RUN, first: int = 0, count: int = COUNT, size: int = SIZE) -> list[bytes]:
    return payloads(run=run, first=first, count=count, size=size)


def check_frames(
    check: TrafficCheck, contents: list[bytes], *, first_id: int, redelivered: bool = False
) -> None:
    check.check_frames(
        wire(contents), first_id=first_id, count=len(contents), redelivered=redelivered
    )


@given(st.integers(0, 9999), st.integers(0, 10**11), st.integers(1, 40), st.integers(0, 50))
def test_payloads_show_their_run_and_number(
    run: int, first: int, count: int, extra_count: int
) -> None:
    size = PAYLOAD_BYTES_MIN + extra_count
    contents = payloads(run=run, first=first, count=count, size=size)
    assert [c[:PAYLOAD_BYTES_MIN] for c in contents] == [
        b"%04d%012d" % (run, first + n) for n in range(count)
    ]
    assert {len(c) for c in contents} == {size}
    assert contents == [
        row.tobytes() for row in payload_rows(run=run, first=first, count=count, size=size)
    ]


@given(st.lists(st.integers(1, COUNT - 1), unique=True), st.integers(0, MESSAGE_ID_MASK))
def test_check_accepts_any_batching_and_ids(cuts: list[int], first_id: int) -> None:
    check = TrafficCheck(run=RUN, count=COUNT, size=SIZE)
    edges = [0, *sorted(cuts), COUNT]
    contents = sent()
    for first, last in itertools.pairwise(edges):
        assert not check.is_done
        check_frames(check, contents[first:last], first_id=(first_id + first) & MESSAGE_ID_MASK)
    assert check.is_done
    assert (check.redelivered_count, check.leftover_count) == (0, 0)


def test_check_counts_redeliveries() -> None:
    check = TrafficCheck(run=RUN, count=COUNT, size=SIZE)
    check_frames(check, sent(count=20), first_id=100)
    check_frames(check, sent(first=5, count=3), first_id=105, redelivered=True)
    check_frames(check, sent(first=20, count=10), first_id=120)
    assert check.is_done
    assert check.redelivered_count == 3


def test_check_skips_leftovers() -> None:
    check = TrafficCheck(run=RUN, count=COUNT, size=SIZE)
    check_frames(check, [b"something else"], first_id=0)
    check_frames(check, sent(run=41, count=3) + sent(count=10), first_id=1)
    check_frames(check, sent(first=10, count=20), first_id=14)
    assert check.is_done
    assert check.leftover_count == 4


def damaged() -> list[bytes]:
    contents = sent()
    contents[17] = contents[17][:-1] + b"!"
    return contents


@pytest.mark.parametrize(
    ("contents", "expected_error"),
    [
        (damaged(), "message 17 is "),
        ([*sent(count=5), *sent(first=6, count=24)], "message 5 is "),
        ([*sent(count=5), *sent(first=4, count=25)], "message 5 is "),
        (sent(first=1, count=29), "message 0 is "),
        (sent(count=COUNT + 1), "received 31 messages, expected 30"),
    ],
)
def test_check_rejects_wrong_messages(contents: list[bytes], expected_error: str) -> None:
    with pytest.raises(TrafficError, match=expected_error):
        check_frames(TrafficCheck(run=RUN, count=COUNT, size=SIZE), contents, first_id=7)


def test_a_gap_in_the_ids_fails() -> None:
    check = TrafficCheck(run=RUN, count=COUNT, size=SIZE)
    check_frames(check, sent(count=10), first_id=0)
    with pytest.raises(TrafficError, match="number 11, expected 10"):
        check_frames(check, sent(first=11, count=1), first_id=11)


def test_check_rejects_unmarked_repetition() -> None:
    check = TrafficCheck(run=RUN, count=COUNT, size=SIZE)
    check_frames(check, sent(count=10), first_id=0)
    with pytest.raises(TrafficError, match="number 9, expected 10"):
        check_frames(check, sent(first=9, count=1), first_id=9)


def test_a_redelivery_before_the_delivery_fails() -> None:
    check = TrafficCheck(run=RUN, count=COUNT, size=SIZE)
    check_frames(check, sent(count=10), first_id=0)
    with pytest.raises(TrafficError, match="message 10 was redelivered"):
        check_frames(check, sent(first=10, count=1), first_id=10, redelivered=True)


def test_another_length_in_the_middle_fails() -> None:
    check = TrafficCheck(run=RUN, count=COUNT, size=SIZE)
    check_frames(check, sent(count=10), first_id=0)
    with pytest.raises(TrafficError, match="message 10 has a wrong length"):
        check_frames(check, [b"short"], first_id=10)


def test_quantiles_are_values_that_occurred() -> None:
    seconds = [n / 1000 for n in range(1, 1001)]
    assert quantiles(seconds) == {
        "median": 0.501,
        "90 %": 0.901,
        "99 %": 0.991,
        "99.9 %": 1.0,
        "worst": 1.0,
    }


def test_the_report_names_what_was_measured() -> None:
    plan = BenchPlan(messages=1_000_000, size=128, subscribers=2, class_id=65000)
    text = "\n".join(
        format_report(
            plan,
            BenchResult(2.0, redelivered_count=3, leftover_count=4, latencies={"median": 0.0001}),
        )
    )
    assert "500,000 messages a second published, 1,000,000 delivered, 64 MB/s in" in text
    assert "median 100 µs" in text
    assert "3 redeliveries: a subscriber was slower than the ack timeout" in text
    assert "class 65000 contained 4 earlier messages, acknowledged and not counted" in text


def test_plan_rejects_short_payloads() -> None:
    with pytest.raises(ValueError, match="--size must be at least 16"):
        BenchPlan(messages=1, size=15, subscribers=1, class_id=1)
