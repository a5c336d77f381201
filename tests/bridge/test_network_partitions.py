"""A bridge over a bad network, with cuts and kills: real processes in network namespaces.

`python load/run.py partitions` is the long form, which also has NATS as source or target.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from load import faulty_network, partitions
from tests.support.requirements import skip_or_fail

PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _networks() -> None:
    if lack := faulty_network.missing_requirement():
        skip_or_fail(f"network namespaces need {lack}")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "HEARTBEAT_S", 1.0)
    monkeypatch.setattr(partitions, "LONG_CUT_S", 3.5)
    monkeypatch.setattr(partitions, "EVENT_PAUSE_S", 0.2)
    monkeypatch.setattr(partitions, "PAUSE_S", 0.04)
    monkeypatch.setattr(partitions, "LAST_DELIVERY_WAIT_S", 0.5)
    monkeypatch.setattr(partitions, "START_S", PATIENCE_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_before_bridge", "events"), [(False, ("long cut", "kill bridge")), (True, ("long cut",))]
)
def test_bad_network_keeps_messages_once_in_order(
    is_before_bridge: bool, events: tuple[str, ...]
) -> None:
    """The network is bad between source and bridge, or between bridge and target."""
    kind = replace(partitions.KINDS[0], is_before_bridge=is_before_bridge, events=events)
    found = partitions.run_rounds(kind, 1)
    assert found.faults() == []
    assert found.sent.total > 1000
    assert found.packets_lost > 0
    assert set(found.recovered_s) == set(kind.events)


def test_accounts_detect_lost_duplicate_and_reordered_messages() -> None:
    found = partitions.BridgeRunResult(stored_twice=2)
    for payload in found.sent.next_payloads(1, "ann", 4)[1:3][::-1]:
        found.records[1].record_delivery(payload, 0, 0.0)
    assert found.faults() == ["2 lost", "2 stored twice", "1 out of order"]
