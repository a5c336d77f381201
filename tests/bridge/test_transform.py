"""Rewriting of frames, one message at a time and in runs."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from simplebus.bridge.channel_map import ChannelMap
from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.loop_header import PATH_HEADER
from simplebus.bridge.transform import FrameRewriter, MessageRun, RewrittenFrames, SkipReason
from simplebus.core.protocol import envelope_batch as envelopes
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import DELIMITER


def plain_message(payload: bytes, number: int = 0) -> bytes:
    return frames.encode(frames.MESSAGE, class_id=1, message_id=number, content=payload)


def encode_message(envelope: Envelope, payload: bytes) -> bytes:
    return frames.encode(frames.ENVELOPE, class_id=1, content=envelopes.encode(envelope, payload))


def create_run(
    messages: list[bytes], ages: list[float] | None = None, first: int = 0
) -> MessageRun:
    bounds = np.cumsum([0, *map(len, messages)]).astype(np.int64)
    sequences = np.arange(first, first + len(messages), dtype=np.int64)
    return MessageRun(
        b"".join(messages), bounds, sequences, 0.0 if ages is None else np.array(ages)
    )


def decode_frames(copies: RewrittenFrames) -> list[tuple[int, Envelope, bytes]]:
    """Return class, envelope and payload of each frame, as a bus reads them."""
    found = []
    for raw, bounds in copies.frames():
        assert bytes(raw).startswith(DELIMITER)
        for start, end in pairwise(bounds.tolist()):
            frame = bytes(raw)[4 + start : 4 + end]
            kind, class_id, _, _ = frames.HEADER.unpack_from(frame)
            assert kind == frames.ENVELOPE
            assert frame.endswith(DELIMITER)
            assert DELIMITER not in frame[9:-4]
            found.append((class_id, *envelopes.decode(frame[9:-4])))
        assert len(raw) == 4 + bounds[-1]
    return found


def rewriter(**options: object) -> FrameRewriter:
    return FrameRewriter(**{"class_id": 7, "source": "a", "targets": "b", **options})  # type: ignore[arg-type]


def rewrite_all(
    messages: list[bytes], *, ages: list[float] | None = None, **options: object
) -> RewrittenFrames:
    copies = RewrittenFrames()
    rewriter(**options).rewrite_run(create_run(messages, ages), copies)
    return copies


def test_adds_bridge_path() -> None:
    for count in (1, 100):
        copies = rewrite_all([plain_message(b"%03d" % n, n) for n in range(count)])
        assert decode_frames(copies) == [
            (7, Envelope(headers=((PATH_HEADER, "a"),)), b"%03d" % n) for n in range(count)
        ]
        assert copies.all_sequences().tolist() == list(range(count))


def test_keeps_envelope_fields() -> None:
    original = Envelope("x.y", b"key", (("h", "1"), (PATH_HEADER, "z"), ("h", "2")), 12345)
    for count in (1, 100):
        copies = rewrite_all([encode_message(original, b"%03d" % n) for n in range(count)])
        now = original._replace(headers=(("h", "1"), ("h", "2"), (PATH_HEADER, "z a")))
        assert decode_frames(copies) == [(7, now, b"%03d" % n) for n in range(count)]


def test_keeps_times_and_keys_of_each_message() -> None:
    messages = [Envelope("c", b"%02d" % n, (("h", "1"),), 10**15 + n) for n in range(60)]
    for sizes in (1, 7):
        raw = [encode_message(each, bytes(n % sizes)) for n, each in enumerate(messages)]
        headers = (("h", "1"), (PATH_HEADER, "a"))
        assert decode_frames(rewrite_all(raw)) == [
            (7, each._replace(headers=headers), bytes(n % sizes)) for n, each in enumerate(messages)
        ]


def test_skips_looped_messages() -> None:
    looped = encode_message(Envelope(headers=((PATH_HEADER, "b c"),)), b"1")
    copies = rewrite_all([looped] * 100 + [plain_message(b"2")])
    assert (copies.skipped_counts, len(decode_frames(copies))) == ({SkipReason.LOOPED: 100}, 1)
    source_bus = encode_message(Envelope(headers=((PATH_HEADER, "a c"),)), b"1")
    assert rewrite_all([source_bus]).skipped_counts == {SkipReason.LOOPED: 1}
    one_step = encode_message(Envelope(headers=((PATH_HEADER, "z"),)), b"1")
    assert rewrite_all([one_step, plain_message(b"2")], hops_max=1).skipped_counts == {
        SkipReason.LOOPED: 1
    }
    target = encode_message(Envelope(headers=((PATH_HEADER, " ".join(map(str, range(16)))),)), b"1")
    assert rewrite_all([target] * 20).skipped_counts == {SkipReason.LOOPED: 20}


def test_filters_and_renames_channels() -> None:
    messages = [
        encode_message(Envelope("orders.eu.paid"), b"1"),
        encode_message(Envelope("orders.us.paid"), b"2"),
        plain_message(b"3"),
    ]
    copies = rewrite_all(
        messages,
        channels=("orders.eu.#",),
        channel_map=ChannelMap([("orders.*.#", "*.orders.#")]),
    )
    assert [(e.channel, p) for _, e, p in decode_frames(copies)] == [("eu.orders.paid", b"1")]
    assert copies.skipped_counts == {SkipReason.FILTERED: 2}
    assert copies.all_sequences().tolist() == [0]


def test_subtracts_elapsed_time_from_expiry() -> None:
    timed = encode_message(Envelope(expires_ms=5000, not_before_ms=3000), b"1")
    copies = rewrite_all([timed] * 3, ages=[1.0, 4.0, 5.0])
    assert [(e.expires_ms, e.not_before_ms) for _, e, _ in decode_frames(copies)] == [
        (4000, 2000),
        (1000, 0),
    ]
    assert copies.skipped_counts == {SkipReason.EXPIRED: 1}


def test_rejected_messages_have_reasons() -> None:
    copies = rewrite_all([plain_message(bytes(100)), plain_message(b"x")] * 20, frame_bytes_max=100)
    assert copies.skipped_counts == {SkipReason.REJECTED: 20}
    assert copies.all_sequences().tolist() == list(range(1, 40, 2))
    assert copies.rejected[0] == (0, "its frame has 132 bytes, expected at most 100")


ENVELOPES = st.builds(
    Envelope,
    st.sampled_from(["", "a", "a.b", "é.\N{SNOWMAN}"]),
    st.sampled_from([b"", b"<", b"k1", b"<\r", b"\r\n>", b"<\r\n>"]),
    st.sampled_from(
        [
            (),
            ((PATH_HEADER, "z"),),
            ((PATH_HEADER, "b"),),
            (("h", "<\r\n"),),
            (("h", ""), (PATH_HEADER, "z y")),
        ]
    ),
    st.sampled_from([None, 5, 0x3C0D0A3E, 0x3C0D0A]),
    st.sampled_from([None, None, 0, 1500]),
    st.sampled_from([None, None, 700]),
)
PAYLOADS = st.sampled_from([b"", b"x", b"y", b"<", b"\n>", b"<\r\n", b"\r\n>", b"longer"])
FRAMES = st.one_of(
    st.builds(
        plain_message,
        st.sampled_from([b"", b"x", b"<\r\n", b"<", b"\n>", b"\r", b"longer"]),
        st.sampled_from(
            [0, 0x3C0D0A3E, 0x0D0D0D0D, 0x3C]
        ),  # Numbers whose bytes look like a delimiter.
    ),
    st.builds(encode_message, ENVELOPES, PAYLOADS),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(FRAMES, min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.sampled_from([(), ("a.#",), ("#",)]),
    st.sampled_from([[], [("#", "site.#")]]),
    st.sampled_from([40, 1 << 20]),
)
def test_rewrite_run_equals_single_rewrites(
    kinds: list[bytes],
    order: list[int],
    channels: tuple[str, ...],
    rules: list[tuple[str, str]],
    max_bytes: int,
) -> None:
    messages = [kinds[kind_index % len(kinds)] for kind_index in order]
    messages = [message for message in messages if message[0] == messages[0][0]]
    ages = [0.1 * index for index in range(len(messages))]
    source_bus = rewriter(
        channels=channels, channel_map=ChannelMap(rules), frame_bytes_max=max_bytes
    )
    copies, single_frames = RewrittenFrames(), RewrittenFrames()
    source_bus.rewrite_run(create_run(messages, ages), copies)
    source_bus._rewrite_each(create_run(messages, ages), single_frames)
    assert decode_frames(copies) == decode_frames(single_frames)
    assert b"".join(copies.raws) == b"".join(single_frames.raws)
    assert copies.all_sequences().tolist() == single_frames.all_sequences().tolist()
    assert (copies.skipped_counts, copies.rejected) == (
        single_frames.skipped_counts,
        single_frames.rejected,
    )


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (("a.*", "b.*.*"), "has 2 '\\*'"),
        (("a.*", "b.#"), "does not end"),
        (("a.#", "#.b"), "must be the last segment"),
        (("a.#", "a..b"), "empty segment"),
        (("a..b", "b"), "is empty"),
    ],
)
def test_rejects_invalid_rewrite_rule(rule: tuple[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ChannelMap([rule])


@pytest.mark.parametrize(
    ("pattern", "template", "channel", "expected"),
    [
        ("#", "site.#", "", "site"),
        ("#", "site.#", "a.b", "site.a.b"),
        ("site.#", "#", "site.a", "a"),
        ("site.#", "#", "site", ""),
        ("*.x.*", "*.y", "a.x.b", "a.y"),
        ("a.>", "b.#", "a.c.d", "b.c.d"),
        ("a.>", "b.#", "a", "a"),
        ("a.*", "", "a.b", ""),
    ],
)
def test_channels_are_renamed(pattern: str, template: str, channel: str, expected: str) -> None:
    assert ChannelMap([(pattern, template)]).map_channel(channel) == expected


@settings(max_examples=20)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=20), st.booleans())
def test_batch_checksums_equal_single_ones(payloads: list[bytes], is_plain: bool) -> None:
    """The checksums depend neither on the position in memory nor on the message number."""
    encode = plain_message if is_plain else partial(encode_message, Envelope(channel="x"))
    messages = [encode(payload.replace(b"<", b"")) for payload in payloads]
    marks = [MessageFingerprint.from_frame(message, 0.0).checksum for message in messages]
    run = create_run(messages)
    assert run.checksums().tolist() == marks
    assert run.slice(1, run.count).checksums().tolist() == marks[1:]
    if is_plain:
        renumbered = [plain_message(frame[9:-4], 7) for frame in messages]
        assert create_run(renumbered).checksums().tolist() == marks
