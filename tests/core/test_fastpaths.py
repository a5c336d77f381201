"""Every array path gives what its oracle gives, one frame, one ack, one message at a time.

One law: a fast path is work skipped because its result is known, never another answer. What is
below PLAIN_FRAMES_MAX frames takes plain loops; so the inputs here repeat a few frames often enough
to be far above it. Where a path can be told from outside, a test says that it was taken: else a
change of a threshold would silently take the arrays out of all of these tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    DELIMITER,
    ID_COUNT,
    AckOracle,
    RingOracle,
    build_frame,
    parse_ack,
    parse_frame,
    split_frames,
)
from strategies import (
    MESSAGE,
    SUBSCRIBE,
    ack_contents,
    ack_frame,
    frames,
    garbled_streams,
    streams,
)

from core.talk import Bus, ack, batch_of, connect, heartbeat, numbered, publish, subscribe
from simplebus.core import frames as wire
from simplebus.core.acks import AckWindow
from simplebus.core.budget import MemoryBudget
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.frames import FrameBatch, ack_ranges
from simplebus.core.limits import PLAIN_FRAMES_MAX, RING_IDLE_TICKS, RING_SLOTS_MIN
from simplebus.core.ring import Ring
from simplebus.core.split import Scratch, find_delimiters, split

MANY = 4 * PLAIN_FRAMES_MAX

# Splitting ---------------------------------------------------------------------------------------


def split_all(data: bytes, *, before: bytes = DELIMITER) -> tuple[list[FrameBatch], bytes]:
    """All batches that split finds in the middle of a larger buffer, and what is left over."""
    buffer = bytearray(before + data + DELIMITER * 4)
    scratch = Scratch(len(buffer))
    first, last = len(before), len(before) + len(data)
    batches = []
    while (batch := split(buffer, first, last, scratch)) is not None:
        batch.check()
        batches.append(batch.copy())
        first += batch.data.size
    return batches, bytes(buffer[first:last])


def frames_of(batch: FrameBatch) -> list[bytes]:
    data = batch.data.tobytes()
    starts, ends = batch.starts.tolist(), batch.ends.tolist()
    return [data[start:end] for start, end in zip(starts, ends, strict=True)]


def assert_splits(data: bytes) -> None:
    expected = split_frames(data)
    for before in (b"", DELIMITER, DELIMITER + b"<\r\n", b"<<<<<\r\n"):  # Aligned, and not.
        batches, leftover = split_all(data, before=before)
        assert ([frame for batch in batches for frame in frames_of(batch)], leftover) == expected


@given(streams())
def test_streams_split_as_the_oracle_splits_them(data: bytes) -> None:
    assert_splits(data)


@given(garbled_streams())
def test_garbled_streams_split_as_the_oracle_splits_them(data: bytes) -> None:
    assert_splits(data)


@given(frames(), frames(), frames(), st.integers(0, MANY), st.integers(0, 3), st.integers(0, 12))
def test_a_stranger_among_frames_of_one_length_is_found(
    usual: bytes, stranger: bytes, next_one: bytes, at: int, strangers: int, tail: int
) -> None:
    # The uniform path takes the frames in front of the stranger, or gives way to the arrays.
    data = usual * at + stranger * strangers + usual * (MANY - at) + next_one[:tail]
    assert_splits(data)


def test_frames_of_one_length_engage_the_uniform_path() -> None:
    frame = build_frame(MESSAGE, content=b"<x" * 8)
    batches, _ = split_all(frame * MANY)
    assert [(batch.stride, batch.count) for batch in batches] == [(len(frame), MANY)]


@given(st.lists(frames(), min_size=1, max_size=6), frames(), st.integers(0, 12))
def test_a_few_others_before_frames_of_one_length_change_nothing(
    others: list[bytes], usual: bytes, tail: int
) -> None:
    assert_splits(b"".join(others) + usual * 300 + others[0][:tail])


@pytest.mark.parametrize(("count", "engages"), [(1, True), (4, True), (5, False)])
def test_a_few_others_before_frames_of_one_length_keep_them_not_from_the_uniform_path(
    count: int, engages: bool
) -> None:
    others = [build_frame(MESSAGE, content=bytes(n)) for n in range(count)]
    frame = build_frame(MESSAGE, content=bytes(150))
    batches, _ = split_all(b"".join(others) + frame * 300)
    assert ((163, 300) in [(batch.stride, batch.count) for batch in batches]) == engages


def test_frames_of_many_lengths_engage_the_array_path() -> None:
    data = b"".join(build_frame(MESSAGE, content=b"x" * (i % 7)) for i in range(MANY))
    batches, _ = split_all(data)
    assert [(batch.stride, batch.count) for batch in batches] == [(0, MANY)]


@pytest.mark.parametrize("content", [b"", b"hi", b"\r\n>", b"<"])
@pytest.mark.parametrize("count", [2, MANY])
def test_headers_that_look_like_delimiters_end_nothing(content: bytes, count: int) -> None:
    # Uniform: it sees other delimiters and gives way. Arrays: some candidates lie in headers.
    for at in range(10):
        header = (b"1" * at + DELIMITER * 3)[:9]
        assert_splits((header + content + DELIMITER) * count)
        assert_splits((header + content + DELIMITER + header + b"y" + DELIMITER) * count)


@pytest.mark.parametrize("count", [3, MANY])
def test_a_delimiter_in_the_content_ends_the_frame_on_every_path(count: int) -> None:
    assert_splits((b"1" * 9 + b"one" + DELIMITER + b"two" + DELIMITER) * count)
    assert_splits((b"1" * 9 + b"one" + DELIMITER + b"2" * 9 + b"two" + DELIMITER) * count)
    assert_splits(DELIMITER * count)


@given(st.binary(max_size=20), st.integers(0, 29), st.integers(0, MANY), st.integers(1, 3))
def test_a_delimiter_written_over_a_frame_of_one_length_is_found(
    content: bytes, place: int, at: int, count: int
) -> None:
    # The lengths stay the same: only looking for every delimiter tells that frames end elsewhere.
    frame = build_frame(MESSAGE, content=content.replace(b"<", b"x"))
    place = min(place, len(frame) - 4)
    broken = frame[:place] + DELIMITER + frame[place + 4 :]
    assert_splits(frame * at + broken * count + frame * (MANY - at))


@given(st.lists(st.sampled_from([*b"<<<<\r\n>x=\xbd\0"]), max_size=200), st.data())
def test_delimiters_are_found_where_a_plain_search_finds_them(
    some: list[int], data: st.DataObject
) -> None:
    # Of letters that delimiters are made of, and that look like them to arithmetic on whole words.
    text = bytes(some).replace(b"x", DELIMITER)
    first = data.draw(st.integers(0, min(9, len(text))))
    last = data.draw(st.integers(max(first, len(text) - 9), len(text)))
    buffer = bytearray(text + DELIMITER * 4)
    positions, words = find_delimiters(buffer, first, last, Scratch(len(buffer)))
    expected = [found.start() for found in re.finditer(DELIMITER, text[first:last])]
    assert positions.tolist() == expected
    assert words.astype("<u8").tobytes() == b"".join(
        buffer[first + at : first + at + 8] for at in expected
    )


def test_bytes_beyond_the_last_one_asked_for_are_not_looked_at() -> None:
    frame = build_frame(MESSAGE, content=b"x")
    for count in (1, 17, MANY):
        data = frame * count
        for last in range(len(data) - len(frame), len(data) + 1):
            batch = split(bytearray(data + frame * 3), 0, last, Scratch(last))
            found = 0 if batch is None else batch.count
            assert found == last // len(frame)


# Batches -----------------------------------------------------------------------------------------

frame_lists = st.one_of(
    # Of one length: strided. Of many: not.
    st.tuples(frames(), st.integers(1, MANY)).map(lambda pair: [pair[0]] * pair[1]),
    st.lists(frames(), min_size=1, max_size=6).flatmap(
        lambda some: st.integers(1, 40).map(lambda times: some * times)
    ),
)


@given(frame_lists)
def test_a_batch_describes_its_frames(some: list[bytes]) -> None:
    batch = batch_of(*some)
    ends = [sum(len(frame) for frame in some[: i + 1]) for i in range(len(some))]
    assert batch.count == len(some)
    assert batch.ends.tolist() == ends
    assert batch.starts.tolist() == [0, *ends[:-1]]
    assert batch.lengths.tolist() == [len(frame) for frame in some]


@given(frame_lists)
def test_keys_are_alike_exactly_where_type_and_class_are(some: list[bytes]) -> None:
    keys = batch_of(*some).keys().tolist()
    kinds = [frame[:3] for frame in some]
    assert len(set(zip(keys, kinds, strict=True))) == len(set(keys)) == len(set(kinds))


@given(frame_lists, st.data())
def test_a_slice_is_the_slice_of_the_frames(some: list[bytes], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(some) - 1))
    last = data.draw(st.integers(first + 1, len(some)))
    part = batch_of(*some).slice(first, last)
    part.check()
    assert part.stride == batch_of(*some).stride, "the strided paths are lost"
    assert frames_of(part) == some[first:last]
    again = part.slice(0, part.count)
    assert frames_of(again) == some[first:last]


@given(frame_lists, st.data())
def test_taken_frames_are_the_frames_in_that_order(some: list[bytes], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(some))))
    order = order[: data.draw(st.integers(1, len(some)))]
    if data.draw(st.booleans()):
        order.sort()  # Neighbours: copied together.
    taken = batch_of(*some).take(np.array(order, np.intp))
    taken.check()
    assert frames_of(taken) == [some[i] for i in order]


@given(frame_lists)
def test_a_copy_is_the_same_elsewhere(some: list[bytes]) -> None:
    batch = batch_of(*some)
    copy = batch.copy()
    copy.check()
    assert frames_of(copy) == some
    assert not np.shares_memory(copy.data, batch.data)


# Acks --------------------------------------------------------------------------------------------


def ranges_one_by_one(contents: Sequence[bytes]) -> list[tuple[int, int]]:
    ranges = []
    for content in contents:
        expected = parse_ack(content)
        try:
            assert wire.ack_range(content) == expected
        except RemoteProtocolError:
            assert expected is None
            break
        ranges.append(wire.ack_range(content))
    return ranges


def assert_reads_acks(contents: Sequence[bytes]) -> None:
    firsts, lasts = ack_ranges(batch_of(*(ack_frame(1, content) for content in contents)))
    read = list(zip(firsts.tolist(), lasts.tolist(), strict=True))
    assert read == ranges_one_by_one(contents)


@given(st.lists(ack_contents(), min_size=1, max_size=6), st.integers(1, MANY), st.randoms())
def test_many_acks_read_as_each_of_them(some: list[bytes], times: int, random: Random) -> None:
    contents = some * times
    assert_reads_acks(contents)
    random.shuffle(contents)
    assert_reads_acks(contents)


@given(st.integers(0, ID_COUNT - 2 * MANY), st.integers(1, 3), st.integers(0, 3))
def test_acks_of_messages_in_a_row_read_as_each_of_them(first: int, step: int, zeros: int) -> None:
    # In columns where the digits stay as many, anywhere where they become more.
    contents = [
        b"0" * zeros + b"%d-%d" % (at, at + step) for at in range(first, first + step * MANY, step)
    ]
    assert_reads_acks(contents)


bad_acks = [
    b"",
    b"-",
    b"5-",
    b"-5",
    b"8-5",
    b"5-5",
    b"5:8",
    b"5-8 ",
    b"5/-8",
    b"5--8",
    b"00000000005-8",
    b"5-00000000008",
    b"0-2147483649",
    b"2147483648-2147483649",
    b"\xb5-\xb8",
]


@pytest.mark.parametrize("at", [0, 1, MANY // 2, MANY - 1])
@pytest.mark.parametrize("bad", bad_acks)
@pytest.mark.parametrize("good", [b"3-4", b"10-20", b"2147483647-2147483648", b"7--2147483648"])
def test_one_bad_ack_among_many_ends_the_ranges_there(good: bytes, bad: bytes, at: int) -> None:
    contents = [good] * MANY
    contents[at] = bad
    assert_reads_acks(contents)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("byte", [*b"/:-+ \x00\x80\xff\xb0"])
def test_a_byte_that_is_no_digit_is_noticed_in_every_place(place: int, byte: int) -> None:
    content = bytearray(b"1-2")
    content[place] = byte
    assert_reads_acks([b"1-2"] * MANY + [bytes(content)] + [b"1-2"] * MANY)
    assert_reads_acks([bytes(content)] * MANY)


def test_every_number_of_digits_reads_beside_every_other() -> None:
    numbers = [10**digits - 1 for digits in range(1, 10)] + [10**digits for digits in range(10)]
    contents = [b"%d-%d" % (a, b) for a in numbers for b in [*numbers, ID_COUNT] if a < b]
    assert len(contents) > PLAIN_FRAMES_MAX
    assert_reads_acks(contents)
    assert_reads_acks([content.replace(b"-", b"-0") for content in contents])


# Ack windows -------------------------------------------------------------------------------------


def window_after(
    floor: int, cursor: int, ranges: Sequence[tuple[int, int]], *, at_once: bool
) -> AckWindow:
    window = AckWindow(floor=floor)
    window.cursor = cursor
    if at_once:
        pairs = np.array(ranges, np.int64).reshape(-1, 2)
        window.ack(pairs[:, 0], pairs[:, 1])
    else:
        for first, last in ranges:
            window.ack_range(first, last)
    window.check()
    return window


def state_of(window: AckWindow | AckOracle) -> tuple[int, list[tuple[int, int]]]:
    return window.floor, window.unacked(window.floor, window.cursor)


@given(
    st.sampled_from([0, 100, 1020, ID_COUNT - 150, 7 * ID_COUNT - 1]),
    st.lists(st.tuples(st.integers(-20, 320), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([1, MANY // 2]),
    st.booleans(),
    st.booleans(),
    st.randoms(),
)
def test_many_acks_leave_the_window_as_each_of_them_does(
    floor: int,
    some: list[tuple[int, int]],
    times: int,
    singles: bool,
    shuffled: bool,
    random: Random,
) -> None:
    # Single messages, ranges that touch, and any ranges take three ways through the arrays.
    cursor = floor + 400
    ranges = [(floor + at + i, floor + at + i + n) for i in range(times) for at, n in some]
    if singles:
        ranges = [(first, first + 1) for first, _ in ranges]
    if shuffled:
        random.shuffle(ranges)
    ranges = [(min(first, cursor - 1), min(last, cursor)) for first, last in ranges]
    oracle = AckOracle(floor=floor, cursor=cursor)
    for first, last in ranges:
        oracle.acked.update(range(max(first, floor), last))
    at_once = window_after(floor, cursor, ranges, at_once=True)
    one_by_one = window_after(floor, cursor, ranges, at_once=False)
    assert state_of(at_once) == state_of(one_by_one) == state_of(oracle)


@given(st.lists(st.integers(1, 5), min_size=MANY, max_size=MANY), st.integers(-3, 3))
def test_ranges_that_touch_leave_the_window_as_each_of_them_does(
    lengths: list[int], start: int
) -> None:
    ends = np.cumsum([start, *lengths]).tolist()
    ranges = list(pairwise(ends))
    at_once = window_after(0, 5 * MANY + 3, ranges, at_once=True)
    one_by_one = window_after(0, 5 * MANY + 3, ranges, at_once=False)
    assert state_of(at_once) == state_of(one_by_one)


# Rings -------------------------------------------------------------------------------------------

MESSAGES_MAX = 3000
CLASS_ID = 0x8C0D


def stored(content: bytes) -> bytes:
    return build_frame(MESSAGE, class_id=CLASS_ID, content=content)


class Rings:
    """The same messages in a ring by batches, in another one by one, and in the oracle."""

    def __init__(self, *, first: int = 0, bytes_max: int = 1 << 22) -> None:
        self.batched, self.single = (
            Ring(
                class_id=CLASS_ID,
                messages_max=MESSAGES_MAX,
                bytes_max=bytes_max,
                budget=MemoryBudget(1 << 30),
            )
            for _ in range(2)
        )
        self.oracle = RingOracle(floor=first)
        for ring in (self.batched, self.single):
            ring.floor = ring.head = first

    def append(self, some: Sequence[bytes], *, timer_index: int) -> None:
        taken = self.batched.append(batch_of(*some), timer_index)
        one_by_one = 0
        for frame in some:
            if not self.single.append_one(memoryview(frame), timer_index) and not (
                self.single.append(batch_of(frame), timer_index)
            ):
                break
            one_by_one += 1
        assert taken == one_by_one
        for frame in some[:taken]:
            frame_type, class_id, _, _, content = parse_frame(frame)
            self.oracle.append(
                build_frame(
                    frame_type,
                    class_id=class_id,
                    content=content,
                    message_id=self.oracle.head % ID_COUNT,
                    timer_index=timer_index,
                )
            )
        self.check()

    def release(self, count: int) -> None:
        floor = min(self.batched.floor + count, self.batched.head)
        self.oracle.release(self.oracle.floor, floor)
        for ring in (self.batched, self.single):
            ring.release(floor)
        self.check()

    def stamp(self, first: int, last: int, timer_index: int) -> None:
        for ring in (self.batched, self.single):
            ring.stamp(first, last, timer_index)
        for sequence in range(first, last):
            frame = self.oracle.frames[sequence]
            self.oracle.frames[sequence] = frame[:7] + timer_index.to_bytes(2, "big") + frame[9:]
        self.check()

    def tick(self, times: int) -> None:
        for _ in range(times):
            self.batched.tick()
            self.single.tick()
        self.check()

    def check(self) -> None:
        oracle = self.oracle
        for ring in (self.batched, self.single):
            ring.check()
            assert (ring.floor, ring.head) == (oracle.floor, oracle.head)
            gathered, at = b"", ring.floor
            while at < ring.head:
                piece, at = ring.piece(at, ring.head, 1 << 30)
                gathered += piece
            assert gathered == oracle.read(ring.floor, ring.head)
        assert self.batched.statistics() == self.single.statistics()


ring_floors = st.sampled_from([0, 250, ID_COUNT - 100, 3 * ID_COUNT - 1])
"""From the beginning, from just before the slots wrap, and from just before the ids do."""


@given(
    ring_floors,
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=3),
            st.integers(0, 500),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_a_ring_filled_by_batches_is_one_filled_one_by_one(
    first: int, steps: list[tuple[list[tuple[int, int]], int, int]]
) -> None:
    # Runs of one length: strided. Several: by columns. Short ones: the plain loop.
    rings = Rings(first=first)
    for runs, released, timer_index in steps:
        some = [
            stored(b"%d" % number + b"y" * size)
            for number, (size, count) in enumerate(runs)
            for _ in range(count)
        ]
        rings.append(some, timer_index=timer_index)
        rings.release(released)


@given(st.integers(150, 2100), st.integers(1, 40), st.integers(20, 60))
def test_a_ring_that_wraps_and_grows_and_shrinks_is_one_filled_one_by_one(
    size: int, uneven: int, count: int
) -> None:
    # A backlog of `count` frames or two: the arena wraps again and again, and grows when it must.
    rings = Rings(first=ID_COUNT - 2 * count)
    for turn in range(8):
        some = [stored(b"z" * (size + (turn * i) % uneven)) for i in range(count)]
        rings.append(some, timer_index=turn % 3)
        if turn != 3:
            rings.release(count - turn)
    rings.stamp(rings.oracle.floor + 1, rings.oracle.head - 1, 5)
    rings.release(len(rings.batched) - 2)
    rings.tick(2 * RING_IDLE_TICKS)
    rings.append([stored(b"more")] * MANY, timer_index=5)
    rings.release(1 << 30)
    rings.tick(2 * RING_IDLE_TICKS)
    assert rings.batched.statistics().memory_bytes == 0
    rings.append([stored(b"again")] * 3, timer_index=1)


@pytest.mark.parametrize("size", [0, 1000, 30_000])
def test_a_full_ring_takes_as_many_by_batches_as_one_by_one(size: int) -> None:
    # Full by messages, by bytes, and by bytes with a useless rest at the arena's end.
    rings = Rings(bytes_max=1 << 18)
    frame = stored(b"f" * size)
    for turn in range(3):
        rings.append([frame] * (MESSAGES_MAX + 10), timer_index=turn)
        assert 0 < len(rings.batched) <= MESSAGES_MAX
        rings.release(1 + turn * 3)


def test_ids_wrap_inside_one_batch_on_every_path() -> None:
    same = [stored(b"s")] * MANY
    uneven = [stored(b"u" * (i % 5)) for i in range(MANY)]
    for some in (same, uneven, uneven[:10]):
        rings = Rings(first=ID_COUNT - 5)
        rings.append(some, timer_index=2)
        assert rings.batched.frame(ID_COUNT - 1)[3:7] == b"\x7f\xff\xff\xff"
        assert rings.batched.frame(ID_COUNT)[3:7] == b"\0\0\0\0"


def test_slots_wrap_inside_one_batch_on_every_path() -> None:
    same = [stored(b"s")] * MANY
    uneven = [stored(b"u" * (i % 5)) for i in range(MANY)]
    for some in (same, uneven, uneven[:10]):
        rings = Rings(first=RING_SLOTS_MIN - 5)
        rings.append(some, timer_index=2)
        rings.stamp(RING_SLOTS_MIN - 3, RING_SLOTS_MIN + 3, 4)


# Sessions ----------------------------------------------------------------------------------------

CLASSES = (0, 1, 256, 0x3C0D)
"""Named from the beginning. 1 and 256 differ in the order of their bytes; the last one's id is half
a delimiter."""
LATE = 77
"""Named in the middle, perhaps."""
SENT = 80
"""Messages that every subscription has been sent beforehand."""

usual_frames = st.one_of(
    st.builds(publish, st.sampled_from(CLASSES), st.binary(max_size=3)),
    st.builds(publish, st.sampled_from(CLASSES), st.sampled_from([b"", b"<\r\n", b"longer" * 9])),
    st.builds(
        lambda class_id, first, count: ack(class_id, first, first + count),
        st.sampled_from((*CLASSES, LATE)),
        st.integers(0, SENT + 5),
        st.integers(1, 9),
    ),
    st.just(heartbeat()),
)
rare_frames = st.one_of(
    st.just(connect(LATE, 1)),
    st.sampled_from((*CLASSES, LATE)).map(subscribe),
    st.just(publish(LATE, b"perhaps unknown")),
)
bad_frames = st.one_of(
    st.just(build_frame(ord("9"), class_id=1)),
    st.just(publish(3, b"nobody named this class")),
    st.sampled_from([b"", b"5-5", b"x-y"]).map(lambda content: ack_frame(1, content)),
    st.just(build_frame(SUBSCRIBE - 0x30, class_id=1)),
    st.just(connect(-1)),
)


def outcome(chunks: Sequence[bytes]) -> tuple[object, ...]:
    """Everything that can be seen of a broker after one of its peers has said this."""
    bus = Bus()
    speaker = bus.peer(connect(*CLASSES), *(subscribe(c) for c in CLASSES[:3]))
    listener = bus.peer(*(subscribe(c) for c in CLASSES[1:]))
    for class_id in CLASSES:
        speaker.say(publish(class_id, *numbered(SENT)))
    assert len(speaker.hear()) == len(listener.hear()) == 3 * SENT
    reason: Reason | None = None
    try:
        speaker.say(*chunks)
    except RemoteProtocolError as error:
        reason = error.reason
    broker = bus.broker
    heard = [
        {class_id: [m for m in peer if m.class_id == class_id] for class_id in (*CLASSES, LATE)}
        for peer in (speaker.hear(), listener.hear())
    ]
    unacked = [
        (subscription.class_id, state_of(subscription.window))
        for cls in broker.classes.values()
        for subscription in cls.subscriptions
    ]
    stored = {
        class_id: [cls.ring.frame(s) for s in range(cls.ring.floor, cls.ring.head)]
        for class_id, cls in broker.classes.items()
    }
    return reason, dict(broker.refused), speaker.session.receiver.frames, heard, unacked, stored


def assert_same_outcome(some: Sequence[bytes]) -> None:
    at_once, one_by_one = outcome([b"".join(some)]), outcome(some)
    assert at_once[0] == one_by_one[0]
    assert at_once[1] == one_by_one[1]
    if at_once[0] is None:  # A refused chunk has counted the frames behind the offence as well.
        assert at_once[2] == one_by_one[2]
    assert at_once[3:] == one_by_one[3:]


@given(st.lists(usual_frames, min_size=1, max_size=12), st.sampled_from([1, 12]), st.randoms())
def test_messages_and_acks_of_many_classes_mix_as_if_they_came_one_by_one(
    some: list[bytes], times: int, random: Random
) -> None:
    # Shuffled, there are more changes of type and class than runs are gone through one by one.
    some = some * times
    random.shuffle(some)
    assert_same_outcome(some)


@given(
    st.lists(usual_frames, min_size=2, max_size=12),
    st.lists(rare_frames, max_size=4),
    st.lists(bad_frames, max_size=2),
    st.sampled_from([1, 12]),
    st.randoms(),
)
def test_anything_else_between_them_keeps_its_place(
    some: list[bytes], rare: list[bytes], bad: list[bytes], times: int, random: Random
) -> None:
    some = some * times + rare + bad
    random.shuffle(some)
    assert_same_outcome(some)


@given(
    st.lists(usual_frames, min_size=1, max_size=12),
    st.sampled_from([1, 12]),
    st.integers(1, 100),
    st.randoms(),
)
def test_full_classes_end_up_as_if_frames_came_one_by_one(
    some: list[bytes], times: int, class_messages: int, random: Random
) -> None:
    # What waits for room meanwhile may differ, as acks go before messages. What comes out may not.
    some = some * times
    random.shuffle(some)
    outcomes = []
    for chunks in ([b"".join(some)], some):
        bus = Bus(class_messages=class_messages)
        speaker = bus.peer(connect(*CLASSES), *(subscribe(class_id) for class_id in CLASSES))
        speaker.say(*chunks)
        heard: dict[int, list[tuple[int, bytes]]] = {class_id: [] for class_id in CLASSES}
        while messages := speaker.hear():
            for message in messages:
                heard[message.class_id].append((message.message_id, message.payload))
                speaker.say(ack(message.class_id, message.message_id, message.message_id + 1))
        assert not speaker.session.parked
        outcomes.append(heard)
    assert outcomes[0] == outcomes[1]


def test_classes_in_turn_engage_sorting_and_lose_nothing() -> None:
    some = [publish(class_id, payload) for payload in numbered(MANY) for class_id in CLASSES]
    bus = Bus()
    speaker = bus.peer(connect(*CLASSES), *(subscribe(c) for c in CLASSES))
    speaker.say(b"".join(some))
    heard = speaker.hear()
    for class_id in CLASSES:
        of_class = [m for m in heard if m.class_id == class_id]
        assert [m.message_id for m in of_class] == list(range(MANY))
        assert [m.payload for m in of_class] == numbered(MANY)


@pytest.mark.parametrize("bad_at", [0, 1, MANY, 2 * MANY - 1])
def test_frames_before_a_bad_one_count_and_those_behind_it_do_not(bad_at: int) -> None:
    some = [publish(1 if i % 2 else 256, b"%d" % i) for i in range(2 * MANY)]
    some[bad_at] = ack_frame(0, b"8-5")
    bus = Bus()
    speaker = bus.peer(connect(1, 256))
    assert speaker.is_refused(b"".join(some)) is Reason.BAD_ACK
    assert bus.statistics(1).published == bad_at // 2
    assert bus.statistics(256).published == (bad_at + 1) // 2


def test_acks_over_the_wrap_among_many_mean_the_right_messages() -> None:
    ranges = [(i % ID_COUNT, i % ID_COUNT + 1) for i in range(ID_COUNT - 30, ID_COUNT + MANY)]
    oracle = AckOracle(floor=ID_COUNT - 30, cursor=ID_COUNT + MANY)
    window = AckWindow(floor=ID_COUNT - 30)
    window.cursor = ID_COUNT + MANY
    pairs = np.array(ranges[1:], np.int64)
    window.ack(*window.sequences(pairs[:, 0], pairs[:, 1]))
    window.check()
    for first, last in ranges[1:]:
        oracle.ack_ids(first, last)
    assert state_of(window) == state_of(oracle) == (ID_COUNT - 30, [(ID_COUNT - 30, ID_COUNT - 29)])
