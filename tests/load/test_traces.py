"""Agreement of the load generators' traces with the generated traffic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from load import broken_broker
from load.brokers import is_available, running
from load.generators import Generator
from load.measure import Flow, measure
from load.processes import LoadError
from load.traces import KINDS, Tracer, prepare, read_records
from simplebus.spark.jobs.report.figures import run_figures
from simplebus.spark.jobs.report.ranges import TimedRanges
from simplebus.spark.jobs.report.traces import COLUMNS, TraceRows
from tests.support.requirements import require_program, skip_or_fail

ROOT = Path(__file__).resolve().parents[2]


COUNT = 5_001


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    require_program("cc", "gcc", "clang")


def numbers(tracer: Tracer, process: int, kind: str) -> list[tuple[int, int, int]]:
    """Return (class, first, last) of every record of a kind."""
    records = read_records(tracer.processes[process].path)
    records = records[records["kind"] == KINDS.index(kind)]
    assert np.all(np.diff(records["at"].astype(np.int64)) >= 0)
    return list(zip(*(records[name].tolist() for name in ("class", "first", "last")), strict=True))


def merge_ranges(ranges: list[tuple[int, int, int]], class_id: int) -> tuple[int, int]:
    """Merge the ranges of a class, which must be contiguous, and return the whole range."""
    class_ranges = [(first, last) for range_class, first, last in ranges if range_class == class_id]
    assert class_ranges, f"no records of class {class_id}"
    assert [first for first, _ in class_ranges[1:]] == [last for _, last in class_ranges[:-1]]
    return class_ranges[0][0], class_ranges[-1][1]


@pytest.mark.parametrize(
    ("kind", "protocol", "record_kinds"),
    [
        ("simplebus", "simplebus", ("delivered", "acked", "confirmed")),
        ("simplebus", "simplebus-2", ("delivered", "acked", "confirmed")),
        ("nats", "nats", ("delivered",)),
    ],
)
def test_a_trace_has_every_message_of_every_class_once(
    kind: str, protocol: str, record_kinds: tuple[str, ...], tmp_path: Path
) -> None:
    if not is_available(kind):
        skip_or_fail(f"{kind} is not installed")
    tracer, flow = Tracer(tmp_path), Flow(classes=(7, 8), subscribers=2)
    with running(kind) as broker:
        sample = measure(broker, protocol, flow, count=COUNT, tracer=tracer)
    subscribers, publisher = (0, 1), 2
    for process, kinds in [
        *((s, record_kinds) for s in subscribers),
        (publisher, ("sent", "confirmed")),
    ]:
        for name in KINDS:
            found = numbers(tracer, process, name)
            if name not in kinds:
                assert not found, (process, name)
                continue
            assert merge_ranges(found, 7) == (0, COUNT // 2 + 1)
            assert merge_ranges(found, 8) == (0, COUNT // 2)

    table = tracer.table("two classes", protocol, 3)
    assert table.column_names == list(COLUMNS)
    assert set(table["round"].to_pylist()) == {3}
    rates = []
    for class_id in ("7", "8"):
        chosen = [row for row in table.to_pylist() if row["class"] == class_id]
        assert {row["subscriber"] for row in chosen if row["kind"] == "sent"} == {None}
        rows = TraceRows(
            KINDS,
            np.array([KINDS.index(row["kind"]) for row in chosen]),
            ("1", "2"),
            np.array([int(row["subscriber"] or 0) - 1 for row in chosen]),
            TimedRanges.of(*([row[name] for row in chosen] for name in ("at", "first", "last"))),
        )
        rows.check(protocol)
        found = [run_figures(rows, index) for index in (0, 1)]
        assert [
            (range_class.lost, range_class.unsent, range_class.duplicates) for range_class in found
        ] == [(0, 0, 0)] * 2
        assert all(
            0 < range_class.latencies_ns[0] <= range_class.latencies_ns[-1] for range_class in found
        )
        rates.append(min(range_class.rate for range_class in found))
    assert sum(rates) > 0.99 * sample.rate  # All times lie within the run.


@pytest.mark.parametrize("version", broken_broker.VERSIONS)
def test_trace_marks_redelivered_messages(version: int, tmp_path: Path) -> None:
    tracer = Tracer(tmp_path)
    broken_broker.try_fault("repeat", version=version, tracer=tracer)
    number = broken_broker.FAULTY_NUMBER
    redelivered = [(broken_broker.CLASS, number, number + 1)]
    assert numbers(tracer, 0, "redelivered") == redelivered
    assert merge_ranges(numbers(tracer, 0, "delivered"), broken_broker.CLASS) == (
        0,
        broken_broker.COUNT,
    )


@pytest.mark.parametrize("acks", broken_broker.ACK_MODES)
def test_trace_records_all_ack_modes(acks: str, tmp_path: Path) -> None:
    tracer = Tracer(tmp_path)
    broken_broker.try_fault("", acks=acks, tracer=tracer)
    assert merge_ranges(numbers(tracer, 0, "acked"), broken_broker.CLASS) == (
        0,
        broken_broker.COUNT,
    )


def test_a_trace_that_is_full_ends_the_run() -> None:
    options = {"count": 100_000, "size": 128, "classes": 1, "trace_records": 1}
    with (
        running("simplebus") as broker,
        Generator(
            "publish", "simplebus", broker.port, timeout_s=20, trace="/nowhere", **options
        ) as publisher,
        pytest.raises(LoadError, match="full after 1 records; increase --trace-records"),
    ):
        publisher.result()


def test_invalid_trace_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"sbtrace1" + (3).to_bytes(8, "little") + bytes(64))
    with pytest.raises(LoadError, match="x holds 80 bytes and is no trace of a generator"):
        read_records(tmp_path / "x")
    with pytest.raises(LoadError, match="is not empty: every run needs a folder of its own"):
        prepare(tmp_path)
