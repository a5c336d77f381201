"""The guides on operating and security quote the defaults of the code and existing metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simplebus.commands import systemd_unit
from simplebus.core.limits import (
    DEFAULT_DELIVERIES_MAX,
    DURABLE_BYTES,
    DURABLES_MEMORY_DIVISOR,
    GROUP_IN_FLIGHT_MESSAGES,
    HANDSHAKE_FRAME_BYTES_MAX,
    IN_FLIGHT_BYTES,
    IN_FLIGHT_MESSAGES,
    RESTORE_HEADROOM_BYTES,
    Limits,
)
from simplebus.nats.limits import NatsLimits
from simplebus.server.http import server as http_server
from simplebus.storage.journal import SEGMENT_BYTES

PROTOCOL = Path(__file__).parents[2] / "protocol"
OPERATING = (PROTOCOL / "guide" / "operating.md").read_text()
SECURITY = (PROTOCOL / "guide" / "security.md").read_text()
METRICS = (PROTOCOL / "reference" / "metrics.md").read_text()
LIMITS, NATS = Limits(), NatsLimits()
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    "text",
    [
        f"| {LIMITS.class_bytes // MIB} MiB and {LIMITS.class_messages:,} messages |",
        f"the messages of all classes | {LIMITS.total_bytes // GIB} GiB |",
        f"dead letters of one class | {LIMITS.dead_letter_bytes // MIB} MiB;",
        f"durables, {DURABLE_BYTES // KIB} KiB each | a quarter of `--max-memory`: "
        f"{LIMITS.total_bytes // DURABLES_MEMORY_DIVISOR // DURABLE_BYTES:,} |",
        f"unread replies | {LIMITS.pending_bytes // MIB} MiB |",
        f"all binary connections together | {LIMITS.total_pending_bytes // GIB} GiB |",
        f"one NATS client: unread messages | {NATS.max_pending // MIB} MiB |",
        f"all NATS clients together | {LIMITS.total_pending_bytes // GIB} GiB |",
        f"a Python publisher | {LIMITS.credit_bytes // MIB} MiB |",
        f"binary connections | {LIMITS.connections:,} |",
        f"NATS connections | {NATS.connections:,} |",
        f"HTTP connections | {http_server.CONNECTIONS_MAX} |",
        f"{LIMITS.connections + NATS.connections + systemd_unit._SPARE_DESCRIPTORS:,} by default",
        f"while it stores | {LIMITS.classes:,} |",
        f"segments of {SEGMENT_BYTES // MIB} MiB |",
        f"| {IN_FLIGHT_MESSAGES:,} and about {IN_FLIGHT_BYTES // MIB} MiB; "
        f"a member of a group {GROUP_IN_FLIGHT_MESSAGES} |",
        f"channel, key and headers | {LIMITS.frame_bytes // MIB} MiB |",
        f"deliveries of a message | {DEFAULT_DELIVERIES_MAX} |",
    ],
)
def test_sizing_quotes_the_defaults(text: str) -> None:
    assert text in OPERATING


def test_sizing_example_is_calculated_correctly() -> None:
    frame_bytes = KIB + 13 + 8
    assert LIMITS.class_bytes // (1000 * frame_bytes) // 60 == 8
    assert "last for eight minutes" in " ".join(OPERATING.split())


@pytest.mark.parametrize(
    "text",
    [
        f"with users {HANDSHAKE_FRAME_BYTES_MAX // KIB} KiB before authentication",
        f"`--max-frame`, {LIMITS.frame_bytes // MIB} MiB",
        f"`--max-pending`, {LIMITS.pending_bytes // MIB} MiB",
        f"`--max-credit`, {LIMITS.credit_bytes // MIB} MiB",
        f"`--nats-max-control-line`, {NATS.max_control_line // KIB} KiB",
        f"`--nats-max-payload`, {NATS.max_payload // MIB} MiB",
        f"`--nats-max-pending`, {NATS.max_pending // MIB} MiB",
        f"{http_server.HEAD_BYTES_MAX // KIB} KiB and {http_server.HEADERS_MAX} headers",
        f"{http_server.CONNECTIONS_MAX} connections",
        f"by half and {RESTORE_HEADROOM_BYTES // MIB} MiB",
    ],
)
def test_size_limits_quote_the_defaults(text: str) -> None:
    assert text in SECURITY


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\b(?:simplebus|process)_[a-z_]*[a-z]\b", OPERATING)))
)
def test_alerts_name_existing_metrics(name: str) -> None:
    assert f"`{name}`" in METRICS
