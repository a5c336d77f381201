"""What a position waits for, in a word and in a sentence with figures.

Rule 1: plain values in, words out. Where the values come from is no business of this file.
Rule 2: one reason is said: what would have to happen first for the next message to leave.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from simplebus.core.protocol.inquiry import InFlightInfo


class WaitReason(enum.StrEnum):
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
class WaitFacts:
    """About one position, or one member of a group."""

    holder_label: str = ""
    """Who has what is in flight longest, or takes no bytes."""
    ready_count: int = 0
    """Messages that could be sent now."""
    in_flight_count: int = 0
    in_flight_max: int = 0
    """0 for any number."""
    in_flight_bytes: int = 0
    in_flight_bytes_max: int = 0
    oldest: InFlightInfo | None = None
    is_at_in_flight_limit: bool = False
    """Whether no more may be in flight."""
    key_blocked_count: int = 0
    """Messages that wait for others of their key."""
    delayed_count: int = 0
    next_delay_seconds: float = 0.0
    has_consumer: bool = True
    unattended_seconds: float = 0.0
    send_blocked_seconds: float = 0.0
    """How long a connection has taken no bytes."""
    send_blocked_bytes: int = 0
    other_members_count: int = 0
    """Messages that other members of its group have."""
    has_matched: bool = True
    """Whether anything was ever for it; or it has no patterns."""
    pending_dead_letter_count: int = 0
    """Messages that are given up, and no dead letters yet."""
    dead_letter_class: str = ""
    """The name of the class in which there is no room for them."""


def explain_wait(facts: WaitFacts) -> tuple[WaitReason, str]:
    """The word and the sentence."""
    word, sentence = _explain_delivery_wait(facts)
    count = facts.pending_dead_letter_count
    if not count:
        return word, sentence
    room = (
        f"room in {facts.dead_letter_class!r}: {format_message_count(count)} "
        f"{'is' if count == 1 else 'are'} given up"
    )
    if word in (WaitReason.NOTHING, WaitReason.OTHERS, WaitReason.MATCH):
        return WaitReason.ROOM, room
    return word, f"{sentence}; and for {room}"


def _explain_delivery_wait(facts: WaitFacts) -> tuple[WaitReason, str]:
    ready, put_off = facts.ready_count, facts.delayed_count
    if not facts.has_consumer:
        left = ready + put_off + facts.in_flight_count + facts.key_blocked_count
        what = (
            f"{format_message_count(left)} wait{'s' * (left == 1)} for it"
            if left
            else "nothing waits"
        )
        return (
            WaitReason.NOBODY,
            f"nobody is connected to it since {format_duration(facts.unattended_seconds)}; {what}",
        )
    if (
        ready
        and facts.is_at_in_flight_limit
        and (facts.in_flight_count or not facts.send_blocked_seconds)
    ):
        return (
            WaitReason.ACKS,
            f"its acknowledgements: {_describe_in_flight(facts)}{_describe_send_blocked(facts)}",
        )
    if ready and facts.send_blocked_seconds:
        return WaitReason.BYTES, (
            "its connection, which has taken no bytes since "
            f"{format_duration(facts.send_blocked_seconds)}: "
            f"{facts.holder_label}"
        )
    if ready:
        return WaitReason.TURN, f"its turn: {format_message_count(ready)} to be sent now"
    if facts.in_flight_count:
        return (
            WaitReason.ACKS,
            f"its acknowledgements: {_describe_in_flight(facts)}{_describe_send_blocked(facts)}",
        )
    if put_off:
        are = "is" if put_off == 1 else "are"
        return WaitReason.TIME, (
            f"time: {format_message_count(put_off)} {are} put off, the first for another "
            f"{format_duration(facts.next_delay_seconds)}"
        )
    if facts.other_members_count:
        return (
            WaitReason.OTHERS,
            "nothing to send: other members have "
            f"{format_message_count(facts.other_members_count)}",
        )
    if not facts.has_matched:
        return WaitReason.MATCH, "a message that its patterns match: none was for it so far"
    return WaitReason.NOTHING, "nothing to send"


_COMPLETE_SENTENCES = (WaitReason.NOBODY, WaitReason.OTHERS, WaitReason.NOTHING)
"""Where the sentence is one by itself."""


def complete_sentence(reason: str, sentence: str) -> str:
    """The sentence with its verb."""
    return sentence if reason in _COMPLETE_SENTENCES else f"it waits for {sentence}"


def _describe_in_flight(facts: WaitFacts) -> str:
    """How much is in flight, and since when."""
    if facts.is_at_in_flight_limit and facts.in_flight_bytes >= facts.in_flight_bytes_max > 0:
        said = (
            f"{format_bytes(facts.in_flight_bytes)} of "
            f"{format_bytes(facts.in_flight_bytes_max)} in flight"
        )
    elif facts.in_flight_max:
        said = f"{facts.in_flight_count:,} of {facts.in_flight_max:,} in flight"
    else:
        said = f"{facts.in_flight_count:,} in flight"
    oldest = facts.oldest
    if oldest is not None:
        said += f", the oldest since {format_duration(oldest.first_seconds)}"
        if oldest.attempt > 1:
            said += f" (sent {oldest.attempt} times)"
    said = f"{said}, {facts.holder_label}" if facts.holder_label else said
    if facts.key_blocked_count:
        said += (
            f"; {format_message_count(facts.key_blocked_count)} "
            f"wait{'s' * (facts.key_blocked_count == 1)} for others of their key"
        )
    return said


def _describe_send_blocked(facts: WaitFacts) -> str:
    if not facts.send_blocked_seconds:
        return ""
    return f", which has taken no bytes since {format_duration(facts.send_blocked_seconds)}"


def format_message_count(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """A span of time for people: two digits are enough."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for most, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"


def format_bytes(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
