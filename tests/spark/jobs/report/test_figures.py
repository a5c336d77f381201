"""Figures computed from ranges equal figures that are counted message by message."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.jobs.report.figures import NS_PER_S, SHARES, STEPS_MAX, run_figures, run_steps
from simplebus.spark.jobs.report.ranges import NEVER, TimedRanges, consecutive_ranges, quantiles
from simplebus.spark.jobs.report.report import _run_table
from simplebus.spark.jobs.report.traces import COLUMNS, KINDS, TraceError, TraceRows, check_columns

Row = tuple[str, int | None, int, int, int]
"""kind, subscriber, at, first, last."""
STEP_NS = 10


def rows_of(*rows: Row) -> TraceRows:
    return TraceRows(
        kinds=KINDS,
        kind=np.array([KINDS.index(row[0]) for row in rows], np.int64),
        subscribers=("one", "two"),
        subscriber=np.array([-1 if row[1] is None else row[1] for row in rows], np.int64),
        ranges=TimedRanges.of(*([row[i] for row in rows] for i in (2, 3, 4))),
    )


def quantile_one_by_one(values: list[int], share: float) -> int:
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def one_by_one(rows: list[Row], subscriber: int) -> dict[str, Any]:
    """Return the figures message by message, as the oracle."""
    times: dict[str, dict[int, list[int]]] = {kind: defaultdict(list) for kind in KINDS}
    ends, begins = [], []
    for kind, row_subscriber, at, first, last in rows:
        if row_subscriber in (None, subscriber):
            ends.append(at)
            begins += [at] if kind == "sent" else []
            for n in range(first, last):
                times[kind][n].append(at)
    arrivals = {
        n: min(times["delivered"][n] + times["redelivered"][n])
        for n in times["delivered"].keys() | times["redelivered"].keys()
    }
    sent = {n: min(at) for n, at in times["sent"].items()}
    after = [(arrivals[n], arrivals[n] - sent[n]) for n in arrivals if n in sent]
    by_step = defaultdict(list)
    for at, latency in after:
        by_step[at // STEP_NS].append(latency)
    return {
        "sent": len(sent),
        "delivered": len(arrivals),
        "acked": len(times["acked"]),
        "redelivered": sum(map(len, times["redelivered"].values())),
        "duplicates": sum(len(at) - 1 for at in times["delivered"].values() if at),
        "lost": len(sent.keys() - arrivals.keys()),
        "unsent": len(arrivals.keys() - sent.keys()),
        "seconds": (max(ends) - min(begins)) / NS_PER_S if begins else 0.0,
        "latencies_ns": tuple(quantile_one_by_one([a for _, a in after], s) for s in SHARES)
        if after
        else None,
        "by_step": {
            step: [quantile_one_by_one(values, s) for s in SHARES]
            for step, values in by_step.items()
        },
        "per_step": {
            kind: {
                step: sum(
                    last - first
                    for k, row_subscriber, at, first, last in rows
                    if k in kinds and row_subscriber in (None, subscriber) and at // STEP_NS == step
                )
                for step in range(10)
            }
            for kind, kinds in {
                "sent": ["sent"],
                "delivered": ["delivered", "redelivered"],
                "acked": ["acked"],
            }.items()
        },
    }


def any_row() -> st.SearchStrategy[Row]:
    def ended(kind: str, subscriber: int, at: int, first: int, length: int) -> Row:
        return kind, None if kind == "sent" else subscriber, at, first, first + length

    # Few numbers and times: ranges overlap, repeat each other and leave gaps, all the time.
    return st.builds(
        ended,
        st.sampled_from(KINDS),
        st.integers(0, 1),
        st.integers(0, 99),
        st.integers(0, 30),
        st.integers(0, 12),
    )


@given(st.lists(any_row(), max_size=25))
def test_figures_agree_with_message_by_message_oracle(rows: list[Row]) -> None:
    trace_rows = rows_of(*rows)
    trace_rows.check("a test")
    for subscriber in (0, 1):
        expected = one_by_one(rows, subscriber)
        found = run_figures(trace_rows, subscriber)
        for name in ("sent", "delivered", "acked", "redelivered", "duplicates", "lost", "unsent"):
            assert getattr(found, name) == expected[name], name
        assert found.seconds == pytest.approx(expected["seconds"])
        assert found.latencies_ns == expected["latencies_ns"]
        steps = run_steps(trace_rows, subscriber, step_ns=STEP_NS)
        for kind, counts in expected["per_step"].items():
            per_step = getattr(steps, kind).tolist()
            assert per_step == [counts[step] for step in range(len(per_step))], kind
            assert sum(per_step) == sum(counts.values())
        for step, latencies in enumerate(steps.latencies_ns.tolist()):
            assert latencies == expected["by_step"].get(step, [NEVER] * len(SHARES))


def test_redelivery_duplicate_and_loss_are_distinguished() -> None:
    rows = rows_of(
        ("sent", None, 0, 0, 10),
        ("confirmed", None, 2_000_000_000, 0, 10),
        ("delivered", 0, 10, 0, 5),
        ("delivered", 0, 20, 4, 8),  # Message 4 is a duplicate.
        ("redelivered", 0, 90, 6, 9),  # Message 8 is new here, 9 is lost.
        ("acked", 0, 100, 0, 9),
        ("delivered", 1, 50, 0, 10),
    )
    first, second = run_figures(rows, 0), run_figures(rows, 1)
    assert (first.delivered, first.redelivered, first.duplicates, first.lost) == (9, 3, 1, 1)
    assert first.latencies_ns == (10, 90, 90, 90, 90)  # 5 x 10, 3 x 20, 1 x 90.
    assert (first.acked, first.seconds, first.rate) == (9, 2.0, 4.5)
    assert (second.delivered, second.redelivered, second.duplicates, second.lost) == (10, 0, 0, 0)
    assert second.acked == 0


def test_clock_differences_appear_in_every_step() -> None:
    key = {"scenario": "s", "variant": "v", "round": 1, "process": "p", "class": "c"}
    rows = [
        {**key, "kind": "sent", "at": 100, "first": 0, "last": 1},
        {**key, "kind": "delivered", "subscriber": "a", "at": 50, "first": 0, "last": 1},
    ]
    kinds = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
    found = _run_table(pa.Table.from_pylist(rows, schema), STEP_NS).to_pylist()
    assert [row["p50_us"] for row in found] == [-0.05, *[None] * 5, -0.05, *[None] * 5]


def test_work_does_not_grow_with_range_length() -> None:
    rows = rows_of(("sent", None, 0, 0, 10**12), ("delivered", 0, 7, 0, 10**12))
    assert run_figures(rows, 0).latencies_ns == (7,) * len(SHARES)
    assert run_steps(rows, 0, step_ns=5).delivered.tolist() == [0, 10**12]


def test_empty_trace_has_no_figures() -> None:
    found = run_figures(rows_of(), 0)
    assert (found.sent, found.seconds, found.rate, found.latencies_ns) == (0, 0.0, 0.0, None)
    assert run_steps(rows_of(), 0, step_ns=STEP_NS).sent.size == 0


def test_too_many_steps_are_rejected() -> None:
    rows = rows_of(("sent", None, STEPS_MAX * STEP_NS, 0, 1))
    with pytest.raises(TraceError, match=r"has 1,000,001 steps .* choose longer ones"):
        run_steps(rows, 0, step_ns=STEP_NS)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 5)), max_size=30),
    st.sampled_from([0.0, 0.25, 0.5, 0.99, 1.0]),
)
def test_quantiles_are_weighted_by_count(rows: list[tuple[int, int, int]], share: float) -> None:
    repeated = defaultdict(list)
    for group, value, weight in rows:
        repeated[group] += [value] * weight
    groups, values, weights = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    names, found = quantiles(groups, values, weights, [share])
    assert {n: int(f[0]) for n, f in zip(names.tolist(), found, strict=True)} == {
        group: quantile_one_by_one(all_of, share) for group, all_of in repeated.items()
    }


@given(st.lists(st.integers(0, 40)))
def test_ranges_contain_each_number_as_often(numbers: list[int]) -> None:
    begins, ends = consecutive_ranges(np.array(sorted(numbers), np.int64))
    contained = [
        n for b, e in zip(begins.tolist(), ends.tolist(), strict=True) for n in range(b, e)
    ]
    assert sorted(contained) == sorted(numbers)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("sent", None, -1, 0, 1), "a time from 0 on"),
        (("sent", None, 0, 5, 4), "0 <= first <= last"),
        (("sent", 0, 0, 0, 1), "no subscriber, for a publisher sends"),
        (("acked", None, 0, 0, 1), "a subscriber"),
    ],
)
def test_invalid_row_is_quoted(row: Row, expected: str) -> None:
    with pytest.raises(TraceError) as caught:
        rows_of(("sent", None, 0, 0, 1), row).check("run 3 of nats")
    assert str(caught.value).endswith(f"expected {expected}")
    assert f"run 3 of nats has a row {row[0]!r} at {row[2]} ns" in str(caught.value)


def test_unknown_kind_is_quoted() -> None:
    rows = TraceRows(
        ("lost",), np.zeros(1, np.int64), (), np.full(1, -1), TimedRanges.of([0], [0], [1])
    )
    with pytest.raises(TraceError, match=r"a row 'lost' at 0 ns.*expected a kind, one of sent"):
        rows.check("a test")


def test_other_columns_are_rejected() -> None:
    check_columns({**COLUMNS, "more": "string"}, place="here")
    without = {name: kind for name, kind in COLUMNS.items() if name != "at"}
    with pytest.raises(TraceError, match=r"file:/x is not a trace: it has no column 'at', only"):
        check_columns(without, place="file:/x")
    with pytest.raises(TraceError, match=r"its column 'at' is timestamp, expected bigint"):
        check_columns({**COLUMNS, "at": "timestamp"}, place="file:/x")
