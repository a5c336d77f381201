"""What a client receives, cut into runs: nothing is lost, nothing is said that is not so."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core import frame_runs as runs_module
from simplebus.client.core.frame_runs import FrameRun, split_into_runs
from simplebus.core.protocol.frames import ranges_of
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer
from tests.support.oracles import (
    ID_COUNT,
    build_frame,
    parse_frame,
    split_frames,
)
from tests.support.strategies import (
    HEARTBEAT,
    MESSAGE,
    Chunks,
    chunkings,
    garbled_streams,
    streams,
)

BUFFER = ReceiveBuffer()
ENVELOPE = ord("5")


def runs_of(chunks: Iterable[bytes]) -> list[FrameRun]:
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


def assert_says_what_came(found: list[FrameRun], data: bytes) -> None:
    """Every frame is in one run, in order, and each run's header is that of its frames."""
    assert b"".join(run.raw for run in found) == b"".join(split_frames(data)[0])
    for run in found:
        parsed = [parse_frame(frame) for frame in split_frames(run.raw)[0]]
        assert len(parsed) == run.count
        assert run.contents(0, run.count) == [content for *_, content in parsed]
        assert {kind for kind, *_ in parsed} == {run.frame_type}
        assert {class_id for _, class_id, *_ in parsed} == {run.class_id}
        assert [signed(message_id) for _, _, message_id, *_ in parsed] == list(run.ids)
        assert all(before < after for before, after in pairwise(run.ids))
        if not run.has_messages:
            assert (run.count, run.timer_index, run.content) == (1, parsed[0][3], parsed[0][4])


@given(st.one_of(streams(), garbled_streams()).flatmap(chunkings))
def test_runs_say_what_came_whatever_came(chunks: Chunks) -> None:
    assert_says_what_came(runs_of(chunks), b"".join(chunks))


pieces = st.tuples(
    st.sampled_from([MESSAGE, ENVELOPE]),
    st.integers(0, 3),
    st.sampled_from([0, 1, 120]),
    st.sampled_from([1, 1, 3]),
    st.booleans(),
)


@given(st.lists(pieces, max_size=5))
def test_runs_of_messages_say_what_came(some: list[tuple[int, int, int, int, bool]]) -> None:
    """Long stretches of ascending ids engage the array paths, equal lengths and unequal ones."""
    data = b""
    for kind, first_id, count, step, uneven in some:
        for number in range(first_id, first_id + count * step, step):
            content = b"x" * (number % 7 if uneven else 5)
            data += build_frame(kind, class_id=1, message_id=number, content=content)
    assert_says_what_came(runs_of([data]), data)


@given(st.one_of(streams(), garbled_streams()))
def test_arrays_find_the_runs_that_the_plain_loop_finds(data: bytes) -> None:
    """Without a bound for the loop, everything takes it; without a minimum, nothing does."""
    found = []
    for frames_max, stretch_min in ((1 << 30, 1), (1, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs_module, "PLAIN_FRAMES_MAX", frames_max)
            patch.setattr(runs_module, "_STRETCH_FRAMES_MIN", stretch_min)
            found.append([(run.raw, run.count, list(run.ids)) for run in runs_of([data])])
    assert found[0] == found[1]


def test_messages_with_ascending_ids_are_one_run_whatever_is_left_out() -> None:
    for count in (10, 200):
        data = b"".join(message(number, timer_index=number) for number in range(count))
        (run,) = runs_of([data])
        assert (run.ids, run.class_id, run.raw) == (range(count), 1, data)
        data = b"".join(message(number) for number in range(0, 3 * count, 3))
        (run,) = runs_of([data])
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
def test_anything_else_begins_a_run(second: bytes) -> None:
    assert [run.raw for run in runs_of([message(1) + second])] == [message(1), second]


def test_a_run_ends_at_the_wrap_of_the_ids() -> None:
    found = runs_of([message(ID_COUNT - 2) + message(ID_COUNT - 1) + message(0) + message(1)])
    assert [run.ids for run in found] == [range(ID_COUNT - 2, ID_COUNT), range(2)]


@given(st.booleans(), st.integers(1, 150), st.sampled_from([1, 4]), st.data())
def test_a_part_of_a_run_is_a_run(uneven: bool, count: int, step: int, data: st.DataObject) -> None:
    payloads = [b"y" * (number % 5 if uneven else 3) for number in range(count)]
    ids = range(9, 9 + count * step, step)
    whole = b"".join(map(message, ids, payloads))
    (run,) = runs_of([whole])
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    part = run.slice(first, last)
    assert_says_what_came([part], part.raw)
    assert list(part.ids) == list(ids[first:last])
    assert part.contents(0, part.count) == payloads[first:last] == run.contents(first, last)
    assert part.contents(0, part.count, skip=0) == payloads[first:last]


@given(st.lists(st.booleans(), max_size=20))
def test_ranges_name_exactly_what_is_flagged(flags: list[bool]) -> None:
    ranges = ranges_of(np.array(flags, np.bool_))
    named = [index for first, last in ranges for index in range(first, last)]
    assert named == [index for index, flag in enumerate(flags) if flag]
    assert all(end < begin for (_, end), (begin, _) in pairwise(ranges))
