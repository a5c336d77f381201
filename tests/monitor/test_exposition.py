"""What Prometheus is told, read by its own library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from simplebus.core.histogram import Histogram
from simplebus.monitor.counted import Counted
from simplebus.monitor.exposition import Exposition

PLAIN = "text/plain"
OPEN = "application/openmetrics-text;version=1.0.0"
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def told(counted: Counted, accept: str) -> str:
    """What an Accept header brings."""
    return b"".join(Exposition().of(counted.metrics(), accept)[1]).decode()


@given(st.lists(ANY_TEXT, unique=True, max_size=5), st.floats(0, 1e18), st.booleans())
def test_labels_come_back_as_they_were_whatever_they_say(
    names: list[str], value: float, is_open: bool
) -> None:
    counted = Counted()
    for name in names:
        counted.gauge("things", 'How many "things".\\', value, **{"class": name})
    text = told(counted, OPEN if is_open else PLAIN)
    families = list((read_open if is_open else read_plain)(text))
    samples = [sample for family in families for sample in family.samples]
    assert [sample.labels["class"] for sample in samples] == names
    assert all(sample.value == value for sample in samples)
    assert all(sample.name == "simplebus_things" for sample in samples)


def test_kinds_are_what_they_are_in_both_formats() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.7, 3.0):
        histogram.observe(value)
    counted = Counted()
    counted.counter("done", "Done.", 7)
    counted.histogram("seconds", "Took.", histogram.snapshot(), door="tcp")
    counted.counter("process_cpu_seconds", "Processor.", 1.5)
    for accept, read in ((PLAIN, read_plain), (OPEN, read_open)):
        families = {family.name: family for family in read(told(counted, accept))}
        assert families["simplebus_done"].type == "counter"
        assert families["simplebus_done"].samples[0].name == "simplebus_done_total"
        assert "process_cpu_seconds" in families
        took = families["simplebus_seconds"]
        assert took.type == "histogram"
        assert {s.labels.get("le"): s.value for s in took.samples if "bucket" in s.name} == {
            "0.5": 1,
            "1.0": 2,
            "+Inf": 3,
        }
        found = {s.name: s.value for s in took.samples if "bucket" not in s.name}
        assert found == {"simplebus_seconds_sum": 3.8, "simplebus_seconds_count": 3}


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain", "text/plain; version=0.0.4"),
        (f"{OPEN},text/plain;q=0.5", "application/openmetrics-text; version=1.0.0"),
        (
            "application/openmetrics-text;version=lots,=;;",
            "application/openmetrics-text; version=1.0.0",
        ),
    ],
)
def test_openmetrics_is_for_who_asks_for_it(accept: str, kind: str) -> None:
    told_kind, _ = Exposition().of([], accept)
    assert told_kind.startswith(kind)


def test_half_a_character_is_a_question_mark() -> None:
    counted = Counted()
    counted.gauge("things", "Things.", 1, door="a\ud800b")
    assert 'simplebus_things{door="a?b"} 1.0\n' in told(counted, PLAIN)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=3, max_size=3))))
def test_what_is_kept_is_what_would_be_written(looks: list[tuple[bool, list[int]]]) -> None:
    kept = Exposition()
    for is_open, values in looks:
        counted, histogram = Counted(), Histogram((0.5,))
        for number, value in enumerate(values):
            counted.gauge(f"thing_{number % 2}", "Things.", value, number=str(number))
            histogram.observe(value)
        counted.histogram("seconds", "Took.", histogram.snapshot())
        accept = OPEN if is_open else PLAIN
        assert b"".join(kept.of(counted.metrics(), accept)[1]).decode() == told(counted, accept)
