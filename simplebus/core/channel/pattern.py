"""Channels: which names are legal, what a pattern matches, and whether two patterns meet.

Rule 1: equality of strings decides, never of hashes. Nothing is folded: case counts, and two ways
to write the same accented letter are two names.
Rule 2: a channel is segments joined by dots. The empty name has no segment: it stands for a message
without a channel, and is legal only where that is meant.

    *    exactly one segment, anywhere
    #    zero or more segments, as the last one: `one.#` matches `one`, and `#` alone matches all
    >    one or more segments, as the last one: `one.>` does not match `one`

Inside a longer segment these characters are letters like any other: `a*` matches `a*` alone. A
pattern with wildcards has PATTERN_SEGMENTS_MAX segments at most.
"""

from __future__ import annotations

import re

from simplebus.core.limits import CHANNEL_BYTES_MAX, PATTERN_SEGMENTS_MAX

ONE = "*"
REST = "#"
SOME = ">"
OPEN = frozenset({REST, SOME})
"""Wildcards that only end a pattern."""
WILDCARDS = OPEN | {ONE}

# White space and control characters of ASCII, and halves of characters, which UTF-8 cannot carry.
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
_SHOWN_MAX = 80
_UNBOUNDED = 1 << 62


def check_name(name: str) -> str:
    """The name of a channel to publish on, as it is. Raises ValueError when it is not legal."""
    for number, segment in enumerate(_checked(name, "channel"), 1):
        if segment in WILDCARDS:
            raise ValueError(
                f"channel {_shown(name)}: segment {number} is the wildcard {segment}, "
                "which only a pattern may hold"
            )
    return name


def check_pattern(pattern: str) -> str:
    """The pattern of a subscription, as it is. Raises ValueError when it is not legal."""
    segments = _checked(pattern, "pattern")
    if len(segments) > PATTERN_SEGMENTS_MAX and not WILDCARDS.isdisjoint(segments):
        raise ValueError(
            f"pattern {_shown(pattern)} of {len(segments)} segments is too long, expected at most "
            f"{PATTERN_SEGMENTS_MAX} where some are wildcards"
        )
    for number, segment in enumerate(segments[:-1], 1):
        if segment in OPEN:
            raise ValueError(
                f"pattern {_shown(pattern)}: segment {number} of {len(segments)} is the wildcard "
                f"{segment}, which may only be the last"
            )
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Whether a legal pattern matches a name. The name's wildcards are letters.

    The empty name, a message without a channel, is matched by `#` alone. What has an empty segment
    is no name: nothing matches it.
    """
    fixed, least, most = _shape(pattern)
    segments = split(name)
    if not least <= len(segments) <= most:
        return False
    for step, segment in zip(fixed, segments, strict=False):
        if step not in (segment, ONE):
            return False
    return "" not in segments


def overlaps(a: str, b: str) -> bool:
    """Whether there is a name that both legal patterns match. A name is a pattern too."""
    a_fixed, a_least, a_most = _shape(a)
    b_fixed, b_least, b_most = _shape(b)
    if max(a_least, b_least) > min(a_most, b_most):
        return False
    for a_step, b_step in zip(a_fixed, b_fixed, strict=False):
        if a_step != b_step and ONE not in (a_step, b_step):
            return False
    return True


def split(text: str) -> list[str]:
    """The segments of a name or a pattern. The empty name has none."""
    return text.split(".") if text else []


def is_literal(pattern: str) -> bool:
    """Whether the only name that a legal pattern matches is itself."""
    return WILDCARDS.isdisjoint(pattern.split("."))


def _shape(pattern: str) -> tuple[list[str], int, int]:
    """A pattern's segments without an open end, and how many segments its names have."""
    segments = split(pattern)
    if not segments or segments[-1] not in OPEN:
        return segments, len(segments), len(segments)
    least = len(segments) - (segments.pop() == REST)
    return segments, least, _UNBOUNDED


def _checked(text: str, what: str) -> list[str]:
    """The segments of what is no longer than allowed, and has no empty segment, no odd character.

    `what` is it called in the error: channel or pattern.
    """
    if not text:
        raise ValueError(f"{what} is empty, expected segments joined by dots, such as orders.eu")
    if len(text) > CHANNEL_BYTES_MAX or _size(text) > CHANNEL_BYTES_MAX:
        raise ValueError(
            f"{what} {_shown(text)} of {len(text)} characters is too long, expected at most "
            f"{CHANNEL_BYTES_MAX} bytes in UTF-8"
        )
    if odd := _FORBIDDEN.search(text):
        number = text.count(".", 0, odd.start()) + 1
        raise ValueError(
            f"{what} {_shown(text)}: segment {number} holds the character U+{ord(odd[0]):04X}, "
            "expected no white space, control character or half of a surrogate pair"
        )
    segments = text.split(".")
    if "" in segments:
        raise ValueError(
            f"{what} {_shown(text)}: segment {segments.index('') + 1} of {len(segments)} is empty, "
            "expected at least one character in each"
        )
    return segments


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…")
