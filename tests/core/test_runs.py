"""What a client receives, cut into runs: nothing is lost, nothing is said that is not so."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import ID_COUNT, build_frame, parse_frame, split_frames
from strategies import HEARTBEAT, MESSAGE, Chunks, chunkings, garbled_streams, streams

from simplebus.core.receive import FrameReceiver, ReceiveBuffer
from simplebus.core.runs import Run, ranges_of, runs

BUFFER = ReceiveBuffer()


def runs_of(chunks: Iterable[bytes]) -> list[Run]:
    receiver = FrameReceiver(frame_bytes_max=1 << 20)
    return [
        run
        for chunk in chunks
        for batch in receiver.receive(BUFFER, BUFFER.fill(chunk))
        for run in runs(batch)
    ]


def message(message_id: int, payload: bytes = b"16 bytes of load", **fields: int) -> bytes:
    return build_frame(MESSAGE, message_id=message_id, content=payload, **{"class_id": 1, **fields})


def assert_says_what_came(found: list[Run], data: bytes) -> None:
    """Every frame is in one run, in order, and each run's header is that of its frames."""
    assert b"".join(run.raw for run in found) == b"".join(split_frames(data)[0])
    for run in found:
        parsed = [parse_frame(frame) for frame in split_frames(run.raw)[0]]
        assert len(parsed) == run.count
        assert run.contents(0, run.count) == [content for *_, content in parsed]
        assert {kind for kind, *_ in parsed} == {run.frame_type}
        if run.is_deliverable:
            assert {class_id for _, class_id, *_ in parsed} == {run.class_id}
            assert {timer for *_, timer, _ in parsed} == {run.timer_index}
            assert [message_id for _, _, message_id, *_ in parsed] == list(run.ids)


@given(st.one_of(streams(), garbled_streams()).flatmap(chunkings))
def test_runs_say_what_came_whatever_came(chunks: Chunks) -> None:
    assert_says_what_came(runs_of(chunks), b"".join(chunks))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 120), st.booleans()), max_size=5))
def test_runs_of_messages_say_what_came(pieces: list[tuple[int, int, bool]]) -> None:
    """Long stretches of consecutive ids engage the array paths, equal lengths and unequal ones."""
    data = b""
    for first_id, count, uneven in pieces:
        for number in range(first_id, first_id + count):
            data += message(number, b"x" * (number % 7 if uneven else 5))
    assert_says_what_came(runs_of([data]), data)


def test_consecutive_messages_of_one_tick_are_one_run() -> None:
    data = b"".join(message(number, timer_index=3) for number in range(200))
    (run,) = runs_of([data])
    assert (run.ids, run.class_id, run.timer_index, run.raw) == (range(200), 1, 3, data)


@pytest.mark.parametrize(
    "second",
    [
        message(2),
        message(0),
        message(1, timer_index=1),
        message(1, class_id=2),
        build_frame(HEARTBEAT, class_id=1, message_id=1),
    ],
)
def test_anything_else_begins_a_run(second: bytes) -> None:
    assert [run.raw for run in runs_of([message(0) + second])] == [message(0), second]


def test_a_run_ends_at_the_wrap_of_the_ids() -> None:
    found = runs_of([message(ID_COUNT - 2) + message(ID_COUNT - 1) + message(0) + message(1)])
    assert [(run.ids, run.is_deliverable) for run in found] == [
        (range(ID_COUNT - 2, ID_COUNT), True),
        (range(2), True),
    ]


def test_ids_that_no_bus_gives_are_not_deliverable() -> None:
    data = message(0xFFFF_FFFF, class_id=1) + message(0, class_id=2)
    assert [run.is_deliverable for run in runs_of([data])] == [False]
    past = b"".join(message(number) for number in (ID_COUNT - 1, ID_COUNT))
    assert [run.is_deliverable for run in runs_of([past])] == [False]


@given(st.booleans(), st.integers(1, 150), st.data())
def test_a_part_of_a_run_is_a_run(uneven: bool, count: int, data: st.DataObject) -> None:
    payloads = [b"y" * (number % 5 if uneven else 3) for number in range(count)]
    whole = b"".join(message(9 + number, payload) for number, payload in enumerate(payloads))
    (run,) = runs_of([whole])
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    part = run.part(first, last)
    assert_says_what_came([part], part.raw)
    assert part.ids == range(9 + first, 9 + last)
    assert part.contents(0, part.count) == payloads[first:last] == run.contents(first, last)


@given(st.lists(st.booleans(), max_size=20))
def test_ranges_name_exactly_what_is_flagged(flags: list[bool]) -> None:
    ranges = ranges_of(np.array(flags, np.bool_))
    named = [index for first, last in ranges for index in range(first, last)]
    assert named == [index for index, flag in enumerate(flags) if flag]
    assert all(end < begin for (_, end), (begin, _) in pairwise(ranges))
