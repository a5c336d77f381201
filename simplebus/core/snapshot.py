"""What of a bus outlives its process, beside the messages: what it looks like.

Rule 1: plain values. How they are found in a broker, and put into one, stands elsewhere.
Rule 2: a field that is added has a default and comes last: what was written before it is read.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from simplebus.core.errors import Reason
from simplebus.core.protocol.events import Refused
from simplebus.core.redelivery.ack_window import AckWindow


class _SnapshotRecord(msgspec.Struct, array_like=True, frozen=True):
    pass


class WindowSnapshot(_SnapshotRecord, frozen=True):
    """What was acknowledged."""

    floor: int
    cursor: int
    marks: bytes = b""
    """From the floor on, a bit for each message: whether it is acknowledged."""

    @classmethod
    def of(cls, window: AckWindow) -> WindowSnapshot:
        return cls(window.floor, window.cursor, window.marks())

    def window(self, *, floor: int, head: int) -> AckWindow:
        """The same, as far as it is about messages floor..head-1."""
        window = AckWindow(floor=min(self.floor, head))
        window.cursor = min(self.cursor, head)
        window.set_marks(self.marks)
        window.skip_to(min(floor, head))
        return window


class ClassSnapshot(_SnapshotRecord, frozen=True):
    """One class."""

    class_id: int
    name: str
    floor: int
    """The lowest sequence that was stored."""
    head: int
    """The next sequence to be given out."""
    waiting: WindowSnapshot
    """What the next subscription that asks for what waits takes over."""
    last_values: bool = False
    """Whether somebody has asked that it keeps the last message of each channel."""
    sent: list[tuple[int, int, int]] | None = None
    """Of what waits, how often messages first..last-1 were sent; None where that is not known."""
    pauses: list[tuple[int, int, float]] = []
    """For how many seconds from `told` on messages first..last-1 of it are not to be sent."""
    told: float = 0.0
    """When all this was so: seconds since 1970."""
    maker: str = ""
    """The user that made it; empty where that is not known."""


class PositionSnapshot(_SnapshotRecord, frozen=True):
    """A durable."""

    class_id: int
    durable: str
    group: str
    channels: list[str]
    window: WindowSnapshot
    attempts: list[tuple[int, int, int]]
    """Of messages first..last-1 that were sent and not acknowledged, how often they were, where
    that is not once; see `spans`."""
    ack_ticks: int
    in_flight_max: int | None
    deliveries_max: int
    pending_max: int | None
    slow: str
    idle_seconds: float | None
    by_key: bool = False
    backoff_ticks: tuple[int, ...] = ()
    pauses: list[tuple[int, int, float]] = []
    """Of messages first..last-1 that are to be sent again, for how many seconds from `told` on they
    are not."""
    told: float = 0.0
    """When all this was so: seconds since 1970."""
    given_up: list[tuple[int, int, int, str]] = []
    """Messages first..last-1 that wait for room among the dead letters, how often they were sent,
    and why they were given up."""
    owner: str = ""
    """The user that made it; empty where that is not known."""

    @property
    def key(self) -> tuple[int, str, str]:
        """By what it is found."""
        return self.class_id, self.durable, self.group


class RefusalSnapshot(_SnapshotRecord, frozen=True):
    """What a publisher is told again of messages that were refused."""

    reason: str
    sentence: str
    frame_type: int
    class_id: int
    first: int
    count: int

    @classmethod
    def of(cls, refused: Refused) -> RefusalSnapshot:
        return cls(
            refused.reason,
            refused.sentence,
            refused.frame_type,
            refused.class_id,
            refused.refers_to,
            refused.count,
        )

    def refused(self) -> Refused:
        """The other way. Raises ValueError for a reason that is not known here."""
        return Refused(
            Reason(self.reason),
            self.sentence,
            self.frame_type,
            self.class_id,
            self.first,
            self.count,
        )


class ProducerSnapshot(_SnapshotRecord, frozen=True):
    """A publisher that has a name."""

    name: str
    next: int
    """Every number before it is stored, or was refused."""
    stored: list[tuple[int, int]] = []
    """And so are these behind it: first number, count."""
    instance: str = ""
    """Which program it is."""
    refusals: list[RefusalSnapshot] = []
    """Of which it may not have heard."""
    is_doubted: bool = False
    """Whether some of that may have been lost since: see `Publisher`."""


class StateChanges(_SnapshotRecord, frozen=True):
    """What has changed; or, in a snapshot, everything."""

    classes: list[ClassSnapshot] = []
    positions: list[PositionSnapshot] = []
    gone: list[tuple[int, str, str]] = []
    """Keys of positions that are no more."""
    publishers: list[ProducerSnapshot] = []
    """In a snapshot."""
    refused: list[tuple[str, int, int]] = []
    """Publisher, first number, count: they are used up."""
    purged: list[tuple[int, int, int]] = []
    """Class, first message, last one exclusive: nobody is to have them any more."""
    refusals: list[RefusalSnapshot] = []
    """What is said of each of `refused`."""
    boot: str = ""
    """In a snapshot, in which run of the machine it was made."""
    level: int | None = None
    """And how safe what it speaks of was: a `Level`; None where that is not known."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(StateChanges)

T = TypeVar("T")


def decode(data: bytes | memoryview) -> StateChanges:
    """The other way. Raises ValueError."""
    return _decoder.decode(data)


class RecoveredState:
    """What follows from a snapshot and the changes behind it."""

    def __init__(self) -> None:
        self.classes: dict[int, ClassSnapshot] = {}
        self.positions: dict[tuple[int, str, str], PositionSnapshot] = {}
        self.publishers: dict[str, ProducerSnapshot] = {}
        self.refused: list[tuple[str, int, int]] = []
        self.refusals: dict[str, list[RefusalSnapshot]] = {}
        """By publisher, what it may not have heard."""
        self.purged: list[tuple[int, int, int]] = []
        self.boot = ""
        """In which run of the machine the snapshot was made; empty where that is not known."""
        self.level: int | None = None
        """How safe what it speaks of was; None where that is not known."""
        self.lot = 0
        """Of the last changes: they know nothing of later ones."""

    def apply(self, changes: StateChanges, lot: int) -> None:
        """These come next, and are in this lot."""
        self.lot = lot
        self.boot = changes.boot or self.boot
        self.level = self.level if changes.level is None else changes.level
        self.classes.update((each.class_id, each) for each in changes.classes)
        for key in changes.gone:
            self.positions.pop(key, None)
        self.positions.update((each.key, each) for each in changes.positions)
        self.publishers.update((each.name, each) for each in changes.publishers)
        self.refused += changes.refused
        for each in changes.publishers:
            self.refusals[each.name] = list(each.refusals)
        for (name, _, _), refusal in zip(changes.refused, changes.refusals, strict=False):
            self.refusals.setdefault(name, []).append(refusal)
        self.purged += changes.purged
