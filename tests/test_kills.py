"""Servers that are really killed, and lose their power, lose nothing that they confirmed; and the
books that say so notice when it is not so. `python load/run.py kills` is the long form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from needs import needed  # noqa: E402

from load import kills  # noqa: E402
from load.accounts import Seen, Sent, payload  # noqa: E402

SEED = 2  # With which the first kill cuts the power.
POWER_CUTS = next(kind for kind in kills.KINDS if kind.has_cuts)
# A server that confirms without having synced anything.
LIAR = """
import os, sys
os.fsync = os.fdatasync = lambda file: None
from simplebus.cli import main
main()
"""


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    needed("cc", "gcc", "clang")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "LIFE_S", 0.2)
    monkeypatch.setattr(kills, "BURST_MAX", 40)


def test_nothing_confirmed_is_lost_through_kills_and_power_cuts() -> None:
    found = kills.lives(POWER_CUTS, 1, SEED)
    assert found.faults(may_lose=False) == []
    assert (found.rounds, found.cuts) == (1, 1)
    assert all(seen.messages for seen in found.seen)


def test_a_server_that_confirms_what_is_not_synced_is_found_out() -> None:
    found = kills.lives(POWER_CUTS, 1, SEED, serve=(sys.executable, "-c", LIAR, "serve"))
    assert found.cuts == 1
    assert any("lost" in fault for fault in found.faults(may_lose=False))


def test_the_books_tell_what_is_missing_repeated_late_or_out_of_its_turn() -> None:
    sent, seen = Sent(), Seen(1)
    assert sent.more(1, "ann", 3) == [b"ann 0", b"ann 1", b"ann 2"]
    sent.more(1, "bob", 1)
    sent.more(2, "ann", 9)
    for at, number in enumerate([0, 0, 2]):
        seen.take(payload("ann", number), at, now=10.0)
    assert seen.missing(sent) == {("ann", 1), ("bob", 0)}
    assert (seen.messages, seen.again, seen.late, seen.disordered, seen.head) == (2, 1, 0, 0, 3)
    seen.killed_at = 20.0
    seen.take(payload("ann", 1), 3, now=21.0)
    seen.take(payload("ann", 2), 2, now=21.0)
    assert (seen.messages, seen.again, seen.late, seen.disordered, seen.head) == (3, 2, 1, 1, 4)
    assert seen.missing(sent) == {("bob", 0)}


def test_what_is_lost_at_a_level_that_may_lose_is_to_be_told() -> None:
    found = kills.Found(lost=3, told=2, stored_again=1)
    assert found.faults(may_lose=True) == ["1 lost and not told"]
    assert found.faults(may_lose=False) == ["3 lost", "1 stored twice"]
