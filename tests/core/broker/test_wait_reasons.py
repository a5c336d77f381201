"""Wait reasons: every word and sentence."""

from __future__ import annotations

import pytest

from simplebus.core.broker.wait_reasons import (
    WaitFacts,
    explain_wait,
    format_bytes,
    format_count,
    format_duration,
    format_waiting_count,
)
from simplebus.core.channel.explain_mismatch import explain_mismatch
from simplebus.core.protocol.inquiry import InFlightInfo

HOLDER = "session 4 (127.0.0.1:5001)"
OLDEST = InFlightInfo(sequence=7, attempt=1, first_seconds=93.2, sent_seconds=93.2)
AGAIN = InFlightInfo(sequence=7, attempt=4, first_seconds=93.2, sent_seconds=12.0)

SENTENCES = {
    "nothing": (WaitFacts(), "nothing", "nothing to send"),
    "its window is full": (
        WaitFacts(HOLDER, 12, 1000, 1000, oldest=OLDEST, is_at_in_flight_limit=True),
        "acks",
        f"its acknowledgements: 1,000 of 1,000 in flight, the oldest for 93 s, {HOLDER}",
    ),
    "its window is full of bytes": (
        WaitFacts(
            HOLDER,
            12,
            3,
            1000,
            in_flight_bytes=17 << 20,
            in_flight_bytes_max=16 << 20,
            oldest=AGAIN,
            is_at_in_flight_limit=True,
        ),
        "acks",
        "its acknowledgements: 17 MiB of 16 MiB in flight, the oldest for 93 s (sent 4 times), "
        f"{HOLDER}",
    ),
    "its window is full, and it takes nothing": (
        WaitFacts(
            HOLDER, 12, 2, 2, oldest=OLDEST, is_at_in_flight_limit=True, send_blocked_seconds=30
        ),
        "acks",
        f"its acknowledgements: 2 of 2 in flight, the oldest for 93 s, {HOLDER}, which has read "
        "nothing for 30 s",
    ),
    "all is sent": (
        WaitFacts(HOLDER, 0, 5, 0, oldest=OLDEST),
        "acks",
        f"its acknowledgements: 5 in flight, the oldest for 93 s, {HOLDER}",
    ),
    "others of a key are in flight": (
        WaitFacts(HOLDER, 0, 1, 256, oldest=OLDEST, key_blocked_count=7),
        "acks",
        f"its acknowledgements: 1 of 256 in flight, the oldest for 93 s, {HOLDER}; 7 messages "
        "wait for earlier messages with the same key",
    ),
    "its connection takes nothing": (
        WaitFacts(HOLDER, 12, 5, 1000, oldest=OLDEST, send_blocked_seconds=42),
        "bytes",
        f"its connection, which has read nothing for 42 s: {HOLDER}",
    ),
    "it is being sent": (
        WaitFacts(HOLDER, 1, 5, 1000, oldest=OLDEST),
        "turn",
        "its turn: 1 message to be sent now",
    ),
    "nobody is there": (
        WaitFacts(ready_count=1200, has_consumer=False, unattended_seconds=7500),
        "nobody",
        "no subscription has been connected for 2 h; 1,200 messages wait",
    ),
    "nobody is there for one message": (
        WaitFacts(ready_count=1, has_consumer=False, unattended_seconds=8.25),
        "nobody",
        "no subscription has been connected for 8.2 s; 1 message waits",
    ),
    "nobody is there, and there is nothing": (
        WaitFacts(has_consumer=False, unattended_seconds=8.25),
        "nobody",
        "no subscription has been connected for 8.2 s; nothing waits",
    ),
    "all is put off": (
        WaitFacts(delayed_count=2, next_delay_seconds=300),
        "time",
        "a delay: 2 messages are delayed, the first for another 5 min",
    ),
    "one is put off": (
        WaitFacts(delayed_count=1, next_delay_seconds=3),
        "time",
        "a delay: 1 message is delayed, the first for another 3.0 s",
    ),
    "others have all": (
        WaitFacts(HOLDER, other_members_count=3),
        "others",
        "nothing to send: other members hold 3 messages",
    ),
    "nothing is for it": (
        WaitFacts(HOLDER, has_matched=False),
        "match",
        "a message that matches its patterns: none has so far",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_explain_wait(case: str) -> None:
    facts, word, sentence = SENTENCES[case]
    assert explain_wait(facts) == (word, sentence)


def test_format_counts_in_singular_and_plural() -> None:
    assert [format_count(count, "frame") for count in (0, 1, 2000)] == [
        "0 frames",
        "1 frame",
        "2,000 frames",
    ]
    assert format_count(2, "class") == "2 classes"
    assert [format_waiting_count(count) for count in (1, 2)] == [
        "1 message waits",
        "2 messages wait",
    ]


def test_format_durations_and_sizes() -> None:
    texts = [
        format_duration(s)
        for s in (-1, 0.04, 9.94, 10, 119, 120, 7199, 7200, 172_799, 172_800, 1e7)
    ]
    assert texts == [
        "0.0 s",
        "0.0 s",
        "9.9 s",
        "10 s",
        "119 s",
        "2 min",
        "120 min",
        "2 h",
        "48 h",
        "2 days",
        "116 days",
    ]
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 << 20, 3 << 30)] == [
        "0 bytes",
        "1023 bytes",
        "1 KiB",
        "5 MiB",
        "3.0 GiB",
    ]


@pytest.mark.parametrize(
    ("pattern", "channel", "reason"),
    [
        ("orders.eu", "orders.eu", ""),
        ("orders.*", "orders.eu", ""),
        ("Orders.EU", "orders.eu", "upper and lower case differ"),
        ("orders.us", "orders.eu", "segment 2 is 'eu', not 'us'"),
        ("orders.us.#", "orders.eu.paid", "segment 2 is 'eu', not 'us'"),
        ("*.eu.open", "orders.eu.paid", "segment 3 is 'paid', not 'open'"),
        ("orders.us.open", "orders.eu.paid", ""),
        ("shops", "orders", ""),
        ("*.x", "orders.eu", ""),
        (
            "orders.*",
            "orders.eu.paid",
            "the channel has 1 segment more: * stands for one, > for one or more",
        ),
        ("orders", "orders.eu.paid", "the channel has 2 segments more: orders.# would match"),
        (
            "orders.eu.>",
            "orders.eu",
            "> stands for one segment or more, and there is none: # would match",
        ),
        ("orders.eu.paid", "orders", "the channel has 2 segments less"),
        ("orders.eu.>", "orders", "the channel has 2 segments less"),
        ("orders.eu.#", "orders", "the channel has 1 segment less"),
        ("orders.us", "orders.eu.paid", ""),
        (">", "orders", ""),
    ],
)
def test_near_miss_reasons(pattern: str, channel: str, reason: str) -> None:
    assert explain_mismatch(pattern, channel) == reason
