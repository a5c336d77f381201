"""Tests that the scaling page quotes the measured figures and calculates correctly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES, Limits
from simplebus.storage import records

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = (ROOT / "protocol" / "guide" / "performance.md").read_text()
PAGE = " ".join((ROOT / "protocol" / "scale.md").read_text().split())
WIRE_BYTES = 128 + HEADER_BYTES + DELIMITER_BYTES
NATS_128, NATS_FAN_OUT = 1.02, 0.67  # M/s, as the page has them.
RATE = r"([\d.]+) x"


def figure(row: str, of: str = r"([\d.,]+)") -> str:
    """Return the figure in the first row of the performance page that starts with `row`."""
    found = re.search(rf"^\| {row}.*?{of}", PERFORMANCE, re.MULTILINE)
    assert found, f"no row {row!r}"
    return found[1]


@pytest.mark.parametrize(
    ("quoted", "words"),
    [
        (figure("128 B, the same", RATE), f"{{}} times nats core, which does {NATS_128} M/s |"),
        (figure("version 2 with envelopes", RATE), "{} times that | about"),
        (figure("16 B / 128 B, confirmed by the operating system", f"/ {RATE}"), "{} times memory"),
        (
            figure("16 B, one publisher, three subscribers", RATE),
            f"{{}} times nats core, which does {NATS_FAN_OUT} M/s |",
        ),
        (figure("one of 20 M unacknowledged", r"(\d+) bytes"), "its frame, and {} bytes |"),
        (figure("memory of an idle connection", r"(\d+) KB"), "an idle connection | {} kB |"),
        (figure("from bus to bus, the bridge alone", r"\| ([\d., ]+ M/s) \|"), "{} in two runs"),
        (
            figure("from bus to bus, part of a server", r"\| ([\d., ]+ M/s) \|"),
            "{} as a part of its server",
        ),
        (figure("an archive that follows", r"([\d,]+) messages/s"), "follows {} messages/s"),
        (
            figure("one ack for 500", rf"\| {RATE} \("),
            "a stateless server {} times that",
        ),
    ],
)
def test_scale_page_quotes_measured_figures(quoted: str, words: str) -> None:
    assert words.format(quoted) in PAGE


def test_scale_page_calculations_are_right() -> None:
    flow = float(figure("128 B, the same", RATE)) * NATS_128
    envelopes = flow * float(figure("version 2 with envelopes", RATE))
    stored = flow * float(figure("16 B / 128 B, confirmed by the operating system", f"/ {RATE}"))
    fan_out = float(figure("16 B, one publisher, three subscribers", RATE)) * NATS_FAN_OUT
    limits, idle_kb = Limits(), int(figure("memory of an idle connection", r"(\d+) KB"))
    message_count = (1 << 30) / (
        WIRE_BYTES + int(figure("one of 20 M unacknowledged", r"(\d+) bytes"))
    )
    archived = int(figure("an archive that follows", r"([\d,]+) messages/s").replace(",", ""))
    for sentence in (
        f"| about {flow:.0f} M/s | | the same as envelopes",
        f"| about {envelopes:.0f} M/s | | the same as plain",
        f"| about {stored:.0f} M/s, if the disk takes it |",
        f"about {fan_out:.0f} M/s in, {3 * fan_out:.0f} M/s out",
        f"1 GiB holds {message_count / 1e6:.0f} million of 128 B",
        f"{limits.connections:,} are {limits.connections * idle_kb / 1000:.0f} MB",
        f"A 128 B message is {WIRE_BYTES} B on the wire",
        f"{records.HEADER_BYTES} bytes for a batch",
        f"{round(stored)} M/s of 128 B are {round(stored) * WIRE_BYTES / 1000:.2f} GB/s",
        f"16 servers at {round(stored)} M/s kept are {16 * round(stored)} M/s, "
        f"{16 * round(stored) * WIRE_BYTES / 1000:.1f} GB/s",
        f"so {16 * round(stored)} M/s are {16e6 * round(stored) / archived:.0f} times two cores",
        f"5 x 86,400 x {WIRE_BYTES} B, or {5 * 86_400 * WIRE_BYTES / 1e6:.0f} MB",
    ):
        assert sentence in PAGE, sentence
