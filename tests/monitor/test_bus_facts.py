"""Tests of the facts of a bus, its metrics and its tables against the broker's statistics."""

from __future__ import annotations

from collections.abc import Generator
from heapq import nlargest
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.broker.class_warnings import GROWTH_SECONDS
from simplebus.core.broker.inquire_positions import PositionReporter
from simplebus.core.errors import DEAD_LETTER_REASONS, DROP_REASONS, Reason
from simplebus.core.protocol import frames
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.monitor import bus_facts, bus_tables
from simplebus.monitor.bus_facts import BusFacts, ClassFacts, SlowFacts
from simplebus.monitor.bus_metrics import add_bus_metrics
from simplebus.monitor.exposition import Exposition
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.snapshot import Metric, Note

T = TypeVar("T")


def run_steps(steps: Generator[None, None, T]) -> tuple[T, int]:
    """Run a generator to its end. Returns its result and the number of steps."""
    step_count = 0
    while True:
        try:
            next(steps)
            step_count += 1
        except StopIteration as stop:
            result: T = stop.value
            return result, step_count


class SocketlessBroker:
    """A broker without sockets."""

    def __init__(self) -> None:
        self.broker = Broker(Settings())
        self.buffer = ReceiveBuffer()

    def connect(self, *class_ids: int) -> Session:
        session = self.broker.open_session()
        self.receive(session, frames.encode(frames.CONNECT, content=str(list(class_ids)).encode()))
        return session

    def receive(self, session: Session, data: bytes) -> None:
        self.buffer.writable[: len(data)] = data
        self.broker.receive(session, self.buffer, len(data))
        while self.broker.end_turn().flush:
            for each in self.broker.sessions.values():
                while chunk := each.outbox.peek(0):
                    each.outbox.mark_sent(len(chunk), 0)


def message(class_id: int) -> bytes:
    return frames.encode(frames.MESSAGE, class_id=class_id, content=b"x")


@pytest.fixture
def bus() -> SocketlessBroker:
    """Class 1 has two subscribers, of which one has acked everything; class 2 has none."""
    bus = SocketlessBroker()
    publisher, quick, slow = (bus.connect(1, 2) for _ in range(3))
    for peer in (quick, slow):
        bus.receive(peer, frames.encode(frames.SUBSCRIBE, class_id=1))
    bus.receive(publisher, message(1) * 10 + message(2) * 3)
    bus.receive(quick, frames.encode_ack(class_id=1, timer_index=0, first=0, last=10))
    return bus


def test_metrics_match_the_broker_statistics(bus: SocketlessBroker) -> None:
    facts, _ = run_steps(bus_facts.collect_bus(bus.broker.store))
    for metrics, statistics in zip(facts.classes, bus.broker.statistics().classes, strict=True):
        for name in ("class_id", "published", "delivered", "redelivered", "acknowledged"):
            assert getattr(metrics, name) == getattr(statistics, name), name
        assert metrics.in_flight == statistics.in_flight
        assert metrics.stored == statistics.ring.message_count
        assert metrics.positions == len(statistics.subscriptions)
    assert [cls.lag for cls in facts.classes] == [10, 3]
    assert facts.total.published == 13


def test_other_classes_are_summed(bus: SocketlessBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_facts, "CLASSES_LISTED_MAX", 2)
    bus.connect(3, 4)
    bus.receive(bus.connect(3, 4), message(3) + message(4) * 2)
    facts, _ = run_steps(bus_facts.collect_bus(bus.broker.store))
    assert [cls.class_id for cls in facts.classes] == [1, 2]
    assert facts.other_classes is not None
    assert (
        facts.other_classes.name,
        facts.other_classes.classes,
        facts.other_classes.stored,
    ) == (
        "(others)",
        2,
        3,
    )
    assert facts.total.published == 16
    metrics_builder = MetricsBuilder()
    for _ in add_bus_metrics(metrics_builder, facts):
        pass
    text = b"".join(Exposition().encode(metrics_builder.build())[1]).decode()
    assert 'simplebus_stored_messages{class="(others)",class_id=""} 3.0\n' in text
    # A gauge, because the value can decrease.
    assert 'published_messages_total{class="(others)"' not in text
    assert "simplebus_bus_published_messages_total 16.0\n" in text


def test_busiest_classes_are_listed(bus: SocketlessBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_facts, "CLASSES_LISTED_MAX", 2)
    peer = bus.connect(3, 4)
    bus.receive(peer, message(3) * 4)

    def listed_classes(*earlier_listed: int) -> list[int]:
        facts, _ = run_steps(bus_facts.collect_bus(bus.broker.store, earlier_listed))
        assert facts.other_classes is not None
        assert facts.total.published == facts.other_classes.published + sum(
            cls.published for cls in facts.classes
        )
        return [cls.class_id for cls in facts.classes]

    assert listed_classes() == [1, 3]
    assert listed_classes(1, 2) == [1, 2]  # Listed classes stay listed,
    bus.receive(peer, message(3) * 3)
    assert listed_classes(1, 2) == [1, 3]  # until another class has twice the traffic.


def test_each_step_compares_few_classes(
    bus: SocketlessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus.connect(*range(10, 20))
    _, step_count = run_steps(bus_facts.collect_bus(bus.broker.store))
    monkeypatch.setattr(bus_facts, "CLASSES_COMPARED_PER_STEP", 1)
    _, more_count = run_steps(bus_facts.collect_bus(bus.broker.store))
    assert more_count - step_count == len(bus.broker.classes) - 1


def test_class_with_many_positions_is_collected_in_steps(bus: SocketlessBroker) -> None:
    for _ in range(600):
        bus.receive(bus.connect(2), frames.encode(frames.SUBSCRIBE, class_id=2))
    facts, step_count = run_steps(bus_facts.collect_bus(bus.broker.store))
    assert facts.classes[1].positions == 600
    assert step_count >= 2 + 2


def test_published_and_delivered_are_counted_at_the_same_time(bus: SocketlessBroker) -> None:
    for _ in range(600):
        bus.receive(bus.connect(2), frames.encode(frames.SUBSCRIBE, class_id=2))
    publisher = bus.connect(2)
    steps = bus_facts.collect_class(bus.broker.classes[2], bus.broker.clock.now)
    next(steps)
    bus.receive(publisher, message(2))  # Between two steps.
    bus_facts_, _ = run_steps(steps)
    assert (bus_facts_.published, bus_facts_.delivered) == (3, 3)


def test_growing_class_without_a_subscription_has_the_first_note(bus: SocketlessBroker) -> None:
    bus.receive(bus.connect(1), message(1))
    bus_facts_, _ = run_steps(bus_facts.collect_bus(bus.broker.store))
    first, *_ = bus_tables.build_notes(bus_facts_, SlowFacts())
    assert (first.about, first.is_bad) == ("class '2'", True)
    assert first.sentence == (
        "nobody subscribes to it, and it grows: 3 messages wait for a first subscription; "
        "session 0 (session 0) has created it"
    )
    bus.broker.clock.now += 2 * GROWTH_SECONDS
    bus_facts_, _ = run_steps(bus_facts.collect_bus(bus.broker.store))
    (hint,) = bus_tables.build_notes(bus_facts_, SlowFacts())
    assert (hint.about, hint.is_bad) == ("class '2'", False)
    assert hint.sentence == ("nobody has subscribed to it; session 0 (session 0) has created it")


def slow_notes(slow: SlowFacts) -> list[Note]:
    return bus_tables.build_notes(BusFacts([], None, ClassFacts(""), dead_letters=0), slow)


def test_subscriptions_with_the_largest_lag_are_listed(
    bus: SocketlessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_facts, "POSITIONS_MAX", 1)
    explaining = PositionReporter(bus.broker.store, bus.broker.sessions)
    slow, _ = run_steps(bus_facts.collect_slow(bus.broker, explaining))
    table = bus_tables.build_subscriptions_table(slow)
    assert table.left_out == 1
    (row,) = table.rows
    titles = [column.title for column in table.columns]
    cells = dict(zip(titles, row, strict=True))
    assert (cells["Lag"], cells["In flight"]) == (10, 10)
    assert str(cells["Waiting for"]).startswith("it waits for its acknowledgements: 10 ")
    assert slow_notes(slow) == []  # The class has not waited for long.


def test_sessions_table_shows_published_counts(bus: SocketlessBroker) -> None:
    explaining = PositionReporter(bus.broker.store, bus.broker.sessions)
    slow, _ = run_steps(bus_facts.collect_slow(bus.broker, explaining))
    table = bus_tables.build_sessions_table(slow)
    assert [row[0] for row in table.rows] == ["0", "1", "2"]
    assert {row[3] for row in table.rows} == {"version 1"}
    assert [row[5] for row in table.rows] == [13, 0, 0]
    assert slow_notes(slow) == []


def dropped_counts(metrics: list[Metric], name: str) -> dict[str, object]:
    """Return the values of a metric of dropped messages, by reason."""
    (metric,) = (metric for metric in metrics if metric.name == name)
    return {dict(labels)["reason"]: value for labels, value in metric.values}


def test_dropped_messages_are_zero_before_the_first_one() -> None:
    builder, bus_facts_ = MetricsBuilder(), ClassFacts("orders", 7)
    for _ in add_bus_metrics(builder, BusFacts([bus_facts_], None, bus_facts_, dead_letters=0)):
        pass
    zeros = {reason.value: 0 for reason in (*DROP_REASONS, *DEAD_LETTER_REASONS)}
    assert dropped_counts(builder.build(), "bus_dropped_messages") == zeros
    assert dropped_counts(builder.build(), "dropped_messages") == zeros


def test_dropped_messages_of_an_unexpected_reason_are_counted() -> None:
    dropped = {Reason.DRAINING: 2, Reason.EXPIRED: 3}
    builder, bus_facts_ = MetricsBuilder(), ClassFacts("orders", 7, dropped=dropped)
    for _ in add_bus_metrics(builder, BusFacts([bus_facts_], None, bus_facts_, dead_letters=0)):
        pass
    counts = dropped_counts(builder.build(), "dropped_messages")
    assert (counts["draining"], counts["expired"], counts["purged"]) == (2, 3, 0)


def test_dead_letters_do_not_count_as_dropped() -> None:
    dropped = {Reason.MAX_DELIVERIES: 2, Reason.TERMINATED: 1, Reason.EXPIRED: 4}
    bus_facts_ = ClassFacts("orders", 7, dropped=dropped)
    assert (bus_facts_.dropped_count, bus_facts_.dead_lettered_count) == (4, 3)
    table = bus_tables.build_classes_table(BusFacts([bus_facts_], None, bus_facts_, dead_letters=0))
    titles = [column.title for column in table.columns]
    (row,) = table.rows
    assert (row[titles.index("Dropped")], row[titles.index("Dead-lettered")]) == (4, 3)


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_selection_in_steps_matches_nlargest(count: int, values: list[int], step: int) -> None:
    candidates = list(enumerate(values))
    expected = nlargest(count, candidates, key=lambda each: each[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus_facts, "_CANDIDATES_PER_STEP", step)
        steps = bus_facts.select_largest(count, candidates, key=lambda each: each[1])
        assert run_steps(steps)[0] == expected
