"""Explanations of patterns that nearly match a channel."""

from __future__ import annotations

from simplebus.core.channel.pattern import (
    ONE_OR_MORE,
    ONE_SEGMENT,
    TAIL_WILDCARDS,
    ZERO_OR_MORE,
    matches,
    split_segments,
)


def explain_mismatch(pattern: str, channel: str) -> str:
    """Explain a legal pattern that nearly matches `channel`, in half a sentence.

    Returns:
        Empty if the pattern matches, or has too little in common with the channel.
    """
    if matches(pattern, channel):
        return ""
    if matches(pattern.casefold(), channel.casefold()):
        return "upper and lower case differ"
    expected, segments = split_segments(pattern), split_segments(channel)
    tail = expected.pop() if expected and expected[-1] in TAIL_WILDCARDS else ""
    differing = [
        index
        for index, (expected_segment, segment) in enumerate(zip(expected, segments, strict=False))
        if expected_segment not in (segment, ONE_SEGMENT)
    ]
    if len(differing) > 1 or not any(
        expected_segment == segment
        for expected_segment, segment in zip(expected, segments, strict=False)
    ):
        return ""
    if differing:
        if len(expected) != len(segments) and not (tail and len(expected) < len(segments)):
            return ""
        index = differing[0]
        return f"segment {index + 1} is {segments[index]!r}, not {expected[index]!r}"
    return _explain_length(len(segments) - len(expected), tail, expected)


def _explain_length(more: int, tail: str, expected: list[str]) -> str:
    """Explain the mismatch of a pattern whose segments match as far as both are defined."""
    if more > 0:
        difference = f"the channel has {_count_segments(more)} more"
        if expected[-1] == ONE_SEGMENT:
            return f"{difference}: {ONE_SEGMENT} stands for one, {ONE_OR_MORE} for one or more"
        return f"{difference}: {'.'.join(expected)}.{ZERO_OR_MORE} would match"
    if more == 0:
        return (
            f"{ONE_OR_MORE} stands for one segment or more, and there is none: "
            f"{ZERO_OR_MORE} would match"
        )
    missing = -more + (tail == ONE_OR_MORE)
    return f"the channel has {_count_segments(missing)} less"


def _count_segments(count: int) -> str:
    return f"{count} segment{'' if count == 1 else 's'}"
