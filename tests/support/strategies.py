"""Hypothesis strategies biased towards input that breaks parsers.

Nothing is imported from simplebus, and all randomness comes from Hypothesis, so failures shrink
and replay. Streams repeat a few frames many times: that crosses the thresholds of the array paths
with few draws, and a failing example still shrinks to one frame.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tests.support.oracles import DELIMITER, ID_COUNT, build_frame

Chunks = list[bytes]

HEARTBEAT, MESSAGE, SUBSCRIBE, ACK, CONNECT = b"01234"

delimiter_bytes = st.sampled_from(DELIMITER)
"""A byte of the delimiter; framing looks at no other bytes."""

message_ids = st.one_of(
    st.integers(0, ID_COUNT - 1),
    st.sampled_from([0, 1, 0x0A3E3C0D, 0x3C0D0A3E, ID_COUNT - 2, ID_COUNT - 1]),
)


def contents(max_size: int = 24) -> st.SearchStrategy[bytes]:
    """Generate bytes without a delimiter, most of them made of its characters."""
    return st.one_of(
        st.lists(st.sampled_from(b"<\r\n>x"), max_size=max_size).map(bytes),
        st.binary(max_size=max_size),
    ).filter(lambda content: DELIMITER not in content)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Generate nine header bytes: arbitrary ones, or bytes of the delimiter only."""
    if draw(st.booleans()):
        return draw(st.binary(min_size=9, max_size=9))
    return bytes(draw(st.lists(delimiter_bytes, min_size=9, max_size=9)))


@st.composite
def frames(draw: st.DrawFn, max_content: int = 24) -> bytes:
    """Generate one whole frame of any type; its header often contains delimiters."""
    return draw(headers()) + draw(contents(max_content)) + DELIMITER


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Generate whole frames, usually with repetitions, followed by an incomplete frame.

    100 or more repetitions engage the uniform path of `split`, 51 or more frames of unequal lengths
    the array path, and fewer frames the plain loop.
    """
    runs = draw(
        st.lists(
            st.tuples(st.lists(frames(), min_size=1, max_size=3), st.integers(1, 140)), max_size=4
        )
    )
    whole = b"".join(b"".join(frame_list) * times for frame_list, times in runs)
    return whole + draw(frames())[: draw(st.integers(0, 12))]


@st.composite
def garbled_streams(draw: st.DrawFn) -> bytes:
    """Generate bytes with many parts of delimiters, long enough for the array paths."""
    pieces = st.sampled_from(
        [b"<", b"\r\n", b"<\r\n>", b"<\r\n", b"\r\n>", b">", b"12345678", b"1" * 9, b"0-1"]
    )
    some_pieces = st.lists(pieces, min_size=1, max_size=8)
    runs = draw(st.lists(st.tuples(some_pieces, st.integers(1, 90)), max_size=5))
    return b"".join(b"".join(frame_list) * times for frame_list, times in runs)


def chunkings(data: bytes) -> st.SearchStrategy[Chunks]:
    """Generate divisions of `data` into chunks, some of them empty."""
    return st.lists(st.integers(0, len(data)), max_size=8).map(lambda cuts: cut(data, cuts))


def cut(data: bytes, offsets: list[int]) -> Chunks:
    """Split the data at these offsets."""
    ends = [*sorted(offsets), len(data)]
    starts = [0, *ends[:-1]]
    return [data[start:end] for start, end in zip(starts, ends, strict=True)]


def ack_contents() -> st.SearchStrategy[bytes]:
    """Generate contents of Ack frames: valid ones of every width, and similar invalid ones."""
    numbers = st.one_of(
        st.integers(0, ID_COUNT + 2),
        st.sampled_from([0, 9, 10, 99_999_999, 100_000_000, 999_999_999, ID_COUNT - 1, ID_COUNT]),
    )

    def ranges(first: int, count: int, zeros: int) -> bytes:
        return b"0" * zeros + b"%d-%d" % (first, first + count)

    valid = st.builds(ranges, numbers, st.integers(1, 300), st.just(0))
    return st.one_of(
        valid,
        valid,
        st.builds(ranges, numbers, st.integers(-2, 3), st.integers(0, 10)),
        st.binary(max_size=4),
        st.lists(st.sampled_from(b"0159-:/ +\r<"), max_size=23).map(bytes),
        st.just(b""),
    ).filter(lambda content: DELIMITER not in content)


def ack_frame(class_id: int, content: bytes) -> bytes:
    return build_frame(ACK, class_id=class_id, content=content, timer_index=3)
