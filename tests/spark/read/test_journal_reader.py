"""Tests of reading journal files: only complete and durable messages are returned.

The files are written by a broker without a server. The query is driven in Spark's order of calls.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope_batch import encode
from simplebus.spark.arrow_columns import ColumnOptions, to_record_batch
from simplebus.spark.options import source_options
from simplebus.spark.read.bus_reader import ClassMissingError
from simplebus.spark.read.journal_reader import SparkJournalReader, split_piece
from simplebus.spark.read.offsets import ClassExtent, OffsetError
from simplebus.spark.read.planner import DataLossError, MessageRange
from simplebus.spark.source import BatchReader
from simplebus.storage import journal_reader
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import file_name
from simplebus.storage.inspection import JournalInspection
from simplebus.storage.journal_reader import ClassJournalReader, MessageBlock
from tests.behaviour.wire_peer_v2 import ack, channel_envelope, connect_version2, publish, subscribe
from tests.spark.simulated_query import SimulatedQuery
from tests.spark.test_arrow_columns import messages as sent_messages
from tests.storage.journaled_broker import START, KeptBus, end_all

EACH = 10


def payloads_of(first: int, last: int) -> list[bytes]:
    return [b"%06d" % n for n in range(first, last)]


@pytest.fixture(autouse=True)
def close_queries() -> Iterator[None]:
    yield
    end_all()


class JournaledBus:
    """Broker with a data directory, and a publisher of its class 1, `orders`."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.path = path
        self.bus = KeptBus(path, **more)
        self.peer = connect_version2(self.bus, classes=[{"id": 1, "name": "orders"}])
        self.sent = self.number = 0

    def publish(self, count: int = EACH) -> None:
        """Publish messages, which are accepted and not written yet."""
        self.peer.send(publish(1, self.number, *payloads_of(self.sent, self.sent + count)))
        self.number += count
        self.sent += count

    def lots(self, count: int, *, seconds: float = 0.0) -> None:
        """Publish and sync `count` lots, advancing the clock by `seconds` after each."""
        for _ in range(count):
            self.publish()
            self.bus.sync()
            self.bus.broker.clock.now += seconds

    def segments(self) -> list[Path]:
        return sorted((self.path / "classes" / "00001").glob("*.log"))


@pytest.fixture
def journaled_bus(tmp_path: Path) -> JournaledBus:
    """Broker with one journal batch per segment."""
    return JournaledBus(tmp_path, segment_bytes=100)


def query(journaled_bus: JournaledBus, **options: object) -> SimulatedQuery:
    return SimulatedQuery(
        path=journaled_bus.path, subscribe="orders", startingOffsets="earliest", **options
    )


def values(rows: list[dict[str, Any]]) -> list[bytes]:
    return [row["value"] for row in rows]


def batch(**options: object) -> list[dict[str, Any]]:
    """Return the rows that a batch job reads."""
    texts = {name: str(value) for name, value in options.items()}
    reader = BatchReader(source_options(texts, streaming=False))
    tables = [pa.Table.from_batches(reader.read(task)) for task in reader.partitions()]
    return [row for table in tables for row in table.to_pylist()]


def stored_extent(path: Path, class_: str = "orders") -> ClassExtent:
    return SparkJournalReader(str(path)).get_extent([class_]).classes[class_]


# Content and selection ----------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    lots=st.lists(sent_messages, min_size=1, max_size=4),
    segment_bytes=st.sampled_from([1, 400, 1 << 20]),
    data=st.data(),
)
def test_columns_agree_with_message_by_message_oracle(
    tmp_path_factory: pytest.TempPathFactory,
    lots: list[list[Any]],
    segment_bytes: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("journal")
    bus = KeptBus(path, segment_bytes=segment_bytes)
    peer, sent = connect_version2(bus, classes=[1]), 0
    for lot in lots:
        for envelope, payload in lot:
            kind, content = frames.MESSAGE, payload
            if envelope is not None:
                kind, content = frames.ENVELOPE, encode(envelope, payload)
            peer.send(frames.encode(kind, class_id=1, message_id=sent, content=content))
            sent += 1
        bus.sync()
        bus.broker.clock.now += 0.5
    bus.crash()
    messages = JournalInspection(path).messages(1, count=1000)
    expected = [
        (message.sequence, message.payload, message.envelope, message.time) for message in messages
    ]
    first = data.draw(st.integers(0, sent))
    last = data.draw(st.integers(first, sent))
    journal = SparkJournalReader(str(path))
    shape = ColumnOptions("here", "1", 1, include_headers=True)
    found = [
        row
        for piece in journal.read(MessageRange("here", "here", "1", first, last), strict=True)
        for row in to_record_batch(piece, shape).to_pylist()
    ]
    assert stored_extent(path, "1").head == sent == len(expected)
    assert [row["offset"] for row in found] == list(range(first, last))
    for row, (_, payload, envelope, time) in zip(found, expected[first:last], strict=True):
        assert (row["value"], row["key"] or b"") == (payload, envelope.key)
        assert (row["channel"] or "") == envelope.channel
        assert len(row["headers"] or []) == len(envelope.headers)
        if envelope.published is None:
            assert row["timestamp"].timestamp() == time


def test_large_parts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.spark.read.journal_reader._BATCH_BYTES", 40)
    payloads = [b"a", b"x" * 100, b"b" * 20, b"", b"c"]
    whole = publish(1, 0, *payloads)
    piece = MessageBlock(7, len(payloads), [(7, 1.0)], bytearray(whole + bytes(16)))
    found = list(split_piece(piece))
    assert [each.first for each in found] == [7, 8, 9, 10]
    batches = [to_record_batch(each, ColumnOptions("s", "1", 1)) for each in found]
    assert [value for each in batches for value in each["value"].to_pylist()] == payloads
    for count in (4, 6):
        with pytest.raises(
            JournalError, match=f"expected {count} messages from 7 on in the records, found 5"
        ):
            list(split_piece(MessageBlock(7, count, [(7, 1.0)], piece.buffer)))
    with pytest.raises(JournalError, match="expected a frame of message 12, got 3 bytes"):
        list(split_piece(MessageBlock(7, 5, [(7, 1.0)], bytearray(whole + b"abc" + bytes(16)))))


def test_batch_job_reads_journal_like_a_server(journaled_bus: JournaledBus) -> None:
    journaled_bus.lots(5)
    rows = batch(path=journaled_bus.path, subscribe="orders", maxRecordsPerPartition=7)
    assert values(rows) == payloads_of(0, 50)
    assert {(row["topic"], row["partition"], row["server"]) for row in rows} == {
        ("orders", 1, str(journaled_bus.path))
    }
    starting = f'{{"{journaled_bus.path}": {{"1": 12}}}}'
    ending = f'{{"file://{journaled_bus.path}": {{"1": 31}}}}'
    more = {"subscribe": 1, "includeMemory": "true"}
    rows = batch(path=journaled_bus.path, startingOffsets=starting, endingOffsets=ending, **more)
    assert values(rows) == payloads_of(12, 31)
    assert {row["memory"] for row in rows} == {"here"}


def test_several_journals_are_read_like_several_servers(tmp_path: Path) -> None:
    tills = [JournaledBus(tmp_path / name) for name in "ab"]
    for till in tills:
        till.lots(1)
    paths = ",".join(str(till.path) for till in tills)
    with pytest.raises(
        OffsetError, match=r"path has .*/a and .*/b, which are the same bus; drop one"
    ):
        batch(path=paths, subscribe="orders")
    change_bus_id(tills[1].path, "there")
    rows = batch(path=paths, subscribe="orders")
    assert [row["server"][-2:] for row in rows] == ["/a"] * EACH + ["/b"] * EACH


def test_channels_select_messages(journaled_bus: JournaledBus) -> None:
    contents = [channel_envelope(name, name.encode()) for name in ("a.b", "c", "a.d")]
    frame = [
        frames.encode(frames.ENVELOPE, class_id=1, message_id=n, content=content)
        for n, content in enumerate(contents)
    ]
    journaled_bus.peer.send(*frame)
    journaled_bus.bus.sync()
    rows = batch(path=journaled_bus.path, subscribe=1, channels="a.*")
    assert [(row["offset"], row["channel"]) for row in rows] == [(0, "a.b"), (2, "a.d")]


def test_times_select_messages(journaled_bus: JournaledBus) -> None:
    journaled_bus.lots(4, seconds=1.0)
    started = {"path": journaled_bus.path, "subscribe": "orders"}

    def since(seconds: float) -> list[bytes]:
        return values(batch(**started, startingTimestamp=int((START + seconds) * 1000)))

    assert since(-5) == payloads_of(0, 40)
    assert since(0.005) == payloads_of(0, 40)  # Accepted within 0.05 seconds.
    assert since(0.5) == payloads_of(10, 40)
    assert since(1.0) == payloads_of(10, 40)
    assert since(2.02) == payloads_of(30, 40)
    with pytest.raises(OffsetError, match="stores no message accepted since then"):
        since(3.5)
    ending = int((START + 1.5) * 1000)
    assert values(batch(**started, endingTimestamp=ending)) == payloads_of(0, 20)


# Incomplete and unsynced messages -----------------------------------------------------------------


def test_truncated_records_are_ignored(tmp_path: Path) -> None:
    journaled_bus = JournaledBus(tmp_path)
    journaled_bus.lots(3)
    journaled_bus.bus.crash()
    (segment,) = journaled_bus.segments()
    whole = segment.read_bytes().rstrip(b"\0")
    record = len(whole) // 3
    for size in (record - 1, record, record + 30, 2 * record - 1, 2 * record, len(whole)):
        segment.write_bytes(whole[:size] + bytes(100))
        head = stored_extent(tmp_path).head
        assert head == EACH * (size // record), size
        assert values(batch(path=tmp_path, subscribe="orders")) == payloads_of(0, head)
    for at in range(record, 2 * record, 41):
        spoilt = bytearray(whole)
        spoilt[at] ^= 4
        segment.write_bytes(spoilt)
        assert stored_extent(tmp_path).head == EACH, at
    segment.write_bytes(whole)
    assert KeptBus(tmp_path).broker.classes[1].ring.head == 3 * EACH  # Unchanged.


def test_reader_sees_complete_batches_only(journaled_bus: JournaledBus) -> None:
    journaled_bus.lots(1)
    following = query(journaled_bus)
    assert values(following.run() or []) == payloads_of(0, 10)
    assert following.run() is None
    journaled_bus.publish()
    assert following.run() is None  # Not written yet.
    journaled_bus.bus.sync()
    assert values(following.run() or []) == payloads_of(10, 20)
    journaled_bus.lots(3)  # In separate segments.
    following.die()
    assert values(following.run() or []) == payloads_of(20, 50)
    assert values(following.rows) == payloads_of(0, 50)


def test_scanned_file_is_not_scanned_again(
    journaled_bus: JournaledBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    journaled_bus.lots(1)
    files = ClassJournalReader(journaled_bus.path, 1)
    (segment,) = journaled_bus.segments()
    assert files.read_extent() == (0, 10)
    os.utime(segment, (START, START))
    assert files.read_extent() == (0, 10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", None)
        assert files.read_extent() == (0, 10)
    journaled_bus.publish()
    journaled_bus.bus.sync()
    assert files.read_extent() == (0, 20)


def test_equal_times_hide_no_messages(tmp_path: Path) -> None:
    journaled_bus = JournaledBus(tmp_path)
    journaled_bus.lots(1)
    files = ClassJournalReader(journaled_bus.path, 1)
    (segment,) = journaled_bus.segments()
    before = segment.stat()
    assert files.read_extent() == (0, 10)
    journaled_bus.lots(1)
    os.utime(segment, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert segment.stat().st_size == before.st_size
    assert files.read_extent() == (0, 20)
    journaled_bus.bus.crash()


def test_unsynced_messages_are_not_reported(
    journaled_bus: JournaledBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    safe: dict[Path, int] = {}

    def sync(path: Path) -> None:
        safe[path] = path.stat().st_size if path.is_file() else 0

    monkeypatch.setattr(journal_reader, "sync_file", sync)
    files = ClassJournalReader(journaled_bus.path, 1)
    for _ in range(3):
        for _ in range(2):
            journaled_bus.publish()
            journaled_bus.bus.write()  # Without a sync.
        floor, head = files.read_extent()
        assert (floor, head) == (0, journaled_bus.sent)
        assert set(journaled_bus.segments()) <= set(safe)
        assert {journaled_bus.path / "classes", journaled_bus.path / "classes" / "00001"} <= set(
            safe
        )
    journaled_bus.bus.crash()
    for segment in journaled_bus.segments():
        os.truncate(segment, safe[segment])
    reopened_bus = KeptBus(journaled_bus.path)
    assert reopened_bus.broker.classes[1].ring.head == journaled_bus.sent
    reopened_bus.crash()


def test_failed_sync_ends_the_read(
    journaled_bus: JournaledBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> None:
        raise OSError(5, "Input/output error")

    journaled_bus.lots(1)
    files = ClassJournalReader(journaled_bus.path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(journal_reader, "sync_file", failing)
        for _ in range(2):
            with pytest.raises(JournalError, match=r"cannot read .*00001: Input/output error"):
                files.read_extent()
    assert files.read_extent() == (0, EACH)


# Missing messages ---------------------------------------------------------------------------------


def acknowledge(journaled_bus: JournaledBus, count: int) -> None:
    """Acknowledge the first messages, so that their segments are deleted."""
    reader = connect_version2(
        journaled_bus.bus, subscribe(1, 5, durable="billing", start="waiting")
    )
    journaled_bus.bus.sync()
    reader.receive_message_ids()
    reader.send(ack(5, 0, count))
    journaled_bus.bus.keeper.is_snapshot_due = True
    journaled_bus.bus.sync()
    assert not journaled_bus.bus.remove()


def test_deleted_segment_is_a_loss(
    journaled_bus: JournaledBus, caplog: pytest.LogCaptureFixture
) -> None:
    journaled_bus.lots(4)
    for strict in (True, False):
        following = query(journaled_bus, failOnDataLoss=strict, minPartitions=4)
        reader = following.reader
        start = reader.initialOffset()
        planned = reader.partitions(start, reader.latestOffset(start, None))
        if strict:
            acknowledge(journaled_bus, 25)
            with pytest.raises(DataLossError, match=r"messages 0 to 9 .* from 20 to 39"):
                list(reader.read(planned[0]))
            with pytest.raises(DataLossError, match=r"messages 0 to 19 .* holds messages from 20"):
                reader.partitions(start, reader.latestOffset(start, None))
        else:
            found = [pa.Table.from_batches(reader.read(task)).num_rows for task in planned]
            assert sum(found) == 20
    assert stored_extent(journaled_bus.path) == ClassExtent(20, 40)
    journal, whole = (
        SparkJournalReader(str(journaled_bus.path)),
        MessageRange(str(journaled_bus.path), "here", "1", 0, 40),
    )
    with pytest.raises(DataLossError, match=r"messages 0 to 19 .* holds messages from 20 on"):
        list(journal.read(whole, strict=True))
    assert sum(piece.count for piece in journal.read(whole, strict=False)) == 20
    following = query(journaled_bus, failOnDataLoss="false")
    following.ends = [json.dumps({str(journaled_bus.path): {"orders": 5, "": "here"}})]
    following.committed_count = 1
    assert values(following.run() or []) == payloads_of(20, 40)
    assert "messages 5 to 19 of class orders" in caplog.text


def test_damaged_record_ends_the_read(journaled_bus: JournaledBus) -> None:
    journaled_bus.lots(4)
    segment = journaled_bus.segments()[1]
    data = bytearray(segment.read_bytes())
    data[-5] ^= 1
    segment.write_bytes(data)
    with pytest.raises(DataLossError, match=r"messages 10 to 39 .* checksum mismatch"):
        batch(path=journaled_bus.path, subscribe="orders")
    assert values(
        batch(path=journaled_bus.path, subscribe=1, failOnDataLoss="false")
    ) == payloads_of(0, 10)


def test_record_out_of_sequence_is_ignored(journaled_bus: JournaledBus) -> None:
    journaled_bus.lots(4)
    last = journaled_bus.segments()[-1]
    last.rename(last.with_name(file_name(31)))
    assert stored_extent(journaled_bus.path) == ClassExtent(0, 31)
    with pytest.raises(DataLossError, match=r"messages 30 to 30 .* from 0 to 30"):
        batch(path=journaled_bus.path, subscribe="orders")


def change_bus_id(path: Path, bus_id: str) -> None:
    """Give a journal to another bus."""
    stamp = path / "simplebus.json"
    content = json.loads(stamp.read_text()) | {"bus": bus_id}
    del content["checksum"]
    stamp.write_text(json.dumps(content))


def test_journal_of_another_server_is_a_loss(journaled_bus: JournaledBus) -> None:
    journaled_bus.lots(1)
    following = query(journaled_bus)
    following.run()
    change_bus_id(journaled_bus.path, "there")
    with pytest.raises(DataLossError, match="they had the memory id here, and the bus was reset"):
        following.run()
    journal = SparkJournalReader(str(journaled_bus.path))
    with pytest.raises(DataLossError, match="another bus now, with the memory id there"):
        list(
            journal.read(MessageRange(str(journaled_bus.path), "here", "orders", 0, 5), strict=True)
        )


def test_reused_sequences_end_the_query(journaled_bus: JournaledBus) -> None:
    journaled_bus.lots(2)
    following = query(journaled_bus)
    following.run()
    journaled_bus.bus.crash()
    journaled_bus.segments()[-1].unlink()  # As if it was not synced.
    error_pattern = (
        r"messages 10 to 19 of class orders .* they were read, and the bus has lost them"
    )
    with pytest.raises(DataLossError, match=error_pattern):
        following.run()
    second_query = query(journaled_bus, failOnDataLoss="false")
    second_query.ends, second_query.committed_count = following.ends[:1], 1
    assert second_query.run() == []
    journaled_bus = JournaledBus(journaled_bus.path)
    journaled_bus.sent = 10
    journaled_bus.lots(1)
    assert values(second_query.run() or []) == payloads_of(10, 20)


# Errors -------------------------------------------------------------------------------------------


def test_missing_journal_error_names_machine(journaled_bus: JournaledBus, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(
        JournalError, match=r"^on \S+: .*nothing is not a journal: .*; .* every exec"
    ):
        batch(path=missing, subscribe="orders")
    journaled_bus.lots(1)
    reader = BatchReader(
        source_options({"path": str(journaled_bus.path), "subscribe": "orders"}, streaming=False)
    )
    (task,) = reader.partitions()
    journaled_bus.path.joinpath("simplebus.json").unlink()
    with pytest.raises(JournalError, match=r"messages 0 to 9 .* could not be read completely: on "):
        list(reader.read(task))


def test_missing_class_is_reported(journaled_bus: JournaledBus) -> None:
    journaled_bus.bus.sync()
    for class_ in ("payments", "4711"):
        with pytest.raises(ClassMissingError, match=f"has no class '{class_}'"):
            batch(path=journaled_bus.path, subscribe=class_)
    assert (
        batch(path=journaled_bus.path, subscribe="orders") == []
    )  # A class with a name and without messages.
    late = query(journaled_bus)
    assert not late.run()
    journaled_bus.lots(1)
    assert values(late.run() or []) == payloads_of(0, 10)


def test_messages_only_in_memory_are_not_read(tmp_path: Path) -> None:
    journaled_bus = JournaledBus(tmp_path, level=Durability.MEMORY)
    journaled_bus.lots(1)
    journaled_bus.publish()
    assert stored_extent(tmp_path) == ClassExtent(0, EACH)
    journaled_bus.bus.crash()


def test_skips_recorded_gaps(tmp_path: Path) -> None:
    journaled_bus = JournaledBus(tmp_path)
    journaled_bus.lots(9)
    journaled_bus.bus.crash()
    (segment,) = journaled_bus.segments()
    data = bytearray(segment.read_bytes())
    data[data.index(b"sbj2", 300) + 60] ^= 1
    segment.write_bytes(data)
    KeptBus(tmp_path).crash()  # Records the gap.
    files = ClassJournalReader(tmp_path, 1)
    assert files.read_extent() == (0, 90)
    blocks = [(each.first, each.first + each.count) for each in files.read_blocks(0, 90)]
    assert (blocks[0][0], blocks[-1][1], files.problem) == (0, 90, "")
    assert sum(last - first for first, last in blocks) == 80
