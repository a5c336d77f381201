"""Settings of a broker and of its classes. Limits are in `limits`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from simplebus.core.limits import (
    BACKOFF_SECONDS_MAX,
    BACKOFF_STEPS_MAX,
    DEFAULT_DELIVERIES_MAX,
    DELIVERIES_MAX,
    HEARTBEAT_SECONDS,
    RING_BYTES_MIN,
    Limits,
)


class FullPolicy(enum.StrEnum):
    """Full-class policy: the handling of a new message for a class that is at its limit."""

    BLOCK = "block"
    """The publisher waits for space."""
    DROP_OLDEST = "drop_oldest"
    """The oldest messages are dropped."""
    DROP_NEWEST = "drop_newest"
    """The new message is dropped."""
    SPILL = "spill"
    """The oldest messages are evicted from memory and stay on disk. Requires a journal."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Amount that a class keeps after every subscription has acknowledged it; 0 is no retention.

    If several limits are set, a message is released when it exceeds any of them. Raises
    ValueError for
    a negative value.
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
    """Settings of one class that differ from the broker's; None for the broker's setting.

    Raises ValueError for a value that is out of range, or for a combination that is not supported.
    """

    keep: Retention | None = None
    full_policy: FullPolicy | None = None
    messages_max: int | None = None
    """Messages that the class may hold."""
    bytes_max: int | None = None
    """Memory of the class in bytes."""
    last_values: bool | None = None
    """True to keep the last message of each channel as well; None to follow the clients that
    declare the class.
    """
    ack_seconds: float | None = None
    """Ack timeout of the first delivery in seconds."""
    deliveries_max: int | None = None
    """Deliveries after which a message becomes a dead letter; 0 for no limit."""
    backoff_seconds: tuple[float, ...] | None = None
    """Delays before the second delivery, the third and so on. The last one is used for all later
    ones.
    """
    disk_bytes_max: int | None = None
    """Approximate frame bytes that the class may hold on disk only; None for no limit. At the limit
    its publishers wait.
    """
    pub_ack: bool | None = None
    """False if NATS messages with a reply subject get no PubAck, because programs reply to them."""

    def __post_init__(self) -> None:
        _check_deliveries(self.deliveries_max or 0)
        backoff = self.backoff_seconds
        if backoff is not None and not 1 <= len(backoff) <= BACKOFF_STEPS_MAX:
            raise ValueError(
                f"backoff_seconds must have from 1 to {BACKOFF_STEPS_MAX} delays, got "
                f"{len(backoff)}"
            )
        for setting, seconds in (
            *(("ack_seconds", s) for s in (self.ack_seconds,) if s is not None),
            *(("backoff_seconds", s) for s in backoff or ()),
        ):
            if not 0 < seconds <= BACKOFF_SECONDS_MAX:
                raise ValueError(
                    f"{setting} must be above 0 and up to {BACKOFF_SECONDS_MAX:g} seconds, got "
                    f"{seconds:g}"
                )
        for name, least in (("messages_max", 1), ("bytes_max", 4 * RING_BYTES_MIN)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.disk_bytes_max is not None and self.disk_bytes_max < 1:
            raise ValueError(f"disk_bytes_max must be at least 1, got {self.disk_bytes_max}")
        if self.last_values and self.full_policy is FullPolicy.SPILL:
            raise ValueError("last_values cannot be combined with the policy spill")


def _check_deliveries(count: int) -> None:
    if not 0 <= count <= DELIVERIES_MAX:
        raise ValueError(f"deliveries_max must be from 0 to {DELIVERIES_MAX}, got {count}")


_AS_ALL = ClassSettings()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a broker.

    Raises ValueError for a value that is out of range.
    """

    limits: Limits = field(default_factory=Limits)
    ack_timeout: int = 6
    """Ticks after which an unacknowledged message is redelivered for the first time."""
    tick_seconds: float = 1.0
    full_policy: FullPolicy = FullPolicy.BLOCK
    keep: Retention = field(default_factory=Retention)
    """Retention of every class."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    """The longest time that a version 2 peer may be silent; 0 for no limit."""
    classes: Mapping[int | str, ClassSettings] = field(default_factory=dict)
    """Settings of single classes, by id or by name."""
    deliveries_max: int = DEFAULT_DELIVERIES_MAX
    """Deliveries after which a message becomes a dead letter; 0 for no limit."""
    declare_only: bool = False
    """True if clients cannot create classes, except users with the right to configure them."""
    idle_class_seconds: float = 3600.0
    """Time after which an unused class without messages is removed; 0 to keep all classes."""

    def __post_init__(self) -> None:
        _check_deliveries(self.deliveries_max)
        if not 1 <= self.ack_timeout <= 0xFFFF:
            raise ValueError(f"ack_timeout must be from 1 to 65535 ticks, got {self.ack_timeout}")
        if not self.tick_seconds > 0:
            raise ValueError(f"tick_seconds must be above 0, got {self.tick_seconds}")
        if not self.heartbeat_seconds >= 0:
            raise ValueError(f"heartbeat_seconds must be 0 or more, got {self.heartbeat_seconds}")
        if not self.idle_class_seconds >= 0:
            raise ValueError(f"idle_class_seconds must be 0 or more, got {self.idle_class_seconds}")
        for key, class_settings in self.classes.items():
            policy = self.full_policy_for(class_settings)
            if class_settings.last_values and policy is FullPolicy.SPILL:
                raise ValueError(
                    f"class {key} keeps last values, but its policy is spill: set another policy "
                    "(full) for this class"
                )

    @property
    def has_spilling_class(self) -> bool:
        """True if any class may use the policy `spill`."""
        policies = [self.full_policy, *(cls.full_policy for cls in self.classes.values())]
        return FullPolicy.SPILL in policies

    def full_policy_for(self, class_settings: ClassSettings) -> FullPolicy:
        """Return the full-class policy for a class with these settings."""
        return class_settings.full_policy or self.full_policy

    def settings_for_class(self, class_id: int, name: str = "") -> ClassSettings:
        """Return the settings of a class. Settings for its name take precedence over those for its
        id.
        """
        return self.classes.get(name) or self.classes.get(class_id, _AS_ALL)
