"""Partition queues, key hashing and key assignment, each against a simple oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.group import key_hash
from simplebus.core.group.key_assignment import HASH_BUCKET_COUNT, KeyAssignment
from simplebus.core.group.key_hash import batch_partitions, hash_bytes, partition_of_key
from simplebus.core.group.partition_queues import NO_PARTITION, PartitionQueues
from simplebus.core.protocol.envelope import extract_key
from simplebus.core.protocol.envelope_batch import Envelope, decode, encode, stuff
from simplebus.core.protocol.frames import ENVELOPE, MESSAGE
from tests.behaviour.wire_peer import build_batch
from tests.models.key_order_model import encode_with_key
from tests.support.oracles import build_frame

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 3)), max_size=60)

KEYS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"", b"\r", b"<\r\n", b"k<\r\n\0", b"x" * 64, b"x" * 65, b"<\r\n" * 30]),
)
ENVELOPES = st.builds(
    Envelope,
    channel=st.sampled_from(["", "", "a.b", "x" * 300]),
    key=KEYS,
    published=st.sampled_from([None, None, 0, 0x3C0D0A3C0D0A3C0D]),
    expires_ms=st.sampled_from([None, None, 5, 0x3C0D0A]),
    headers=st.just(()),
    not_before_ms=st.none(),
)


@given(STEPS)
def test_partition_queues_match_model(
    steps: list[tuple[bool, int, int]],
) -> None:
    queues = PartitionQueues()
    rows: dict[int, list[int]] = {partition: [] for partition in range(4)}
    for is_added, sequence, partition in steps:
        partitions = [number for number, row in rows.items() if sequence in row]
        if is_added and not partitions:
            row = rows[partition]
            assert queues.enqueue([sequence], [partition]) == [sequence] * (
                not row or partition == NO_PARTITION
            )
            row.append(sequence)
            row[1:] = sorted(row[1:])
        elif partitions:
            row = rows[partitions[0]]
            was_first = row[0] == sequence
            assert queues.is_at_front(sequence) == (was_first or partitions[0] == NO_PARTITION)
            row.remove(sequence)
            follows = partitions[0] != NO_PARTITION and was_first and row
            assert queues.dequeue([sequence]) == row[:1] * bool(follows)
        queues.check_invariants()
        assert sorted(queues) == sorted(s for row in rows.values() for s in row)


def test_enqueue_of_many_messages() -> None:
    queues = PartitionQueues()
    assert queues.enqueue(range(6), [7, 0, 7, 9, 9, 0]) == [0, 1, 3, 5]
    assert queues.dequeue([0]) == [2]
    assert list(queues.partitions_of([4, 5])) == [9, 0]
    assert queues.dequeue([3, 4, 1]) == []
    assert queues.count_and_longest() == (1, 1)


@given(st.binary(max_size=200))
def test_partition_depends_on_key(key: bytes) -> None:
    assert (partition_of_key(key) == NO_PARTITION) == (not key)
    assert 0 <= partition_of_key(key) < 1 << 32


def test_key_hash_is_stable() -> None:
    """Hashes are stored, and computed by several processes."""
    found = [hash_bytes(key) for key in (b"a", b"order 4711", b"x" * 100)]
    assert found == [0x8EDC7F633D12C505, 0x7EAFEE70A5081854, 0x9281D684EF4F59C4]
    assert len({partition_of_key(b"%d" % number) for number in range(10_000)}) == 10_000
    assert len({partition_of_key(bytes(number)) for number in range(1, 200)}) == 199


@given(ENVELOPES, st.lists(ENVELOPES, max_size=4), st.sampled_from([3, 40]), st.booleans())
def test_batch_partitions_match_single_frames(
    usual: Envelope, other_envelopes: list[Envelope], times: int, plain_ones: bool
) -> None:
    """Small and mixed batches take the loop, large uniform ones the arrays."""
    alike = [usual._replace(key=usual.key and b"%d" % n + usual.key) for n in range(times)]
    contents = [(ENVELOPE, encode(each, b"payload")) for each in [*alike, *other_envelopes]]
    if plain_ones:
        contents.insert(1, (MESSAGE, b"\x10\x00\x01k"))
    batch = build_batch(*(build_frame(kind, content=content) for kind, content in contents))
    expected = [
        partition_of_key(decode(content)[0].key) if kind == ENVELOPE else NO_PARTITION
        for kind, content in contents
    ]
    assert batch_partitions(batch) == expected


@given(st.lists(KEYS, min_size=20, max_size=60))
def test_batch_partitions_match_single_keys(keys: list[bytes]) -> None:
    batch = build_batch(
        *(build_frame(ENVELOPE, content=encode_with_key(key or b"k")) for key in keys)
    )
    assert batch_partitions(batch) == [partition_of_key(key or b"k") for key in keys]


def test_uniform_batch_is_hashed_with_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"key %d" % number for number in range(40)]
    batch = build_batch(*(build_frame(ENVELOPE, content=encode_with_key(key)) for key in keys))
    expected = [partition_of_key(key) for key in keys]
    monkeypatch.setattr(
        key_hash, "_frame_partition", lambda frame: pytest.fail("one after the other")
    )
    assert batch_partitions(batch) == expected


@given(ENVELOPES, st.binary(max_size=20))
def test_extract_key_matches_decode(envelope: Envelope, payload: bytes) -> None:
    assert extract_key(encode(envelope, payload)) == envelope.key


def test_extract_key_at_end_of_content() -> None:
    assert extract_key(stuff(b"\x10\x00\x03<\r\n")) == b"<\r\n"
    assert extract_key(b"\x10\x00\x00") == b""


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=14))
def test_assignment_depends_only_on_members(steps: list[tuple[bool, int]]) -> None:
    owners: KeyAssignment[int] = KeyAssignment()
    for is_added, member in steps:
        if is_added and member not in owners:
            owners.add_member(member, f"member {member}")
        elif not is_added and member in owners:
            owners.remove_member(member)
    fresh: KeyAssignment[int] = KeyAssignment()
    for member in range(9, -1, -1):
        if member in owners:
            fresh.add_member(member, f"member {member}")
    table = [owners.owner_of(partition) for partition in range(HASH_BUCKET_COUNT)]
    assert table == [fresh.owner_of(partition) for partition in range(HASH_BUCKET_COUNT)]
    assert bool(owners) == (table[0] is not None)


@pytest.mark.parametrize(
    "keys",
    [
        [b"tenant%02d" % n for n in range(100)],
        [b"dev-%04d" % n for n in range(1000)],
        [b"customer-%07d" % n for n in range(5000)],
        [n.to_bytes(4, "big") for n in range(5000)],
        [n.to_bytes(8, "big") for n in range(5000)],
        [n.to_bytes(8, "little") for n in range(5000)],
        [(n << 22).to_bytes(8, "big") for n in range(5000)],
        [n.to_bytes(16, "big") for n in range(5000)],
        [b"x" * 60 + b"%06d" % n for n in range(5000)],
    ],
)
def test_similar_keys_are_spread_over_members(keys: list[bytes]) -> None:
    owners: KeyAssignment[int] = KeyAssignment()
    for member in range(4):
        owners.add_member(member, f"worker-{member}/1")
    counts = np.bincount(
        np.array([owners.owner_of(partition_of_key(key)) for key in keys]), minlength=4
    )
    assert counts.min() > len(keys) / 4 * 0.5, counts
    assert len({partition_of_key(key) % HASH_BUCKET_COUNT for key in keys}) > 0.6 * min(
        len(keys), HASH_BUCKET_COUNT
    )


def test_removing_a_member_moves_only_its_partitions() -> None:
    owners: KeyAssignment[int] = KeyAssignment()
    for member in range(8):
        owners.add_member(member, str(member))
    owners.check_invariants()
    before = [owners.owner_of(partition) for partition in range(HASH_BUCKET_COUNT)]
    counts = np.bincount(np.array(before), minlength=8)
    assert counts.min() > HASH_BUCKET_COUNT // 8 * 0.8
    assert counts.max() < HASH_BUCKET_COUNT // 8 * 1.2
    owners.remove_member(3)
    owners.check_invariants()
    after = [owners.owner_of(partition) for partition in range(HASH_BUCKET_COUNT)]
    assert all(b in (a, 3) for a, b in zip(after, before, strict=True))


def test_adding_a_member_affects_few_members() -> None:
    owners: KeyAssignment[int] = KeyAssignment()
    for member in range(2000):
        owners.add_member(member, str(member))
    changed_members = owners.add_member(2000, "another")
    assert 0 < len(changed_members) < 20
    before = list(owners.owner_by_bucket)
    for member in range(1, 2000, 3):
        owners.remove_member(member)
    assert all(
        a == b
        for a, b in zip(before, owners.owner_by_bucket, strict=True)
        if a is None or a % 3 != 1
    )
    owners.check_invariants()


def test_buckets_of_removed_members_are_assigned_in_portions() -> None:
    owners: KeyAssignment[int] = KeyAssignment()
    fresh: KeyAssignment[int] = KeyAssignment()
    for member in range(40):
        owners.add_member(member, f"m{member}")
        if member >= 20:
            fresh.add_member(member, f"m{member}")
    for member in range(20):
        owners.remove_member(member)
    portion_count = 1
    while not owners.assign_orphans(2000):
        assert None in owners.known_owner_by_bucket
        portion_count += 1
    assert portion_count > 10
    assert owners.known_owner_by_bucket == fresh.owner_by_bucket
    owners.check_invariants()
