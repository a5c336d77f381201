"""Display of the server's statistics in the demo."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from simplebus.core.ring.ring import RingStatistics
from simplebus.core.statistics import BrokerStatistics, ClassStatistics
from simplebus.demo.display import (
    LiveDisplay,
    PlainDisplay,
    build_table,
    compute_rates,
    format_line,
)


def statistics(*, published: int, redelivered: int, class_id: int = 1) -> BrokerStatistics:
    cls = ClassStatistics(
        class_id=class_id,
        name="",
        channels=0,
        ring=RingStatistics(published - 30, published, 0, 0),
        published=published,
        delivered=published * 2,
        redelivered=redelivered,
        acknowledged=published * 2 - 7,
        in_flight=7,
        dropped={},
        blocked_sessions=0,
        parked=0,
        spilled=0,
        spilled_bytes=0,
        subscriptions=(),
    )
    return BrokerStatistics(sessions=1, memory_bytes=0, parked_bytes=0, refused={}, classes=(cls,))


def test_rates_are_differences_by_time() -> None:
    before = statistics(published=1_000, redelivered=0)
    (row,) = compute_rates(before, statistics(published=3_000, redelivered=50), 0.5)
    assert (row.sent, row.delivered, row.redelivered) == (4_000, 8_000, 100)
    assert (row.acknowledged, row.in_flight, row.stored) == (8_000, 7, 30)


def test_a_class_that_is_new_counts_from_zero() -> None:
    before = statistics(published=1_000, redelivered=0, class_id=2)
    (row,) = compute_rates(before, statistics(published=500, redelivered=0), 1.0)
    assert row.sent == 500


def test_a_terminal_gets_a_table_and_the_events_above_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    (row,) = compute_rates(
        statistics(published=0, redelivered=0), statistics(published=30, redelivered=5), 1.0
    )
    with LiveDisplay(console) as display:
        display.event("something [brackets] happened", second=1.5)
        display.update([row], second=2.0)
    assert "something [brackets] happened" in out.getvalue()
    assert "redelivered" in out.getvalue()
    assert build_table([row], 2.0).row_count == 1


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = compute_rates(
        statistics(published=0, redelivered=0), statistics(published=1_030, redelivered=5), 1.0
    )
    with PlainDisplay() as display:
        display.event("something happened", second=1.5)
        display.update([row], second=2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["  1.5 s  something happened", format_line(row, 2.0)]
    assert "class 1: 1,030 sent/s" in lines[1]
    assert "\x1b" not in lines[1]
