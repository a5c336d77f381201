"""Tests of splitting received frames into runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core import frame_runs as runs_module
from simplebus.client.core.frame_runs import FrameRun, split_into_runs
from simplebus.core.protocol.frames import flags_to_ranges
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer
from tests.support.oracles import ID_COUNT, build_frame, parse_frame, split_frames
from tests.support.strategies import HEARTBEAT, MESSAGE, Chunks, chunkings, garbled_streams, streams

BUFFER = ReceiveBuffer()
ENVELOPE = ord("5")


def split_runs(chunks: Iterable[bytes]) -> list[FrameRun]:
    receiver = FrameReceiver(frame_bytes_max=1 << 20)
    return [
        run
        for chunk in chunks
        for batch in receiver.receive(BUFFER, BUFFER.fill(chunk))
        for run in split_into_runs(batch)
    ]


def message(message_id: int, payload: bytes = b"16 bytes of load", **fields: int) -> bytes:
    return build_frame(MESSAGE, message_id=message_id, content=payload, **{"class_id": 1, **fields})


def signed(message_id: int) -> int:
    return message_id - (message_id >> 31 << 32)


def assert_runs_contain(found: list[FrameRun], data: bytes) -> None:
    """Assert that every frame is in one run, in order, with the header of its run."""
    assert b"".join(run.raw for run in found) == b"".join(split_frames(data)[0])
    for run in found:
        parsed = [parse_frame(frame) for frame in split_frames(run.raw)[0]]
        assert len(parsed) == run.count
        assert run.contents(0, run.count) == [content for *_, content in parsed]
        assert {kind for kind, *_ in parsed} == {run.frame_type}
        assert {class_id for _, class_id, *_ in parsed} == {run.class_id}
        assert [signed(message_id) for _, _, message_id, *_ in parsed] == list(run.ids)
        assert all(lower < higher for lower, higher in pairwise(run.ids))
        if not run.has_messages:
            assert (run.count, run.timer_index, run.content) == (1, parsed[0][3], parsed[0][4])


@given(st.one_of(streams(), garbled_streams()).flatmap(chunkings))
def test_runs_contain_all_frames_in_order(chunks: Chunks) -> None:
    assert_runs_contain(split_runs(chunks), b"".join(chunks))


groups = st.tuples(
    st.sampled_from([MESSAGE, ENVELOPE]),
    st.integers(0, 3),
    st.sampled_from([0, 1, 120]),
    st.sampled_from([1, 1, 3]),
    st.booleans(),
)


@given(st.lists(groups, max_size=5))
def test_message_runs_contain_all_frames_in_order(
    frame_groups: list[tuple[int, int, int, int, bool]],
) -> None:
    """Long runs of ascending ids take the numpy paths, with equal and unequal lengths."""
    data = b""
    for kind, first_id, count, step, uneven in frame_groups:
        for number in range(first_id, first_id + count * step, step):
            content = b"x" * (number % 7 if uneven else 5)
            data += build_frame(kind, class_id=1, message_id=number, content=content)
    assert_runs_contain(split_runs([data]), data)


@given(st.one_of(streams(), garbled_streams()))
def test_numpy_and_loop_find_the_same_runs(data: bytes) -> None:
    """Without a maximum for the loop all frames take it; without a minimum none do."""
    found = []
    for frames_max, stretch_min in ((1 << 30, 1), (1, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs_module, "PLAIN_FRAMES_MAX", frames_max)
            patch.setattr(runs_module, "_STRETCH_FRAMES_MIN", stretch_min)
            found.append([(run.raw, run.count, list(run.ids)) for run in split_runs([data])])
    assert found[0] == found[1]


def test_ascending_ids_with_gaps_form_one_run() -> None:
    for count in (10, 200):
        data = b"".join(message(number, timer_index=number) for number in range(count))
        (run,) = split_runs([data])
        assert (run.ids, run.class_id, run.raw) == (range(count), 1, data)
        data = b"".join(message(number) for number in range(0, 3 * count, 3))
        (run,) = split_runs([data])
        assert not isinstance(run.ids, range)
        assert run.ids.tolist() == list(range(0, 3 * count, 3))


@pytest.mark.parametrize(
    "second",
    [
        message(0),
        message(1),
        message(2, class_id=2),
        build_frame(HEARTBEAT, class_id=1, message_id=2),
        build_frame(ENVELOPE, class_id=1, message_id=2),
    ],
)
def test_other_type_class_or_order_starts_a_run(second: bytes) -> None:
    assert [run.raw for run in split_runs([message(1) + second])] == [message(1), second]


def test_run_ends_at_wrap() -> None:
    found = split_runs([message(ID_COUNT - 2) + message(ID_COUNT - 1) + message(0) + message(1)])
    assert [run.ids for run in found] == [range(ID_COUNT - 2, ID_COUNT), range(2)]


@given(st.booleans(), st.integers(1, 150), st.sampled_from([1, 4]), st.data())
def test_slice_of_a_run_is_a_run(uneven: bool, count: int, step: int, data: st.DataObject) -> None:
    payloads = [b"y" * (number % 5 if uneven else 3) for number in range(count)]
    ids = range(9, 9 + count * step, step)
    encoded = b"".join(map(message, ids, payloads))
    (run,) = split_runs([encoded])
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    subrun = run.slice(first, last)
    assert_runs_contain([subrun], subrun.raw)
    assert list(subrun.ids) == list(ids[first:last])
    assert subrun.contents(0, subrun.count) == payloads[first:last] == run.contents(first, last)
    assert subrun.contents(0, subrun.count, skip=0) == payloads[first:last]


@given(st.lists(st.booleans(), max_size=20))
def test_ranges_of_flags_contain_exactly_the_flagged_indexes(flags: list[bool]) -> None:
    ranges = flags_to_ranges(np.array(flags, np.bool_))
    covered = [index for first, last in ranges for index in range(first, last)]
    assert covered == [index for index, flag in enumerate(flags) if flag]
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))
