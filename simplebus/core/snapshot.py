"""Snapshot records: the state of a broker that outlives its process, beside the messages.

`checkpoint` builds the records from a broker, `restore` puts them back into one. A new field comes
last and has a default, so that older records can be read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, structs

from simplebus.core.errors import Reason
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.redelivery.ack_window import AckWindow


class _SnapshotRecord(msgspec.Struct, array_like=True, frozen=True):
    """Base of the records, which are written as arrays without field names."""


class WindowSnapshot(_SnapshotRecord, frozen=True):
    """An ack window."""

    floor: Annotated[int, Meta(ge=0)]
    cursor: int
    acked_bits: bytes = b""
    """One bit per message from the floor on: 1 if it was acknowledged."""

    def __post_init__(self) -> None:
        if self.cursor < self.floor:
            raise ValueError(f"expected floor <= cursor, got {self.floor} and {self.cursor}")

    @classmethod
    def from_window(cls, window: AckWindow) -> WindowSnapshot:
        return cls(window.floor, window.cursor, window.encode_flags())

    def to_window(self, *, floor: int, head: int) -> AckWindow:
        """Return the window, limited to the messages floor..head-1."""
        window = AckWindow(floor=min(self.floor, head))
        window.cursor = min(self.cursor, head)
        window.restore_flags(self.acked_bits)
        window.skip_to(min(floor, head))
        return window


class ClassSnapshot(_SnapshotRecord, frozen=True):
    """A class, without its messages."""

    class_id: int
    name: str
    floor: int
    """The lowest stored sequence."""
    head: int
    """The next sequence that the class assigns."""
    backlog_window: WindowSnapshot
    """The window that the next subscription with start `waiting` takes over."""
    keeps_last_values: bool = False
    attempts: list[tuple[int, int, int]] | None = None
    """Deliveries of backlog messages: (first, last exclusive, attempts); None if unknown."""
    delays: list[tuple[int, int, float]] = []
    """Delayed backlog messages: (first, last exclusive, seconds after `taken_at`)."""
    taken_at: float = 0.0
    """Time of this snapshot, in seconds since 1970."""
    creator: str = ""
    """The user that created the class; empty if unknown."""
    creator_address: str = ""
    """Address of the client that created the class; empty if unknown."""


class RemovedClass(_SnapshotRecord, frozen=True):
    """An unused class that was removed."""

    class_id: int
    name: str
    head: int
    """The next sequence, if the class is created again."""


class PositionSnapshot(_SnapshotRecord, frozen=True):
    """A durable: its names, delivery policy, ack window and redeliveries."""

    class_id: int
    durable: str
    group: str
    patterns: list[str]
    window: WindowSnapshot
    attempts: list[tuple[int, int, int]]
    """Attempts of messages in flight that were not sent exactly once: (first, last exclusive,
    attempts)."""
    ack_timeout_ticks: int
    in_flight_max: int | None
    deliveries_max: int
    pending_max: int | None
    slow_policy: str
    idle_seconds: float | None
    is_key_ordered: bool = False
    backoff_ticks: tuple[int, ...] = ()
    delays: list[tuple[int, int, float]] = []
    """Delayed redeliveries: (first, last exclusive, seconds after `taken_at`)."""
    taken_at: float = 0.0
    """Time of this snapshot, in seconds since 1970."""
    pending_dead_letters: list[tuple[int, int, int, str]] = []
    """Messages that wait for space among the dead letters: (first, last exclusive, attempts,
    reason)."""
    owner: str = ""
    """The user that created the durable; empty if unknown."""
    backoff_seconds: tuple[float, ...] = ()
    """Exact values of `backoff_ticks`; empty in states of older versions."""
    owner_address: str = ""
    """Address of the client that created the durable without a user; empty if unknown."""

    @property
    def key(self) -> tuple[int, str, str]:
        return self.class_id, self.durable, self.group


class ProgressSnapshot(_SnapshotRecord, frozen=True):
    """Progress of a durable whose other state has not changed."""

    class_id: int
    durable: str
    group: str
    window: WindowSnapshot

    @property
    def key(self) -> tuple[int, str, str]:
        return self.class_id, self.durable, self.group


class RefusalSnapshot(_SnapshotRecord, frozen=True):
    """A refusal that a publisher may not have received."""

    reason: str
    sentence: str
    frame_type: int
    class_id: int
    first_number: int
    count: int

    @classmethod
    def from_refusal(cls, refused: FrameRefused) -> RefusalSnapshot:
        return cls(
            refused.reason,
            refused.message,
            refused.frame_type,
            refused.class_id,
            refused.refers_to,
            refused.count,
        )

    def to_refusal(self) -> FrameRefused:
        """Return the refusal. Raises ValueError if the reason is unknown to this version."""
        return FrameRefused(
            Reason(self.reason),
            self.sentence,
            self.frame_type,
            self.class_id,
            self.first_number,
            self.count,
        )


class ProducerSnapshot(_SnapshotRecord, frozen=True):
    """A `ProducerState`."""

    name: str
    """Key of the state: user and name."""
    next_number: int
    """Every number before it is stored or was refused."""
    stored_ranges: list[tuple[int, int]] = []
    """Stored numbers above `next_number`: (first, count)."""
    instance: str = ""
    """The run of the program that used the name last."""
    refusals: list[RefusalSnapshot] = []
    """Refusals that the publisher may not have received."""
    is_uncertain: bool = False
    """See `ProducerState.is_uncertain`."""
    numbers_batch: int = 0
    """In a snapshot, the first write batch whose message numbers `next_number` and `stored_ranges`
    do not contain; 0 for the write batch after the snapshot."""


class MessageIdsSnapshot(_SnapshotRecord, frozen=True):
    """Ids of the latest messages of a class, see `MessageIds`."""

    class_id: int
    digests: bytes
    """Digest of each id, as little-endian 64-bit number, shape (n,)."""
    sequences: bytes
    """Ascending sequences of the messages, as little-endian 64-bit numbers, shape (n,)."""
    steps: list[tuple[float, int]]
    """Times in seconds since 1970, with the first sequence of each."""


class StateChanges(_SnapshotRecord, frozen=True):
    """Changes since the last record; in a snapshot, the complete state."""

    classes: list[ClassSnapshot] = []
    positions: list[PositionSnapshot] = []
    removed_positions: list[tuple[int, str, str]] = []
    """Keys of positions that were removed."""
    producers: list[ProducerSnapshot] = []
    """In a snapshot, all positions; in changes, the positions that started or restarted."""
    refused_ranges: list[tuple[str, int, int]] = []
    """Refused message numbers: (producer key, first, count)."""
    purged_ranges: list[tuple[int, int, int]] = []
    """Purged messages: (class id, first, last exclusive)."""
    refusals: list[RefusalSnapshot] = []
    """The refusal of each of `refused_ranges`."""
    boot_id: str = ""
    """In a snapshot, the boot of the machine in which it was taken."""
    durability: int | None = None
    """In a snapshot, the `Durability` of the recorded state; None if unknown."""
    message_ids: list[MessageIdsSnapshot] = []
    """In a snapshot, the ids of the latest messages."""
    progress: list[ProgressSnapshot] = []
    """Progress of positions that are not in `positions`."""
    removed_classes: list[RemovedClass] = []
    """Classes that were removed; in a snapshot, those whose next sequence is not 0."""

    def encode(self, producers: EncodedProducers | None = None) -> bytes:
        """Encode the changes, with `producers` in place of `self.producers` if they are given."""
        if producers is None:
            return msgspec.msgpack.encode(self)
        fields = structs.asdict(self)
        fields["producers"] = producers.to_raw()
        return msgspec.msgpack.encode(list(fields.values()))


class EncodedProducers:
    """Encoded list of `ProducerSnapshot` that is filled in portions.

    Of several with the same name, the last one is valid.
    """

    def __init__(self) -> None:
        self._count = 0
        self._encoded = bytearray()

    def append(self, producer: ProducerSnapshot) -> None:
        self._count += 1
        self._encoded += msgspec.msgpack.encode(producer)

    def to_raw(self) -> msgspec.Raw:
        """Return the list, as an array of MessagePack with a 32-bit length."""
        return msgspec.Raw(b"\xdd" + self._count.to_bytes(4, "big") + self._encoded)


_decoder = msgspec.msgpack.Decoder(StateChanges)


def decode_changes(data: bytes | memoryview) -> StateChanges:
    """Decode `StateChanges`. Raises ValueError."""
    return _decoder.decode(data)


class RecoveredState:
    """State of a broker after a snapshot and the changes that follow it."""

    def __init__(self) -> None:
        self.classes: dict[int, ClassSnapshot] = {}
        self.removed_classes: dict[int, RemovedClass] = {}
        """Removed classes whose next sequence is not 0, by id."""
        self.positions: dict[tuple[int, str, str], PositionSnapshot] = {}
        self.producers: dict[str, ProducerSnapshot] = {}
        self.refused_ranges: list[tuple[str, int, int]] = []
        self.refusals: dict[str, list[RefusalSnapshot]] = {}
        """Refusals that a publisher may not have received, by producer key."""
        self.purged_ranges: list[tuple[int, int, int]] = []
        self.boot_id = ""
        """Boot of the machine in which the snapshot was taken; empty if unknown."""
        self.durability: int | None = None
        """Durability of the recorded state; None if unknown."""
        self.message_ids: list[MessageIdsSnapshot] = []
        """Ids of the latest messages at the time of the snapshot."""
        self.batch_number = 0
        """Write batch of the last changes. They contain nothing of later batches."""

    def find_class(self, class_id: int) -> ClassSnapshot | None:
        """Return a class, an empty class in place of a removed one, or None if it is unknown."""
        removed = self.removed_classes.get(class_id)
        if removed is None:
            return self.classes.get(class_id)
        window = WindowSnapshot(removed.head, removed.head)
        return ClassSnapshot(class_id, removed.name, removed.head, removed.head, window)

    def apply_changes(self, changes: StateChanges, batch_number: int) -> None:
        """Apply the next changes, which write batch `batch_number` contains."""
        self.batch_number = batch_number
        self.boot_id = changes.boot_id or self.boot_id
        self.durability = self.durability if changes.durability is None else changes.durability
        self.message_ids = changes.message_ids or self.message_ids
        for created in changes.classes:
            self.classes[created.class_id] = created
            self.removed_classes.pop(created.class_id, None)
        for removed in changes.removed_classes:
            self.classes.pop(removed.class_id, None)
            self.removed_classes.pop(removed.class_id, None)
            if removed.head:
                self.removed_classes[removed.class_id] = removed
        for key in changes.removed_positions:
            self.positions.pop(key, None)
        self.positions.update((position.key, position) for position in changes.positions)
        for progress in changes.progress:
            snapshot = self.positions.get(progress.key)
            if snapshot is not None:
                self.positions[progress.key] = structs.replace(snapshot, window=progress.window)
        self.producers.update((producer.name, producer) for producer in changes.producers)
        self.refused_ranges += changes.refused_ranges
        for producer in changes.producers:
            self.refusals[producer.name] = list(producer.refusals)
        for (name, _, _), refusal in zip(changes.refused_ranges, changes.refusals, strict=False):
            self.refusals.setdefault(name, []).append(refusal)
        self.purged_ranges += changes.purged_ranges
