"""Tests that servers lose no confirmed message through kills and power cuts.

The accounting is tested as well: it must detect losses. `python load/run.py kills` is the long
form.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from load import kills
from load.message_accounting import DeliveryRecord, PublishedMessages, payload
from tests.support.requirements import require_program

ROOT = Path(__file__).resolve().parents[2]


SEED = 2  # With this seed, the first kill is a power cut.
POWER_CUTS = next(kind for kind in kills.KINDS if kind.has_cuts)
# A server that confirms without having synced anything.
SERVER_WITHOUT_SYNC = """
import os, sys
os.fsync = os.fdatasync = lambda file: None
from simplebus.cli import main
main()
"""


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    require_program("cc", "gcc", "clang")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "LIFE_S", 0.2)
    monkeypatch.setattr(kills, "BURST_MAX", 40)


@pytest.mark.long
def test_confirmed_messages_survive_kills_and_power_cuts() -> None:
    result = kills.run_rounds(POWER_CUTS, 1, SEED)
    assert result.faults(may_lose=False) == []
    assert (result.rounds, result.cuts) == (1, 1)
    assert all(record.messages for record in result.records)


@pytest.mark.long
def test_detects_a_server_that_confirms_before_syncing() -> None:
    result = kills.run_rounds(
        POWER_CUTS, 1, SEED, serve=(sys.executable, "-c", SERVER_WITHOUT_SYNC, "serve")
    )
    assert result.cuts == 1
    assert any("lost" in fault for fault in result.faults(may_lose=False))


def test_accounts_count_missing_repeated_late_and_disordered_messages() -> None:
    published, record = PublishedMessages(), DeliveryRecord(1)
    assert published.next_payloads(1, "ann", 3) == [b"ann 0", b"ann 1", b"ann 2"]
    published.next_payloads(1, "bob", 1)
    published.next_payloads(2, "ann", 9)
    for at, number in enumerate([0, 0, 2]):
        record.record_delivery(payload("ann", number), at, now=10.0)
    assert record.missing(published) == {("ann", 1), ("bob", 0)}
    assert (
        record.messages,
        record.repeated_count,
        record.repeated_late,
        record.out_of_order,
        record.head,
    ) == (2, 1, 0, 0, 3)
    record.killed_at = 20.0
    record.record_delivery(payload("ann", 1), 3, now=21.0)
    record.record_delivery(payload("ann", 2), 2, now=21.0)
    assert (
        record.messages,
        record.repeated_count,
        record.repeated_late,
        record.out_of_order,
        record.head,
    ) == (3, 2, 1, 1, 4)
    assert record.missing(published) == {("bob", 0)}


def test_losses_at_weaker_durability_are_reported_to_publishers() -> None:
    result = kills.RunResult(stored_twice=1)
    result.lost.update({("ann", 1): 2, ("ann", 2): 1, ("bob", 1): 2})
    result.forgotten.update({"ann": 9, "bob": 1})
    [fault] = result.faults(may_lose=True)
    assert fault.startswith("1 lost and not reported (2 of ann in class 1, 1 of ann in class 2, ")
    assert [fault.split(" (")[0] for fault in result.faults(may_lose=False)] == [
        "5 lost",
        "1 stored twice",
    ]


def test_server_variants_alternate(tmp_path: Path) -> None:
    servers = kills._ServerSequence(kills.KINDS[1], tmp_path, Random(1), kills.SERVE, ())
    commands = [servers._command() for _ in range(6)]
    assert commands[:3] == commands[3:]
    assert ["load.small_server" in command for command in commands[:3]] == [False, True, True]
    assert ["spill" in command for command in commands[:3]] == [False, False, True]
