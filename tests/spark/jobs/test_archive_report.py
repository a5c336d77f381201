"""Digests of the parts of an archive give the same figures as all of its rows."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.jobs.archive_report import ArchiveDigest, digest, summarize_digest

STEP_US = 100
ROWS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 999), st.integers(-50, 999)), min_size=1
)
"""Number, time and latency; latencies of three digits, which are exact."""


def joined(digests: list[ArchiveDigest]) -> ArchiveDigest:
    names = ("kind", "step", "first", "last")
    return ArchiveDigest(
        *(np.concatenate([getattr(part, name) for part in digests]) for name in names)
    )


def digest_of(rows: list[tuple[int, int, int]]) -> ArchiveDigest:
    numbers, at, after = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    return digest(numbers, at, after, step_us=STEP_US)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_figures_of_parts_equal_those_of_their_rows(
    pieces: list[list[tuple[int, int, int]]],
) -> None:
    rows = [row for piece in pieces for row in piece]
    whole, *steps = summarize_digest(
        joined([digest_of(piece) for piece in pieces]), step_us=STEP_US
    )
    numbers = Counter(number for number, _, _ in rows)
    assert whole["delivered"] == len(numbers)
    assert whole["duplicates"] == len(rows) - len(numbers)
    assert whole["sent"] == max(numbers) - min(numbers) + 1
    assert whole["lost"] == whole["sent"] - len(numbers)
    begin, end = min(at for _, at, _ in rows), max(at for _, at, _ in rows)
    assert (whole["begin_s"], whole["seconds"]) == (begin / 1e6, (end - begin) / 1e6)
    latencies = sorted(after for _, _, after in rows)
    assert whole["latencies_us"][0] == latencies[(len(latencies) + 1) // 2 - 1]
    assert whole["latencies_us"][-1] == latencies[-1]

    by_step = defaultdict(list)
    for _, at, after in rows:
        by_step[at // STEP_US].append(after)
    assert [(row["begin_s"], row["delivered"], row["latencies_us"][-1]) for row in steps] == [
        (step * STEP_US / 1e6, len(latencies_of_step), max(latencies_of_step))
        for step, latencies_of_step in sorted(by_step.items())
    ]


def test_long_latencies_have_three_digits() -> None:
    found = digest_of([(0, 0, 1_234_567), (1, 0, 1_230_001), (2, 0, -98_765)])
    _, after, counts = found.select_kind(2)
    assert list(zip(after.tolist(), counts.tolist(), strict=True)) == [(-98_800, 1), (1_230_000, 2)]


def test_ordered_parts_need_few_rows() -> None:
    n = np.arange(100_000)
    assert digest(n, n // 10, np.full_like(n, 500), step_us=1_000).kind.size == 1 + 1 + 10
