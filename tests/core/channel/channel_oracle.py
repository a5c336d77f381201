"""The slow, obvious truth about channels, and random names and patterns that often meet.

Rule 1: nothing here is imported from simplebus, and nothing here is clever.
Rule 2: an oracle never judges whether a name or a pattern is legal. It says what a legal one means.
Rule 3: the alphabet is small, so that random patterns match random names, share what they begin
        with, and come twice. One letter occurs in names alone.
"""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

LETTERS = ["a", "b", "ä", "a*"]
FRESH = "z"
"""Occurs in no pattern."""


def segments_of(text: str) -> list[str]:
    return text.split(".") if text else []


def fits(pattern: list[str], name: list[str]) -> bool:
    """Whether the segments of a pattern match those of a name."""
    if not pattern:
        return not name
    if pattern == ["#"]:
        return True
    if pattern == [">"]:
        return bool(name)
    if not name:
        return False
    return pattern[0] in ("*", name[0]) and fits(pattern[1:], name[1:])


def is_match(pattern: str, name: str) -> bool:
    return fits(segments_of(pattern), segments_of(name))


class SublistOracle:
    """Pairs of a pattern and a value in a list, the oldest first."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, object]] = []

    def insert(self, pattern: str, value: object) -> bool:
        if (pattern, value) in self.pairs:
            return False
        self.pairs.append((pattern, value))
        return True

    def remove(self, pattern: str, value: object) -> None:
        self.pairs.remove((pattern, value))

    def match(self, name: str) -> tuple[object, ...]:
        return tuple(value for pattern, value in self.pairs if is_match(pattern, name))


def all_names(letters: list[str], length: int) -> list[str]:
    """Every name of these letters with up to so many segments, the empty one too."""
    return [
        ".".join(some) for count in range(length + 1) for some in product(letters, repeat=count)
    ]


def all_patterns(letters: list[str], length: int) -> list[str]:
    """Every pattern of these letters and the wildcards with up to so many segments."""
    closed = all_names([*letters, "*"], length)
    begun = all_names([*letters, "*"], length - 1)
    ended = [f"{begin}.{end}".lstrip(".") for begin in begun for end in "#>"]
    return [*closed[1:], *ended]


names = st.lists(st.sampled_from([*LETTERS, FRESH]), max_size=5).map(".".join)
"""Names, the empty one too: a message without a channel."""


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Patterns, half of them with an open end."""
    segments = draw(st.lists(st.sampled_from([*LETTERS, "*", "*"]), max_size=4))
    end = draw(st.sampled_from(["#", ">", "*", *LETTERS]))
    return ".".join([*segments, end])
