"""Delays between deliveries, and conversion of seconds to ticks."""

from __future__ import annotations

import pytest

from simplebus.core.redelivery.delivery_policy import DeliveryPolicy, seconds_to_ticks
from simplebus.core.settings import ClassSettings, Settings


def test_delays_double_up_to_a_minute_or_follow_the_backoff() -> None:
    plain, named = (
        DeliveryPolicy(ack_timeout_ticks=6),
        DeliveryPolicy(ack_timeout_ticks=4, backoff_ticks=(1, 5, 90)),
    )
    assert [plain.redelivery_delay_ticks(n) for n in (1, 2, 3, 4, 5, 6, 999)] == [
        6,
        12,
        24,
        48,
        60,
        60,
        60,
    ]
    assert [plain.nack_delay_ticks(n) for n in (-1, 0, 1, 2)] == [6, 6, 6, 12]
    assert DeliveryPolicy(ack_timeout_ticks=100).redelivery_delay_ticks(9) == 100
    assert [named.nack_delay_ticks(n) for n in (0, 1, 2, 3, 4, 999)] == [1, 1, 5, 90, 90, 90]
    assert [named.redelivery_delay_ticks(n) for n in (1, 2, 3)] == [4, 5, 90]


@pytest.mark.parametrize(("seconds", "ticks"), [(0.001, 1), (1.0, 1), (1.01, 2), (30, 30)])
def test_seconds_are_rounded_up_to_ticks(seconds: float, ticks: int) -> None:
    assert seconds_to_ticks(seconds, 1.0) == ticks
    assert seconds_to_ticks(seconds / 4, 0.25) == ticks


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"deliveries_max": -1}, "deliveries_max must be from 0 to 65535, got -1"),
        ({"deliveries_max": 65536}, "deliveries_max must be from 0 to 65535"),
        ({"backoff_seconds": ()}, "backoff_seconds must have from 1 to 64 delays, got 0"),
        ({"backoff_seconds": (1.0,) * 65}, "backoff_seconds must have from 1 to 64 delays, got 65"),
        (
            {"backoff_seconds": (1.0, 0.0)},
            "backoff_seconds must be above 0 and up to 86400 seconds, got 0",
        ),
        ({"ack_seconds": 0.0}, "ack_seconds must be above 0"),
        ({"ack_seconds": float("nan")}, "ack_seconds must be above 0"),
    ],
)
def test_invalid_delivery_policies_are_refused(named: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ClassSettings(**named)  # type: ignore[arg-type]
    if "deliveries_max" in named:
        with pytest.raises(ValueError, match=sentence):
            Settings(**named)  # type: ignore[arg-type]
