"""Every message sent to a position is either acknowledged or becomes one dead letter.

The dead letter has as many attempts as the message had deliveries.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.core.protocol.envelope_batch import decode
from simplebus.core.store.store import Store
from tests.behaviour.wire_peer import BrokerHarness, ack, connect
from tests.behaviour.wire_peer import subscribe as subscribe1
from tests.behaviour.wire_peer_v2 import (
    ENVELOPE,
    FETCH,
    Version2Peer,
    channel_envelope,
    connect_version2,
    json_request,
    nack,
    publish_envelopes,
    subscribe,
)
from tests.behaviour.wire_peer_v2 import ack as ack2
from tests.core.test_dead_letters import DEAD_1, dead_headers

MAX_DELIVERIES = {"": 1, "d": 2, "e": 3}
"""Maximum deliveries of each position, by its name."""
NUMBERS = {5: "", 6: "d", 7: "e", 8: "e"}
"""Two of the subscriptions are members of a durable group."""

kinds = st.lists(st.sampled_from([b"\0<\r\n\0>", b"\0", channel_envelope("a", b"")]), max_size=5)
decisions = st.sampled_from(["ack", "nack", "again", "nothing"])
steps = st.lists(
    st.tuples(kinds, st.lists(decisions, min_size=1, max_size=5), st.booleans()), max_size=6
)


class DeadLetterModel:
    """A bus with a reader of every kind, and the messages that each was sent and acknowledged."""

    def __init__(self) -> None:
        self.bus = BrokerHarness()
        self.bus.skips_checks = True  # To save time: everything is checked once a round.
        self.published: list[bytes] = []
        self.delivered: Counter[tuple[str, int]] = Counter()
        self.acked: set[tuple[str, int]] = set()
        self.old_acked: set[int] = set()
        self.old = self.bus.peer(connect(1), subscribe1(1))
        self.writer = connect_version2(self.bus)
        self.plain = connect_version2(self.bus, subscribe(1, 5, max_deliveries=1, start="new"))
        self.named = self.connect_readers()

    def connect_readers(self) -> Version2Peer:
        return connect_version2(
            self.bus,
            subscribe(1, 6, max_deliveries=2, durable="d", channels=["a", "#"]),
            *[subscribe(1, n, max_deliveries=3, durable="e", group="g") for n in (7, 8)],
        )

    def publish(self, kinds: list[bytes]) -> None:
        contents = [kind + b"|%d" % (len(self.published) + n) for n, kind in enumerate(kinds)]
        self.writer.send(publish_envelopes(1, len(self.published), *contents))
        self.published += [decode(content)[1] for content in contents]

    def receive_and_decide(self, decisions: list[str]) -> None:
        """Let every reader receive its messages and decide on them."""
        self.bus.broker.check_invariants()
        self.bus.broker.run_due_wakeups()  # A group continues dead-lettering in another turn.
        for message in self.old.receive_messages():
            self.old.send(ack(1, message.message_id, message.message_id + 1))
            self.old_acked.add(message.message_id)
        self.decide(self.plain, decisions)
        self.decide(self.named, decisions)
        self.bus.tick()

    def decide(self, reader: Version2Peer, decisions: list[str]) -> None:
        requests = []
        for n, message in enumerate(reader.receive_deliveries()):
            name, sequence = NUMBERS[message.number], message.message_id
            self.delivered[name, sequence] += 1
            assert (name, sequence) not in self.acked
            assert message.attempt == self.delivered[name, sequence] <= MAX_DELIVERIES[name]
            decision = decisions[n % len(decisions)]
            if decision == "ack":
                self.acked.add((name, sequence))
                requests.append(ack2(message.number, sequence, sequence + 1))
            elif decision != "nothing":
                requests.append(
                    nack(message.number, sequence, sequence + 1, 0 if decision == "again" else None)
                )
        reader.send(*requests)

    def settle(self) -> None:
        for _ in range(200):
            self.receive_and_decide(["again"])
            self.bus.broker.end_turn()
            if not len(self.bus.broker.classes[1].ring):
                return
        raise AssertionError("messages were not dead-lettered")

    def check(self) -> None:
        """Compare the dead letters with the messages that were sent and not acknowledged."""
        expected = Counter(
            (name, sequence, Reason.MAX_DELIVERIES, MAX_DELIVERIES[name])
            for name, sequence in self.delivered
            if (name, sequence) not in self.acked
        )
        expected += Counter(
            ("", sequence, Reason.UNCARRIABLE, 0)
            for sequence, payload in enumerate(self.published)
            if b"<\r\n>" in payload
        )
        self.writer.send(json_request(FETCH, DEAD_1, 5))
        found: Counter[tuple[str, int, str, int]] = Counter()
        for message in self.writer.receive_deliveries():
            assert (message.kind, message.class_id) == (ENVELOPE, DEAD_1)
            letter, payload = decode(message.content)
            name, sequence, reason, attempts = dead_headers(
                letter, "subscription", "sequence", "reason", "attempts"
            )
            assert payload == self.published[int(sequence)]
            found[name, int(sequence), reason, int(attempts)] += 1
        assert found == expected
        statistics = self.bus.statistics(1)
        assert sum(statistics.dropped.values()) == found.total()
        assert statistics.acknowledged == len(self.acked) + len(self.old_acked)


@given(steps)
@settings(max_examples=30)
def test_every_message_is_acknowledged_or_one_dead_letter(
    steps: list[tuple[list[bytes], list[str], bool]],
) -> None:
    run_steps(steps)


def run_steps(steps: list[tuple[list[bytes], list[str], bool]]) -> None:
    model = DeadLetterModel()
    for kinds, decisions, reconnects in steps:
        model.publish(kinds)
        model.receive_and_decide(decisions)
        if reconnects:
            model.named.disconnect()
            model.named = model.connect_readers()
    model.settle()
    model.check()


def test_model_detects_messages_given_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    dead_letter = Store.dead_letter

    def dead_letter_twice(self: Store, *arguments: Any) -> int | None:
        dead_letter(self, *arguments)
        return dead_letter(self, *arguments)

    monkeypatch.setattr(Store, "dead_letter", dead_letter_twice)
    with pytest.raises(AssertionError):
        settings(max_examples=50, phases=[Phase.generate], database=None)(given(steps)(run_steps))()
