"""Streams that refuse messages, for example because they are full.

A full stream accepts a message now and then, as space becomes free. It counts as recovered when it
has refused nothing for a while, so the log has one line for the start and one for the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simplebus.core.message_class.message_class import MessageClass, class_label
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client.jetstream_codec import JetStreamError

log = EventLogger("simplebus.engine")

RECOVERED_SECONDS = 5.0


@dataclass(slots=True)
class _StreamRefusal:
    reason: str
    refused_at: float
    """Time of the last refusal."""
    logged_at: float
    """Time when the reason was logged."""


class StreamRefusals:
    """Classes of one server whose streams refuse messages. Times are seconds of a monotonic
    clock.
    """

    def __init__(
        self,
        classes: Mapping[int, MessageClass],
        refusal: Callable[[int], JetStreamError | None],
    ) -> None:
        """Create an empty list.

        Args:
            classes: Classes of the broker, for their names.
            refusal: Returns why a stream refused the last message; None if it accepted it or is
                unknown.
        """
        self._classes = classes
        self._get_refusal = refusal
        self._refusals: dict[int, _StreamRefusal] = {}

    def __len__(self) -> int:
        """Return the number of classes whose stream refuses messages."""
        return len(self._refusals)

    def get_reason(self, class_id: int) -> str:
        """Return why the stream of a class refuses messages; empty if it does not."""
        refusal = self._refusals.get(class_id)
        return refusal.reason if refusal is not None else ""

    def update(self, classes: set[int], now: float) -> None:
        """Record that messages of these classes were refused."""
        for class_id in classes:
            error = self._get_refusal(class_id)
            self.record(class_id, "" if error is None else error.sentence, now)

    def record(self, class_id: int, reason: str, now: float) -> None:
        """Record that a stream refused a message or is missing; `reason` is empty if unknown."""
        refusal = self._refusals.setdefault(class_id, _StreamRefusal("", now, float("-inf")))
        refusal.refused_at = now
        reason = reason or refusal.reason or "unknown reason"
        if reason != refusal.reason and now >= refusal.logged_at + RECOVERED_SECONDS:
            refusal.reason, refusal.logged_at = reason, now
            log.warning(
                "stream.refused",
                "class {class_name}: its stream refuses messages; its publishers wait: {reason}",
                class_name=class_label(self._classes, class_id),
                reason=reason,
            )

    def log_recovered(self, now: float) -> None:
        """Log and forget the streams that have recovered."""
        for class_id, refusal in list(self._refusals.items()):
            if (
                now >= refusal.refused_at + RECOVERED_SECONDS
                and self._get_refusal(class_id) is None
            ):
                del self._refusals[class_id]
                log.warning(
                    "stream.accepted",
                    "class {class_name}: its stream accepts messages again",
                    class_name=class_label(self._classes, class_id),
                )
