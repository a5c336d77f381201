"""What Prometheus is told, read by its own library."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from simplebus.core.histogram import Histogram
from simplebus.monitor.counted import Counted
from simplebus.monitor.exposition import exposition, wants_open

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(ANY_TEXT, unique=True, max_size=5), st.floats(0, 1e18), st.booleans())
def test_labels_come_back_as_they_were_whatever_they_say(
    names: list[str], value: float, is_open: bool
) -> None:
    counted = Counted()
    for name in names:
        counted.gauge("things", 'How many "things".\\', value, **{"class": name})
    text = "".join(exposition(counted.metrics(), is_open=is_open))
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
    for is_open, read in ((False, read_plain), (True, read_open)):
        text = "".join(exposition(counted.metrics(), is_open=is_open))
        families = {family.name: family for family in read(text)}
        assert families["simplebus_done"].type == "counter"
        assert families["simplebus_done"].samples[0].name == "simplebus_done_total"
        assert "process_cpu_seconds" in families
        took = families["simplebus_seconds"]
        assert took.type == "histogram"
        assert {s.labels.get("le"): s.value for s in took.samples if "bucket" in s.name} == {
            "0.5": 1,
            "1": 2,
            "+Inf": 3,
        }
        found = {s.name: s.value for s in took.samples if "bucket" not in s.name}
        assert found == {"simplebus_seconds_sum": 3.8, "simplebus_seconds_count": 3}


def test_openmetrics_is_for_who_asks_for_it() -> None:
    assert wants_open("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert not wants_open("text/plain")
    assert not wants_open("")
