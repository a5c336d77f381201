"""What a position waits for, in a word and in a sentence with figures.

Rule 1: plain values in, words out. Where the values come from is no business of this file.
Rule 2: one reason is said: what would have to happen first for the next message to leave.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from simplebus.core.protocol.inquiry import Flight


class Waits(enum.StrEnum):
    """What is waited for. The words are stable: for scripts."""

    NOTHING = "nothing"
    ACKS = "acks"
    """Acknowledgements of what is in flight."""
    BYTES = "bytes"
    """A connection that takes no bytes."""
    NOBODY = "nobody"
    """Somebody who connects."""
    OTHERS = "others"
    """What other members of its group have."""
    TIME = "time"
    """All that is left is put off."""
    MATCH = "match"
    """A message that one of its patterns matches: none was for it so far."""
    TURN = "turn"
    """It is being sent."""
    ROOM = "room"
    """Room among the dead letters, for all that is left."""


@dataclass(frozen=True, slots=True)
class Facts:
    """About one position, or one member of a group."""

    holder: str = ""
    """Who has what is in flight longest, or takes no bytes."""
    ready: int = 0
    """Messages that could be sent now."""
    in_flight: int = 0
    in_flight_max: int = 0
    """0 for any number."""
    in_flight_bytes: int = 0
    bytes_max: int = 0
    oldest: Flight | None = None
    is_full: bool = False
    """Whether no more may be in flight."""
    behind: int = 0
    """Messages that wait for others of their key."""
    put_off: int = 0
    put_off_seconds: float = 0.0
    is_served: bool = True
    alone_seconds: float = 0.0
    full_seconds: float = 0.0
    """How long a connection has taken no bytes."""
    full_bytes: int = 0
    elsewhere: int = 0
    """Messages that other members of its group have."""
    has_matched: bool = True
    """Whether anything was ever for it; or it has no patterns."""
    unburied: int = 0
    """Messages that are given up, and no dead letters yet."""
    dead: str = ""
    """The name of the class in which there is no room for them."""


def waits(facts: Facts) -> tuple[Waits, str]:
    """The word and the sentence."""
    word, sentence = _waits(facts)
    count = facts.unburied
    if not count:
        return word, sentence
    room = f"room in {facts.dead!r}: {messages(count)} {'is' if count == 1 else 'are'} given up"
    if word in (Waits.NOTHING, Waits.OTHERS, Waits.MATCH):
        return Waits.ROOM, room
    return word, f"{sentence}; and for {room}"


def _waits(facts: Facts) -> tuple[Waits, str]:
    ready, put_off = facts.ready, facts.put_off
    if not facts.is_served:
        left = ready + put_off + facts.in_flight + facts.behind
        what = f"{messages(left)} wait{'s' * (left == 1)} for it" if left else "nothing waits"
        return Waits.NOBODY, f"nobody is connected to it since {span(facts.alone_seconds)}; {what}"
    if ready and facts.is_full and (facts.in_flight or not facts.full_seconds):
        return Waits.ACKS, f"its acknowledgements: {_in_flight(facts)}{_stuck(facts)}"
    if ready and facts.full_seconds:
        return Waits.BYTES, (
            f"its connection, which has taken no bytes since {span(facts.full_seconds)}: "
            f"{facts.holder}"
        )
    if ready:
        return Waits.TURN, f"its turn: {messages(ready)} to be sent now"
    if facts.in_flight:
        return Waits.ACKS, f"its acknowledgements: {_in_flight(facts)}{_stuck(facts)}"
    if put_off:
        are = "is" if put_off == 1 else "are"
        return Waits.TIME, (
            f"time: {messages(put_off)} {are} put off, the first for another "
            f"{span(facts.put_off_seconds)}"
        )
    if facts.elsewhere:
        return Waits.OTHERS, f"nothing to send: other members have {messages(facts.elsewhere)}"
    if not facts.has_matched:
        return Waits.MATCH, "a message that its patterns match: none was for it so far"
    return Waits.NOTHING, "nothing to send"


_WHOLE = (Waits.NOBODY, Waits.OTHERS, Waits.NOTHING)
"""Where the sentence is one by itself."""


def whole(word: str, sentence: str) -> str:
    """The sentence with its verb."""
    return sentence if word in _WHOLE else f"it waits for {sentence}"


def _in_flight(facts: Facts) -> str:
    """How much is in flight, and since when."""
    if facts.is_full and facts.in_flight_bytes >= facts.bytes_max > 0:
        said = f"{size(facts.in_flight_bytes)} of {size(facts.bytes_max)} in flight"
    elif facts.in_flight_max:
        said = f"{facts.in_flight:,} of {facts.in_flight_max:,} in flight"
    else:
        said = f"{facts.in_flight:,} in flight"
    oldest = facts.oldest
    if oldest is not None:
        said += f", the oldest since {span(oldest.first_seconds)}"
        if oldest.attempt > 1:
            said += f" (sent {oldest.attempt} times)"
    said = f"{said}, {facts.holder}" if facts.holder else said
    if facts.behind:
        said += (
            f"; {messages(facts.behind)} wait{'s' * (facts.behind == 1)} for others of their key"
        )
    return said


def _stuck(facts: Facts) -> str:
    if not facts.full_seconds:
        return ""
    return f", which has taken no bytes since {span(facts.full_seconds)}"


def messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """A span of time for people: two digits are enough."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for most, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
