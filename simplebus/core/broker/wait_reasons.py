"""Wait reasons: explains what a position waits for, as a stable word and as a sentence.

Works on plain values. Exactly one reason is given: the event that must happen before the next
message can be sent.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from simplebus.core.protocol.inquiry import InFlightInfo


class WaitReason(enum.StrEnum):
    """Event that a position waits for. The values are stable: scripts use them."""

    NOTHING = "nothing"
    ACKS = "acks"
    """Acks of messages in flight."""
    BYTES = "bytes"
    """A connection that reads nothing."""
    NOBODY = "nobody"
    """A subscription that connects."""
    OTHERS = "others"
    """Messages that other members of the group hold."""
    TIME = "time"
    """The delays of all remaining messages."""
    MATCH = "match"
    """A message that matches a pattern; none of the stored messages does."""
    TURN = "turn"
    """The next turn: messages are being sent."""
    SPACE = "space"
    """Space for dead letters of all remaining messages."""


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """State of one position, or of one member of a group."""

    holder_label: str = ""
    """Description of the session that has held a message longest, or reads nothing."""
    ready_count: int = 0
    """Messages that could be sent now."""
    in_flight_count: int = 0
    in_flight_max: int = 0
    """0 for no limit."""
    in_flight_bytes: int = 0
    in_flight_bytes_max: int = 0
    oldest: InFlightInfo | None = None
    is_at_in_flight_limit: bool = False
    key_blocked_count: int = 0
    """Messages that wait for earlier messages with the same key."""
    delayed_count: int = 0
    next_delay_seconds: float = 0.0
    has_consumer: bool = True
    unattended_seconds: float = 0.0
    send_blocked_seconds: float = 0.0
    """Time for which the connection has read nothing."""
    send_blocked_bytes: int = 0
    other_members_count: int = 0
    """Messages that other members of the group hold."""
    has_matched: bool = True
    """True if any message has matched, or the position has no patterns."""
    pending_dead_letter_count: int = 0
    """Messages that were given up and are not dead letters yet."""
    dead_letter_class: str = ""
    """Name of the full dead-letter class."""


def explain_wait(facts: WaitFacts) -> tuple[WaitReason, str]:
    """Return the word and the sentence."""
    word, sentence = _explain_delivery_wait(facts)
    count = facts.pending_dead_letter_count
    if not count:
        return word, sentence
    space = (
        f"space in {facts.dead_letter_class!r} for {count:,} dead letter{'' if count == 1 else 's'}"
    )
    if word in (WaitReason.NOTHING, WaitReason.OTHERS, WaitReason.MATCH):
        return WaitReason.SPACE, space
    return word, f"{sentence}; and for {space}"


def _explain_delivery_wait(facts: WaitFacts) -> tuple[WaitReason, str]:
    ready, delayed = facts.ready_count, facts.delayed_count
    if not facts.has_consumer:
        count = ready + delayed + facts.in_flight_count + facts.key_blocked_count
        backlog = format_waiting_count(count) if count else "nothing waits"
        return (
            WaitReason.NOBODY,
            "no subscription has been connected for "
            f"{format_duration(facts.unattended_seconds)}; {backlog}",
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
            "its connection, which has read nothing for "
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
    if delayed:
        are = "is" if delayed == 1 else "are"
        return WaitReason.TIME, (
            f"a delay: {format_message_count(delayed)} {are} delayed, the first for another "
            f"{format_duration(facts.next_delay_seconds)}"
        )
    if facts.other_members_count:
        return (
            WaitReason.OTHERS,
            "nothing to send: other members hold "
            f"{format_message_count(facts.other_members_count)}",
        )
    if not facts.has_matched:
        return WaitReason.MATCH, "a message that matches its patterns: none has so far"
    return WaitReason.NOTHING, "nothing to send"


_COMPLETE_SENTENCES = (WaitReason.NOBODY, WaitReason.OTHERS, WaitReason.NOTHING)
"""Reasons whose sentence needs no "it waits for" in front."""


def complete_sentence(reason: str, sentence: str) -> str:
    """Return the sentence with its verb."""
    return sentence if reason in _COMPLETE_SENTENCES else f"it waits for {sentence}"


def _describe_in_flight(facts: WaitFacts) -> str:
    """Describe the messages in flight and their age."""
    if facts.is_at_in_flight_limit and facts.in_flight_bytes >= facts.in_flight_bytes_max > 0:
        text = (
            f"{format_bytes(facts.in_flight_bytes)} of "
            f"{format_bytes(facts.in_flight_bytes_max)} in flight"
        )
    elif facts.in_flight_max:
        text = f"{facts.in_flight_count:,} of {facts.in_flight_max:,} in flight"
    else:
        text = f"{facts.in_flight_count:,} in flight"
    oldest = facts.oldest
    if oldest is not None:
        text += f", the oldest for {format_duration(oldest.first_seconds)}"
        if oldest.attempt > 1:
            text += f" (sent {oldest.attempt} times)"
    text = f"{text}, {facts.holder_label}" if facts.holder_label else text
    if facts.key_blocked_count:
        text += (
            f"; {format_waiting_count(facts.key_blocked_count)} for earlier messages with the "
            "same key"
        )
    return text


def _describe_send_blocked(facts: WaitFacts) -> str:
    if not facts.send_blocked_seconds:
        return ""
    return f", which has read nothing for {format_duration(facts.send_blocked_seconds)}"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Format a count and its noun: "1 message", "2,000 messages", "2 classes".

    `plural` is needed only if it is neither noun + "s" nor, after "s" or "ch", noun + "es".
    """
    plural = plural or noun + ("es" if noun.endswith(("s", "ch")) else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def format_message_count(count: int) -> str:
    return format_count(count, "message")


def format_waiting_count(count: int, noun: str = "message") -> str:
    """Format a count and its noun with the verb: "1 message waits", "2 messages wait"."""
    return f"{format_count(count, noun)} wait{'s' if count == 1 else ''}"


def format_duration(seconds: float) -> str:
    """Format a duration with about two digits."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"


def format_bytes(count: int) -> str:
    """Format a number of bytes with a unit."""
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
