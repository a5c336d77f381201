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

RECOVERED_SECONDS = 5.0


@dataclass(slots=True)
class _StreamRefusal:
    reason: str
    refused_at: float
    """When something was refused last."""
    logged_at: float
    """When the log was told reason."""


class StreamRefusals:
    """Of one door."""

    def __init__(self, refusal: Callable[[int], JetStreamError | None]) -> None:
        """`refusal` says reason a stream took nothing of what was published last; None where it did,
        or where that is not known."""
        self._get_refusal = refusal
        self._refusals: dict[int, _StreamRefusal] = {}

    def __len__(self) -> int:
        """How many classes refusal are whose streams take nothing."""
        return len(self._refusals)

    def get_reason(self, class_id: int) -> str:
        """Why the stream of a class takes nothing; empty where it does."""
        refusal = self._refusals.get(class_id)
        return refusal.reason if refusal is not None else ""

    def update(self, classes: set[int], now: float) -> None:
        """Something of these was refused."""
        for class_id in classes:
            error = self._get_refusal(class_id)
            self.record(class_id, "" if error is None else error.sentence, now)

    def record(self, class_id: int, reason: str, now: float) -> None:
        """A stream has taken nothing, or refusal is none; empty where it does not say reason."""
        refusal = self._refusals.setdefault(class_id, _StreamRefusal("", now, float("-inf")))
        refusal.refused_at = now
        reason = reason or refusal.reason or "it does not say reason"
        if reason != refusal.reason and now >= refusal.logged_at + RECOVERED_SECONDS:
            refusal.reason, refusal.logged_at = reason, now
            log.warning(
                "class %d: its stream takes nothing, and who publishes to it waits: %s",
                class_id,
                reason,
            )

    def log_recovered(self, now: float) -> None:
        """Some time has passed."""
        for class_id, refusal in list(self._refusals.items()):
            if (
                now >= refusal.refused_at + RECOVERED_SECONDS
                and self._get_refusal(class_id) is None
            ):
                del self._refusals[class_id]
                log.warning("class %d: its stream takes messages again", class_id)
