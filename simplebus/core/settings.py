"""How a bus behaves.

Rule 1: what is only a bound is a field of `Limits`; what changes what happens stands here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from simplebus.core.limits import (
    BACKOFF_MAX,
    DELIVERIES,
    DELIVERIES_MAX,
    HEARTBEAT_SECONDS,
    PAUSE_SECONDS_MAX,
    RING_BYTES_MIN,
    Limits,
)


class FullPolicy(enum.StrEnum):
    """What happens to a message for a class that is at its limit."""

    BLOCK = "block"
    """Its publisher waits."""
    DROP_OLDEST = "drop_oldest"
    """The oldest message makes room."""
    DROP_NEWEST = "drop_newest"
    """It is dropped itself."""
    SPILL = "spill"
    """The oldest in memory make room, and stay on disk; with a journal only."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long messages are kept that nobody needs any more; 0 everywhere for not at all.

    Where several are given, a message goes when it is over one of them. Raises ValueError for what
    is below 0.
    """

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("messages", "bytes", "seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"keep {name} must be 0 or more, got {getattr(self, name)}")

    def __bool__(self) -> bool:
        return bool(self.messages or self.bytes or self.seconds)


@dataclass(frozen=True, slots=True)
class ClassSettings:
    """What one class does in its own way; None for as every class does.

    Raises ValueError for what makes no sense.
    """

    keep: Retention | None = None
    full_policy: FullPolicy | None = None
    messages_max: int | None = None
    """Messages that it may hold."""
    bytes_max: int | None = None
    """Memory that it may hold."""
    last_values: bool | None = None
    """Whether it keeps the last message of each channel, besides everything else; None for as who
    names it asks."""
    ack_seconds: float | None = None
    """How long a message may be unacknowledged, the first time."""
    deliveries_max: int | None = None
    """How often a message is sent before it is given up; 0 for without end."""
    backoff_seconds: tuple[float, ...] | None = None
    """Pauses before the second sending, the third and so on, the last one for all further ones."""
    disk_bytes_max: int | None = None
    """Bytes of frames that it may hold on disk only, about; None for any number. At this limit its
    publishers wait."""

    def __post_init__(self) -> None:
        _check_deliveries(self.deliveries_max or 0)
        backoff = self.backoff_seconds
        if backoff is not None and not 1 <= len(backoff) <= BACKOFF_MAX:
            raise ValueError(
                f"backoff must have from 1 to {BACKOFF_MAX} pauses, got {len(backoff)}"
            )
        for what, seconds in (
            *(("ack_seconds", s) for s in (self.ack_seconds,) if s is not None),
            *(("backoff", s) for s in backoff or ()),
        ):
            if not 0 < seconds <= PAUSE_SECONDS_MAX:
                raise ValueError(
                    f"{what} must be above 0 and up to {PAUSE_SECONDS_MAX:g} seconds, got "
                    f"{seconds:g}"
                )
        for name, least in (("messages_max", 1), ("bytes_max", 4 * RING_BYTES_MIN)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.disk_bytes_max is not None and self.disk_bytes_max < 1:
            raise ValueError(f"disk_bytes_max must be at least 1, got {self.disk_bytes_max}")
        if self.last_values and self.full_policy is FullPolicy.SPILL:
            raise ValueError("last_values is for classes that fit into memory, and not for spill")


def _check_deliveries(count: int) -> None:
    if not 0 <= count <= DELIVERIES_MAX:
        raise ValueError(f"max_deliveries must be from 0 to {DELIVERIES_MAX}, got {count}")


_AS_ALL = ClassSettings()


@dataclass(frozen=True, slots=True)
class Settings:
    """How a broker behaves.

    Raises ValueError for an ack timeout that the wire cannot carry.
    """

    limits: Limits = field(default_factory=Limits)
    ack_timeout: int = 6
    """Ticks after which an unacknowledged message is sent again, the first time."""
    tick_seconds: float = 1.0
    full_policy: FullPolicy = FullPolicy.BLOCK
    keep: Retention = field(default_factory=Retention)
    """What every class keeps that nobody needs any more."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    """The longest that a version 2 peer may be silent; 0 for ever."""
    classes: Mapping[int | str, ClassSettings] = field(default_factory=dict)
    """Of classes that do something in their own way, by id or by name."""
    deliveries_max: int = DELIVERIES
    """How often a message is sent before it is given up; 0 for without end."""

    def __post_init__(self) -> None:
        _check_deliveries(self.deliveries_max)
        if not 1 <= self.ack_timeout <= 0xFFFF:
            raise ValueError(f"ack_timeout must be from 1 to 65535 ticks, got {self.ack_timeout}")
        if not self.tick_seconds > 0:
            raise ValueError(f"tick_seconds must be above 0, got {self.tick_seconds}")
        if not self.heartbeat_seconds >= 0:
            raise ValueError(f"heartbeat_seconds must be 0 or more, got {self.heartbeat_seconds}")
        for key, own in self.classes.items():
            if own.last_values and self.policy(own) is FullPolicy.SPILL:
                raise ValueError(
                    f"class {key} spills, as all do, and such a class keeps no last values: give "
                    "it another policy (full)"
                )

    @property
    def spills(self) -> bool:
        """Whether some class may."""
        policies = [self.full_policy, *(each.full_policy for each in self.classes.values())]
        return FullPolicy.SPILL in policies

    def policy(self, own: ClassSettings) -> FullPolicy:
        """What happens to messages for a class that is full."""
        return own.full_policy or self.full_policy

    def of_class(self, class_id: int, name: str = "") -> ClassSettings:
        """What this class does in its own way. What is said of its name wins."""
        return self.classes.get(name) or self.classes.get(class_id, _AS_ALL)
