"""Options of `subscribe` and `handle`, and the check of their values before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Literal, TypedDict

import msgspec

from simplebus.client.core import arguments
from simplebus.core.channel.pattern import check_pattern
from simplebus.core.limits import (
    BACKOFF_SECONDS_MAX,
    BACKOFF_STEPS_MAX,
    IDLE_SECONDS_MAX,
    SEQUENCE_MAX,
)
from simplebus.core.protocol.requests import START_KEYWORDS, Start, SubscribeRequest

_DURABLE_SECONDS = (0.001, IDLE_SECONDS_MAX)
_BACKOFF_SECONDS = (0.001, BACKOFF_SECONDS_MAX)
_SLOW_POLICIES = ("block", "drop_oldest", "drop_newest", "disconnect")


StartPosition = (
    Literal["waiting", "new", "earliest", "last", "last_values"] | int | datetime | Start
)
"""Position at which a new subscription begins."""
SlowPolicy = Literal["block", "drop_oldest", "drop_newest", "disconnect"]
"""Treatment of messages above `max_pending`."""


class SubscribeOptions(TypedDict, total=False):
    """Keyword arguments of `subscribe` and `handle`, for programs that pass them on.

    `simplebus.Bus.subscribe` describes each of them.
    """

    durable: str | None
    durable_seconds: float | None
    group: str | None
    start: StartPosition
    max_in_flight: int | None
    slow: SlowPolicy
    max_pending: int | None
    ack_seconds: float | None
    max_deliveries: int | None
    backoff: Iterable[float] | None
    by_key: bool


def subscribe_request(
    channels: tuple[str, ...] = (),
    *,
    durable: str | None = None,
    durable_seconds: float | None = None,
    group: str | None = None,
    start: StartPosition = "waiting",
    max_in_flight: int | None = None,
    slow: SlowPolicy = "block",
    max_pending: int | None = None,
    ack_seconds: float | None = None,
    max_deliveries: int | None = None,
    backoff: Iterable[float] | None = None,
    by_key: bool = False,
) -> SubscribeRequest:
    """Return the request for a subscription with these options.

    Raises:
        ValueError: An option has a value that no bus accepts.
        TypeError: An option has a value of the wrong type.
    """
    if slow not in _SLOW_POLICIES:
        raise ValueError(f"slow is one of {', '.join(_SLOW_POLICIES)}, got {slow!r}")
    if slow == "block" and max_pending is not None:
        raise ValueError(
            "max_pending cannot be combined with slow='block': leave it out, or set slow to "
            "drop_oldest, drop_newest or disconnect"
        )
    if slow != "block" and max_pending is None:
        raise ValueError(f"slow is {slow!r}, so max_pending must be given")
    if durable_seconds is not None:
        minimum, maximum = _DURABLE_SECONDS
        durable_seconds = arguments.check_seconds(
            "durable_seconds", durable_seconds, minimum=minimum, maximum=maximum
        )
        if durable is None:
            raise ValueError(
                f"durable_seconds is {durable_seconds:g}, so durable must be given: a position "
                "without a name ends with its connection"
            )
    minimum, maximum = _BACKOFF_SECONDS
    if ack_seconds is not None:
        ack_seconds = arguments.check_seconds(
            "ack_seconds", ack_seconds, minimum=minimum, maximum=maximum
        )
    backoff_seconds: list[float] | None = None
    if backoff is not None:
        if isinstance(backoff, str | bytes) or not isinstance(backoff, Iterable):
            raise TypeError(f"backoff must be a list of seconds, got {backoff!r}")
        backoff_seconds = [
            arguments.check_seconds("backoff", delay, minimum=minimum, maximum=maximum)
            for delay in backoff
        ]
        if not 1 <= len(backoff_seconds) <= BACKOFF_STEPS_MAX:
            raise ValueError(
                f"backoff must have 1 to {BACKOFF_STEPS_MAX} values, got {len(backoff_seconds)}"
            )
    if not isinstance(by_key, bool):
        raise TypeError(f"by_key must be true or false, got {by_key!r}")
    if by_key and group is None:
        raise ValueError("by_key is true, so group must be given")
    request = SubscribeRequest(
        channels=[check_pattern(_check_is_text(channel)) for channel in channels],
        durable=durable,
        idle_seconds=durable_seconds,
        group=group,
        start=_encode_start(start),
        max_in_flight=max_in_flight,
        max_pending=max_pending,
        slow=slow,
        ack_seconds=ack_seconds,
        max_deliveries=max_deliveries,
        backoff=backoff_seconds,
        by_key=by_key,
    )
    try:
        return msgspec.json.decode(request.encode(), type=SubscribeRequest)
    except msgspec.ValidationError as error:
        raise ValueError(f"invalid subscription option: {error}") from None


def _check_is_text(channel: str) -> str:
    if not isinstance(channel, str):
        raise TypeError(
            f"a pattern of channels must be text, got {channel!r}; pass several one by one: "
            'subscribe(…, "orders.eu.*", "orders.us.*")'
        )
    return channel


def seconds_of(name: str, time: datetime) -> float:
    """Return seconds since 1970. Raises TypeError or ValueError if `time` is not a valid time."""
    if not isinstance(time, datetime):
        raise TypeError(f"{name} must be a datetime, got {time!r}")
    try:
        return time.timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} is a time outside the supported range: {time!r}") from error


def _encode_start(start: str | int | datetime | Start) -> str | Start:
    if isinstance(start, Start):
        return start
    if isinstance(start, datetime):
        return Start(time=seconds_of("start", start))
    if isinstance(start, int) and not isinstance(start, bool):
        return Start(
            sequence=arguments.check_integer("start", start, minimum=0, maximum=SEQUENCE_MAX)
        )
    if start not in START_KEYWORDS:
        raise ValueError(
            f"start is one of {', '.join(START_KEYWORDS)}, a sequence or a datetime, got {start!r}"
        )
    return start
