"""Why a pattern does not match a channel that it looks meant for.

Rule 1: pure questions about two texts. What has little in common with a channel is not near it:
nothing is said then.
"""

from __future__ import annotations

from simplebus.core.channel.pattern import ONE, OPEN, REST, SOME, matches, split


def why_not(pattern: str, channel: str) -> str:
    """Half a sentence about a legal pattern that nearly matches a channel; empty for one that does,
    and for one that is far from it."""
    if matches(pattern, channel):
        return ""
    if matches(pattern.casefold(), channel.casefold()):
        return "upper and lower case count"
    steps, segments = split(pattern), split(channel)
    end = steps.pop() if steps and steps[-1] in OPEN else ""
    differing = [
        at
        for at, (step, segment) in enumerate(zip(steps, segments, strict=False))
        if step not in (segment, ONE)
    ]
    if len(differing) > 1 or not any(
        step == segment for step, segment in zip(steps, segments, strict=False)
    ):
        return ""
    if differing:
        if len(steps) != len(segments) and not (end and len(steps) < len(segments)):
            return ""
        at = differing[0]
        return f"segment {at + 1} is {segments[at]!r}, not {steps[at]!r}"
    return _of_another_length(len(segments) - len(steps), end, steps)


def _of_another_length(more: int, end: str, steps: list[str]) -> str:
    """The same where every segment that both have fits."""
    if more > 0:
        what = f"the channel has {_segments(more)} more"
        if steps[-1] == ONE:
            return f"{what}: {ONE} stands for one, {SOME} for one or more"
        return f"{what}: {'.'.join(steps)}.{REST} would match"
    if more == 0:
        return f"{SOME} stands for one segment or more, and there is none: {REST} would match"
    missing = -more + (end == SOME)
    return f"the channel has {_segments(missing)} less"


def _segments(count: int) -> str:
    return f"{count} segment{'' if count == 1 else 's'}"
