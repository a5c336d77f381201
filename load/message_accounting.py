"""Accounting of published and delivered messages in a run that kills servers.

Each publisher numbers its messages per class from 0, so lost, repeated and out-of-order messages
follow from the numbers. Faults are counted, not raised, so that a run reports all of them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

LATE_S = 1.0  # Much longer than the interval at which the bus saves positions, about 0.1 s.


def payload(publisher: str, number: int) -> bytes:
    """Return the payload of one message."""
    return b"%s %d" % (publisher.encode(), number)


@dataclass(slots=True)
class PublishedMessages:
    """Number of published messages."""

    counts: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    """By class and publisher."""

    def next_payloads(self, class_id: int, publisher: str, count: int) -> list[bytes]:
        """Return the payloads of the next `count` messages."""
        first = self.counts[class_id, publisher]
        self.counts[class_id, publisher] = first + count
        return [payload(publisher, number) for number in range(first, first + count)]

    def counts_by_publisher(self, class_id: int) -> dict[str, int]:
        """Return the number of messages of a class, by publisher."""
        return {name: count for (each, name), count in self.counts.items() if each == class_id}

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(slots=True)
class DeliveryRecord:
    """Deliveries of one class to one durable."""

    class_id: int
    is_ordered: bool = True
    """True if one subscriber receives all messages, False for a group."""
    head: int = 0
    """Sequence after the last delivered one."""
    deliveries: int = 0
    out_of_order: int = 0
    """First deliveries after a later message of the same publisher."""
    repeated_late: int = 0
    """Repeated deliveries of messages processed LATE_S before the last kill."""
    killed_at: float = 0.0
    """Time of the last kill."""
    _times: dict[str, array[float]] = field(default_factory=dict)
    """Time of the last delivery, by publisher and number; negative if not delivered."""

    def record_delivery(self, content: bytes, sequence: int, now: float) -> None:
        """Record the delivery of a message."""
        self.head = max(self.head, sequence + 1)
        name, _, digits = content.partition(b" ")
        number = int(digits)
        times = self._times.get(name.decode())
        if times is None:
            times = self._times[name.decode()] = array("d")
        self.deliveries += 1
        if number < len(times) and times[number] >= 0:
            self.repeated_late += times[number] < self.killed_at - LATE_S
        elif number < len(times):
            self.out_of_order += self.is_ordered
        else:
            times.extend([-1.0] * (number + 1 - len(times)))
        times[number] = now

    def has_delivered(self, publisher: str, number: int) -> bool:
        """Return True if a message was delivered."""
        times = self._times.get(publisher, ())
        return number < len(times) and times[number] >= 0

    def missing(self, sent: PublishedMessages) -> set[tuple[str, int]]:
        """Return publisher and number of every published message that was not delivered."""
        found = set()
        for name, count in sent.counts_by_publisher(self.class_id).items():
            times = self._times.get(name, array("d"))
            found |= {(name, n) for n, at in enumerate(times[:count]) if at < 0}
            found |= {(name, n) for n in range(len(times), count)}
        return found

    @property
    def repeated_count(self) -> int:
        """Number of repeated deliveries."""
        return self.deliveries - self.messages

    @property
    def messages(self) -> int:
        """Number of distinct messages delivered."""
        return sum(sum(at >= 0 for at in times) for times in self._times.values())
