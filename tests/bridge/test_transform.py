"""What becomes of messages on their way, one by one and many at once."""

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


def message(payload: bytes, number: int = 0) -> bytes:
    return frames.encode(frames.MESSAGE, class_id=1, message_id=number, content=payload)


def enveloped(envelope: Envelope, payload: bytes) -> bytes:
    return frames.encode(frames.ENVELOPE, class_id=1, content=envelopes.encode(envelope, payload))


def piece_of(those: list[bytes], ages: list[float] | None = None, first: int = 0) -> MessageRun:
    bounds = np.cumsum([0, *map(len, those)]).astype(np.int64)
    sequences = np.arange(first, first + len(those), dtype=np.int64)
    return MessageRun(b"".join(those), bounds, sequences, 0.0 if ages is None else np.array(ages))


def read(copies: RewrittenFrames) -> list[tuple[int, Envelope, bytes]]:
    """What a bus there would make of it: class, envelope, payload."""
    found = []
    for raw, bounds in copies.frames():
        assert bytes(raw).startswith(DELIMITER)
        for begin, end in pairwise(bounds.tolist()):
            frame = bytes(raw)[4 + begin : 4 + end]
            kind, class_id, _, _ = frames.HEADER.unpack_from(frame)
            assert kind == frames.ENVELOPE
            assert frame.endswith(DELIMITER)
            assert DELIMITER not in frame[9:-4]
            found.append((class_id, *envelopes.decode(frame[9:-4])))
        assert len(raw) == 4 + bounds[-1]
    return found


def rewriter(**more: object) -> FrameRewriter:
    return FrameRewriter(**{"class_id": 7, "source": "a", "targets": "b", **more})  # type: ignore[arg-type]


def copied(
    those: list[bytes], *, ages: list[float] | None = None, **more: object
) -> RewrittenFrames:
    copies = RewrittenFrames()
    rewriter(**more).rewrite_run(piece_of(those, ages), copies)
    return copies


def test_adds_bridge_path() -> None:
    for count in (1, 100):
        copies = copied([message(b"%03d" % n, n) for n in range(count)])
        assert read(copies) == [
            (7, Envelope(headers=((PATH_HEADER, "a"),)), b"%03d" % n) for n in range(count)
        ]
        assert copies.all_sequences().tolist() == list(range(count))


def test_keeps_envelope_fields() -> None:
    was = Envelope("x.y", b"key", (("h", "1"), (PATH_HEADER, "z"), ("h", "2")), 12345)
    for count in (1, 100):
        copies = copied([enveloped(was, b"%03d" % n) for n in range(count)])
        now = was._replace(headers=(("h", "1"), ("h", "2"), (PATH_HEADER, "z a")))
        assert read(copies) == [(7, now, b"%03d" % n) for n in range(count)]


def test_keeps_times_and_keys_of_each_message() -> None:
    those = [Envelope("c", b"%02d" % n, (("h", "1"),), 10**15 + n) for n in range(60)]
    for sizes in (1, 7):
        raw = [enveloped(each, bytes(n % sizes)) for n, each in enumerate(those)]
        headers = (("h", "1"), (PATH_HEADER, "a"))
        assert read(copied(raw)) == [
            (7, each._replace(headers=headers), bytes(n % sizes)) for n, each in enumerate(those)
        ]


def test_skips_looped_messages() -> None:
    been = enveloped(Envelope(headers=((PATH_HEADER, "b c"),)), b"1")
    copies = copied([been] * 100 + [message(b"2")])
    assert (copies.skipped_counts, len(read(copies))) == ({SkipReason.LOOPED: 100}, 1)
    here = enveloped(Envelope(headers=((PATH_HEADER, "a c"),)), b"1")
    assert copied([here]).skipped_counts == {SkipReason.LOOPED: 1}
    one_step = enveloped(Envelope(headers=((PATH_HEADER, "z"),)), b"1")
    assert copied([one_step, message(b"2")], hops_max=1).skipped_counts == {SkipReason.LOOPED: 1}
    far = enveloped(Envelope(headers=((PATH_HEADER, " ".join(map(str, range(16)))),)), b"1")
    assert copied([far] * 20).skipped_counts == {SkipReason.LOOPED: 20}


def test_filters_and_renames_channels() -> None:
    those = [
        enveloped(Envelope("orders.eu.paid"), b"1"),
        enveloped(Envelope("orders.us.paid"), b"2"),
        message(b"3"),
    ]
    copies = copied(
        those,
        channels=("orders.eu.#",),
        channel_map=ChannelMap([("orders.*.#", "*.orders.#")]),
    )
    assert [(e.channel, p) for _, e, p in read(copies)] == [("eu.orders.paid", b"1")]
    assert copies.skipped_counts == {SkipReason.FILTERED: 2}
    assert copies.all_sequences().tolist() == [0]


def test_subtracts_elapsed_time_from_expiry() -> None:
    timed = enveloped(Envelope(expires_ms=5000, not_before_ms=3000), b"1")
    copies = copied([timed] * 3, ages=[1.0, 4.0, 5.0])
    assert [(e.expires_ms, e.not_before_ms) for _, e, _ in read(copies)] == [
        (4000, 2000),
        (1000, 0),
    ]
    assert copies.skipped_counts == {SkipReason.EXPIRED: 1}


def test_rejected_messages_have_reasons() -> None:
    copies = copied([message(bytes(100)), message(b"x")] * 20, frame_bytes_max=100)
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
        message,
        st.sampled_from([b"", b"x", b"<\r\n", b"<", b"\n>", b"\r", b"longer"]),
        st.sampled_from([0, 0x3C0D0A3E, 0x0D0D0D0D, 0x3C]),  # A header may look like anything.
    ),
    st.builds(enveloped, ENVELOPES, PAYLOADS),
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
    most: int,
) -> None:
    those = [kinds[which % len(kinds)] for which in order]
    those = [each for each in those if each[0] == those[0][0]]
    ages = [0.1 * index for index in range(len(those))]
    here = rewriter(channels=channels, channel_map=ChannelMap(rules), frame_bytes_max=most)
    copies, one_by_one = RewrittenFrames(), RewrittenFrames()
    here.rewrite_run(piece_of(those, ages), copies)
    here._rewrite_each(piece_of(those, ages), one_by_one)
    assert read(copies) == read(one_by_one)
    assert b"".join(copies.raws) == b"".join(one_by_one.raws)
    assert copies.all_sequences().tolist() == one_by_one.all_sequences().tolist()
    assert (copies.skipped_counts, copies.rejected) == (
        one_by_one.skipped_counts,
        one_by_one.rejected,
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
    """Wherever in memory they are, and whatever their numbers."""
    sort = message if is_plain else partial(enveloped, Envelope(channel="x"))
    those = [sort(payload.replace(b"<", b"")) for payload in payloads]
    marks = [MessageFingerprint.from_frame(each, 0.0).checksum for each in those]
    whole = piece_of(those)
    assert whole.checksums().tolist() == marks
    assert whole.slice(1, whole.count).checksums().tolist() == marks[1:]
    if is_plain:
        numbered = [message(frame[9:-4], 7) for frame in those]
        assert piece_of(numbered).checksums().tolist() == marks
