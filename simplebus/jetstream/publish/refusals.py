"""Classes whose streams take nothing of what is published, because they are full for one: said in
the log when that begins and ends, and to whoever asks.

Rule 1: a stream that is full takes a message now and then, as room is made: it takes all again when
it has refused nothing for a while. So the log has a word when that begins and one when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from simplebus.nats.client.jetstream_codec import JetStreamError

log = logging.getLogger("simplebus.engine")

CALM_SECONDS = 5.0


@dataclass(slots=True)
class _Refusal:
    why: str
    heard_at: float
    """When something was refused last."""
    told_at: float
    """When the log was told why."""


class Refusals:
    """Of one door."""

    def __init__(self, refusal: Callable[[int], JetStreamError | None]) -> None:
        """`refusal` says why a stream took nothing of what was published last; None where it did,
        or where that is not known."""
        self._refusal = refusal
        self._refusals: dict[int, _Refusal] = {}

    def __len__(self) -> int:
        """How many classes there are whose streams take nothing."""
        return len(self._refusals)

    def __call__(self, class_id: int) -> str:
        """Why the stream of a class takes nothing; empty where it does."""
        there = self._refusals.get(class_id)
        return there.why if there is not None else ""

    def hear(self, classes: set[int], now: float) -> None:
        """Something of these was refused."""
        for class_id in classes:
            error = self._refusal(class_id)
            self.note(class_id, "" if error is None else error.sentence, now)

    def note(self, class_id: int, why: str, now: float) -> None:
        """A stream has taken nothing, or there is none; empty where it does not say why."""
        there = self._refusals.setdefault(class_id, _Refusal("", now, float("-inf")))
        there.heard_at = now
        why = why or there.why or "it does not say why"
        if why != there.why and now >= there.told_at + CALM_SECONDS:
            there.why, there.told_at = why, now
            log.warning(
                "class %d: its stream takes nothing, and who publishes to it waits: %s",
                class_id,
                why,
            )

    def beat(self, now: float) -> None:
        """Some time has passed."""
        for class_id, there in list(self._refusals.items()):
            if now >= there.heard_at + CALM_SECONDS and self._refusal(class_id) is None:
                del self._refusals[class_id]
                log.warning("class %d: its stream takes messages again", class_id)
