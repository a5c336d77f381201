"""Arrow columns contain the same values as messages that are decoded one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.channel.pattern import matches
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, decode, encode
from simplebus.spark.arrow_columns import (
    ACCEPT_TIME,
    CREATE_TIME,
    ColumnOptions,
    FetchedFrames,
    to_record_batch,
)

Sent = tuple[Envelope | None, bytes]

payloads = st.one_of(
    st.binary(max_size=12), st.lists(st.sampled_from(b"<\r\n\0x"), max_size=12).map(bytes)
)
texts = st.text("<\r\n\0ab", max_size=6)
envelopes = st.builds(
    Envelope,
    channel=st.sampled_from(["", "a", "a.b", "c.<x"]),
    key=payloads,
    headers=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    published=st.one_of(
        st.none(), st.integers(0, 10**15), st.just(int.from_bytes(b"\0\x05<\r\n\0\0\0", "big"))
    ),
    expires_ms=st.one_of(st.none(), st.just(0x3C0D0A00), st.integers(0, 2**63)),
    not_before_ms=st.one_of(st.none(), st.integers(0, 2**63)),
)
messages = st.lists(
    st.tuples(st.one_of(st.none(), envelopes), payloads).filter(
        lambda sent: sent[0] is not None or frames.DELIMITER not in sent[1]
    ),
    min_size=1,
    max_size=8,
)


def concatenate(
    sent: list[Sent], first: int, class_id: int, times: tuple[tuple[int, float], ...] = ((0, 5.5),)
) -> FetchedFrames:
    whole = [
        frames.encode(frames.MESSAGE, class_id=class_id, message_id=n, content=payload)
        if envelope is None
        else frames.encode(
            frames.ENVELOPE, class_id=class_id, message_id=n, content=encode(envelope, payload)
        )
        for n, (envelope, payload) in enumerate(sent, first)
    ]
    bounds = np.concatenate(([0], np.cumsum([len(frame) for frame in whole]))).astype(np.int64)
    return FetchedFrames.concatenate([(memoryview(b"".join(whole)), bounds)], first, times)


def oracle(
    fetched: FetchedFrames, shape: ColumnOptions, times: tuple[tuple[int, float], ...]
) -> list[dict[str, Any]]:
    """Return the expected rows, computed row by row."""
    rows = []
    for index, (begin, end) in enumerate(zip(fetched.bounds, fetched.bounds[1:], strict=False)):
        frame = fetched.raw[begin:end]
        envelope, payload = Envelope(), frame[9:-4]
        if frame[0] == frames.ENVELOPE:
            envelope, payload = decode(payload)
        if shape.channels and not any(
            matches(pattern, envelope.channel) for pattern in shape.channels
        ):
            continue
        stamp, kind = envelope.published, CREATE_TIME
        if stamp is None:
            seconds = next(t for n, t in reversed(times) if n <= fetched.first + index)
            stamp, kind = round(seconds * 1e6), ACCEPT_TIME
        row: dict[str, Any] = {
            "key": envelope.key or None,
            "value": payload,
            "topic": shape.topic,
            "partition": shape.class_id,
            "offset": fetched.first + index,
            "timestamp": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=stamp),
            "timestampType": kind,
            "channel": envelope.channel or None,
            "server": shape.server,
        }
        if shape.include_headers:
            headers = [{"key": n, "value": v.encode()} for n, v in envelope.headers]
            row["headers"] = headers or None
        if shape.memory is not None:
            row["memory"] = shape.memory
        rows.append(row)
    return rows


@given(
    messages,
    st.integers(1, 40),
    st.sampled_from([0, 7, 0x0A3E3C0D, 0x3C0D0A00]),
    st.sampled_from([7, 0x3C0D]),
    st.sampled_from([(), ("#",), ("a.*",), ("a", "c.#")]),
    st.booleans(),
    st.sampled_from([None, "m"]),
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1e10)), max_size=4),
)
def test_columns_contain_message_fields(
    sent: list[Sent],
    times: int,
    first: int,
    class_id: int,
    channels: tuple[str, ...],
    include_headers: bool,
    memory: str | None,
    later: list[tuple[int, float]],
) -> None:
    shape = ColumnOptions("s:1", "orders", class_id, channels, include_headers, memory)
    steps = {max(0, first - 3): 0.25, **{first + n: time for n, time in sorted(later)}}
    accepted = tuple(steps.items())
    whole = concatenate(sent * times, first, class_id, accepted)
    assert to_record_batch(whole, shape).to_pylist() == oracle(whole, shape, accepted)


@pytest.mark.parametrize("last", [b"same", b"other", b"", b"x"])
@pytest.mark.parametrize("envelope", [None, Envelope(key=b"k"), Envelope(channel="a", key=b"")])
def test_last_message_may_differ_from_equal_ones(envelope: Envelope | None, last: bytes) -> None:
    whole = concatenate([(envelope, b"same")] * 9 + [(None, last)], 3, 7)
    shape = ColumnOptions("s", "7", 7)
    assert to_record_batch(whole, shape).to_pylist() == oracle(whole, shape, ((0, 5.5),))


def test_parts_are_joined() -> None:
    first, second = (
        concatenate([(None, b"a"), (None, b"bc")], 5, 7),
        concatenate([(None, b"")], 7, 7),
    )
    joined = FetchedFrames.concatenate(
        [(memoryview(f.raw), f.bounds) for f in (first, second)], 5, [(4, 1.5)]
    )
    batch = to_record_batch(joined, ColumnOptions("s", "7", 7))
    assert batch["value"].to_pylist() == [b"a", b"bc", b""]
    assert batch["offset"].to_pylist() == [5, 6, 7]
    assert joined.acceptance_times().tolist() == [1_500_000] * 3
    assert joined.slice_sequences(0, 6).acceptance_times().tolist() == [1_500_000]
    assert joined.slice_sequences(0, 5).acceptance_times().tolist() == []


@pytest.mark.parametrize("times", [(), ((6, 1.0),)])
def test_messages_without_time_are_rejected(times: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="sent no acceptance time for message 5"):
        to_record_batch(
            concatenate([(None, b"a"), (None, b"b")], 5, 7, times), ColumnOptions("s", "7", 7)
        )


@pytest.mark.parametrize("content", [b"\x40", b"\x01", b"\x08\0\x05abc", b"\x20\0", b""])
def test_invalid_envelope_is_rejected_by_message(content: bytes) -> None:
    good = frames.encode(frames.ENVELOPE, class_id=7, content=encode(Envelope(), b"x" * 20))
    bad = frames.encode(frames.ENVELOPE, class_id=7, content=content)
    bounds = np.array([0, len(good), len(good) + len(bad), 2 * len(good) + len(bad)])
    three = FetchedFrames.concatenate([(memoryview(good + bad + good), bounds)], 3, [(3, 1.0)])
    with pytest.raises(ValueError, match="bad envelope with message 4"):
        to_record_batch(three, ColumnOptions("s", "7", 7))
