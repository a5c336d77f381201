"""Tests of the Prometheus formats, parsed with the Prometheus client library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from simplebus.core.histogram import Histogram
from simplebus.monitor.exposition import VALUES_PER_PART, Exposition
from simplebus.monitor.metrics_builder import MetricsBuilder

PLAIN = "text/plain"
OPEN = "application/openmetrics-text;version=1.0.0"
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def encode_text(metrics_builder: MetricsBuilder, accept: str) -> str:
    """Return the metrics in the format that the Accept header selects."""
    return b"".join(Exposition().encode(metrics_builder.build(), accept)[1]).decode()


@given(st.lists(ANY_TEXT, unique=True, max_size=5), st.floats(0, 1e18), st.booleans())
def test_labels_survive_encoding_and_parsing(names: list[str], value: float, is_open: bool) -> None:
    metrics_builder = MetricsBuilder()
    for name in names:
        metrics_builder.gauge("things", 'How many "things".\\', value, **{"class": name})
    text = encode_text(metrics_builder, OPEN if is_open else PLAIN)
    families = list((read_open if is_open else read_plain)(text))
    samples = [sample for family in families for sample in family.samples]
    assert [sample.labels["class"] for sample in samples] == names
    assert all(sample.value == value for sample in samples)
    assert all(sample.name == "simplebus_things" for sample in samples)


def test_metric_types_are_kept_in_both_formats() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.7, 3.0):
        histogram.observe(value)
    metrics_builder = MetricsBuilder()
    metrics_builder.counter("done", "Done.", 7)
    metrics_builder.histogram("seconds", "Took.", histogram.snapshot(), listener="tcp")
    metrics_builder.counter("process_cpu_seconds", "Processor.", 1.5)
    for accept, read in ((PLAIN, read_plain), (OPEN, read_open)):
        families = {family.name: family for family in read(encode_text(metrics_builder, accept))}
        assert families["simplebus_done"].type == "counter"
        assert families["simplebus_done"].samples[0].name == "simplebus_done_total"
        assert "process_cpu_seconds" in families
        family = families["simplebus_seconds"]
        assert family.type == "histogram"
        assert {s.labels.get("le"): s.value for s in family.samples if "bucket" in s.name} == {
            "0.5": 1,
            "1.0": 2,
            "+Inf": 3,
        }
        values = {s.name: s.value for s in family.samples if "bucket" not in s.name}
        assert values == {"simplebus_seconds_sum": 3.8, "simplebus_seconds_count": 3}


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
def test_openmetrics_requires_its_accept_header(accept: str, kind: str) -> None:
    content_type, _ = Exposition().encode([], accept)
    assert content_type.startswith(kind)


def test_lone_surrogates_become_question_marks() -> None:
    metrics_builder = MetricsBuilder()
    metrics_builder.gauge("things", "Things.", 1, listener="a\ud800b")
    assert 'simplebus_things{listener="a?b"} 1.0\n' in encode_text(metrics_builder, PLAIN)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=3, max_size=3))))
def test_cached_encoding_equals_a_new_one(snapshots: list[tuple[bool, list[int]]]) -> None:
    exposition = Exposition()
    for is_open, values in snapshots:
        metrics_builder, histogram = MetricsBuilder(), Histogram((0.5,))
        for number, value in enumerate(values):
            metrics_builder.gauge(f"thing_{number % 2}", "Things.", value, number=str(number))
            histogram.observe(value)
        metrics_builder.histogram("seconds", "Took.", histogram.snapshot())
        accept = OPEN if is_open else PLAIN
        assert b"".join(
            exposition.encode(metrics_builder.build(), accept)[1]
        ).decode() == encode_text(metrics_builder, accept)


@given(st.integers(0, 1100), st.booleans())
def test_metric_with_many_values_is_encoded_in_parts(count: int, is_open: bool) -> None:
    metrics_builder = MetricsBuilder()
    for number in range(count):
        metrics_builder.counter("things", "Things.", number, **{"class": str(number)})
    metrics_builder.gauge("other", "Other.", 1)
    parts = list(Exposition().encode(metrics_builder.build(), OPEN if is_open else PLAIN)[1])
    assert len(parts) == max(1, -(-count // VALUES_PER_PART)) + (count > 0) + is_open
    (*_, last_family) = families = list(
        (read_open if is_open else read_plain)(b"".join(parts).decode())
    )
    assert last_family.name == "simplebus_other"
    samples = [sample for family in families[:-1] for sample in family.samples]
    assert [(s.labels["class"], s.value) for s in samples] == [(str(n), n) for n in range(count)]
    assert len(families) == 1 + (count > 0)
