"""Scenario of a run: settings of the bus and the faults that may occur.

Each field is given or drawn at random.
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
class Scenario:
    level: Durability | None
    """None for a bus without a journal."""
    ack_timeout: int
    segment_bytes: int
    policy: FullPolicy
    messages_max: int
    """Messages that a class may hold; 0 for no limit."""
    dead_max: int
    """Dead letters that a class may hold."""
    read_bytes: int
    """Bytes that are read back from disk at once."""
    values: bool
    """True if classes keep last values."""
    keep: int
    """Messages that each class retains."""
    purges: bool
    """True if clients purge messages."""
    deliveries: int
    in_flight: int
    by_key: bool
    fates: tuple[str, ...]
    """Possible faults; about one per second is drawn."""

    @classmethod
    def of(cls, rng: Random, **overrides: Any) -> Scenario:
        """Draw a scenario. The number of draws does not depend on the overridden fields."""
        level = rng.choice(
            [Durability.DISK, Durability.DISK, Durability.OS, Durability.MEMORY, None]
        )
        policies = [FullPolicy.BLOCK, FullPolicy.DROP_OLDEST, FullPolicy.DROP_NEWEST]
        drawn = {
            "level": level,
            "ack_timeout": rng.choice([1, 2, 6]),
            "segment_bytes": rng.choice([1, 600, 1 << 20]),
            "policy": rng.choice([*policies, FullPolicy.SPILL, FullPolicy.SPILL]),
            "messages_max": rng.choice([0, 0, 3, 6, 15]),
            "dead_max": rng.choice([_DEAD_MAX, _DEAD_MAX, 3]),
            "read_bytes": rng.choice([200, 400, 1 << 20]),
            "values": rng.random() < 0.2,
            "keep": rng.choice([0, 0, 0, 5]),
            "purges": rng.random() < 0.3,
            "deliveries": rng.choice([0, 0, 3]),
            "in_flight": rng.choice([0, 1, 5]),
            "by_key": rng.random() < 0.5,
            "fates": ("kill", "cut", "stop", "dies", "full", "broken", "jump", "pause", *"------"),
        }
        assert drawn.keys() == {field.name for field in fields(cls)}
        drawn |= overrides
        if drawn["policy"] is FullPolicy.SPILL:
            if drawn["level"] is None:
                drawn["policy"] = FullPolicy.BLOCK
            else:
                drawn["values"] = False
        return cls(**drawn)

    def settings(self, class_ids: list[int]) -> Settings:
        """Return the settings of the bus."""
        class_settings = ClassSettings(
            messages_max=self.messages_max or None, last_values=self.values
        )
        dead = ClassSettings(messages_max=self.dead_max)
        return Settings(
            ack_timeout=self.ack_timeout,
            full_policy=self.policy,
            keep=Retention(messages=self.keep),
            classes=dict.fromkeys(class_ids, class_settings)
            | {dead_letters.dead_letter_class_name(f"class {each}"): dead for each in class_ids},
        )
