"""The model of version 2 must detect defects: each test breaks the broker on purpose.

The broker's own checks are disabled, so that only the model can detect the defect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import seed
from hypothesis.stateful import precondition, rule

from simplebus.core.broker.subscription_manager import SubscriptionManager
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.group.group import Group, GroupMember
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.producer_state import NameClaim, ProducerStates
from simplebus.core.protocol.frames import Flags, Integers
from simplebus.core.protocol.requests import SubscribeRequest
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.failure_reasons import FailureReasons
from simplebus.core.redelivery.redelivery_queue import SpanSet
from simplebus.core.redelivery.timer_wheel import Span, TimerWheel
from simplebus.core.ring.ring import Ring
from simplebus.core.session.version2 import Version2Decoder
from simplebus.core.subscription import selection
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import MessageSelection
from simplebus.core.subscription.unacked_messages import UnackedMessages
from tests.models.broken_broker import Patch, assert_model_detects_defect
from tests.models.test_version2_model import Version2Machine, class_ids

pytestmark = pytest.mark.long


@seed(1)  # Seeds that detect each defect soon with the current model.
class TrustingMachine(Version2Machine):
    """Adds two rules for situations that rarely occur by chance."""

    trusting = True

    @precondition(lambda self: len(self.model.peers) < 6)
    @rule(class_id=class_ids)
    def somebody_says_nothing_of_a_message(self, class_id: int) -> None:
        reader = self.model.open()
        self.model.subscribe(reader, class_id, 1, SubscribeRequest(start="new", max_deliveries=2))
        self.publish_kinds(0, [(class_id, {})])
        for ticks in (8, 16):
            self.model.read_bytes(reader, 1 << 40)
            self.model.tick(ticks)
        self.model.read_bytes(reader, 1 << 40)

    @precondition(lambda self: len(self.model.peers) < 6)
    @rule(class_id=class_ids)
    def somebody_goes_with_a_message_and_comes_again(self, class_id: int) -> None:
        durable = SubscribeRequest(durable="d")
        for _ in range(2):
            reader = self.model.open()
            self.model.subscribe(reader, class_id, 1, durable)
            self.publish_kinds(0, [(class_id, {})])
            self.model.read_bytes(reader, 1 << 40)
            self.model.leave(reader)


def stores_duplicates(patch: Patch) -> None:
    sort_out = Version2Decoder._select_fresh

    def all_fresh(
        self: Version2Decoder, numbers: Integers
    ) -> tuple[Flags, RemoteProtocolError | None]:
        is_new, gap = sort_out(self, numbers)
        return np.ones_like(is_new), gap

    patch.setattr(Version2Decoder, "_select_fresh", all_fresh)


def confirms_waiting_messages(patch: Patch) -> None:
    patch.setattr(Version2Decoder, "stored_before", property(lambda self: self.next_number))


def acknowledges_unsent_messages(patch: Patch) -> None:
    def ack(self: UnackedMessages, first: int, last: int) -> None:
        self.remove_waiting(first, last)
        self._window.ack_range(first, last)

    patch.setattr(UnackedMessages, "ack", ack)


def uses_a_fast_clock(patch: Patch) -> None:
    pick = selection.select_messages

    def pick_late(
        ring: Ring, first: int, last: int, channel_filter: ChannelFilter | None, now: float
    ) -> MessageSelection:
        return pick(ring, first, last, channel_filter, now + 0.6)

    patch.setattr(selection, "select_messages", pick_late)


def applies_acks_to_all_members(patch: Patch) -> None:
    lose = GroupMember.remove_in_flight

    def lose_all(self: GroupMember, first: int, last: int, attempt: int = 0) -> list[Span]:
        return [
            span for member in self.group.members for span in lose(member, first, last, attempt)
        ]

    leave = Group.remove_member

    def leave_for_all(self: Group, member: GroupMember) -> None:
        self.position.unacked.requeue(member.remove_in_flight(0, self.window.cursor))
        leave(self, member)

    patch.setattr(GroupMember, "remove_in_flight", lose_all)
    patch.setattr(Group, "remove_member", leave_for_all)


def loses_unsent_messages_of_a_member(patch: Patch) -> None:
    give_back = GroupMember.pop_unsent

    def keep_nothing(self: GroupMember) -> list[SpanSet]:
        return give_back(self)[:0]

    patch.setattr(GroupMember, "pop_unsent", keep_nothing)


def loses_in_flight_messages_of_a_durable(patch: Patch) -> None:
    detach = Position.detach

    def lose(self: Position) -> None:
        self.unacked.remove_in_flight(0, self.window.cursor, 0)
        detach(self)

    patch.setattr(Position, "detach", lose)


def expires_a_recently_used_durable(patch: Patch) -> None:
    leave_alone = SubscriptionManager._mark_if_unattended

    def leave_long_ago(self: SubscriptionManager, position: Position) -> None:
        leave_alone(self, position)
        self._idle_since.update({position: 0.0} if position in self._idle_since else {})

    patch.setattr(SubscriptionManager, "_mark_if_unattended", leave_long_ago)


def leaves_dropped_messages_to_the_next_position(patch: Patch) -> None:
    patch.setattr(Position, "drop_all", lambda self, reason: None)


def rejects_more_than_the_nacked_messages(patch: Patch) -> None:
    cut = TimerWheel.remove
    patch.setattr(
        TimerWheel, "remove", lambda self, first, last, *of: cut(self, first, last + 1, *of)
    )


def ignores_the_backoff(patch: Patch) -> None:
    patch.setattr(DeliveryPolicy, "nack_delay_ticks", lambda self, attempts: 1)


def ignores_max_deliveries(patch: Patch) -> None:
    set_terms = SubscriptionManager._set_delivery_policy

    def endless(
        self: SubscriptionManager,
        cls: MessageClass,
        position: Position,
        terms: DeliveryPolicy,
    ) -> None:
        set_terms(self, cls, position, replace(terms, deliveries_max=0))

    patch.setattr(SubscriptionManager, "_set_delivery_policy", endless)


def loses_failure_reasons(patch: Patch) -> None:
    patch.setattr(FailureReasons, "record", lambda *args: None)


def exceeds_max_in_flight(patch: Patch) -> None:
    room = Position._in_flight_capacity
    patch.setattr(Position, "_in_flight_capacity", lambda self: room(self) + 1)


def accepts_numbers_of_another_instance(patch: Patch) -> None:
    begin = ProducerStates.resume

    def believed(
        self: ProducerStates, claim: NameClaim, *known_numbers: int | None, is_other_bus: bool
    ) -> int:
        claim = claim._replace(is_other_instance=False)
        return begin(self, claim, *known_numbers, is_other_bus=is_other_bus)

    patch.setattr(ProducerStates, "resume", believed)


BREAKS: list[Callable[[Patch], None]] = [
    stores_duplicates,
    confirms_waiting_messages,
    acknowledges_unsent_messages,
    uses_a_fast_clock,
    applies_acks_to_all_members,
    loses_unsent_messages_of_a_member,
    loses_in_flight_messages_of_a_durable,
    expires_a_recently_used_durable,
    leaves_dropped_messages_to_the_next_position,
    rejects_more_than_the_nacked_messages,
    ignores_the_backoff,
    ignores_max_deliveries,
    loses_failure_reasons,
    exceeds_max_in_flight,
    accepts_numbers_of_another_instance,
]


@pytest.mark.parametrize("break_engine", BREAKS, ids=lambda each: each.__name__)
def test_model_detects_broker_that(
    break_engine: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    break_engine(monkeypatch)
    assert_model_detects_defect(TrustingMachine, "version2_model.py")
