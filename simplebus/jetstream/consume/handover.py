"""Plain consumers that this server is about to release, as reported to other servers.

While a release is in progress, the answer to other servers is to ask again. A consumer that cannot
be released yet, for example during an outage, is offered by name; the server that asked may take it
over within a limited time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simplebus.core.subscription.position import Position
from simplebus.jetstream.cluster.peers import RELEASED, WAIT

TAKEOVER_SECONDS = 10.0
"""Time for a take-over after an offer."""
RELEASE_WAIT_SECONDS = 2.0
"""Time for which a queued release keeps other servers waiting."""
_NAMES_MAX = 4096


class ReleasingConsumers:
    """Plain consumers of closed positions that are not released yet.

    Times are in seconds of a monotonic clock.
    """

    def __init__(self, return_consumer: Callable[[Position], str]) -> None:
        """`return_consumer` returns the consumer that continues a position's messages; empty if
        none does.
        """
        self._return_consumer = return_consumer
        self._names: dict[Position, tuple[int, str]] = {}
        """Class and consumer name of each closed position."""
        self._offered_at: dict[Position, float] = {}
        self._busy_until: dict[Position, float] = {}
        """Time until which other servers must wait for the release."""

    def add(self, position: Position, class_id: int, name: str, now: float) -> None:
        """Add the consumer of a closed plain subscription."""
        self._names[position] = class_id, name
        self._busy_until[position] = now + RELEASE_WAIT_SECONDS

    def remove(self, position: Position) -> None:
        """Remove a released consumer."""
        self._names.pop(position, None)
        self._offered_at.pop(position, None)
        self._busy_until.pop(position, None)

    def is_offered(self, position: Position, now: float) -> bool:
        """Return True if another server may be taking the consumer over."""
        return now < self._offered_at.get(position, -TAKEOVER_SECONDS) + TAKEOVER_SECONDS

    @contextmanager
    def releasing(self, position: Position) -> Iterator[None]:
        """Context in which the release is in progress."""
        self._busy_until[position] = float("inf")
        try:
            yield
        finally:
            del self._busy_until[position]

    def offer_names(self, class_id: int, now: float) -> set[str]:
        """Return the consumer names of a class and mark them as offered."""
        found: set[str] = set()
        for position, (its_class, name) in self._names.items():
            if its_class == class_id and len(found) < _NAMES_MAX:
                found |= {name, self._return_consumer(position) or name}
                self._offered_at[position] = now
        return found

    def answer(self, query: bytes, now: float) -> bytes:
        """Return the answer to a query: empty, WAIT, or RELEASED with consumer names.

        `query` is a class id, or empty to ask only if this server is alive.
        """
        if not (query.isdigit() and len(query) <= len("65535")):
            return b""
        class_id = int(query)
        positions = (position for position, (id_, _) in self._names.items() if id_ == class_id)
        if any(now < self._busy_until.get(position, now) for position in positions):
            return WAIT
        names = self.offer_names(class_id, now)
        return b" ".join([RELEASED, *(name.encode() for name in sorted(names))]) if names else b""
