"""Frames that arrive together have the same effect as frames that arrive one by one.

See also test_fastpaths.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.redelivery.ack_window import AckWindow
from tests.behaviour.wire_peer import (
    LARGE_BATCH_COUNT,
    BrokerHarness,
    ack,
    connect,
    heartbeat,
    numbered,
    publish,
    subscribe,
    window_state,
)
from tests.support.oracles import ID_COUNT, AckOracle, build_frame
from tests.support.strategies import SUBSCRIBE, ack_frame

CLASSES = (0, 1, 256, 0x3C0D)
"""Classes that are named at the start. 1 and 256 differ in byte order; the last id is half a
delimiter.
"""
LATE_CLASS = 77
"""Class that may be named in the middle of a batch."""
SENT_COUNT = 80
"""Messages that every subscription has received before."""

usual_frames = st.one_of(
    st.builds(publish, st.sampled_from(CLASSES), st.binary(max_size=3)),
    st.builds(publish, st.sampled_from(CLASSES), st.sampled_from([b"", b"<\r\n", b"longer" * 9])),
    st.builds(
        lambda class_id, first, count: ack(class_id, first, first + count),
        st.sampled_from((*CLASSES, LATE_CLASS)),
        st.integers(0, SENT_COUNT + 5),
        st.integers(1, 9),
    ),
    st.just(heartbeat()),
)
rare_frames = st.one_of(
    st.just(connect(LATE_CLASS, 1)),
    st.sampled_from((*CLASSES, LATE_CLASS)).map(subscribe),
    st.just(publish(LATE_CLASS, b"perhaps unknown")),
)
bad_frames = st.one_of(
    st.just(build_frame(ord("9"), class_id=1)),
    st.just(publish(3, b"nobody named this class")),
    st.sampled_from([b"", b"5-5", b"x-y"]).map(lambda content: ack_frame(1, content)),
    st.just(build_frame(SUBSCRIBE - 0x30, class_id=1)),
    st.just(connect(-1)),
)


def observe_outcome(chunks: Sequence[bytes]) -> tuple[object, ...]:
    """Return the observable state of a broker after one peer has sent these bytes."""
    bus = BrokerHarness()
    speaker = bus.peer(connect(*CLASSES), *(subscribe(c) for c in CLASSES[:3]))
    listener = bus.peer(*(subscribe(c) for c in CLASSES[1:]))
    for class_id in CLASSES:
        speaker.send(publish(class_id, *numbered(SENT_COUNT)))
    assert len(speaker.receive_messages()) == len(listener.receive_messages()) == 3 * SENT_COUNT
    reason: Reason | None = None
    try:
        speaker.send(*chunks)
    except RemoteProtocolError as error:
        reason = error.reason
    broker = bus.broker
    received = [
        {
            class_id: [m for m in peer if m.class_id == class_id]
            for class_id in (*CLASSES, LATE_CLASS)
        }
        for peer in (speaker.receive_messages(), listener.receive_messages())
    ]
    unacked = [
        (subscription.class_id, window_state(subscription.window))
        for cls in broker.classes.values()
        for subscription in cls.positions
    ]
    stored = {
        class_id: [cls.ring.copy_frame(s) for s in range(cls.ring.floor, cls.ring.head)]
        for class_id, cls in broker.classes.items()
    }
    return (
        reason,
        dict(broker.refusal_counts),
        speaker.session.receiver.frame_count,
        received,
        unacked,
        stored,
    )


def assert_same_outcome(chunks: Sequence[bytes]) -> None:
    at_once, one_by_one = observe_outcome([b"".join(chunks)]), observe_outcome(chunks)
    assert at_once[0] == one_by_one[0]
    assert at_once[1] == one_by_one[1]
    if at_once[0] is None:  # A refused chunk also counts the frames after the illegal one.
        assert at_once[2] == one_by_one[2]
    assert at_once[3:] == one_by_one[3:]


@given(st.lists(usual_frames, min_size=1, max_size=12), st.sampled_from([1, 12]), st.randoms())
def test_mixed_batch_has_same_effect_as_single_frames(
    frames: list[bytes], times: int, random: Random
) -> None:
    # A shuffled batch has more changes of type and class than the run-by-run path accepts.
    frames = frames * times
    random.shuffle(frames)
    assert_same_outcome(frames)


@given(
    st.lists(usual_frames, min_size=2, max_size=12),
    st.lists(rare_frames, max_size=4),
    st.lists(bad_frames, max_size=2),
    st.sampled_from([1, 12]),
    st.randoms(),
)
def test_other_frames_keep_their_place_in_mixed_batch(
    frames: list[bytes], rare: list[bytes], bad: list[bytes], times: int, random: Random
) -> None:
    frames = frames * times + rare + bad
    random.shuffle(frames)
    assert_same_outcome(frames)


@given(
    st.lists(usual_frames, min_size=1, max_size=12),
    st.sampled_from([1, 12]),
    st.integers(1, 100),
    st.randoms(),
)
def test_mixed_batch_into_full_classes_matches_single_frames(
    frames: list[bytes], times: int, class_messages: int, random: Random
) -> None:
    # Acks go before messages, so parked messages may differ in between, but not the result.
    frames = frames * times
    random.shuffle(frames)
    outcomes = []
    for chunks in ([b"".join(frames)], frames):
        bus = BrokerHarness(class_messages=class_messages)
        speaker = bus.peer(connect(*CLASSES), *(subscribe(class_id) for class_id in CLASSES))
        speaker.send(*chunks)
        received: dict[int, list[tuple[int, bytes]]] = {class_id: [] for class_id in CLASSES}
        while messages := speaker.receive_messages():
            for message in messages:
                received[message.class_id].append((message.message_id, message.payload))
                speaker.send(ack(message.class_id, message.message_id, message.message_id + 1))
        assert not speaker.session.parked_messages
        outcomes.append(received)
    assert outcomes[0] == outcomes[1]


def test_interleaved_classes_are_sorted_without_loss() -> None:
    frames = [
        publish(class_id, payload)
        for payload in numbered(LARGE_BATCH_COUNT)
        for class_id in CLASSES
    ]
    bus = BrokerHarness()
    speaker = bus.peer(connect(*CLASSES), *(subscribe(c) for c in CLASSES))
    speaker.send(b"".join(frames))
    received = speaker.receive_messages()
    for class_id in CLASSES:
        of_class = [m for m in received if m.class_id == class_id]
        assert [m.message_id for m in of_class] == list(range(LARGE_BATCH_COUNT))
        assert [m.payload for m in of_class] == numbered(LARGE_BATCH_COUNT)


@pytest.mark.parametrize("bad_at", [0, 1, LARGE_BATCH_COUNT, 2 * LARGE_BATCH_COUNT - 1])
def test_frames_before_an_illegal_one_are_applied(bad_at: int) -> None:
    frames = [publish(1 if i % 2 else 256, b"%d" % i) for i in range(2 * LARGE_BATCH_COUNT)]
    frames[bad_at] = ack_frame(0, b"8-5")
    bus = BrokerHarness()
    speaker = bus.peer(connect(1, 256))
    assert speaker.send_refused(b"".join(frames)) is Reason.BAD_ACK
    assert bus.statistics(1).published == bad_at // 2
    assert bus.statistics(256).published == (bad_at + 1) // 2


def test_acks_across_the_wrap_in_mixed_batch() -> None:
    ranges = [
        (i % ID_COUNT, i % ID_COUNT + 1) for i in range(ID_COUNT - 30, ID_COUNT + LARGE_BATCH_COUNT)
    ]
    oracle = AckOracle(floor=ID_COUNT - 30, cursor=ID_COUNT + LARGE_BATCH_COUNT)
    window = AckWindow(floor=ID_COUNT - 30)
    window.cursor = ID_COUNT + LARGE_BATCH_COUNT
    pairs = np.array(ranges[1:], np.int64)
    window.ack_ranges(*window.ids_to_sequences(pairs[:, 0], pairs[:, 1]))
    window.check()
    for first, last in ranges[1:]:
        oracle.ack_ids(first, last)
    assert (
        window_state(window)
        == window_state(oracle)
        == (ID_COUNT - 30, [(ID_COUNT - 30, ID_COUNT - 29)])
    )
