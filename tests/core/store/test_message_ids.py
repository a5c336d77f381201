"""Duplicate windows of message ids."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.limits import DUPLICATE_WINDOW_SECONDS, MESSAGE_IDS_EXPIRED_PER_TICK
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.core.snapshot import StateChanges, decode_changes
from simplebus.core.store.message_ids import MessageIds, iter_message_ids


def test_id_is_found_in_its_class_until_it_expires() -> None:
    ids = MessageIds()
    ids.add(1, b"a", 7, now=100.0)
    assert ids.find(1, b"a", now=100.0 + DUPLICATE_WINDOW_SECONDS) == 7
    assert ids.find(2, b"a", now=100.0) is None
    assert ids.find(1, b"b", now=100.0) is None
    assert ids.find(1, b"a", now=101.0 + DUPLICATE_WINDOW_SECONDS) is None
    ids.add(1, b"a", 8, now=300.0)
    assert ids.find(1, b"a", now=300.0) == 8
    assert len(ids) == 1


def test_ticks_remove_expired_ids_in_portions() -> None:
    ids = MessageIds()
    for number in range(MESSAGE_IDS_EXPIRED_PER_TICK + 10):
        ids.add(1, b"%d" % number, number, now=0.0)
    ids.tick(now=1000.0)
    assert len(ids) == 10
    ids.tick(now=1000.0)
    assert len(ids) == 0
    assert ids.snapshot() == []


def test_new_id_replaces_the_oldest_of_its_class_at_the_limit() -> None:
    ids = MessageIds(count_max=4)
    for number in range(3):
        ids.add(1, b"%d" % number, number, now=0.0)
    ids.add(2, b"x", 0, now=0.0)
    ids.add(2, b"y", 1, now=0.0)
    assert [ids.find(2, name, now=0.0) for name in (b"x", b"y")] == [None, 1]
    ids.add(3, b"z", 0, now=0.0)  # The first of its class: the largest window shrinks.
    assert [ids.find(1, b"%d" % number, now=0.0) for number in range(3)] == [None, 1, 2]
    assert ids.find(3, b"z", now=0.0) == 0
    assert len(ids) == 4


def test_snapshot_restores_ids_below_the_head() -> None:
    ids = MessageIds()
    for number in range(5):
        ids.add(9, b"%d" % number, number, now=100.0 + number)
    encoded = StateChanges(message_ids=ids.snapshot()).encode()
    restored = MessageIds()
    for snapshot in decode_changes(encoded).message_ids:
        restored.restore(snapshot, head=4, now=105.0)
    found = [restored.find(9, b"%d" % number, now=105.0) for number in range(5)]
    assert found == [0, 1, 2, 3, None]
    assert restored.find(9, b"0", now=101.0 + DUPLICATE_WINDOW_SECONDS) is None
    assert restored.find(9, b"1", now=101.0 + DUPLICATE_WINDOW_SECONDS) == 1
    assert len(restored) == 4


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 90)),
        max_size=40,
    )
)
def test_windows_equal_a_simple_model(published: list[tuple[int, bytes, int]]) -> None:
    """The model keeps the time of each id exactly; a window keeps an id up to a second longer."""
    ids, now, sequences = MessageIds(), 0.0, {1: 0, 2: 0}
    model: dict[tuple[int, bytes], tuple[int, float]] = {}
    for class_id, message_id, seconds in published:
        now += seconds
        found = ids.find(class_id, message_id, now)
        sequence, used_at = model.get((class_id, message_id), (-1, -1000.0))
        if now - used_at <= DUPLICATE_WINDOW_SECONDS:
            assert found == sequence
        elif now - used_at > DUPLICATE_WINDOW_SECONDS + 1:
            assert found is None
        if found is None:
            ids.add(class_id, message_id, sequences[class_id], now)
            model[class_id, message_id] = sequences[class_id], now
        sequences[class_id] += 1
        assert len(ids) <= len(model)


def test_ids_of_stored_messages_are_found() -> None:
    plain = frames.encode(frames.MESSAGE, class_id=1, content=b"Nats-Msg-Id")
    headers = (("A", "b"), ("Nats-Msg-Id", "caf\u00e9"), ("Nats-Msg-Id", "second"))
    content = encode(Envelope("a", headers=headers), b"<\r\n>")
    with_id = frames.encode(frames.ENVELOPE, class_id=1, content=content)
    without_id = frames.encode(frames.ENVELOPE, class_id=1, content=encode(Envelope("a"), b"x"))
    assert list(iter_message_ids(plain + without_id)) == []
    found = list(iter_message_ids(plain + with_id + without_id + with_id))
    assert found == [(1, "caf\u00e9".encode()), (3, "caf\u00e9".encode())]
