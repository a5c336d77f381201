"""Headers of messages to and from NATS: reserved headers, keys and paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.bridge.reserved_headers import (
    KEY_HEADER,
    KEY_HEX_HEADER,
    denied_subject,
    encode_key,
    split_key,
)
from simplebus.nats.bus.convert import format_header_block, parse_header_block


@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)))
def test_key_headers_round_trip(key: bytes) -> None:
    block = format_header_block((("h", "1"), *encode_key(key)))
    assert split_key(parse_header_block(block)) == ((("h", "1"),), key)


@pytest.mark.parametrize(
    ("key", "header"),
    [
        (b"till-4", (KEY_HEADER, "till-4")),
        ("Köln 4".encode(), (KEY_HEADER, "Köln 4")),
        (b" 4", (KEY_HEX_HEADER, "2034")),
        (b"4\n", (KEY_HEX_HEADER, "340a")),
        (b"\xff", (KEY_HEX_HEADER, "ff")),
    ],
)
def test_text_key_is_readable(key: bytes, header: tuple[str, str]) -> None:
    assert encode_key(key) == (header,)


def test_malformed_key_hex_is_not_a_key() -> None:
    malformed = ((KEY_HEX_HEADER, "4"), (KEY_HEX_HEADER, "x0"), ("h", "1"))
    assert split_key(malformed) == (malformed, b"")
    assert split_key(((KEY_HEADER, "a"), (KEY_HEX_HEADER, "62"))) == ((), b"b")


@pytest.mark.parametrize(
    ("escaped_subject", "subject"),
    [
        ("no.a'b", "no.a'b"),
        (r"no.\"q\"", 'no."q"'),
        (r"no.a\\b", "no.a\\b"),
        (r"Köln.\u200b.\U000e0001.\x7f\a", "Köln.\u200b.\U000e0001.\x7f\a"),
        (r"\ud800.\Uffffffff", "?.\ufffd"),
    ],
)
def test_parses_denied_subject(escaped_subject: str, subject: str) -> None:
    error_text = f'Permissions Violation for Publish to "{escaped_subject}"'
    assert (
        denied_subject(error_text)
        == denied_subject(f'{error_text} (why "not")')
        == subject.encode()
    )
    assert denied_subject(error_text.replace("Publish to", "Publish with Reply of")) == b""
