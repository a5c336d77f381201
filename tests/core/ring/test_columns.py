"""Columns of a ring while it grows, shrinks and becomes empty."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import RING_IDLE_TICKS
from simplebus.core.ring.columns import NEVER, NO_DELAY, ChannelCounts, MessageRows
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from tests.behaviour.wire_peer import build_batch
from tests.behaviour.wire_peer_v2 import publish, publish_envelopes

Row = tuple[int, float, float]
PLAIN: Row = (0, NEVER, NO_DELAY)

rows = st.tuples(
    st.sampled_from([0, 3, 9]), st.sampled_from([NEVER, 12.5]), st.sampled_from([NO_DELAY, 7.0])
)
steps = st.one_of(
    st.tuples(st.just("plain"), st.integers(1, 300), st.just([PLAIN])),
    st.tuples(st.just("one"), st.just(1), st.just([PLAIN])),
    st.tuples(st.just("special"), st.integers(1, 60), st.lists(rows, min_size=1, max_size=4)),
    st.tuples(st.just("release"), st.integers(0, 400), st.just([PLAIN])),
    st.tuples(st.just("idle"), st.integers(1, 2), st.just([PLAIN])),
)


def rows_from_dicts(described: list[Row]) -> MessageRows:
    """Build rows as the store does: absent values are None."""
    channels, expires, opens = (np.array(column) for column in zip(*described, strict=True))
    return MessageRows(
        len(described),
        channels.astype(np.uint32) if channels.any() else 0,
        expires if (expires < NEVER).any() else None,
        opens if opens.any() else None,
    )


def read_known_rows(ring: Ring) -> list[Row]:
    found = ring.read_rows(ring.floor, ring.head)
    count = len(ring)
    channels = np.broadcast_to(np.asarray(found.channels), count)
    expires = np.full(count, NEVER) if found.expires is None else found.expires
    opens = np.full(count, NO_DELAY) if found.not_before is None else found.not_before
    return list(zip(channels.tolist(), expires.tolist(), opens.tolist(), strict=True))


@given(st.lists(steps, max_size=25))
def test_columns_match_model(script: list[tuple[str, int, list[Row]]]) -> None:
    ring = Ring(class_id=1, messages_max=2000, bytes_max=1 << 20, budget=MemoryBudget(1 << 20))
    model: list[Row] = []
    for step, count, pattern in script:
        described = (pattern * count)[:count]
        if step == "plain":
            taken = ring.append(build_batch(*[publish(1, 0, b"x" * 90)] * count), 0)
            model += described[:taken]
        elif step == "one":
            if ring.append_one(memoryview(publish(1, 0, b"x")), 0):
                model += described
        elif step == "special":
            taken = ring.append(
                build_batch(*[publish_envelopes(1, 0, b"\0")] * count),
                0,
                rows_from_dicts(described),
            )
            model += described[:taken]
        elif step == "release":
            ring.release(min(ring.head, ring.floor + count))
        else:
            for _ in range(count * RING_IDLE_TICKS):
                ring.tick()
        ring.check()
        assert read_known_rows(ring) == model[ring.floor :]
    timed = [n for n, (_, expires, opens) in enumerate(model) if expires < NEVER or opens]
    assert all(n < ring.timed_until for n in timed)


@given(st.lists(rows, min_size=400, max_size=400), st.randoms(use_true_random=False))
def test_columns_are_read_in_any_order(described: list[Row], random: Random) -> None:
    ring = Ring(class_id=1, messages_max=2000, bytes_max=1 << 20, budget=MemoryBudget(1 << 20))
    for first in range(0, 400, 50):  # 1 kB each: several segments.
        batch = build_batch(*[publish_envelopes(1, 0, b"\0" * 1000)] * 50)
        assert ring.append(batch, 0, rows_from_dicts(described[first : first + 50])) == 50
    sequences = random.sample(range(400), 60)
    found = ring.read_rows_at(np.array(sequences))
    channels = np.broadcast_to(np.asarray(found.channels), 60).tolist()
    assert channels == [described[sequence][0] for sequence in sequences]
    if found.expires is not None:
        assert found.expires.tolist() == [described[sequence][1] for sequence in sequences]
    assert [ring.read_row(sequence) for sequence in sequences] == [
        described[sequence] for sequence in sequences
    ]


def test_channel_counts_follow_stored_messages() -> None:
    counts = ChannelCounts()
    counts.add(5, 1)
    counts.subtract(np.array([5], np.uint32))
    counts.add(np.array([3, 3, 1], np.uint32), 3)
    counts.add(3, 2)
    assert counts.by_number[1:6].tolist() == [1, 0, 4, 0, 0]
