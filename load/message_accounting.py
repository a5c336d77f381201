"""What was published and what came of it: the books of a run in which servers are killed.

Rule 1: this file knows numbers, no bus. Every publisher numbers its messages for each class from 0,
so what is missing, comes twice or comes before its turn can be told from the numbers alone.
Rule 2: a fault is counted, never raised: a run that loses something goes on and tells how much.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field

LATE_S = 1.0  # Positions are kept every tenth of a second or so: this is long ago.


def payload(publisher: str, number: int) -> bytes:
    """Of one message."""
    return b"%s %d" % (publisher.encode(), number)


@dataclass(slots=True)
class Sent:
    """What publishers have published."""

    counts: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    """By class and publisher."""

    def more(self, class_id: int, publisher: str, count: int) -> list[bytes]:
        """The payloads of so many further messages."""
        first = self.counts[class_id, publisher]
        self.counts[class_id, publisher] = first + count
        return [payload(publisher, number) for number in range(first, first + count)]

    def of(self, class_id: int) -> dict[str, int]:
        """How many there are in a class, by publisher."""
        return {name: count for (each, name), count in self.counts.items() if each == class_id}

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(slots=True)
class Seen:
    """What a durable of one class was delivered."""

    class_id: int
    is_ordered: bool = True
    """Whether it is one program that takes them, and not several of a group."""
    head: int = 0
    """Sequence behind the last one that came."""
    deliveries: int = 0
    disordered: int = 0
    """First deliveries of messages before which another of the same publisher was to come."""
    late: int = 0
    """Messages that came again though they were processed LATE_S before the last kill."""
    killed_at: float = 0.0
    """When that was."""
    _times: dict[str, array[float]] = field(default_factory=dict)
    """By publisher and number, when it came last; below 0 for one that has not come yet."""

    def take(self, content: bytes, sequence: int, now: float) -> None:
        """A message has come."""
        self.head = max(self.head, sequence + 1)
        name, _, digits = content.partition(b" ")
        number = int(digits)
        times = self._times.get(name.decode())
        if times is None:
            times = self._times[name.decode()] = array("d")
        self.deliveries += 1
        if number < len(times) and times[number] >= 0:
            self.late += times[number] < self.killed_at - LATE_S
        elif number < len(times):
            self.disordered += self.is_ordered
        else:
            times.extend([-1.0] * (number + 1 - len(times)))
        times[number] = now

    def holds(self, publisher: str, number: int) -> bool:
        """Whether it has come."""
        times = self._times.get(publisher, ())
        return number < len(times) and times[number] >= 0

    def missing(self, sent: Sent) -> set[tuple[str, int]]:
        """Publishers and numbers of what was sent and has not come."""
        found = set()
        for name, count in sent.of(self.class_id).items():
            times = self._times.get(name, array("d"))
            found |= {(name, n) for n, came in enumerate(times[:count]) if came < 0}
            found |= {(name, n) for n in range(len(times), count)}
        return found

    @property
    def again(self) -> int:
        """Deliveries of what had come before."""
        return self.deliveries - self.messages

    @property
    def messages(self) -> int:
        """What has come, each counted once."""
        return sum(sum(came >= 0 for came in times) for times in self._times.values())
