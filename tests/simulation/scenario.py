"""What a life is like: what its bus is told, and what befalls it.

Rule 1: each field is given, or chance decides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import Any

from simplebus.core import dead_letters
from simplebus.core.broker.broker import Settings
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import ClassSettings, FullPolicy, Retention

_DEAD_MAX = 10_000


@dataclass(frozen=True)
class Shape:
    """Of one life."""

    level: Durability | None
    """None for a bus that keeps nothing."""
    ack_timeout: int
    segment_bytes: int
    policy: FullPolicy
    messages_max: int
    """Messages that a class may hold; 0 for any number."""
    dead_max: int
    """The same of dead letters."""
    read_bytes: int
    """So many are read back from disk at once."""
    values: bool
    """Whether classes keep last values."""
    keep: int
    """Messages that each class keeps that nobody needs."""
    purges: bool
    """Whether some messages are purged."""
    deliveries: int
    in_flight: int
    by_key: bool
    fates: tuple[str, ...]
    """What may befall it, one of them each second, about."""

    @classmethod
    def of(cls, chance: Random, **given: Any) -> Shape:
        """One that is given in part. Draws the same number of times whatever is given."""
        level = chance.choice(
            [Durability.DISK, Durability.DISK, Durability.OS, Durability.MEMORY, None]
        )
        policies = [FullPolicy.BLOCK, FullPolicy.DROP_OLDEST, FullPolicy.DROP_NEWEST]
        drawn = {
            "level": level,
            "ack_timeout": chance.choice([1, 2, 6]),
            "segment_bytes": chance.choice([1, 600, 1 << 20]),
            "policy": chance.choice([*policies, FullPolicy.SPILL, FullPolicy.SPILL]),
            "messages_max": chance.choice([0, 0, 6, 12, 30]),
            "dead_max": chance.choice([_DEAD_MAX, _DEAD_MAX, 3]),
            "read_bytes": chance.choice([200, 400, 1 << 20]),
            "values": chance.random() < 0.2,
            "keep": chance.choice([0, 0, 0, 5]),
            "purges": chance.random() < 0.3,
            "deliveries": chance.choice([0, 0, 3]),
            "in_flight": chance.choice([0, 1, 5]),
            "by_key": chance.random() < 0.5,
            "fates": ("kill", "cut", "stop", "dies", "full", "broken", "jump", *"------"),
        }
        assert drawn.keys() == {field.name for field in fields(cls)}
        drawn |= given
        if drawn["policy"] is FullPolicy.SPILL:
            if drawn["level"] is None:
                drawn["policy"] = FullPolicy.BLOCK
            else:
                drawn["values"] = False
        return cls(**drawn)

    def settings(self, class_ids: list[int]) -> Settings:
        """Of the bus."""
        own = ClassSettings(messages_max=self.messages_max or None, last_values=self.values)
        dead = ClassSettings(messages_max=self.dead_max)
        return Settings(
            ack_timeout=self.ack_timeout,
            full_policy=self.policy,
            keep=Retention(messages=self.keep),
            classes=dict.fromkeys(class_ids, own)
            | {dead_letters.dead_letter_class_name(f"class {each}"): dead for each in class_ids},
        )
