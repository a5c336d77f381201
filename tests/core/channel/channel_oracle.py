"""Slow oracle for channels, and strategies for names and patterns that often match.

Imports nothing from simplebus and never decides if a name or pattern is legal. The alphabet is
small, so that random patterns match random names, share prefixes and repeat. One letter occurs only
in names.
"""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

LETTERS = ["a", "b", "ä", "a*"]
FRESH = "z"
"""Occurs in no pattern."""


def segments_of(text: str) -> list[str]:
    return text.split(".") if text else []


def segments_match(pattern: list[str], name: list[str]) -> bool:
    """Return True if the segments of a pattern match the segments of a name."""
    if not pattern:
        return not name
    if pattern == ["#"]:
        return True
    if pattern == [">"]:
        return bool(name)
    if not name:
        return False
    return pattern[0] in ("*", name[0]) and segments_match(pattern[1:], name[1:])


def is_match(pattern: str, name: str) -> bool:
    return segments_match(segments_of(pattern), segments_of(name))


class SubscriptionIndexOracle:
    """List of (pattern, value) pairs."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, int]] = []

    def insert(self, pattern: str, value: int) -> bool:
        if (pattern, value) in self.pairs:
            return False
        self.pairs.append((pattern, value))
        return True

    def remove(self, pattern: str, value: int) -> None:
        self.pairs.remove((pattern, value))

    def match(self, name: str) -> list[int]:
        """Return the values in ascending order."""
        return sorted(value for pattern, value in self.pairs if is_match(pattern, name))


def all_names(letters: list[str], length: int) -> list[str]:
    """Return every name of these letters with up to `length` segments, including the empty name."""
    return [
        ".".join(segments)
        for count in range(length + 1)
        for segments in product(letters, repeat=count)
    ]


def all_patterns(letters: list[str], length: int) -> list[str]:
    """Return every pattern of these letters and wildcards with up to `length` segments."""
    closed = all_names([*letters, "*"], length)
    begun = all_names([*letters, "*"], length - 1)
    ended = [f"{begin}.{end}".lstrip(".") for begin in begun for end in "#>"]
    return [*closed[1:], *ended]


names = st.lists(st.sampled_from([*LETTERS, FRESH]), max_size=5).map(".".join)
"""Names, the empty one too: a message without a channel."""


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Generate patterns, half of them with a tail wildcard."""
    segments = draw(st.lists(st.sampled_from([*LETTERS, "*", "*"]), max_size=4))
    end = draw(st.sampled_from(["#", ">", "*", *LETTERS]))
    return ".".join([*segments, end])
