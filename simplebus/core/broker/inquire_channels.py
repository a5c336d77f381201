"""Who gets what is published on a channel, by which pattern; and who nearly does.

Rule 1: which positions match is asked of the same tables that deliver; a pattern is only looked for
among those of who matches, and of as many others as is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from simplebus.core.channel.near_miss import why_not
from simplebus.core.channel.pattern import check_name, matches
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    EXPLAINED_CHARACTERS,
    EXPLAINED_MATCHES,
    EXPLAINED_MEMBERS,
    EXPLAINED_POSITIONS,
    EXPLAINED_SESSIONS,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.subject_bindings import ClassSubjectBindings
from simplebus.core.protocol.inquiry import ChannelClass, ChannelSaid, Listener, Match
from simplebus.core.subscription.subscription import BrokerSubscription


class ChannelListenerSource(Protocol):
    """Another door, whose clients hear channels too."""

    def find_listeners(self, channel: str, max_count: int) -> tuple[list[Listener], int]:
        """Who hears what is published there, up to so many, and how many were left out."""


class _PatternBudget:
    """How much may still be looked at."""

    def __init__(self) -> None:
        self.remaining_count = EXPLAINED_MATCHES

    def try_spend(self, count: int) -> bool:
        """Whether so many patterns may be looked at."""
        self.remaining_count -= count
        return self.remaining_count >= 0


def report_channel(
    channel: str,
    classes: Iterable[MessageClass],
    *,
    subject_bindings: ClassSubjectBindings,
    now: float,
    describe_consumer: Callable[[BrokerSubscription], str],
    listener_sources: Iterable[ChannelListenerSource],
) -> ChannelSaid:
    """Raises RemoteProtocolError (bad_channel) for what is none."""
    try:
        check_name(channel)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CHANNEL, str(error)) from None
    looks = _PatternBudget()
    found = [
        said
        for cls in classes
        if (
            said := _report_class(
                channel, cls, subject_bindings.subjects_of(cls.class_id), describe_consumer, looks
            )
        )
        is not None
    ]
    listeners: list[Listener] = []
    left_out = 0
    for door in listener_sources:
        there, more = door.find_listeners(channel, EXPLAINED_POSITIONS - len(listeners))
        listeners += there
        left_out += more
    return ChannelSaid(
        channel=channel,
        now=now,
        classes=found[:EXPLAINED_SESSIONS],
        classes_left_out=max(0, len(found) - EXPLAINED_SESSIONS),
        listeners=listeners,
        listeners_left_out=left_out,
    )


def _report_class(
    channel: str,
    cls: MessageClass,
    subjects: tuple[str, ...],
    describe_consumer: Callable[[BrokerSubscription], str],
    pattern_budget: _PatternBudget,
) -> ChannelClass | None:
    """What one class has to do with it; None for nothing."""
    bound = [subject for subject in subjects if matches(subject, channel)]
    stored = cls.channels.count_stored(channel)
    wanting = set(cls.channels.find_filters(channel))
    found: list[Match] = []
    near: list[Match] = []
    left_out = 0
    for position in cls.subscriptions:
        patterns = position.channel_filter.patterns if position.channel_filter is not None else ()
        if position.channel_filter is None or position.channel_filter in wanting:
            if len(found) >= EXPLAINED_MEMBERS:
                left_out += 1
                continue
            pattern = ""
            if pattern_budget.try_spend(len(patterns)):
                pattern = next((each for each in patterns if matches(each, channel)), "")
            found.append(_build_match(position, describe_consumer, pattern, ""))
        elif len(near) < EXPLAINED_MEMBERS and pattern_budget.try_spend(len(patterns)):
            for each in islice(patterns, EXPLAINED_MATCHES):
                if reason := why_not(each, channel):
                    near.append(_build_match(position, describe_consumer, each, reason))
                    break
    if not (bound or stored or wanting or near):
        return None  # Who gets everything says nothing about this channel.
    return ChannelClass(
        class_id=cls.class_id,
        name=cls.name,
        stored=stored,
        subjects=bound[:EXPLAINED_MEMBERS],
        matches=found,
        near=near,
        left_out=left_out,
    )


def _build_match(
    position: BrokerSubscription,
    describe_consumer: Callable[[BrokerSubscription], str],
    pattern: str,
    near_miss_reason: str,
) -> Match:
    return Match(
        class_id=position.class_id,
        who=describe_consumer(position),
        session=position.outbox.session_id,
        number=position.subscription_number,
        durable=position.durable,
        group=position.group,
        pattern=pattern[:EXPLAINED_CHARACTERS],
        why_not=near_miss_reason,
    )
