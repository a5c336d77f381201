"""Legal subjects and their index keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.channel.pattern import matches
from simplebus.nats import subjects

TOKENS = st.sampled_from([b"a", b"#", b"##", b"*", b">", b"\x00#", b"\x00", b"", b"\xff", b"%23"])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(b".".join)


@pytest.mark.parametrize(
    ("subject", "legal", "literal"),
    [
        (b"a", True, True),
        (b"a.b", True, True),
        (b"a.*", True, False),
        (b"a.>", True, False),
        (b">", True, False),
        (b">.a", False, False),
        (b"a..b", False, False),
        (b".", False, False),
        (b"a.", False, False),
        (b".a", False, False),
        (b"", False, False),
        (b"a*", True, True),
        (b"a>.b", True, True),
        (b"a.#", True, True),
        (b"#.a", True, True),
    ],
)
def test_legal_and_literal_subjects(subject: bytes, legal: bool, literal: bool) -> None:
    assert subjects.is_legal(subject) == legal
    assert subjects.is_literal(subject) == literal


def slow_match(pattern: list[bytes], name: list[bytes]) -> bool:
    """Oracle: match token by token."""
    if not pattern:
        return not name
    if pattern == [b">"]:
        return bool(name)
    return bool(name) and pattern[0] in (b"*", name[0]) and slow_match(pattern[1:], name[1:])


@given(SUBJECTS.filter(subjects.is_legal), SUBJECTS)
def test_index_matches_like_nats(pattern: bytes, name: bytes) -> None:
    tokens = name.split(b".")
    expected = b"" not in tokens and slow_match(pattern.split(b"."), tokens)
    assert matches(subjects.index_key(pattern), subjects.index_key(name)) == expected


@given(SUBJECTS, SUBJECTS)
def test_index_keys_are_unique(a: bytes, b: bytes) -> None:
    assert (subjects.index_key(a) == subjects.index_key(b)) == (a == b)


def test_reserved_reply_subjects() -> None:
    assert subjects.is_reserved_reply(b"_R_.x")
    assert subjects.is_reserved_reply(b"_GR_.x")
    assert subjects.is_reserved_reply(b"$JS.ACK.orders.d.1.0.1.0.0")
    assert not subjects.is_reserved_reply(b"$JS.API.x")
    assert not subjects.is_reserved_reply(b"_R_")
    assert not subjects.is_reserved_reply(b"_INBOX.x")
