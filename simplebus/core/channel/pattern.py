"""Channel names and patterns: legality, matching and overlap (binary.md, "Channels").

Names are compared as code points, without case folding or normalization. A name is segments joined
by dots. The empty name stands for a message without a channel and is legal only there.

    *    exactly one segment, anywhere
    #    zero or more segments, at the end: `one.#` matches `one`, and `#` matches everything
    >    one or more segments, at the end: `one.>` does not match `one`

Within a longer segment these characters are ordinary: `a*` matches only `a*`. A pattern with
wildcards has at most PATTERN_SEGMENTS_MAX segments.
"""

from __future__ import annotations

import re

from simplebus.core.limits import CHANNEL_BYTES_MAX, PATTERN_SEGMENTS_MAX

ONE_SEGMENT = "*"
ZERO_OR_MORE = "#"
ONE_OR_MORE = ">"
TAIL_WILDCARDS = frozenset({ZERO_OR_MORE, ONE_OR_MORE})
"""Wildcards that are legal only at the end of a pattern."""
WILDCARDS = TAIL_WILDCARDS | {ONE_SEGMENT}

# ASCII white space and control characters, and surrogates, which UTF-8 cannot encode.
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
# Up to 16 segments of printable ASCII, with `#` and `>` only at the end. The limit on segments
# bounds the time of a pattern that does not match.
_COMMON_PATTERN = re.compile(r"(?:(?![#>]\.)[!-\-/-~]+\.){0,15}[!-\-/-~]+")
_SHOWN_MAX = 80
_UNBOUNDED = 1 << 62


def check_name(name: str) -> str:
    """Return `name` if messages can be published to it. Raises ValueError if it is not legal."""
    for number, segment in enumerate(_check_segments(name, "channel"), 1):
        if segment in WILDCARDS:
            raise ValueError(
                f"channel {_shorten(name)}: segment {number} is the wildcard {segment}, "
                "which only a pattern may hold"
            )
    return name


def check_pattern(pattern: str) -> str:
    """Return `pattern` if it is legal for a subscription. Raises ValueError if not."""
    # Nearly all patterns match; the rules find the error of the others.
    if len(pattern) > CHANNEL_BYTES_MAX or not _COMMON_PATTERN.fullmatch(pattern):
        _check_pattern_rules(pattern)
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Return True if a legal pattern matches a name.

    Wildcards in the name are ordinary characters. Only `#` matches the empty name, a message
    without a channel. A name with an empty segment matches nothing.
    """
    fixed, segments_min, segments_max = _parse_pattern(pattern)
    segments = split_segments(name)
    if not segments_min <= len(segments) <= segments_max:
        return False
    for step, segment in zip(fixed, segments, strict=False):
        if step not in (segment, ONE_SEGMENT):
            return False
    return "" not in segments


def overlaps(a: str, b: str) -> bool:
    """Return True if some name matches both legal patterns. A name counts as a pattern."""
    a_fixed, a_min, a_max = _parse_pattern(a)
    b_fixed, b_min, b_max = _parse_pattern(b)
    if max(a_min, b_min) > min(a_max, b_max):
        return False
    for a_step, b_step in zip(a_fixed, b_fixed, strict=False):
        if a_step != b_step and ONE_SEGMENT not in (a_step, b_step):
            return False
    return True


def split_segments(text: str) -> list[str]:
    """Return the segments of a name or pattern. The empty name has none."""
    return text.split(".") if text else []


def is_literal(pattern: str) -> bool:
    """Return True if a legal pattern matches only itself."""
    return WILDCARDS.isdisjoint(pattern.split("."))


def _parse_pattern(pattern: str) -> tuple[list[str], int, int]:
    """Return the segments without a tail wildcard, and the least and most segments of matching
    names.
    """
    segments = split_segments(pattern)
    if not segments or segments[-1] not in TAIL_WILDCARDS:
        return segments, len(segments), len(segments)
    segments_min = len(segments) - (segments.pop() == ZERO_OR_MORE)
    return segments, segments_min, _UNBOUNDED


def _check_pattern_rules(pattern: str) -> None:
    """Raise ValueError for the first rule that `pattern` breaks."""
    segments = _check_segments(pattern, "pattern")
    if len(segments) > PATTERN_SEGMENTS_MAX and not WILDCARDS.isdisjoint(segments):
        raise ValueError(
            f"pattern {_shorten(pattern)} of {len(segments)} segments is too long, expected at "
            f"most {PATTERN_SEGMENTS_MAX} if some are wildcards"
        )
    for number, segment in enumerate(segments[:-1], 1):
        if segment in TAIL_WILDCARDS:
            raise ValueError(
                f"pattern {_shorten(pattern)}: segment {number} of {len(segments)} is the wildcard "
                f"{segment}, which may only be the last"
            )


def _check_segments(text: str, kind: str) -> list[str]:
    """Return the segments of a name or pattern. Raises ValueError for its length or its characters.

    `kind` names the text in the error: channel or pattern.
    """
    if not text:
        raise ValueError(f"{kind} is empty, expected segments joined by dots, such as orders.eu")
    if len(text) > CHANNEL_BYTES_MAX or _utf8_bytes(text) > CHANNEL_BYTES_MAX:
        raise ValueError(
            f"{kind} {_shorten(text)} of {len(text)} characters is too long, expected at most "
            f"{CHANNEL_BYTES_MAX} bytes in UTF-8"
        )
    if forbidden := _FORBIDDEN.search(text):
        number = text.count(".", 0, forbidden.start()) + 1
        raise ValueError(
            f"{kind} {_shorten(text)}: segment {number} holds the character "
            f"U+{ord(forbidden[0]):04X}, expected no white space, control character or surrogate"
        )
    segments = text.split(".")
    if "" in segments:
        raise ValueError(
            f"{kind} {_shorten(text)}: segment {segments.index('') + 1} of {len(segments)} is "
            "empty, expected at least one character in each"
        )
    return segments


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…")
