"""What of a message's headers is whose, on its way through NATS."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.bridge.reserved_headers import KEY, KEY_HEX, denied, key_headers, without_key
from simplebus.nats.bus.convert import format_header_block, parse_header_block


@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)))
def test_a_key_comes_back_the_same(key: bytes) -> None:
    block = block_of((("h", "1"), *key_headers(key)))
    assert without_key(headers_of(block)) == ((("h", "1"),), key)


@pytest.mark.parametrize(
    ("key", "header"),
    [
        (b"till-4", (KEY, "till-4")),
        ("Köln 4".encode(), (KEY, "Köln 4")),
        (b" 4", (KEY_HEX, "2034")),
        (b"4\n", (KEY_HEX, "340a")),
        (b"\xff", (KEY_HEX, "ff")),
    ],
)
def test_a_key_that_is_text_is_readable(key: bytes, header: tuple[str, str]) -> None:
    assert key_headers(key) == (header,)


def test_what_is_no_number_of_digits_is_no_key() -> None:
    odd = ((KEY_HEX, "4"), (KEY_HEX, "x0"), ("h", "1"))
    assert without_key(odd) == (odd, b"")
    assert without_key(((KEY, "a"), (KEY_HEX, "62"))) == ((), b"b")


@pytest.mark.parametrize(
    ("shown", "subject"),
    [
        ("no.a'b", "no.a'b"),
        (r"no.\"q\"", 'no."q"'),
        (r"no.a\\b", "no.a\\b"),
        (r"Köln.\u200b.\U000e0001.\x7f\a", "Köln.\u200b.\U000e0001.\x7f\a"),
        (r"\ud800.\Uffffffff", "?.\ufffd"),
    ],
)
def test_a_denied_subject_is_read_as_it_is(shown: str, subject: str) -> None:
    said = f'Permissions Violation for Publish to "{shown}"'
    assert denied(said) == denied(f'{said} (why "not")') == subject.encode()
    assert denied(said.replace("Publish to", "Publish with Reply of")) == b""
