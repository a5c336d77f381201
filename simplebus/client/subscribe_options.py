"""How a subscription is asked for: the options of `subscribe` and `handle`, checked.

Rule 1: what cannot be is refused here, before anything is sent, with what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Literal, TypedDict

import msgspec

from simplebus.client.core import arguments
from simplebus.core.channel.pattern import check_pattern
from simplebus.core.limits import BACKOFF_MAX, IDLE_SECONDS_MAX, PAUSE_SECONDS_MAX, SEQUENCE_MAX
from simplebus.core.protocol.requests import STARTS, Start, SubscribeRequest

_DURABLE_SECONDS = (0.001, IDLE_SECONDS_MAX)
_PAUSE_SECONDS = (0.001, PAUSE_SECONDS_MAX)
_SLOW = ("block", "drop_oldest", "drop_newest", "disconnect")


class Options(TypedDict, total=False):
    """What `subscribe` and `handle` may be told beside class and channels."""

    durable: str | None
    """A name under which the bus keeps the position when the program is gone."""
    durable_seconds: float | None
    """How long the bus keeps a durable to which nobody is connected; None: as it was said before,
    by default for ever."""
    group: str | None
    """Each message goes to one of the subscriptions in a group, wherever they are."""
    start: Literal["waiting", "new", "earliest", "last", "last_values"] | int | datetime | Start
    """Where to begin: with what waits for a first subscription, else with what is new, as by
    default; with what is new; with the earliest or the last message there; with the last message
    of each channel; with a sequence; with the first message at or after a time. A durable or a
    group that is there goes on instead."""
    max_in_flight: int | None
    """Messages that may be here unacknowledged; None for the bus's default."""
    slow: Literal["block", "drop_oldest", "drop_newest", "disconnect"]
    """What becomes of what this subscription does not keep up with. By default, `block`, it waits
    in the class, until that is full and its publishers wait. With the others it waits up to
    `max_pending`; above, the subscription loses the oldest or the newest message, or is ended."""
    max_pending: int | None
    """Messages stored for it above which `slow` decides: needed with all but `block`, and of no
    meaning with that."""
    ack_seconds: float | None
    """How long a message may be unacknowledged before it comes again; None: as the bus says."""
    max_deliveries: int | None
    """How often a message is sent before it is given up; 0 for without end, None: as the bus
    says."""
    backoff: Iterable[float] | None
    """Pauses in seconds before a message comes the second time, the third and so on, the last one
    before every further time; None: as the bus says. What is not refused comes no sooner than
    `ack_seconds`."""
    by_key: bool
    """Of a group: whether messages with one key go to one member, one after the other. The next one
    comes when the one before is acknowledged or given up; by default that is not so."""


def subscribe_request(
    channels: tuple[str, ...] = (),
    *,
    durable: str | None = None,
    durable_seconds: float | None = None,
    group: str | None = None,
    start: str | int | datetime | Start = "waiting",
    max_in_flight: int | None = None,
    slow: str = "block",
    max_pending: int | None = None,
    ack_seconds: float | None = None,
    max_deliveries: int | None = None,
    backoff: Iterable[float] | None = None,
    by_key: bool = False,
    **unknown: object,
) -> SubscribeRequest:
    """The request that says so. Raises ValueError for what no bus would grant, and TypeError for
    what is of the wrong kind."""
    if unknown:
        arguments.reject_unknown_names(unknown, ("auto_ack", *Options.__annotations__))
    if slow not in _SLOW:
        raise ValueError(f"slow is one of {', '.join(_SLOW)}, got {slow!r}")
    if slow == "block" and max_pending is not None:
        raise ValueError(
            "max_pending has no meaning with slow='block', by which messages wait in the class: "
            "leave it out, or say what becomes of those above it: drop_oldest, drop_newest or "
            "disconnect"
        )
    if slow != "block" and max_pending is None:
        raise ValueError(f"slow is {slow!r}, so max_pending must be given: where it begins")
    if durable_seconds is not None:
        least, most = _DURABLE_SECONDS
        durable_seconds = arguments.check_seconds(
            "durable_seconds", durable_seconds, minimum=least, maximum=most
        )
        if durable is None:
            raise ValueError(
                f"durable_seconds is {durable_seconds:g}, so durable must be given: what has no "
                "name ends with its connection"
            )
    least, most = _PAUSE_SECONDS
    if ack_seconds is not None:
        ack_seconds = arguments.check_seconds("ack_seconds", ack_seconds, minimum=least, maximum=most)
    pauses: list[float] | None = None
    if backoff is not None:
        if isinstance(backoff, str | bytes) or not isinstance(backoff, Iterable):
            raise TypeError(f"backoff must be a list of seconds, got {backoff!r}")
        pauses = [arguments.check_seconds("backoff", each, minimum=least, maximum=most) for each in backoff]
        if not 1 <= len(pauses) <= BACKOFF_MAX:
            raise ValueError(f"backoff must have 1 to {BACKOFF_MAX} pauses, got {len(pauses)}")
    if not isinstance(by_key, bool):
        raise TypeError(f"by_key must be true or false, got {by_key!r}")
    if by_key and group is None:
        raise ValueError("by_key says which member of a group gets a message, so give a group")
    request = SubscribeRequest(
        channels=[check_pattern(_pattern(channel)) for channel in channels],
        durable=durable,
        idle_seconds=durable_seconds,
        group=group,
        start=_start(start),
        max_in_flight=max_in_flight,
        max_pending=max_pending,
        slow=slow,
        ack_seconds=ack_seconds,
        max_deliveries=max_deliveries,
        backoff=pauses,
        by_key=by_key,
    )
    try:
        return msgspec.json.decode(request.encode(), type=SubscribeRequest)
    except msgspec.ValidationError as error:
        raise ValueError(f"no bus grants this subscription: {error}") from None


def _pattern(channel: str) -> str:
    if not isinstance(channel, str):
        raise TypeError(
            f"a pattern of channels must be text, got {channel!r}; several are given one by one: "
            'subscribe(…, "orders.eu.*", "orders.us.*")'
        )
    return channel


def seconds_of(name: str, time: datetime) -> float:
    """Seconds since 1970. Raises TypeError for what is no time, ValueError for one of no clock."""
    if not isinstance(time, datetime):
        raise TypeError(f"{name} must be a datetime, got {time!r}")
    try:
        return time.timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} is no time that a bus can know, got {time!r}") from error


def _start(start: str | int | datetime | Start) -> str | Start:
    if isinstance(start, Start):
        return start
    if isinstance(start, datetime):
        return Start(time=seconds_of("start", start))
    if isinstance(start, int) and not isinstance(start, bool):
        return Start(sequence=arguments.check_integer("start", start, minimum=0, maximum=SEQUENCE_MAX))
    if start not in STARTS:
        raise ValueError(
            f"start is one of {', '.join(STARTS)}, a sequence or a datetime, got {start!r}"
        )
    return start
