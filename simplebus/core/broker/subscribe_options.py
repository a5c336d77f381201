"""Validation of Subscribe requests, and the delivery policy that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simplebus.core.channel.pattern import check_pattern
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import IN_FLIGHT_MESSAGES
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.requests import SubscribeRequest
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy, seconds_to_ticks
from simplebus.core.settings import Settings

_SLOW_POLICIES = ("block", "drop_oldest", "drop_newest", "disconnect")


def check_subscribe_request(request: SubscribeRequest) -> None:
    """Raise RemoteProtocolError if no class could grant the request."""
    for pattern in request.channels:
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise RemoteProtocolError(Reason.BAD_CHANNEL, str(error)) from None
    if request.slow not in _SLOW_POLICIES:
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, f"slow is one of {', '.join(_SLOW_POLICIES)}, got {request.slow!r}"
        )
    if request.slow != "block" and request.max_pending is None:
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, f"slow is {request.slow!r}, so max_pending must be given"
        )
    if request.seek and (request.durable is None or request.group or request.start == "waiting"):
        raise RemoteProtocolError(
            Reason.BAD_REQUEST,
            'seek is for a durable without a group, and a start that is not "waiting"; got '
            f"durable {request.durable!r}, group {request.group!r}, start {request.start!r}",
        )
    if request.by_key and request.group is None:
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, "by_key is for a group, so a group must be given"
        )
    if request.idle_seconds is not None and request.durable is None:
        raise RemoteProtocolError(
            Reason.BAD_REQUEST,
            f"idle_seconds is {request.idle_seconds:g}, so a durable must be given: others end "
            "with their sessions",
        )


def build_delivery_policy(
    request: SubscribeRequest | None, cls: MessageClass, settings: Settings
) -> DeliveryPolicy:
    """Return the delivery policy of a request: its options, else the settings of the class, else
    the settings of the broker.

    `request` is None for version 1, which has no options.
    """
    class_settings = settings.settings_for_class(cls.class_id, cls.name)
    ack_seconds, deliveries = class_settings.ack_seconds, class_settings.deliveries_max
    backoff: Sequence[float] = class_settings.backoff_seconds or ()
    if request is not None:
        ack_seconds = request.ack_seconds or ack_seconds
        backoff = request.backoff or backoff
        deliveries = deliveries if request.max_deliveries is None else request.max_deliveries
    if deliveries is None and is_dead_letter_class(cls.name):
        deliveries = 0  # Given up again, a dead letter would be lost; this must be requested.
    ticks = settings.ack_timeout
    if ack_seconds is not None:
        ticks = seconds_to_ticks(ack_seconds, settings.tick_seconds)
    granted = DeliveryPolicy(
        ack_timeout_ticks=ticks,
        deliveries_max=settings.deliveries_max if deliveries is None else deliveries,
        backoff_ticks=tuple(seconds_to_ticks(pause, settings.tick_seconds) for pause in backoff),
        backoff_seconds=tuple(backoff),
    )
    if request is None:  # Messages that are read back from disk take memory.
        return granted if cls.spill is None else replace(granted, in_flight_max=IN_FLIGHT_MESSAGES)
    in_flight_max = None  # The members of a group have limits of their own.
    if not request.group:
        in_flight_max = request.max_in_flight or IN_FLIGHT_MESSAGES
        if request.max_pending is not None and request.slow.startswith("drop"):
            # Messages in flight are never dropped.
            in_flight_max = min(in_flight_max, request.max_pending)
    return replace(
        granted,
        in_flight_max=in_flight_max,
        pending_max=request.max_pending,
        slow_policy=request.slow,
        accepts_envelopes=True,
    )
