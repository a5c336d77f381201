"""Envelopes: one at a time against a parser that reads byte by byte, batches against one at a time.

The oracle here is written from `protocol/binary.md` and knows nothing of simplebus. Batches of more
than PLAIN_FRAMES_MAX frames with the same fields engage the arrays; bytes are mostly those of the
delimiter and NUL, which is what stuffing is made of.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from simplebus.core.limits import CHANNEL_BYTES_MAX, PLAIN_FRAMES_MAX
from simplebus.core.protocol import envelope as protocol_envelope
from simplebus.core.protocol import envelope_batch as envelopes
from simplebus.core.protocol.envelope_batch import (
    Envelope,
    EnvelopeColumns,
    decode,
    encode,
    scan_envelopes,
)
from simplebus.core.protocol.frames import FrameBatch
from tests.behaviour.wire_peer import build_batch
from tests.support.oracles import DELIMITER, build_frame

ENVELOPE = ord("5")
MANY = 2 * PLAIN_FRAMES_MAX
OPEN = b"<\r\n"
NEVER = float("inf")

FULL = Envelope(
    channel="orders.eu",
    key=b"k1",
    headers=(("trace", "ab"), ("trace", "")),
    published=1_763_700_000_000_000,
    expires_ms=30_000,
    not_before_ms=5,
)


# The oracle --------------------------------------------------------------------------------------


class RefusedError(Exception):
    """Its only argument is the reason code."""


class Cursor:
    """Bytes of a stuffed content, one at a time."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def is_at_end(self) -> bool:
        return self.at == len(self.content)

    def byte(self) -> int:
        if self.is_at_end():
            raise RefusedError("bad_envelope")
        self.at += 1
        value = self.content[self.at - 1]
        around = self.content[max(0, self.at - 3) : self.at + 1]
        if around == OPEN + b"\0":
            self.at += 1
        return value

    def number(self, size: int) -> int:
        value = 0
        for _ in range(size):
            value = value * 256 + self.byte()
        return value

    def text(self) -> bytes:
        return bytes([self.byte() for _ in range(self.number(2))])


@lru_cache(4096)
def read(content: bytes) -> tuple[Envelope, bytes] | str:
    """What `decode` is to answer; or the reason for which it is to refuse."""
    try:
        return read_good(content)
    except RefusedError as refused:
        return str(refused)


def read_good(content: bytes) -> tuple[Envelope, bytes]:
    cursor = Cursor(content)
    fields = cursor.byte()
    if fields > 63:
        raise RefusedError("bad_envelope")
    published = expires = not_before = None
    if fields & 1:
        published = cursor.number(8)
        published -= (1 << 64) if published >> 63 else 0
    if fields & 2:
        expires = cursor.number(8)
    if fields & 4:
        not_before = cursor.number(8)
    channel, key, pairs = "", b"", []
    if fields & 8:
        channel = read_channel(cursor.text())
    if fields & 16:
        key = cursor.text()
    if fields & 32:
        pairs = read_pairs(cursor.text())
    payload = bytearray()
    while not cursor.is_at_end():
        payload.append(cursor.byte())
    return Envelope(channel, key, tuple(pairs), published, expires, not_before), bytes(payload)


def read_channel(text: bytes) -> str:
    try:
        name = text.decode()
    except UnicodeDecodeError:
        raise RefusedError("bad_channel") from None
    odd = any(character <= " " or character == "\x7f" for character in name)
    if odd or len(text) > 4096 or set(name.split(".")) & {"", "*", "#", ">"}:
        raise RefusedError("bad_channel")
    return name


def read_pairs(text: bytes) -> list[tuple[str, str]]:
    texts = []
    while text:
        size = int.from_bytes(text[:2], "big")
        if len(text) < 2 + size:
            raise RefusedError("bad_envelope")
        try:
            texts.append(text[2 : 2 + size].decode())
        except UnicodeDecodeError:
            raise RefusedError("bad_envelope") from None
        text = text[2 + size :]
    if len(texts) % 2:
        raise RefusedError("bad_envelope")
    return list(zip(texts[::2], texts[1::2], strict=True))


def reason_of(content: bytes) -> str | None:
    """Why the oracle refuses this content; None when it does not."""
    found = read(content)
    return found if isinstance(found, str) else None


def write(envelope: Envelope, payload: bytes) -> bytes:
    """What `encode` is to answer."""

    def sized(text: bytes) -> bytes:
        return len(text).to_bytes(2, "big") + text

    about, fields = b"", 0
    numbers = [(1, envelope.published), (2, envelope.expires_ms), (4, envelope.not_before_ms)]
    for bit, number in numbers:
        if number is not None:
            fields |= bit
            about += (number % (1 << 64)).to_bytes(8, "big")
    pairs = b"".join(sized(text.encode()) for pair in envelope.headers for text in pair)
    for bit, text in ((8, envelope.channel.encode()), (16, envelope.key), (32, pairs)):
        if text:
            fields |= bit
            about += sized(text)
    whole, content = bytes([fields]) + about + payload, bytearray()
    for byte in whole:
        content.append(byte)
        if content[-3:] == OPEN:
            content.append(0)
    return bytes(content)


# Input -------------------------------------------------------------------------------------------

nasty = st.lists(st.sampled_from([b"<", b"\r", b"\n", b">", b"\0", b"x", OPEN]), max_size=8).map(
    b"".join
)
blobs = st.one_of(nasty, st.binary(max_size=12))
letters = st.text("<>\r\n\0aé", max_size=6)
nasty_numbers = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.lists(st.sampled_from(b"<\r\n\0>"), min_size=8, max_size=8).map(
        lambda some: int.from_bytes(bytes(some), "big")
    ),
    st.sampled_from([0, 1, 30_000, 0x3C0D0A00, 0x3C0D0A, 0x0D0A << 48, (1 << 64) - 1]),
)
maybe_numbers = st.none() | nasty_numbers
channels = st.one_of(
    st.sampled_from(["", "a", "a.b", "orders.eu.paid", "a<", "a.<", "ab*.x>", "ü.日本"]),
    st.text("ab<>.", min_size=1, max_size=6).filter(
        lambda name: not set(name.split(".")) & {"", "*", "#", ">"}
    ),
)
good_envelopes = st.builds(
    Envelope,
    channel=channels,
    key=blobs,
    headers=st.lists(st.tuples(letters, letters), max_size=3).map(tuple),
    published=maybe_numbers.map(lambda n: None if n is None else n - (1 << 64) * (n >> 63)),
    expires_ms=maybe_numbers,
    not_before_ms=maybe_numbers,
)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Good ones, and all that may become of them on the way."""
    content = encode(draw(good_envelopes), draw(nasty))
    match draw(st.sampled_from(["good", "good", "cut", "hit", "any"])):
        case "cut":
            content = content[: draw(st.integers(0, len(content)))]
        case "hit":
            at = draw(st.integers(0, len(content) - 1))
            piece = draw(st.sampled_from([b"\0", b"<", b"\r", b"\n", b"\x3c", b"\xff", b"", OPEN]))
            content = content[:at] + piece + content[at + 1 :]
        case "any":
            content = draw(blobs)
    return content.replace(DELIMITER, b"")


@st.composite
def batches(draw: st.DrawFn) -> list[bytes]:
    """Contents: most of one shape, or few of any shape, again and again."""
    some = draw(st.lists(contents(), min_size=1, max_size=4))
    if draw(st.booleans()):
        about = draw(good_envelopes)
        some = [encode(about, b"payload")] * draw(st.integers(0, 40)) + some
        key, published = draw(st.booleans()), draw(maybe_numbers)
        for number in range(draw(st.integers(0, 40))):
            if key:
                about = about._replace(key=b"k" * (number % 5))
            if published is not None:
                about = about._replace(expires_ms=(published + number) % (1 << 64))
            some.append(encode(about, b"<" * (number % 3)))
    return some * draw(st.sampled_from([1, 7, MANY]))


def batch(some: list[bytes], class_id: int = 1) -> FrameBatch:
    return build_batch(
        *(
            build_frame(ENVELOPE, class_id=class_id, message_id=number, content=content)
            for number, content in enumerate(some)
        )
    )


class Row(NamedTuple):
    channel: str
    expires: float
    not_before: float


def rows(found: EnvelopeColumns) -> list[Row]:
    """The same, row by row."""
    count = found.count
    numbers = found.channels
    numbers = [numbers] * count if isinstance(numbers, int) else numbers.tolist()
    expires = [NEVER] * count if found.expires is None else found.expires.tolist()
    not_before = [0.0] * count if found.not_before is None else found.not_before.tolist()
    names = [found.names[number] for number in numbers]
    return [Row(*row) for row in zip(names, expires, not_before, strict=True)]


def expected_rows(some: list[bytes]) -> list[Row]:
    expected = []
    for content in some:
        if reason_of(content):
            break
        about = read(content)[0]
        late, early = about.expires_ms, about.not_before_ms
        expected.append(
            Row(
                about.channel,
                NEVER if late is None else float(late) / 1000,
                0.0 if early is None else float(early) / 1000,
            )
        )
    return expected


def check_scan(some: list[bytes], class_id: int = 1) -> EnvelopeColumns:
    """Scan, and hold it against the oracle."""
    expected = expected_rows(some)
    found = scan_envelopes(batch(some, class_id))
    assert found.count == len(expected)
    assert rows(found) == expected
    assert sorted(found.names) == sorted({row.channel for row in expected})
    assert (found.expires is None) == all(row.expires == NEVER for row in expected)
    assert (found.not_before is None) == all(row.not_before == 0 for row in expected)
    if not isinstance(found.channels, int):
        assert found.channels.dtype == np.uint32
        assert len(found.names) > 1
    return found


# One at a time -----------------------------------------------------------------------------------


def test_an_envelope_is_encoded_as_the_protocol_draws_it() -> None:
    assert encode(FULL, b"hi") == bytes.fromhex(
        "3f 0006441367fd8800 0000000000007530 0000000000000005"
        "0009 6f72646572732e6575 0002 6b31"
        "0014 0005 7472616365 0002 6162 0005 7472616365 0000 6869"
    )


def test_what_is_not_said_takes_no_room() -> None:
    assert encode(Envelope(), b"hi") == b"\0hi"
    assert encode(Envelope(channel="a"), b"") == b"\x08\0\x01a"


@given(good_envelopes, nasty)
def test_what_was_encoded_is_decoded_to_the_same(about: Envelope, payload: bytes) -> None:
    content = encode(about, payload)
    assert content == write(about, payload)
    assert DELIMITER not in content + DELIMITER[:-1]
    assert read(content) == (about, payload)
    assert decode(content) == (about, payload)
    assert envelopes.extract_payload(content) == payload


@given(contents())
def test_a_content_means_what_it_means_byte_by_byte(content: bytes) -> None:
    reason = reason_of(content)
    if reason is None:
        assert decode(content) == read(content)
        assert envelopes.extract_payload(content) == read(content)[1]
        return
    with pytest.raises(RemoteProtocolError) as caught:
        decode(content)
    assert caught.value.reason == reason
    with suppress(RemoteProtocolError):  # It looks only for what keeps it from the payload.
        assert envelopes.extract_payload(content) in envelopes.unstuff(content)


@given(nasty)
def test_stuffed_bytes_hold_no_delimiter_and_come_back(data: bytes) -> None:
    content = envelopes.stuff(data)
    assert DELIMITER not in content
    assert envelopes.unstuff(content) == data
    assert content.count(OPEN) == content.count(OPEN + b"\0") == data.count(OPEN)


def test_a_content_cut_off_before_its_payload_is_refused_wherever_that_is() -> None:
    content = encode(FULL, b"payload")
    payload_at = len(content) - len(b"payload")
    for end in range(len(content)):
        if end >= payload_at:
            assert decode(content[:end]) == (FULL, b"payload"[: end - payload_at])
            continue
        with pytest.raises(RemoteProtocolError) as caught:
            decode(content[:end])
        assert caught.value.reason == Reason.BAD_ENVELOPE
        with pytest.raises(RemoteProtocolError):
            envelopes.extract_payload(content[:end])
        assert check_scan([content[:end]]).count == 0
        assert check_scan([content[:end]] * MANY).count == 0
        assert check_scan([content] * MANY + [content[:end]]).count == MANY


def test_every_fields_byte_is_read_as_its_bits_say() -> None:
    """Behind it, eight bytes for a time or more, and lengths that fit whatever is read there."""
    for fields in range(256):
        content = bytes([fields]) + b"\0\x01a" * 3 + b"\0" * 30
        assert fields < 64 or reason_of(content) == "bad_envelope", fields
        check_scan([content])
        check_scan([content] * MANY)
        if reason_of(content) is None:
            assert decode(content) == read(content), fields


@pytest.mark.parametrize(
    ("content", "reason", "words"),
    [
        (b"", "bad_envelope", "fields byte"),
        (b"\x40", "bad_envelope", "0x40"),
        (b"\x80", "bad_envelope", "bits 6 and 7"),
        (b"\x02\0\0", "bad_envelope", "expected 9 at least"),
        (b"\x08\0", "bad_envelope", "length of its channel"),
        (b"\x08\0\x02a", "bad_envelope", "its channel of 2 bytes"),
        (b"\x08\0\0", "bad_channel", "empty"),
        (b"\x08\0\x01\xff", "bad_channel", "not UTF-8"),
        (b"\x08\0\x03\xed\xa0\x80", "bad_channel", "not UTF-8"),
        (b"\x08\0\x01*", "bad_channel", "wildcard"),
        (b"\x08\0\x03a..", "bad_channel", "segment 2"),
        (b"\x08\x10\x01" + b"a" * 4097, "bad_channel", "too long"),
        (b"\x10\0\x05key", "bad_envelope", "its key of 5 bytes"),
        (b"\x20\0\x02\0\x01", "bad_envelope", "begins at byte 3"),
        (b"\x20\0\x01\0", "bad_envelope", "begins at byte 3"),
        (b"\x20\0\x03\0\x01n", "bad_envelope", "a value behind the name"),
        (b"\x20\0\x05\0\x01\xff\0\0", "bad_envelope", "not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(content: bytes, reason: str, words: str) -> None:
    assert reason_of(content) == reason
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        decode(content)
    assert caught.value.reason == reason
    assert check_scan([content] * MANY).count == 0


def test_texts_that_are_announced_and_empty_are_as_if_they_were_not() -> None:
    assert decode(b"\x30\0\0\0\0hi") == (Envelope(), b"hi")


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (Envelope(channel="a."), "segment 2"),
        (Envelope(channel="a" * (CHANNEL_BYTES_MAX + 1)), str(CHANNEL_BYTES_MAX)),
        (Envelope(expires_ms=-1), "expires_ms is a whole number from 0"),
        (Envelope(expires_ms=1 << 64), "expires_ms"),
        (Envelope(not_before_ms=-1), "not_before_ms is a whole number from 0"),
        (Envelope(not_before_ms=float("nan")), "not_before_ms"),  # type: ignore[arg-type]
        (Envelope(expires_ms=float("inf")), "got inf"),  # type: ignore[arg-type]
        (Envelope(expires_ms=1.5), "got 1.5"),  # type: ignore[arg-type]
        (Envelope(expires_ms=True), "got True"),
        (Envelope(published=1 << 63), "published"),
        (Envelope(published=-(1 << 63) - 1), "published"),
        (Envelope(headers=(("n", "\ud800"),)), "cannot be encoded as UTF-8"),
    ],
)
def test_a_wrong_value_is_a_value_error_that_says_the_bound(about: Envelope, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode(about, b"")


def test_what_is_too_long_for_an_envelope_is_an_error_that_says_the_limit() -> None:
    longest_key = Envelope(key=bytes(0xFFFF))
    assert decode(encode(longest_key, b"p")) == (longest_key, b"p")
    with pytest.raises(LocalProtocolError, match="at most 65535 bytes, got one of 65536"):
        encode(Envelope(key=bytes(0x10000)), b"")
    longest = Envelope(headers=(("n" * 32_765, "v" * 32_766),))
    assert decode(encode(longest, b"p")) == (longest, b"p")
    with pytest.raises(LocalProtocolError, match="got 1 headers of 65536 bytes"):
        encode(Envelope(headers=(("n" * 32_766, "v" * 32_766),)), b"")


def test_an_instant_before_1970_and_the_ends_of_every_number_can_be_said() -> None:
    about = Envelope(published=-1, expires_ms=(1 << 64) - 1, not_before_ms=0)
    assert decode(encode(about, b"")) == (about, b"")
    about = Envelope(published=-(1 << 63), expires_ms=0)
    assert decode(encode(about, b"")) == (about, b"")


def test_what_is_remembered_of_channels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_envelope, "_CACHE_ENTRIES_MAX", 3)
    monkeypatch.setattr(protocol_envelope, "_channel_cache", {})
    monkeypatch.setattr(protocol_envelope, "_prefix_cache", {})
    for number in range(10):
        about = Envelope(channel=f"a.{number}")
        assert decode(encode(about, b"")) == (about, b"")
        assert len(protocol_envelope._channel_cache) <= 3
        assert len(protocol_envelope._prefix_cache) <= 3
    long = Envelope(channel="a" * CHANNEL_BYTES_MAX)
    assert decode(encode(long, b"")) == (long, b"")
    assert max(map(len, protocol_envelope._channel_cache)) < 10
    assert max(map(len, protocol_envelope._prefix_cache)) < 10


# Many --------------------------------------------------------------------------------------------


@given(batches(), st.sampled_from([1, 0x3C0D, 0x0D0A]))
def test_a_batch_is_taken_as_far_and_as_each_of_it_is_read(
    some: list[bytes], class_id: int
) -> None:
    check_scan(some, class_id)


@given(good_envelopes, st.integers(0, 3), nasty)
def test_a_batch_of_equal_envelopes_is_read_like_one(
    about: Envelope, more: int, payload: bytes
) -> None:
    """More payload here and there makes frames of many lengths."""
    some = [encode(about, payload + b"x" * (number % (more + 1))) for number in range(MANY)]
    assert check_scan(some).count == MANY


@given(st.data())
def test_channels_keys_and_headers_may_be_other_ones_in_each(data: st.DataObject) -> None:
    """With all fields the same, every text by its own choice of being the same in all."""
    names = data.draw(st.lists(channels.filter(bool), min_size=1, max_size=3))
    keys = data.draw(st.lists(blobs.filter(bool), min_size=1, max_size=3))
    pairs = data.draw(st.lists(st.tuples(letters, letters), min_size=1, max_size=3))
    with_key, with_headers = data.draw(st.booleans()), data.draw(st.booleans())
    published = data.draw(st.none() | st.integers(0, 1 << 50))
    some = [
        encode(
            Envelope(
                channel=names[number % len(names)],
                key=keys[number % len(keys)] if with_key else b"",
                headers=(pairs[number % len(pairs)],) if with_headers else (),
                published=published,
            ),
            b"payload",
        )
        for number in range(MANY)
    ]
    some[data.draw(st.integers(0, MANY - 1))] = data.draw(contents())
    check_scan(some)


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("times", ["published", "expires_ms", "not_before_ms"])
def test_a_stuffing_within_times_and_lengths_shifts_nothing_for_others(
    offset: int, times: str
) -> None:
    """Eight bytes of a time, and behind them the length of the channel: at every place of them a
    stuffing, in one frame or in all of them."""
    number = int.from_bytes((b"\x01" * offset + OPEN + b"\x01" * 8)[:8], "big")
    for name, key in product(("a", "<" * 10, "b" * 10), (b"", OPEN, b"\0k")):
        odd = Envelope(channel=name, key=key, **{times: number})
        plain = odd._replace(**{times: 5})
        one = [encode(plain, b"payload")] * MANY
        one[70] = encode(odd, b"payload")
        assert check_scan(one).count == MANY
        assert check_scan([encode(odd, OPEN + b">")] * MANY).count == MANY


def test_a_stuffing_that_begins_with_the_fields_byte_is_found() -> None:
    """0x3C announces an opening time, a channel, a key and headers."""
    about = Envelope(
        channel="a", key=b"k", headers=(("n", "v"),), not_before_ms=0x0D0A_0000_0000_0000
    )
    content = encode(about, b"payload")
    assert content.startswith(OPEN + b"\0")
    assert check_scan([content] * MANY).count == MANY
    mixed = [encode(about._replace(not_before_ms=number), b"") for number in range(MANY)]
    mixed[60] = content
    assert check_scan(mixed).count == MANY


def test_a_stuffing_in_a_key_moves_the_headers_behind_it() -> None:
    for key in (OPEN, b"k" + OPEN + b"\0", b"ab<"):
        some = [
            encode(Envelope(key=key, headers=(("n", f"{number:03}"),)), b"\r\n")
            for number in range(MANY)
        ]
        some[3] = encode(Envelope(key=b"plain", headers=(("n", "v"),)), b"")
        assert check_scan(some).count == MANY


def test_bytes_that_look_stuffed_in_headers_of_frames_change_nothing() -> None:
    about = Envelope(channel="a.b", key=b"k")
    some = [encode(about, b"x") for _ in range(MANY)]
    frames = [
        build_frame(ENVELOPE, class_id=0x3C0D, message_id=0x0A003C0D, timer_index=0x0A00, content=c)
        for c in some
    ]
    assert rows(scan_envelopes(build_batch(*frames))) == [Row("a.b", NEVER, 0.0)] * MANY


def test_equal_envelopes_are_read_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(envelopes, "_scan_one_by_one")
    about = Envelope(channel="a.b", key=b"k", headers=(("n", "v"),), published=1, expires_ms=2)
    for kept in range(6):
        some = [
            about._replace(
                channel=f"c{number % 20}" if kept == 1 else about.channel,
                key=b"%d" % number if kept == 2 else b"",
                headers=(("n", str(number)),) if kept == 3 else (),
                published=0x3C3C_0000 + number if kept == 4 else None,
            )
            for number in range(MANY)
        ]
        found = check_scan([encode(one, b"payload") for one in some])
        assert found.count == MANY
        assert isinstance(found.channels, int) == (kept != 1)


def test_few_odd_ones_among_many_are_read_for_themselves() -> None:
    some = [encode(Envelope(channel="a"), b"payload")] * MANY
    some[10] = encode(Envelope(channel="b", expires_ms=1500), b"payload")
    some[20] = encode(Envelope(not_before_ms=250), b"payload")
    some[30] = encode(Envelope(channel="a", key=b"k"), b"")
    found = check_scan(some)
    assert found.names == ["a", "b", ""]
    assert rows(found)[10] == Row("b", 1.5, 0.0)
    assert rows(found)[20] == Row("", NEVER, 0.25)


@pytest.mark.parametrize("bad_at", [0, 1, 900, 1100, 4999])
def test_of_very_many_all_before_the_first_bad_one_are_taken(bad_at: int) -> None:
    some = [encode(Envelope(channel=f"a.{number % 3}"), b"p") for number in range(5000)]
    some[bad_at] = b"\x08\0\x01*"
    assert check_scan(some).count == bad_at


def test_a_name_that_only_a_bad_envelope_holds_is_not_told() -> None:
    some = [encode(Envelope(channel=f"a.{number % 3}", key=b"k"), b"p") for number in range(MANY)]
    some[50] = encode(Envelope(channel="other", key=b"k"), b"")[:-1]
    assert check_scan(some).names == ["a.0", "a.1", "a.2"]


def test_very_long_texts_are_read() -> None:
    about = Envelope(
        channel="c" * CHANNEL_BYTES_MAX, key=b"k" * 0xFFFF, headers=(("n" * 5000, OPEN.decode()),)
    )
    some = [encode(about, b"p")] * (PLAIN_FRAMES_MAX + 2)
    some[9] = encode(about._replace(key=OPEN * 1000), b"p")
    assert check_scan(some).count == len(some)


def test_no_frames_have_no_columns() -> None:
    assert scan_envelopes(batch([b"\0"]).slice(0, 0)) == EnvelopeColumns(0, [], 0)
