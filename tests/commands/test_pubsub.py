"""Formatting of messages as lines. The tests in test_cli cover the rest of `pub` and `sub`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.commands.pubsub import format_line, generate_payload


@given(st.binary())
def test_message_is_printed_on_one_line(payload: bytes) -> None:
    shown = format_line(payload, raw=False).decode()
    assert shown.endswith("\n")
    assert all(c == "\t" or c.isprintable() or ord(c) >= 0xA0 for c in shown[:-1])


@given(st.text(st.characters(categories=["L", "N", "P", "Zs"])))
def test_printable_text_is_unchanged(text: str) -> None:
    assert format_line(text.encode(), raw=False).decode() == text + "\n"


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"a\r\nb", "a\\r\\nb\n"),
        (b"\x1b[2J", "\\x1b[2J\n"),
        (b"\x00\x7f\xff", "\\x00\\x7f\\xff\n"),
        ("\u0085\u009b".encode(), "\\x85\\x9b\n"),
    ],
)
def test_control_characters_are_escaped(payload: bytes, shown: str) -> None:
    assert format_line(payload, raw=False).decode() == shown


@given(st.binary())
def test_raw_output_is_not_escaped(payload: bytes) -> None:
    assert format_line(payload, raw=True) == payload + b"\n"


@given(st.integers(0, 10**9), st.integers(0, 200))
def test_generated_payloads_have_requested_size(number: int, size: int) -> None:
    payload = generate_payload(number, size)
    assert len(payload) == size
    if size >= 10:
        assert int(payload[:10]) == number
