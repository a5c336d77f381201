"""Reports on a channel: the positions and listeners that receive its messages, and near misses.

Matching positions come from the tables that deliver. The pattern that matches is searched only
among those, and near misses only in a bounded number of other patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Protocol

from simplebus.core.channel.explain_mismatch import explain_mismatch
from simplebus.core.channel.pattern import check_name, matches
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    INQUIRY_MEMBERS_MAX,
    INQUIRY_PATTERN_CHECKS_MAX,
    INQUIRY_POSITIONS_MAX,
    INQUIRY_SESSIONS_MAX,
    INQUIRY_TEXT_CHARACTERS_MAX,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.subject_bindings import ClassSubjectBindings
from simplebus.core.protocol.inquiry import ChannelClassInfo, ChannelInfo, ListenerInfo, MatchInfo
from simplebus.core.steps import drain_list
from simplebus.core.subscription.position import Position

_POSITIONS_PER_STEP = 256


class ChannelListenerSource(Protocol):
    """A server whose clients listen to channels without a class."""

    def find_listeners(
        self, channel: str, max_count: int
    ) -> Generator[None, None, tuple[list[ListenerInfo], int]]:
        """Return at most `max_count` listeners of a channel, and how many were left out, in
        steps.
        """


class _PatternBudget:
    """Number of patterns that may still be compared."""

    def __init__(self) -> None:
        self.remaining_count = INQUIRY_PATTERN_CHECKS_MAX

    def try_spend(self, count: int) -> bool:
        """Return True if `count` more patterns may be compared."""
        self.remaining_count -= count
        return self.remaining_count >= 0


def report_channel_in_steps(
    channel: str,
    classes: Iterable[MessageClass],
    *,
    subject_bindings: ClassSubjectBindings,
    now: float,
    describe_consumer: Callable[[Position], str],
    listener_sources: Iterable[ChannelListenerSource],
) -> Generator[None, None, ChannelInfo]:
    """Build the report in steps. Raises RemoteProtocolError (bad_channel) if the channel is not a
    legal name.
    """
    try:
        check_name(channel)
    except ValueError as error:
        raise RemoteProtocolError(Reason.BAD_CHANNEL, str(error)) from None
    pattern_budget = _PatternBudget()
    reports: list[ChannelClassInfo] = []
    for cls in classes:
        report = yield from _report_class(
            channel,
            cls,
            subject_bindings.subjects_of(cls.class_id),
            describe_consumer,
            pattern_budget,
        )
        if report is not None:
            reports.append(report)
    listeners: list[ListenerInfo] = []
    left_out = 0
    for source in listener_sources:
        found, omitted = yield from source.find_listeners(
            channel, INQUIRY_POSITIONS_MAX - len(listeners)
        )
        listeners += found
        left_out += omitted
    return ChannelInfo(
        channel=channel,
        now=now,
        classes=reports[:INQUIRY_SESSIONS_MAX],
        classes_left_out=max(0, len(reports) - INQUIRY_SESSIONS_MAX),
        listeners=listeners,
        listeners_left_out=left_out,
    )


def _report_class(
    channel: str,
    cls: MessageClass,
    subjects: tuple[str, ...],
    describe_consumer: Callable[[Position], str],
    pattern_budget: _PatternBudget,
) -> Generator[None, None, ChannelClassInfo | None]:
    """Return the report on one class, or None if the class has nothing to do with the channel."""
    bound = [subject for subject in subjects if matches(subject, channel)]
    stored = cls.channels.count_stored(channel)
    matching_filters = set(cls.channels.find_filters(channel))
    match_reports: list[MatchInfo] = []
    near_misses: list[MatchInfo] = []
    left_out = 0
    for number, position in enumerate(drain_list(list(cls.positions)), 1):
        if number % _POSITIONS_PER_STEP == 0:
            yield
        if position not in cls.positions:  # It has ended meanwhile.
            continue
        patterns = position.channel_filter.patterns if position.channel_filter is not None else ()
        if position.channel_filter is None or position.channel_filter in matching_filters:
            if len(match_reports) >= INQUIRY_MEMBERS_MAX:
                left_out += 1
                continue
            pattern = ""
            if pattern_budget.try_spend(len(patterns)):
                pattern = next((pattern for pattern in patterns if matches(pattern, channel)), "")
            match_reports.append(_build_match(position, describe_consumer, pattern, ""))
        elif len(near_misses) < INQUIRY_MEMBERS_MAX and pattern_budget.try_spend(len(patterns)):
            for pattern in islice(patterns, INQUIRY_PATTERN_CHECKS_MAX):
                if reason := explain_mismatch(pattern, channel):
                    near_misses.append(_build_match(position, describe_consumer, pattern, reason))
                    break
    if not (bound or stored or matching_filters or near_misses):
        return None  # Positions without patterns are no reason to list the class.
    return ChannelClassInfo(
        class_id=cls.class_id,
        name=cls.name,
        stored=stored,
        subjects=bound[:INQUIRY_MEMBERS_MAX],
        matches=match_reports,
        near=near_misses,
        left_out=left_out,
    )


def _build_match(
    position: Position,
    describe_consumer: Callable[[Position], str],
    pattern: str,
    near_miss_reason: str,
) -> MatchInfo:
    return MatchInfo(
        class_id=position.class_id,
        who=describe_consumer(position),
        session=position.session_id,
        number=position.subscription_number,
        durable=position.durable,
        group=position.group,
        pattern=pattern[:INQUIRY_TEXT_CHARACTERS_MAX],
        why_not=near_miss_reason,
    )
