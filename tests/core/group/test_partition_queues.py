"""Lanes, the numbers of keys, and who has which: each against its slow, obvious oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.group import key_hash
from simplebus.core.group.key_assignment import SHARES, Owners
from simplebus.core.group.key_hash import hash_of, lane_of, lanes_of
from simplebus.core.group.partition_queues import NO_LANE, Lanes
from simplebus.core.protocol.envelope import key_of
from simplebus.core.protocol.envelope_batch import Envelope, decode, encode, stuff
from simplebus.core.protocol.frames import ENVELOPE, MESSAGE
from tests.behaviour.wire_peer import batch_of
from tests.models.key_order_model import keyed
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
def test_of_each_lane_the_one_that_came_first_is_out_and_the_others_follow_in_order(
    steps: list[tuple[bool, int, int]],
) -> None:
    lanes = Lanes()
    rows: dict[int, list[int]] = {lane: [] for lane in range(4)}
    for comes, sequence, lane in steps:
        where = [number for number, row in rows.items() if sequence in row]
        if comes and not where:
            row = rows[lane]
            assert lanes.enter([sequence], [lane]) == [sequence] * (not row or lane == NO_LANE)
            row.append(sequence)
            row[1:] = sorted(row[1:])
        elif where:
            row = rows[where[0]]
            was_first = row[0] == sequence
            assert lanes.is_first(sequence) == (was_first or where[0] == NO_LANE)
            row.remove(sequence)
            follows = where[0] != NO_LANE and was_first and row
            assert lanes.leave([sequence]) == row[:1] * bool(follows)
        lanes.check()
        assert sorted(lanes) == sorted(s for row in rows.values() for s in row)


def test_many_come_in_at_once() -> None:
    lanes = Lanes()
    assert lanes.enter(range(6), [7, 0, 7, 9, 9, 0]) == [0, 1, 3, 5]
    assert lanes.leave([0]) == [2]
    assert list(lanes.lanes([4, 5])) == [9, 0]
    assert lanes.leave([3, 4, 1]) == []
    assert lanes.longest() == (1, 1)


@given(st.binary(max_size=200))
def test_a_lane_follows_from_the_key(key: bytes) -> None:
    assert (lane_of(key) == NO_LANE) == (not key)
    assert 0 <= lane_of(key) < 1 << 32


def test_the_lane_of_a_key_never_changes() -> None:
    """What is kept past a process, or told by others, may depend on it."""
    found = [hash_of(key) for key in (b"a", b"order 4711", b"x" * 100)]
    assert found == [0x8EDC7F633D12C505, 0x7EAFEE70A5081854, 0x9281D684EF4F59C4]
    assert len({lane_of(b"%d" % number) for number in range(10_000)}) == 10_000
    assert len({lane_of(bytes(number)) for number in range(1, 200)}) == 199


@given(ENVELOPES, st.lists(ENVELOPES, max_size=4), st.sampled_from([3, 40]), st.booleans())
def test_the_lanes_of_many_are_those_of_each(
    usual: Envelope, others: list[Envelope], times: int, plain_ones: bool
) -> None:
    """Few and mixed ones take the loop, many with the same fields the arrays."""
    alike = [usual._replace(key=usual.key and b"%d" % n + usual.key) for n in range(times)]
    contents = [(ENVELOPE, encode(each, b"payload")) for each in [*alike, *others]]
    if plain_ones:
        contents.insert(1, (MESSAGE, b"\x10\x00\x01k"))
    batch = batch_of(*(build_frame(kind, content=content) for kind, content in contents))
    expected = [
        lane_of(decode(content)[0].key) if kind == ENVELOPE else NO_LANE
        for kind, content in contents
    ]
    assert lanes_of(batch) == expected


@given(st.lists(KEYS, min_size=20, max_size=60))
def test_the_lanes_of_many_keys_are_those_of_each(keys: list[bytes]) -> None:
    batch = batch_of(*(build_frame(ENVELOPE, content=keyed(key or b"k")) for key in keys))
    assert lanes_of(batch) == [lane_of(key or b"k") for key in keys]


def test_many_alike_are_read_in_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"key %d" % number for number in range(40)]
    batch = batch_of(*(build_frame(ENVELOPE, content=keyed(key)) for key in keys))
    expected = [lane_of(key) for key in keys]
    monkeypatch.setattr(key_hash, "_lane", lambda frame: pytest.fail("one after the other"))
    assert lanes_of(batch) == expected


@given(ENVELOPES, st.binary(max_size=20))
def test_the_key_of_a_content_is_what_decoding_finds(envelope: Envelope, payload: bytes) -> None:
    assert key_of(encode(envelope, payload)) == envelope.key


def test_a_key_that_ends_with_the_content_is_read_whole() -> None:
    assert key_of(stuff(b"\x10\x00\x03<\r\n")) == b"<\r\n"
    assert key_of(b"\x10\x00\x00") == b""


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=14))
def test_who_has_a_share_follows_from_who_is_there(steps: list[tuple[bool, int]]) -> None:
    owners: Owners[int] = Owners()
    for comes, who in steps:
        if comes and who not in owners:
            owners.add(who, f"member {who}")
        elif not comes and who in owners:
            owners.remove(who)
    fresh: Owners[int] = Owners()
    for who in range(9, -1, -1):
        if who in owners:
            fresh.add(who, f"member {who}")
    table = [owners.of(lane) for lane in range(SHARES)]
    assert table == [fresh.of(lane) for lane in range(SHARES)]
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
def test_keys_that_differ_little_are_dealt_out_to_all(keys: list[bytes]) -> None:
    owners: Owners[int] = Owners()
    for who in range(4):
        owners.add(who, f"worker-{who}/1")
    counts = np.bincount(np.array([owners.of(lane_of(key)) for key in keys]), minlength=4)
    assert counts.min() > len(keys) / 4 * 0.5, counts
    assert len({lane_of(key) % SHARES for key in keys}) > 0.6 * min(len(keys), SHARES)


def test_shares_are_about_equal_and_few_of_them_move() -> None:
    owners: Owners[int] = Owners()
    for who in range(8):
        owners.add(who, str(who))
    owners.check()
    before = [owners.of(lane) for lane in range(SHARES)]
    counts = np.bincount(np.array(before), minlength=8)
    assert counts.min() > SHARES // 8 * 0.8
    assert counts.max() < SHARES // 8 * 1.2
    owners.remove(3)
    owners.check()
    after = [owners.of(lane) for lane in range(SHARES)]
    assert all(b in (a, 3) for a, b in zip(after, before, strict=True))


def test_who_comes_takes_from_few_and_who_goes_leaves_to_few() -> None:
    owners: Owners[int] = Owners()
    for who in range(2000):
        owners.add(who, str(who))
    former = owners.add(2000, "another")
    assert 0 < len(former) < 20
    before = list(owners.table)
    for who in range(1, 2000, 3):
        owners.remove(who)
    assert all(a == b for a, b in zip(before, owners.table, strict=True) if a is None or a % 3 != 1)
    owners.check()
