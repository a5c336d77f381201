"""Publishing of messages that another listener has encoded, against messages that are decoded."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.limits import Limits
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, EnvelopeColumns, encode, scan_envelopes
from simplebus.core.protocol.events import PublishedBatch, PublishedFrame
from simplebus.core.session.session import Session
from simplebus.core.users.permissions import Grants, PermissionRule, PermissionRules, Permissions
from simplebus.core.users.rate_limit import RateLimit, RateLimiter
from tests.behaviour.wire_peer import LARGE_BATCH_COUNT, BrokerHarness, build_batch
from tests.behaviour.wire_peer import ack as ack1
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import subscribe as subscribe1

Publication: TypeAlias = tuple[str, bytes]
"""Channel and payload."""

CHANNELS = st.sampled_from(["a", "b.c", "b.d", "secret.x", "secret.y"])
PUBLICATIONS = st.tuples(CHANNELS, st.sampled_from([b"", b"<\r\n>", b"plain", b"y" * 300]))
STEPS = st.one_of(
    PUBLICATIONS,
    st.lists(PUBLICATIONS, min_size=1, max_size=2 * LARGE_BATCH_COUNT),
    st.sampled_from(["ack", "tick"]),
)
MAY_NOT = Permissions(PermissionRules(deny=(PermissionRule("1", "secret.*"),)))
MAY_ONLY = Permissions(PermissionRules(allow=(PermissionRule("1", "b.*"),)))
MAY_NOTHING = Permissions(PermissionRules(allow=()))


def frame_of(channel: str, payload: bytes) -> bytes:
    content = encode(Envelope(channel, headers=(("h", "v"),)), payload)
    return frames.encode(frames.ENVELOPE, class_id=1, content=content)


def columns_of(channels: list[str]) -> EnvelopeColumns:
    names = list(dict.fromkeys(channels))
    numbers = np.array([names.index(channel) for channel in channels], np.uint32)
    return EnvelopeColumns(len(channels), names, numbers if len(names) > 1 else 0)


class World:
    """Bus with a local session that publishes, and a subscriber that acks."""

    def __init__(
        self, *, policy: FullPolicy, permissions: Permissions | None, rate: float, limits: Limits
    ) -> None:
        settings = Settings(limits=limits, full_policy=policy)
        self.log = CommitLog()
        self.bus = BrokerHarness(settings, commit_log=self.log)
        self.reader = self.bus.peer(connect1(1), subscribe1(1))
        self.session: Session = self.bus.broker.open_local_session(
            "local", grants=None if permissions is None else Grants(permissions)
        )
        if rate:
            limiter = RateLimiter(RateLimit(messages=rate), self.bus.broker.clock.now)
            self.session.token_buckets = (limiter,)

    def publish_decoded(self, publications: list[Publication]) -> None:
        """Publish messages whose envelopes the store must decode."""
        whole = [frame_of(*publication) for publication in publications]
        event: PublishedFrame | PublishedBatch = PublishedBatch(1, build_batch(*whole))
        if len(whole) == 1:
            event = PublishedFrame(1, memoryview(whole[0]))
        self.bus.broker.apply_event(self.session, event)

    def publish_encoded(self, publications: list[Publication]) -> None:
        """Publish messages whose channels are passed with them."""
        whole, channels = (
            [frame_of(*publication) for publication in publications],
            [c for c, _ in publications],
        )
        broker = self.bus.broker
        if len(whole) == 1:
            broker.publish_encoded(self.session, 1, channels[0], memoryview(whole[0]))
            return
        batch = PublishedBatch(1, build_batch(*whole), columns_of(channels))
        broker.apply_event(self.session, batch)

    def ack(self) -> None:
        for number in self.reader.receive_ids(1):
            self.reader.send(ack1(1, number, number + 1))

    def tick(self) -> None:
        self.bus.broker.clock.now += 0.5
        self.bus.broker.run_due_wakeups()
        self.bus.tick()

    def state(self) -> object:
        self.bus.check_invariants()
        cls = self.bus.broker.classes[1]
        ring, session = cls.ring, self.session
        written = self.log.pop_write_batch()
        return (
            [ring.copy_frame(sequence) for sequence in range(ring.floor, ring.head)],
            [
                cls.channels.name_of(int(number))
                for number in np.broadcast_to(
                    ring.read_rows(ring.floor, ring.head).channels, len(ring)
                )
            ]
            if len(ring)
            else [],
            dict(cls.dropped_counts),
            (session.handled_count, session.parked_bytes, session.refusal_counts),
            session.outbox.peek(0).tobytes(),
            written and [(e.first_sequence, b"".join(e.frames)) for e in written.entries],
        )


MANY = [(channel, b"x") for channel in ["a", "b.c", "b.d", "secret.x", "b.c"] * 3]


@settings(max_examples=60, deadline=None)
@example([MANY, "ack", MANY], FullPolicy.DROP_OLDEST, None, 0.0, 5)
@example([MANY, "ack", MANY], FullPolicy.DROP_OLDEST, MAY_NOT, 0.0, 5)
@example([MANY, "tick", MANY, "ack", "tick"], FullPolicy.BLOCK, MAY_NOT, 3.0, 5)
@example([MANY, ("a", b"y"), "tick", MANY], FullPolicy.BLOCK, None, 3.0, 1000)
@given(
    st.lists(STEPS, max_size=8),
    st.sampled_from([FullPolicy.BLOCK, FullPolicy.DROP_OLDEST, FullPolicy.DROP_NEWEST]),
    st.sampled_from([None, MAY_NOT, MAY_ONLY, MAY_NOTHING]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([5, 1000]),
)
def test_encoded_messages_are_stored_like_decoded_ones(
    steps: list[Publication | list[Publication] | str],
    policy: FullPolicy,
    permissions: Permissions | None,
    rate: float,
    class_messages: int,
) -> None:
    limits = Limits(class_messages=class_messages)
    old, new = (
        World(policy=policy, permissions=permissions, rate=rate, limits=limits) for _ in range(2)
    )
    for step in steps:
        if isinstance(step, str):
            for world in (old, new):
                world.ack() if step == "ack" else world.tick()
        else:
            publications = step if isinstance(step, list) else [step]
            old.publish_decoded(publications)
            new.publish_encoded(publications)
        assert new.state() == old.state()


@given(st.lists(CHANNELS, min_size=1, max_size=30), st.data())
def test_columns_are_sliced_like_their_frames(channels: list[str], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(channels) - 1))
    last = data.draw(st.integers(first + 1, len(channels)))
    columns = columns_of(channels).slice(first, last)
    part = build_batch(*[frame_of(channel, b"") for channel in channels[first:last]])
    scanned = scan_envelopes(part)
    assert columns.count == scanned.count
    assert sorted(columns.names) == sorted(scanned.names)
    numbers = np.broadcast_to(columns.channels, columns.count)
    assert [columns.names[number] for number in numbers] == channels[first:last]


@pytest.mark.parametrize("count", [1, 3])
def test_encoded_message_waits_while_no_memory_is_left_for_channels(count: int) -> None:
    limits = Limits(total_bytes=32 * 1024 * 1024, class_bytes=16 * 1024 * 1024)
    world = World(policy=FullPolicy.BLOCK, permissions=None, rate=0, limits=limits)
    broker = world.bus.broker
    taken = broker.budget.available_bytes
    assert broker.budget.acquire(taken)
    world.bus.skips_checks = True
    world.publish_encoded([("a", b"x")] * count)
    assert world.session.parked_messages
    broker.budget.release(taken)
    world.tick()
    assert not world.session.parked_messages
    assert len(broker.classes[1].ring) == count
